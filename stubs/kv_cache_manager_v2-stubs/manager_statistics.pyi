"""The statistics of a manager. Reading them changes no cache and moves no page. Calls that reset a counter are named
`get_and_reset_...`."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import SupportsIndex

from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.ids import GPU_LEVEL, LifeCycleId, PoolGroupId
from kv_cache_manager_v2.manager_layout import ManagerLayout
from kv_cache_manager_v2.request.manager_state import ManagerState
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

@dataclass(frozen=True)
class StatisticsReading:
    """Everything that a manager counts, at one moment. Counts since construction never decrease."""

    storage: tuple[tuple[StorageStatistics, ...], ...]
    movement: MovementCounters
    lookups: HitsReport
    requests: RequestTotals
    open_requests: int
    active_requests: int
    cached_blocks: int
    transfers_in_flight: int
    poisoned: bool

class ManagerStatistics(ManagerLayout):
    """The part of `KVCacheManager` that has its statistics: totals, changes since the last reading, and slot counts."""

    def __init__(self, config: KVCacheManagerConfig, driver: Driver, hierarchy: Hierarchy, shared: ManagerState) -> None: ...
    def read_statistics(self) -> StatisticsReading:
        """Everything that the manager counts, read at one moment. Resets nothing, and settles no transfer.

        For a metrics endpoint: any thread may call it. The lock is held once, for a time that does not depend on the number of
        blocks: O(levels x (levels x life cycles + pool groups)). Raises LogicError after `shutdown()`.
        """

    def get_committed_stats(self) -> KVCacheStatsDelta:
        """Totals since construction: counts that requests committed, and loads from colder tiers, of attention layers.

        Requests commit counts with `KVCache.commit_pending_stats`. Totals never decrease. Returns a copy.
        """

    def get_and_reset_iteration_stats(self) -> dict[LifeCycleId, KVCacheIterationStatsDelta]:
        """Changes since the last call by life cycle, including moves of recurrent layers' pages.

        Life cycles without changes are omitted.
        """

    def get_and_reset_ssm_snapshot_iteration_stats(self) -> dict[LifeCycleId, SsmSnapshotIterationStatsDelta]:
        """Snapshot look-ups since the last call, by life cycle."""

    def get_and_reset_iteration_ssm_snapshot_stats(self) -> dict[LifeCycleId, SsmSnapshotIterationStatsDelta]:
        """The old name of `get_and_reset_ssm_snapshot_iteration_stats`, which works in this release."""

    def get_and_reset_iteration_reused_blocks_by_level(self) -> dict[LifeCycleId, ReusedBlocksByLevel]:
        """Reused blocks since the last call, by life cycle and by the level on which each page was found."""

    def get_and_reset_iteration_cached_tokens_by_level(self) -> list[int]:
        """Reused tokens since the last call, by the coldest level of each block's pages."""

    def get_and_reset_iteration_disk_prefetch_blocks(self) -> int:
        """Pages that `prefetch` moved from disk to host memory since the last call."""

    def get_and_reset_iteration_peak_block_stats(
        self, cache_level: SupportsIndex = GPU_LEVEL, level: SupportsIndex | None = None
    ) -> list[PoolGroupPeakBlockStats]:
        """The largest slot counts since the last reading, by pool group. `level` is the old name of the parameter."""

    def get_and_reset_iteration_peak_block_stats_by_level(self) -> list[list[PoolGroupPeakBlockStats]]:
        """As `get_and_reset_iteration_peak_block_stats`, for every level."""

    def get_and_reset_iteration_suspend_resume_stats(self) -> tuple[int, int]:
        """(suspensions, resumes without first resumes) since the last call."""

    def record_request_suspended(self) -> None:
        """Count a suspension that the engine made without `KVCache.suspend`."""

    def record_request_resumed(self) -> None:
        """Count a resume that the engine made without `KVCache.resume`."""

    def free_and_evictable(self, pool_group_id: SupportsIndex = 0, cache_level: SupportsIndex = GPU_LEVEL) -> tuple[int, int]:
        """Slots of a pool group on a level that are free, and those whose pages can be offloaded or dropped. O(1).

        Slots of clean copies count as free.
        Raises ConfigError for a pool group or a level that does not exist.
        """

    def get_storage_statistics(
        self, cache_level: SupportsIndex = GPU_LEVEL, level: SupportsIndex | None = None
    ) -> list[StorageStatistics]:
        """The present slot counts of each pool group on a level. `level` is the old name of the parameter."""

    def get_life_cycle_pool_group_indices(
        self, cache_level: SupportsIndex = GPU_LEVEL, level: SupportsIndex | None = None
    ) -> list[PoolGroupId]:
        """The pool group of each life cycle, which is the same on every level. `level` is the old name of the parameter."""

    def mark_stats_dirty(self, kv_cache_id: Hashable = None, id: Hashable = None) -> None:
        """Mark a request as having uncommitted counts. None is ignored. `id` is the old name of the parameter."""

    def clear_stats_dirty(self, kv_cache_id: Hashable = None, id: Hashable = None) -> None:
        """Clear the mark of uncommitted counts of a request. None is ignored. `id` is the old name of the parameter."""

    def get_dirty_stats_kv_cache_ids(self) -> set[Hashable]:
        """Ids of the requests that have uncommitted counts, as a copy."""

    def mark_stats_excluded(self, kv_cache_id: Hashable = None, id: Hashable = None) -> None:
        """Exclude a dummy request from statistics and from the samples for rebalancing. None is ignored.

        `id` is the old name of the parameter.
        """

    def clear_stats_excluded(self, kv_cache_id: Hashable = None, id: Hashable = None) -> None:
        """Include a request in statistics again, with the counts that it has. None is ignored. `id`: the parameter's old name."""

    def is_stats_excluded(self, kv_cache_id: Hashable = None, id: Hashable = None) -> bool:
        """Whether a request is excluded from statistics. `id` is the old name of the parameter."""
