"""The arithmetic of making room, without a device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.storage.planner import Shortage, exchange_stalls, intakes, shortfall


def test_what_levels_take_in_held_pages_adds_up_from_below() -> None:
    """A level takes in held pages where slots are open or pages may be dropped, and passes the rest down."""
    assert intakes(0, [9, 1, 2], [9, 3, 4]) == [0, 10, 6, 0]
    assert intakes(1, [9, 1, 2], [9, 3, 4]) == [0, 0, 6, 0]
    assert intakes(0, [5], [5]) == [0, 0]


@pytest.mark.parametrize(
    ("goal", "open_slots", "droppable", "held", "room", "missing"),
    [(3, 3, 0, 0, 0, 0), (3, 1, 1, 1, 1, 0), (3, 1, 1, 5, 0, 1), (3, 0, 0, 5, 2, 1), (3, 0, 9, 0, 0, 0), (0, 0, 0, 0, 0, 0)],
)
def test_shortfall(goal: int, open_slots: int, droppable: int, held: int, room: int, missing: int) -> None:
    assert shortfall(goal, open_slots, droppable, held, room) == missing


def test_full_tiers_stall_without_one_free_slot() -> None:
    """Three pages go up, three down: one free slot anywhere between them is enough."""
    assert exchange_stalls(0, [0, 0], [0, 3], [[], [0, 0, 0]])
    assert not exchange_stalls(0, [1, 0], [0, 3], [[], [0, 0, 0]])
    assert not exchange_stalls(0, [0, 1], [0, 3], [[], [0, 0, 0]])
    assert not exchange_stalls(0, [0, 3], [0, 0], [[], [0, 0, 0]])


def test_chain_over_three_levels() -> None:
    """Disk to GPU, GPU to host, host to disk: the only free slot may be anywhere in the ring."""
    ring: list[list[int]] = [[], [0, 0], [1, 1]]
    assert exchange_stalls(0, [0, 0, 0], [0, 0, 2], ring)
    for level in range(3):
        free = [1 if at == level else 0 for at in range(3)]
        assert not exchange_stalls(0, free, [0, 0, 2], ring)


@given(st.integers(1, 9), st.integers(0, 3), st.integers(0, 3))
def test_two_full_levels_stall_exactly_when_nothing_is_free(pairs: int, free_above: int, free_below: int) -> None:
    free = [free_above, free_below]
    assert exchange_stalls(0, free, [0, pairs], [[], [0] * pairs]) == (free_above + free_below == 0)
    assert free == [free_above, free_below]


def test_shortage_reads_well() -> None:
    assert repr(Shortage(1, 0, 3, True)) == "Shortage(pool group 1, level 0: 3 slots short, permanent)"
    assert "for now" in repr(Shortage(0, 2, 1, False))
    with pytest.warns(DeprecationWarning, match="over_limit"):
        assert Shortage(0, 0, 1, False, True).gate
