"""File transfers whose bytes a request builds on before it knows that they are right.

Rule: nobody can match a block that was committed on such bytes until every transfer has ended well.
"""

from __future__ import annotations

from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.tree import RadixTree
from kv_cache_manager_v2.storage.page import Page


class PendingLoads:
    """Bytes that file transfers still carry, and what a request committed on top of them before it knew whether they were right.

    Nobody can match those blocks (they are hidden) until every transfer ended well; if one fails, they all leave the tree.
    """

    def __init__(self) -> None:
        self.awaited: list[Page] = []  # pages in flight
        self.blocks: list[Block] = []  # hidden until all is settled
        self.lost: Page | None = None  # an awaited page whose transfer failed

    def share(self) -> PendingLoads:
        """The same transfers, for a request that builds on the same bytes; the blocks stay with whoever committed them."""
        twin = PendingLoads()
        twin.awaited = list(self.awaited)
        return twin

    def add(self, tree: RadixTree, block: Block) -> None:
        tree.hide(block)
        self.blocks.append(block)

    def settle(self, tree: RadixTree) -> bool:
        """Whether all is decided; shows or removes the hidden blocks when it is."""
        waiting: list[Page] = []
        for page in self.awaited:
            if page.lost:
                self.lost = page
            elif page.transfers > 0:
                waiting.append(page)
        self.awaited = waiting
        if waiting and self.lost is None:
            return False
        for block in self.blocks:
            if not block.attached:
                continue
            if self.lost is None:
                tree.show(block)
            else:
                tree.remove(block)
        self.awaited = []
        self.blocks = []
        return True
