"""Resizes a level: some pool groups shrink, others grow.

Whether the new sizes fit is checked before anything changes. Then the oldest pages are evicted, and pages in slots to be removed
move to lower slots and keep their age. The memory is resized, and at last the slots of all groups change at once. After a device
error each group has its old slots, or those that still have memory; pages in slots without memory are lost.

Base addresses on the GPU do not change. Slots of pages may change, so pages in slots to be removed must not be locked. Held pages
are kept on every level.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from kv_cache_manager_v2.errors import ConfigError, CuError, OutOfMemoryError
from kv_cache_manager_v2.layout.arithmetic import round_down, round_up
from kv_cache_manager_v2.layout.sizing import LevelSizing, resized
from kv_cache_manager_v2.storage.cell import Cell
from kv_cache_manager_v2.storage.hierarchy import Hierarchy
from kv_cache_manager_v2.storage.page import Page

_log: Final = logging.getLogger(__name__)


class ResizeResult:
    """What a resize did, or why it was refused. True on success."""

    def __init__(self, level: int, old_slots: list[int], new_slots: list[int]) -> None:
        self.ok = True
        self.level = level
        self.old_slots = old_slots  # by pool group
        self.new_slots = new_slots  # by pool group, as requested
        self.reason = ""  # why it was refused
        self.pool_group = -1  # which pool group did not fit
        self.missing = 0  # missing slots, or pages that prevent the resize
        self.evicted = 0  # pages offloaded or dropped
        self.compacted = 0  # pages moved to remaining slots

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
    """Resize each pool group of a level to `sizing.slots[group]` slots. O(slots of the level).

    A refusal changes nothing and has a reason. After a device error, which is raised, all groups have their old slots, or those
    that still have memory (see `Hierarchy.sizings`); evicted pages remain evicted.
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
    """What an adjustment did on each level, or why it was refused. True on success."""

    def __init__(self, levels: list[ResizeResult]) -> None:
        self.levels = levels  # coldest first, up to the first refusal
        self.ok = all(result.ok for result in levels)

    def __reduce__(self) -> tuple[object, ...]:
        return AdjustResult, (list(self.levels),)

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return f"AdjustResult({self.levels})"


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
    if best_efforts and asked > current.quota:
        spare = hierarchy.tier(level).spare_bytes(available)
        if spare >= 0:
            asked = min(asked, round_down(current.quota + spare, grain))
            if asked <= current.quota:
                refused = ResizeResult(level, current.slots, current.slots)
                return refused.refuse("the host memory that is available must stay free for other processes", -1, 0)
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
    _end_transfers(hierarchy)
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
                _resize_back(hierarchy, level, before[level])
    return results


def _resize_back(hierarchy: Hierarchy, level: int, sizing: LevelSizing) -> None:
    """Restore the old size of a level after another level was refused. If that is refused too, the new size remains."""
    try:
        back = resize_level(hierarchy, level, sizing)
        if not back.ok:
            _log.error("level %d keeps its new size: %s", level, back.reason)
    except BaseException as error:  # the caller gets the first error
        _log.error("level %d cannot be given its old size: %r", level, error)


def _end_transfers(hierarchy: Hierarchy) -> None:
    """Wait for the file transfers in flight: they may access memory that is to be freed or moved."""
    if hierarchy.transfers_in_flight > 0:
        hierarchy.in_flight.wait()
        hierarchy.settle()


def _refuse_levels(hierarchy: Hierarchy, sizings: Sequence[LevelSizing]) -> ResizeResult | None:
    """The refusal if the levels cannot have these sizes together; None if they can.

    Pages that must be kept can only move to colder levels, so those of a level and all colder ones must fit the slots there.
    """
    for column in hierarchy.cells:
        kept = 0
        slots = 0
        for level in range(hierarchy.num_levels - 1, -1, -1):
            cell = column[level]
            kept += cell.total - cell.free - (cell.evictable - _num_held(cell))
            slots += sizings[level].slots[cell.pool_group]
            if kept > slots:
                old = [other.total for other in hierarchy.level_cells(level)]
                what = f"pages of pool group {cell.pool_group} on level {level} and colder"
                text = f"{kept - slots} {what} must be kept and would have no slot"
                return ResizeResult(level, old, sizings[level].slots).refuse(text, cell.pool_group, kept - slots)
    return None


def _num_held(cell: Cell) -> int:
    """Evictable pages that are held. O(pages with file transfers in flight)."""
    return cell.num_held + sum([1 for page in cell.busy.pages() if page.holds > 0])


