"""A measurement: preparation, a timed run of some units of work, and cleaning up.

Rule: only `run` is timed. The collector is off while the clock runs, unless the work is about the collector. The clock is the
thread's processor time. The work never waits, so this equals elapsed time on a quiet machine, and excludes other processes on a
busy one.
"""

from __future__ import annotations

import gc
import time
from typing import ClassVar, Final

from bench.setting import Setting

now: Final = time.thread_time  # s


class Work:
    """One operation, ready to be run again and again; made from a `Setting`."""

    unit: ClassVar[str] = "call"
    collector: ClassVar[bool] = False  # whether automatic collection stays on

    def __init__(self, setting: Setting) -> None:
        """Make what all runs share."""

    def before(self) -> None:
        """Prepare one run, off the clock."""

    def run(self) -> int:
        """Do the work. Returns the number of units."""
        raise NotImplementedError

    def after(self) -> None:
        """Clean up after one run, off the clock."""

    def close(self) -> None:
        """Free everything."""

    def timed(self) -> float:
        """Seconds of one unit, from one run."""
        self.before()
        if not self.collector:
            gc.disable()
        start = now()
        units = self.run()
        elapsed = now() - start
        gc.enable()
        self.after()
        return elapsed / units
