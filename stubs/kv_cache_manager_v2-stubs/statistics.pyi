"""Records of what was counted: the deltas that an engine reads, and the tables that the manager adds to.

Rule: counting is a few integer additions where the change happens. Nothing here reads a clock; readers take differences. Blocks are
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
    """Integer fields that add up; the base of the deltas below."""

    def add(self: _Delta, other: _Delta) -> None:
        """Add another delta of the same class to this one, field by field."""

    def subtract(self: _Delta, other: _Delta) -> None:
        """Subtract another delta of the same class, field by field."""

    def clear(self) -> None:
        """All fields to 0."""

    def copy(self: _Delta) -> _Delta: ...
    @property
    def empty(self) -> bool:
        """Whether all fields are 0."""

@dataclass
class KVCacheStatsDelta(StatsDelta):
    """Blocks of attention layers that requests took and found."""

    alloc_total_blocks: int = 0
    alloc_new_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0

class IterationFields(StatsDelta):
    """No dataclass: compiled ones take every class attribute for a field."""

@dataclass
class KVCacheIterationStatsDelta(IterationFields):
    """What happened to one life cycle since the last reading. Bytes: blocks times the slot size of its pool group.

    Movement and drops are those of all pages, whatever caused them: requests, prefetches, snapshots, resizes. A cached page is
    dropped to make room, because nothing can match through it any more, or by `clear_reusable_blocks`. A page that a wider one
    replaces does not count as dropped, nor does a private page at the end of its request.
    """

    iter_alloc_total_blocks: int = 0
    iter_alloc_new_blocks: int = 0
    iter_reused_blocks: int = 0
    iter_missed_blocks: int = 0
    iter_full_reused_blocks: int = 0
    iter_partial_reused_blocks: int = 0
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
        """Reused blocks of those looked up; 0 if none was."""

@dataclass
class SsmSnapshotIterationStatsDelta(StatsDelta):
    """Look-ups of snapshots of recurrent state: one for each request created with tokens.

    The names without `iter_` are those of earlier versions, for one release.
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
        """Hits of all look-ups; 0 if there was none."""

    def __getattr__(self, name: str) -> int | float: ...

@dataclass
class ReusedBlocksByLevel:
    """Reused blocks by the cache level on which they were found; lists by level."""

    full: list[int] = ...
    partial: list[int] = ...

    @property
    def empty(self) -> bool:
        """Whether all counts are 0."""

    def add(self, other: ReusedBlocksByLevel) -> None:
        """Add another table to this one, level by level; the lists grow to the longer one's length."""

@dataclass(frozen=True)
class PoolGroupPeakBlockStats:
    """The largest values of a pool group on a level between two readings, each field on its own."""

    available: int = 0
    unavailable: int = 0
    evictable: int = 0

@dataclass(frozen=True)
class StorageStatistics:
    """A pool group on a level; counts in slots."""

    slot_sizes: tuple[int, ...]
    total: int
    free: int
    evictable: int

    @property
    def available(self) -> int:
        """Slots that can be allocated: free + evictable."""

    @property
    def unavailable(self) -> int: ...

class MovementCounters:
    """Pages moved between levels, dropped, and shared instead of kept twice, per life cycle. Counts never fall.

    moved[life_cycle][source][destination] and dropped[life_cycle][level] count pages; a move within level 0 is a device copy.
    """

    moved: list[list[list[int]]]
    dropped: list[list[int]]
    lost: list[int]
    adopted: list[int]
    taken_over: list[int]

    def __init__(self, num_life_cycles: int = 0, num_levels: int = 0) -> None: ...
    def __reduce__(self) -> tuple[object, ...]:
        """A copy, however it is made, is one of the counts so far and no longer changes."""

    def pages_moved(self, source: SupportsIndex, destination: SupportsIndex) -> int:
        """Pages moved from one level to another, in all life cycles."""

    def pages_dropped(self, level: SupportsIndex) -> int:
        """Pages dropped from a level, in all life cycles."""
