"""Executing a plan: drop, tell the owners, then move pages in batches, deepest level first.

Rule: no page leaves its queue before its copy is queued, and none changes its slot before its whole batch is. So a device failure
in the middle finds every page that has not moved at its old place, in its old position. Owners are told from worklists, never
inside each other.

When two levels are full and pages must change places, they go in rounds: whatever fits moves and leaves a slot behind for the next
round. If nothing fits anywhere, some pages of the target level wait in a small parking area of host memory until the others have
passed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from kv_cache_manager_v2.errors import KVCacheError
from kv_cache_manager_v2.ids import NO_SLOT, Point, SlotId
from kv_cache_manager_v2.statistics import MovementCounters
from kv_cache_manager_v2.storage.copier import Copier, CopyBatch
from kv_cache_manager_v2.storage.levels import Levels
from kv_cache_manager_v2.storage.page import Page
from kv_cache_manager_v2.storage.places import Place
from kv_cache_manager_v2.storage.planner import GroupPlan, exchange_stalls

PARKING_SLOTS: Final = 64  # pages that wait at once: more only makes the rounds longer
PARKING_BYTES: Final = 8 << 20  # bound of a pool group's parking area, unless a single slot is larger


class Mover:
    """The only one that moves and drops pages to make room."""

    def __init__(self, levels: Levels, places: list[Place], copier: Copier, counters: MovementCounters) -> None:
        self._levels = levels
        self._places = places  # by level and pool group, flat, as in Levels
        self._copier = copier
        self._counters = counters
        self._gone: list[Page] = []  # dropped or lost; their owners are to be told
        self._telling = False
        self._moved: list[Page] = []  # relocated; their owners are to be told ...
        self._moved_from: list[int] = []  # ... from which level

    # --- telling owners

    def drop(self, page: Page) -> None:
        """Drop a droppable page; its owner is told by `tell_gone`."""
        assert page.locks + page.holds == 0, "a page that somebody needs was to be dropped"
        self._counters.dropped[page.life_cycle][page.level] += 1
        self._levels.free_page(page)
        self.note_gone(page)

    def note_gone(self, page: Page) -> None:
        if page.owner is not None:
            self._gone.append(page)

    def tell_gone(self) -> None:
        """Tell the owners of dropped and lost pages, in that order. An owner may give back further pages meanwhile."""
        if self._telling:
            return  # the outer call goes on with whatever was added
        self._telling = True
        try:
            index = 0
            while index < len(self._gone):
                page = self._gone[index]
                index += 1
                owner = page.owner
                page.owner = None
                if owner is not None:
                    owner.page_gone(page)
        finally:
            self._gone = []
            self._telling = False

    def tell_moved(self) -> None:
        moved = self._moved
        sources = self._moved_from
        if not moved:
            return
        self._moved = []
        self._moved_from = []
        for index in range(len(moved)):
            page = moved[index]
            owner = page.owner
            if owner is not None:
                owner.page_relocated(page, sources[index], page.level)

    # --- plans

    def execute(self, plans: list[GroupPlan], target: int) -> None:
        """Carry out a plan that fits. On a device failure what was done stays done, and the error is raised."""
        for plan in plans:
            self._prepare_parking(plan, target)
        for plan in plans:
            for page in plan.drops:
                self.drop(page)
        if self._gone:
            self.tell_gone()
        try:
            for plan in plans:
                self._run_rounds(plan, target)
        finally:
            self.tell_moved()

    def _prepare_parking(self, plan: GroupPlan, target: int) -> None:
        """Make the parking area before anything changes, if the rounds would come to a standstill without one."""
        levels = self._levels
        if not plan.rising or not any(plan.sinking):
            return
        free = [levels.free(level, plan.pool_group) for level in range(levels.num_levels)]
        rising = [0] * levels.num_levels
        for page in plan.drops:
            free[page.level] += 1
        kept = 0
        for page in plan.rising:
            rising[page.level] += 1
            kept += 1 if page.transfers > 0 else 0
        sinking = [[page.level for page in pages] for pages in plan.sinking]
        if kept > 0 or exchange_stalls(target, free, rising, sinking):  # a kept slot would have to be left out of the count
            self._open_parking(plan.pool_group)

    def _open_parking(self, group: int) -> None:
        cell = self._levels.cell(self._levels.parking, group)
        allocator = self._levels.allocators[cell]
        if allocator.capacity == 0:
            place = self._places[cell]
            slot_bytes = sum([arena.slot_bytes for arena in place.arenas])
            slots = max(1, min(PARKING_SLOTS, PARKING_BYTES // slot_bytes))
            place.resize(slots)
            allocator.expand(slots)

    def _run_rounds(self, plan: GroupPlan, target: int) -> None:
        levels = self._levels
        for level in range(target + 1, levels.num_levels):
            if plan.sinking[level]:  # an owner that was told may have given some back
                plan.sinking[level] = [page for page in plan.sinking[level] if page.slot != NO_SLOT]
        plan.rising = [page for page in plan.rising if page.slot != NO_SLOT]
        try:
            while True:
                moved = 0
                left = 0
                for level in range(levels.last, target, -1):
                    moved += self._move_some(plan.sinking[level], level, target)
                    left += len(plan.sinking[level])
                moved += self._move_some(plan.rising, target, target)
                left += len(plan.rising)
                if left == 0:
                    return
                if moved == 0:
                    self._park(plan, target)
        except BaseException:
            for level in range(target + 1, levels.num_levels):
                for page in plan.sinking[level]:
                    if page.level == levels.parking:
                        self._rescue(page, level, target)
            raise

    def _move_some(self, pages: list[Page], destination: int, target: int) -> int:
        """Move pages from the front of the list, as many as there are free slots; those moved leave the list."""
        if not pages:
            return 0
        total = min(self._levels.free(destination, pages[0].pool_group), len(pages))
        done = 0
        try:
            while done < total:
                end = done + 1
                while end < total and pages[end].level == pages[done].level:
                    end += 1
                self.move_run(pages[done:end], destination, target)
                done = end
        finally:
            del pages[:done]
        return done

    def _park(self, plan: GroupPlan, target: int) -> None:
        """Take some pages off the target level that have no slot below yet. They keep their places in the plan."""
        levels = self._levels
        room = levels.free(levels.parking, plan.pool_group)
        leaving: list[Page] = []
        for level in range(levels.last, target, -1):
            for page in plan.sinking[level]:
                if page.level == target and len(leaving) < room:
                    leaving.append(page)
        assert leaving, "pages must change places, and nothing can move out of their way"
        self.move_run(leaving, levels.parking, target)

    def _rescue(self, page: Page, destination: int, target: int) -> None:
        """After a failure, a parked page goes on if there is room, else back, else to any level: as many slots are free as pages
        are parked, once the file transfers of the batch that failed are over. If even that copy fails, its bytes are lost."""
        levels = self._levels
        order = [destination, target, *range(levels.last, target, -1)]
        level = self._first_free(order, page.pool_group)
        if levels.free(level, page.pool_group) == 0:
            with suppress(KVCacheError):
                levels.settling.wait()
            levels.settling.poll()
            level = self._first_free(order, page.pool_group)
        try:
            self.move_run([page], level, target)
        except Exception:
            allocator = levels.allocators[levels.cell(level, page.pool_group)]
            slot, point = allocator.allocate()
            levels.leave(page)
            levels.vacate(levels.parking, page.pool_group, page.slot, page.ready)
            page.level = level
            page.slot = slot
            page.ready = point
            levels.enter(page)
            page.lost = True
            levels.settling.lost.append(page)
            levels.settle(page)

    def _first_free(self, order: list[int], group: int) -> int:
        """The first of these levels that has a free slot; the last one if none has."""
        for level in order:
            if self._levels.free(level, group) > 0:
                return level
        return order[-1]

    # --- one batch

    def move_run(self, pages: list[Page], destination: int, target: int) -> None:
        """Copy pages of one pool group from one level to free slots of another (or the same), and make the slots theirs.

        target: the level that room is made on, and from which pages were parked.
        """
        levels = self._levels
        source = pages[0].level
        group = pages[0].pool_group
        old_slots = [page.slot for page in pages]
        allocator = levels.allocators[levels.cell(destination, group)]
        slots: list[SlotId] = []
        waits: list[Point] = []
        for page in pages:
            slot, point = allocator.allocate()
            slots.append(slot)
            waits.append(point)
            waits.append(page.ready)
        cell = levels.cell(destination, group)
        copier = self._copier
        try:
            copier.run(
                CopyBatch(self._places[levels.cell(source, group)], old_slots, self._places[cell], slots, cell, pages, waits)
            )
        except BaseException:
            point = copier.abandon(pages)
            for index in range(len(slots)):  # the stream was perhaps not told to wait for who had them before
                levels.vacate(destination, group, slots[index], copier.merge(waits[2 * index], point))
            raise
        for index in range(len(pages)):
            page = pages[index]
            levels.vacate(source, group, old_slots[index], copier.source_free)
            page.slot = slots[index]
            page.ready = copier.ready
            if source == destination:
                continue  # compaction: the page keeps its place in the queue, and nobody counts it as moved
            levels.leave(page)
            page.level = destination
            levels.enter(page)
            if destination != levels.parking:
                self._arrive(page, target if source == levels.parking else source)

    def _arrive(self, page: Page, source: int) -> None:
        self._levels.settle(page)
        if source == page.level:
            return  # back from the parking area, after a failure: it never left
        self._counters.moved[page.life_cycle][source][page.level] += 1
        if page.owner is not None:
            self._moved.append(page)
            self._moved_from.append(source)
