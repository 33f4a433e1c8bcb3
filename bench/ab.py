"""`python -m bench.ab`: the A/B run at scale, compiled against interpreted; prints the table and writes JSON."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.builds import BUILDS, NAMES, ROOT, WorkerFailedError, is_built, run_worker
from bench.clock import Clock
from bench.machine import describe
from bench.results import heading, percentile, write


@dataclass
class Arm:
    """What the shifts of one build measured, taken together; seconds."""

    requests: int = 0
    seconds: float = 0.0  # on the simulation's clock
    samples: dict[str, list[float]] = field(default_factory=dict)
    happened: list[dict[str, int]] = field(default_factory=list)  # by shift

    def add(self, shift: dict[str, Any]) -> None:
        self.happened.append(shift["happened"])
        self.requests += shift["happened"]["requests"]
        self.seconds += shift["seconds"]
        for name in ("schedule", "update", "close", "first_token", "between_tokens"):
            self.samples.setdefault(name, []).extend(shift[name])

    def figures(self) -> dict[str, float]:
        """The reference's table; milliseconds but for the rate."""
        per = {name: [1e3 * value for value in values] for name, values in self.samples.items()}
        return {
            "requests per second": self.requests / self.seconds,
            "inter-token latency p50, ms": statistics.median(per["between_tokens"]),
            "time to first token p90, ms": percentile(per["first_token"], 0.9),
            "schedule p50, ms": statistics.median(per["schedule"]),
            "schedule p90, ms": percentile(per["schedule"], 0.9),
            "update p50, ms": statistics.median(per["update"]),
            "update p90, ms": percentile(per["update"], 0.9),
            "close p90, ms": percentile(per["close"], 0.9),
        }


class ArmsDifferError(Exception):
    """The two builds did not do the same: the times cannot be compared, and one of them is wrong."""


def run(requests: int, num_open: int, shifts: int, clock: Clock) -> dict[str, Arm]:
    """Serve the requests on both builds, in shifts that take turns. Raises WorkerFailedError, ArmsDifferError."""
    arms = {build: Arm() for build in BUILDS}
    with tempfile.TemporaryDirectory(prefix="kvcm-bench-") as directory:
        for number in range(shifts):
            some = requests // shifts + (1 if number < requests % shifts else 0)
            for build in BUILDS if number % 2 == 0 else reversed(BUILDS):
                output = Path(directory) / f"{build}-{number}.json"
                arguments = [f"--requests={some}", f"--open={num_open}", f"--seed={number}", f"--output={output}"]
                run_worker(build, "bench.ab_worker", arguments)
                arms[build].add(json.loads(output.read_text()))
                clock.say(f"{NAMES[build]}: {arms[build].requests} requests served")
    if arms["compiled"].happened != arms["pure"].happened:
        raise ArmsDifferError(f"the arms differ: {arms['compiled'].happened} compiled, {arms['pure'].happened} interpreted")
    return arms


def report(arms: dict[str, Arm]) -> str:
    figures = {build: arms[build].figures() for build in BUILDS}
    lines = [f"{'':<28}  {'interpreted':>12}  {'compiled':>12}  {'change':>8}"]
    for name, slow in figures["pure"].items():
        fast = figures["compiled"][name]
        lines.append(f"{name:<28}  {slow:>12.2f}  {fast:>12.2f}  {100 * (fast / slow - 1):>+7.1f}%")
    return "\n".join(lines)


def totals(arm: Arm) -> dict[str, int]:
    """What happened in all shifts."""
    return {name: sum([shift[name] for shift in arm.happened]) for name in arm.happened[0]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.ab", description="A simulated engine around the real manager, on both builds.")
    parser.add_argument("--requests", type=int, default=100_000, help="served by each arm")
    parser.add_argument("--open", type=int, default=1000, help="open at a time")
    parser.add_argument("--shifts", type=int, default=4, help="in which the arms take turns")
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes (default: bench/results for a whole run)")
    options = parser.parse_args()
    if min(options.requests, options.open, options.shifts) < 1:
        parser.error("there is nothing to serve: --requests, --open and --shifts are at least 1")
    if not is_built():
        parser.error("the package is not built: run `make bench-ab`")
    whole = options.requests >= 100_000 and options.open >= 1000
    out = options.out or (ROOT / "bench" / "results" if whole else ROOT / "build" / "bench")
    machine = describe()
    try:
        arms = run(options.requests, options.open, min(options.shifts, options.requests), Clock())
    except (WorkerFailedError, ArmsDifferError) as failure:
        print(f"bench-ab: {failure}", file=sys.stderr)
        return 1
    print(heading(f"A/B: {options.requests} requests an arm, {options.open} open, GPU step 11.5 ms of simulated time", machine))
    print(report(arms))
    happened = totals(arms["compiled"])
    print(f"\nerrors: 0; the same on both arms: {happened}")
    figures = {NAMES[build]: arms[build].figures() for build in BUILDS}
    write(out / "ab.json", {"machine": machine, "open": options.open, "happened": happened, "errors": 0, "figures": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
