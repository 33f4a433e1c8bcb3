"""Records of statistics: the deltas that an engine reads, and the tables to which the manager adds.

Counting is a few integer additions at the place of the change. Nothing here reads a clock; readers compute differences. Blocks are
counted per attention life cycle and beam: one block of a model with two life cycles counts twice.
"""

from __future__ import annotations

import warnings
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Final, SupportsIndex, TypeVar

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.arguments import instance, whole
from kv_cache_manager_v2.errors import ConfigError

_Delta = TypeVar("_Delta", bound="StatsDelta")

# The fields of KVCacheIterationStatsDelta that engines read by name, in their order.
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


@mypyc_attr(native_class=False)
@dataclass
class StatsDelta:
    """The base class of the deltas below: a record of integer fields that can be added and subtracted."""

    def add(self: _Delta, other: _Delta) -> None:
        """Add another delta of the same class to this one, field by field."""
        instance(other, type(self), "other")
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def subtract(self: _Delta, other: _Delta) -> None:
        """Subtract another delta of the same class, field by field."""
        instance(other, type(self), "other")
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) - getattr(other, item.name))

    def clear(self) -> None:
        """Set all fields to 0."""
        for item in fields(self):
            setattr(self, item.name, 0)

    def copy(self: _Delta) -> _Delta:
        return replace(self)

    @property
    def empty(self) -> bool:
        """Whether all fields are 0."""
        return not any(getattr(self, item.name) for item in fields(self))


@mypyc_attr(native_class=False)
@dataclass
class KVCacheStatsDelta(StatsDelta):
    """Blocks of attention layers that requests allocated and reused."""

    alloc_total_blocks: int = 0  # slots allocated: for growth, copies of partly matched blocks, and loads from colder tiers
    alloc_new_blocks: int = 0  # always equal to alloc_total_blocks
    reused_blocks: int = 0  # blocks reused by matches, without stale ones
    missed_blocks: int = 0  # blocks of prompts that had to be computed


@mypyc_attr(native_class=False)
class IterationFields(StatsDelta):
    """Has the names of the fields. Not a dataclass: a compiled dataclass treats every class attribute as a field."""

    _field_names = ITERATION_FIELDS  # no annotation: mypyc 2.4.1 would make a ClassVar a field of the dataclass


@mypyc_attr(native_class=False)
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
    iter_gen_alloc_blocks: int = 0  # blocks allocated during generation, which no match could have saved
    iter_onboard_blocks: int = 0  # moved from a colder tier to the GPU
    iter_onboard_bytes: int = 0
    iter_offload_blocks: int = 0  # moved from the GPU to a colder tier
    iter_offload_bytes: int = 0
    iter_intra_device_copy_blocks: int = 0  # copied on the GPU: partly matched blocks, snapshots, beams
    iter_intra_device_copy_bytes: int = 0
    iter_host_dropped_blocks: int = 0  # dropped from host memory before they were loaded again
    iter_host_dropped_bytes: int = 0
    iter_gpu_dropped_blocks: int = 0  # dropped from the GPU: there is no colder tier, or the block could not be matched any more
    iter_disk_dropped_blocks: int = 0
    iter_lost_blocks: int = 0  # lost by a failed transfer

    @property
    def iter_cache_hit_rate(self) -> float:
        """Reused blocks as a share of those looked up; 0 if there were none."""
        looked_up = self.iter_reused_blocks + self.iter_missed_blocks
        return self.iter_reused_blocks / looked_up if looked_up else 0.0


@mypyc_attr(native_class=False)
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
    iter_aligned_snapshot_hits: int = 0  # at a block boundary
    iter_unaligned_snapshot_hits: int = 0

    @property
    def iter_snapshot_hit_rate(self) -> float:
        """Hits as a share of all look-ups; 0 if there were none."""
        return self.iter_snapshot_hits / self.iter_snapshot_lookups if self.iter_snapshot_lookups else 0.0

    def __getattr__(self, name: str) -> int | float:
        current = "iter_snapshot_hit_rate" if name == "hit_rate" else f"iter_{name}"
        if name.startswith("_") or not hasattr(type(self), current):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warnings.warn(f"{name} is now {current}; the next release removes the old name", DeprecationWarning, stacklevel=2)
        value: int | float = getattr(self, current)
        return value


