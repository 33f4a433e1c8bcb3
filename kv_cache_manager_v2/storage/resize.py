"""Resizes a level: some pool groups shrink, others grow.

Whether the new sizes fit is checked before anything changes. Then the oldest pages are evicted, and pages in slots to be removed
move to lower slots and keep their age. Once no work uses the slots any more, the memory is resized, and at last the slots of all
groups change at once. After a device error each group has its old slots, or those that still have memory; pages in slots without
memory are lost.

Nothing waits here. A resize is a loop of attempts: one that would have to wait for the device leaves the level's size as it is, and
names the points for which the caller waits without the manager's lock. Other calls may use the level meanwhile, so each attempt
plans anew.

Base addresses on the GPU do not change. Slots of pages may change, so pages in slots to be removed must not be locked. Held pages
are kept on every level.
"""

from __future__ import annotations

import logging
from typing import Final

from kv_cache_manager_v2.ids import NULL_POINT, Point
from kv_cache_manager_v2.layout.sizing import LevelSizing
from kv_cache_manager_v2.storage.cell import Cell
from kv_cache_manager_v2.storage.hierarchy import Hierarchy
from kv_cache_manager_v2.storage.page import Page

_log: Final = logging.getLogger(__name__)
MOST_ATTEMPTS: Final = 32  # then other calls use the level's slots faster than the device finishes with them


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


