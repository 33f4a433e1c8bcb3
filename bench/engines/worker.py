"""The process that runs vLLM's scheduler: `python -m bench.engines.worker`, started by `bench.engines`.

Rule: each run is a fork of its own of a process that has imported vLLM and done nothing else, so no run finds what another left.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.clock import Clock
from bench.engines.adapter import VllmCacheManager
from bench.engines.arms import arms_for, make_arm
from bench.engines.cases import Case, checks, timings
from bench.engines.serving import Outcome, serve
from kv_cache_manager_v2.backend import BACKEND


def forked(task: Callable[[], dict[str, object]], output: Path) -> dict[str, object]:
    """Run a task in a fork. What it returned; exits if it raised."""
    child = os.fork()
    if child == 0:
        try:
            output.write_text(json.dumps(task()))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if status != 0:
        sys.exit(f"a run ended with status {os.waitstatus_to_exitcode(status)}")
    record: dict[str, object] = json.loads(output.read_text())
    return record


def run(case: Case, arm: str, checked: bool) -> Outcome:
    scheduler, hashed = make_arm(arm, case.setup)
    outcome = serve(scheduler, case.setup, case.work(), hashed, checked, case.max_steps)
    manager = scheduler.kv_cache_manager
    if checked and isinstance(manager, VllmCacheManager):
        manager.check_idle()
    return outcome


def check(case: Case) -> dict[str, object]:
    """The same work over vLLM's manager and over ours, each position checked."""
    theirs, ours = run(case, "vLLM", True), run(case, "ours", True)
    pairs = zip(theirs.trace, ours.trace, strict=False)
    return {
        "steps": [len(theirs.trace), len(ours.trace)],
        "hits": [theirs.hits, ours.hits],
        "prompt_tokens": theirs.prompts,
        "preempted": [theirs.preempted, ours.preempted],
        "first_difference": next((number for number, (one, other) in enumerate(pairs) if one != other), None),
        "same_answers": theirs.answers == ours.answers,
        "errors": [theirs.errors, ours.errors],
    }


def time(case: Case, arm: str) -> dict[str, object]:
    outcome = run(case, arm, False)
    skipped = case.skipped
    return {
        "schedule": outcome.schedule[skipped:],
        "update": outcome.update[skipped:],
        "add": outcome.add,
        "steps": len(outcome.trace),
        "running": sum([len(step) for step in outcome.trace[skipped:]]) / max(len(outcome.trace) - skipped, 1),
        "hits": outcome.hits,
        "prompt_tokens": outcome.prompts,
        "preempted": outcome.preempted,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.engines.worker")
    parser.add_argument("part", choices=("check", "time"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    clock = Clock()
    gc.collect()
    gc.freeze()
    results: dict[str, object] = {"backend": BACKEND}
    chosen = [case for case in (checks if options.part == "check" else timings)(options.quick) if options.only in case.title]
    scratch = options.output.with_suffix(".run")
    if options.part == "check":
        for case in chosen:
            results[case.title] = {**forked(partial(check, case), scratch), "tight": case.tight}
        clock.say(f"{len(chosen)} workloads checked")
    else:
        for case in chosen:
            arms = arms_for(case.setup, case.max_steps > 0)
            runs: dict[str, list[object]] = {arm: [] for arm in arms}
            for number in range(options.rounds):
                for arm in arms if number % 2 == 0 else reversed(arms):
                    runs[arm].append(forked(partial(time, case, arm), scratch))
            results[case.title] = runs
            clock.say(case.title)
    options.output.write_text(json.dumps(results))
    scratch.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
