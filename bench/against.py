"""`python -m bench.against CHECKOUT`: compares this tree's build with that of another checkout, in interleaved pairs.

Rule: each worker runs from its own checkout, with that checkout's benchmark code and build. A pair is two workers, one after the
other, in an order that alternates; the figure is the median of the pairs' ratios, so a machine that slows down in between
cancels out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

import pyperf

from bench.builds import BUILD_VARIABLE, BUILDS, NAMES, ROOT, WorkerFailedError
from bench.catalogue import OPERATIONS
from bench.clock import Clock
from bench.machine import describe
from bench.results import heading, readable, write

# What the engine waits for: the rows that a change of the inside must not slow down.
WATCHED: Final = (
    "decode step, calls",
    "decode step, batch",
    "decode step, calls, full + window",
    "decode step, batch, full + window",
    "commit cold",
    "commit cold, events pending",
    "resize cold",
    "evict a page, 8,000 leaves",
    "probe",
    "create, resume, close",
    "suspend, resume",
    "resume 256 pages from host",
)


class Pairs(NamedTuple):
    """Medians of one title's workers in seconds, pair by pair."""

    title: str
    here: list[float]
    there: list[float]

    def ratio(self) -> float:
        """Time here by time there; below 1 is faster here."""
        return statistics.median(self.ratios())

    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.here, self.there, strict=True)]


def measure_one(checkout: Path, build: str, title: str, output: Path) -> float:
    """Median seconds of one worker. Raises WorkerFailedError."""
    directory = checkout / "build" / build
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(directory), str(checkout)]),
        BUILD_VARIABLE: NAMES[build],
        "KVCM_BENCH_BUILD": build,  # the same for the workers of older checkouts
        "PYTHONHASHSEED": "0",
    }
    command = [sys.executable, "-m", "bench.worker", title, "--output", str(output)]
    done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True)
    if done.returncode != 0:
        raise WorkerFailedError(f"{title} in {checkout}:\n{done.stderr.strip()[-2000:]}")
    return float(statistics.median(pyperf.Benchmark.load(str(output)).get_values()))


def measure_pairs(other: Path, build: str, title: str, count: int) -> Pairs:
    """`count` pairs of workers of one title."""
    pairs = Pairs(title, [], [])
    with tempfile.TemporaryDirectory(prefix="kvcm-bench-") as directory:
        for number in range(count):
            arms = [(ROOT, pairs.here), (other, pairs.there)]
            for arm, (checkout, values) in enumerate(arms if number % 2 == 0 else arms[::-1]):
                values.append(measure_one(checkout, build, title, Path(directory) / f"{number}-{arm}.json"))
    return pairs


def pairs_table(rows: list[Pairs]) -> str:
    """Medians, the median ratio and the range of the ratios of each title."""
    width = max(len(row.title) for row in rows)
    lines = [f"{'operation':<{width}}  {'here':>11}  {'there':>11}  {'ratio':>6}  range of the ratios"]
    for row in rows:
        ratios = row.ratios()
        lines.append(
            f"{row.title:<{width}}  {readable(statistics.median(row.here))}  {readable(statistics.median(row.there))}"
            f"  {row.ratio():>6.3f}  {min(ratios):.3f} to {max(ratios):.3f}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.against", description="Compare this tree's build with another checkout's.")
    parser.add_argument("checkout", type=Path, help="its build directory must hold the same build as this one's")
    parser.add_argument("--build", choices=BUILDS, default="compiled")
    parser.add_argument("--pairs", type=int, default=7, metavar="N")
    parser.add_argument("--only", metavar="TEXT", default="", help="titles that contain TEXT, of the whole catalogue")
    options = parser.parse_args()
    other = options.checkout.resolve()
    for checkout in (ROOT, other):
        if not (checkout / "build" / options.build / "kv_cache_manager_v2").is_dir():
            parser.error(f"{checkout} has no {options.build} build: run `make test-{options.build}` there")
    titles = [title for title in OPERATIONS if options.only in title] if options.only else list(WATCHED)
    clock = Clock()
    rows: list[Pairs] = []
    for title in titles:
        try:
            rows.append(measure_pairs(other, options.build, title, options.pairs))
        except WorkerFailedError as failure:
            print(f"bench.against: {failure}", file=sys.stderr)
            return 1
        clock.say(f"{title}: {rows[-1].ratio():.3f}")
    machine = describe()
    print(heading(f"This tree compared with {other.name}, {options.pairs} pairs", machine))
    print(pairs_table(rows))
    figures = {row.title: {"here_s": row.here, "there_s": row.there, "ratio": row.ratio()} for row in rows}
    write(ROOT / "build" / "bench" / "against.json", {"machine": machine, "figures": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
