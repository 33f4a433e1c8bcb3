"""`python -m bench.engines`: vLLM's schedulers over our manager and over their own: the same schedules, and what a step costs.

vLLM's wheel is downloaded and unpacked without its kernels; what it imports is installed in an environment under build/engines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from bench.builds import BUILD_VARIABLE, PACKAGE_FOLDER, ROOT, WorkerFailedError, is_built
from bench.clock import Clock
from bench.engines import ARMS
from bench.machine import describe
from bench.results import heading, percentile, write
from bench.wheels import Environment, UnavailableError

WHEEL: Final = "vllm==0.33.0"
ENVIRONMENT: Final = Environment(ROOT / "build" / "engines")
SOURCES: Final = ENVIRONMENT.home / "vllm_src"
REQUIREMENTS: Final = Path(__file__).resolve().parent / "requirements.txt"


def prepare() -> None:
    """Make the environment, if it is not there or its requirements have changed. Raises UnavailableError."""
    stamp = ENVIRONMENT.home / "stamp"
    if stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text():
        return
    ENVIRONMENT.install(["-r", str(REQUIREMENTS)], "what vLLM imports cannot be had")
    ENVIRONMENT.unpack(WHEEL, SOURCES)
    stamp.write_text(REQUIREMENTS.read_text())


def run_worker(part: str, arguments: list[str]) -> dict[str, Any]:
    """The record of a worker. Raises WorkerFailedError."""
    output = ENVIRONMENT.home / f"{part}.json"
    paths = os.pathsep.join([str(SOURCES), str(PACKAGE_FOLDER), str(ROOT)])
    command = [str(ENVIRONMENT.python), "-m", "bench.engines.worker", part, "--output", str(output), *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, BUILD_VARIABLE: "compiled", "PYTHONPATH": paths, "PYTHONHASHSEED": "0"},
        cwd=ENVIRONMENT.home,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise WorkerFailedError(f"{part}:\n{done.stderr.strip()[-2000:]}")
    record: dict[str, Any] = json.loads(output.read_text())
    return record


def faults(checks: dict[str, Any]) -> list[str]:
    """What must not be: wrong bytes, other answers, and other schedules or hits where nothing is short."""
    found: list[str] = []
    for title, case in checks.items():
        found += [f"{title}: {error}" for error in case["errors"][1]]
        if not case["same_answers"]:
            found.append(f"{title}: the answers differ")
        if not case["tight"] and (case["first_difference"] is not None or case["hits"][0] != case["hits"][1]):
            found.append(f"{title}: the schedules differ from step {case['first_difference']} on; hits {case['hits']}")
    return found


def check_table(checks: dict[str, Any]) -> str:
    lines = [f"{'workload (vLLM / ours)':<48}  {'steps':>9}  {'hit tokens':>15}  {'preempted':>9}  {'errors':>6}  same schedule"]
    for title, case in checks.items():
        pairs = {name: "/".join([str(value) for value in case[name]]) for name in ("steps", "hits", "preempted")}
        errors = "/".join([str(len(errors)) for errors in case["errors"]])
        first = case["first_difference"]
        same = "yes" if first is None else f"up to step {first}"
        lines.append(f"{title:<48}  {pairs['steps']:>9}  {pairs['hits']:>15}  {pairs['preempted']:>9}  {errors:>6}  {same}")
    return "\n".join(lines)


def figures(runs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By arm: milliseconds of schedule() + update_from_output() of a step, over all rounds, and what happened in the first one."""
    found: dict[str, dict[str, float]] = {}
    for arm, rounds in runs.items():
        both = [1e3 * (one + other) for record in rounds for one, other in zip(record["schedule"], record["update"], strict=False)]
        first = rounds[0]
        found[arm] = {
            "median_ms": statistics.median(both),
            "p90_ms": percentile(both, 0.9),
            "schedule_ms": 1e3 * statistics.median([value for record in rounds for value in record["schedule"]]),
            "update_ms": 1e3 * statistics.median([value for record in rounds for value in record["update"]]),
            "add_s": statistics.median([record["add"] for record in rounds]),
            **{name: first[name] for name in ("steps", "running", "hits", "prompt_tokens", "preempted")},
        }
    return found


def time_table(timed: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = [f"{'ms a step, median (p90)':<28}" + "".join([f"  {arm:>16}" for arm in ARMS])]
    for title, arms in timed.items():
        line = f"{title:<28}"
        for arm in ARMS:
            cell = f"{arms[arm]['median_ms']:.2f} ({arms[arm]['p90_ms']:.2f})" if arm in arms else "-"
            line += f"  {cell:>16}"
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.engines", description="vLLM's schedulers over our manager and over their own.")
    parser.add_argument("parts", nargs="*", choices=["check", "time", []], help="check, time; both without any")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each arm")
    parser.add_argument("--only", default="", metavar="TEXT", help="workloads whose titles contain TEXT")
    parser.add_argument("--quick", action="store_true", help="few and small workloads: whether it runs, not how fast")
    options = parser.parse_args()
    parts = options.parts or ["check", "time"]
    if not is_built():
        parser.error("the package is not built: run `make bench-engines`")
    clock = Clock()
    machine = describe()
    chosen = [f"--only={options.only}", *(["--quick"] if options.quick else [])]
    record: dict[str, object] = {"machine": machine, "vllm": WHEEL, "quick": options.quick}
    try:
        prepare()
    except UnavailableError as reason:
        print(f"bench-engines: SKIPPED, {reason}")
        return 0
    clock.say("the environment is there")
    try:
        if "check" in parts:
            checks = run_worker("check", chosen)
            record["backend"] = checks.pop("backend")
            print(heading("vLLM's schedulers, each position of each step checked", machine))
            print(check_table(checks))
            wrong = faults(checks)
            if wrong:
                print("\n".join(wrong), file=sys.stderr)
                return 1
            record["checks"] = checks
            clock.say("checked")
        if "time" in parts:
            runs = run_worker("time", [*chosen, f"--rounds={1 if options.quick else options.rounds}"])
            record["backend"] = runs.pop("backend")
            timed = {title: figures(arms) for title, arms in runs.items()}
            print(heading("schedule() + update_from_output() of vLLM's scheduler, processor time", machine))
            print(time_table(timed))
            record["times"] = timed
    except WorkerFailedError as failure:
        print(f"bench-engines: {failure}", file=sys.stderr)
        return 1
    whole = not options.quick and not options.only and len(parts) == 2
    write((ROOT / "bench" / "results" if whole else ROOT / "build" / "bench") / "engines.json", record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
