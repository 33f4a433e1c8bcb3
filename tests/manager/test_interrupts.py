"""Ctrl-C at any place of a call: the manager works, or says that it is poisoned, and its lock is free."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.manager.test_any_exception import CALLS, free_lock, poisoned, scene_of
from tests.support.interrupts import Interrupter, interpreted

POINTS = 12  # of a call, evenly spread
DEVICE = ("kv_cache_manager_v2/emulated/", "device/file_transfers.py", "device/waiters.py")  # have tests of their own


def interrupted(name: str, folder: Path, nth: int) -> int:
    """Interrupt the call there; how many places it has, if it was not reached."""
    scene = scene_of("window", folder, name)
    interrupter = Interrupter(nth, spared=DEVICE)
    error = interrupter.run(partial(CALLS[name], scene))
    if not interrupter.reached:
        assert error is None, error
        scene.finish()
        return interrupter.count
    assert isinstance(error, KeyboardInterrupt), error
    scene.interrupted = True
    assert free_lock(scene.manager), f"interrupted at {interrupter.where}: the lock is held"
    if not poisoned(scene):
        scene.finish()
    return nth


@interpreted
@pytest.mark.parametrize("name", list(CALLS))
def test_an_interrupt_leaves_a_whole_manager_or_says_so(name: str, tmp_path: Path) -> None:
    """A sample of the places of each public call."""
    places = interrupted(name, tmp_path, 1 << 40)
    for number in range(POINTS):
        interrupted(name, tmp_path, 1 + number * (places - 1) // POINTS)
