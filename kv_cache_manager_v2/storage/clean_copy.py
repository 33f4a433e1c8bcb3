"""Clean copies: the bytes of loaded pages that stay on the colder levels from which they were loaded.

A page that is evicted to the level of its copy takes the copy's slot, and nothing is copied. A copy is in the list of copies of its
cell, the oldest first, and may be discarded at any time: the page has the same bytes. So its slot counts as free.

Rule: the bytes of a page with a copy never change. Only pages that no request writes to leave copies (`leaves_copy`). What could
change that discards them: another owner or coverage, no owner, other bytes in the page's slot, a loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.ids import NO_SLOT, Point, SlotId
from kv_cache_manager_v2.storage.page import COPY, Page

if TYPE_CHECKING:
    from kv_cache_manager_v2.storage.cell import Cell


@mypyc_attr(acyclic=True)
class CleanCopy(Page):
    """A slot with the bytes of a page on a warmer level. It has no owner, lock or hold of its own."""

    def __init__(self, page: Page, cell: Cell, slot: SlotId, ready: Point) -> None:
        """`ready`: the end of the last write to the slot, and of the load that read it."""
        super().__init__(page.life_cycle, cell, slot, page.priority, ready)
        self.worth = page.worth
        self.list = COPY
        self.page = page


def leaves_copy(page: Page) -> bool:
    """Whether a page leaves a clean copy when it is loaded: its level keeps copies, and its bytes are final and confirmed."""
    owner = page.owner
    return page.cell.keeps_copies and owner is not None and page.transfers == 0 and not page.lost and owner.is_final(page)


def copy_in(page: Page, cell: Cell) -> CleanCopy | None:
    """The clean copy of a page in a cell; None if there is none. O(levels)."""
    copy = page.copy
    while copy is not None and copy.cell is not cell:
        copy = copy.copy
    return copy


def add_copy(copy: CleanCopy) -> None:
    """Keep the slot that a page has left as its warmest copy, and the youngest one of the cell."""
    page = copy.page
    copy.copy = page.copy
    copy.cell.add_copy(copy)
    page.copy = copy


def remove_copy(copy: CleanCopy) -> None:
    """Unlist a copy whose slot gets another use."""
    copy.cell.remove_copy(copy)
    before: Page = copy.page
    while before.copy is not copy:
        assert before.copy is not None, "a clean copy that its page does not list"
        before = before.copy
    before.copy = copy.copy
    copy.copy = None
    copy.slot = NO_SLOT


def discard(copy: CleanCopy) -> None:
    """Free the slot of a copy, once the load that read it has ended."""
    copy.cell.free_slot(copy.slot, copy.ready)  # first: there may be no memory for it
    remove_copy(copy)


def discard_from(page: Page, level: int) -> None:
    """Discard the copies of a page on this level and warmer ones."""
    while page.copy is not None and page.copy.cell.level <= level:
        discard(page.copy)


def discard_all(page: Page) -> None:
    """Discard all copies of a page."""
    while page.copy is not None:
        discard(page.copy)
