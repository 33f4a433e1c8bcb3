"""A mirror of another process's cache, kept up to date by its events.

A snapshot, followed by every event from its `next_event_id` on, gives exactly the announced blocks. The mirror checks the stream:
an event that contradicts earlier ones raises an error, and a gap in the ids is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from kv_cache_manager_v2.arguments import at_least, at_least_or_none, each_of, given, instance, instances, items_of, shown, whole
from kv_cache_manager_v2.errors import ConfigError, KVCacheError, LogicError
from kv_cache_manager_v2.events.records import (
    NO_GROUP,
    BlockHash,
    EventSnapshot,
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    UniqueToken,
    block_hash_of,
)


class MirroredBlock:
    """One block that is cached in at least one layer group."""

    def __init__(self, parent_hash: BlockHash | None, content: bytes | tuple[UniqueToken, ...]) -> None:
        self.parent_hash = parent_hash  # None: first block of a prompt
        self.content = content  # see KVCacheStoredBlockData.content
        self.levels: dict[int, int] = {}  # cache level by layer group

    @property
    def packed_tokens(self) -> bytes:
        """As `KVCacheStoredBlockData.packed_tokens`."""
        if not isinstance(self.content, bytes):
            raise LogicError("this block's tokens are not all ids or digests, so they cannot be packed; read `content` instead")
        return self.content


class EventMirror:
    """The blocks that one rank has cached. Without a snapshot it starts empty, at event 0."""

    def __init__(self, snapshot: EventSnapshot | None = None) -> None:
        self.blocks: dict[BlockHash, MirroredBlock] = {}
        self.next_event_id = 0
        if snapshot is not None:
            self.reset(snapshot)

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles are independent of this mirror."""
        blocks = {name: (block.parent_hash, block.content, dict(block.levels)) for name, block in self.blocks.items()}
        return _mirror, (self.next_event_id, blocks)

    def reset(self, snapshot: EventSnapshot) -> None:
        """Start again from a snapshot, as after a gap. An invalid snapshot raises and leaves the mirror unchanged."""
        instance(snapshot, EventSnapshot, "snapshot")
        events = _events(given(snapshot, "events"))
        next_event_id = at_least(given(snapshot, "next_event_id"), "next_event_id", 0)
        before = self.blocks
        self.blocks = {}
        try:
            for event in events:
                self._apply(event)
        except KVCacheError:
            self.blocks = before
            raise
        self.next_event_id = next_event_id

    def apply(self, events: Iterable[KVCacheEvent]) -> bool:
        """Apply events in the order of the stream, skipping those that the snapshot includes.

        Returns False at a gap in the ids. Events from the gap on are not applied: `reset` with a new snapshot. Raises LogicError
        for an event that contradicts earlier ones.
        """
        for event in _events(events):
            if event.event_id < self.next_event_id:
                continue
            if event.event_id > self.next_event_id:
                return False
            self._apply(event)
            self.next_event_id += 1
        return True

    def num_cached(self, block_hashes: Sequence[BlockHash], layer_group_id: SupportsIndex) -> int:
        """How many of a prompt's blocks the layer group has cached, counted from the first one up to a gap."""
        group = at_least(layer_group_id, "layer_group_id", NO_GROUP)
        hashes = [block_hash_of(item, "block_hashes") for item in items_of(block_hashes, "block_hashes", "block hashes")]
        for index, block_hash in enumerate(hashes):
            block = self.blocks.get(block_hash)
            if block is None or group not in block.levels:
                return index
        return len(hashes)

    def _apply(self, event: KVCacheEvent) -> None:
        group = NO_GROUP if event.layer_group_id is None else event.layer_group_id
        data = event.data
        if isinstance(data, KVCacheStoredData):
            self._store(data, group, event.event_id)
        elif isinstance(data, KVCacheRemovedData):
            self._remove(data, group, event.event_id)
        elif isinstance(data, KVCacheUpdatedData):
            level = self._known(data.block_hash, group, event.event_id)
            if data.cache_level is not None:
                if data.cache_level.old_value != level:
                    raise LogicError(f"event {event.event_id}: block {data.block_hash} is on level {level}, not {data.cache_level}")
                self.blocks[data.block_hash].levels[group] = data.cache_level.new_value
        else:
            assert isinstance(data, KVCacheCreatedData), data

    def _store(self, data: KVCacheStoredData, group: int, event_id: int) -> None:
        parent_hash = data.parent_hash
        blocks: dict[BlockHash, MirroredBlock] = {}  # the event's blocks: all are checked before any is added
        stored = instances(data.blocks, KVCacheStoredBlockData, "blocks of an event")
        for item in stored:
            block = self.blocks.get(item.block_hash, MirroredBlock(parent_hash, item.content))
            if group in block.levels or item.block_hash in blocks:
                raise LogicError(f"event {event_id}: block {item.block_hash} is stored twice in layer group {group}")
            if block.parent_hash != parent_hash or block.content != item.content:
                raise LogicError(f"event {event_id}: block {item.block_hash} has another parent, or other tokens, than before")
            blocks[item.block_hash] = block
            parent_hash = item.block_hash
        for item in stored:
            blocks[item.block_hash].levels[group] = item.cache_level
        self.blocks.update(blocks)

    def _remove(self, data: KVCacheRemovedData, group: int, event_id: int) -> None:
        names = items_of(data.block_hashes, "block_hashes of an event", "block hashes")
        hashes = [block_hash_of(name, "block_hashes of an event") for name in names]
        for block_hash in hashes:
            self._known(block_hash, group, event_id)
        if len(set(hashes)) != len(hashes):
            raise LogicError(f"event {event_id} removes a block twice: {hashes}")
        for block_hash in hashes:
            block = self.blocks[block_hash]
            del block.levels[group]
            if not block.levels:
                del self.blocks[block_hash]

    def _known(self, block_hash: BlockHash, group: int, event_id: int) -> int:
        """The level of a block. Raises LogicError if it is not stored in the layer group."""
        block = self.blocks.get(block_hash)
        if block is None or group not in block.levels:
            raise LogicError(f"event {event_id}: block {block_hash} is not stored in layer group {group}")
        return block.levels[group]


def _mirror(
    next_event_id: int, blocks: dict[BlockHash, tuple[BlockHash | None, bytes | tuple[UniqueToken, ...], dict[int, int]]]
) -> EventMirror:
    """Rebuild a mirror for `EventMirror.__reduce__`."""
    mirror = EventMirror()
    mirror.next_event_id = next_event_id
    for name, (parent_hash, content, levels) in blocks.items():
        block = mirror.blocks[name] = MirroredBlock(parent_hash, content)
        block.levels = levels
    return mirror


def _events(events: object) -> list[KVCacheEvent]:
    """Validate all events before any is applied."""
    found: list[KVCacheEvent] = []
    for item in each_of(events, "events", "KVCacheEvent"):
        event = instance(item, KVCacheEvent, "an item of events")
        whole(given(event, "event_id"), "event_id")
        at_least_or_none(given(event, "layer_group_id"), "layer_group_id", NO_GROUP)
        data = given(event, "data")
        if not isinstance(data, (KVCacheCreatedData, KVCacheStoredData, KVCacheRemovedData, KVCacheUpdatedData)):
            raise ConfigError(
                f"data of an event is {shown(data)}; it must be a KVCacheCreatedData, KVCacheStoredData, KVCacheRemovedData "
                "or KVCacheUpdatedData"
            )
        found.append(event)
    return found
