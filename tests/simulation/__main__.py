"""`python -m tests.simulation --ops N --seed S [--shape NAME]`: simulate from a seed on, and print the table of outcomes."""

from __future__ import annotations

import argparse
from collections import Counter
from time import perf_counter

from kv_cache_manager_v2 import build_info
from tests.simulation.setups import SHAPES
from tests.simulation.simulator import simulate, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--ops", type=int, default=20000, help="operations in all")
    parser.add_argument("--seed", type=int, default=0, help="first seed; each further run takes the next one")
    parser.add_argument("--per-run", type=int, default=4000, help="operations of each run, hence of each configuration")
    parser.add_argument("--shape", choices=SHAPES, default=None)
    parser.add_argument("--faults", choices=("yes", "no"), default=None)
    options = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    done = 0
    seed = options.seed
    start = perf_counter()
    while done < options.ops:
        operations = min(options.per_run, options.ops - done)
        report = simulate(seed, operations, options.shape, None if options.faults is None else options.faults == "yes")
        counts.update(report.counts)
        done += operations
        print(f"seed {seed}: {operations} operations, trace {report.trace:08x}", flush=True)
        seed += 1
    seconds = perf_counter() - start
    print(table(counts))
    print(f"{done:,} operations in {seconds:.1f} s, {seconds / done * 1e6:.0f} us each; {build_info()}")


if __name__ == "__main__":
    main()
