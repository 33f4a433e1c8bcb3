"""The pages of one attention life cycle of one beam of a request, and the row in which the engine reads their indices.

Rule: a block is live unless it is stale, that is, outside the window at the request's history. An ACTIVE request locks the pages of
live blocks. It holds the pages of stale blocks that are not committed yet. A SUSPENDED request holds both.
"""

from __future__ import annotations

from array import array

from librt.strings import BytesWriter, write_i32_le
from mypy_extensions import i32

from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, Point
from kv_cache_manager_v2.layout.life_cycle import NEVER, LifeCycle
from kv_cache_manager_v2.request.page_index_row import PageIndexRow, bad_run, entries_of
from kv_cache_manager_v2.storage.hierarchy import Hierarchy
from kv_cache_manager_v2.storage.page import Page


class BlockTable:
    """Pages by block ordinal. Calls are O(1), or O(blocks added or removed)."""

    def __init__(self, life_cycle: LifeCycle, pool_group: int, hierarchy: Hierarchy) -> None:
        self.life_cycle = life_cycle
        self.index: int = life_cycle.index
        self.pool_group = pool_group
        self.hierarchy = hierarchy
        self.pages: list[Page | None] = []  # by block ordinal
        self.row = PageIndexRow()
        self.stale_start = 0  # blocks stale_start .. stale_end - 1 are stale
        self.stale_end = 0
        self.scratch: list[Page] = []  # scratch slots, shared by the blocks of `scratch_span`
        self.scratch_span = (0, 0)
        self.pending_from = 0  # statistics: the allocation of pages from this ordinal on is counted, but not committed yet
        self.generated_from = NEVER  # statistics: pages from this ordinal on were allocated during generation

    def set_history(self, history: int) -> None:
        """Move the stale range. The caller has called `leave` for each block that becomes stale."""
        self.stale_start, self.stale_end = self.life_cycle.stale(history)

    def is_live(self, ordinal: int) -> bool:
        """Whether the next step may read the block."""
        return not self.stale_start <= ordinal < self.stale_end

    def leaving(self, history: int) -> tuple[int, int]:
        """The blocks that become stale when the history moves."""
        start, end = self.life_cycle.stale(history)
        return max(self.stale_end, start), min(end, len(self.pages))

    # --- blocks

    def append(self, page: Page | None) -> None:
        """Append a block, with a page that the request has locked, or without a page."""
        self.pages.append(page)
        self.row.append(BAD_PAGE_INDEX if page is None else page.slot)

    def extend(self, pages: list[Page | None]) -> None:
        """Append blocks, each with a page that the request has locked, or without a page.

        The row grows once, which takes a third of the time of `append` for each block.
        """
        slots = slots_of(pages)
        self.pages.extend(pages)
        self.row.extend(slots)

    def share(self, pages: list[Page | None]) -> None:
        """Set the blocks of a new SUSPENDED request, whose pages it holds already."""
        self.pages = pages
        self.row.fill(bad_run(len(pages)))

    def replace(self, ordinal: int, page: Page) -> None:
        """Replace the page of a live block of an ACTIVE request by a locked page with the same bytes."""
        self.pages[ordinal] = page
        self.row.set(ordinal, page.slot)

    def end_page(self, ordinal: int, active: bool, point: Point) -> None:
        """Unlock or release the page of a block, if it has one. `point` is the end of the request's work on it.

        The entry of the row does not change: the caller clears or truncates the whole row, which costs much less.
        """
        page = self.pages[ordinal]
        if page is None:
            return
        self.pages[ordinal] = None
        if active and not self.stale_start <= ordinal < self.stale_end:
            self.hierarchy.unlock(page, point)
        else:
            self.hierarchy.release_youngest(page)

    def leave(self, ordinal: int, stays_held: bool, point: Point) -> None:
        """Unlock the page of a block that becomes stale, or hold it until the block is committed. Its entry is blank already."""
        page = self.pages[ordinal]
        assert page is not None, "a live block has no page"
        if stays_held:
            self.hierarchy.hold_locked(page, point)
        else:
            self.pages[ordinal] = None
            self.hierarchy.unlock(page, point)

    def take(self, ordinal: int) -> None:
        """Remove the locked page of a block, which is used for another block. The block's entry is blank already."""
        self.pages[ordinal] = None

    def hand_over(self, ordinal: int, stays_held: bool) -> None:
        """Record that a live block became stale, and that its page has handed its slot to another page: see `Handovers`."""
        if not stays_held:
            self.take(ordinal)

    def release_stale(self, first: int, last: int) -> None:
        """Release the stale pages of blocks first .. last - 1, which were held until their commit."""
        for ordinal in range(max(self.stale_start, first), min(self.stale_end, last, len(self.pages))):
            page = self.pages[ordinal]
            if page is not None:
                self.pages[ordinal] = None
                self.hierarchy.release(page)

    def shrink(self, blocks: int, point: Point) -> None:
        """Remove the blocks from `blocks` on of an ACTIVE request, the last one first."""
        for ordinal in range(len(self.pages) - 1, blocks - 1, -1):
            self.end_page(ordinal, True, point)
        del self.pages[blocks:]
        self.row.truncate(blocks)
        self.pending_from = min(self.pending_from, blocks)

    def exchange(self, other: BlockTable, ordinal: int, active: bool) -> None:
        """Swap the pages of one block with another beam's table. Does nothing for a block that the beams share."""
        mine, theirs = self.pages[ordinal], other.pages[ordinal]
        if theirs is None:
            return
        self.pages[ordinal], other.pages[ordinal] = theirs, mine
        if active and self.is_live(ordinal):
            self.row.set(ordinal, theirs.slot)
            other.row.set(ordinal, BAD_PAGE_INDEX if mine is None else mine.slot)

    # --- scratch

    def trim_scratch(self, count: int, point: Point) -> None:
        """Unlock the scratch slots beyond the first `count`. `point` is the end of the request's work on them."""
        while len(self.scratch) > count:
            self.hierarchy.unlock(self.scratch.pop(), point)
        if count == 0:
            self.scratch_span = (0, 0)

    # --- the row

    def publish(self) -> None:
        """Write the slots of the live pages into the row. All of them are locked. O(blocks)."""
        pages = self.pages
        if self.stale_start < self.stale_end:
            end = min(self.stale_end, len(pages))
            blanks = bad_run(end - self.stale_start)
            self.row.fill(slots_of(pages[: self.stale_start]) + blanks + slots_of(pages[end:]))
        else:
            self.row.fill(slots_of(pages))


def slots_of(pages: list[Page | None]) -> array[int]:
    """The row entries of blocks with these pages. Filled as bytes, which is faster in compiled code than filling an array."""
    words = BytesWriter()
    for page in pages:
        write_i32_le(words, i32(BAD_PAGE_INDEX if page is None else page.slot))
    return entries_of(words.getvalue())
