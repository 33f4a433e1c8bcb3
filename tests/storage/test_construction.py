"""Memory of the levels: all of it or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_cache_manager_v2 import KVCacheError, KVCacheManager
from kv_cache_manager_v2.config import DiskCacheTierConfig, GpuCacheTierConfig, HostCacheTierConfig
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.emulated.driver import EmulatedDriver
from kv_cache_manager_v2.eviction.order import EvictionOrder
from kv_cache_manager_v2.layout.sizing import LevelSizing
from kv_cache_manager_v2.statistics import MovementCounters
from kv_cache_manager_v2.storage.hierarchy import Hierarchy
from tests.storage.conftest import NewRig
from tests.support.models import hybrid
from tests.support.storage_rig import GRAIN, make_layout


def build(driver: EmulatedDriver, path: str) -> Hierarchy:
    tiers = [GpuCacheTierConfig(4 << 20), HostCacheTierConfig(1 << 20), DiskCacheTierConfig(1 << 20, path)]
    layout, _config = make_layout(((4096, 100), (64,)), tiers)
    sizings = []
    for tier in tiers:
        sizing = LevelSizing(tier.tier, tier.quota, tier.quota, GRAIN[tier.tier])
        sizing.slots = [5, 7]
        sizings.append(sizing)
    return Hierarchy(driver, Timeline(driver), layout, sizings, tiers, MovementCounters(2, 3), EvictionOrder())


def test_closing_twice_and_without_use(tmp_path: Path) -> None:
    """Files have no name, so nothing is left in the directory either."""
    driver = EmulatedDriver()
    hierarchy = build(driver, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert hierarchy.base_address(0, 0, 0) != hierarchy.base_address(0, 0, 1)
    assert hierarchy.slot_address(0, 0, 1, 3) == hierarchy.base_address(0, 0, 1) + 300
    assert hierarchy.base_address(2, 0, 0) == 0
    hierarchy.close()
    hierarchy.close()
    driver.close()


def test_more_slots_than_issued_cost_nothing_but_memory(new_rig: NewRig) -> None:
    rig = new_rig([[100_000], [0]], slot_sizes=((64,),))
    assert rig.counts(0) == (100_000, 0, 0)
    assert rig.hierarchy.utilization(0, 0) == 0.0
    assert rig.hierarchy.utilization(1, 0) == 0.0
    page = rig.new(1)
    assert rig.hierarchy.utilization(0, 0) == pytest.approx(1e-5)
    rig.expect(page, 1)


@pytest.mark.parametrize(("call", "nth"), [("map_chunk", 2), ("host_register", 2)])
def test_what_a_failed_construction_could_not_free_is_freed_by_the_next_one(call: str, nth: int) -> None:
    """The device refuses to map memory, and then to take back what it had given."""
    driver = EmulatedDriver()
    config = hybrid(4, 8, host_slots=8)
    driver.fail(call, nth)
    driver.fail("unmap", 1, 2)
    driver.fail("destroy_chunk", 1, 2)
    with pytest.raises(KVCacheError, match=f"{call}: injected"):
        KVCacheManager(config, driver=driver)
    assert driver.leaks()
    driver.heal()
    manager = KVCacheManager(config, driver=driver)
    manager.shutdown()
    assert not driver.leaks()
    driver.close()
