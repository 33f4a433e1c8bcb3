"""The statistics of a manager. Reading them changes no cache and moves no page. Calls that reset a counter are named
`get_and_reset_...`."""

from __future__ import annotations

from collections.abc import Hashable
from typing import SupportsIndex

from kv_cache_manager_v2.arguments import (
    as_given,
    deprecated,
    renamed,
    request_id,
    whole,
)
from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import (
    GPU_LEVEL,
    LifeCycleId,
    PoolGroupId,
)
from kv_cache_manager_v2.manager_layout import ManagerLayout
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.request.statistics_ledger import StatisticsLedger
from kv_cache_manager_v2.statistics import (
    KVCacheIterationStatsDelta,
    KVCacheStatsDelta,
    PoolGroupPeakBlockStats,
    ReusedBlocksByLevel,
    SsmSnapshotIterationStatsDelta,
    StorageStatistics,
)
from kv_cache_manager_v2.storage.hierarchy import Hierarchy


class ManagerStatistics(ManagerLayout):
    """The part of `KVCacheManager` that has its statistics: totals, changes since the last reading, and slot counts."""

    def __init__(self, config: KVCacheManagerConfig, driver: Driver, hierarchy: Hierarchy, shared: ManagerState) -> None:
        super().__init__(config, driver, hierarchy, shared)
        self._ledger: StatisticsLedger = shared.ledger

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
            return {LifeCycleId(index): delta for index, delta in self._ledger.take_iteration().items()}

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
            return {LifeCycleId(index): table for index, table in self._ledger.take_by_level().items()}

    def get_and_reset_iteration_cached_tokens_by_level(self) -> list[int]:
        """Reused tokens since the last call, by the coldest level of each block's pages."""
        with self._shared.lock:
            return self._ledger.take_tokens_by_level()

    def get_and_reset_iteration_disk_prefetch_blocks(self) -> int:
        """Pages that `prefetch` moved from disk to host memory since the last call."""
        with self._shared.lock:
            return self._ledger.take_disk_prefetched()

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
            return self._ledger.take_suspend_resume()

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
