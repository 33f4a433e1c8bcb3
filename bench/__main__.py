"""`python -m bench [PART ...] [--quick]`: measure, print the tables, write JSON. See the Makefile's bench targets."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bench.builds import BUILDS, NAMES, ROOT, missing_builds
from bench.catalogue import OPERATIONS
from bench.machine import describe
from bench.micro import measure_all
from bench.results import as_json, heading, table, write

RESULTS = ROOT / "bench" / "results"


class Clock:
    """Progress lines on the error stream, with the seconds since the start."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def say(self, line: str) -> None:
        print(f"[{time.perf_counter() - self.start:5.0f} s] {line}", file=sys.stderr, flush=True)


def run_micro(options: argparse.Namespace, clock: Clock) -> None:
    machine = describe()
    arguments = [f"--values={3 if options.quick else 9}"]
    if options.device:
        arguments.append(f"--device={options.device}")
    if options.quick:
        arguments.append("--quick")
    chosen = [title for title in OPERATIONS if options.only in title]
    rows = measure_all(chosen, arguments, options.rounds or (1 if options.quick else 5), clock.say, options.builds)
    print(heading("Operations", machine))
    print(table(rows))
    if rows:
        write(options.out / "micro.json", as_json(rows, machine, quick=options.quick))


PARTS = {"micro": run_micro}


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description="Measure the manager on both builds.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all without any")
    parser.add_argument("--quick", action="store_true", help="few repetitions and small sizes: whether it runs, not how fast")
    parser.add_argument("--only", metavar="TEXT", default="", help="titles that contain TEXT")
    parser.add_argument("--rounds", type=int, metavar="N", default=0, help="workers on each build")
    parser.add_argument("--build", dest="builds", action="append", choices=BUILDS, help="only this one")
    parser.add_argument("--device", choices=("free", "emulated", "cuda"), default="", help="default: one that costs nothing")
    parser.add_argument(
        "--out", type=Path, metavar="DIRECTORY", help="where the JSON goes (default: bench/results, or build/bench of a quick run)"
    )
    options = parser.parse_args()
    wrong = [part for part in options.parts if part not in PARTS]
    if wrong:
        parser.error(f"no such part: {', '.join(wrong)}; there are {', '.join(PARTS)}")
    options.builds = tuple(options.builds or BUILDS)
    missing = [NAMES[build] for build in missing_builds() if build in options.builds]
    if missing:
        parser.error(f"the {' and '.join(missing)} build is not there: run `make bench`")
    if options.out is None:
        whole = not (options.quick or options.only or options.device or options.builds != BUILDS)
        options.out = RESULTS if whole else ROOT / "build" / "bench"
    clock = Clock()
    for part in options.parts or PARTS:
        PARTS[part](options, clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
