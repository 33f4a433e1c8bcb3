"""What an order of eviction finds, simulated with whole conversations in place of pages.

A request uses all blocks of its conversation at once, so a conversation has one rank and a number of blocks. Room is made by taking
blocks from the conversation of smallest rank, its tail first.
"""

from __future__ import annotations

import heapq


class GhostCache:
    """Conversations, ranked. O(log conversations) for each request."""

    def __init__(self) -> None:
        self.hits = 0.0  # blocks found, decaying
        self._blocks: dict[int, int] = {}  # by conversation, cached ones only
        self._rank: dict[int, float] = {}
        self._queue: list[tuple[float, int]] = []  # (rank, conversation), also earlier ranks
        self._used = 0

    def find(self, conversation: int, blocks: int) -> int:
        """How many of the first blocks of a conversation are cached."""
        return min(self._blocks.get(conversation, 0), blocks)

    def add(self, conversation: int, blocks: int, rank: float, capacity: int) -> None:
        """Cache the first `blocks` blocks of a conversation, within so many blocks in all."""
        self._used += blocks - self._blocks.get(conversation, 0)
        self._blocks[conversation] = blocks
        self._rank[conversation] = rank
        queue = self._queue
        heapq.heappush(queue, (rank, conversation))
        while self._used > capacity:
            least, first = queue[0]
            if self._rank.get(first) != least:
                heapq.heappop(queue)
                continue
            over = self._used - capacity
            have = self._blocks[first]
            if have > over:
                self._blocks[first] = have - over
                self._used -= over
            else:
                heapq.heappop(queue)
                self._used -= have
                del self._blocks[first]
                del self._rank[first]
        if len(queue) > 64 + 2 * len(self._rank):
            self._queue = [(rank, conversation) for conversation, rank in self._rank.items()]
            heapq.heapify(self._queue)
