"""Intrusive lists of pages: the pinned pages of a cell, and the evictable ones in eviction order.

Rule: a page with a slot is in exactly one list. Appending and removing are O(1) and allocate nothing, and there is no table that
the cyclic collector would have to traverse.

A page that changes between droppable and held keeps its age, so it is inserted in the middle of the other list. A sparse index,
with one entry for some dozens of pages, finds the position.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from kv_cache_manager_v2.eviction.order import EvictionOrder
from kv_cache_manager_v2.ids import NO_SLOT, NULL_POINT, PRIORITY_MAX
from kv_cache_manager_v2.storage.page import Page

INDEX_SPACING: Final = 64  # pages between two entries of the index
NEAR: Final = 8  # steps from the latest insertion before the index is searched: pages of a request are close to each other
_NONE: Final = Page(-1, None, NO_SLOT, 0, NULL_POINT)  # in no list: a sentinel for a class without pages


class PageList:
    """A circular list with a sentinel. In an ordered list ages increase from front to back."""

    def __init__(self) -> None:
        end = Page(-1, None, NO_SLOT, 0, NULL_POINT)
        end.before = end
        end.after = end
        self.end = end  # the sentinel: its `after` is the first page, its `before` the last
        self._index: list[Page] = []  # some of the pages, by increasing age
        self._near: Page | None = None  # the page inserted last
        self.unindexed = 0  # pages added at the back since the last entry of the index

    def append(self, page: Page) -> None:
        """Add a page at the back."""
        end = self.end
        last = end.before
        assert last is not None, "a page was added to a closed list"
        page.before = last
        page.after = end
        last.after = page
        end.before = page

    def insert(self, page: Page) -> None:
        """Add a page by its age. O(log pages); O(1) near the back and near the latest insertion."""
        last = self.end.before
        assert last is not None, "a page was added to a closed list"
        if last is self.end or last.age < page.age:
            self.append(page)
        else:
            older = self._older_nearby(page.age)
            if older is None:
                older = self._older_by_index(page.age)
            after = older.after
            assert after is not None
            page.before = older
            page.after = after
            older.after = page
            after.before = page
        if self._near is not None:
            self._near.near = False
        self._near = page
        page.near = True

    def remove(self, page: Page) -> None:
        """Remove a page. Its own links are not cleared."""
        before = page.before
        after = page.after
        assert before is not None, "a page that is in no list was to be removed"
        assert after is not None
        before.after = after
        after.before = before
        if page.indexed or page.near:
            self._forget(page)

    def pages(self) -> list[Page]:
        """All pages, from the front. O(pages)."""
        found: list[Page] = []
        page = self.end.after
        while page is not None and page is not self.end:
            found.append(page)
            page = page.after
        return found

    def close(self) -> None:
        """Clear all links. The collector does not track pages, so cycles of them would never be freed."""
        for page in self.pages():
            page.before = None
            page.after = None
            page.indexed = False
            page.near = False
        self.end.before = None
        self.end.after = None
        self._index = []
        self._near = None

    # --- the index

    def add_entry(self, page: Page) -> None:
        """Add the last page to the index."""
        self.unindexed = 0
        self._index.append(page)
        page.indexed = True

    def _forget(self, page: Page) -> None:
        if page.near:
            page.near = False
            before = page.before
            self._near = None
            if before is not None and before is not self.end:
                self._near = before
                before.near = True
        if page.indexed:
            page.indexed = False
            at = self._entries_older(page.age)
            assert self._index[at] is page, "the index of a list of pages is out of order"
            del self._index[at]

    def _entries_older(self, age: int) -> int:
        """The number of index entries with a smaller age."""
        low = 0
        high = len(self._index)
        while low < high:
            middle = (low + high) // 2
            if self._index[middle].age < age:
                low = middle + 1
            else:
                high = middle
        return low

    def _older_nearby(self, age: int) -> Page | None:
        """The last older page, or the sentinel if there is none; None if it is not within a few steps."""
        page = self._near
        if page is None:
            page = self.end.after
            assert page is not None
        if page.age > age:
            for _i in range(NEAR):
                page = page.before
                assert page is not None
                if page is self.end or page.age < age:
                    return page
            return None
        for _i in range(NEAR):  # a younger page exists, so the sentinel is not reached
            after = page.after
            assert after is not None
            if after.age > age:
                return page
            page = after
        return None

    def _older_by_index(self, age: int) -> Page:
        """As `_older_nearby`, at any distance. Adds index entries on a long way, so that later searches are short."""
        at = self._entries_older(age)
        page = self._index[at - 1] if at > 0 else self.end
        steps = 0
        while True:
            after = page.after
            assert after is not None
            if after.age > age:
                return page
            page = after
            steps += 1
            if steps == INDEX_SPACING:
                steps = 0
                self._index.insert(at, page)
                page.indexed = True
                at += 1

    def check_invariants(self, ordered: bool) -> None:
        """Assert that links agree, ages increase if `ordered`, and the index has pages of the list. O(pages)."""
        before = self.end
        page = self.end.after
        indexed: list[Page] = []
        near = 0
        while page is not None and page is not self.end:
            assert page.before is before, "the links of a list of pages disagree"
            assert not ordered or before is self.end or before.age < page.age, "a list of pages is out of order"
            if page.indexed:
                indexed.append(page)
            near += 1 if page.near else 0
            before = page
            page = page.after
        assert page is None or self.end.before is before, "the sentinel's link disagrees"
        assert len(indexed) == len(self._index), "the index of a list has pages of other lists"
        for at in range(len(indexed)):
            assert indexed[at] is self._index[at], "the index of a list of pages is out of order"
        assert near == (1 if self._near is not None else 0), "the start of the next search is not in the list"


class PageQueue:
    """Pages in eviction order: lowest priority first, then smallest rank; see eviction/order.py.

    Each class of each priority has a list by age, created at first use. The next page is the oldest of one of the classes of the
    lowest priority, so nothing is searched or sorted.
    """

    def __init__(self, eviction: EvictionOrder) -> None:
        self.length = 0
        self._eviction = eviction
        self._classes = eviction.classes
        self._usual: i64 = eviction.usual
        self._lists: list[PageList | None] = [None] * ((PRIORITY_MAX + 1) * eviction.classes)  # by priority, then by class
        self._lowest = PRIORITY_MAX + 1  # no list of a lower priority has pages

    def push(self, page: Page) -> None:
        """Add a page as the youngest of its class."""
        pages = self._lists[i64(page.priority) * self._classes + i64(page.worth)]
        if pages is None or page.priority < self._lowest:
            pages = self._list_of(page)
        pages.append(page)
        pages.unindexed += 1
        if pages.unindexed >= INDEX_SPACING:
            pages.add_entry(page)
        self.length += 1

    def insert(self, page: Page) -> None:
        """Add a page by its age."""
        self._list_of(page).insert(page)
        self.length += 1

    def remove(self, page: Page) -> None:
        """Remove a page."""
        pages = self._lists[i64(page.priority) * self._classes + i64(page.worth)]
        assert pages is not None, "a page was removed from a queue that it is not in"
        pages.remove(page)
        self.length -= 1

    def first(self) -> Page | None:
        """The next page to be evicted; None if empty. O(classes) amortised, at most O(priorities x classes)."""
        if self.length == 0:
            return None
        priority = self._lowest
        while True:
            page = self._front(priority)
            if page is not None:
                self._lowest = priority
                return page
            priority += 1

    def next(self, page: Page, fronts: list[Page]) -> Page | None:
        """The page to be evicted after this one; None if it is the last. O(classes).

        `fronts` is the memory of an iteration, empty at its beginning: the page at which each list of the priority continues.
        """
        after = page.after
        assert after is not None
        if self._eviction.uniform:
            if after.life_cycle >= 0:
                return after
        else:
            if not fronts:
                fronts.extend(self._fronts(page.priority))
            fronts[page.worth] = after
            best = self._eviction_first(fronts)
            if best is not None:
                return best
            fronts.clear()
        for priority in range(page.priority + 1, PRIORITY_MAX + 1):
            front = self._front(priority)
            if front is not None:
                return front
        return None

    def _front(self, priority: int) -> Page | None:
        """The next page to be evicted of one priority; None if it has no pages."""
        if self._eviction.uniform:
            pages = self._lists[i64(priority) * self._classes + self._usual]
            return pages.end.after if pages is not None and pages.end.after is not pages.end else None
        return self._eviction_first(self._fronts(priority))

    def _fronts(self, priority: int) -> list[Page]:
        """The oldest page of each class of a priority; a sentinel for a class without pages."""
        fronts: list[Page] = []
        place: i64 = i64(priority) * self._classes
        for worth in range(self._classes):
            pages = self._lists[place + worth]
            page = None if pages is None else pages.end.after
            fronts.append(_NONE if page is None else page)
        return fronts

    def _eviction_first(self, fronts: list[Page]) -> Page | None:
        """The page of smallest rank; None if all are sentinels."""
        credits = self._eviction.credits
        best: Page | None = None
        least = 0
        for page in fronts:
            if page.life_cycle >= 0:
                rank = page.age + credits[page.worth]
                if best is None or rank < least:
                    best = page
                    least = rank
        return best

    def pages(self) -> list[Page]:
        """All pages, by priority, class and age. O(length)."""
        return [page for pages in self._lists if pages is not None for page in pages.pages()]

    def close(self) -> None:
        """Clear all links."""
        for pages in self._lists:
            if pages is not None:
                pages.close()
        self._lists = [None] * len(self._lists)
        self.length = 0

    def _list_of(self, page: Page) -> PageList:
        if page.priority < self._lowest:
            self._lowest = page.priority
        place: i64 = i64(page.priority) * self._classes + i64(page.worth)
        pages = self._lists[place]
        if pages is None:
            pages = PageList()
            self._lists[place] = pages
        return pages

    def check_invariants(self) -> None:
        """Assert that pages are in the list of their priority and class, in order, and counted. O(length)."""
        length = 0
        for place in range(len(self._lists)):
            pages = self._lists[place]
            if pages is None:
                continue
            pages.check_invariants(True)
            found = pages.pages()
            length += len(found)
            priority, worth = divmod(place, int(self._classes))
            for page in found:
                assert (page.priority, page.worth) == (priority, worth), (
                    f"a page of priority {page.priority}, class {page.worth} in the list of {priority}, {worth}"
                )
            assert not found or priority >= self._lowest, f"priority {priority} has pages below the hint {self._lowest}"
        assert length == self.length, f"{length} pages are queued, the count says {self.length}"
