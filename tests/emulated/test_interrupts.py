"""Ctrl-C inside of the emulated device: memory that is gone is never taken for memory that work may touch."""

from __future__ import annotations

import contextlib
import sys
from types import FrameType

import pytest

from kv_cache_manager_v2 import EmulatedDriver, LogicError
from kv_cache_manager_v2.build import COMPILED


class Interrupter:
    """Raises KeyboardInterrupt at the n-th place of the address space at which a signal can be handled."""

    def __init__(self, nth: int) -> None:
        self.nth = nth
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith("emulated/address_space.py"):
            self.count += 1
            if self.count == self.nth:
                sys.setprofile(None)
                raise KeyboardInterrupt


@pytest.mark.skipif(COMPILED, reason="compiled code handles signals only where it calls interpreted code")
def test_an_interrupted_unmap_leaves_no_memory_that_crashes() -> None:
    nth = 0
    reached = True
    while reached:
        nth += 1
        driver = EmulatedDriver()
        size = driver.granularity()
        address = driver.reserve(size)
        driver.map_chunk(address, size, driver.create_chunk(size))
        driver.set_access(address, size)
        interrupter = Interrupter(nth)
        sys.setprofile(interrupter)
        try:
            driver.unmap(address, size)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        reached = interrupter.count >= nth
        with contextlib.suppress(LogicError):  # refused, or still there
            driver.read_bytes(address, 8)
    assert nth > 3
