"""Handover: reuses the GPU slots of locked pages for new pages within one call.

A page is copied to a colder level, or marked to be dropped, while it is still locked, so a device error changes no page. Only
`finish`, which cannot fail, ends the locks and assigns the slots to the new pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache_manager_v2.ids import GPU_LEVEL, Point
from kv_cache_manager_v2.storage.clean_copy import discard_all, discard_from
from kv_cache_manager_v2.storage.copy_batch import CopyBatch
from kv_cache_manager_v2.storage.hierarchy import Hierarchy
from kv_cache_manager_v2.storage.page import Page
from kv_cache_manager_v2.storage.planner import GroupPlan


class Handover:
    """The handover of one slot from one page to another."""

    def __init__(self, page: Page, batch: CopyBatch | None) -> None:
        self.page = page
        self.stays_held = False  # its lock becomes a hold
        self.batch = batch  # the copy of its bytes; None if it is dropped
        ready = page.ready if batch is None else batch.source_free
        self.successor = Page(page.life_cycle, page.cell, page.slot, page.priority, ready)  # in no list of its cell yet
        self.successor.locks = 1


class Handovers:
    """The handovers of one call: all of them are finished, or all are canceled."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self.begun: list[Handover] = []

    def begin(self, need: list[int], given: Sequence[Page], held_on: Sequence[Page], point: Point) -> bool:
        """Provide need[g] GPU slots of each pool group, including those of begun handovers. False, unchanged, if impossible.

        The caller locks all these pages; it will unlock `given`, and hold `held_on` instead. They are evicted after all others.
        `point` is the end of the caller's work on them. After a device error the caller cancels.
        """
        planner = self._hierarchy.planner
        if planner.plan_trade(need, given, held_on) is not None:
            return False
        plans = planner.plans
        dropped: list[Page] = []
        moved: list[tuple[int, Page]] = []  # to this level
        for plan in plans:
            _split(plan, dropped, moved)
        self._hierarchy.mover.execute(plans, GPU_LEVEL)
        for page in dropped:
            self.begun.append(Handover(page, None))
        for level, page in moved:
            cell = self._hierarchy.cells[page.pool_group][level]
            self.begun.append(Handover(page, self._hierarchy.mover.queue_move([page], cell, point)))
        for handover in self.begun:
            handover.stays_held = handover.page in held_on
        return True

    def cancel(self) -> None:
        """After a failed call: the pages keep their slots and locks. Never raises."""
        for handover in self.begun:
            if handover.batch is not None:
                self._hierarchy.in_flight.cancel(handover.batch)
        self.begun = []

    def finish(self) -> None:
        """End the caller's locks on the pages, and give their slots to the new ones."""
        mover = self._hierarchy.mover
        for handover in self.begun:
            page = handover.page
            cell = page.cell
            cell.leave(page)
            page.locks -= 1
            if handover.stays_held:
                page.holds += 1
            if handover.batch is not None:
                discard_from(page, handover.batch.cell.level)
                mover.install_handed_over(page, handover.batch)
            else:
                discard_all(page)
                mover.drop_handed_over(page)
            cell.enter(handover.successor)
        self.begun = []
        mover.notify()


def _split(plan: GroupPlan, dropped: list[Page], moved: list[tuple[int, Page]]) -> None:
    """Take the locked pages out of a plan."""
    for page in plan.drops:
        if page.locks > 0:
            dropped.append(page)
    plan.drops = [page for page in plan.drops if page.locks == 0]
    for level in range(GPU_LEVEL + 1, len(plan.offloads)):
        for page in plan.offloads[level]:
            if page.locks > 0:
                moved.append((level, page))
        plan.offloads[level] = [page for page in plan.offloads[level] if page.locks == 0]
    plan.offloads[GPU_LEVEL] = []
