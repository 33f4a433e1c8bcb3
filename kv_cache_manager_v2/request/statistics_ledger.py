"""Statistics: blocks that requests allocated and reused, and pages that moved.

The counts of a request are *pending* until the engine commits them, so work that is undone in the same step is not counted.
Movement is counted by the manager, in tables that never decrease. Statistics that are off cost nothing.

Blocks allocated by growth since the last commit of counts are a suffix of each block table (`BlockTable.pending_from`), and
shrinking undoes the counts of those that it removes. A block is a generation block if the history had reached the expected prompt
length when it was allocated; otherwise it is a missed block. Generation blocks are a suffix too (`BlockTable.generated_from`).

A block counts once for each beam that has its own page. Copies made by widening count as allocated, not as missed. Narrowing undoes
no counts, since those pages were used.
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache_manager_v2.ids import CacheTier
from kv_cache_manager_v2.layout.pools import StorageLayout
from kv_cache_manager_v2.statistics import (
    KVCacheIterationStatsDelta,
    KVCacheStatsDelta,
    MovementCounters,
    PoolGroupPeakBlockStats,
    ReusedBlocksByLevel,
    SsmSnapshotIterationStatsDelta,
)
from kv_cache_manager_v2.storage.cell import Cell
from kv_cache_manager_v2.storage.hierarchy import Hierarchy


class PendingStats:
    """The counts of one request since it last committed them.

    Lists are indexed by life cycle, or by life cycle * levels + level.
    """

    def __init__(self, num_life_cycles: int, num_levels: int, expected_prompt_length: int | None) -> None:
        self.expected_prompt_length = expected_prompt_length  # tokens; None: the request never counts as generating
        self.generating = False  # set when the history reaches the expected prompt length
        self.allocated: list[int] = [0] * num_life_cycles  # blocks allocated by growth
        self.generated: list[int] = [0] * num_life_cycles  # blocks of `allocated` that are generation blocks
        self.copied: list[int] = [0] * num_life_cycles  # copies of partly matched and shared blocks
        self.copies_missed: list[int] = [0] * num_life_cycles  # copies whose source block had left the tree
        self.tail_matched = False  # whether the last block is a matched block of the tree that is not copied yet
        self.num_levels = num_levels
        self.full_reused: list[int] = [0] * (num_life_cycles * num_levels)
        self.partial_reused: list[int] = [0] * (num_life_cycles * num_levels)
        self.reused_tokens_by_level: list[int] = [0] * num_levels
        self.snapshots: SsmSnapshotIterationStatsDelta | None = None  # the look-up at creation, with recurrent layers
        self.dirty = False  # whether anything was counted

    def before_growth(self, history: int) -> None:
        """Called before blocks are allocated, with the present history."""
        expected = self.expected_prompt_length
        if not self.generating and expected is not None and history >= expected:
            self.generating = True

    def found(self, life_cycle: int, level: int, full: int, partial: int) -> None:
        """Count reused pages of full and of partly matched blocks on a level."""
        cell = life_cycle * self.num_levels + level
        self.full_reused[cell] += full
        self.partial_reused[cell] += partial

    def full_of(self, life_cycle: int) -> int:
        """Reused pages of full blocks, on all levels."""
        return _sum_row(self.full_reused, life_cycle, self.num_levels)

    def partial_of(self, life_cycle: int) -> int:
        return _sum_row(self.partial_reused, life_cycle, self.num_levels)

    def grown(self, life_cycle: int, count: int) -> None:
        """Count pages allocated by growth."""
        self.allocated[life_cycle] += count
        if self.generating:
            self.generated[life_cycle] += count
        if count:
            self.dirty = True

    def uncount(self, life_cycle: int, generated: bool) -> None:
        """Undo the count of a page that shrinking has removed."""
        self.allocated[life_cycle] -= 1
        if generated:
            self.generated[life_cycle] -= 1

    def empty(self) -> bool:
        """Whether all counts are 0. O(life cycles)."""
        return not (any(self.allocated) or any(self.copied) or any(self.reused_tokens_by_level)) and self.snapshots is None

    def request_delta(self, attention: Sequence[int]) -> KVCacheStatsDelta:
        """The counts of the attention life cycles, as one delta."""
        taken = 0
        reused = 0
        missed = 0
        for index in attention:
            taken += self.allocated[index] + self.copied[index]
            reused += self.full_of(index) + self.partial_of(index)
            missed += self.allocated[index] - self.generated[index] + self.copies_missed[index]
        return KVCacheStatsDelta(taken, taken, reused, missed)

    def clear(self) -> None:
        """Set all counts to 0."""
        for index in range(len(self.allocated)):
            self.allocated[index] = 0
            self.generated[index] = 0
            self.copied[index] = 0
            self.copies_missed[index] = 0
        for cell in range(len(self.full_reused)):
            self.full_reused[cell] = 0
            self.partial_reused[cell] = 0
        for level in range(self.num_levels):
            self.reused_tokens_by_level[level] = 0
        self.snapshots = None
        self.dirty = False


def _sum_row(table: list[int], row: int, width: int) -> int:
    total = 0
    for cell in range(row * width, (row + 1) * width):
        total += table[cell]
    return total


class _LifeCycleCounts:
    """The counts of one life cycle that requests have committed since the last reading."""

    def __init__(self) -> None:
        self.taken = 0
        self.generated = 0
        self.missed = 0
        self.full = 0
        self.partial = 0

    def add(self, pending: PendingStats, index: int) -> None:
        self.taken += pending.allocated[index] + pending.copied[index]
        self.generated += pending.generated[index]
        self.missed += pending.allocated[index] - pending.generated[index] + pending.copies_missed[index]
        self.full += pending.full_of(index)
        self.partial += pending.partial_of(index)

    def delta(self) -> KVCacheIterationStatsDelta:
        return KVCacheIterationStatsDelta(
            iter_alloc_total_blocks=self.taken,
            iter_alloc_new_blocks=self.taken,
            iter_reused_blocks=self.full + self.partial,
            iter_missed_blocks=self.missed,
            iter_full_reused_blocks=self.full,
            iter_partial_reused_blocks=self.partial,
            iter_gen_alloc_blocks=self.generated,
        )


class StatisticsLedger:
    """The statistics of a manager: totals since construction, and changes since the last reading."""

    def __init__(self, enabled: bool, commit_on_close: bool, layout: StorageLayout, hierarchy: Hierarchy) -> None:
        self.enabled = enabled
        self.commit_on_close = commit_on_close  # whether a request commits its counts when it closes
        self._layout = layout
        self._attention: list[int] = [cycle.index for cycle in layout.life_cycles if cycle.is_attention]
        self._hierarchy = hierarchy
        self._movement: MovementCounters = hierarchy.counters
        self._num_levels = hierarchy.num_levels
        self._taken = 0  # allocated blocks since construction, summed over attention life cycles
        self._reused = 0
        self._missed = 0
        self._iteration = self._fresh_iteration()  # by life cycle, since the last reading
        self._snapshots: dict[int, SsmSnapshotIterationStatsDelta] = {}
        self._by_level: dict[int, ReusedBlocksByLevel] = {}
        self._tokens_by_level = [0] * self._num_levels
        self._read = _Reading(self._movement)  # movement at the last reading of the iteration
        self._peaks = _Peaks(hierarchy)
        self.suspended = 0
        self.resumed = 0
        self.disk_prefetched = 0  # blocks that prefetch moved from disk to host memory
        self._dirty: dict[object, object] = {}  # ids with uncommitted counts, and their latest request; None if set by the engine
        self.shared_ids: set[object] = set()  # dirty ids that several open requests have
        self.excluded: set[object] = set()  # ids of dummy requests, which are not counted
        self.lost_counts_logged = False  # whether the loss of a request's counts has been logged

    # --- counting

    def update_peaks(self) -> None:
        """Update the peaks, before every public call that may change slot counts. O(levels x pool groups)."""
        self._peaks.note()

    def commit(self, pending: PendingStats, total: KVCacheStatsDelta, ssm: int | None) -> None:
        """Add a request's pending counts to the totals. `total` is its `request_delta`."""
        self._taken += total.alloc_total_blocks
        self._reused += total.reused_blocks
        self._missed += total.missed_blocks
        for index in self._attention:
            self._iteration[index].add(pending, index)
            if pending.full_of(index) > 0 or pending.partial_of(index) > 0:
                self._add_by_level(index, pending)
        for level in range(self._num_levels):
            self._tokens_by_level[level] += pending.reused_tokens_by_level[level]
        if ssm is not None and pending.snapshots is not None:
            self._snapshots.setdefault(ssm, SsmSnapshotIterationStatsDelta()).add(pending.snapshots)

    def _add_by_level(self, index: int, pending: PendingStats) -> None:
        if index not in self._by_level:
            self._by_level[index] = ReusedBlocksByLevel([0] * self._num_levels, [0] * self._num_levels)
        table = self._by_level[index]
        for level in range(self._num_levels):
            cell = index * self._num_levels + level
            table.full[level] += pending.full_reused[cell]
            table.partial[level] += pending.partial_reused[cell]

    def _fresh_iteration(self) -> list[_LifeCycleCounts]:
        return [_LifeCycleCounts() for _life_cycle in self._layout.life_cycles]

    # --- which requests have counts to commit, by id

    def mark_dirty(self, request_id: object, request: object) -> None:
        """Record that an id has uncommitted counts. `request` is None if the engine says so."""
        if request_id in self.excluded:
            return
        marked_by = self._dirty.get(request_id)
        if marked_by is not None and request is not None and marked_by is not request:
            self.shared_ids.add(request_id)
        if request is not None or marked_by is None:
            self._dirty[request_id] = request

    def clear_dirty(self, request_id: object) -> None:
        self._dirty.pop(request_id, None)

    def dirty_ids(self) -> list[object]:
        """Ids with uncommitted counts, as a copy."""
        return list(self._dirty)

    # --- reading

    def committed(self) -> KVCacheStatsDelta:
        """Totals of attention life cycles since construction. They never decrease."""
        taken = self._taken
        if self.enabled:
            for index in self._attention:
                taken += _onboarded(self._movement, index)
        return KVCacheStatsDelta(taken, taken, self._reused, self._missed)

    def take_iteration(self) -> dict[int, KVCacheIterationStatsDelta]:
        """Changes by life cycle since the last call, without life cycles that have none."""
        if not self.enabled:
            return {}
        taken: dict[int, KVCacheIterationStatsDelta] = {}
        for index in range(len(self._iteration)):
            delta = self._iteration[index].delta()
            self._add_movement(index, delta)
            if not delta.empty:
                taken[index] = delta
        self._read = _Reading(self._movement)
        self._iteration = self._fresh_iteration()
        return taken

    def _add_movement(self, index: int, delta: KVCacheIterationStatsDelta) -> None:
        """Add the movement since the last reading to the delta of a life cycle."""
        moved, dropped, lost = self._read.since(self._movement, index)
        onboarded = sum([moved[level][0] for level in range(1, self._num_levels)])
        offloaded = sum([moved[0][level] for level in range(1, self._num_levels)])
        copied = moved[0][0]
        if not (onboarded or offloaded or copied or lost or any(dropped)):
            return
        slot_bytes = self._layout.slot_bytes(self._layout.pool_group_of[index])
        delta.iter_alloc_total_blocks += onboarded
        delta.iter_alloc_new_blocks += onboarded
        delta.iter_onboard_blocks += onboarded
        delta.iter_onboard_bytes += onboarded * slot_bytes
        delta.iter_offload_blocks += offloaded
        delta.iter_offload_bytes += offloaded * slot_bytes
        delta.iter_intra_device_copy_blocks += copied
        delta.iter_intra_device_copy_bytes += copied * slot_bytes
        delta.iter_lost_blocks += lost
        for level in range(self._num_levels):
            tier = self._hierarchy.sizings[level].tier
            if tier == CacheTier.HOST_MEM:
                delta.iter_host_dropped_blocks += dropped[level]
                delta.iter_host_dropped_bytes += dropped[level] * slot_bytes
            elif tier == CacheTier.DISK:
                delta.iter_disk_dropped_blocks += dropped[level]
            else:
                delta.iter_gpu_dropped_blocks += dropped[level]

    def take_snapshots(self) -> dict[int, SsmSnapshotIterationStatsDelta]:
        taken = self._snapshots
        self._snapshots = {}
        return taken

    def take_by_level(self) -> dict[int, ReusedBlocksByLevel]:
        taken = self._by_level
        self._by_level = {}
        return taken

    def take_tokens_by_level(self) -> list[int]:
        taken = self._tokens_by_level
        self._tokens_by_level = [0] * self._num_levels
        return taken

    def take_disk_prefetched(self) -> int:
        taken = self.disk_prefetched
        self.disk_prefetched = 0
        return taken

    def take_suspend_resume(self) -> tuple[int, int]:
        taken = (self.suspended, self.resumed)
        self.suspended = 0
        self.resumed = 0
        return taken

    def take_peaks(self, level: int) -> list[PoolGroupPeakBlockStats]:
        """The peaks by pool group. The next peaks start from the present values."""
        return self._peaks.take(level)


