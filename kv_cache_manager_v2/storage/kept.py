"""Pages that making room may not take: locked, held on the last level, or just made and nobody's yet.

Rule: a page with a slot stands in exactly one list of its level and pool group, here or in the queue of eviction. So the pages of a
level can be found without a table from slots to pages, which every full collection of the cyclic collector would walk.

The links are those of the queue, in the page: joining and leaving are O(1), allocate nothing and take no memory.
"""

from __future__ import annotations

from kv_cache_manager_v2.ids import NO_SLOT, NULL_POINT
from kv_cache_manager_v2.storage.page import Page


class KeptPages:
    """A circular list, in the order of joining, closed by a sentinel."""

    def __init__(self) -> None:
        self._ring = Page(-1, -1, -1, NO_SLOT, 0, NULL_POINT)  # its `after` is the page that has been here longest
        self._ring.before = self._ring
        self._ring.after = self._ring

    def add(self, page: Page) -> None:
        """Join; the page stands in no list, or has just been unlinked from one."""
        ring = self._ring
        last = ring.before
        assert last is not None, "a page joined after the end"
        page.before = last
        page.after = ring
        last.after = page
        ring.before = page

    def pages(self) -> list[Page]:
        """All pages, those first that have been here longest. O(length)."""
        found: list[Page] = []
        page = self._ring.after
        while page is not None and page is not self._ring:
            found.append(page)
            page = page.after
        return found

    def close(self) -> None:
        """Cut all links: pages are not seen by the collector, so rings of them would never be freed."""
        for page in self.pages():
            remove_kept(page)
        self._ring.before = None
        self._ring.after = None

    def check_invariants(self) -> None:
        """Links agree both ways. O(length)."""
        before = self._ring
        page = self._ring.after
        while page is not None and page is not self._ring:
            assert page.before is before, "the links of kept pages disagree"
            assert not page.queued, "a kept page is queued"
            before = page
            page = page.after
        assert page is None or self._ring.before is before, "the sentinel's link disagrees"


def remove_kept(page: Page) -> None:
    """Take a page out of the list of kept ones that it stands in, from any place."""
    assert not page.queued, "a queued page is no kept one"
    page.unlink()
    page.before = None
    page.after = None
