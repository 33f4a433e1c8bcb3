"""Recurrent (SSM) request: one live slot per request, and snapshots of it in the tree.

Rule: a snapshot is good at exactly one length, so it is taken when tokens are committed and the state stands at their end. The live
state is never shared and never a victim; a snapshot may be dropped at once, and one that finds no room is skipped.
"""

from __future__ import annotations

from kv_cache_manager_v2.ids import Point
from kv_cache_manager_v2.layout.life_cycle import LifeCycle
from kv_cache_manager_v2.storage.hierarchy import Hierarchy
from kv_cache_manager_v2.storage.page import Page


class RecurrentState:
    """The live state of one request: locked while ACTIVE, held while SUSPENDED, None before the first resume without a match."""

    def __init__(self, life_cycle: LifeCycle, pool_group: int) -> None:
        self.life_cycle = life_cycle
        self.index: int = life_cycle.index
        self.pool_group = pool_group
        self.page: Page | None = None
        self.borrowed = False  # `page` is a snapshot of the tree: copied into a slot of ours on the first resume
        self.skipped = 0  # snapshots for which there was no room

    def needs_slot(self) -> bool:
        """Whether the next resume takes a slot for the request."""
        return self.page is None or self.borrowed

    def borrow(self, hierarchy: Hierarchy, snapshot: Page) -> None:
        """Start from a snapshot of the tree."""
        hierarchy.hold(snapshot)
        self.page = snapshot
        self.borrowed = True

    def give_up(self, hierarchy: Hierarchy, locked: bool, point: Point) -> None:
        """End of the request."""
        page = self.page
        self.page = None
        if page is None:
            return
        if locked:
            hierarchy.unlock(page, point)
        else:
            hierarchy.release(page)
