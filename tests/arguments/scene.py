"""A manager in the middle of its work, and what can be seen of it: a refused call must leave all of that as it was."""

from __future__ import annotations

from array import array
from types import TracebackType

from kv_cache_manager_v2 import (
    BufferId,
    EmulatedDriver,
    EventMirror,
    HalfOpenRange,
    KVCache,
    KVCacheEvent,
    KVCacheEventManager,
    KVCacheManager,
    KVCacheManagerConfig,
    KVCachePageTable,
    KVCacheStatsDelta,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    LayerGroupId,
    PlainBatchTables,
    TransferPlan,
    match_page_tables,
    page_table_of,
)
from tests.support.models import KEY, hybrid
from tests.support.rig import Rig, toks


def setup() -> KVCacheManagerConfig:
    """Full attention, a window and recurrent layers, with host memory behind, and a live hit curve."""
    config = hybrid(8, 64, kinds=("full", (8, 0)), host_slots=32)
    config.hit_curve_rate = 1.0
    return config


class Scene:
    """One manager with an ACTIVE, a SUSPENDED and a closed cache, one in the middle of a step, and another manager beside it."""

    def __init__(self) -> None:
        self.events = KVCacheEventManager(1000)
        self.rig = Rig(setup(), engine=False, events=self.events)
        self.other = Rig(setup(), engine=False)
        self.manager: KVCacheManager = self.rig.manager
        self.driver: EmulatedDriver = self.rig.driver
        self.stream = self.rig.stream
        self.active = self._start(self.rig)
        self.suspended = self._start(self.rig)
        self.suspended.suspend()
        self.closed = self.rig.create()
        self.closed.close()
        self.foreign = self._start(self.other)
        self.tables = PlainBatchTables(self.manager, 2, 16)
        self.tables.add(self.suspended)
        self.step_tables = PlainBatchTables(self.manager, 2, 16)
        self.stepping = self._start(self.rig)
        self.step_tables.add(self.stepping)
        self.step = self.manager.step([self.stepping], 4).__enter__()
        self.events.flush_iteration_events()
        self.mirror = EventMirror(self.events.snapshot_events())
        self.table: KVCachePageTable = page_table_of(self.manager)
        self.plan: TransferPlan = match_page_tables(self.table, self.table)
        self.stats = KVCacheStatsDelta(1, 2, 3, 4)
        self.range = HalfOpenRange(2, 5)
        self.buffer = array("i", [7]) * 16

    def _start(self, rig: Rig) -> KVCache:
        """A request of 10 tokens, 6 of them committed."""
        cache = rig.open()
        assert cache.resize(10)
        cache.commit(toks(0, 6))
        return cache

    def suspend_all(self) -> None:
        """For calls that need it."""
        self.active.suspend()
        self.stepping.suspend()

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.rig.__exit__(kind, error, trace)
        self.other.__exit__(kind, error, trace)

    # --- what valid arguments are made of

    def stored_block(self) -> KVCacheStoredBlockData:
        return KVCacheStoredBlockData(77, b"\x01\x00\x00\x00", 0, 35)

    def event(self) -> KVCacheEvent:
        """The event that the mirror expects next."""
        return KVCacheEvent(self.mirror.next_event_id, KVCacheStoredData(None, [self.stored_block()]), 0, layer_group_id=0)

    def buffer_id(self) -> BufferId:
        return BufferId(0, KEY)

    def group(self) -> LayerGroupId:
        return self.manager.get_layer_group_id(0)

    def recurrent_group(self) -> LayerGroupId:
        return self.manager.get_layer_group_id(2)

    # --- what must stay

    def print_of(self) -> list[object]:
        """Everything that a caller can see, and every invariant checked."""
        for rig in (self.rig, self.other):
            rig.manager.check_invariants()
            rig.driver.check_invariants()
        seen: list[object] = []
        for cache in (self.active, self.suspended, self.closed, self.foreign, self.stepping):
            seen += [
                cache.status,
                cache.id,
                cache.beam_width,
                cache.text_only,
                cache.committed_tokens,
                cache.capacity,
                cache.history_length,
                cache.num_blocks,
                cache.pages_by_level,
                repr(cache.last_shortage),
                cache.has_scratch_slots,
                cache.enable_swa_scratch_reuse,
                cache.reuse_scope,
            ]
            if cache is not self.closed:
                seen += [cache.cuda_stream, list(cache.get_base_page_indices(self.group()))]
        for manager in (self.manager, self.other.manager):
            seen += [
                manager.num_open_caches,
                manager.get_committed_stats(),
                repr(manager.movement),
                manager.get_quota(self.rig_level()),
                [manager.get_storage_statistics(level) for level in self.levels()],
                manager.get_dirty_stats_kv_cache_ids(),
                [manager.is_stats_excluded(number) for number in range(8)],
                manager.shared.tree.num_blocks,
                manager.probe_reuse(None, toks(0, 12)),
                manager.tuner.num_samples,
            ]
        seen += [self.events.snapshot_events(), self.events.num_dropped_events, self.events.window_size_by_layer_group]
        seen += [self.mirror.next_event_id, sorted(map(repr, self.mirror.blocks)), self.plan.filled, self.plan.pairings]
        seen += [self.tables.num_unused_rows, [self.tables.table(group).tolist() for group in range(3)]]
        seen += [self.stats.copy(), list(self.range), list(self.buffer)]
        seen += [self.driver.streams_live, self.driver.gates_live, self.driver.mapped_bytes]
        return seen

    def rig_level(self) -> int:
        return 0

    def levels(self) -> list[int]:
        return [0, 1]
