"""A small engine that names every public name, with plain ints for ids and levels: read by type checkers, and run."""

from __future__ import annotations

from array import array
from dataclasses import replace

import kv_cache_manager_v2 as kvcm
from kv_cache_manager_v2 import (
    BACKEND,
    BAD_PAGE_INDEX,
    CACHE_LEVEL1,
    DEFAULT_BEAM_INDEX,
    GPU_LEVEL,
    NDEBUG,
    PRIORITY_DEFAULT,
    BeamIndex,
    BlockOrdinal,
    CacheLevel,
    CudaStream,
    DataRole,
    LayerGroupId,
    LayerId,
    LifeCycleId,
    MemAddress,
    PoolGroupId,
    PoolGroupIndex,
    PoolId,
    PoolIndex,
    Priority,
    SlidingWindowSize,
    SlotId,
    Stream,
    TokenId,
)

MIB = 1 << 20


def configuration(folder: str, window: SlidingWindowSize) -> kvcm.KVCacheManagerConfig:
    """Three tiers; full attention, a window and a recurrent layer."""
    buffers = [kvcm.BufferConfig("key", 4096), kvcm.BufferConfig(DataRole("value"), 4096)]
    tiers: list[kvcm.CacheTierConfig] = [
        kvcm.GpuCacheTierConfig(64 * MIB),
        kvcm.HostCacheTierConfig(64 * MIB),
        kvcm.DiskCacheTierConfig(64 * MIB, folder, exclusive=True, admission=KeepSmall),
    ]
    layers = [
        kvcm.AttentionLayerConfig(0, buffers),
        kvcm.AttentionLayerConfig(LayerId(1), buffers, window),
        kvcm.SsmLayerConfig(2, [kvcm.BufferConfig("state", 4096)]),
    ]
    step = kvcm.BatchDesc([kvcm.KVCacheDesc(64, 32)])
    config = kvcm.KVCacheManagerConfig(32, tiers, layers, commit_min_snapshot=True, typical_step=step, constraints=[step])
    return replace(config, swa_scratch_reuse=kvcm.SwaScratchReuseConfig(max_rewind_len=0))


class Listener(kvcm.CacheListener):
    """A listener that overrides nothing."""


def books(worker: kvcm.Transfer | None) -> kvcm.CacheTierConfig:
    """An external tier, with or without a transfer."""
    return kvcm.ExternalGpuTierConfig(100, worker)


class KeepLong(kvcm.EvictionPolicy):
    """A policy of the user's own."""

    def __init__(self) -> None:
        super().__init__(credits=[0, 1000], usual=0)
        order: kvcm.EvictionOrder = self.order
        order.set_credits([0, 2000])

    def class_of(self, end: kvcm.RequestEnd) -> int:
        return 1 if end.num_tokens > 1000 else 0


class KeepSmall(kvcm.DiskAdmission):
    """An admission of the user's own, over those of the package."""

    def __init__(self) -> None:
        self.others: list[kvcm.DiskAdmission] = [kvcm.SecondUse(), kvcm.AdaptiveAdmission()]

    def admits(self, page: kvcm.LeavingPage) -> bool:
        return page.nbytes < 4096 or page.uses > 2 or all(other.admits(page) for other in self.others)

    def loaded(self, page: kvcm.LeavingPage) -> None:
        print(page.reused_blocks, page.complete, page.priority, page.life_cycle)


def learning() -> list[kvcm.EvictionPolicy]:
    """The policies of the package."""
    policy: kvcm.HintsPolicy | kvcm.AdaptivePolicy = kvcm.AdaptivePolicy()
    trusted: bool = policy.trusted
    return [policy, kvcm.HintsPolicy()] if trusted else []


