"""A cell: one pool group on one level, with its slots, its pages and its memory.

Rule: each page with a slot is in exactly one list of its cell. Evictable pages are in eviction order, in separate lists for
droppable and held ones; the others are pinned. A page without lock, hold and owner is freed at once. A cell copies no bytes,
calls no owner and plans nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from kv_cache_manager_v2.device.arenas import Arena
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.errors import CorruptedError
from kv_cache_manager_v2.eviction.admission import DiskAdmission
from kv_cache_manager_v2.eviction.order import EvictionOrder
from kv_cache_manager_v2.ids import NO_SLOT, NULL_POINT, Point, SlotId
from kv_cache_manager_v2.storage.allocator import SlotAllocator
from kv_cache_manager_v2.storage.clean_copy import CleanCopy, discard, discard_all
from kv_cache_manager_v2.storage.page import BUSY_DROPPABLE, BUSY_HELD, COPY, DROPPABLE, HELD, JUST_HELD, PINNED, Page
from kv_cache_manager_v2.storage.page_list import PageList, PageQueue
from kv_cache_manager_v2.storage.tiers import Tier

_log: Final = logging.getLogger(__name__)

# Newly held pages of a match stay in the droppable list, up to this number, since most are locked next. An eviction that meets them
# moves them to the held list.
MOST_JUST_HELD: Final = 256


class Cell:
    """The slots of one pool group on one level, the pages in them, and an arena for each pool."""

    def __init__(
        self, timeline: Timeline, level: int, pool_group: int, tier: Tier, keeps_held: bool, eviction: EvictionOrder
    ) -> None:
        """`keeps_held`: held pages are pinned, as on the last level, from which they cannot be moved."""
        self.level = level
        self.pool_group = pool_group
        self.tier = tier
        self.keeps_held = keeps_held
        self.eviction = eviction
        self.keeps_copies = False  # pages that are loaded from here leave clean copies
        self.admission: DiskAdmission | None = None  # decides which droppable pages may come here; None: all
        self.pins_all = False  # for swap slots: their pages are never evicted
        self.allocator = SlotAllocator(timeline, 0)
        self.arenas: list[Arena] = []  # by pool, all with as many slots
        self.copier = tier.make_copier(pool_group, self.arenas)
        self.evictable = 0  # evictable pages, including those with file transfers in flight
        self.droppable = PageQueue(eviction)
        self.held = PageQueue(eviction)
        self.busy = PageList()  # evictable once their file transfers have ended
        self.pinned = PageList()
        self.copies = PageList()  # clean copies, the oldest first
        self.num_copies = 0
        self._just_held = 0  # pages in `droppable` that are held
        self.writes: dict[int, int] = {}  # slot -> file transfers that may still write to it
        self.kept: dict[int, Point] = {}  # slot without a page that such a transfer may write to -> end of its last use
        self.swap: Cell | None = None  # pages of this level that wait in swap slots for a free slot

    # --- counts, O(1)

    @property
    def total(self) -> int:
        """The number of slots."""
        return self.allocator.capacity

    @property
    def free(self) -> int:
        """Slots free without eviction, less those for pages in swap slots; so it can be negative."""
        swap = self.swap
        return self.allocator.free if swap is None else self.allocator.free - swap.allocator.num_taken()

    @property
    def open(self) -> int:
        """Slots that are free or have clean copies: all that a page can get without evicting another."""
        return self.free + self.num_copies

    @property
    def num_droppable(self) -> int:
        """Pages that can be dropped now."""
        return self.droppable.length - self._just_held

    @property
    def num_held(self) -> int:
        """Pages that can be offloaded now, but not dropped."""
        return self.held.length + self._just_held

    @property
    def in_transfer(self) -> int:
        """Slots that are free or evictable once file transfers in flight have ended."""
        return self.evictable - self.droppable.length - self.held.length + len(self.kept)

    # --- pages

    def enter(self, page: Page) -> None:
        """Add a page that has a slot here now. It is pinned until `requeue`."""
        assert page.before is None, "a page entered a list while it was in one"
        self.pinned.append(page)

    def leave(self, page: Page) -> None:
        """Remove a page that is about to lose its slot."""
        self._unlink(page)
        page.list = PINNED
        page.before = None
        page.after = None

    def requeue(self, page: Page) -> None:
        """Put a page into the list for its counters, owner and transfers, or free it.

        A page that becomes evictable is the youngest of its priority. An evictable page keeps its age.
        """
        if (  # a cached page whose last user has ended: most of what the end of a request costs, so all of it is here
            page.list == PINNED
            and page.locks == 0
            and page.holds == 0
            and page.owner is not None
            and page.transfers == 0
            and not page.lost
            and not self.pins_all
        ):
            self.pinned.remove(page)
            eviction = self.eviction
            age = eviction.clock + 1
            eviction.clock = age
            page.age = age
            page.list = DROPPABLE
            self.evictable += 1
            self.droppable.push(page)
            return
        if page.locks > 0:
            wanted = PINNED
        elif page.holds > 0:
            wanted = PINNED if self.keeps_held else HELD if page.transfers == 0 else BUSY_HELD
        elif page.owner is None:
            self.free_page(page)
            return
        else:
            wanted = PINNED if self.pins_all else DROPPABLE if page.transfers == 0 else BUSY_DROPPABLE
        if page.lost and not self.has_memory(page):
            wanted = PINNED
        if page.list == wanted or (page.list == JUST_HELD and wanted == HELD):
            return
        if page.list == JUST_HELD and wanted == DROPPABLE:
            page.list = DROPPABLE
            self._just_held -= 1
        elif wanted == PINNED:
            self.pin(page)
        elif page.list == PINNED:
            self.pinned.remove(page)
            self._join(page, wanted)
        else:
            self._unlink(page)
            page.list = wanted
            self.evictable += 1
            if wanted == DROPPABLE:
                self.droppable.insert(page)
            elif wanted == HELD:
                self.held.insert(page)
            else:
                self.busy.append(page)

    def hold(self, page: Page) -> None:
        """As `requeue`, after a page got its first hold."""
        if page.list == DROPPABLE and self.keeps_held:
            self.pin(page)
        elif page.list == DROPPABLE and self._just_held < MOST_JUST_HELD:
            page.list = JUST_HELD
            self._just_held += 1
        else:
            self.requeue(page)

    def move_to_held(self, page: Page) -> None:
        """Move a newly held page from the droppable list to the held list, by its age."""
        self._unlink(page)
        page.list = HELD
        self.evictable += 1
        self.held.insert(page)

    def pin(self, page: Page) -> None:
        """Move an evictable page to the pinned list."""
        self._unlink(page)
        page.list = PINNED
        self.pinned.append(page)

    def renew(self, page: Page) -> None:
        """Make an evictable page the youngest of its priority."""
        wanted = page.list
        self._unlink(page)
        self._join(page, wanted)

    def set_priority(self, page: Page, priority: int) -> None:
        """Change a page's priority. An evictable page becomes the youngest of the new priority."""
        wanted = page.list
        if wanted == PINNED:
            page.priority = priority
            return
        self._unlink(page)
        page.priority = priority
        self._join(page, wanted)

    def set_worth(self, page: Page, worth: int) -> None:
        """Change a page's eviction class. An evictable page keeps its age."""
        wanted = page.list
        if wanted not in (DROPPABLE, JUST_HELD, HELD):
            page.worth = worth
            return
        queue = self.held if wanted == HELD else self.droppable
        queue.remove(page)
        page.worth = worth
        queue.insert(page)

    def _join(self, page: Page, wanted: int) -> None:
        if wanted == JUST_HELD:
            wanted = HELD
        age = self.eviction.clock + 1
        self.eviction.clock = age
        page.age = age
        page.list = wanted
        self.evictable += 1
        if wanted == DROPPABLE:
            self.droppable.push(page)
        elif wanted == HELD:
            self.held.push(page)
        else:
            self.busy.append(page)

    def _unlink(self, page: Page) -> None:
        here = page.list
        if here == PINNED:
            self.pinned.remove(page)
            return
        self.evictable -= 1
        if here == DROPPABLE:
            self.droppable.remove(page)
        elif here == JUST_HELD:
            self.droppable.remove(page)
            self._just_held -= 1
        elif here == HELD:
            self.held.remove(page)
        else:
            self.busy.remove(page)

    # --- clean copies

    def add_copy(self, copy: CleanCopy) -> None:
        """Add a clean copy, the youngest one. See `clean_copy.add_copy`."""
        copy.age = self.eviction.clock
        self.copies.append(copy)
        self.num_copies += 1

    def remove_copy(self, copy: CleanCopy) -> None:
        """Remove a clean copy. See `clean_copy.remove_copy`."""
        self.copies.remove(copy)
        copy.before = None
        copy.after = None
        self.num_copies -= 1

    def discard_copies(self, count: int) -> None:
        """Discard the oldest clean copies, at most `count`. Their slots are free."""
        while count > 0 and self.num_copies > 0:
            copy = self.copies.end.after
            assert isinstance(copy, CleanCopy), "a list of clean copies has a page"
            discard(copy)
            count -= 1

    # --- slots

    def free_page(self, page: Page) -> None:
        """Free a page: it leaves its list, and its slot is free once its last use has ended. Its clean copies are discarded."""
        if page.copy is not None:
            discard_all(page)
        self.free_slot(page.slot, page.ready)  # first: there may be no memory for it
        self.leave(page)
        page.slot = NO_SLOT

    def free_slot(self, slot: SlotId, point: Point) -> None:
        """Free a slot after `point`, and after all file transfers that may still write to it."""
        if self.writes and slot in self.writes:
            assert slot not in self.kept, "a slot was freed twice"
            self.kept[slot] = point
            return
        self.allocator.release(slot, point)

    def begin_write(self, slot: SlotId) -> None:
        """Count a file transfer that may write to the slot."""
        self.writes[slot] = self.writes.get(slot, 0) + 1

    def end_write(self, slot: SlotId) -> None:
        """Record that a file transfer can no longer write to the slot."""
        count = self.writes[slot] - 1
        if count > 0:
            self.writes[slot] = count
            return
        del self.writes[slot]
        if slot in self.kept:
            self.allocator.release(slot, self.kept.pop(slot))

    # --- memory

    def resize_memory(self, num_slots: int) -> None:
        """Resize every arena to this many slots. After an error their sizes may differ; see `Arena.resize`."""
        for arena in self.arenas:
            arena.resize(num_slots)

    def slots_with_memory(self) -> int:
        """Slots that have memory in every pool."""
        return min([arena.num_slots for arena in self.arenas])

    def has_memory(self, page: Page) -> bool:
        """Whether the page's slot has memory. False only for lost pages, after a failed resize lost their memory."""
        return page.slot < self.allocator.capacity

    def most_slots(self) -> int:
        """The most slots that the arenas can have; -1: no bound."""
        bounds = [arena.most_slots() for arena in self.arenas]
        bounds = [bound for bound in bounds if bound >= 0]
        return min(bounds) if bounds else -1

    def close_memory(self) -> None:
        """Free the memory of every pool, then raise the first error. Can be called again after an error."""
        failure: BaseException | None = None
        for arena in self.arenas:
            try:
                arena.close()
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure

    # --- closing and checks

    def close(self) -> None:
        """Clear the links of all pages."""
        self.droppable.close()
        self.held.close()
        self.busy.close()
        self.pinned.close()
        for copy in self.copies.pages():
            assert isinstance(copy, CleanCopy)
            copy.page.copy = None
            copy.copy = None
        self.copies.close()
        self.num_copies = 0
        self.evictable = 0
        self._just_held = 0

    def order(self) -> list[Page]:
        """The evictable pages, the next one to be evicted first. O(pages log pages)."""
        found = self.droppable.pages() + self.held.pages() + self.busy.pages()
        credits = self.eviction.credits
        keyed = {(page.priority, page.age + credits[page.worth], page.worth): page for page in found}
        return [keyed[key] for key in sorted(keyed)]

    def pages(self) -> list[Page]:
        """All pages: the evictable ones in eviction order, then the pinned ones. O(pages log pages)."""
        return self.order() + self.pinned.pages()

    def __repr__(self) -> str:
        return f"level {self.level}, pool group {self.pool_group}"

    def check_invariants(self, left: Sequence[SlotId] = ()) -> None:
        """Assert that slots, lists and counts agree. `left` has slots that failed copies keep. O(slots)."""
        self.allocator.check_invariants()
        self.droppable.check_invariants()
        self.held.check_invariants()
        self.busy.check_invariants(False)
        self.pinned.check_invariants(False)
        self.copies.check_invariants(False)
        copies = self.copies.pages()
        assert len(copies) == self.num_copies, f"{self}: {len(copies)} clean copies, the count says {self.num_copies}"
        queued = self.droppable.length + self.held.length + len(self.busy.pages())
        assert queued == self.evictable, f"{self}: {queued} pages are evictable, the count says {self.evictable}"
        just_held = sum([1 for page in self.droppable.pages() if page.list == JUST_HELD])
        assert just_held == self._just_held, f"{self}: {just_held} pages were just held, the count says {self._just_held}"
        owned = bytearray(self.allocator.issued)
        for copy in copies:
            self._check_copy(copy)
        for page in self.pages() + copies:
            if page.list != COPY:
                self._check_page(page)
            assert self.allocator.taken(page.slot), f"{self}: slot {page.slot} is free, and a page has it"
            if self.has_memory(page):
                assert owned[page.slot] == 0, f"{self}: slot {page.slot} has two pages"
                owned[page.slot] = 1
            else:
                assert page.lost, f"{self}: slot {page.slot} has no memory, and a page with bytes"
        for slot in self.kept:
            assert slot in self.writes, f"{self}: slot {slot} is kept although no transfer writes to it"
        for number in range(self.allocator.issued):
            slot = SlotId(number)
            kept = slot in self.kept or slot in left
            assert not (kept and owned[slot]), f"{self}: slot {slot} is kept for a transfer, and a page has it"
            if self.allocator.taken(slot) and not kept and not owned[slot]:
                raise CorruptedError(f"{self}: slot {slot} was allocated, and no page has it")

    def _check_copy(self, copy: Page) -> None:
        where = f"clean copy at {self}, slot {copy.slot}"
        assert isinstance(copy, CleanCopy), f"{where} is a page"
        assert copy.cell is self, f"{where} is listed in another cell"
        assert copy.list == COPY, f"{where} is in list {copy.list}"
        assert self.keeps_copies, f"{where}: this cell keeps none"
        assert copy.slot not in self.writes, f"{where}: a transfer may write to it"
        page = copy.page
        assert page.slot != NO_SLOT, f"{where}: its page is gone"
        assert not page.lost, f"{where}: its page is lost"
        assert page.owner is not None, f"{where}: its page is private"
        assert page.owner.is_final(page), f"{where}: a request may write to its page"
        assert page.cell.pool_group == self.pool_group, f"{where}: its page is in another pool group"
        level = page.cell.level
        found = page.copy
        while found is not None and found is not copy:
            assert found.cell.level > level, f"{where}: the copies of its page are not listed from warm to cold"
            level = found.cell.level
            found = found.copy
        assert found is copy, f"{where}: its page does not list it"
        assert self.level > level, f"{where}: its page is on level {page.cell.level}"

    def _check_page(self, page: Page) -> None:
        where = f"page at {self}, slot {page.slot}"
        assert page.cell is self, f"{where} is listed in another cell"
        assert page.holds >= 0, f"{where} has {page.holds} holds"
        assert page.locks >= 0, f"{where} has {page.locks} locks"
        assert page.locks == 0 or self.level == 0, f"{where} is locked off the GPU"
        assert page.transfers >= 0, f"{where} has {page.transfers} transfers"
        assert page.ready >= NULL_POINT, f"{where} has no point"
        assert page.copy is None or page.copy.page is page, f"{where} lists the clean copy of another page"
        busy = page.transfers > 0
        without_memory = page.lost and not self.has_memory(page)
        kept = self.pins_all or (page.holds > 0 and self.keeps_held) or (page.holds == 0 and page.owner is None)
        if page.locks > 0 or kept or without_memory:
            wanted = PINNED
        elif page.holds > 0:
            wanted = BUSY_HELD if busy else HELD
        else:
            wanted = BUSY_DROPPABLE if busy else DROPPABLE
        found = HELD if page.list == JUST_HELD else int(page.list)
        assert found == wanted, f"{where}: it is in list {page.list}, but belongs in {wanted}"
