"""Records of what was counted: the deltas that an engine reads, and the tables that the manager adds to.

Rule: counting is a few integer additions where the change happens. Nothing here reads a clock; readers take differences. Blocks are
counted per attention life cycle and beam: one block of a model with two life cycles counts twice.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, fields, replace
from typing import Final, SupportsIndex, TypeVar

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.arguments import instance, whole
from kv_cache_manager_v2.errors import ConfigError

_Delta = TypeVar("_Delta", bound="StatsDelta")

# The fields of KVCacheIterationStatsDelta that records of other engines have too, in their order.
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
    """Integer fields that add up; the base of the deltas below."""

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
        """All fields to 0."""
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
    """Blocks of attention layers that requests took and found."""

    alloc_total_blocks: int = 0  # slots taken: growth, private copies of partly matched blocks, loads from colder tiers
    alloc_new_blocks: int = 0  # equal to alloc_total_blocks: every slot taken is new to its request
    reused_blocks: int = 0  # blocks that a match saved, stale ones left out
    missed_blocks: int = 0  # blocks of prompts that had to be computed


@mypyc_attr(native_class=False)
class IterationFields(StatsDelta):
    """No dataclass: compiled ones take every class attribute for a field."""

    _field_names = ITERATION_FIELDS  # no annotation: mypyc 2.4.1 would make a ClassVar a field of the dataclass


@mypyc_attr(native_class=False)
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
    iter_gen_alloc_blocks: int = 0  # blocks taken while generating: they cannot be missed
    iter_onboard_blocks: int = 0  # moved from a colder tier to the GPU
    iter_onboard_bytes: int = 0
    iter_offload_blocks: int = 0  # moved from the GPU to a colder tier
    iter_offload_bytes: int = 0
    iter_intra_device_copy_blocks: int = 0  # copied on the GPU: partly matched blocks, snapshots, beams
    iter_intra_device_copy_bytes: int = 0
    iter_host_dropped_blocks: int = 0  # dropped from host memory before they were loaded again
    iter_host_dropped_bytes: int = 0
    iter_gpu_dropped_blocks: int = 0  # dropped from the GPU, where no tier is below it or the block was worth nothing
    iter_disk_dropped_blocks: int = 0
    iter_lost_blocks: int = 0  # bytes destroyed by a failed transfer

    @property
    def iter_cache_hit_rate(self) -> float:
        """Reused blocks of those looked up; 0 if none was."""
        looked_up = self.iter_reused_blocks + self.iter_missed_blocks
        return self.iter_reused_blocks / looked_up if looked_up else 0.0


@mypyc_attr(native_class=False)
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
    iter_aligned_snapshot_hits: int = 0  # at a block boundary
    iter_unaligned_snapshot_hits: int = 0

    @property
    def iter_snapshot_hit_rate(self) -> float:
        """Hits of all look-ups; 0 if there was none."""
        return self.iter_snapshot_hits / self.iter_snapshot_lookups if self.iter_snapshot_lookups else 0.0

    def __getattr__(self, name: str) -> int | float:
        current = "iter_snapshot_hit_rate" if name == "hit_rate" else f"iter_{name}"
        if name.startswith("_") or not hasattr(type(self), current):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warnings.warn(f"{name} is now {current}; the old name goes with the next release", DeprecationWarning, stacklevel=2)
        value: int | float = getattr(self, current)
        return value


@mypyc_attr(native_class=False)
@dataclass
class ReusedBlocksByLevel:
    """Reused blocks by the cache level on which they were found; lists by level."""

    full: list[int] = field(default_factory=list)
    partial: list[int] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether all counts are 0."""
        return not any(self.full) and not any(self.partial)

    def add(self, other: ReusedBlocksByLevel) -> None:
        """Add another table to this one, level by level; the lists grow to the longer one's length."""
        table = instance(other, ReusedBlocksByLevel, "other")
        _add_levels(self.full, table.full)
        _add_levels(self.partial, table.partial)


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class PoolGroupPeakBlockStats:
    """The largest values of a pool group on a level between two readings, each field on its own."""

    available: int = 0  # free + evictable
    unavailable: int = 0
    evictable: int = 0


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class StorageStatistics:
    """A pool group on a level; counts in slots."""

    slot_sizes: tuple[int, ...]  # bytes, by pool
    total: int
    free: int
    evictable: int

    @property
    def available(self) -> int:
        """Slots that can be allocated: free + evictable."""
        return self.free + self.evictable

    @property
    def unavailable(self) -> int:
        return self.total - self.available


class MovementCounters:
    """Pages moved between levels, dropped, and shared instead of kept twice, per life cycle. Counts never fall.

    moved[life_cycle][source][destination] and dropped[life_cycle][level] count pages; a move within level 0 is a device copy.
    """

    def __init__(self, num_life_cycles: int = 0, num_levels: int = 0) -> None:
        self.moved: list[list[list[int]]] = [[[0] * num_levels for _s in range(num_levels)] for _lc in range(num_life_cycles)]
        self.dropped: list[list[int]] = [[0] * num_levels for _lc in range(num_life_cycles)]
        self.lost: list[int] = [0] * num_life_cycles  # pages whose bytes a failed transfer destroyed
        self.adopted: list[int] = [0] * num_life_cycles  # own pages that a commit freed for the GPU page of an identical block
        self.taken_over: list[int] = [0] * num_life_cycles  # colder pages of identical blocks that got a committed page's GPU slot

    def __reduce__(self) -> tuple[object, ...]:
        """A copy, however it is made, is one of the counts so far and no longer changes."""
        tables = ([[list(row) for row in table] for table in self.moved], [list(row) for row in self.dropped])
        return _movement, (*tables, list(self.lost), list(self.adopted), list(self.taken_over))

    def __repr__(self) -> str:
        levels = range(len(self.dropped[0]) if self.dropped else 0)
        moved = [f"{a}->{b}: {self.pages_moved(a, b)}" for a in levels for b in levels if self.pages_moved(a, b) > 0]
        dropped = [f"{level}: {self.pages_dropped(level)}" for level in levels if self.pages_dropped(level) > 0]
        rest = f"lost {sum(self.lost)}, adopted {sum(self.adopted)}, taken over {sum(self.taken_over)}"
        return f"<pages moved between levels {{{', '.join(moved)}}}, dropped {{{', '.join(dropped)}}}, {rest}>"

    def pages_moved(self, source: SupportsIndex, destination: SupportsIndex) -> int:
        """Pages moved from one level to another, in all life cycles."""
        beg, end = self._level(source, "source"), self._level(destination, "destination")
        return sum([table[beg][end] for table in self.moved])

    def pages_dropped(self, level: SupportsIndex) -> int:
        """Pages dropped from a level, in all life cycles."""
        number = self._level(level, "level")
        return sum([row[number] for row in self.dropped])

    def _level(self, level: object, name: str) -> int:
        number = whole(level, name)
        count = len(self.dropped[0]) if self.dropped else 0
        if not 0 <= number < count:
            raise ConfigError(f"{name} {number} is out of range: there are {count} cache levels")
        return number


def _movement(
    moved: list[list[list[int]]], dropped: list[list[int]], lost: list[int], adopted: list[int], taken_over: list[int]
) -> MovementCounters:
    """The counters with these tables."""
    counters = MovementCounters()
    counters.moved = moved
    counters.dropped = dropped
    counters.lost = lost
    counters.adopted = adopted
    counters.taken_over = taken_over
    return counters


def _add_levels(total: list[int], counts: list[int]) -> None:
    total.extend([0] * (len(counts) - len(total)))
    for level, count in enumerate(counts):
        total[level] += count
