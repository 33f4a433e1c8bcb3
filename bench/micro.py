"""The table: every operation of the catalogue on both builds, in interleaved runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pyperf

from bench.builds import BUILDS, WorkerFailedError, run_worker
from bench.results import Row


def measure_row(title: str, arguments: Sequence[str], rounds: int, builds: Sequence[str] = BUILDS) -> Row:
    """One title, `rounds` workers on each build in turn. Raises WorkerFailedError."""
    row = Row(title, "")
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
