"""Recurrent (SSM) state: one live slot per beam of a request, and snapshots of it in the tree.

A snapshot is valid at exactly one length. So it is taken when tokens are committed and the state is at their end. The live state is
never shared or evicted. A snapshot may be dropped at any time, and is skipped if there is no slot for it.
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
        self.borrowed = False  # whether `page` is a snapshot in the tree, which the first resume copies into the request's own slot
        self.skipped = 0  # snapshots skipped for lack of a slot

    def needs_slot(self) -> bool:
        """Whether the next resume needs a slot for the state."""
        return self.page is None or self.borrowed

    def borrow(self, hierarchy: Hierarchy, snapshot: Page) -> None:
        """Start from a snapshot in the tree."""
        hierarchy.hold(snapshot)
        self.page = snapshot
        self.borrowed = True

    def end(self, hierarchy: Hierarchy, active: bool, point: Point) -> None:
        """Unlock or release the page. `point` is the end of the request's work on it."""
        page = self.page
        self.page = None
        if page is None:
            return
        if active:
            hierarchy.unlock(page, point)
        else:
            hierarchy.release_youngest(page)
