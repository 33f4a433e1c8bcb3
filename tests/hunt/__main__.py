"""A long hunt: `python -m tests.hunt --ops N --seed S [--schedule eager] [--model full] [--per-run 4000] [--keep-going]`."""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import warnings
from collections import Counter
from time import perf_counter

from kv_cache_manager_v2 import build_info
from tests.hunt.base import Found
from tests.hunt.chapters import WORKLOADS
from tests.hunt.counting import alone, run, together
from tests.hunt.hunter import Hunter
from tests.hunt.interrupts import Calls, InterruptedHunter, Places, Source, Timer, follow
from tests.hunt.setups import MODELS, SCHEDULES, Setup, draw
from tests.hunt.starving import WELL, starve
from tests.hunt.streams import growth, serve


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
        "--count", type=int, default=0, help="instead, refuse the driver's calls one by one: every so many of the cases"
    )
    parser.add_argument("--streams", type=int, default=0, help="instead, serve so many requests, each with a stream of its own")
    parser.add_argument("--starve", type=int, default=0, help="instead, so many child processes whose calls find no memory")
    parser.add_argument("--interrupts", choices=("timer", "places", "calls"), default=None, help="interrupt calls at random")
    parser.add_argument("--lenient", action="store_true", help="take over lengths that a refused call has changed")
    options = parser.parse_args()
    warnings.simplefilter("ignore", ResourceWarning)
    sys.unraisablehook = lambda _unraisable: None  # managers that a finding has left broken
    if options.count:
        return count(options)
    if options.streams:
        return streams(options)
    if options.starve:
        ended = starve(options.seed, options.starve, 400)
        print(", ".join(f"{how} {number:,}" for how, number in sorted(ended.items())), build_info())
        return 1 if set(ended) - WELL else 0
    schedules = (options.schedule,) if options.schedule else SCHEDULES
    faults = None if options.faults is None else options.faults == "yes"
    outcomes: Counter[str] = Counter()
    done = findings = 0
    start = perf_counter()
    seed = options.seed
    with tempfile.TemporaryDirectory(prefix="kvcm-hunt-") as folder:
        while done < options.ops:
            schedule = schedules[seed % len(schedules)]
            without = dict.fromkeys(options.without, False)
            if options.interrupts == "calls":
                without["handles_return"] = False  # one device in front of the emulated one
            setup = draw(seed, schedule, options.model, faults, **without)
            size = min(options.per_run, options.ops - done)
            source = interrupts(options.interrupts, setup, size)
            hunter = Hunter(setup, folder) if source is None else InterruptedHunter(setup, folder, source)
            hunter.lenient = options.lenient
            try:
                follow(hunter, size)
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


def interrupts(kind: str | None, setup: Setup, operations: int) -> Source | None:
    """Where the interrupts of a run come from."""
    rng = random.Random(f"interrupts {setup.seed}")
    if kind == "timer":
        return Timer(lambda: rng.random() ** 2 * 0.001 if rng.random() < 0.2 else 0.0)
    if kind == "calls":
        return Calls(rng.sample(range(10 * operations), max(1, operations // 20)), setup)
    if kind == "places":
        return Places(rng.sample(range(100 * operations), 3))
    return None


def streams(options: argparse.Namespace) -> int:
    """Requests with a stream each on every schedule; what grew after the first tenth of them."""
    grown = ""
    with tempfile.TemporaryDirectory(prefix="kvcm-hunt-") as folder:
        for schedule in (options.schedule,) if options.schedule else SCHEDULES:
            for handles_return in (False, True):
                start = perf_counter()
                footprints = serve(schedule, options.streams, folder, handles_return, colder=1)
                what = growth(footprints, 4 << 20)
                grown = grown or what
                seconds = perf_counter() - start
                handles = "that come back" if handles_return else "that are new"
                print(f"{options.streams:,} requests on {schedule}, handles {handles}, {seconds:.0f} s: {what or 'flat'}")
                print(f"  first tenth {footprints[0]}\n  last tenth  {footprints[-1]}", flush=True)
    print(build_info())
    return 1 if grown else 0


def count(options: argparse.Namespace) -> int:
    """Every driver call of each workload refused, alone and with a second one."""
    kinds: Counter[str] = Counter()
    points = done = 0
    start = perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvcm-hunt-") as folder:
        for workload in WORKLOADS:
            if options.model not in (None, workload.model):
                continue
            plain = run(workload, folder, [])
            cases = [*alone(plain), *together(plain)]
            points += len(plain.names) + len(plain.end_names)
            print(
                f"{workload.describe()}: {len(plain.names)} calls and {len(plain.end_names)} of the shutdown, {len(cases)} cases",
                flush=True,
            )
            for case in cases[options.seed % options.count :: options.count]:
                done += 1
                try:
                    run(workload, folder, case)
                except Found as found:
                    kind = re.sub(r"0x[0-9a-f]+|\d+", "N", str(found).split("): ")[-1])[:120]
                    if kind not in kinds or options.keep_going:
                        print(f"FOUND {found}", flush=True)
                    kinds[kind] += 1
    for kind, number in kinds.most_common():
        print(f"{number:6} {kind}")
    print(f"{points:,} points, {done:,} cases in {perf_counter() - start:.0f} s, {sum(kinds.values())} findings; {build_info()}")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
