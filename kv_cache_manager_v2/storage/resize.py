"""A level's slots are divided anew: some pool groups shrink, others grow.

Rule: whether it fits is decided before anything changes. A group that shrinks first gives up its oldest pages, as making room
always does, then moves the pages that lie in slots to be cut into free ones below, each keeping its place in the order of
eviction, and only then gives memory back; groups grow with what is left. If the device fails on the way every group gets its old
size back.

Base addresses on the GPU stay. A page's slot may change, so nobody may have it locked; held pages survive on every level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kv_cache_manager_v2.device.arenas import DeviceArena
from kv_cache_manager_v2.device.os_memory import available_bytes
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.errors import ConfigError, CuError, OutOfMemoryError
from kv_cache_manager_v2.ids import CacheTier
from kv_cache_manager_v2.layout.arithmetic import round_down, round_up
from kv_cache_manager_v2.layout.sizing import LevelSizing, resized
from kv_cache_manager_v2.storage.hierarchy import Hierarchy
from kv_cache_manager_v2.storage.page import Page

HOST_MARGIN_BYTES: Final = 1 << 30  # of host memory that best efforts leave free, at the least
HOST_MARGIN_SHARE: Final = 20  # one part in so many of what is available, where that is more


class ResizeResult:
    """What a resize did, or why it could not; true on success."""

    def __init__(self, level: int, old_slots: list[int], new_slots: list[int]) -> None:
        self.ok = True
        self.level = level
        self.old_slots = old_slots  # by pool group
        self.new_slots = new_slots  # by pool group, as asked
        self.reason = ""  # why it was refused
        self.pool_group = -1  # which pool group did not fit
        self.missing = 0  # slots short, or pages in the way
        self.evicted = 0  # pages moved down or dropped
        self.compacted = 0  # pages moved into slots that stay

    def __reduce__(self) -> tuple[object, ...]:
        numbers = (
            self.level,
            list(self.old_slots),
            list(self.new_slots),
            self.pool_group,
            self.missing,
            self.evicted,
            self.compacted,
        )
        return _resize_result, (self.ok, self.reason, *numbers)

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        what = f"level {self.level}: {self.old_slots} -> {self.new_slots} slots"
        if self.ok:
            return f"ResizeResult({what}, {self.evicted} pages evicted, {self.compacted} compacted)"
        return f"ResizeResult({what} refused: {self.reason})"

    def refuse(self, reason: str, pool_group: int, missing: int) -> ResizeResult:
        self.ok = False
        self.reason = reason
        self.pool_group = pool_group
        self.missing = missing
        return self


def resize_level(hierarchy: Hierarchy, level: int, sizing: LevelSizing) -> ResizeResult:
    """Give each pool group of a level `sizing.slots[group]` slots. O(slots of the level).

    A refusal changes nothing and says why. A device failure is raised; all sizes are then the old ones again, though pages that
    had to make room have made it.
    """
    return _Resize(hierarchy, level, sizing).run()


def _resize_result(
    ok: bool,
    reason: str,
    level: int,
    old_slots: list[int],
    new_slots: list[int],
    pool_group: int,
    missing: int,
    evicted: int,
    compacted: int,
) -> ResizeResult:
    """The result with these attributes."""
    result = ResizeResult(level, old_slots, new_slots)
    result.ok = ok
    result.reason = reason
    result.pool_group = pool_group
    result.missing = missing
    result.evicted = evicted
    result.compacted = compacted
    return result


class AdjustResult:
    """What an adjustment did on each level, or why it could not; true on success."""

    def __init__(self, levels: list[ResizeResult]) -> None:
        self.levels = levels  # in the order in which they were tried, coldest first; after a refusal, which is last, none
        self.ok = all(result.ok for result in levels)

    def __reduce__(self) -> tuple[object, ...]:
        return AdjustResult, (list(self.levels),)

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return f"AdjustResult({self.levels})"


def spare_host_bytes(available: int) -> int:
    """What a host tier may take, at the most, of the memory that the system says it could give: not all of it, since the engine
    and everybody else must go on."""
    return max(0, available - max(HOST_MARGIN_BYTES, available // HOST_MARGIN_SHARE))


def resize_quota(
    hierarchy: Hierarchy,
    level: int,
    quota: int,
    weights: list[float] | None,
    best_efforts: bool,
    available: int | None = None,
) -> ResizeResult:
    """Give a level another quota in bytes, divided by `weights` (None: by those that it has).

    Refused below the level's minimum, where the pages that must be kept do not fit, and where the device has no memory left.
    `best_efforts`: instead of a refusal, the largest feasible quota not above the asked one, in whole grains; since only
    growing can fail at the asked size and succeed below it, it lies between the present quota and the asked one. O(log grains)
    resizes tried then. A host tier leaves free the larger of 1 GiB and 5 % of the memory that is `available` (bytes; None: as
    the system says).
    """
    current = hierarchy.sizings[level]
    grain = current.granularity
    asked = round_up(quota, grain)
    if asked < current.minimum_quota:
        refused = ResizeResult(level, current.slots, current.slots)
        return refused.refuse(f"a quota of {quota} bytes is below the level's minimum of {current.minimum_quota} bytes", -1, 0)
    if best_efforts and current.tier == CacheTier.HOST_MEM and asked > current.quota:
        there = available_bytes() if available is None else available
        if there >= 0:
            asked = min(asked, round_down(current.quota + spare_host_bytes(there), grain))
            if asked <= current.quota:
                refused = ResizeResult(level, current.slots, current.slots)
                return refused.refuse(f"of {there} bytes of host memory that are available, some must stay free", -1, 0)
    result = _try_quota(hierarchy, level, asked, weights)
    if result.ok or not best_efforts or asked <= current.quota:
        return result
    low, high = current.quota // grain, asked // grain  # feasible, infeasible
    while high - low > 1:
        middle = (low + high) // 2
        if _try_quota(hierarchy, level, middle * grain, weights).ok:
            low = middle
        else:
            high = middle
    if low * grain > current.quota:
        return ResizeResult(level, current.slots, hierarchy.sizings[level].slots)
    return result


def _try_quota(hierarchy: Hierarchy, level: int, quota: int, weights: list[float] | None) -> ResizeResult:
    """One resize, in which what the device or the index range refuses is a refusal like any other."""
    current = hierarchy.sizings[level]
    try:
        return resize_level(hierarchy, level, resized(hierarchy.layout, current, quota, weights))
    except (OutOfMemoryError, ConfigError) as error:
        return ResizeResult(level, current.slots, current.slots).refuse(str(error), -1, 0)


def resize_levels(hierarchy: Hierarchy, sizings: Sequence[LevelSizing]) -> list[ResizeResult]:
    """Resize all levels, the coldest first, or none: after a refusal, which is the last result, every level has its old size.

    Whether all of them fit is decided on counts before any is touched, so that a refusal moves no page; only what the device
    refuses on the way is found later.
    """
    if hierarchy.settling.in_flight > 0:
        hierarchy.settling.wait()
        hierarchy.settle()
    refused = _refuse_levels(hierarchy, sizings)
    if refused is not None:
        return [refused]
    before = hierarchy.sizings.copy()
    results: list[ResizeResult] = []
    done: list[int] = []
    try:
        for level in range(hierarchy.num_levels - 1, -1, -1):
            results.append(resize_level(hierarchy, level, sizings[level]))
            if not results[-1].ok:
                break
            done.append(level)
    finally:
        if len(done) < hierarchy.num_levels:
            for level in reversed(done):
                resize_level(hierarchy, level, before[level])
    return results


def _refuse_levels(hierarchy: Hierarchy, sizings: Sequence[LevelSizing]) -> ResizeResult | None:
    """Why the levels cannot all have these sizes: what must be kept on a level can move to colder ones only, so it must fit
    into the slots of its level and of those below it, taken together (Hall's condition for chains)."""
    levels = hierarchy.levels
    for group in range(hierarchy.num_groups):
        kept = 0
        room = 0
        for level in range(hierarchy.num_levels - 1, -1, -1):
            queue = levels.queues[levels.cell(level, group)]
            kept += levels.total(level, group) - levels.free(level, group) - (queue.length - queue.held)
            room += sizings[level].slots[group]
            if kept > room:
                old = [levels.total(level, other) for other in range(hierarchy.num_groups)]
                text = f"{kept - room} pages of pool group {group} on level {level} and colder must be kept and would find no slot"
                return ResizeResult(level, old, sizings[level].slots).refuse(text, group, kept - room)
    return None


class _Resize:
    """One resize under way."""

    def __init__(self, hierarchy: Hierarchy, level: int, sizing: LevelSizing) -> None:
        levels = hierarchy.levels
        self._hierarchy = hierarchy
        self._timeline: Timeline = hierarchy.timeline
        self._level = level
        self._sizing = sizing
        self._old = [levels.total(level, group) for group in range(levels.num_groups)]
        self._new = list(sizing.slots)
        self._cells = [levels.cell(level, group) for group in range(levels.num_groups)]
        self._result = ResizeResult(level, self._old, self._new)

    def run(self) -> ResizeResult:
        hierarchy = self._hierarchy
        assert len(self._new) == hierarchy.num_groups, "a sizing is for all pool groups"
        if hierarchy.settling.in_flight > 0:
            hierarchy.settling.wait()
            hierarchy.settle()
        if not self._fits():
            return self._result
        evicted = self._count_leaving()
        hierarchy.mover.execute(hierarchy.planner.plans, self._level)
        self._result.evicted = evicted
        try:
            for group in range(hierarchy.num_groups):
                if self._new[group] < self._old[group]:
                    self._shrink(group, self._new[group])
            for group in range(hierarchy.num_groups):
                if self._new[group] > self._old[group]:
                    self._grow(group, self._new[group])
        except BaseException:
            self._restore()
            raise
        hierarchy.places.trim()
        hierarchy.sizings[self._level] = self._sizing
        return self._result

    # --- before anything changes

    def _fits(self) -> bool:
        hierarchy = self._hierarchy
        result = self._result
        need = [0] * hierarchy.num_groups
        if hierarchy.settling.in_flight > 0:
            result.refuse("a file transfer that timed out is still running, and may write to this memory", -1, 1)
            return False
        for group in range(hierarchy.num_groups):
            old, new = self._old[group], self._new[group]
            need[group] = max(0, old - new)
            if new < old:
                locked = self._count_locked(group, new)
                if locked > 0:
                    text = (
                        f"{locked} pages of pool group {group} lie in slots to be cut and are locked; suspend their requests first"
                    )
                    result.refuse(text, group, locked)
                    return False
            for arena in hierarchy.places.by_cell[self._cells[group]].arenas:
                if isinstance(arena, DeviceArena) and new * arena.slot_bytes > arena.reserved_bytes:
                    short = new - arena.reserved_bytes // arena.slot_bytes
                    text = f"pool group {group} would outgrow the {arena.reserved_bytes} bytes of address space reserved for it"
                    result.refuse(text, group, short)
                    return False
        shortage = hierarchy.planner.plan(self._level, need, [], [], False, True)
        if shortage is not None:
            text = (
                f"{shortage.missing} pages of pool group {shortage.pool_group} can be neither dropped nor moved to a colder level"
            )
            result.refuse(text, shortage.pool_group, shortage.missing)
            return False
        return True

    def _count_locked(self, group: int, new: int) -> int:
        kept = self._hierarchy.levels.kept[self._cells[group]].pages()
        return sum([1 for page in kept if page.locks > 0 and page.slot >= new])

    def _count_leaving(self) -> int:
        """Pages of the level that the plan evicts."""
        count = 0
        for plan in self._hierarchy.planner.plans:
            for pages in plan.sinking:
                count += sum([1 for page in pages if page.level == self._level])
            count += sum([1 for page in plan.drops if page.level == self._level])
        return count

    # --- execution

    def _shrink(self, group: int, new: int) -> None:
        """Compact and cut. Pages keep their places in the queue, whatever slots they move to."""
        hierarchy = self._hierarchy
        allocator = hierarchy.levels.allocators[self._cells[group]]
        place = hierarchy.places.by_cell[self._cells[group]]
        allocator.prepare_shrink(new)
        moving = self._pages_above(group, new)
        if moving:
            assert len(moving) <= allocator.free, "a shrink that fits has too few free slots to compact into"
            hierarchy.mover.move_run(moving, self._level, self._level)
            self._result.compacted += len(moving)
        self._wait(group)
        allocator.finish_shrink()
        place.resize(new)

    def _pages_above(self, group: int, new: int) -> list[Page]:
        """Pages whose slots are to be cut off, by slot id. O(pages of the group)."""
        cell = self._cells[group]
        if self._hierarchy.levels.allocators[cell].issued <= new:
            return []
        by_slot = {page.slot: page for page in self._hierarchy.levels.pages(cell) if page.slot >= new}
        return [by_slot[slot] for slot in sorted(by_slot)]

    def _grow(self, group: int, new: int) -> None:
        self._wait(group)
        self._hierarchy.places.by_cell[self._cells[group]].resize(new)
        self._hierarchy.levels.allocators[self._cells[group]].expand(new)

    def _wait(self, group: int) -> None:
        """The host waits for all work on the group's slots: memory off the GPU may move, and memory that is cut is gone."""
        allocator = self._hierarchy.levels.allocators[self._cells[group]]
        allocator.synchronize()
        for page in self._hierarchy.levels.pages(self._cells[group]):
            self._timeline.synchronize(page.ready)
        settling = self._hierarchy.settling
        if settling.in_flight > 0:
            settling.wait()
            self._hierarchy.settle()
        if settling.in_flight > 0:  # a stream is past a transfer that timed out, the transfer may still read or write memory
            raise CuError(f"a file transfer that timed out may still use memory that is to be cut or moved: {settling.last_error}")

    def _restore(self) -> None:
        """After a device failure: every group back to its old size, those that grew first. No page lies in what they give up."""
        hierarchy = self._hierarchy
        for group in range(hierarchy.num_groups):
            allocator = hierarchy.levels.allocators[self._cells[group]]
            place = hierarchy.places.by_cell[self._cells[group]]
            if min([arena.num_slots for arena in place.arenas]) < min(self._old[group], self._new[group]):
                for page in hierarchy.levels.pages(self._cells[group]):  # memory that the device would not register again is gone
                    if not page.lost:
                        page.lost = True
                        hierarchy.settling.lost.append(page)
            if allocator.shrinking():
                allocator.abort_shrink()
            if self._new[group] > self._old[group]:
                if allocator.capacity > self._old[group]:
                    allocator.prepare_shrink(self._old[group])
                    allocator.finish_shrink()
                place.resize(self._old[group])
        for group in range(hierarchy.num_groups):
            allocator = hierarchy.levels.allocators[self._cells[group]]
            if allocator.capacity < self._old[group]:
                hierarchy.places.by_cell[self._cells[group]].resize(self._old[group])
                allocator.expand(self._old[group])
