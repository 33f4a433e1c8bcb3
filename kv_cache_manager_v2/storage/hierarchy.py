"""All cache levels of a manager: who needs which page, and making room.

Rule: the counters, the slot and the links of a page change only through a `Hierarchy`. Whatever can run out of space is planned
first over all levels, so that a `Shortage` leaves everything as it was; what remains to fail after that is the device.

A page's life, by its counters and its owner:

    locks > 0                    on the GPU, immovable, in no queue
    holds > 0, no lock           queued, and moved down at need; on the last level in no queue
    neither, owned by a block    queued, moved down or dropped at need; the owner is told
    neither, no owner            gone: its slot is free once its last use is done
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from kv_cache_manager_v2.config import CacheTierConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.staging import DEFAULT_RING_BYTES, PIECE_ALIGNMENT, StagingRing
from kv_cache_manager_v2.device.timeline import SEQUENCE_BITS, Timeline
from kv_cache_manager_v2.errors import LogicError
from kv_cache_manager_v2.ids import GPU_LEVEL, NO_SLOT, NULL_POINT, CacheTier, Point, Stream
from kv_cache_manager_v2.layout.arithmetic import round_up
from kv_cache_manager_v2.layout.pools import StorageLayout
from kv_cache_manager_v2.layout.sizing import LevelSizing
from kv_cache_manager_v2.statistics import MovementCounters
from kv_cache_manager_v2.storage.copier import Copier, CopyBatch
from kv_cache_manager_v2.storage.in_flight import TransfersInFlight
from kv_cache_manager_v2.storage.levels import Levels
from kv_cache_manager_v2.storage.mover import Mover
from kv_cache_manager_v2.storage.page import Page, PageKeeper, PageOwner
from kv_cache_manager_v2.storage.places import Places
from kv_cache_manager_v2.storage.planner import Planner, Shortage

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
        self._pool_group_of: list[int] = [int(group) for group in layout.pool_group_of]
        self.places = Places(driver, layout, sizings, tier_configs)
        self.ring = StagingRing(driver, timeline, _ring_bytes(layout, sizings[0]))
        self.settling = TransfersInFlight(driver, timeline, self.ring)
        tiers = [sizing.tier for sizing in sizings]
        self.levels = Levels(timeline, tiers, [list(sizing.slots) for sizing in sizings], self.settling)
        self.settling.serve(self.levels.allocators)
        self._copier = Copier(driver, timeline, self.settling, self.ring)
        self.mover = Mover(self.levels, self.places.by_cell, self._copier, counters)
        self.planner = Planner(self.levels)
        self._no_need = [0] * self.num_groups
        self._last = self.num_levels - 1
        self._closed = False

    # --- counts, all O(1)

    def total(self, level: int, pool_group: int) -> int:
        """Slots of a pool group on a level."""
        return self.levels.total(level, pool_group)

    def free(self, level: int, pool_group: int) -> int:
        """Slots that can be had without evicting anything."""
        return self.levels.free(level, pool_group)

    def evictable(self, level: int, pool_group: int) -> int:
        """Slots whose pages could be dropped or moved down."""
        return self.levels.evictable(level, pool_group)

    def unavailable(self, level: int, pool_group: int) -> int:
        """All other slots: locked, held on the last level, private to somebody, or still written to by a file transfer."""
        levels = self.levels
        return levels.total(level, pool_group) - levels.free(level, pool_group) - levels.evictable(level, pool_group)

    def utilization(self, level: int, pool_group: int) -> float:
        """Share of the slots that are unavailable, 0..1."""
        total = self.levels.total(level, pool_group)
        return self.unavailable(level, pool_group) / total if total > 0 else 0.0

    @property
    def transfers_in_flight(self) -> int:
        """File transfers whose end `settle` has not seen, and pages that are lost and whose owners it has not told."""
        return self.settling.in_flight + len(self.settling.lost)

    # --- addresses

    def base_address(self, level: int, pool_group: int, pool: int) -> int:
        """Address of slot 0 in a pool; constant for the manager's life on the GPU. On disk: an offset in the pool's file."""
        self._require_memory()
        return self.places.by_cell[self.levels.cell(level, pool_group)].arenas[pool].address(0)

    def slot_address(self, level: int, pool_group: int, pool: int, slot: int) -> int:
        """Address of a slot in a pool."""
        self._require_memory()
        return self.places.by_cell[self.levels.cell(level, pool_group)].arenas[pool].address(slot)

    def _require_memory(self) -> None:
        if self._closed:
            raise LogicError("the manager has been shut down: its memory is gone")

    # --- one page

    def new_page(self, life_cycle: int, priority: int) -> Page:
        """A page with a free GPU slot, locked once, with no owner. Its `ready` is when the slot's last user is done: whoever writes
        waits for it. Raises OutOfPagesError if no slot is free: call `acquire` first."""
        assert 0 <= priority <= 100, "a page's priority lies in 0..100"
        group = self._pool_group_of[life_cycle]
        slot, ready = self.levels.allocators[group].allocate()
        page = Page(life_cycle, group, GPU_LEVEL, slot, priority, ready)
        page.locks = 1
        self.levels.kept[group].add(page)
        return page

    def lock(self, page: Page) -> None:
        """A running request uses the page. Raises LogicError unless it is on the GPU."""
        if page.level != GPU_LEVEL:
            raise LogicError(f"a page on level {page.level} cannot be locked; bring it to the GPU with `acquire` first")
        if page.queued:
            self.levels.dequeue(page)
        page.locks += 1

    def unlock(self, page: Page, point: Point) -> None:
        """One user less; `point` is the end of its work."""
        assert page.locks > 0, "a page was unlocked more often than locked"
        page.ready = self._later(page.ready, point)
        page.locks -= 1
        if page.locks == 0:
            self.levels.settle(page)

    def hold(self, page: Page) -> None:
        """Somebody needs the page kept, on any level. It keeps its place in the queue."""
        assert page.slot != NO_SLOT, "a page that is gone was held"
        page.holds += 1
        if not page.queued:
            if page.holds == 1:  # a page of nobody, as a copy just made: now it can be moved down
                self.levels.settle(page)
        elif page.holds == 1:
            self.levels.queues[page.level * self.num_groups + page.pool_group].held += 1
            if page.level == self._last:
                self.levels.dequeue(page)

    def release(self, page: Page) -> None:
        """Undo one `hold`; a page that nobody needs any more stays with its owner, or is gone."""
        assert page.holds > 0, "a page was released more often than held"
        page.holds -= 1
        if page.holds == 0:
            if page.queued:
                self.levels.queues[page.level * self.num_groups + page.pool_group].held -= 1
            self.levels.settle(page)

    def lock_held(self, page: Page) -> None:
        """One hold becomes a lock. Raises LogicError unless the page is on the GPU."""
        assert page.holds > 0, "a page that is not held was to be locked"
        if page.level != GPU_LEVEL:
            raise LogicError(f"a page on level {page.level} cannot be locked; bring it to the GPU with `acquire` first")
        if page.queued:
            self.levels.dequeue(page)
        page.holds -= 1
        page.locks += 1

    def hold_locked(self, page: Page, point: Point) -> None:
        """One lock becomes a hold; `point` is the end of the user's work."""
        assert page.locks > 0, "a page that is not locked cannot be unlocked"
        page.ready = self._later(page.ready, point)
        page.holds += 1
        page.locks -= 1
        if page.locks == 0:
            self.levels.settle(page)

    def _later(self, first: Point, second: Point) -> Point:
        """As `Timeline.merge`, asking the device nothing in the common cases."""
        if first == NULL_POINT:
            return second
        if second == NULL_POINT:
            return first
        stream = first >> SEQUENCE_BITS
        if stream == second >> SEQUENCE_BITS and stream != 0:
            return first if first > second else second
        return self.timeline.merge(first, second)

    # --- what the reuse tree asks (PageKeeper)

    def adopt(self, page: Page, owner: PageOwner, coverage: int) -> None:
        """The page now belongs to a block, which lists it."""
        assert page.slot != NO_SLOT, "a page that is gone was adopted"
        page.owner = owner
        page.coverage = coverage
        self.levels.settle(page)

    def orphan(self, page: Page) -> None:
        """Its owner no longer lists the page: gone at once unless somebody holds or locks it."""
        page.owner = None
        if page.slot != NO_SLOT:
            self.levels.settle(page)

    def discard(self, page: Page) -> None:
        """Drop a page that its owner has forgotten, if it is droppable and not gone already; the owner is not called."""
        page.owner = None
        if page.slot != NO_SLOT and page.locks == 0 and page.holds == 0:
            self.counters.dropped[page.life_cycle][page.level] += 1
            self.levels.free_page(page)

    # --- making room

    def acquire(self, need: Sequence[int], load: list[Page], keep: Sequence[Page] = ()) -> Shortage | None:
        """Make need[g] GPU slots of each pool group free, and bring all of `load`, which the caller holds, to the GPU.

        Victims are neither in `load` nor in `keep`. On a Shortage nothing has changed. A device failure is raised; pages not moved
        by then are where they were. Loaded pages may be used after their `ready` points, and are right once their transfers have
        settled.
        """
        if self._stands(need, load):
            return None
        return self._make_room(GPU_LEVEL, list(need), load, list(keep))

    def _stands(self, need: Sequence[int], load: list[Page]) -> bool:
        """Whether all that `acquire` is to bring about is there already."""
        for group in range(self.num_groups):
            if need[group] > self.levels.allocators[group].free:
                return False
        for page in load:  # noqa: SIM110 (as a loop: any() would make a generator)
            if page.level != GPU_LEVEL:
                return False
        return True

    def foresee(self, need: Sequence[int], given: Sequence[Page], parked: Sequence[Page]) -> Shortage | None:
        """What `acquire(need, [])` will answer once the caller has unlocked `given` and holds `parked` instead of locking them.

        Changes nothing, so that whoever trades pages for others can ask before it gives any up.
        """
        shortage = self.planner.foresee(list(need), given, parked, self.settling.busy_pages())
        if shortage is not None and self.settling.in_flight > 0 and not shortage.permanent:
            self.settling.wait()
            self.settle()
            shortage = self.planner.foresee(list(need), given, parked, self.settling.busy_pages())
        return shortage

    def raise_priority(self, page: Page, priority: int) -> None:
        """Evict the page no earlier than this priority says; a page whose priority is higher keeps it."""
        if priority <= page.priority:
            return
        queued = page.queued
        if queued:
            self.levels.dequeue(page)
        page.priority = priority
        if queued:
            self.levels.enqueue(page)

    def prefetch(self, pages: list[Page], level: int) -> Shortage | None:
        """Bring pages from colder levels to `level`; those on it become the youngest of their queue, warmer ones stay.

        On a Shortage nothing has changed. Raises LogicError for a level that does not exist.
        """
        if not 0 <= level < self.num_levels:
            raise LogicError(f"there is no cache level {level}; levels are 0 to {self._last}")
        shortage = self._make_room(level, self._no_need.copy(), pages, [])
        if shortage is None:
            for page in pages:
                if page.level == level and page.queued:
                    self.levels.requeue(page)
        return shortage

    def _make_room(self, target: int, need: list[int], load: list[Page], keep: list[Page]) -> Shortage | None:
        shortage = self._try_room(target, need, load, keep, True)
        if shortage is not None and self.settling.in_flight > 0 and not shortage.permanent:
            # Pages whose bytes are in flight are nobody's victims. Rather than fail for their sake, wait for them and plan again.
            self.settling.wait()
            self.settle()
            shortage = self._try_room(target, need, load, keep, True)
        return shortage

    def _try_room(self, target: int, need: list[int], load: list[Page], keep: list[Page], move_held: bool) -> Shortage | None:
        exchange = self.levels.tiers[target] != CacheTier.DISK  # parked pages pass through host memory in stream order
        if self.settling.in_flight > 0:
            keep = keep + self.settling.busy_pages()
        shortage = self.planner.plan(target, need, load, keep, exchange, move_held)
        if shortage is None:
            self.mover.execute(self.planner.plans, target)
        return shortage

    # --- copies and take-over

    def copy_into(self, source: Page, destination: Page, stream: Stream) -> None:
        """Queue a copy of a whole slot on the engine's stream, both pages on the GPU; the caller sees to their `ready` points.

        While the source's bytes are unconfirmed so are the copy's, and both are lost together.
        """
        assert source.level == GPU_LEVEL
        assert destination.level == GPU_LEVEL
        assert source.pool_group == destination.pool_group
        arenas = self.places.by_cell[source.pool_group].arenas
        for arena in arenas:
            self._driver.copy(stream, arena.address(destination.slot), arena.address(source.slot), arena.slot_bytes)
        self.counters.moved[source.life_cycle][GPU_LEVEL][GPU_LEVEL] += 1
        self.settling.inherit(source, destination)

    def take_over(self, cold: Page, ours: Page) -> None:
        """`cold`, a page with identical bytes on a colder level, takes over the GPU slot, the locks and the readiness of `ours`,
        and gives up its own slot. `ours` is gone. Needs no slot and copies nothing."""
        assert cold.level != GPU_LEVEL
        assert ours.level == GPU_LEVEL
        assert cold.pool_group == ours.pool_group
        assert ours.owner is None
        assert cold.slot != NO_SLOT
        assert ours.slot != NO_SLOT
        source = cold.level
        self.counters.taken_over[cold.life_cycle] += 1
        self.levels.leave(cold)
        self.levels.vacate(source, cold.pool_group, cold.slot, cold.ready)
        if cold.transfers > 0:
            self.settling.disown(cold)
        cold.level = GPU_LEVEL
        cold.slot = ours.slot
        cold.ready = ours.ready
        cold.locks += ours.locks
        cold.holds += ours.holds
        self.levels.leave(ours)
        self.levels.enter(cold)
        ours.slot = NO_SLOT
        ours.locks = 0
        ours.holds = 0
        self.levels.settle(cold)
        owner = cold.owner
        if owner is not None:
            owner.page_relocated(cold, source, GPU_LEVEL)

    def try_copy(self, source: Page, priority: int, stream: Stream) -> Page | None:
        """A copy of a page, in a free slot of its level or the nearest colder one that has any; else room is made, warmest level
        first, by moving down or dropping droppable pages, never held ones, waiting for nothing. None if that cannot be,
        or the page is lost.

        The copy is ordered on `stream`, after all work queued there and before all that follows. The new page has no owner, lock or
        hold: the caller adopts it, or gives it back with `orphan`.
        """
        level = -1 if source.lost else self._level_for_copy(source)
        if level < 0:
            return None
        group = source.pool_group
        slot, ready = self.levels.allocators[self.levels.cell(level, group)].allocate()
        page = Page(source.life_cycle, group, level, slot, priority, ready)
        self.levels.enter(page)
        try:
            if level == GPU_LEVEL:
                self.timeline.wait(stream, source.ready)
                self.timeline.wait(stream, ready)
                self.copy_into(source, page, stream)
                page.ready = self.timeline.record(stream)
                source.ready = self.timeline.merge(source.ready, page.ready)
            else:
                self._copy_cold(source, page, stream)
        except BaseException:
            self._copier.abandon([source, page])
            page.ready = self.timeline.merge(page.ready, self.timeline.record_or_wait(stream))
            self.levels.free_page(page)
            raise
        return page

    def overwrite(self, page: Page, source: Page, stream: Stream) -> bool:
        """Copy the bytes of `source` over those of a page that nobody needs, both on the GPU; False if it is not that simple.

        Ordered on `stream` like `try_copy`, but takes no slot. The page becomes the youngest of its queue. If the device
        refuses, the page's bytes are void: the caller drops it.
        """
        if page.level != GPU_LEVEL or source.level != GPU_LEVEL or not page.queued or page.holds > 0 or page.transfers > 0:
            return False
        if source.lost:
            return False
        self.timeline.wait(stream, source.ready)
        self.timeline.wait(stream, page.ready)
        try:
            self.copy_into(source, page, stream)
            page.ready = self.timeline.record(stream)
        except BaseException:
            page.ready = self.timeline.record_or_wait(stream)
            raise
        source.ready = self.timeline.merge(source.ready, page.ready)
        self.levels.requeue(page)
        return True

    def _level_for_copy(self, source: Page) -> int:
        group = source.pool_group
        for level in range(source.level, self.num_levels):
            if self.levels.free(level, group) > 0:
                return level
        for level in range(source.level, self.num_levels):
            need = self._no_need.copy()
            need[group] = 1
            queue = self.levels.queues[self.levels.cell(level, group)]
            if queue.length > queue.held and self._try_room(level, need, [], [source], False) is None:
                return level
        return -1

    def _copy_cold(self, source: Page, page: Page, stream: Stream) -> None:
        """Copy to a colder level on a copy stream, between what the stream has queued and what it will queue."""
        levels = self.levels
        source_cell = levels.cell(source.level, source.pool_group)
        cell = levels.cell(page.level, page.pool_group)
        waits = [source.ready, page.ready, self.timeline.record(stream)]
        by_cell = self.places.by_cell
        self._copier.run(CopyBatch(by_cell[source_cell], [source.slot], by_cell[cell], [page.slot], cell, [page], waits))
        self.settling.inherit(source, page)
        page.ready = self._copier.ready
        source.ready = self.timeline.merge(source.ready, self._copier.source_free)
        self.timeline.wait(stream, self._copier.source_free)
        self.counters.moved[source.life_cycle][source.level][page.level] += 1

    # --- file transfers

    def settle(self) -> None:
        """Look after file transfers in flight: those that ended confirm their pages; a page whose transfer failed or timed out is
        lost: its owner is told, and a droppable one is freed. O(transfers in flight); nothing to do costs nothing."""
        settling = self.settling
        settling.poll()
        if settling.lost:
            lost = settling.lost
            settling.lost = []
            for page in lost:
                if page.slot == NO_SLOT:
                    continue
                self.counters.lost[page.life_cycle] += 1
                self.mover.note_gone(page)
                if page.locks == 0 and page.holds == 0:
                    self.levels.free_page(page)
            self.mover.tell_gone()

    # --- the end, and checks

    def close(self) -> None:
        """Wait for all work and give all memory back; pages are void. Idempotent.

        Host memory that a transfer which timed out may still write to is left mapped, with a warning: unmapped, it could become
        somebody else's.
        """
        if self._closed:
            return
        self._closed = True
        self._driver.synchronize()
        self.settling.poll()
        self.settling.forget_spent_gates()
        self.levels.close()
        self._copier.close()
        written = self.settling.landing_cells()
        if self.settling.in_flight > 0:
            _log.warning(
                "%d file transfers hang; memory that they use stays: %s", self.settling.in_flight, self.settling.last_error
            )
        self.places.close(written)

    def check_invariants(self, pages: Sequence[Page] = ()) -> None:
        """Slots, queues, links and transfers agree; each of `pages` that is alive is where the hierarchy has it. O(all slots)."""
        self.levels.check_invariants()
        self.settling.check_invariants()
        listed = {id(page) for page in self.levels.all_pages()} if pages else set()
        for page in pages:
            if page.slot == NO_SLOT:
                assert page.before is None, "a page that is gone is listed"
                assert page.locks + page.holds == 0, "a page that is gone is held or locked"
            else:
                assert id(page) in listed, f"the page of slot {page.slot} on level {page.level} is nowhere listed"
        for level in range(self.num_levels):
            for group in range(self.num_groups):
                assert self.unavailable(level, group) >= 0, f"level {level}, pool group {group}: more slots than there are"
                place = self.places.by_cell[self.levels.cell(level, group)]
                for arena in place.arenas:
                    assert arena.num_slots >= self.total(level, group), f"an arena of level {level} is smaller than its slots"

    def merge_ready(self, page: Page, point: Point) -> None:
        """Somebody else has queued work on the page's bytes: later users wait for it too."""
        page.ready = self._later(page.ready, point)


def _ring_bytes(layout: StorageLayout, gpu: LevelSizing) -> int:
    """As large as what can be in transit to or from the GPU at once, within bounds."""
    gpu_bytes = sum([gpu.slots[group] * layout.slot_bytes(group) for group in range(layout.num_pool_groups)])
    return round_up(max(MIN_RING_BYTES, min(DEFAULT_RING_BYTES, gpu_bytes)), PIECE_ALIGNMENT)
