"""Recurrent (SSM) state: one live slot per beam of a request, and snapshots of it in the tree.

Rule: a snapshot is good at exactly one length, so it is taken when tokens are committed and the state is at their end. The live
state is never shared and never a victim. A snapshot may be dropped at once, and one that finds no slot is skipped.
"""

from __future__ import annotations

from kv_cache_manager_v2.ids import Point
from kv_cache_manager_v2.layout.life_cycle import LifeCycle
from kv_cache_manager_v2.storage.hierarchy import Hierarchy
from kv_cache_manager_v2.storage.page import Page


class RecurrentState:
    """The live state of one beam: locked while ACTIVE, held while SUSPENDED, None before the first resume without a match."""

    def __init__(self, life_cycle: LifeCycle, pool_group: int) -> None:
        self.life_cycle = life_cycle
        self.index: int = life_cycle.index
        self.pool_group = pool_group
        self.page: Page | None = None
        self.borrowed = False  # `page` is a snapshot of the tree: the first resume copies it into a slot of the request
        self.skipped = 0  # snapshots for which there was no slot

    def needs_slot(self) -> bool:
        """Whether the next resume takes a slot for the state."""
        return self.page is None or self.borrowed

    def borrow(self, hierarchy: Hierarchy, snapshot: Page) -> None:
        """Start from a snapshot of the tree."""
        hierarchy.hold(snapshot)
        self.page = snapshot
        self.borrowed = True

    def end(self, hierarchy: Hierarchy, active: bool, point: Point) -> None:
        """Unlock or release the page; `point` is the end of the request's work on it."""
        page = self.page
        self.page = None
        if page is None:
            return
        if active:
            hierarchy.unlock(page, point)
        else:
            hierarchy.release(page)
            page.make_youngest()
