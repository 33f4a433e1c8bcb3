"""A mirror of another process's cache, kept up to date by its events.

A snapshot, followed by every event from its `next_event_id` on, gives exactly the announced blocks. The mirror checks the stream:
an event that contradicts earlier ones raises an error, and a gap in the ids is reported.
"""

from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from kv_cache_manager_v2.events.records import (
    BlockHash,
    EventSnapshot,
    KVCacheEvent,
    UniqueToken,
)

class MirroredBlock:
    """One block that is cached in at least one layer group."""

    parent_hash: BlockHash | None
    content: bytes | tuple[UniqueToken, ...]
    levels: dict[int, int]

    def __init__(self, parent_hash: BlockHash | None, content: bytes | tuple[UniqueToken, ...]) -> None: ...
    @property
    def packed_tokens(self) -> bytes:
        """As `KVCacheStoredBlockData.packed_tokens`."""

class EventMirror:
    """The blocks that one rank has cached. Without a snapshot it starts empty, at event 0."""

    blocks: dict[BlockHash, MirroredBlock]
    next_event_id: int

    def __init__(self, snapshot: EventSnapshot | None = None) -> None: ...
    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles are independent of this mirror."""

    def reset(self, snapshot: EventSnapshot) -> None:
        """Start again from a snapshot, as after a gap. An invalid snapshot raises and leaves the mirror unchanged."""

    def apply(self, events: Iterable[KVCacheEvent]) -> bool:
        """Apply events in the order of the stream, skipping those that the snapshot includes.

        Returns False at a gap in the ids. Events from the gap on are not applied: `reset` with a new snapshot. Raises LogicError
        for an event that contradicts earlier ones.
        """

    def num_cached(self, block_hashes: Sequence[BlockHash], layer_group_id: SupportsIndex) -> int:
        """How many of a prompt's blocks the layer group has cached, counted from the first one up to a gap."""