class _Resize:
    """One resize in progress."""

    def __init__(self, hierarchy: Hierarchy, level: int, sizing: LevelSizing) -> None:
        self._hierarchy = hierarchy
        self._level = level
        self._sizing = sizing
        self._cells = hierarchy.level_cells(level)
        self._old = [cell.total for cell in self._cells]
        self._new = list(sizing.slots)
        self._result = ResizeResult(level, self._old, self._new)

    def run(self) -> ResizeResult:
        hierarchy = self._hierarchy
        assert len(self._new) == hierarchy.num_groups, "a sizing is for all pool groups"
        _end_transfers(hierarchy)
        if not self._fits():
            return self._result
        evicted = self._count_leaving()
        hierarchy.mover.execute(hierarchy.planner.plans, self._level)
        self._result.evicted = evicted
        try:
            self._compact()
            self._wait()
            self._change_memory()
        except BaseException:
            self._fit_slots()
            raise
        self._install()
        self._trim()
        return self._result

    def _changing(self, growing: bool) -> list[Cell]:
        """The cells that grow, or the others."""
        return [cell for cell in self._cells if (self._new[cell.pool_group] > self._old[cell.pool_group]) == growing]

    # --- before anything changes

    def _fits(self) -> bool:
        hierarchy = self._hierarchy
        result = self._result
        need = [0] * hierarchy.num_groups
        if hierarchy.in_flight.in_flight > 0:
            result.refuse("a file transfer that timed out is still running, and may write to this memory", -1, 1)
            return False
        for cell in self._cells:
            group = cell.pool_group
            old, new = self._old[group], self._new[group]
            need[group] = max(0, old - new)
            locked = sum([1 for page in cell.pinned.pages() if page.locks > 0 and page.slot >= new]) if new < old else 0
            if locked > 0:
                text = (
                    f"{locked} pages of pool group {group} are in slots to be removed and are locked; suspend their requests first"
                )
                result.refuse(text, group, locked)
                return False
            most = cell.most_slots()
            if 0 <= most < new:
                text = f"pool group {group} would exceed its address space of {most} slots; restart with the larger quota"
                result.refuse(text, group, new - most)
                return False
        shortage = hierarchy.planner.plan(self._level, need, [], [], False, True)
        if shortage is not None:
            text = (
                f"{shortage.missing} pages of pool group {shortage.pool_group} can be neither dropped nor moved to a colder level"
            )
            result.refuse(text, shortage.pool_group, shortage.missing)
            return False
        return True

    def _count_leaving(self) -> int:
        """Pages of the level that the plan evicts."""
        count = 0
        for plan in self._hierarchy.planner.plans:
            for pages in [*plan.offloads, plan.drops]:
                count += sum([1 for page in pages if page.level == self._level])
        return count

    # --- execution

    def _compact(self) -> None:
        """Stop allocating slots to be removed, and move the pages in them to lower slots."""
        for cell in self._changing(False):
            new = self._new[cell.pool_group]
            if new == self._old[cell.pool_group]:
                continue
            cell.allocator.prepare_shrink(new)
            moving = _pages_above(cell, new)
            if moving:
                assert len(moving) <= cell.allocator.free, "a shrink that fits has too few free slots to compact into"
                self._hierarchy.mover.move(moving, cell)
                self._result.compacted += len(moving)

    def _wait(self) -> None:
        """Block the host until all work on the slots has ended: memory may move or be freed."""
        hierarchy = self._hierarchy
        for cell in self._cells:
            if self._new[cell.pool_group] != self._old[cell.pool_group]:
                cell.allocator.synchronize()
                for page in cell.pages():
                    hierarchy.timeline.synchronize(page.ready)
        _end_transfers(hierarchy)
        in_flight = hierarchy.in_flight
        if in_flight.in_flight > 0:  # a transfer that timed out may still access memory
            raise CuError(f"a file transfer that timed out may still use memory to be freed or moved: {in_flight.last_error}")

    def _change_memory(self) -> None:
        """Resize the memory, shrinking cells first, so that others can use what they free."""
        for cell in self._changing(False) + self._changing(True):
            cell.resize_memory(self._new[cell.pool_group])

    def _install(self) -> None:
        for cell in self._cells:
            if cell.allocator.shrinking():
                cell.allocator.finish_shrink()
            else:
                cell.allocator.expand(self._new[cell.pool_group])
        self._hierarchy.sizings[self._level] = self._sizing

    def _trim(self) -> None:
        """Free memory that no group uses. If the device refuses, the next resize or the shutdown tries again."""
        try:
            self._hierarchy.tier(self._level).trim()
        except Exception as error:
            _log.warning("level %d has its new size, but not all unused memory could be freed: %r", self._level, error)

    def _fit_slots(self) -> None:
        """After a device error, restore the old slots of each group, or keep those that still have memory."""
        for cell in self._changing(True) + self._changing(False):
            try:
                cell.resize_memory(self._old[cell.pool_group])
            except BaseException as error:  # the caller raises the first error
                _log.error("%s: the memory of its old slots cannot be restored: %r", cell, error)
        smaller = False
        for cell in self._cells:
            there = cell.slots_with_memory()
            if there >= cell.total:
                cell.allocator.abort_shrink()
            else:
                smaller = True
                self._lose_from(cell, there)
        if smaller:
            slots = [cell.total for cell in self._cells]
            self._hierarchy.sizings[self._level] = self._hierarchy.sizings[self._level].with_slots(self._hierarchy.layout, slots)
            _log.error("a failed resize lost memory: level %d had %s slots and has %s now", self._level, self._old, slots)

    def _lose_from(self, cell: Cell, there: int) -> None:
        """Remove the slots from `there` on, which have no memory. Pages in them are lost."""
        for page in cell.pages():
            if page.slot >= there:
                self._hierarchy.in_flight.lose(page)
        cell.allocator.lose_from(there)
        for page in cell.pages():
            if page.slot >= there:
                cell.requeue(page)


def _pages_above(cell: Cell, new: int) -> list[Page]:
    """The pages in slots from `new` on, by slot id. O(pages of the cell)."""
    if cell.allocator.issued <= new:
        return []
    by_slot = {page.slot: page for page in cell.pages() if page.slot >= new}
    return [by_slot[slot] for slot in sorted(by_slot)]
