"""Ctrl-C at any instruction of a call, on the interpreted build: the manager works, or says that it is poisoned; its lock is free.

The interpreter runs a signal's handler at the start of a Python function and after a call of a C function. A profiler is asked at
the same places, so it interrupts where a signal can, and at a place that is counted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

from kv_cache_manager_v2.build import COMPILED
from tests.manager.test_any_exception import CALLS, free_lock, poisoned, scene_of

POINTS = 12  # of a call, evenly spread
PACKAGE = "kv_cache_manager_v2/"
DEVICE = ("kv_cache_manager_v2/emulated/", "device/file_transfers.py")  # what a signal does inside a device is its affair


class Interrupter:
    """Raises KeyboardInterrupt at the n-th place at which a signal can be handled."""

    def __init__(self, nth: int) -> None:
        self.nth = nth
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event not in ("call", "c_return") or PACKAGE not in file or any(part in file for part in DEVICE):
            return
        if frame.f_code.co_name == "__del__":
            return  # what a finaliser raises, Python itself only reports
        self.count += 1
        if self.count == self.nth:
            sys.setprofile(None)
            raise KeyboardInterrupt


def interrupted(name: str, folder: Path, nth: int) -> int:
    """Interrupt the call there; how many places it has, if it was not reached."""
    scene = scene_of("window", folder, name)
    interrupter = Interrupter(nth)
    error: BaseException | None = None
    sys.setprofile(interrupter)
    try:
        CALLS[name](scene)
    except BaseException as raised:
        error = raised
    finally:
        sys.setprofile(None)
    if interrupter.count < nth:
        assert error is None, error
        scene.finish()
        return interrupter.count
    assert isinstance(error, KeyboardInterrupt), error
    scene.interrupted = True
    where = f"interrupted at place {nth}"
    assert free_lock(scene.manager), f"{where}: the lock is held"
    if not poisoned(scene):
        scene.finish()
    return nth


@pytest.mark.skipif(COMPILED, reason="compiled code handles signals only where it calls interpreted code")
@pytest.mark.parametrize("name", list(CALLS))
def test_an_interrupt_leaves_a_whole_manager_or_says_so(name: str, tmp_path: Path) -> None:
    """A sample of the places of each public call."""
    places = interrupted(name, tmp_path, 1 << 40)
    for number in range(POINTS):
        interrupted(name, tmp_path, 1 + number * (places - 1) // POINTS)
