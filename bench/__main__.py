"""`python -m bench [PART ...] [--quick]`: measure, print the tables, write JSON. See the Makefile's bench targets."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.builds import BUILDS, ROOT, WorkerFailedError, is_built
from bench.catalogue import OPERATIONS
from bench.clock import Clock
from bench.copies import copies_table, measure_copies
from bench.growth import growth_json, growth_table, measure_growth, plot
from bench.growth_axes import AXES
from bench.machine import describe
from bench.memory import measure_memory, memory_table
from bench.micro import measure_all
from bench.results import as_json, heading, table, write

RESULTS = ROOT / "bench" / "results"


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


def run_growth(options: argparse.Namespace, clock: Clock) -> None:
    machine = describe()
    curves = measure_growth(options.axes or list(AXES), options.only, options.quick, clock.say)
    print(heading("Growth", machine))
    print(growth_table(curves))
    if curves:
        write(options.out / "growth.json", {"machine": machine, "curves": growth_json(curves), "quick": options.quick})
        print("\n" + "\n".join(plot(curves, options.out)))


def run_copies(options: argparse.Namespace, clock: Clock) -> None:
    machine = describe()
    rows = measure_copies(options.quick)
    clock.say("copies")
    print(heading("Copies", machine))
    print(copies_table(rows))
    write(options.out / "copies.json", {"machine": machine, "rows": rows, "quick": options.quick})


def run_memory(options: argparse.Namespace, clock: Clock) -> None:
    machine = describe()
    found = measure_memory(options.quick, options.builds)
    clock.say("memory")
    print(heading("Memory", machine))
    print(memory_table(found))
    write(options.out / "memory.json", {"machine": machine, "bytes": found, "quick": options.quick})


PARTS = {"micro": run_micro, "memory": run_memory, "copies": run_copies, "growth": run_growth}
QUICK_PARTS = ("micro", "memory", "copies")


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description="Measure the manager on both builds.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all without any")
    parser.add_argument("--quick", action="store_true", help="few repetitions and small sizes: whether it runs, not how fast")
    parser.add_argument("--only", metavar="TEXT", default="", help="titles that contain TEXT")
    parser.add_argument("--axis", dest="axes", action="append", choices=list(AXES), help="only these growth curves")
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
    if not is_built():
        parser.error("the package is not built: run `make bench`")
    if options.out is None:
        whole = not (options.quick or options.only or options.device or options.builds != BUILDS)
        options.out = RESULTS if whole else ROOT / "build" / "bench"
    clock = Clock()
    status = 0
    for part in options.parts or (QUICK_PARTS if options.quick else PARTS):
        try:
            PARTS[part](options, clock)
        except WorkerFailedError as failure:
            print(f"bench: {part}: {failure}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