@mypyc_attr(native_class=False)
@dataclass
class ReusedBlocksByLevel:
    """Reused blocks by the cache level on which they were found. Each list is indexed by level."""

    full: list[int] = field(default_factory=list)
    partial: list[int] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether all counts are 0."""
        return not any(self.full) and not any(self.partial)

    def add(self, other: ReusedBlocksByLevel) -> None:
        """Add another table level by level. The lists grow to the length of the longer table."""
        table = instance(other, ReusedBlocksByLevel, "other")
        _add_levels(self.full, table.full)
        _add_levels(self.partial, table.partial)


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class PoolGroupPeakBlockStats:
    """The largest value of each field for a pool group on a level between two readings. Fields may peak at different times."""

    available: int = 0  # free + evictable
    unavailable: int = 0
    evictable: int = 0


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class StorageStatistics:
    """The slot counts of a pool group on a level."""

    slot_sizes: tuple[int, ...]  # bytes, by pool
    total: int
    free: int  # those of clean copies among them
    evictable: int
    copies: int = 0  # slots with clean copies of pages on warmer levels

    @property
    def available(self) -> int:
        """Slots that can be allocated: free + evictable."""
        return self.free + self.evictable

    @property
    def unavailable(self) -> int:
        return self.total - self.available


@mypyc_attr(native_class=False)
@dataclass
class RequestTotals:
    """What the requests of a manager have committed since construction. Totals never decrease, whoever resets other counts."""

    reused_blocks: list[ReusedBlocksByLevel]  # by life cycle
    missed_blocks: list[int]  # by life cycle: blocks of prompts that had to be computed
    cached_tokens_by_level: list[int]  # reused tokens, by the coldest level of each block's pages
    disk_prefetched_blocks: int = 0  # pages that `prefetch` moved from disk to host memory
    suspensions: int = 0
    resumes: int = 0  # without first resumes


class MovementCounters:
    """Pages moved between levels, dropped, lost and shared, per life cycle. Counts never decrease.

    moved[life_cycle][source][destination], dropped[life_cycle][level] and returned[life_cycle][level] count pages; a move within
    level 0 is a device copy.
    """

    def __init__(self, num_life_cycles: int = 0, num_levels: int = 0) -> None:
        self.moved: list[list[list[int]]] = [[[0] * num_levels for _s in range(num_levels)] for _lc in range(num_life_cycles)]
        self.dropped: list[list[int]] = [[0] * num_levels for _lc in range(num_life_cycles)]
        # Pages that were evicted to their clean copy on a level: nothing was copied.
        self.returned: list[list[int]] = [[0] * num_levels for _lc in range(num_life_cycles)]
        self.lost: list[int] = [0] * num_life_cycles  # pages lost by a failed transfer
        self.adopted: list[int] = [0] * num_life_cycles  # pages that a commit freed since an identical block has one on the GPU
        self.taken_over: list[int] = [
            0
        ] * num_life_cycles  # colder pages of identical blocks that took over a committed page's slot

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles have the counts so far, and do not change."""
        tables = ([[list(row) for row in table] for table in self.moved], [list(row) for row in self.dropped])
        returned = [list(row) for row in self.returned]
        return _movement, (*tables, list(self.lost), list(self.adopted), list(self.taken_over), returned)

    def copy(self) -> MovementCounters:
        """The counts so far, which do not change."""
        return copy(self)

    def __repr__(self) -> str:
        levels = range(len(self.dropped[0]) if self.dropped else 0)
        moved = [f"{a}->{b}: {self.pages_moved(a, b)}" for a in levels for b in levels if self.pages_moved(a, b) > 0]
        dropped = [f"{level}: {self.pages_dropped(level)}" for level in levels if self.pages_dropped(level) > 0]
        returned = [f"{level}: {self.pages_returned(level)}" for level in levels if self.pages_returned(level) > 0]
        rest = f"lost {sum(self.lost)}, adopted {sum(self.adopted)}, taken over {sum(self.taken_over)}"
        text = f"dropped {{{', '.join(dropped)}}}, {rest}, returned to copies {{{', '.join(returned)}}}"
        return f"<pages moved between levels {{{', '.join(moved)}}}, {text}>"

    def pages_moved(self, source: SupportsIndex, destination: SupportsIndex) -> int:
        """Pages moved from one level to another, in all life cycles."""
        beg, end = self._level(source, "source"), self._level(destination, "destination")
        return sum([table[beg][end] for table in self.moved])

    def pages_dropped(self, level: SupportsIndex) -> int:
        """Pages dropped from a level, in all life cycles."""
        number = self._level(level, "level")
        return sum([row[number] for row in self.dropped])

    def pages_returned(self, level: SupportsIndex) -> int:
        """Pages that were evicted to their clean copies on a level without a byte copied, in all life cycles."""
        number = self._level(level, "level")
        return sum([row[number] for row in self.returned])

    def _level(self, level: object, name: str) -> int:
        number = whole(level, name)
        count = len(self.dropped[0]) if self.dropped else 0
        if not 0 <= number < count:
            raise ConfigError(f"{name} is {number}; it must be at least 0 and below the number of cache levels, {count}")
        return number


def _movement(
    moved: list[list[list[int]]],
    dropped: list[list[int]],
    lost: list[int],
    adopted: list[int],
    taken_over: list[int],
    returned: list[list[int]],
) -> MovementCounters:
    """Rebuild counters for `MovementCounters.__reduce__`."""
    counters = MovementCounters()
    counters.moved = moved
    counters.dropped = dropped
    counters.lost = lost
    counters.adopted = adopted
    counters.taken_over = taken_over
    counters.returned = returned
    return counters


def _add_levels(total: list[int], counts: list[int]) -> None:
    total.extend([0] * (len(counts) - len(total)))
    for level, count in enumerate(counts):
        total[level] += count
