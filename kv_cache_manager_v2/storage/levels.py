"""The cache levels: their memory, their slots and their queues, and the one place where a page joins or leaves them.

Rule: a page that is evictable stands in the queue of its level and pool group, any other in none; a page that nobody needs and no
block lists gives its slot back at once. Everything here is in counts and links: no copy, no owner, no plan.
"""

from __future__ import annotations

from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.errors import CorruptedError
from kv_cache_manager_v2.ids import NO_SLOT, NULL_POINT, CacheTier, Point, SlotId
from kv_cache_manager_v2.storage.allocator import SlotAllocator
from kv_cache_manager_v2.storage.eviction import EvictionQueue
from kv_cache_manager_v2.storage.page import Page
from kv_cache_manager_v2.storage.settling import Settling


class Levels:
    """All slots of all levels. Lists with one entry per level and pool group are flat: entry level * num_groups + group.

    After the last level comes one more row of entries, `parking`: a few slots of host memory where pages wait while others take
    their places. It is empty but within one exchange.
    """

    def __init__(self, timeline: Timeline, tiers: list[CacheTier], slots: list[list[int]], settling: Settling) -> None:
        """slots[level][group] is the number of slots of each pool group."""
        self.num_levels = len(tiers)
        self.parking = len(tiers)
        self.num_groups = len(slots[0])
        self.last = len(tiers) - 1  # held pages of this level have nowhere to go, so they are not queued
        self.tiers = tiers
        self.allocators: list[SlotAllocator] = [SlotAllocator(timeline, count) for row in slots for count in row]
        self.allocators += [SlotAllocator(timeline, 0) for _group in range(self.num_groups)]
        self.queues: list[EvictionQueue] = [EvictionQueue() for _cell in range(len(self.allocators))]
        self.settling = settling

    # --- counts, O(1)

    def cell(self, level: int, group: int) -> int:
        return level * self.num_groups + group

    def total(self, level: int, group: int) -> int:
        return self.allocators[level * self.num_groups + group].capacity

    def free(self, level: int, group: int) -> int:
        return self.allocators[level * self.num_groups + group].free

    def evictable(self, level: int, group: int) -> int:
        return self.queues[level * self.num_groups + group].length

    # --- pages

    def evictable_page(self, page: Page) -> bool:
        """Whether making room may take the page's slot: by dropping it, or by moving it down."""
        if page.locks > 0:
            return False
        if page.holds > 0:
            return page.level != self.last
        return page.owner is not None

    def enqueue(self, page: Page) -> None:
        """Join the young end of the queue of the page's level and pool group."""
        self.queues[page.level * self.num_groups + page.pool_group].push(page)

    def dequeue(self, page: Page) -> None:
        self.queues[page.level * self.num_groups + page.pool_group].remove(page)

    def settle(self, page: Page) -> None:
        """After its counters or its owner changed: queue the page, unqueue it, or free it, as the rule says."""
        if page.locks > 0:
            if page.queued:
                self.dequeue(page)
        elif page.holds > 0:
            if page.level != self.last:
                if not page.queued:
                    self.enqueue(page)
            elif page.queued:
                self.dequeue(page)
        elif page.owner is not None:
            if not page.queued:
                self.enqueue(page)
        else:
            self.free_page(page)

    def free_page(self, page: Page) -> None:
        """The page is gone: out of the queue, and its slot is free once its last use is done."""
        if page.queued:
            self.dequeue(page)
        slot = page.slot
        page.slot = NO_SLOT
        self.vacate(page.level, page.pool_group, slot, page.ready)

    def vacate(self, level: int, group: int, slot: SlotId, point: Point) -> None:
        """Free a slot after `point`, or when the file transfer that still writes to it has ended."""
        cell = level * self.num_groups + group
        if self.settling.in_flight > 0 and self.settling.leave(cell, slot, point):
            return
        self.allocators[cell].release(slot, point)

    # --- the end, and checks

    def close(self) -> None:
        for queue in self.queues:
            queue.close()

    def pages(self) -> list[Page]:
        """All pages that have a slot, by level, pool group and slot id. O(issued slots)."""
        return [page for allocator in self.allocators for page in allocator.pages if page is not None]

    def check_invariants(self) -> None:
        """Slots, queues and pages agree. O(issued slots)."""
        for queue in self.queues:
            queue.check_invariants()
        for cell in range(len(self.allocators)):
            allocator = self.allocators[cell]
            allocator.check_invariants()
            queued = 0
            for slot in range(allocator.issued):
                page = allocator.pages[slot]
                if page is None or self.settling.left(cell, SlotId(slot)):
                    continue
                self._check_page(page, cell, slot)
                queued += 1 if page.queued else 0
            assert cell < self.num_levels * self.num_groups or allocator.num_taken() == 0, "a page was left in the parking"
            assert queued == self.queues[cell].length, f"{self.queues[cell].length} pages queued, {queued} of them have a slot here"
            unavailable = allocator.capacity - allocator.free - queued
            assert 0 <= unavailable <= allocator.capacity, f"{unavailable} slots are unavailable of {allocator.capacity}"

    def _check_page(self, page: Page, cell: int, slot: int) -> None:
        where = f"page at level {page.level}, pool group {page.pool_group}, slot {page.slot}"
        if page.life_cycle < 0:
            raise CorruptedError(f"slot {slot} of cell {cell} was allocated and never bound to a page")
        assert page.slot == slot, f"{where} is noted as having slot {slot}"
        assert page.level * self.num_groups + page.pool_group == cell, f"{where} is noted in cell {cell}"
        assert page.holds >= 0, f"{where} has {page.holds} holds"
        assert page.locks >= 0, f"{where} has {page.locks} locks"
        assert page.locks == 0 or page.level == 0, f"{where} is locked off the GPU"
        assert page.queued == self.evictable_page(page), f"{where}: queued is {page.queued}, evictable {self.evictable_page(page)}"
        assert page.transfers >= 0, f"{where} has {page.transfers} transfers"
        assert page.ready >= NULL_POINT, f"{where} has no point"
