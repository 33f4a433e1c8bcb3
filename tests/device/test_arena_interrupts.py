"""Ctrl-C inside of an arena's calls: the slots that it has have memory, and closing it frees everything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kv_cache_manager_v2.device import os_memory
from kv_cache_manager_v2.device.arenas import Arena, ChunkPool, DeviceArena
from kv_cache_manager_v2.device.host_arena import HostArena
from kv_cache_manager_v2.device.os_memory import PAGE_BYTES
from kv_cache_manager_v2.emulated.driver import GRANULARITY, EmulatedDriver
from tests.device.test_arenas import check_stamps, stamp
from tests.support.drivers import refusing_device
from tests.support.interrupts import interpreted, interruptions

DEVICE = ("device/arenas.py", "device/host_arena.py", "device/freeing.py", "device/os_memory.py", "emulated/")


class Place:
    """An arena with four slots, which grows, shrinks and is closed."""

    def __init__(self, kind: str) -> None:
        self.inner = EmulatedDriver()
        self.driver: Any = refusing_device(self.inner, identifies=True)
        self.pool = ChunkPool(self.driver, GRANULARITY)
        self.arena: Arena
        if kind == "device":
            self.arena = DeviceArena(self.driver, self.pool, GRANULARITY // 2, 8 * GRANULARITY)
        else:
            self.arena = HostArena(self.driver, PAGE_BYTES, 2 * PAGE_BYTES)
        self.arena.resize(4)
        stamp(self.inner, self.arena, range(4))

    def close(self) -> None:
        self.arena.close()
        self.pool.close()

    def check(self, where: str, kept: int) -> None:
        """All is as it says, and can still be freed. `kept`: slots that the call was to keep; -1: it was to close the arena."""
        if kept >= 0:
            arena = self.arena
            arena.check_invariants()
            self.inner.check_invariants()
            kept = min(kept, arena.num_slots)
            check_stamps(self.inner, arena, range(kept))
            stamp(self.inner, arena, range(arena.num_slots))
            arena.resize(6)
            check_stamps(self.inner, arena, range(kept))
            stamp(self.inner, arena, range(6))
        self.close()
        assert self.inner.mapped_bytes == self.inner.registered_bytes == 0, where
        lost = [leak for leak in self.inner.leaks() if not leak.startswith("chunk")]  # made, and never returned to the caller
        assert not lost, where


CALLS: dict[str, Callable[[Place], None]] = {
    "grow": lambda place: place.arena.resize(8),
    "shrink": lambda place: place.arena.resize(1),
    "empty": lambda place: place.arena.resize(0),
    "close": Place.close,
}

KEPT = {"grow": 4, "shrink": 1, "empty": 0, "close": -1}

every_call = pytest.mark.parametrize("name", CALLS)
every_kind = pytest.mark.parametrize("kind", ["device", "host"])


@every_kind
@every_call
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=lambda error: type(error).__name__)
def test_an_interrupt_of_any_driver_call(kind: str, name: str, after: bool, error: BaseException) -> None:
    """It comes before the driver has done anything, or when it has done everything."""
    skip = 0
    reached = True
    while reached:
        place = Place(kind)
        place.driver.refuse(error, skip, after=after)
        raised: BaseException | None = None
        try:
            CALLS[name](place)
        except BaseException as left:
            raised = left
        reached = bool(place.driver.refused)
        place.driver.refuse(None)
        assert (raised is not None) == reached
        place.check(f"driver call {skip}", KEPT[name])
        skip += 1
    assert skip > 1


@interpreted
@every_kind
@every_call
def test_an_interrupt_at_any_place(kind: str, name: str) -> None:
    """A sample of the places."""
    for interrupter in interruptions(DEVICE, dense=31, stride=3):
        place = Place(kind)
        error = interrupter.run(partial(CALLS[name], place))
        assert isinstance(error, KeyboardInterrupt) == interrupter.reached, error
        place.check(interrupter.where, KEPT[name])
    assert interrupter.nth > 10


@interpreted
def test_a_thread_that_has_no_memory_to_begin_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system has started it, and its first line has failed: the caller does its work."""
    done: list[int] = []
    monkeypatch.setattr(os_memory, "start_new_thread", lambda _run, _arguments: 0)
    os_memory.uninterrupted(lambda: done.append(1))
    assert done == [1]
