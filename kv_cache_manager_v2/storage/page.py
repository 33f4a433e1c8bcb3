"""The page: one life cycle's slot for one block.

Rule: two counters say who needs a page, nothing else. `locks` counts the running requests that use it, `holds` the suspended ones
and the matches of requests that have not run yet. LOCKED, HELD and DROPPABLE are derived from them. Only the storage changes a
page's counters, cell, slot and links.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from mypy_extensions import i32, mypyc_attr, u8

from kv_cache_manager_v2.ids import NO_SLOT, PageStatus, Point, SlotId
from kv_cache_manager_v2.listener import CachedBlock

if TYPE_CHECKING:
    from kv_cache_manager_v2.storage.cell import Cell

# The list of its cell that a page is in. Every page with a slot is in exactly one.
PINNED: Final = 0  # making room must not take it: locked, held on the last level, or without an owner
DROPPABLE: Final = 1  # may be dropped or moved down
HELD: Final = 2  # may be moved down, never dropped
BUSY_DROPPABLE: Final = 3  # as DROPPABLE, once the file transfers that carry its bytes have ended
BUSY_HELD: Final = 4  # as HELD, once the file transfers that carry its bytes have ended
JUST_HELD: Final = 5  # as HELD, but still linked among the droppable pages


@mypyc_attr(acyclic=True, allow_interpreted_subclasses=True)
class PageOwner(CachedBlock):
    """The block of the reuse tree that a page belongs to; the storage knows no more of the tree than this."""

    @abstractmethod
    def page_gone(self, page: Page) -> None:
        """The page was dropped or its bytes were lost: remove it. Called from a worklist, when all lists are consistent.

        The owner may drop further pages (`PageKeeper.drop`), as when a block's descendants can never match again.
        """

    @abstractmethod
    def page_relocated(self, page: Page, source: int, destination: int) -> None:
        """The page changed its cache level."""


@mypyc_attr(acyclic=True)
class Page:
    """A slot with an owner, a place in the order of eviction, and the point from which its bytes may be used.

    There is one for every cached block, so small numbers take four bytes or one: 128 bytes in all.
    """

    def __init__(self, life_cycle: int, cell: Cell | None, slot: SlotId, priority: int, ready: Point) -> None:
        """`cell`: None for the sentinel of a list, which has none."""
        # four bytes each, then one byte each: no padding
        self.life_cycle: i32 = life_cycle
        self.priority: i32 = priority  # 0..100; must not change while evictable
        self.holds: i32 = 0
        self.locks: i32 = 0
        self.coverage: i32 = 0  # attention: leading tokens of the block that are valid; SSM: exact position of the snapshot
        self.transfers: i32 = 0  # file transfers in flight that carry its bytes: until 0, the bytes are unconfirmed
        self.plans: i32 = 0  # planned drops that name it; the last of them drops it if it is not needed then
        self.list: u8 = PINNED  # the list of the cell that it is in
        self.indexed = False  # it is an entry of that list's index
        self.near = False  # that list begins its next search here
        self.lost = False  # a transfer failed: the bytes are not what they should be
        # eight bytes each
        if cell is not None:
            self.cell = cell  # the pool group and level of its slot
        self.slot = slot  # NO_SLOT once the page is gone
        self.ready = ready  # readers and writers wait for this point: the last writer, and the last finished reader
        self.age = 0  # number of its last joining of the order of eviction in its cell: the smaller goes first
        self.mark = 0  # number of the last plan that spared it
        self.owner: PageOwner | None = None  # the tree block that lists it; None if it is private to a request, or no longer listed
        self.next_in_block: Page | None = None  # the owner's next page, of a higher life cycle
        self.before: Page | None = None  # neighbours in the list of its cell; None once gone
        self.after: Page | None = None

    @property
    def level(self) -> int:
        """Cache level of its slot."""
        return self.cell.level

    @property
    def pool_group(self) -> int:
        """Pool group of its slot."""
        return self.cell.pool_group

    @property
    def queued(self) -> bool:
        """Whether it is in the order of eviction of its cell."""
        return self.list != PINNED

    def status(self) -> PageStatus:
        """LOCKED, HELD or DROPPABLE, by its counters."""
        if self.locks > 0:
            return PageStatus.LOCKED
        if self.holds > 0:
            return PageStatus.HELD
        return PageStatus.DROPPABLE

    def alive(self) -> bool:
        """Whether it has a slot."""
        return self.slot != NO_SLOT


@mypyc_attr(allow_interpreted_subclasses=True)
class PageKeeper(ABC):
    """What the reuse tree asks of the storage: the three ways in which a page's owner changes. None of them calls an owner.

    The tree lists a page after `adopt`, and no longer lists it before `unlist` and `drop`. All three are O(1).
    """

    @abstractmethod
    def adopt(self, page: Page, owner: PageOwner, coverage: int) -> None:
        """The page now belongs to the owner and covers `coverage` tokens of its block; a droppable one becomes evictable.

        Also called when a page moves from one owner to another.
        """

    @abstractmethod
    def unlist(self, page: Page) -> None:
        """The owner lists a better page instead: this one is freed at once, or with its last hold or lock."""

    @abstractmethod
    def drop(self, page: Page) -> None:
        """The owner no longer lists a page that can never match again: a droppable one is freed, and the drop is counted."""
