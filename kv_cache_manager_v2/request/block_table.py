"""The pages of one attention life cycle of one beam of a request."""

from __future__ import annotations

from kv_cache_manager_v2.layout.life_cycle import NEVER, LifeCycle
from kv_cache_manager_v2.request.page_index_row import PageIndexRow
from kv_cache_manager_v2.storage.page import Page


class BlockTable:
    """The pages of one attention life cycle, block by block, and the row in which the engine reads their indices."""

    def __init__(self, life_cycle: LifeCycle, pool_group: int) -> None:
        self.life_cycle = life_cycle
        self.index: int = life_cycle.index
        self.pool_group = pool_group
        self.pages: list[Page | None] = []  # by block ordinal
        self.row = PageIndexRow()
        self.scratch: list[Page] = []  # slots that the blocks of `scratch_span` share
        self.scratch_span = (0, 0)
        self.pending_from = 0  # statistics: pages from this ordinal on are counted as taken, and not committed yet
        self.generated_from = NEVER  # ... and from this one on as taken while generating

    def stale(self, history: int) -> tuple[int, int]:
        """The life cycle's stale range, cut to the blocks that there are."""
        beg, end = self.life_cycle.stale(history)
        count = len(self.pages)
        return min(beg, count), min(end, count)
