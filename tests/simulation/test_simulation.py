"""The whole manager under a seeded load of every operation, with every byte, index, count and length checked as it goes.

Each test runs configurations of its own; which outcomes must have come up, and how often, is checked for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import pytest

from tests.simulation.outcomes import Counts, table, too_rare
from tests.simulation.setups import SHAPES
from tests.simulation.simulator import SimulationError, simulate
from tests.support.engine import Engine, Indices, Plane, Words

VOLUMES = 2
RUNS = 2 * len(SHAPES)
OPERATIONS = 3200  # of each run: 2 x 18 x 3200 = 115,200 in all


def run_volume(first: int, runs: int, operations: int) -> Counts:
    counts: Counts = Counter()
    for seed in range(first, first + runs):
        counts.update(simulate(seed, operations).counts)
    print(table(counts))
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("volume", range(VOLUMES))
def test_simulation_of_the_whole_manager(volume: int) -> None:
    """No byte is wrong, no slot is lost, no refusal changes anything, and every kind of pressure has come up."""
    counts = run_volume(1000 * volume, RUNS, OPERATIONS)
    rare = too_rare(counts, 1)
    assert not rare, f"came up too seldom to prove anything: {rare}"


def test_one_seed_reproduces_a_run() -> None:
    """Two runs of a seed do the same in every detail that the trace has."""
    assert simulate(5, 400).trace == simulate(5, 400).trace
    assert simulate(5, 400).trace != simulate(14, 400).trace


def test_a_failure_says_how_to_see_it_again() -> None:
    """Wrong bytes are found, and the message names the seed, the operation and the last operations."""
    honest = Engine._write

    def wrong(self: Engine, planes: list[tuple[Plane, Indices]], old: Words, new: Words, number: Hashable) -> None:
        honest(self, planes, old, new + 1, number)

    try:
        Engine._write = wrong  # type: ignore[method-assign]
        with pytest.raises(SimulationError, match=r"seed 2, operation \d+: .*wrong bytes(.|\n)*last operations"):
            simulate(2, 400, faults=False)
    finally:
        Engine._write = honest  # type: ignore[method-assign]
