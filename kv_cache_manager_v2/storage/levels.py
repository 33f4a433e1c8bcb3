"""The cache levels: their memory, their slots and their queues, and the one place where a page joins or leaves them.

Rule: a page that has a slot stands in exactly one list of its level and pool group: in the queue while it is evictable, else among
the kept ones; a page that nobody needs and no block lists gives its slot back at once. Everything here is in counts and links: no
copy, no owner, no plan, and nothing by slot, so that the cyclic collector finds the same few objects however many pages there are.
"""

from __future__ import annotations

from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.errors import CorruptedError
from kv_cache_manager_v2.ids import NO_SLOT, NULL_POINT, CacheTier, Point, SlotId
from kv_cache_manager_v2.storage.allocator import SlotAllocator
from kv_cache_manager_v2.storage.eviction import EvictionQueue
from kv_cache_manager_v2.storage.in_flight import TransfersInFlight
from kv_cache_manager_v2.storage.kept import KeptPages, remove_kept
from kv_cache_manager_v2.storage.page import Page


class Levels:
    """All slots of all levels. Lists with one entry per level and pool group are flat: entry level * num_groups + group.

    After the last level comes one more row of entries, `parking`: a few slots of host memory where pages wait while others take
    their places. It is empty but within one exchange.
    """

    def __init__(self, timeline: Timeline, tiers: list[CacheTier], slots: list[list[int]], settling: TransfersInFlight) -> None:
        """slots[level][group] is the number of slots of each pool group."""
        self.num_levels = len(tiers)
        self.parking = len(tiers)
        self.num_groups = len(slots[0])
        self.last = len(tiers) - 1  # held pages of this level have nowhere to go, so they are not queued
        self.tiers = tiers
        self.allocators: list[SlotAllocator] = [SlotAllocator(timeline, count) for row in slots for count in row]
        self.allocators += [SlotAllocator(timeline, 0) for _group in range(self.num_groups)]
        self.queues: list[EvictionQueue] = [EvictionQueue() for _cell in range(len(self.allocators))]
        self.kept: list[KeptPages] = [KeptPages() for _cell in range(len(self.allocators))]
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

    def enter(self, page: Page) -> None:
        """The page has a slot of its level and pool group now; `settle` queues it if it is evictable."""
        assert page.before is None, "a page entered a list while it stood in one"
        self.kept[page.level * self.num_groups + page.pool_group].add(page)

    def leave(self, page: Page) -> None:
        """The page is about to lose its slot."""
        if page.queued:
            self.queues[page.level * self.num_groups + page.pool_group].remove(page)
        else:
            remove_kept(page)

    def enqueue(self, page: Page) -> None:
        """From the kept pages to the young end of the queue."""
        page.unlink()
        self.queues[page.level * self.num_groups + page.pool_group].push(page)

    def dequeue(self, page: Page) -> None:
        """From the queue to the kept pages."""
        cell = page.level * self.num_groups + page.pool_group
        self.queues[cell].hand_over(page)
        self.kept[cell].add(page)

    def requeue(self, page: Page) -> None:
        """To the young end of the queue that the page stands in."""
        queue = self.queues[page.level * self.num_groups + page.pool_group]
        queue.hand_over(page)
        queue.push(page)

    def settle(self, page: Page) -> None:
        """After its counters or its owner changed: queue the page, keep it, or free it, as the rule says."""
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
        """The page is gone: in no list, and its slot is free once its last use is done."""
        self.leave(page)
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
        for kept in self.kept:
            kept.close()

    def pages(self, cell: int) -> list[Page]:
        """All pages of a level and pool group: those in the queue, next victim first, then the kept ones. O(pages)."""
        return self.queues[cell].pages() + self.kept[cell].pages()

    def all_pages(self) -> list[Page]:
        """All pages that have a slot, by level and pool group. O(pages)."""
        return [page for cell in range(len(self.allocators)) for page in self.pages(cell)]

    def check_invariants(self) -> None:
        """Slots and lists of pages agree. O(issued slots)."""
        for cell in range(len(self.allocators)):
            queue = self.queues[cell]
            allocator = self.allocators[cell]
            queue.check_invariants()
            self.kept[cell].check_invariants()
            allocator.check_invariants()
            self._check_slots(cell)
            assert cell < self.num_levels * self.num_groups or allocator.num_taken() == 0, "a page was left in the parking"
            unavailable = allocator.capacity - allocator.free - queue.length
            assert 0 <= unavailable <= allocator.capacity, f"{unavailable} slots are unavailable of {allocator.capacity}"

    def _check_slots(self, cell: int) -> None:
        """Each taken slot has one page, or is kept for a file transfer; each page has one taken slot."""
        allocator = self.allocators[cell]
        owned = bytearray(allocator.issued)
        for page in self.pages(cell):
            self._check_page(page, cell)
            assert allocator.taken(page.slot), f"slot {page.slot} of cell {cell} is free, and a page has it"
            assert owned[page.slot] == 0, f"slot {page.slot} of cell {cell} has two pages"
            owned[page.slot] = 1
        for slot in range(allocator.issued):
            left = self.settling.left(cell, SlotId(slot))
            assert not (left and owned[slot]), f"slot {slot} of cell {cell} is kept for a transfer, and a page has it"
            if allocator.taken(SlotId(slot)) and not left and not owned[slot]:
                raise CorruptedError(f"slot {slot} of cell {cell} was allocated, and no page has it")

    def _check_page(self, page: Page, cell: int) -> None:
        where = f"page at level {page.level}, pool group {page.pool_group}, slot {page.slot}"
        assert page.level * self.num_groups + page.pool_group == cell, f"{where} is listed in cell {cell}"
        assert page.holds >= 0, f"{where} has {page.holds} holds"
        assert page.locks >= 0, f"{where} has {page.locks} locks"
        assert page.locks == 0 or page.level == 0, f"{where} is locked off the GPU"
        assert page.queued == self.evictable_page(page), f"{where}: queued is {page.queued}, evictable {self.evictable_page(page)}"
        assert page.transfers >= 0, f"{where} has {page.transfers} transfers"
        assert page.ready >= NULL_POINT, f"{where} has no point"
