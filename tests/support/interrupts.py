"""Ctrl-C at a chosen place of the interpreted package.

The interpreter runs a signal's handler at the start of a Python function, after a call of a C function, and where a loop goes
round. A profiler is asked at the first two, so it interrupts where a signal can, at a place that is counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from kv_cache_manager_v2.build import COMPILED

PACKAGE = "kv_cache_manager_v2/"

interpreted = pytest.mark.skipif(COMPILED, reason="compiled code handles signals only where it calls interpreted code")


class Interrupter:
    """Raises KeyboardInterrupt at the n-th place within the files whose paths contain one of `parts`, and none of `spared`."""

    def __init__(self, nth: int, parts: tuple[str, ...] = (PACKAGE,), spared: tuple[str, ...] = ()) -> None:
        self.nth = nth
        self.parts = parts
        self.spared = spared
        self.count = 0
        self.where = ""

    @property
    def reached(self) -> bool:
        return self.count >= self.nth

    def run(self, call: Callable[[], object]) -> BaseException | None:
        """The exception that leaves the call."""
        sys.setprofile(self._pass)
        try:
            call()
        except BaseException as error:
            return error
        finally:
            sys.setprofile(None)
        return None

    def _pass(self, frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event not in ("call", "c_return") or not any(part in file for part in self.parts):
            return
        if any(part in file for part in self.spared):
            return
        if frame.f_code.co_name == "__del__":
            return  # what a finaliser raises, Python itself only reports
        self.count += 1
        if self.count == self.nth:
            self.where = f"place {self.nth}, {file.rpartition('/')[2]}:{frame.f_lineno}"
            sys.setprofile(None)
            raise KeyboardInterrupt


def interruptions(
    parts: tuple[str, ...] = (PACKAGE,), spared: tuple[str, ...] = (), *, dense: int = sys.maxsize, stride: int = 1
) -> Iterator[Interrupter]:
    """An interrupter for each place in turn, until one is not reached. After the first `dense` places, every `stride`-th."""
    nth = 1
    while True:
        interrupter = Interrupter(nth, parts, spared)
        yield interrupter
        if not interrupter.reached:
            return
        nth += stride if nth >= dense else 1
