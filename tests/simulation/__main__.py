"""A soak: `python -m tests.simulation --ops N --seed S [--shape NAME] [--jobs J]`.

Runs configurations from a seed on, each for `--per-run` operations, and prints the table of outcomes. With 500,000 operations or
more it fails if any outcome came up less than 100 times.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from time import perf_counter

from kv_cache_manager_v2 import build_info
from tests.simulation.outcomes import Counts, table, too_rare
from tests.simulation.setups import SHAPES
from tests.simulation.simulator import Report, simulate

SOAK = 500_000  # operations from which on every outcome must have come up


def run(seed: int, operations: int, shape: str | None, faults: bool | None) -> Report:
    logging.disable(logging.CRITICAL)  # quotas are raised to their minima, and transfers hang, on purpose
    return simulate(seed, operations, shape, faults)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--ops", type=int, default=20_000, help="operations in all")
    parser.add_argument("--seed", type=int, default=0, help="first seed; each further run takes the next one")
    parser.add_argument("--per-run", type=int, default=4000, help="operations of each run, hence of each configuration")
    parser.add_argument("--shape", choices=SHAPES, default=None)
    parser.add_argument("--faults", choices=("yes", "no"), default=None)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    runs = -(-options.ops // options.per_run)
    faults = None if options.faults is None else options.faults == "yes"
    counts: Counts = Counter()
    done = 0
    start = perf_counter()
    with ProcessPoolExecutor(options.jobs) as pool:
        seeds = range(options.seed, options.seed + runs)
        futures = [pool.submit(run, seed, options.per_run, options.shape, faults) for seed in seeds]
        for future in futures:
            report = future.result()
            counts.update(report.counts)
            done += report.operations
            print(f"seed {report.seed}: {report.operations} operations, trace {report.checksum():08x}", flush=True)
    seconds = perf_counter() - start
    print(table(counts))
    print(f"{done:,} operations from seed {options.seed} on in {seconds:.0f} s; {build_info()}")
    rare = too_rare(counts, 100) if done >= SOAK and options.shape is None and options.faults is None else {}
    if rare:
        print(f"came up less than 100 times: {rare}", file=sys.stderr)
    return 1 if rare else 0


if __name__ == "__main__":
    sys.exit(main())
