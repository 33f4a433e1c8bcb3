"""The page: one life cycle's slot for one block.

Rule: who needs a page is two counters, nothing else. `locks` counts the running requests that use it, `holds` the suspended ones
(and matches not yet taken up); LOCKED, HELD and DROPPABLE are read off them. Only `Hierarchy` changes a page's counters, slot and
links.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from mypy_extensions import i32, mypyc_attr

from kv_cache_manager_v2.ids import NO_SLOT, PageStatus, Point, SlotId
from kv_cache_manager_v2.listener import CachedBlock


@mypyc_attr(acyclic=True, allow_interpreted_subclasses=True)
class PageOwner(CachedBlock):
    """Who a page belongs to in the reuse tree; storage knows no more of the tree than this."""

    @abstractmethod
    def page_gone(self, page: Page) -> None:
        """The page was dropped or its bytes were lost: forget it. Called from a worklist, after all queues are consistent.

        The owner may give further pages back (`Hierarchy.discard`), as when a block's descendants can never match again.
        """

    @abstractmethod
    def page_relocated(self, page: Page, source: int, destination: int) -> None:
        """The page changed its cache level."""


@mypyc_attr(acyclic=True)
class Page:
    """A slot with an owner, a place in the order of eviction, and the point at which its bytes may be touched.

    There is one for every cached block: small numbers take four bytes each, 120 in all instead of 160.
    """

    def __init__(self, life_cycle: int, pool_group: int, level: int, slot: SlotId, priority: int, ready: Point) -> None:
        # four bytes each, side by side: no padding
        self.life_cycle: i32 = life_cycle
        self.pool_group: i32 = pool_group
        self.level: i32 = level  # cache level on which `slot` lies
        self.priority: i32 = priority  # 0..100; must not change while queued
        self.holds: i32 = 0
        self.locks: i32 = 0
        self.coverage: i32 = 0  # attention: leading tokens of the block that are valid; SSM: exact position of the snapshot
        self.transfers: i32 = 0  # file transfers in flight that carry its bytes: until 0, nobody knows whether they are right
        self.plans: i32 = 0  # planned drops that name it; it goes with the last of them if nobody uses it then
        self.lost = False  # a transfer failed: the bytes are not what they should be
        self.queued = False
        # eight bytes each
        self.slot = slot  # NO_SLOT once the page is gone
        self.ready = ready  # whoever reads or overwrites the bytes waits for this point: last writer, and last finished reader
        self.mark = 0  # number of the last plan that claimed it, so that making room never evicts what is being loaded
        self.owner: PageOwner | None = None  # the tree block that lists it; None while private to a request, or once orphaned
        self.next_in_block: Page | None = None  # the owner's next page, of a higher life cycle
        self.before: Page | None = None  # neighbours in the eviction queue while queued, else among the kept pages; None once gone
        self.after: Page | None = None

    def unlink(self) -> None:
        """Its neighbours in the list that it stands in become each other's; its own links are left to be overwritten."""
        before = self.before
        after = self.after
        assert before is not None, "a page that stands in no list was to leave it"
        assert after is not None
        before.after = after
        after.before = before

    def status(self) -> PageStatus:
        if self.locks > 0:
            return PageStatus.LOCKED
        if self.holds > 0:
            return PageStatus.HELD
        return PageStatus.DROPPABLE

    def alive(self) -> bool:
        return self.slot != NO_SLOT


@mypyc_attr(allow_interpreted_subclasses=True)
class PageKeeper(ABC):
    """What the reuse tree asks of the storage: the three ways in which a page's owner changes. None of them calls an owner back.

    The tree lists a page after `adopt` and has stopped listing it before `orphan` and `discard`; all three are O(1).
    """

    @abstractmethod
    def adopt(self, page: Page, owner: PageOwner, coverage: int) -> None:
        """The page now belongs to the owner and is good for `coverage` tokens of its block; if droppable, it is queued.

        Also called when a page moves from one owner to another.
        """

    @abstractmethod
    def orphan(self, page: Page) -> None:
        """The owner has forgotten a page that something better replaced: it is freed at once, or with its last hold or lock."""

    @abstractmethod
    def discard(self, page: Page) -> None:
        """The owner has forgotten a droppable page that can never match again: its slot is freed now, and the drop is counted."""
