"""Constructions that fail or are interrupted, and devices that refuse to be closed: a later call frees what is left."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import pytest

from kv_cache_manager_v2 import CuError, EmulatedDriver, KVCacheManager, KVCacheManagerConfig, LogicError
from tests.support.interrupts import interpreted, interruptions
from tests.support.models import hybrid


class Broken(Exception):
    """An exception class that the package does not know."""


def broken_clock() -> float:
    """Asked when the memory is allocated already."""
    raise Broken


@pytest.fixture
def own_device(monkeypatch: pytest.MonkeyPatch) -> EmulatedDriver:
    """The device that a manager without `driver` makes."""
    device = EmulatedDriver()
    monkeypatch.setenv("KVCM_DEVICE", "cuda")
    monkeypatch.setitem(sys.modules, "kv_cache_manager_v2.extras.cuda", SimpleNamespace(CudaDriver=lambda: device))
    return device


def closed(device: EmulatedDriver) -> bool:
    try:
        device.synchronize()
    except LogicError as error:
        return "the device is closed" in str(error)
    return False


def test_memory_that_the_device_refuses_to_take_back_is_freed_later() -> None:
    """At once if a second try succeeds, else by the next construction or shutdown. The first error is raised."""
    driver = EmulatedDriver()
    config = hybrid(4, 8, host_slots=8)
    for times in (1, None):
        driver.fail("host_unregister", 1, times)
        with pytest.raises(Broken):
            KVCacheManager(config, driver=driver, clock=broken_clock)
        assert (driver.registered_bytes > 0) == (times is None)
    driver.heal()
    KVCacheManager(config, driver=driver).shutdown()
    assert not driver.leaks()
    driver.close()


@pytest.mark.parametrize("refusals", [0, 1, 2])
def test_the_own_device_of_a_failed_construction_is_closed_in_the_end(own_device: EmulatedDriver, refusals: int) -> None:
    """By the construction itself, or by a later one."""
    config = hybrid(4, 8, host_slots=8)
    if refusals:
        own_device.fail("close", 1, refusals)
    with pytest.raises(Broken):
        KVCacheManager(config, clock=broken_clock)
    assert closed(own_device) == (refusals == 0)
    KVCacheManager(config, driver=EmulatedDriver()).shutdown()
    assert closed(own_device)


def test_the_own_device_is_closed_after_its_memory(own_device: EmulatedDriver) -> None:
    """Memory that it refuses to take back is freed first."""
    config = hybrid(4, 8, host_slots=8)
    own_device.fail("host_unregister", 1, None)
    with pytest.raises(Broken):
        KVCacheManager(config, clock=broken_clock)
    assert own_device.registered_bytes > 0
    assert not closed(own_device)
    own_device.heal()
    KVCacheManager(config, driver=EmulatedDriver()).shutdown()
    assert own_device.registered_bytes == 0
    assert closed(own_device)


def test_a_shutdown_whose_own_device_refuses_to_close_can_be_tried_again(own_device: EmulatedDriver) -> None:
    manager = KVCacheManager(hybrid(4, 8))
    own_device.fail("close")
    with pytest.raises(CuError):
        manager.shutdown()
    manager.shutdown()
    assert closed(own_device)


def construct(config: KVCacheManagerConfig, driver: EmulatedDriver, made: list[KVCacheManager]) -> None:
    made.append(KVCacheManager(config, driver=driver))


@interpreted
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a manager that is complete when the interrupt comes is dropped
def test_an_interrupted_construction_leaves_nothing_that_the_next_one_does_not_free() -> None:
    """A sample of the places. Only a chunk that was made and not returned to the manager is out of reach."""
    config = hybrid(4, 8, host_slots=8)
    for interrupter in interruptions(dense=20, stride=13):
        driver = EmulatedDriver()
        made: list[KVCacheManager] = []
        error = interrupter.run(partial(construct, config, driver, made))
        assert isinstance(error, KeyboardInterrupt) == interrupter.reached, error
        for manager in made:
            manager.shutdown()
        del error
        KVCacheManager(config, driver=driver).shutdown()
        assert not [leak for leak in driver.leaks() if not leak.startswith("chunk")], interrupter.where
        assert driver.mapped_bytes == driver.registered_bytes == 0
    assert interrupter.nth > 100