class LevelResize:
    """A resize of each pool group of a level to `sizing.slots[group]` slots. An attempt is O(slots of the level).

    A refusal changes nothing but what earlier attempts moved, and has a reason. After a device error, which is raised, all groups
    have their old slots, or those that still have memory (see `Hierarchy.sizings`); evicted pages remain evicted.
    """

    def __init__(self, hierarchy: Hierarchy, level: int, sizing: LevelSizing) -> None:
        assert len(sizing.slots) == hierarchy.num_groups, "a sizing is for all pool groups"
        self._hierarchy = hierarchy
        self._level = level
        self._sizing = sizing
        self._cells = hierarchy.level_cells(level)
        self._old = [cell.total for cell in self._cells]
        self._new = list(sizing.slots)
        self._attempts = 0
        self.result = ResizeResult(level, self._old, self._new)  # once an attempt has returned True
        self.pending: list[Point] = []  # after an attempt has returned False: the points to wait for

    def attempt(self) -> bool:
        """Resize the level, or refuse that (see `result`). False if the caller must first wait for `pending`, and try again."""
        hierarchy = self._hierarchy
        self._attempts += 1
        self._old = [cell.total for cell in self._cells]
        self.result.old_slots = self._old
        self.pending = []
        if not self._fits():
            return True
        for cell in self._changing(False):
            cell.discard_copies(cell.num_copies)
        points = self._plan()
        if points is not None:
            return not self._must_wait(points)
        self.result.evicted += self._count_leaving()
        hierarchy.mover.execute(hierarchy.planner.plans, self._level)
        try:
            self._compact()
            points = self._unfinished()
            if points:
                self._stop_shrinking()
                return not self._must_wait(points)
            self._change_memory()
        except BaseException:
            self._fit_slots()
            raise
        self._install()
        self._trim()
        return True

    def _changing(self, growing: bool) -> list[Cell]:
        """The cells that grow, or those that shrink."""
        found: list[Cell] = []
        for cell in self._cells:
            old, new = self._old[cell.pool_group], self._new[cell.pool_group]
            if old != new and (new > old) == growing:
                found.append(cell)
        return found

    def _changed_cells(self) -> list[Cell]:
        return self._changing(False) + self._changing(True)

    def _must_wait(self, points: list[Point]) -> bool:
        """Have the caller wait for these points. False if there are none, and, with a refusal, after too many attempts."""
        if points and self._attempts >= MOST_ATTEMPTS:
            self.result.refuse(f"other calls still used the level's slots after {self._attempts} attempts; try again", -1, 1)
            return False
        self.pending = points
        return len(points) > 0

    # --- before anything changes

    def _fits(self) -> bool:
        if self._hierarchy.in_flight.any_timed_out(self._changed_cells()):
            self.result.refuse("a file transfer that timed out is still running, and may use this memory", -1, 1)
            return False
        for cell in self._cells:
            group = cell.pool_group
            old, new = self._old[group], self._new[group]
            locked = sum([1 for page in cell.pinned.pages() if page.locks > 0 and page.slot >= new]) if new < old else 0
            if locked > 0:
                text = (
                    f"{locked} pages of pool group {group} are in slots to be removed and are locked; suspend their requests first"
                )
                self.result.refuse(text, group, locked)
                return False
            most = cell.most_slots()
            if 0 <= most < new:
                text = f"pool group {group} would exceed its address space of {most} slots; restart with the larger quota"
                self.result.refuse(text, group, new - most)
                return False
        return True

    def _plan(self) -> list[Point] | None:
        """Plan the evictions; None if the pages fit. Else the points after which they may fit, or none and a refusal."""
        hierarchy = self._hierarchy
        need = [max(0, self._old[cell.pool_group] - self._new[cell.pool_group]) for cell in self._cells]
        shortage = hierarchy.planner.plan(self._level, need, [], [], False, True)
        if shortage is None:
            return None
        points = hierarchy.in_flight.ends()
        if shortage.in_transfer == 0 or not points:
            points = []
            text = (
                f"{shortage.missing} pages of pool group {shortage.pool_group} can be neither dropped nor moved to a colder level"
            )
            self.result.refuse(text, shortage.pool_group, shortage.missing)
        return points

    def _count_leaving(self) -> int:
        """Pages of the level that the plan evicts."""
        count = 0
        for plan in self._hierarchy.planner.plans:
            for pages in [*plan.offloads, *plan.returns, plan.drops]:
                count += sum([1 for page in pages if page.level == self._level])
        return count

    # --- execution

    def _compact(self) -> None:
        """Stop allocating slots to be removed, and move the pages in them to lower slots."""
        for cell in self._changing(False):
            new = self._new[cell.pool_group]
            cell.allocator.prepare_shrink(new)
            moving = _pages_above(cell, new)
            if moving:
                assert len(moving) <= cell.allocator.free, "a shrink that fits has too few free slots to compact into"
                self._hierarchy.mover.move(moving, cell)
                self.result.compacted += len(moving)

    def _unfinished(self) -> list[Point]:
        """Points to wait for before the memory may be resized; none if nothing uses it. O(slots)."""
        cells = self._changed_cells()
        points = self._hierarchy.in_flight.ends(cells)
        for cell in cells:
            points += self._uses(cell)
        return points

    def _uses(self, cell: Cell) -> list[Point]:
        """Incomplete ends of uses of slots that a resize moves or removes."""
        disturbs_all = False
        for arena in cell.arenas:
            disturbs_all = disturbs_all or arena.disturbs_all
        if not disturbs_all:
            return cell.allocator.uses_aside()
        points = cell.allocator.uses()
        last = NULL_POINT
        for page in cell.pages() + cell.copies.pages():
            if page.ready != last and not self._hierarchy.timeline.done(page.ready):
                points.append(page.ready)
            last = page.ready
        return points

    def _stop_shrinking(self) -> None:
        for cell in self._changing(False):
            cell.allocator.abort_shrink()

    def _change_memory(self) -> None:
        """Resize the memory, shrinking cells first, so that others can use what they free."""
        for cell in self._changed_cells():
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
        cell.discard_copies(cell.num_copies)
        for page in cell.pages():
            if page.slot >= there:
                self._hierarchy.in_flight.lose(page)
        cell.allocator.lose_from(there)
        for page in cell.pages():
            if page.slot >= there:
                cell.requeue(page)


def _pages_above(cell: Cell, new: int) -> list[Page]:
    """The pages in slots from `new` on that have memory, by slot id. O(pages of the cell)."""
    if cell.allocator.issued <= new:
        return []
    by_slot = {page.slot: page for page in cell.pages() if page.slot >= new and cell.has_memory(page)}
    return [by_slot[slot] for slot in sorted(by_slot)]