def serve(manager: kvcm.KVCacheManager, stream: Stream, prompt: kvcm.Tokens) -> None:
    """One request, and what is asked about it."""
    scope = kvcm.ReuseScope(7, salt=11)
    assert manager.probe_reuse((7, 11), prompt) == manager.probe_reuse(reuse_scope=scope, input_tokens=prompt) == 0
    found: kvcm.ReuseMatch = manager.find_reuse(scope, prompt, kvcm.MatchLimits(max_tokens=5, whole_blocks=True))
    assert found.get_gpu_page_indices(manager.get_layer_group_id(0)) == []
    manager.create_kv_cache(id=2, reuse_match=found).close()
    with manager.create_kv_cache(scope, prompt, id=1) as cache:
        request: kvcm._KVCache = cache
        status: kvcm.KvCacheStatus = request.status
        assert status is kvcm.CacheStatus.SUSPENDED is kvcm.KVCache.Status.SUSPENDED
        cache.cuda_stream = stream
        assert cache.resume(CudaStream(stream))
        shortage: kvcm.Shortage | None = cache.last_shortage
        assert shortage is None
        row = array("i", [0] * 64)
        cache.set_base_page_index_buf(0, 0, row)
        cache.set_base_page_index_buf(DEFAULT_BEAM_INDEX, 0, None)
        assert cache.resize(64)
        assert cache.resize(None, history_length=0)
        cache.enable_swa_scratch_reuse = False
        cache.capacity = 96
        pages: list[int] = list(cache.get_base_page_indices(0, BeamIndex(0)))
        assert pages[0] != BAD_PAGE_INDEX
        scratch: kvcm.ScratchDesc | None = cache.get_scratch_desc(LayerGroupId(LifeCycleId(0)))
        converter: kvcm.PageIndexConverter = manager.get_page_index_converter(0, "key")
        assert len(converter(pages, index_mode=1, scratch=scratch)) == len(pages) * converter.expansion
        filled: array[int] = converter(pages, 1, scratch, out=row)
        assert filled is row
        written: kvcm.TokenSlots = kvcm.slots_to_write([cache], 0, [0], [3], converter, 1, out=row)
        read: kvcm.TokenSlots = kvcm.slots_to_read([cache], LayerGroupId(0), array("i", [0]), [3], offsets=array("q", [0, 0]))
        assert written.total == read.total == len(read.slots) == 3
        manager.driver.order(stream)
        tables = kvcm.PlainBatchTables(manager, 4, 64)
        assert len(tables.rows([cache])) == 1 if tables.add(cache) == 0 else False
        tables.remove(cache)
        rooms: list[kvcm.MakeRoom] = [kvcm.SuspendYoungest(), kvcm.SuspendCheapest([cache])]
        with manager.step([cache], 96, make_room=rooms[0]) as step:
            begun: kvcm.Step = step
            assert begun.caches == [cache]
            begun.advance([0])
        cache.commit([1, 2, 3])
        cache.commit(accepted_input_tokens=[4], is_end=False)
        assert kvcm.resize_batch([cache], [97]) == 1
        kvcm.commit_batch([cache], [5])
        kvcm.commit_ahead_batch([cache], [6])
        assert cache.resize(97, 97)
        cache.stop_committing()
        drop: kvcm.PlannedDropHandle | None = cache.plan_committed_block_drop()
        if drop is not None:
            drop.drop()
        cache.suspend()
        assert cache.prefetch(1) or cache.prefetch(CACHE_LEVEL1)
        delta: kvcm.KVCacheStatsDelta = cache.commit_pending_stats()
        assert not delta.empty or delta == kvcm.KVCacheStatsDelta()


def addresses(manager: kvcm.KVCacheManager) -> None:
    """What an engine asks once."""
    address: MemAddress = manager.get_mem_pool_base_address(0, "key", 0)
    assert address == manager.get_mem_pool_base_address(LayerId(0), DataRole("key"), kvcm.PageIndexMode.SHARED)
    assert manager.get_page_stride(0, "key") <= manager.get_page_index_upper_bound(0, "key") * 4096
    runs: list[kvcm.AggregatedPageDesc] = manager.get_aggregated_pages([kvcm.BufferId(0, "key"), kvcm.BufferId(0, "value")])
    expanded: kvcm.ExpandedBuffer = runs[0].buffers[0]
    assert expanded.id.layer_id == 0
    for group in manager.pool_group_descs:
        desc: kvcm.PoolGroupDesc = group
        pool: kvcm.PoolDesc = desc.pools[0]
        slots: kvcm.SlotDesc = desc.slot_desc
        variant: kvcm.SlotDescVariant = slots.variants[0]
        buffer: kvcm.CoalescedBuffer = variant.coalesced_buffers[0]
        assert PoolIndex(pool.pool_index) == PoolId(0)
        assert PoolGroupIndex(desc.pool_group_index) >= PoolGroupId(0)
        assert buffer.size > 0
        assert SlotId(0) < desc.num_slots
    life_cycle: kvcm.LifeCycle = kvcm.AttnLifeCycle.make(64, 0, 32)
    assert life_cycle.get_stale_range(128) == kvcm.HalfOpenRange(0, 2)
    table: kvcm.KVCachePageTable = kvcm.page_table_of(manager)
    plan: kvcm.TransferPlan = kvcm.match_page_tables(table, table)
    assert plan.pairings is not None
    assert kvcm.exact_div(64, 32) == 2
    assert [BlockOrdinal(0)] == list(kvcm.typed_range(BlockOrdinal(1)))


