"""All cache levels of a manager: which pages are needed, and making room.

Rule: the counters, the cell, the slot and the links of a page change only in this folder. Whatever can run out of slots is planned
first over all levels, so that a `Shortage` leaves everything as it was; what remains to fail after that is the device.

A page's life, by its counters and its owner:

    locks > 0                    on the GPU, immovable, pinned
    holds > 0, no lock           evictable: moved down at need; pinned on the last level
    neither, owned by a block    evictable: moved down or dropped at need; the owner is told
    neither, no owner            gone: its slot is free once its last use is done
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from kv_cache_manager_v2.config import CacheTierConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.staging import DEFAULT_RING_BYTES, PIECE_ALIGNMENT, StagingRing
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.errors import LogicError
from kv_cache_manager_v2.ids import GPU_LEVEL, NO_SLOT, NULL_POINT, Point, Stream
from kv_cache_manager_v2.layout.arithmetic import round_up
from kv_cache_manager_v2.layout.pools import StorageLayout
from kv_cache_manager_v2.layout.sizing import LevelSizing
from kv_cache_manager_v2.statistics import MovementCounters
from kv_cache_manager_v2.storage.cell import Cell
from kv_cache_manager_v2.storage.cells import Cells
from kv_cache_manager_v2.storage.copier import Copier
from kv_cache_manager_v2.storage.copy_batch import CopyBatch
from kv_cache_manager_v2.storage.in_flight import TransfersInFlight
from kv_cache_manager_v2.storage.mover import Mover
from kv_cache_manager_v2.storage.page import DROPPABLE, PINNED, Page, PageKeeper, PageOwner
from kv_cache_manager_v2.storage.planner import Planner, Shortage
from kv_cache_manager_v2.storage.tiers import Tier

_log: Final = logging.getLogger(__name__)
MIN_RING_BYTES: Final = 4 << 20  # of the staging ring, however small the GPU tier is


class Hierarchy(PageKeeper):
    """Pages on all levels. Calls that concern one page are O(1); those that make room are O(pages that move or are dropped)."""

    def __init__(
        self,
        driver: Driver,
        timeline: Timeline,
        layout: StorageLayout,
        sizings: Sequence[LevelSizing],
        tier_configs: Sequence[CacheTierConfig],
        counters: MovementCounters,
    ) -> None:
        """Takes all memory of all levels, or raises and takes none."""
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
        self._merged: Point = NULL_POINT  # the last answer of `_later`, for these two:
        self._merged_first: Point = NULL_POINT
        self._merged_second: Point = NULL_POINT
        self._all_cells = Cells(driver, timeline, layout, sizings, tier_configs)
        self.cells = self._all_cells.by_group  # by pool group and level
        self.gpu: list[Cell] = self._all_cells.of_level(GPU_LEVEL)  # by pool group
        self._gpu_of: list[Cell] = [self.gpu[group] for group in layout.pool_group_of]  # by life cycle
        self.ring = StagingRing(driver, timeline, _ring_bytes(layout, sizings[0]))
        self.in_flight = TransfersInFlight(driver, timeline, self.ring)
        self._copier = Copier(driver, timeline, self.in_flight, self.ring)
        self.mover = Mover(driver, timeline, self._all_cells, self._copier, self.in_flight, counters)
        self.planner = Planner(self.cells)

    def tier(self, level: int) -> Tier:
        """What is particular to a level's kind of memory."""
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
        """Slots that can be had without evicting anything."""
        return max(0, self.cells[pool_group][level].free)

    def evictable(self, level: int, pool_group: int) -> int:
        """Slots whose pages could be dropped or moved down."""
        return self.cells[pool_group][level].evictable

    def unavailable(self, level: int, pool_group: int) -> int:
        """All other slots: locked, held on the last level, private to a request, or still written to by a file transfer."""
        cell = self.cells[pool_group][level]
        return cell.total - max(0, cell.free) - cell.evictable

    def utilization(self, level: int, pool_group: int) -> float:
        """Share of the slots that are unavailable, 0..1."""
        total = self.cells[pool_group][level].total
        return self.unavailable(level, pool_group) / total if total > 0 else 0.0

    @property
    def transfers_in_flight(self) -> int:
        """What `settle` has to look after: file transfers, copies that failed, pages in swap slots, and lost pages of which the
        owners do not know."""
        return self.in_flight.in_flight + len(self.in_flight.lost) + self.mover.swapped

    # --- addresses

    def base_address(self, level: int, pool_group: int, pool: int) -> int:
        """Address of slot 0 in a pool; constant for the manager's life on the GPU. On disk: an offset in the pool's file."""
        return self.slot_address(level, pool_group, pool, 0)

    def slot_address(self, level: int, pool_group: int, pool: int, slot: int) -> int:
        """Address of a slot in a pool."""
        if self._closed:
            raise LogicError("the manager has been shut down: its memory is gone")
        return self.cells[pool_group][level].arenas[pool].address(slot)

    # --- one page

    def new_page(self, life_cycle: int, priority: int) -> Page:
        """A page with a free GPU slot, locked once, with no owner; writers wait for its `ready`, the end of the slot's last use.

        Raises OutOfPagesError if no slot is free: call `acquire` first.
        """
        assert 0 <= priority <= 100, "a page's priority is in 0..100"
        cell = self._gpu_of[life_cycle]
        slot, ready = cell.allocator.allocate()
        page = Page(life_cycle, cell, slot, priority, ready)
        page.locks = 1
        cell.pinned.append(page)
        return page

    def lock(self, page: Page) -> None:
        """A running request uses the page. Raises LogicError unless it is on the GPU."""
        cell = page.cell
        if cell.level != GPU_LEVEL:
            raise LogicError(f"a page on level {page.level} cannot be locked; bring it to the GPU with `acquire` first")
        if page.list != PINNED:
            cell.pin(page)
        page.locks += 1

    def unlock(self, page: Page, point: Point) -> None:
        """One user less; `point` is the end of its work."""
        assert page.locks > 0, "a page was unlocked more often than locked"
        page.ready = self._later(page.ready, point)
        page.locks -= 1
        if page.locks == 0:
            page.cell.requeue(page)

    def hold(self, page: Page) -> None:
        """A suspended request needs the page, on any level. It keeps its place in the order of eviction."""
        assert page.slot != NO_SLOT, "a page that is gone was held"
        page.holds += 1
        if page.holds == 1:
            page.cell.hold(page)

    def release(self, page: Page) -> None:
        """One hold less; a page that is not needed any more stays with its owner, or is gone."""
        assert page.holds > 0, "a page was released more often than held"
        page.holds -= 1
        if page.holds == 0:
            page.cell.requeue(page)

    def release_youngest(self, page: Page) -> None:
        """As `release`, at the end of a request: a page that stays evictable becomes the youngest of its priority."""
        pinned = page.list == PINNED  # then it joins as the youngest
        self.release(page)
        if not pinned and page.list != PINNED:
            page.cell.renew(page)

    def lock_held(self, page: Page) -> None:
        """One hold becomes a lock. Raises LogicError unless the page is on the GPU."""
        assert page.holds > 0, "a page that is not held was to be locked"
        cell = page.cell
        if cell.level != GPU_LEVEL:
            raise LogicError(f"a page on level {page.level} cannot be locked; bring it to the GPU with `acquire` first")
        if page.list != PINNED:
            cell.pin(page)
        page.holds -= 1
        page.locks += 1

    def hold_locked(self, page: Page, point: Point) -> None:
        """One lock becomes a hold; `point` is the end of the user's work."""
        assert page.locks > 0, "a page that is not locked cannot be unlocked"
        page.ready = self._later(page.ready, point)
        page.holds += 1
        page.locks -= 1
        if page.locks == 0:
            page.cell.requeue(page)

    def _later(self, first: Point, second: Point) -> Point:
        """A point that is over once both are, see `Timeline.merge`.

        The pages of a request mostly have the same points, so the last answer is kept: that halves the cost of closing a request.
        """
        if first == NULL_POINT:
            return second
        if second == NULL_POINT:
            return first
        if first == self._merged_first and second == self._merged_second:
            return self._merged
        self._merged_second = NULL_POINT  # an interrupt from here on leaves no answer
        self._merged_first = first
        self._merged = self.timeline.merge(first, second)
        self._merged_second = second
        return self._merged

    # --- what the reuse tree asks (PageKeeper)

    def adopt(self, page: Page, owner: PageOwner, coverage: int) -> None:
        """The page now belongs to a block, which lists it."""
        assert page.slot != NO_SLOT, "a page that is gone was adopted"
        page.owner = owner
        page.coverage = coverage
        page.cell.requeue(page)

    def unlist(self, page: Page) -> None:
        """Its owner no longer lists the page: gone at once unless it is held or locked."""
        page.owner = None
        if page.slot != NO_SLOT:
            page.cell.requeue(page)

    def drop(self, page: Page) -> None:
        """Drop a page that its owner no longer lists, if it is droppable and not gone already; the owner is not called."""
        page.owner = None
        if page.slot != NO_SLOT and page.locks == 0 and page.holds == 0:
            self.counters.dropped[page.life_cycle][page.level] += 1
            page.cell.free_page(page)

    # --- making room

    def acquire(self, need: Sequence[int], load: list[Page], keep: Sequence[Page] = ()) -> Shortage | None:
        """Make need[g] GPU slots of each pool group free, and bring all of `load`, which the caller holds, to the GPU.

        Neither `load` nor `keep` are evicted. On a Shortage nothing has changed. A device failure is raised; pages not moved by
        then are where they were. Loaded pages may be used after their `ready` points, and are right once their transfers have
        ended well.
        """
        if self._is_fulfilled(need, load):
            return None
        return self._make_room(GPU_LEVEL, list(need), load, keep)

    def _is_fulfilled(self, need: Sequence[int], load: list[Page]) -> bool:
        """Whether all that `acquire` is to bring about is there already."""
        for group in range(self.num_groups):
            if need[group] > self.gpu[group].allocator.free:
                return False
        for page in load:  # noqa: SIM110 (as a loop: any() would make a generator)
            if page.cell.level != GPU_LEVEL:
                return False
        return True

    def _has_news(self) -> bool:
        """Look after the file transfers in flight, without waiting. Whether any has ended."""
        before = self.in_flight.in_flight
        if before == 0:
            return False
        self.settle()
        return self.in_flight.in_flight < before

    def raise_priority(self, page: Page, priority: int) -> None:
        """Evict the page no earlier than this priority says; a page whose priority is higher keeps it."""
        if priority > page.priority:
            page.cell.set_priority(page, priority)

    def prefetch(self, pages: list[Page], level: int) -> Shortage | None:
        """Bring pages from colder levels to `level`; those on it become the youngest of their priority, warmer ones stay.

        On a Shortage nothing has changed. Raises LogicError for a level that does not exist.
        """
        if not 0 <= level < self.num_levels:
            raise LogicError(f"there is no cache level {level}; levels are 0 to {self._last}")
        shortage = self._make_room(level, self._no_need.copy(), pages, ())
        if shortage is None:
            for page in pages:
                if page.level == level and page.list != PINNED:
                    page.cell.renew(page)
        return shortage

    def _make_room(self, target: int, need: list[int], load: list[Page], keep: Sequence[Page]) -> Shortage | None:
        shortage = self._try_room(target, need, load, keep, True)
        if shortage is not None and not shortage.permanent and self._has_news():
            shortage = self._try_room(target, need, load, keep, True)
        return shortage

    def _try_room(self, target: int, need: list[int], load: list[Page], keep: Sequence[Page], move_held: bool) -> Shortage | None:
        exchange = not self.tier(target).by_file  # pages in swap slots pass through host memory in stream order
        shortage = self.planner.plan(target, need, load, keep, exchange, move_held)
        if shortage is None:
            self.mover.execute(self.planner.plans, target)
        return shortage

    # --- copies and take-over

    def copy_into(self, source: Page, destination: Page, stream: Stream) -> None:
        """Queue a copy of a whole slot on the engine's stream, both pages on the GPU; the caller sees to their `ready` points.

        While the source's bytes are unconfirmed so are the copy's, and both are lost together.
        """
        self._queue_copy(source, destination.slot, stream)
        self._install_copy(source, destination)

    def _queue_copy(self, source: Page, slot: int, stream: Stream) -> None:
        assert source.level == GPU_LEVEL
        for arena in source.cell.arenas:
            self._driver.copy(stream, arena.address(slot), arena.address(source.slot), arena.slot_bytes)

    def _install_copy(self, source: Page, copy: Page) -> None:
        self.counters.moved[source.life_cycle][source.level][copy.level] += 1
        self.in_flight.inherit(source, copy)

    def take_over(self, cold: Page, ours: Page) -> None:
        """`cold`, a page with identical bytes on a colder level, takes over the GPU slot, the locks and the readiness of `ours`.

        Its own slot is free then, and `ours` is gone. Needs no slot and copies nothing.
        """
        assert cold.level != GPU_LEVEL
        assert ours.level == GPU_LEVEL
        assert cold.pool_group == ours.pool_group
        assert ours.owner is None
        assert cold.slot != NO_SLOT
        assert ours.slot != NO_SLOT
        source = cold.cell
        self.counters.taken_over[cold.life_cycle] += 1
        source.leave(cold)
        source.free_slot(cold.slot, cold.ready)
        if cold.transfers > 0:
            self.in_flight.disown(cold)
        cell = ours.cell
        cell.leave(ours)
        cold.cell = cell
        cold.slot = ours.slot
        cold.ready = ours.ready
        cold.locks += ours.locks
        cold.holds += ours.holds
        cell.enter(cold)
        ours.slot = NO_SLOT
        ours.locks = 0
        ours.holds = 0
        cell.requeue(cold)
        owner = cold.owner
        if owner is not None:
            owner.page_relocated(cold, source.level, GPU_LEVEL)

    def try_copy(self, source: Page, priority: int, stream: Stream) -> Page | None:
        """A copy of a page, in a free slot of its level or the nearest colder one that has any.

        Else room is made, warmest level first, by moving down or dropping droppable pages, never held ones, waiting for nothing.
        None if that cannot be, or the page is lost. The copy is ordered on `stream`, after all work queued there and before all
        that follows. It has no owner, lock or hold: the caller adopts it, or frees it with `unlist`.
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
                self._queue_copy(source, batch.slots[0], stream)
                batch.ready = batch.source_free = self.timeline.record(stream)
            else:
                batch.waits.append(self.timeline.record(stream))
                self._copier.queue(batch)
                self.timeline.wait(stream, batch.source_free)
            source_ready = self.timeline.merge(source.ready, batch.source_free)
        except BaseException:
            self.in_flight.abandon(batch)
            raise
        page = Page(source.life_cycle, cell, batch.slots[0], priority, batch.ready)
        cell.enter(page)
        self.in_flight.install(batch, [page])
        self._install_copy(source, page)
        source.ready = source_ready
        return page

    def overwrite(self, page: Page, source: Page, stream: Stream) -> bool:
        """Copy the bytes of `source` over those of a droppable page, both on the GPU; False if it is not that simple.

        Ordered on `stream` like `try_copy`, but takes no slot. The page becomes the youngest of its priority. If the device
        refuses, the page's bytes are void: the caller drops it.
        """
        if page.level != GPU_LEVEL or source.level != GPU_LEVEL or page.list != DROPPABLE or source.lost:
            return False
        self.timeline.wait(stream, source.ready)
        self.timeline.wait(stream, page.ready)
        try:
            self._queue_copy(source, page.slot, stream)
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
        """Where a copy of a page can go; room is made if need be."""
        cells = self.cells[source.pool_group]
        for level in range(source.level, self.num_levels):
            if cells[level].free > 0:
                return cells[level]
        for level in range(source.level, self.num_levels):
            if cells[level].num_droppable > 0:
                need = self._no_need.copy()
                need[source.pool_group] = 1
                if self._try_room(level, need, [], [source], False) is None:
                    return cells[level]
        return None

    # --- file transfers

    def settle(self) -> None:
        """Look after file transfers in flight: those that ended confirm their pages; a page whose transfer failed or timed out is
        lost: its owner is told, and a droppable one is freed. O(transfers in flight); nothing to do costs nothing."""
        in_flight = self.in_flight
        in_flight.poll()
        if in_flight.lost:
            lost = in_flight.lost
            in_flight.lost = []
            for page in lost:
                if page.slot == NO_SLOT:
                    continue
                self.counters.lost[page.life_cycle] += 1
                self.mover.note_gone(page)
                if page.locks == 0 and page.holds == 0:
                    page.cell.free_page(page)
            self.mover.tell_gone()
        if self.mover.swapped > 0:
            self.mover.drain_swaps()

    # --- the end, and checks

    def close(self) -> None:
        """Wait for all work and free all memory; pages are void. Raises what the device raises, and can be tried again then.

        Host memory that a transfer which timed out may still write to is left mapped, with a warning: unmapped, it could become
        part of another allocation.
        """
        if self._finished:
            return
        self._driver.synchronize()
        self.in_flight.poll()
        self.in_flight.forget_spent_gates()
        self._closed = True
        for cell in self.all_cells():
            cell.close()
        self._copier.close()
        if self.in_flight.in_flight > 0:
            text = self.in_flight.last_error
            _log.warning("%d file transfers hang; memory that they use stays: %s", self.in_flight.in_flight, text)
        self._all_cells.close_memory(self.in_flight.cells_written())
        self._finished = True

    def check_invariants(self, pages: Sequence[Page] = ()) -> None:
        """Slots, lists, links and transfers agree; each of `pages` that is alive is where the hierarchy has it. O(all slots)."""
        self.in_flight.check_invariants(self.all_cells())
        for cell in self.all_cells():
            cell.check_invariants(self.in_flight.kept_slots(cell))
            if not cell.pins_all:
                assert self.unavailable(cell.level, cell.pool_group) >= 0, f"{cell}: more slots than there are"
            for arena in cell.arenas:
                assert arena.num_slots >= cell.total, f"an arena of {cell} is smaller than its slots"
        listed = {id(page) for page in self.all_pages()} if pages else set()
        for page in pages:
            if page.slot == NO_SLOT:
                assert page.before is None, "a page that is gone is listed"
                assert page.locks + page.holds == 0, "a page that is gone is held or locked"
            else:
                assert id(page) in listed, f"the page of slot {page.slot} on level {page.level} is nowhere listed"

    def merge_ready(self, page: Page, point: Point) -> None:
        """More work was queued on the page's bytes: later users wait for it too."""
        page.ready = self._later(page.ready, point)


def _ring_bytes(layout: StorageLayout, gpu: LevelSizing) -> int:
    """As large as what can be in transit to or from the GPU at once, within bounds."""
    gpu_bytes = sum([gpu.slots[group] * layout.slot_bytes(group) for group in range(layout.num_pool_groups)])
    return round_up(max(MIN_RING_BYTES, min(DEFAULT_RING_BYTES, gpu_bytes)), PIECE_ALIGNMENT)
