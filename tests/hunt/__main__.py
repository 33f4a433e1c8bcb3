"""A long hunt: `python -m tests.hunt --ops N --seed S [--schedule eager] [--model full] [--per-run 4000] [--keep-going]`."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import warnings
from collections import Counter
from time import perf_counter

from kv_cache_manager_v2 import build_info
from tests.hunt.base import Found
from tests.hunt.counting import every, pairs, run, workload
from tests.hunt.hunter import Hunter
from tests.hunt.setups import MODELS, SCHEDULES, draw


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hunt", description=__doc__)
    parser.add_argument("--ops", type=int, default=20_000, help="operations in all")
    parser.add_argument("--seed", type=int, default=0, help="first seed; each further run takes the next one")
    parser.add_argument("--per-run", type=int, default=4000, help="operations of each run, hence of each configuration")
    parser.add_argument("--schedule", choices=SCHEDULES, default=None, help="by default all of them in turn")
    parser.add_argument("--model", choices=MODELS, default=None)
    parser.add_argument("--faults", choices=("yes", "no"), default=None)
    parser.add_argument(
        "--without", action="append", default=[], help="a habit that the engine does not have: views, handles_return"
    )
    parser.add_argument("--keep-going", action="store_true", help="go on after a finding; the exit status is 1 all the same")
    parser.add_argument(
        "--count", type=int, default=0, help="instead, refuse the driver's calls one by one: every so many of the points"
    )
    parser.add_argument("--lenient", action="store_true", help="take over lengths that a refused call has changed")
    options = parser.parse_args()
    warnings.simplefilter("ignore", ResourceWarning)
    sys.unraisablehook = lambda _unraisable: None  # managers that a finding has left broken
    if options.count:
        return count(options)
    schedules = (options.schedule,) if options.schedule else SCHEDULES
    faults = None if options.faults is None else options.faults == "yes"
    outcomes: Counter[str] = Counter()
    done = findings = 0
    start = perf_counter()
    seed = options.seed
    with tempfile.TemporaryDirectory(prefix="kvcm-hunt-") as folder:
        while done < options.ops:
            schedule = schedules[seed % len(schedules)]
            setup = draw(seed, schedule, options.model, faults, **dict.fromkeys(options.without, False))
            hunter = Hunter(setup, folder)
            hunter.lenient = options.lenient
            try:
                hunter.run(min(options.per_run, options.ops - done))
            except Found as found:
                findings += 1
                print(f"FOUND {found}", flush=True)
                if not options.keep_going:
                    return 1
            outcomes.update(hunter.outcomes)
            done += hunter.operations
            seed += 1
    seconds = perf_counter() - start
    print(", ".join(f"{name} {count:,}" for name, count in sorted(outcomes.items())))
    print(
        f"{done:,} operations from seed {options.seed} on in {seconds:.0f} s ({done / seconds:,.0f} a second), {findings} findings"
    )
    print(build_info())
    return 1 if findings else 0


def count(options: argparse.Namespace) -> int:
    """Every driver call of a workload refused, once, twice and for ever, with each exception; then pairs."""
    kinds: Counter[str] = Counter()
    done = 0
    start = perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvcm-hunt-") as folder:
        for model in (options.model,) if options.model else MODELS:
            setup = workload(model)
            plain = run(setup, folder, [])
            points = [*every(plain.calls, plain.end_calls), *pairs(plain.calls, plain.calls, options.seed)]
            print(f"{model}: {plain.calls} calls, {plain.end_calls} of them of the shutdown, {len(points)} points", flush=True)
            for point in points[options.seed % options.count :: options.count]:
                done += 1
                try:
                    run(setup, folder, point)
                except Found as found:
                    kind = re.sub(r"0x[0-9a-f]+|\d+", "N", str(found).split("): ")[-1])[:120]
                    if kind not in kinds or options.keep_going:
                        print(f"FOUND {found}", flush=True)
                    kinds[kind] += 1
    for kind, number in kinds.most_common():
        print(f"{number:6} {kind}")
    print(f"{done:,} points in {perf_counter() - start:.0f} s, {sum(kinds.values())} findings; {build_info()}")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
