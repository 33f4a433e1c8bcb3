"""All cache levels of a manager: the states of pages, and eviction.

Only this folder changes the counters, cell, slot and links of a page. A call that may run out of slots first plans over all
levels, so a `Shortage` changes nothing. After that only the device can fail.

The counters and the owner of a page decide its state:

    locks > 0                    on the GPU, not movable, pinned
    holds > 0, no lock           evictable by offloading; pinned on the last level
    neither, owned by a block    evictable by offloading or dropping; the owner is notified
    neither, no owner            gone: its slot is free once its last use has ended
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from kv_cache_manager_v2.config import CacheTierConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.staging import DEFAULT_RING_BYTES, REGION_ALIGNMENT, StagingRing
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.errors import LogicError
from kv_cache_manager_v2.eviction.order import EvictionOrder
from kv_cache_manager_v2.ids import GPU_LEVEL, NO_SLOT, NULL_POINT, Point, Stream
from kv_cache_manager_v2.layout.arithmetic import round_up
from kv_cache_manager_v2.layout.pools import StorageLayout
from kv_cache_manager_v2.layout.sizing import LevelSizing
from kv_cache_manager_v2.statistics import MovementCounters
from kv_cache_manager_v2.storage.cell import Cell
from kv_cache_manager_v2.storage.cells import Cells
from kv_cache_manager_v2.storage.clean_copy import discard_all
from kv_cache_manager_v2.storage.copier import Copier
from kv_cache_manager_v2.storage.copy_batch import CopyBatch
from kv_cache_manager_v2.storage.in_flight import TransfersInFlight
from kv_cache_manager_v2.storage.mover import Mover
from kv_cache_manager_v2.storage.page import DROPPABLE, PINNED, Page, PageKeeper, PageOwner
from kv_cache_manager_v2.storage.planner import Planner, Shortage
from kv_cache_manager_v2.storage.tiers import Tier

_log: Final = logging.getLogger(__name__)
MIN_RING_BYTES: Final = 4 << 20  # the smallest staging ring


class Hierarchy(PageKeeper):
    """Pages on all levels. Calls for one page are O(1). Calls that evict are O(pages that are moved or dropped)."""

    def __init__(
        self,
        driver: Driver,
        timeline: Timeline,
        layout: StorageLayout,
        sizings: Sequence[LevelSizing],
        tier_configs: Sequence[CacheTierConfig],
        counters: MovementCounters,
        eviction: EvictionOrder,
    ) -> None:
        """Allocates the memory of all levels. If that fails, none remains allocated."""
        self.num_levels = len(sizings)
        self.num_groups = layout.num_pool_groups
        self.layout = layout
        self.sizings = list(sizings)  # by level; replaced when a level is resized
        self.counters = counters
        self._driver = driver
        self.timeline = timeline
        self._last = self.num_levels - 1
        self._no_need = [0] * self.num_groups
        self._closed = False
        self._finished = False  # closed, and all memory is free
        self._merged: Point = NULL_POINT  # the cached result of `_later`, for these two points:
        self._merged_first = self._merged_second = NULL_POINT
        self._all_cells = Cells(driver, timeline, layout, sizings, tier_configs, eviction)
        self.cells = self._all_cells.by_group  # by pool group and level
        self.gpu: list[Cell] = self._all_cells.of_level(GPU_LEVEL)  # by pool group
        self._gpu_of: list[Cell] = [self.gpu[group] for group in layout.pool_group_of]  # by life cycle
        self.ring = StagingRing(driver, timeline, _ring_bytes(layout, sizings[0]))
        self.in_flight = TransfersInFlight(driver, timeline, self.ring)
        self._copier = Copier(driver, timeline, self.in_flight, self.ring)
        self.mover = Mover(driver, timeline, self._all_cells, self._copier, self.in_flight, counters)
        self.planner = Planner(self.cells)
        self.counts_uses = self._all_cells.has_admission  # pages count the requests that use them

    def tier(self, level: int) -> Tier:
        """The tier of a level."""
        return self._all_cells.tiers[level]

    def level_cells(self, level: int) -> list[Cell]:
        """The cells of a level, by pool group."""
        return self._all_cells.of_level(level)

    def all_cells(self) -> list[Cell]:
        """Every cell, those of swap slots last."""
        return self._all_cells.all()

    def all_pages(self) -> list[Page]:
        """All pages that have a slot. O(pages log pages)."""
        return [page for cell in self.all_cells() for page in cell.pages()]

    # --- counts, all O(1)

    def total(self, level: int, pool_group: int) -> int:
        """Slots of a pool group on a level."""
        return self.cells[pool_group][level].total

    def free(self, level: int, pool_group: int) -> int:
        """Slots that are free without eviction, those of clean copies among them."""
        return max(0, self.cells[pool_group][level].open)

    def evictable(self, level: int, pool_group: int) -> int:
        """Slots whose pages can be offloaded or dropped."""
        return self.cells[pool_group][level].evictable

    def unavailable(self, level: int, pool_group: int) -> int:
        """All other slots: locked, held on the last level, private to a request, or still written to by a file transfer."""
        cell = self.cells[pool_group][level]
        return cell.total - max(0, cell.open) - cell.evictable

    def utilization(self, level: int, pool_group: int) -> float:
        """The fraction of the slots that are unavailable."""
        total = self.cells[pool_group][level].total
        return self.unavailable(level, pool_group) / total if total > 0 else 0.0

    @property
    def transfers_in_flight(self) -> int:
        """The work for `settle`: file transfers, canceled batches, lost pages, notifications, and pages in swap slots."""
        return self.in_flight.in_flight + len(self.in_flight.lost) + self.mover.unnotified + self.mover.swapped

    # --- addresses

    def base_address(self, level: int, pool_group: int, pool: int) -> int:
        """Address of slot 0 in a pool; on disk an offset in the pool's file. On the GPU it never changes."""
        return self.slot_address(level, pool_group, pool, 0)

    def slot_address(self, level: int, pool_group: int, pool: int, slot: int) -> int:
        """Address of a slot in a pool."""
        if self._closed:
            raise LogicError("the manager was shut down: its memory is freed")
        return self.cells[pool_group][level].arenas[pool].address(slot)

    # --- one page

    def new_page(self, life_cycle: int, priority: int) -> Page:
        """A page in a free GPU slot, with one lock and no owner. Before writing, wait for `ready`, the end of the slot's last use.

        Raises OutOfPagesError if no slot is free; `acquire` frees slots.
        """
        assert 0 <= priority <= 100, "a page's priority is from 0 to 100"
        cell = self._gpu_of[life_cycle]
        page = Page(life_cycle, cell, NO_SLOT, priority, NULL_POINT)  # first: there may be no memory for it
        page.slot, page.ready = cell.allocator.allocate()
        page.locks = 1
        cell.pinned.append(page)
        return page

    def lock(self, page: Page) -> None:
        """Add a lock of an active request. Raises LogicError unless the page is on the GPU."""
        cell = page.cell
        if cell.level != GPU_LEVEL:
            raise LogicError(f"a page on level {page.level} cannot be locked; load it with `acquire` first")
        if page.list != PINNED:
            cell.pin(page)
        page.locks += 1

    def unlock(self, page: Page, point: Point) -> None:
        """Remove one lock. The work that used the page ends at `point`."""
        assert page.locks > 0, "a page was unlocked more often than locked"
        page.ready = self._later(page.ready, point)
        page.locks -= 1
        if page.locks == 0:
            page.cell.requeue(page)

    def hold(self, page: Page) -> None:
        """Add a hold of a suspended request, on any level. The page keeps its position in the eviction order."""
        assert page.slot != NO_SLOT, "a page that is gone was held"
        page.holds += 1
        if page.holds == 1:
            page.cell.hold(page)

    def release(self, page: Page) -> None:
        """Remove one hold. A page without hold, lock and owner is freed."""
        assert page.holds > 0, "a page was released more often than held"
        page.holds -= 1
        if page.holds == 0:
            page.cell.requeue(page)

    def release_youngest(self, page: Page) -> None:
        """As `release`, at the end of a request: a page that stays evictable becomes the youngest of its priority."""
        pinned = page.list == PINNED  # then `release` makes it the youngest
        self.release(page)
        if not pinned and page.list != PINNED:
            page.cell.renew(page)

    def lock_held(self, page: Page) -> None:
        """Turn one hold into a lock. Raises LogicError unless the page is on the GPU."""
        assert page.holds > 0, "a page that is not held was to be locked"
        cell = page.cell
        if cell.level != GPU_LEVEL:
            raise LogicError(f"a page on level {page.level} cannot be locked; load it with `acquire` first")
        if page.list != PINNED:
            cell.pin(page)
        page.holds -= 1
        page.locks += 1

    def hold_locked(self, page: Page, point: Point) -> None:
        """Turn one lock into a hold. The work that used the page ends at `point`."""
        assert page.locks > 0, "a page that is not locked cannot be unlocked"
        page.ready = self._later(page.ready, point)
        page.holds += 1
        page.locks -= 1
        if page.locks == 0:
            page.cell.requeue(page)

    def _later(self, first: Point, second: Point) -> Point:
        """As `Timeline.merge`. Caches the latest result, since pages of a request mostly have equal points."""
        if first == self._merged_first and second == self._merged_second:
            return self._merged
        if first == NULL_POINT:
            return second
        if second == NULL_POINT:
            return first
        self._merged_second = NULL_POINT  # after an interrupt from here on, no result is cached
        self._merged_first = first
        self._merged = self.timeline.merge(first, second)
        self._merged_second = second
        return self._merged

    # --- calls of the reuse tree (PageKeeper)

    def adopt(self, page: Page, owner: PageOwner, coverage: int) -> None:
        """Make a block the page's owner."""
        assert page.slot != NO_SLOT, "a page that is gone was adopted"
        discard_all(page)
        page.owner = owner
        page.coverage = coverage
        page.cell.requeue(page)

    def unlist(self, page: Page) -> None:
        """Remove the page's owner. The page is freed unless it is held or locked."""
        discard_all(page)  # a request may write to it from now on
        page.owner = None
        if page.slot != NO_SLOT:
            page.cell.requeue(page)

    def drop(self, page: Page) -> None:
        """Remove the page's owner without calling it, and drop the page if it is droppable."""
        discard_all(page)
        page.owner = None
        if page.slot != NO_SLOT and page.locks == 0 and page.holds == 0:
            self.counters.dropped[page.life_cycle][page.level] += 1
            page.cell.free_page(page)

    # --- eviction and loading

    def acquire(self, need: Sequence[int], load: list[Page], keep: Sequence[Page] = ()) -> Shortage | None:
        """Free need[g] GPU slots of each pool group, and load all pages of `load`, which the caller holds, to the GPU.

        Evicts no page of `load` or `keep`. A Shortage changes nothing. After a device error, pages that have not moved are
        unchanged. Loaded pages can be used after their `ready` points; their bytes are confirmed once their transfers have ended.
        """
        if self._is_fulfilled(need, load):
            return None
        return self._free_slots(GPU_LEVEL, list(need), load, keep)

    def _is_fulfilled(self, need: Sequence[int], load: list[Page]) -> bool:
        """Whether `acquire` has nothing to do."""
        for group in range(self.num_groups):
            if need[group] > self.gpu[group].allocator.free:
                return False
        for page in load:  # noqa: SIM110 (as a loop: any() would make a generator)
            if page.cell.level != GPU_LEVEL:
                return False
        return True

    def _has_news(self) -> bool:
        """Process file transfers that have ended, without waiting. Returns whether there were any."""
        before = self.in_flight.in_flight
        if before == 0:
            return False
        self.settle()
        return self.in_flight.in_flight < before

    def raise_priority(self, page: Page, priority: int) -> None:
        """Raise the page's priority to at least this one."""
        if priority > page.priority:
            page.cell.set_priority(page, priority)

    def prefetch(self, pages: list[Page], level: int) -> Shortage | None:
        """Move pages from colder levels to `level`. Evictable ones there become the youngest of their priority.

        Pages on warmer levels stay. A Shortage changes nothing. Raises LogicError for an unknown level.
        """
        if not 0 <= level < self.num_levels:
            raise LogicError(f"level is {level}; must be from 0 to {self._last}")
        shortage = self._free_slots(level, self._no_need.copy(), pages, ())
        if shortage is None:
            for page in pages:
                if page.level == level and page.list != PINNED:
                    page.cell.renew(page)
        return shortage

    def _free_slots(self, target: int, need: list[int], load: list[Page], keep: Sequence[Page]) -> Shortage | None:
        shortage = self._try_free_slots(target, need, load, keep, True)
        if shortage is not None and not shortage.permanent and self._has_news():
            shortage = self._try_free_slots(target, need, load, keep, True)
        return shortage

    def _try_free_slots(
        self, target: int, need: list[int], load: list[Page], keep: Sequence[Page], move_held: bool
    ) -> Shortage | None:
        exchange = not self.tier(target).by_file  # swap slots are host memory, in stream order
        shortage = self.planner.plan(target, need, load, keep, exchange, move_held)
        if shortage is None:
            self.mover.execute(self.planner.plans, target)
        return shortage

    # --- copies and take-over

    def copy_into(self, source: Page, destination: Page, stream: Stream) -> None:
        """Queue a copy of a whole slot on the engine's stream, between GPU pages. The caller updates their `ready` points.

        The copy's bytes are confirmed or lost with the source's.
        """
        source.cell.copier.copy_slot(stream, source.slot, destination.slot)
        self._install_copy(source, destination)

    def _install_copy(self, source: Page, copy: Page) -> None:
        self.counters.moved[source.life_cycle][source.level][copy.level] += 1
        self.in_flight.inherit(source, copy)

    def take_over(self, cold: Page, own: Page) -> None:
        """Move the GPU slot, the locks and the `ready` point of `own` to `cold`, a page with equal bytes on a colder level.

        Frees the slot of `cold`; `own` is gone. Needs no free slot and copies nothing.
        """
        assert cold.level != GPU_LEVEL
        assert own.level == GPU_LEVEL
        assert cold.pool_group == own.pool_group
        assert own.owner is None
        assert NO_SLOT not in (cold.slot, own.slot)
        source = cold.cell
        discard_all(cold)
        self.counters.taken_over[cold.life_cycle] += 1
        source.leave(cold)
        source.free_slot(cold.slot, cold.ready)
        if cold.transfers > 0:
            self.in_flight.detach(cold)
        cell = own.cell
        cell.leave(own)
        cold.cell = cell
        cold.slot = own.slot
        cold.ready = own.ready
        cold.locks += own.locks
        cold.holds += own.holds
        cell.enter(cold)
        own.slot = NO_SLOT
        own.locks = 0
        own.holds = 0
        cell.requeue(cold)
        owner = cold.owner
        if owner is not None:
            owner.page_relocated(cold, source.level, GPU_LEVEL)

    def try_copy(self, source: Page, priority: int, stream: Stream) -> Page | None:
        """Copy a page to a free slot of its level or the nearest colder level; None if there is no slot or the page is lost.

        If no slot is free, droppable pages are offloaded or dropped, warmest level first; held pages never. The copy runs in the
        order of `stream`. It has no owner, lock or hold: the caller adopts it, or frees it with `unlist`.
        """
        cell = None if source.lost else self._cell_for_copy(source)
        if cell is None:
            return None
        batch = CopyBatch(source.cell, cell)
        try:
            batch.reserve(source)
            if cell is source.cell and cell.level == GPU_LEVEL:
                self.timeline.wait(stream, source.ready)
                self.timeline.wait(stream, batch.free_from[0])
                batch.stream = stream
                source.cell.copier.copy_slot(stream, source.slot, batch.slots[0])
                batch.ready = batch.source_free = self.timeline.record(stream)
            else:
                batch.waits.append(self.timeline.record(stream))
                self._copier.queue(batch)
                self.timeline.wait(stream, batch.source_free)
            source_ready = self.timeline.merge(source.ready, batch.source_free)
        except BaseException:
            self.in_flight.cancel(batch)
            raise
        page = Page(source.life_cycle, cell, batch.slots[0], priority, batch.ready)
        cell.enter(page)
        self.in_flight.install(batch, [page])
        self._install_copy(source, page)
        source.ready = source_ready
        return page

    def overwrite(self, page: Page, source: Page, stream: Stream) -> bool:
        """Copy the bytes of `source` to a droppable page, both on the GPU; False unless both pages allow it.

        Runs in the order of `stream`, and needs no slot. The page becomes the youngest of its priority. After an exception the
        page's bytes are undefined, and the caller drops it.
        """
        if page.level != GPU_LEVEL or source.level != GPU_LEVEL or page.list != DROPPABLE or source.lost:
            return False
        self.timeline.wait(stream, source.ready)
        self.timeline.wait(stream, page.ready)
        discard_all(page)
        try:
            source.cell.copier.copy_slot(stream, source.slot, page.slot)
            ready = self.timeline.record(stream)
        except BaseException:
            page.ready = self.timeline.record_or_wait(stream)
            raise
        page.cell.renew(page)
        self._install_copy(source, page)
        page.ready = ready
        source.ready = self._later(source.ready, ready)
        return True

    def _cell_for_copy(self, source: Page) -> Cell | None:
        """A cell with a free slot for a copy of a page, after an eviction if needed; None if there is none."""
        cells = self.cells[source.pool_group]
        for level in range(source.level, self.num_levels):
            if cells[level].free > 0:
                return cells[level]
        for level in range(source.level, self.num_levels):
            if cells[level].num_droppable + cells[level].num_copies > 0:
                need = self._no_need.copy()
                need[source.pool_group] = 1
                if self._try_free_slots(level, need, [], [source], False) is None:
                    return cells[level]
        return None

    # --- file transfers

    def settle(self) -> None:
        """Process ended file transfers: pages are confirmed, or lost, which notifies owners. See `TransfersInFlight.poll`."""
        self.in_flight.poll()
        lost = self.in_flight.lost
        while lost:
            page = lost[0]
            if page.slot != NO_SLOT:
                self.counters.lost[page.life_cycle] += 1
                self.mover.add_gone(page)
                if page.locks == 0 and page.holds == 0:
                    page.cell.free_page(page)
            del lost[0]  # last: an interrupt leaves it for the next call
        self.mover.notify()
        if self.mover.swapped > 0:
            self.mover.drain_swaps()

    # --- closing and checks

    def close(self) -> None:
        """Wait for all work and free all memory. Raises any error of the device; it can then be called again.

        Host memory that a hanging transfer may still write to is not freed, with a warning: it could become part of another
        allocation.
        """
        if self._finished:
            return
        self._driver.synchronize()
        self.in_flight.poll()
        self.in_flight.release_passed_gates()
        self._closed = True
        for cell in self.all_cells():
            cell.close()
        self._copier.close()
        if self.in_flight.in_flight > 0:
            text = self.in_flight.last_error
            _log.warning("%d file transfers hang; the memory that they use is not freed: %s", self.in_flight.in_flight, text)
        self._all_cells.close_memory(self.in_flight.cells_written())
        self._finished = True

    def check_invariants(self, pages: Sequence[Page] = ()) -> None:
        """Assert that slots, lists, links and transfers agree, and that all live pages of `pages` are listed. O(all slots)."""
        self.in_flight.check_invariants(self.all_cells())
        for cell in self.all_cells():
            cell.check_invariants(self.in_flight.kept_slots(cell))
            if not cell.pins_all:
                assert self.unavailable(cell.level, cell.pool_group) >= 0, f"{cell}: more free and evictable slots than there are"
            for arena in cell.arenas:
                assert arena.num_slots >= cell.total, f"an arena of {cell} is smaller than its slots"
        listed = {id(page) for page in self.all_pages()} if pages else set()
        for page in pages:
            if page.slot == NO_SLOT:
                assert page.before is None, "a page that is gone is listed"
                assert page.locks + page.holds == 0, "a page that is gone is held or locked"
            else:
                assert id(page) in listed, f"the page of slot {page.slot} on level {page.level} is in no list"

    def merge_ready(self, page: Page, point: Point) -> None:
        """Make later users of the page wait for this point too."""
        page.ready = self._later(page.ready, point)


def _ring_bytes(layout: StorageLayout, gpu: LevelSizing) -> int:
    """The size of the staging ring: that of the GPU tier, within bounds."""
    gpu_bytes = sum([gpu.slots[group] * layout.slot_bytes(group) for group in range(layout.num_pool_groups)])
    return round_up(max(MIN_RING_BYTES, min(DEFAULT_RING_BYTES, gpu_bytes)), REGION_ALIGNMENT)
