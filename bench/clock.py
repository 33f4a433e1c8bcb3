"""Progress, on the error stream: what is done, with the seconds since the start."""

from __future__ import annotations

import sys
import time


class Clock:
    def __init__(self) -> None:
        self.start = time.perf_counter()

    def say(self, line: str) -> None:
        print(f"[{time.perf_counter() - self.start:5.0f} s] {line}", file=sys.stderr, flush=True)
