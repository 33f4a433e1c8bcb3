"""The statistics of a manager. Reading them changes no cache and moves no page. Calls that reset a counter are named
`get_and_reset_...`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import SupportsIndex

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.arguments import (
    as_given,
    deprecated,
    renamed,
    request_id,
    whole,
)
from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.ids import (
    GPU_LEVEL,
    LifeCycleId,
    PoolGroupId,
)
from kv_cache_manager_v2.manager_layout import ManagerLayout
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.request.statistics_ledger import StatisticsLedger
from kv_cache_manager_v2.reuse.explain_hits import HitsReport
from kv_cache_manager_v2.statistics import (
    KVCacheIterationStatsDelta,
    KVCacheStatsDelta,
    MovementCounters,
    PoolGroupPeakBlockStats,
    RequestTotals,
    ReusedBlocksByLevel,
    SsmSnapshotIterationStatsDelta,
    StorageStatistics,
)
from kv_cache_manager_v2.storage.hierarchy import Hierarchy


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class StatisticsReading:
    """Everything that a manager counts, at one moment. Counts since construction never decrease."""

    storage: tuple[tuple[StorageStatistics, ...], ...]  # by level and pool group
    movement: MovementCounters  # a copy
    lookups: HitsReport
    requests: RequestTotals
    open_requests: int
    active_requests: int
    cached_blocks: int  # in the radix tree
    transfers_in_flight: int  # file transfers that have not ended, or are not settled
    poisoned: bool


class _TwoReaders:
    """Gives what the ledger counts to readers of changes and to readers of totals.

    The ledger gives each count once. What a reader of totals takes of it is kept for the next reader of changes.
    """

    def __init__(self, ledger: StatisticsLedger, num_life_cycles: int, num_levels: int) -> None:
        self._ledger = ledger
        self._reused = [ReusedBlocksByLevel([0] * num_levels, [0] * num_levels) for _life_cycle in range(num_life_cycles)]
        self._missed = [0] * num_life_cycles
        self._tokens = [0] * num_levels
        self._prefetched = 0
        self._suspended = 0
        self._resumed = 0
        # taken for totals, and not read as changes yet
        self._kept_iteration: dict[int, KVCacheIterationStatsDelta] = {}
        self._kept_by_level: dict[int, ReusedBlocksByLevel] = {}
        self._kept_tokens: list[int] = []
        self._kept_prefetched = 0
        self._kept_suspended = 0
        self._kept_resumed = 0

    def take_iteration(self) -> dict[int, KVCacheIterationStatsDelta]:
        taken = self._ledger.take_iteration()
        for index, delta in taken.items():
            self._missed[index] += delta.iter_missed_blocks
        kept = self._kept_iteration
        if not kept:
            return taken
        self._kept_iteration = {}
        for index, delta in taken.items():
            if index in kept:
                kept[index].add(delta)
            else:
                kept[index] = delta
        return kept

    def take_by_level(self) -> dict[int, ReusedBlocksByLevel]:
        taken = self._ledger.take_by_level()
        for index, table in taken.items():
            self._reused[index].add(table)
        kept = self._kept_by_level
        if not kept:
            return taken
        self._kept_by_level = {}
        for index, table in taken.items():
            if index in kept:
                kept[index].add(table)
            else:
                kept[index] = table
        return kept

    def take_tokens_by_level(self) -> list[int]:
        taken = self._ledger.take_tokens_by_level()
        for level, count in enumerate(taken):
            self._tokens[level] += count
        for level, count in enumerate(self._kept_tokens):
            taken[level] += count
        self._kept_tokens = []
        return taken

    def take_disk_prefetched(self) -> int:
        taken = self._ledger.take_disk_prefetched()
        self._prefetched += taken
        taken += self._kept_prefetched
        self._kept_prefetched = 0
        return taken

    def take_suspend_resume(self) -> tuple[int, int]:
        suspended, resumed = self._ledger.take_suspend_resume()
        self._suspended += suspended
        self._resumed += resumed
        taken = (suspended + self._kept_suspended, resumed + self._kept_resumed)
        self._kept_suspended = 0
        self._kept_resumed = 0
        return taken

    def totals(self) -> RequestTotals:
        """All counts since construction, as a copy. The next reader of changes misses nothing."""
        self._kept_iteration = self.take_iteration()
        self._kept_by_level = self.take_by_level()
        self._kept_tokens = self.take_tokens_by_level()
        self._kept_prefetched = self.take_disk_prefetched()
        self._kept_suspended, self._kept_resumed = self.take_suspend_resume()
        reused = [ReusedBlocksByLevel(list(table.full), list(table.partial)) for table in self._reused]
        return RequestTotals(reused, list(self._missed), list(self._tokens), self._prefetched, self._suspended, self._resumed)


class ManagerStatistics(ManagerLayout):
    """The part of `KVCacheManager` that has its statistics: totals, changes since the last reading, and slot counts."""

    def __init__(self, config: KVCacheManagerConfig, driver: Driver, hierarchy: Hierarchy, shared: ManagerState) -> None:
        super().__init__(config, driver, hierarchy, shared)
        self._ledger: StatisticsLedger = shared.ledger
        self._readers = _TwoReaders(shared.ledger, self._layout.num_life_cycles, hierarchy.num_levels)

    def read_statistics(self) -> StatisticsReading:
        """Everything that the manager counts, read at one moment. Resets nothing, and settles no transfer.

        For a metrics endpoint: any thread may call it. The lock is held once, for a time that does not depend on the number of
        blocks: O(levels x (levels x life cycles + pool groups)). Raises LogicError after `shutdown()`.
        """
        shared = self._shared
        hierarchy = self._hierarchy
        with shared.lock:
            if shared.refusal and not shared.poison:
                raise LogicError(f"read_statistics(): {shared.refusal}")
            return StatisticsReading(
                tuple([tuple(self.get_storage_statistics(level)) for level in range(hierarchy.num_levels)]),
                hierarchy.counters.copy(),
                shared.losses.report(),
                self._readers.totals(),
                len(shared.open),
                shared.num_active,
                shared.tree.num_blocks,
                hierarchy.transfers_in_flight,
                shared.poison != "",
            )

    def get_committed_stats(self) -> KVCacheStatsDelta:
        """Totals since construction: counts that requests committed, and loads from colder tiers, of attention layers.

        Requests commit counts with `KVCache.commit_pending_stats`. Totals never decrease. Returns a copy.
        """
        with self._shared.lock:
            return self._ledger.committed()

    def get_and_reset_iteration_stats(self) -> dict[LifeCycleId, KVCacheIterationStatsDelta]:
        """Changes since the last call by life cycle, including moves of recurrent layers' pages.

        Life cycles without changes are omitted.
        """
        with self._shared.lock:
            return {LifeCycleId(index): delta for index, delta in self._readers.take_iteration().items()}

    def get_and_reset_ssm_snapshot_iteration_stats(self) -> dict[LifeCycleId, SsmSnapshotIterationStatsDelta]:
        """Snapshot look-ups since the last call, by life cycle."""
        with self._shared.lock:
            return {LifeCycleId(index): delta for index, delta in self._ledger.take_snapshots().items()}

    def get_and_reset_iteration_ssm_snapshot_stats(self) -> dict[LifeCycleId, SsmSnapshotIterationStatsDelta]:
        """The old name of `get_and_reset_ssm_snapshot_iteration_stats`, which works in this release."""
        deprecated("get_and_reset_iteration_ssm_snapshot_stats() is now get_and_reset_ssm_snapshot_iteration_stats()")
        return self.get_and_reset_ssm_snapshot_iteration_stats()

    def get_and_reset_iteration_reused_blocks_by_level(self) -> dict[LifeCycleId, ReusedBlocksByLevel]:
        """Reused blocks since the last call, by life cycle and by the level on which each page was found."""
        with self._shared.lock:
            return {LifeCycleId(index): table for index, table in self._readers.take_by_level().items()}

    def get_and_reset_iteration_cached_tokens_by_level(self) -> list[int]:
        """Reused tokens since the last call, by the coldest level of each block's pages."""
        with self._shared.lock:
            return self._readers.take_tokens_by_level()

    def get_and_reset_iteration_disk_prefetch_blocks(self) -> int:
        """Pages that `prefetch` moved from disk to host memory since the last call."""
        with self._shared.lock:
            return self._readers.take_disk_prefetched()

    def get_and_reset_iteration_peak_block_stats(
        self, cache_level: SupportsIndex = GPU_LEVEL, level: SupportsIndex | None = None
    ) -> list[PoolGroupPeakBlockStats]:
        """The largest slot counts since the last reading, by pool group. `level` is the old name of the parameter."""
        with self._shared.lock:
            return self._ledger.take_peaks(self._level(cache_level, level))

    def get_and_reset_iteration_peak_block_stats_by_level(self) -> list[list[PoolGroupPeakBlockStats]]:
        """As `get_and_reset_iteration_peak_block_stats`, for every level."""
        with self._shared.lock:
            return [self._ledger.take_peaks(level) for level in range(self._hierarchy.num_levels)]

    def get_and_reset_iteration_suspend_resume_stats(self) -> tuple[int, int]:
        """(suspensions, resumes without first resumes) since the last call."""
        with self._shared.lock:
            return self._readers.take_suspend_resume()

    def record_request_suspended(self) -> None:
        """Count a suspension that the engine made without `KVCache.suspend`."""
        with self._shared.lock:
            self._ledger.suspended += 1 if self._ledger.enabled else 0

    def record_request_resumed(self) -> None:
        """Count a resume that the engine made without `KVCache.resume`."""
        with self._shared.lock:
            self._ledger.resumed += 1 if self._ledger.enabled else 0

    def free_and_evictable(self, pool_group_id: SupportsIndex = 0, cache_level: SupportsIndex = GPU_LEVEL) -> tuple[int, int]:
        """Slots of a pool group on a level that are free, and those whose pages can be offloaded or dropped. O(1).

        Slots of clean copies count as free.
        Raises ConfigError for a pool group or a level that does not exist.
        """
        group = whole(pool_group_id, "pool_group_id")
        number = self._level(cache_level)
        count = self._layout.num_pool_groups
        if not 0 <= group < count:
            raise ConfigError(f"pool group {group} is out of range: this manager has {count}")
        with self._shared.lock:
            return self._hierarchy.free(number, group), self._hierarchy.evictable(number, group)

    def get_storage_statistics(
        self, cache_level: SupportsIndex = GPU_LEVEL, level: SupportsIndex | None = None
    ) -> list[StorageStatistics]:
        """The present slot counts of each pool group on a level. `level` is the old name of the parameter."""
        number = self._level(cache_level, level)
        hierarchy = self._hierarchy
        with self._shared.lock:
            return [
                StorageStatistics(
                    tuple(sizes),
                    hierarchy.total(number, group),
                    hierarchy.free(number, group),
                    hierarchy.evictable(number, group),
                    hierarchy.cells[group][number].num_copies,
                )
                for group, sizes in enumerate(self._layout.slot_sizes)
            ]

    def get_life_cycle_pool_group_indices(
        self, cache_level: SupportsIndex = GPU_LEVEL, level: SupportsIndex | None = None
    ) -> list[PoolGroupId]:
        """The pool group of each life cycle, which is the same on every level. `level` is the old name of the parameter."""
        self._level(cache_level, level)
        return list(self._layout.pool_group_of)

    def mark_stats_dirty(self, kv_cache_id: Hashable = None, id: Hashable = None) -> None:
        """Mark a request as having uncommitted counts. None is ignored. `id` is the old name of the parameter."""
        number = _id(kv_cache_id, id)
        if number is not None:
            with self._shared.lock:
                self._ledger.mark_dirty(number, None)

    def clear_stats_dirty(self, kv_cache_id: Hashable = None, id: Hashable = None) -> None:
        """Clear the mark of uncommitted counts of a request. None is ignored. `id` is the old name of the parameter."""
        number = _id(kv_cache_id, id)
        if number is not None:
            with self._shared.lock:
                self._ledger.clear_dirty(number)

    def get_dirty_stats_kv_cache_ids(self) -> set[Hashable]:
        """Ids of the requests that have uncommitted counts, as a copy."""
        with self._shared.lock:
            kept = self._ledger.dirty_ids()
        return {as_given(number) for number in kept}

    def mark_stats_excluded(self, kv_cache_id: Hashable = None, id: Hashable = None) -> None:
        """Exclude a dummy request from statistics and from the samples for rebalancing. None is ignored.

        `id` is the old name of the parameter.
        """
        number = _id(kv_cache_id, id)
        if number is not None:
            with self._shared.lock:
                self._ledger.excluded.add(number)
                self._ledger.clear_dirty(number)

    def clear_stats_excluded(self, kv_cache_id: Hashable = None, id: Hashable = None) -> None:
        """Include a request in statistics again, with the counts that it has. None is ignored. `id`: the parameter's old name."""
        number = _id(kv_cache_id, id)
        if number is not None:
            with self._shared.lock:
                self._ledger.excluded.discard(number)
                for request in self._shared.open.values():
                    if request.request_id == number:
                        request.mark_dirty()  # its counts can be committed again

    def is_stats_excluded(self, kv_cache_id: Hashable = None, id: Hashable = None) -> bool:
        """Whether a request is excluded from statistics. `id` is the old name of the parameter."""
        number = _id(kv_cache_id, id)
        return number is not None and number in self._ledger.excluded


def _id(kv_cache_id: Hashable, id: Hashable) -> object:
    """`id` is the old name."""
    return request_id(kv_cache_id if id is None else renamed("id", "kv_cache_id", id), "kv_cache_id")