def numbers(manager: kvcm.KVCacheManager) -> None:
    """Statistics."""
    assert manager.get_quota(0) == manager.get_quota(CacheLevel(0)) == manager.get_quota(GPU_LEVEL)
    storage: list[kvcm.StorageStatistics] = manager.get_storage_statistics(cache_level=1)
    peaks: list[kvcm.PoolGroupPeakBlockStats] = manager.get_and_reset_iteration_peak_block_stats(0)
    iteration: dict[LifeCycleId, kvcm.KVCacheIterationStatsDelta] = manager.get_and_reset_iteration_stats()
    snapshots: dict[LifeCycleId, kvcm.SsmSnapshotIterationStatsDelta] = manager.get_and_reset_ssm_snapshot_iteration_stats()
    by_level: dict[LifeCycleId, kvcm.ReusedBlocksByLevel] = manager.get_and_reset_iteration_reused_blocks_by_level()
    movement: kvcm.MovementCounters = manager.movement
    reading: kvcm.StatisticsReading = manager.read_statistics()
    totals: kvcm.RequestTotals = reading.requests
    assert len(totals.cached_tokens_by_level) == len(reading.storage)
    assert storage
    assert peaks
    assert movement is not None
    assert len(iteration) + len(snapshots) + len(by_level) >= 0
    manager.mark_stats_dirty(5)
    manager.clear_stats_dirty(kv_cache_id=5)
    assert manager.cache_tier_list[0] is kvcm.CacheTier.GPU_MEM
    if manager.hit_curve_rate > 0:
        manager.restart_hit_curve()
        curve: kvcm.HitCurve = manager.hit_curve(GPU_LEVEL)
        ratios: list[float] = curve.ratios
        assert len(ratios) == len(curve.sizes) == len(curve.hit_tokens) == len(curve.after(3).sizes)
    hits: kvcm.HitsReport = manager.explain_hits()
    groups: tuple[kvcm.GroupHits, ...] = hits.groups
    assert groups[0].layer_group == 0
    report: kvcm.MissReport = manager.explain_miss(None, [1, 2, 3])
    assert report.cause is not kvcm.MissCause.DROPPED
    assert kvcm.PageStatus.HELD.name == "HELD"
    assert Priority(PRIORITY_DEFAULT) > 0
    assert manager.resize(1, 32 * MIB, best_efforts=True)
    manager.adjust()
    resized: kvcm.ResizeResult | None = manager.last_resize
    adjusted: kvcm.AdjustResult | None = manager.last_adjustment
    assert resized
    assert adjusted


def events(manager: kvcm.KVCacheManager, stream: kvcm.KVCacheEventManager) -> None:
    """What routers read."""
    stream.add_created_event([4, 2], [0])
    stream.flush_iteration_events()
    read: list[kvcm.KVCacheEvent] = stream.get_latest_events(0)
    kinds = (kvcm.KVCacheCreatedData, kvcm.KVCacheStoredData, kvcm.KVCacheRemovedData, kvcm.KVCacheUpdatedData)
    assert all(isinstance(event.data, kinds) for event in read)
    assert kvcm.serialize_events(read)
    block = kvcm.KVCacheStoredBlockData(77, [kvcm.UniqueToken(1)], 0, 35)
    stream.add_stored_event(None, [block], 0)
    stream.add_updated_event(77, cache_level=kvcm.KVCacheEventDiff(0, 1))
    stream.add_removed_event(77)
    snapshot: kvcm.EventSnapshot = stream.snapshot_events()
    assert kvcm.EventMirror(snapshot).num_cached([77], 0) >= 0
    assert manager.event_manager is stream
    assert kvcm.v1_block_hash([1, 2]) != 0


def tokens() -> None:
    """Multimodal items and keys."""
    item = kvcm.MmItemContext(bytes(32), "image-1")
    prompt: list[kvcm.TokenIdExt] = [TokenId(1), item, *kvcm.gen_multimodal_cache_key_tokens(1000, bytes(32), 3)]
    assert len(list(kvcm.sequence_to_blockchain_keys(2, None, prompt))) == 4


def errors() -> tuple[type[kvcm.KVCacheError], ...]:
    """All of them."""
    return (
        kvcm.AlreadyDroppedError, kvcm.ConfigError, kvcm.CorruptedError, kvcm.CuError, kvcm.DeviceUnavailableError,
        kvcm.HostRegistrationError, kvcm.LogicError, kvcm.OutOfMemoryError, kvcm.OutOfPagesError, kvcm.PageDataLostError,
        kvcm.UnknownBufferError,
    )  # fmt: skip


def main(folder: str) -> None:
    info: kvcm.BuildInfo = kvcm.build_info()
    assert (BACKEND == "compiled") == info.compiled
    assert NDEBUG in (True, False)
    config = configuration(folder, 64)
    sizes: kvcm.SizingTable = kvcm.explain_sizing(config)
    level: kvcm.SizingLevel = sizes.levels[0]
    rows: list[kvcm.SizingRow] = list(sizes.rows)
    assert rows
    assert level is not None
    emulated = kvcm.EmulatedDriver("random", seed=3)
    driver: kvcm.Driver = emulated
    stream = emulated.create_stream()
    listener = kvcm.KVCacheEventManager(1000, window_size=64)
    codec: kvcm.IKvCacheColdPageCodec = kvcm.create_default_kv_cache_cold_page_codec()
    with kvcm.KVCacheManager(config, listener, codec, driver=driver) as manager:
        assert kvcm.num_live_managers() >= 1
        assert kvcm.poison_reason() is None
        assert kvcm.take_poison() is None
        addresses(manager)
        serve(manager, stream, array("i", range(100)))
        numbers(manager)
        events(manager, listener)
    tokens()
    assert len(errors()) == 11
    assert issubclass(Listener, kvcm.CacheListener)


if __name__ == "__main__":
    main(".")
