"""The process that measures one operation on one build: `python -m bench.worker`, started by `builds.py`.

Rule: it refuses to measure any other build than the one that it was started for. pyperf takes the runs, warm-ups and metadata.
"""

from __future__ import annotations

import argparse
import os
import sys

import pyperf

from bench.builds import BUILD_VARIABLE
from bench.catalogue import OPERATIONS, Operation
from bench.growth_axes import growth_operation
from kv_cache_manager_v2.backend import BACKEND


def check_build() -> None:
    expected = os.environ.get(BUILD_VARIABLE)
    if expected != BACKEND:
        sys.exit(f"bench.worker: {BUILD_VARIABLE} is {expected}, but the package runs {BACKEND}")


def measure(operation: Operation, quick: bool, device: str, values: int, warmups: int, output: str) -> None:
    """Leave one pyperf run of so many values in the output file."""
    setting = operation.setting(quick)
    fields = {**vars(setting), "device": device} if device else vars(setting)
    work = operation.work(setting.of(fields))

    def time_func(loops: int) -> float:
        return sum([work.timed() for _loop in range(loops)])

    runner = pyperf.Runner(metadata={"unit": "second", "per": work.unit, "setting": repr(setting)}, show_name=False)
    runner.parse_args(["--worker", "--quiet", "--loops=1", f"--warmups={warmups}", f"--values={values}", "--output", output])
    runner.bench_time_func(operation.title, time_func)
    work.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.worker")
    parser.add_argument("title")
    parser.add_argument("--point", default="", help="a growth curve's point: AXIS=VALUE")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="")
    parser.add_argument("--values", type=int, default=9)
    parser.add_argument("--warmups", type=int, default=1)
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    check_build()
    operation = growth_operation(options.title, options.point) if options.point else OPERATIONS[options.title]
    measure(operation, options.quick, options.device, options.values, options.warmups, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
