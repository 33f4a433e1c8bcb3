"""Ctrl-C inside of calls of the staging ring and of the pool of I/O threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from kv_cache_manager_v2 import EmulatedDriver
from kv_cache_manager_v2.build import COMPILED
from kv_cache_manager_v2.device.driver import GATE_DONE, GATE_PENDING
from kv_cache_manager_v2.device.file_transfers import Transfer, TransferPool
from kv_cache_manager_v2.device.staging import StagingRegion, StagingRing
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.device.waiters import LONGEST_SLEEP_S
from kv_cache_manager_v2.ids import NULL_POINT, Stream
from tests.support.interrupts import interruptions

RING = 4096
PATIENCE_S = 20 * LONGEST_SLEEP_S
POOL = ("device/file_transfers.py", "device/waiters.py")

pytestmark = pytest.mark.skipif(COMPILED, reason="compiled code handles signals only where it calls interpreted code")

ENDS: dict[str, Callable[[StagingRing, StagingRegion], None]] = {
    "release": lambda ring, region: ring.release(region, NULL_POINT),
    "finish": lambda ring, region: ring.finish(region, NULL_POINT),
    "quarantine": lambda ring, region: ring.quarantine(region),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_region_whose_end_was_interrupted_can_be_ended_again(end: str) -> None:
    """All of the ring is free afterwards."""
    for interrupter in interruptions(("device/staging.py",)):
        driver = EmulatedDriver()
        ring = StagingRing(driver, Timeline(driver), RING)
        region = ring.acquire(Stream(0), RING, RING, True)
        assert region is not None
        interrupter.run(partial(ENDS[end], ring, region))
        ring.finish(region, NULL_POINT)
        ring.check_invariants()
        assert ring.acquire(Stream(0), RING, RING, True) is not None, interrupter.where
    assert interrupter.nth > 1


class Work(Transfer):
    """A transfer that moves nothing."""

    def __init__(self) -> None:
        super().__init__(0, 0, 0, 0, False)
        self.gate_opened = threading.Event()

    def perform(self) -> str:
        return ""

    def opened(self) -> None:
        self.gate_opened.set()


def test_an_interrupted_submission_is_all_or_nothing_and_the_pool_goes_on() -> None:
    """A transfer that was submitted ends without another call; one that was not can be submitted again. No lock stays taken."""
    for interrupter in interruptions(POOL):
        pool = TransferPool(threads=2)
        works = [Work() for _i in range(4)]
        pool.submit(works[0])
        assert works[0].gate_opened.wait(PATIENCE_S)
        interrupter.run(partial(pool.submit_all, list(works[1:])))
        for work in works[1:]:
            if work.submitted:
                assert work.gate_opened.wait(PATIENCE_S), interrupter.where
            else:
                assert work.state == GATE_PENDING
                pool.submit(work)
        assert pool.wait_idle(PATIENCE_S), interrupter.where
        assert [work.state for work in works] == [GATE_DONE] * 4
        assert pool.close(PATIENCE_S), interrupter.where
    assert interrupter.nth > 10


@pytest.mark.parametrize("call", [lambda pool: pool.wait_idle(PATIENCE_S), lambda pool: pool.close(PATIENCE_S)])
def test_an_interrupted_wait_can_be_repeated(call: Callable[[TransferPool], object]) -> None:
    for interrupter in interruptions(POOL):
        pool = TransferPool(threads=2)
        works = [Work() for _i in range(3)]
        pool.submit_all(list(works))
        interrupter.run(partial(call, pool))
        assert pool.wait_idle(PATIENCE_S), interrupter.where
        assert pool.close(PATIENCE_S), interrupter.where
    assert interrupter.nth > 3
