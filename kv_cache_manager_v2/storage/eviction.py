"""The order of eviction of one pool group on one level: lowest priority first, and within a priority the longest evictable first.

Rule: a page stands in exactly one queue, and only while it is evictable; it joins at the young end when it becomes evictable and
keeps its place for as long as it stays so. The links are in the page, so joining and leaving are O(1) and allocate nothing.
"""

from __future__ import annotations

from kv_cache_manager_v2.ids import NO_SLOT, NULL_POINT, PRIORITY_MAX
from kv_cache_manager_v2.storage.page import Page


class EvictionQueue:
    """One circular list per priority, each closed by a sentinel that is made on first use."""

    def __init__(self) -> None:
        self.length = 0
        self.held = 0  # how many of the pages are held; kept up by whoever changes a queued page's holds
        self._lanes: list[Page | None] = [None] * (PRIORITY_MAX + 1)  # by priority: the sentinel; its `after` is the oldest page
        self._lowest = PRIORITY_MAX + 1  # no lane below this one has pages

    def __len__(self) -> int:
        return self.length

    def push(self, page: Page) -> None:
        """Join at the young end of the page's priority."""
        lane = self._lane(page.priority)
        before = lane.before
        assert before is not None
        self._link(page, before, lane)

    def replace(self, old: Page, new: Page) -> None:
        """`new`, of the same priority, takes the place of `old`."""
        assert old.queued
        assert old.priority == new.priority
        before = old.before
        assert before is not None
        self.remove(old)
        after = before.after
        assert after is not None
        self._link(new, before, after)

    def remove(self, page: Page) -> None:
        """Leave the queue, from any place."""
        self.hand_over(page)
        page.before = None
        page.after = None

    def hand_over(self, page: Page) -> None:
        """As `remove`, for a page that joins another list at once: its own links are left to be overwritten."""
        assert page.queued, "a page that is not queued cannot leave the queue"
        page.unlink()
        page.queued = False
        self.length -= 1
        if page.holds > 0:
            self.held -= 1

    def first(self) -> Page | None:
        """The next page to be evicted; O(1) amortised over pushes, at most the number of priorities."""
        if self.length == 0:
            return None
        priority = self._lowest
        while True:
            lane = self._lanes[priority]
            if lane is not None and lane.after is not lane:
                self._lowest = priority
                return lane.after
            priority += 1

    def next(self, page: Page) -> Page | None:
        """The page to be evicted after this queued one, None if it is the last. The queue must not change in between."""
        after = page.after
        assert after is not None
        if after.life_cycle >= 0:
            return after
        for priority in range(page.priority + 1, PRIORITY_MAX + 1):
            lane = self._lanes[priority]
            if lane is not None and lane.after is not lane:
                return lane.after
        return None

    def pages(self) -> list[Page]:
        """All pages in the order of eviction. O(length)."""
        found: list[Page] = []
        page = self.first()
        while page is not None:
            found.append(page)
            page = self.next(page)
        return found

    def close(self) -> None:
        """Cut all links: pages are not seen by the collector, so rings of them would never be freed."""
        for page in self.pages():
            self.remove(page)
        for lane in self._lanes:
            if lane is not None:
                lane.before = None
                lane.after = None
        self._lanes = [None] * (PRIORITY_MAX + 1)

    def _lane(self, priority: int) -> Page:
        if priority < self._lowest:
            self._lowest = priority
        lane = self._lanes[priority]
        if lane is None:
            lane = Page(-1, -1, -1, NO_SLOT, priority, NULL_POINT)
            lane.before = lane
            lane.after = lane
            self._lanes[priority] = lane
        return lane

    def _link(self, page: Page, before: Page, after: Page) -> None:
        assert not page.queued, "a page joined a queue while it was in one"
        page.before = before
        page.after = after
        before.after = page
        after.before = page
        page.queued = True
        self.length += 1
        if page.holds > 0:
            self.held += 1

    def check_invariants(self) -> None:
        """Links agree both ways, pages stand in the lane of their priority, counts are right. O(length)."""
        length = 0
        held = 0
        for priority in range(PRIORITY_MAX + 1):
            lane = self._lanes[priority]
            if lane is None:
                continue
            assert lane.life_cycle < 0, "a page stands as a sentinel"
            page = lane.after
            before = lane
            while page is not lane:
                assert page is not None, f"the list of priority {priority} ends without its sentinel"
                assert page.queued, "a page in the list does not know it"
                assert page.priority == priority, f"a page of priority {page.priority} in the list of {priority}"
                assert page.before is before, "the links disagree"
                length += 1
                held += 1 if page.holds > 0 else 0
                assert length <= self.length, "the queue is longer than its count, or loops"
                before = page
                page = page.after
            assert lane.before is before, "the sentinel's link disagrees"
            assert lane.after is lane or priority >= self._lowest, f"priority {priority} has pages below the hint {self._lowest}"
        assert length == self.length, f"{length} pages are queued, the count says {self.length}"
        assert held == self.held, f"{held} held pages are queued, the count says {self.held}"
