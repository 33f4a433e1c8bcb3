"""Ranks that serve the same requests must divide their memory in the same way, without communication."""

from __future__ import annotations

import random

import pytest

from kv_cache_manager_v2 import EmulatedDriver, GpuCacheTierConfig, HostCacheTierConfig, KVCacheManager, KVCacheManagerConfig
from tests.support.models import MIB, attention


def rank(offset: float) -> tuple[KVCacheManager, EmulatedDriver]:
    """A manager of two pool groups, with a clock offset of its own."""
    config = KVCacheManagerConfig(
        32,
        [GpuCacheTierConfig(64 * MIB), HostCacheTierConfig(64 * MIB)],
        [attention(0, 16384, window=64), attention(1, 4096)],
        rebalance_min_sampled_kv_caches=8,
        rebalance_target_ratio_update_interval=4,
        rebalance_cooldown_secs=5.0,
        enable_stats=False,
    )
    driver = EmulatedDriver()
    seconds = [offset]

    def clock() -> float:
        seconds[0] += 1.0
        return seconds[0]

    return KVCacheManager(config, driver=driver, clock=clock), driver


@pytest.mark.parametrize("seed", range(3))
def test_equal_histories_give_equal_decisions(seed: int) -> None:
    """Two ranks with different clocks serve the same requests: `need_adjustment` becomes true at the same step, and both get the
    same slots."""
    ranks = [rank(0.0), rank(12345.5)]
    traces: list[list[object]] = []
    for manager, driver in ranks:
        chance = random.Random(seed)
        stream = driver.create_stream()
        trace: list[object] = []
        for number in range(24):
            length = chance.randrange(32, 4096)
            with manager.create_kv_cache(input_tokens=list(range(length // 2))) as cache:
                assert cache.resume(stream)
                assert cache.resize(length)
                cache.commit(list(range(cache.num_committed_tokens, length)))
            needed = manager.need_adjustment
            trace.append((number, needed))
            if needed:
                manager.adjust()
                trace.append([desc.num_slots for desc in manager.pool_group_descs])
        traces.append(trace)
        manager.shutdown()
        driver.destroy_stream(stream)
        driver.close()
    assert traces[0] == traces[1]
    assert any(isinstance(item, list) for item in traces[0]), "at least one adjustment was made"
