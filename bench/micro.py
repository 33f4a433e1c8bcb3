"""The table: every operation of the catalogue on both builds, in interleaved runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pyperf

from bench.builds import BUILDS, WorkerFailedError, run_worker
from bench.catalogue import OPERATIONS
from bench.results import Row

LARGE_ROUNDS: Final = 2  # of rows that spend minutes on filling the cache, and little on what is measured
LARGE: Final = frozenset({title for title, row in OPERATIONS.items() if row.setting(quick=False).cached >= 1_000_000})


def measure_row(title: str, arguments: Sequence[str], rounds: int, builds: Sequence[str] = BUILDS) -> Row:
    """One title, `rounds` workers on each build in turn. Raises WorkerFailedError."""
    row = Row(title, "")
    if title in LARGE:
        rounds = min(rounds, LARGE_ROUNDS)
    with tempfile.TemporaryDirectory(prefix="kvcm-bench-") as directory:
        for number in range(rounds):
            order = builds if number % 2 == 0 else tuple(reversed(builds))
            for build in order:
                output = Path(directory) / f"{build}-{number}.json"
                run_worker(build, "bench.worker", [title, *arguments, "--output", str(output)])
                found = pyperf.Benchmark.load(str(output))
                row.per = found.get_metadata()["per"]
                row.values.setdefault(build, []).extend(found.get_values())
    return row


def measure_all(
    titles: Sequence[str], arguments: Sequence[str], rounds: int, say: Callable[[str], None], builds: Sequence[str] = BUILDS
) -> list[Row]:
    """All titles; one whose worker fails is reported and left out."""
    rows: list[Row] = []
    for title in titles:
        try:
            rows.append(measure_row(title, arguments, rounds, builds))
            say(title)
        except WorkerFailedError as failure:
            say(f"{title}: FAILED\n{failure}")
    return rows
