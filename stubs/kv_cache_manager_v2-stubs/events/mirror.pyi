"""A mirror of what is cached somewhere else, kept up to date by its events.

Rule: a snapshot, and then every event from its `next_event_id` on, always give exactly what is announced there. The mirror checks
that: an event that contradicts what it knows is an error of the stream, and a gap in the ids is reported, never passed over.
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
    """One block, as long as some layer group has it."""

    parent_hash: BlockHash | None
    content: bytes | tuple[UniqueToken, ...]
    levels: dict[int, int]

    def __init__(self, parent_hash: BlockHash | None, content: bytes | tuple[UniqueToken, ...]) -> None: ...
    @property
    def packed_tokens(self) -> bytes:
        """As `KVCacheStoredBlockData.packed_tokens`."""

class EventMirror:
    """What one rank's cache holds. Without a snapshot it begins empty, with event 0."""

    blocks: dict[BlockHash, MirroredBlock]
    next_event_id: int

    def __init__(self, snapshot: EventSnapshot | None = None) -> None: ...
    def __reduce__(self) -> tuple[object, ...]:
        """A copy, however it is made, does not follow this mirror."""

    def reset(self, snapshot: EventSnapshot) -> None:
        """Begin again, as after a gap. A snapshot that is none, or contradicts itself, leaves the mirror as it was."""

    def apply(self, events: Iterable[KVCacheEvent]) -> bool:
        """Take in events in the order of the stream; those that the snapshot contains are skipped.

        False: events are missing before one of these, and nothing from there on was taken in; `reset` with a new snapshot. Raises
        LogicError for an event that cannot follow from what is known.
        """

    def num_cached(self, block_hashes: Sequence[BlockHash], layer_group_id: SupportsIndex) -> int:
        """How many of a prompt's blocks, from its first one on, the layer group has."""
