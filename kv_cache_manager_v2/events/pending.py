"""Events that wait for a flush.

Rule: event ids count up by one. Within a layer group, consecutive blocks are merged into one stored event, and removals into one
removed event, until an event of another kind intervenes.
"""

from __future__ import annotations

from kv_cache_manager_v2.events.blocks import EventBlock
from kv_cache_manager_v2.events.records import (
    NO_GROUP,
    BlockHash,
    KVCacheEvent,
    KVCacheEventData,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
)


class StoredRun:
    """The latest stored event of a layer group. A child of its last block is added to it."""

    def __init__(self, blocks: list[KVCacheStoredBlockData]) -> None:
        self.blocks = blocks
        self.last_block: EventBlock | None = None  # None if the engine added it
        self.last_hash: BlockHash | None = None  # hash of the last block


class PendingEvents:
    """The events of one rank since the last flush."""

    def __init__(self, window: int, windows: dict[int, int], rank: int | None) -> None:
        self.events: list[KVCacheEvent] = []
        self.next_id = 0
        self.algorithm = ""  # hash algorithm that names blocks
        self.windows = windows  # by layer group
        self._window = window  # for groups not in `windows`
        self._rank = rank
        self._runs: dict[int, StoredRun] = {}  # by layer group
        self._removals: dict[int, list[BlockHash]] = {}  # not yet an event, by layer group

    def add(self, data: KVCacheEventData, group: int) -> None:
        """Append an event. No later block or removal is merged with it."""
        self._end_removals()
        self._runs.pop(group, None)
        self._append(data, group)

    def run_after(self, group: int, block: EventBlock) -> StoredRun | None:
        """The group's latest stored event, if `block` is its last block and no removal follows it; else None."""
        run = self._runs.get(group)
        return None if run is None or self._removals or run.last_block is not block else run

    def run_after_hash(self, group: int, parent_hash: BlockHash | None) -> StoredRun:
        """As `run_after`, by the hash of the last block. Appends a new stored event instead of returning None."""
        run = self._runs.get(group)
        if run is None or self._removals or parent_hash is None or run.last_hash != parent_hash:
            blocks: list[KVCacheStoredBlockData] = []
            self.add(KVCacheStoredData(parent_hash, blocks), group)
            run = self._runs[group] = StoredRun(blocks)
        return run

    def remove(self, group: int, name: BlockHash) -> None:
        """Add a removal. It is merged with earlier removals if no other event intervenes."""
        names = self._removals.get(group)
        if names is None:
            names = self._removals[group] = []
        names.append(name)
        self._runs.pop(group, None)

    def close(self) -> None:
        """Complete all events: nothing more is merged with them."""
        self._end_removals()
        self._runs.clear()

    def take(self) -> list[KVCacheEvent]:
        """Complete all events, and remove and return them."""
        self.close()
        events = self.events
        self.events = []
        return events

    def make(self, event_id: int, data: KVCacheEventData, group: int) -> KVCacheEvent:
        """Make an event of this rank without appending it."""
        window = self.windows.get(group, self._window)
        return KVCacheEvent(event_id, data, window, self.algorithm, self._rank, None if group == NO_GROUP else group)

    def drop_runs(self) -> None:
        """Merge no later block with an earlier event. Needed before the oldest events are dropped."""
        self._runs.clear()

    def _end_removals(self) -> None:
        if self._removals:
            removals = self._removals
            self._removals = {}
            for group, names in removals.items():
                self._append(KVCacheRemovedData(names), group)

    def _append(self, data: KVCacheEventData, group: int) -> None:
        self.events.append(self.make(self.next_id, data, group))
        self.next_id += 1
