"""Lines that engines of the reference run: how they start, serve a request, read statistics and events, and end."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kv_cache_manager_v2
from kv_cache_manager_v2 import (
    CACHE_LEVEL1,
    GPU_LEVEL,
    AttentionLayerConfig,
    AttnLifeCycle,
    BufferConfig,
    ConfigError,
    CudaStream,
    EmulatedDriver,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheEventManager,
    KVCacheManager,
    KVCacheManagerConfig,
    PageIndexMode,
    PlannedDropHandle,
    SsmLayerConfig,
    _introspection,
)
from tests.arguments.scene import Scene
from tests.support.rig import toks

MIB = 1 << 20


def config_of() -> KVCacheManagerConfig:
    """Full attention, a window and a recurrent layer over two tiers."""
    buffers = [BufferConfig("key", 4096), BufferConfig("value", 4096)]
    state = SsmLayerConfig(2, [BufferConfig("state", 4096)])
    layers = [AttentionLayerConfig(0, buffers), AttentionLayerConfig(1, buffers, 64), state]
    tiers = [GpuCacheTierConfig(32 * MIB), HostCacheTierConfig(32 * MIB)]
    return KVCacheManagerConfig(32, tiers, layers, commit_min_snapshot=True)


def test_the_pools_are_described_once() -> None:
    """Keys and values of a layer lie side by side, in whole strides; a role that a layer has not is a KeyError."""
    with KVCacheManager(config_of(), driver=EmulatedDriver()) as impl:
        for layer in (0, 1):
            key = impl.get_mem_pool_base_address(layer, "key", PageIndexMode.SHARED)
            value = impl.get_mem_pool_base_address(layer, "value", 0)
            assert value - key == impl.get_page_stride(layer, "key")
            converter = impl.get_page_index_converter(layer, "key")
            assert converter.scratch_pages_per_block == 2
            assert converter.scale % 2 == 0
            with pytest.raises((KeyError, IndexError)):
                impl.get_mem_pool_base_address(layer, "index_key")
        for group in impl.pool_group_descs:
            for pool, slot_bytes in zip(group.pools, group.slot_desc.variants[0].slot_size_list, strict=True):
                assert pool.slot_bytes == slot_bytes
                assert pool.base_address > 0
        life_cycles = impl.shared.life_cycles
        assert [life_cycle.window_size for life_cycle in life_cycles if isinstance(life_cycle, AttnLifeCycle)] == [None, 64]
        assert len(_introspection.life_cycle_pool_group_indices(impl, 1)) == 3
        assert [item.free for item in _introspection.storage_statistics(impl, cache_level=0)]


def test_the_life_of_a_request() -> None:
    """Rows are set before `resume`, and again after it; lengths grow, shrink and move; the end plans what the next turn drops."""
    driver = EmulatedDriver()
    conversation = np.arange(160, dtype=np.int32)
    with KVCacheManager(config_of(), driver=driver) as impl:
        handle: PlannedDropHandle | None = None
        for turn, length in enumerate((100, 160)):
            prompt = conversation[:length]
            kv = impl.create_kv_cache((None, 2**63 + 5), prompt[:-1], id=("turn", turn), enable_request_stats=True)
            rows = [array("i", [0] * 64) for _group in range(2)]
            for group, row in enumerate(rows):
                kv.set_base_page_index_buf(0, group, memoryview(row))
            kv.cuda_stream = CudaStream(driver.create_stream())
            assert kv.num_committed_tokens == (100 if turn else 0)
            assert kv._get_num_reusable_tokens_before_pruning() >= kv._get_num_reusable_tokens_before_hybrid_pruning() >= 100 * turn
            assert kv._get_last_cached_token_level() == (GPU_LEVEL if turn else None)
            assert kv.resume(kv.cuda_stream) is True
            kv.enable_swa_scratch_reuse = False
            for group, row in enumerate(rows):
                kv.set_base_page_index_buf(0, group, memoryview(row))
            for end in (96, length):
                if end > kv.num_committed_tokens:
                    assert kv.resize(end) is True
                    kv.commit(accepted_input_tokens=prompt[kv.num_committed_tokens : end], beam_search_indices=None, is_end=False)
            assert kv.resize(length + 8, history_length=None)
            kv.capacity = length + 1  # rejected drafts
            assert kv.get_scratch_desc(1) is None
            assert kv.get_ssm_block_base_index(2) >= 0
            row_of: Any = kv.get_base_page_indices(0)
            indices = np.frombuffer(row_of, np.int32, count=kv.num_blocks)
            assert indices.tolist() == rows[0][: kv.num_blocks].tolist() == list(kv.get_aggregated_page_indices(0, valid_only=True))
            assert indices.min() >= 0
            kv.set_base_page_index_buf(0, 0, None)
            kv.stop_committing()
            last, handle = handle, kv.plan_committed_block_drop()
            assert handle is not None
            if last is not None:
                last.drop()
            assert not kv.commit_pending_stats().empty
            kv.discard_pending_stats()
            kv.close()
            kv.close()
        ahead = impl.create_kv_cache((None, 2**63 + 5), conversation.tolist())
        assert ahead.num_committed_tokens == 160
        assert ahead.prefetch(CACHE_LEVEL1)
        ahead.close()
        impl.clear_reusable_blocks()


def test_iteration_statistics_and_events() -> None:
    """What an engine reads after each iteration."""
    driver = EmulatedDriver()
    events = KVCacheEventManager(100, window_size=4096, hash_algo="v2_sha256")
    with KVCacheManager(config_of(), events, driver=driver) as impl:
        assert impl.event_manager is events
        events.set_layer_group_window_sizes({0: 4096, 1: 64})
        events.add_created_event([8, 8], [0, 1])
        kv = impl.create_kv_cache(None, [], id=1)
        assert kv.resume(driver.create_stream())
        assert kv.resize(64)
        kv.commit(list(range(64)))
        kv.commit_pending_stats()
        for delta in impl.get_and_reset_iteration_stats().values():
            assert not delta.empty
        (snapshots,) = [*impl.get_and_reset_ssm_snapshot_iteration_stats().values(), None][:1]
        assert snapshots is None or snapshots.iter_snapshot_hit_rate == 0.0
        peaks = impl.get_and_reset_iteration_peak_block_stats_by_level()
        assert [len(level) for level in peaks] == [len(impl.pool_group_descs)] * 2
        total = kv_cache_manager_v2.ReusedBlocksByLevel()
        for counts in impl.get_and_reset_iteration_reused_blocks_by_level().values():
            total.add(counts)
        assert total.empty
        events.flush_iteration_events()
        windows = {event.layer_group_id: event.window_size for event in events.get_latest_events(0)}
        assert windows[0] == 4096
        assert windows[1] == 64
        kv.close()


def test_statistics_are_set_on_a_record_of_the_fifteen_fields() -> None:
    """An engine copies the named fields, and no other, to a record of its own."""
    names = kv_cache_manager_v2._KV_CACHE_ITERATION_STATS_DELTA_FIELDS
    assert kv_cache_manager_v2.KVCacheIterationStatsDelta._field_names == names
    record = type("Record", (), {"__slots__": names})()
    delta = kv_cache_manager_v2.KVCacheIterationStatsDelta(iter_alloc_new_blocks=3)
    for name in names:
        setattr(record, name, getattr(delta, name))
    assert record.iter_alloc_new_blocks == 3
    assert not delta.empty


def test_the_fallback_without_a_host_tier() -> None:
    """Construction fails for want of host memory: an engine catches it and builds again with `replace`."""
    driver = EmulatedDriver()
    layer = AttentionLayerConfig(0, [BufferConfig("key", 4096)])
    config = KVCacheManagerConfig(32, [GpuCacheTierConfig(1 << 21), HostCacheTierConfig(1 << 21)], [layer])
    driver.fail("host_register", 1, None)
    with pytest.raises((kv_cache_manager_v2.CuError, kv_cache_manager_v2.OutOfMemoryError)):
        KVCacheManager(config, driver=driver)
    driver.heal()
    smaller = dataclasses.replace(config, cache_tiers=[tier for tier in config.cache_tiers if tier.tier != 1])
    with KVCacheManager(smaller, driver=driver) as manager:
        assert manager.cache_tier_list == [kv_cache_manager_v2.CacheTier.GPU_MEM]


def test_a_quota_that_changes_is_true() -> None:
    """Engines test `is True`; `adjust` gives None."""
    with Scene() as scene:
        scene.suspend_all()
        assert scene.manager.resize(1, scene.manager.get_quota(1)) is True
        assert scene.manager.resize(1, 1) is False
        adjusted: Callable[[], object] = scene.manager.adjust
        assert adjusted() is None


def test_marks_are_cleared_where_nothing_is_counted() -> None:
    """With `enable_stats=False` too, committing and discarding clear the id."""
    config = KVCacheManagerConfig(
        4, [GpuCacheTierConfig(1 << 21)], [AttentionLayerConfig(0, [BufferConfig("key", 64)])], enable_stats=False
    )
    with KVCacheManager(config, driver=EmulatedDriver()) as manager, manager.create_kv_cache(id=5) as cache:
        for clear in (cache.commit_pending_stats, cache.discard_pending_stats):
            manager.mark_stats_dirty(5)
            clear()
            assert manager.get_dirty_stats_kv_cache_ids() == set()


def test_ids_are_callable_and_plain_at_run_time() -> None:
    """`CudaStream(handle)` and the like give the int back."""
    for name in ("CudaStream", "TokenId", "MemAddress", "Priority", "PoolIndex", "PoolGroupIndex", "LayerId", "CacheLevel"):
        assert type(getattr(kv_cache_manager_v2, name)(3)) is int


def test_planned_drops_come_with_the_matched_length() -> None:
    """What the reference's introspection returns beside ours."""
    from kv_cache_manager_v2 import _introspection, introspection

    with Scene() as scene:
        prompt = toks(0, 6)
        counts = introspection.reuse_match_planned_drop_counts(scene.manager, None, prompt, 0)
        with_length: object = _introspection.reuse_match_planned_drop_counts(scene.manager, None, prompt, 0)
        length = scene.manager.probe_reuse(None, prompt)
        assert with_length == (length, counts)
        assert length > 0


def test_ranges_of_ids_are_ranges() -> None:
    """One to three bounds, as `range`; a range is returned."""
    assert kv_cache_manager_v2.typed_range(4) == range(4)
    assert kv_cache_manager_v2.typed_range(1, 4) == range(1, 4)
    assert kv_cache_manager_v2.typed_range(8, 0, -2) == range(8, 0, -2)
    for wrong in ((), (1, 2, 3, 4), (0, 4, 0), (1.5,), ("x",)):
        with pytest.raises(ConfigError):
            kv_cache_manager_v2.typed_range(*wrong)
