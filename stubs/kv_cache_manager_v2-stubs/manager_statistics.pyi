"""What can be asked of a manager: its statistics.

Rule: nothing here changes a cache or moves a page; a reading that resets a counter says so in its name.
"""

from typing import SupportsIndex

from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.ids import GPU_LEVEL, LifeCycleId, PoolGroupId
from kv_cache_manager_v2.manager_layout import ManagerLayout
from kv_cache_manager_v2.request.manager_state import ManagerState
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
    """The statistics of `KVCacheManager`: totals, what happened since the last reading, what the storage holds."""

    def __init__(self, config: KVCacheManagerConfig, driver: Driver, hierarchy: Hierarchy, shared: ManagerState) -> None: ...
    def get_committed_stats(self) -> KVCacheStatsDelta:
        """Totals since construction of what requests handed in with `KVCache.commit_pending_stats`, and of loads from colder tiers;
        attention layers only. They never fall. A copy."""

    def get_and_reset_iteration_stats(self) -> dict[LifeCycleId, KVCacheIterationStatsDelta]:
        """Per life cycle, what happened since the last call, recurrent layers' movement included; only those to which
        something did."""

    def get_and_reset_ssm_snapshot_iteration_stats(self) -> dict[LifeCycleId, SsmSnapshotIterationStatsDelta]:
        """Look-ups of snapshots since the last call."""

    def get_and_reset_iteration_ssm_snapshot_stats(self) -> dict[LifeCycleId, SsmSnapshotIterationStatsDelta]:
        """The old name of `get_and_reset_ssm_snapshot_iteration_stats`, for one release."""

    def get_and_reset_iteration_reused_blocks_by_level(self) -> dict[LifeCycleId, ReusedBlocksByLevel]:
        """Reused blocks since the last call, by life cycle and by the level on which each page was found."""

    def get_and_reset_iteration_cached_tokens_by_level(self) -> list[int]:
        """Reused tokens since the last call, by the level from which each block had to be brought."""

    def get_and_reset_iteration_disk_prefetch_blocks(self) -> int:
        """Pages that `prefetch` moved from disk to host memory since the last call."""

    def get_and_reset_iteration_peak_block_stats(
        self, cache_level: SupportsIndex = GPU_LEVEL, level: SupportsIndex | None = None
    ) -> list[PoolGroupPeakBlockStats]:
        """By pool group, the largest counts since the last reading. `level` is the old parameter name."""

    def get_and_reset_iteration_peak_block_stats_by_level(self) -> list[list[PoolGroupPeakBlockStats]]:
        """As `get_and_reset_iteration_peak_block_stats`, for every level."""

    def get_and_reset_iteration_suspend_resume_stats(self) -> tuple[int, int]:
        """(suspensions, resumes but for first ones) since the last call."""

    def record_request_suspended(self) -> None:
        """Count a suspension that the engine made by other means."""

    def record_request_resumed(self) -> None:
        """Count a resume that the engine made by other means."""

    def get_storage_statistics(
        self, cache_level: SupportsIndex = GPU_LEVEL, level: SupportsIndex | None = None
    ) -> list[StorageStatistics]:
        """Slots of each pool group on a level, now. `level` is the old parameter name."""

    def get_life_cycle_pool_group_indices(
        self, cache_level: SupportsIndex = GPU_LEVEL, level: SupportsIndex | None = None
    ) -> list[PoolGroupId]:
        """The pool group of each life cycle; the same on every level. `level` is the old parameter name."""

    def mark_stats_dirty(self, kv_cache_id: SupportsIndex | None = None, id: SupportsIndex | None = None) -> None:
        """Note that a request has counts to commit. None is ignored. `id` is the old parameter name."""

    def clear_stats_dirty(self, kv_cache_id: SupportsIndex | None = None, id: SupportsIndex | None = None) -> None:
        """Forget that a request has counts to commit. None is ignored. `id` is the old parameter name."""

    def get_dirty_stats_kv_cache_ids(self) -> set[int]:
        """Ids of the requests that have counts to commit. A copy."""

    def mark_stats_excluded(self, kv_cache_id: SupportsIndex | None = None, id: SupportsIndex | None = None) -> None:
        """Count the request nowhere, and do not let it teach the rebalancing: it is a dummy. None is ignored.

        `id` is the old parameter name.
        """

    def clear_stats_excluded(self, kv_cache_id: SupportsIndex | None = None, id: SupportsIndex | None = None) -> None:
        """Count the request again. None is ignored. `id` is the old parameter name."""

    def is_stats_excluded(self, kv_cache_id: SupportsIndex | None = None, id: SupportsIndex | None = None) -> bool:
        """Whether the request counts nowhere. `id` is the old parameter name."""
