"""File transfers in flight on whose bytes a request depends.

Rule: a block committed meanwhile cannot be matched until every such transfer has succeeded. If one fails, these blocks leave the
tree, and one log line names the request.
"""

from __future__ import annotations

import logging
from typing import Final

from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.tree import RadixTree
from kv_cache_manager_v2.storage.page import Page

_log: Final = logging.getLogger(__name__)


def name_of(request_id: object) -> str:
    """The name of a request in messages."""
    return "a request without id" if request_id is None else f"request {request_id}"


def log_loss(request_id: object, page: Page) -> None:
    """Log that a request depends on a lost page."""
    _log.error(
        "%s: a page of life cycle %d was lost by a failed file transfer; what the request has computed since is wrong",
        name_of(request_id),
        page.life_cycle,
    )


class PendingLoads:
    """The pages that a request awaits, and the blocks that cannot match until then.

    `settle` is O(1) amortised while no page is lost, and O(awaited pages) after a loss.
    """

    def __init__(self, request_id: object) -> None:
        self.request_id = request_id
        self.awaited: list[Page] = []  # pages with a transfer in flight
        self.blocks: list[Block] = []  # blocks that are hidden while there are awaited pages
        self.lost: Page | None = None  # an awaited page whose transfer failed
        self._losses = -1  # pages lost, of any request, when all awaited ones were last looked at

    def share(self, request_id: object) -> PendingLoads:
        """The same transfers for a fork, which depends on the same bytes. The blocks stay with the request that committed them."""
        twin = PendingLoads(request_id)
        twin.awaited = list(self.awaited)
        return twin

    def add(self, tree: RadixTree, block: Block) -> None:
        """Hide a block that was committed while these transfers are in flight."""
        tree.hide(block)
        self.blocks.append(block)

    def settle_closed(self, tree: RadixTree, losses: int) -> bool:
        """As `settle`, for a closed request: a loss can only be logged."""
        settled = self.settle(tree, losses)
        if self.lost is not None:
            log_loss(self.request_id, self.lost)
        return settled

    def settle(self, tree: RadixTree, losses: int) -> bool:
        """Whether all transfers have ended, or one has failed. Then the hidden blocks are shown, or removed.

        `losses` counts the pages of the manager that were ever found lost.
        """
        awaited = self.awaited
        if losses != self._losses:
            for page in awaited:
                if page.lost:
                    self.lost = page
            self._losses = losses
        while awaited and awaited[-1].transfers == 0:
            del awaited[-1]
        if awaited and self.lost is None:
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
