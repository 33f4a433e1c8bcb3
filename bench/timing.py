"""What a measurement is: a number of runs, each of which did some units of work, and the time of one unit."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Timing:
    """Microseconds for one unit of work."""

    unit: str
    runs: int
    median_us: float
    fastest_us: float

    def as_dict(self) -> dict[str, object]:
        return {"unit": self.unit, "runs": self.runs, "median_us": self.median_us, "fastest_us": self.fastest_us}


def measure(
    unit: str,
    runs: int,
    work: Callable[[], int],
    *,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> Timing:
    """`work` returns how many units it did. `before` and `after` run around each run, outside the clock; the collector rests."""
    seconds: list[float] = []
    for run in range(-1, runs):  # run -1 warms up and does not count
        if before is not None:
            before()
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        units = work()
        elapsed = time.perf_counter() - start
        gc.enable()
        if after is not None:
            after()
        if run >= 0:
            seconds.append(elapsed / units)
    return Timing(unit, runs, statistics.median(seconds) * 1e6, min(seconds) * 1e6)