def _onboarded(movement: MovementCounters, index: int) -> int:
    return sum([row[0] for row in movement.moved[index][1:]])


class _Reading:
    """A copy of the movement tables at the last reading."""

    def __init__(self, movement: MovementCounters) -> None:
        self._moved = [[list(row) for row in table] for table in movement.moved]
        self._dropped = [list(row) for row in movement.dropped]
        self._lost = list(movement.lost)

    def since(self, movement: MovementCounters, index: int) -> tuple[list[list[int]], list[int], int]:
        """Pages of one life cycle that were moved, dropped and lost since then."""
        levels = range(len(self._dropped[index]))
        now = movement.moved[index]
        then = self._moved[index]
        moved = [[now[source][level] - then[source][level] for level in levels] for source in levels]
        dropped = [movement.dropped[index][level] - self._dropped[index][level] for level in levels]
        return moved, dropped, movement.lost[index] - self._lost[index]


class _Peaks:
    """The largest slot counts, indexed by level * groups + group.

    They are updated before every public call that changes more than a request's own state, so the update reads the cells directly.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._groups = hierarchy.num_groups
        self._cells: list[Cell] = [cell for level in range(hierarchy.num_levels) for cell in hierarchy.level_cells(level)]
        self._available = [0] * len(self._cells)
        self._unavailable = [0] * len(self._cells)
        self._evictable = [0] * len(self._cells)
        for level in range(hierarchy.num_levels):
            self.take(level)

    def note(self) -> None:
        for number in range(len(self._cells)):
            cell = self._cells[number]
            evictable = cell.evictable
            available = cell.open + evictable
            unavailable = cell.allocator.capacity - available
            if available > self._available[number]:
                self._available[number] = available
            if unavailable > self._unavailable[number]:
                self._unavailable[number] = unavailable
            if evictable > self._evictable[number]:
                self._evictable[number] = evictable

    def take(self, level: int) -> list[PoolGroupPeakBlockStats]:
        self.note()
        peaks: list[PoolGroupPeakBlockStats] = []
        for cell in range(level * self._groups, (level + 1) * self._groups):
            peaks.append(PoolGroupPeakBlockStats(self._available[cell], self._unavailable[cell], self._evictable[cell]))
            self._available[cell] = 0
            self._unavailable[cell] = 0
            self._evictable[cell] = 0
        self.note()
        return peaks
