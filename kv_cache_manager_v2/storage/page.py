"""The page: one life cycle's slot for one block.

`locks` counts the active requests that use a page. `holds` counts suspended requests, also those that were never active. The states
LOCKED, HELD and DROPPABLE follow from the two counters. Only storage/ changes a page's counters, cell, slot and links.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from mypy_extensions import i32, mypyc_attr, u8

from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, GPU_LEVEL, NO_SLOT, PageStatus, Point, SlotId
from kv_cache_manager_v2.listener import CachedBlock

if TYPE_CHECKING:
    from kv_cache_manager_v2.storage.cell import Cell
    from kv_cache_manager_v2.storage.clean_copy import CleanCopy

# The lists of a cell. Each page with a slot is in exactly one.
PINNED: Final = 0  # not evictable: locked, held on the last level, or without an owner
DROPPABLE: Final = 1  # can be offloaded or dropped
HELD: Final = 2  # can be offloaded, but not dropped
BUSY_DROPPABLE: Final = 3  # as DROPPABLE, once its file transfers have ended
BUSY_HELD: Final = 4  # as HELD, once its file transfers have ended
JUST_HELD: Final = 5  # as HELD, but still in the droppable list
MOST_USES: Final = 255  # more are not counted
MAX_REUSED_CLASS: Final = 31
COPY: Final = 6  # no page, but a clean copy of one on a warmer level


@mypyc_attr(acyclic=True, allow_interpreted_subclasses=True)
class PageOwner(CachedBlock):
    """The block of the reuse tree that a page belongs to: all that storage/ knows of the tree."""

    @abstractmethod
    def is_final(self, page: Page) -> bool:
        """Whether no request writes to the page any more, as long as owner and coverage stay the same."""

    @abstractmethod
    def page_gone(self, page: Page) -> None:
        """Remove a page that was dropped or lost. Called when all lists are consistent.

        The owner may drop further pages (`PageKeeper.drop`), such as those of descendants that can no longer match.
        """

    @abstractmethod
    def page_relocated(self, page: Page, source: int, destination: int) -> None:
        """Called after the page has moved to another level."""


@mypyc_attr(acyclic=True)
class Page:
    """A slot with an owner, a position in the eviction order, and the point after which its bytes may be used.

    Each cached block has pages, so small numbers take four bytes or one: a page takes 136 bytes.
    """

    def __init__(self, life_cycle: int, cell: Cell | None, slot: SlotId, priority: int, ready: Point) -> None:
        """`cell` is None for the sentinel of a list."""
        # four bytes each, then one byte each: no padding
        self.life_cycle: i32 = life_cycle
        self.holds: i32 = 0
        self.locks: i32 = 0
        self.coverage: i32 = 0  # attention: leading tokens of the block that are valid; SSM: exact position of the snapshot
        self.transfers: i32 = 0  # file transfers of its bytes in flight; unless 0, the bytes are unconfirmed
        self.plans: i32 = 0  # planned drops that include it; the last one drops it if it is droppable
        self.priority: u8 = priority  # 0 to 100; must not change while it is evictable
        self.worth: u8 = 0 if cell is None else cell.eviction.usual  # its eviction class; must not change while it is evictable
        self.uses: u8 = 1  # requests that used it, the one that computed it included; counted up to 255, for admissions
        self.reused_class: u8 = 0  # of the request that computed it: bit length of its number of reused blocks
        self.list: u8 = PINNED  # which list of its cell it is in
        self.indexed = False  # it is an entry of that list's index
        self.near = False  # the list starts its next search here
        self.lost = False  # a transfer failed, so the bytes are wrong
        # eight bytes each
        if cell is not None:
            self.cell = cell  # the pool group and level of its slot
        self.slot = slot  # NO_SLOT once the page is gone
        self.ready = ready  # users wait for this point: the end of the last write and of finished reads
        self.age = 0  # when it entered the eviction order of its cell; smaller ones are evicted first
        self.mark = 0  # number of the latest plan that must not evict it
        self.owner: PageOwner | None = None  # its tree block; None if it is private to a request
        self.next_in_block: Page | None = None  # the owner's next page, of a higher life cycle
        self.copy: CleanCopy | None = None  # its warmest clean copy; that one's `copy` is the next colder one
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
        """Whether it is in the eviction order of its cell."""
        return self.list != PINNED

    def status(self) -> PageStatus:
        """LOCKED, HELD or DROPPABLE, as its counters say."""
        if self.locks > 0:
            return PageStatus.LOCKED
        if self.holds > 0:
            return PageStatus.HELD
        return PageStatus.DROPPABLE

    def alive(self) -> bool:
        """Whether it has a slot."""
        return self.slot != NO_SLOT


def gpu_slots(pages: list[Page | None]) -> list[int]:
    """The slot of each page that is on the GPU, BAD_PAGE_INDEX for every other one."""
    return [BAD_PAGE_INDEX if page is None or page.cell.level != GPU_LEVEL else page.slot for page in pages]


@mypyc_attr(allow_interpreted_subclasses=True)
class PageKeeper(ABC):
    """How the reuse tree changes the owners of pages. These calls are O(1) and call no owner.

    The tree adds a page to a block after `adopt`, and removes it before `unlist` or `drop`.
    """

    @abstractmethod
    def adopt(self, page: Page, owner: PageOwner, coverage: int) -> None:
        """Make `owner` the page's owner; the page covers `coverage` tokens of the block. A droppable page becomes evictable.

        Also used to change the owner of a page.
        """

    @abstractmethod
    def unlist(self, page: Page) -> None:
        """Remove the page's owner, which has a better page. The page is freed once it has no hold or lock."""

    @abstractmethod
    def drop(self, page: Page) -> None:
        """Remove the owner of a page that can no longer match. A droppable page is freed, and counted as dropped."""
