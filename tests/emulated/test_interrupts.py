"""Ctrl-C inside of the emulated device: memory that is gone is never taken for memory that work may touch."""

from __future__ import annotations

import contextlib
from functools import partial

from kv_cache_manager_v2 import EmulatedDriver, LogicError
from tests.support.interrupts import interpreted, interruptions


@interpreted
def test_an_interrupted_unmap_leaves_no_memory_that_crashes() -> None:
    for interrupter in interruptions(("emulated/address_space.py",)):
        driver = EmulatedDriver()
        size = driver.granularity()
        address = driver.reserve(size)
        driver.map_chunk(address, size, driver.create_chunk(size))
        driver.set_access(address, size)
        interrupter.run(partial(driver.unmap, address, size))
        driver.check_invariants()
        with contextlib.suppress(LogicError):  # refused, or still there
            driver.read_bytes(address, 8)
    assert interrupter.nth > 3
