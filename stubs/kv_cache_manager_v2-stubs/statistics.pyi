"""Records of statistics: the deltas that an engine reads, and the tables to which the manager adds.

Counting is a few integer additions at the place of the change. Nothing here reads a clock; readers compute differences. Blocks are
counted per attention life cycle and beam: one block of a model with two life cycles counts twice.
"""

from dataclasses import dataclass
from typing import Final, SupportsIndex, TypeVar

_Delta = TypeVar("_Delta", bound="StatsDelta")
ITERATION_FIELDS: Final = (
    "iter_alloc_total_blocks",
    "iter_alloc_new_blocks",
    "iter_reused_blocks",
    "iter_full_reused_blocks",
    "iter_partial_reused_blocks",
    "iter_missed_blocks",
    "iter_gen_alloc_blocks",
    "iter_onboard_blocks",
    "iter_onboard_bytes",
    "iter_offload_blocks",
    "iter_offload_bytes",
    "iter_intra_device_copy_blocks",
    "iter_intra_device_copy_bytes",
    "iter_host_dropped_blocks",
    "iter_host_dropped_bytes",
)

@dataclass
class StatsDelta:
    """The base class of the deltas below: a record of integer fields that can be added and subtracted."""

    def add(self: _Delta, other: _Delta) -> None:
        """Add another delta of the same class to this one, field by field."""

    def subtract(self: _Delta, other: _Delta) -> None:
        """Subtract another delta of the same class, field by field."""

    def clear(self) -> None:
        """Set all fields to 0."""

    def copy(self: _Delta) -> _Delta: ...
    @property
    def empty(self) -> bool:
        """Whether all fields are 0."""

@dataclass
class KVCacheStatsDelta(StatsDelta):
    """Blocks of attention layers that requests allocated and reused."""

    alloc_total_blocks: int = 0
    alloc_new_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0

class IterationFields(StatsDelta):
    """Has the names of the fields. Not a dataclass: a compiled dataclass treats every class attribute as a field."""

@dataclass
class KVCacheIterationStatsDelta(IterationFields):
    """Changes in one life cycle since the last reading. Bytes are blocks times the slot size of the pool group.

    Moves and drops of all pages are counted, whether caused by requests, prefetches, snapshots or resizes. A cached page is dropped
    when its slot is needed, when no match can use it any more, or by `clear_reusable_blocks`. A page replaced by one with more
    coverage does not count as dropped, and neither does a page that was never cached.
    """

    iter_alloc_total_blocks: int = 0
    iter_alloc_new_blocks: int = 0
    iter_reused_blocks: int = 0
    iter_full_reused_blocks: int = 0
    iter_partial_reused_blocks: int = 0
    iter_missed_blocks: int = 0
    iter_gen_alloc_blocks: int = 0
    iter_onboard_blocks: int = 0
    iter_onboard_bytes: int = 0
    iter_offload_blocks: int = 0
    iter_offload_bytes: int = 0
    iter_intra_device_copy_blocks: int = 0
    iter_intra_device_copy_bytes: int = 0
    iter_host_dropped_blocks: int = 0
    iter_host_dropped_bytes: int = 0
    iter_gpu_dropped_blocks: int = 0
    iter_disk_dropped_blocks: int = 0
    iter_lost_blocks: int = 0

    @property
    def iter_cache_hit_rate(self) -> float:
        """Reused blocks as a share of those looked up; 0 if there were none."""

@dataclass
class SsmSnapshotIterationStatsDelta(StatsDelta):
    """Look-ups of snapshots of recurrent state: one per request created with tokens.

    The field names without `iter_`, of earlier versions, still work in this release.
    """

    iter_snapshot_lookups: int = 0
    iter_snapshot_hits: int = 0
    iter_snapshot_misses: int = 0
    iter_reused_tokens: int = 0
    iter_unreused_tokens: int = 0
    iter_aligned_snapshot_hits: int = 0
    iter_unaligned_snapshot_hits: int = 0

    @property
    def iter_snapshot_hit_rate(self) -> float:
        """Hits as a share of all look-ups; 0 if there were none."""

    def __getattr__(self, name: str) -> int | float: ...

@dataclass
class ReusedBlocksByLevel:
    """Reused blocks by the cache level on which they were found. Each list is indexed by level."""

    full: list[int] = ...
    partial: list[int] = ...

    @property
    def empty(self) -> bool:
        """Whether all counts are 0."""

    def add(self, other: ReusedBlocksByLevel) -> None:
        """Add another table level by level. The lists grow to the length of the longer table."""

@dataclass(frozen=True)
class PoolGroupPeakBlockStats:
    """The largest value of each field for a pool group on a level between two readings. Fields may peak at different times."""

    available: int = 0
    unavailable: int = 0
    evictable: int = 0

@dataclass(frozen=True)
class StorageStatistics:
    """The slot counts of a pool group on a level."""

    slot_sizes: tuple[int, ...]
    total: int
    free: int
    evictable: int
    copies: int = 0

    @property
    def available(self) -> int:
        """Slots that can be allocated: free + evictable."""

    @property
    def unavailable(self) -> int: ...

@dataclass
class RequestTotals:
    """What the requests of a manager have committed since construction. Totals never decrease, whoever resets other counts."""

    reused_blocks: list[ReusedBlocksByLevel]
    missed_blocks: list[int]
    cached_tokens_by_level: list[int]
    disk_prefetched_blocks: int = 0
    suspensions: int = 0
    resumes: int = 0

class MovementCounters:
    """Pages moved between levels, dropped, lost and shared, per life cycle. Counts never decrease.

    moved[life_cycle][source][destination], dropped[life_cycle][level] and returned[life_cycle][level] count pages; a move within
    level 0 is a device copy.
    """

    moved: list[list[list[int]]]
    dropped: list[list[int]]
    returned: list[list[int]]
    lost: list[int]
    adopted: list[int]
    taken_over: list[int]

    def __init__(self, num_life_cycles: int = 0, num_levels: int = 0) -> None: ...
    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles have the counts so far, and do not change."""

    def copy(self) -> MovementCounters:
        """The counts so far, which do not change."""

    def pages_moved(self, source: SupportsIndex, destination: SupportsIndex) -> int:
        """Pages moved from one level to another, in all life cycles."""

    def pages_dropped(self, level: SupportsIndex) -> int:
        """Pages dropped from a level, in all life cycles."""

    def pages_returned(self, level: SupportsIndex) -> int:
        """Pages that were evicted to their clean copies on a level without a byte copied, in all life cycles."""
