"""Events that were made and wait for a flush.

Rule: ids count up by one in the order of the events. Within a layer group, blocks that follow each other are merged into one stored
event, and removals into one removed event; an event of another kind ends both.
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
    """The latest stored event of a layer group, to which a child of its last block is added."""

    def __init__(self, blocks: list[KVCacheStoredBlockData]) -> None:
        self.blocks = blocks
        self.last_block: EventBlock | None = None  # of the event, if it is known
        self.last_hash: BlockHash | None = None  # of the last block


class PendingEvents:
    """The events of one rank since the last flush."""

    def __init__(self, window: int, windows: dict[int, int], rank: int | None) -> None:
        self.events: list[KVCacheEvent] = []
        self.next_id = 0
        self.algorithm = ""  # that names blocks
        self.windows = windows  # by layer group ...
        self._window = window  # ... and of groups not listed
        self._rank = rank
        self._runs: dict[int, StoredRun] = {}  # by layer group
        self._removals: dict[int, list[BlockHash]] = {}  # not yet an event, by layer group

    def add(self, data: KVCacheEventData, group: int) -> None:
        """One more event, which no later block or removal is merged with."""
        self._end_removals()
        self._runs.pop(group, None)
        self._append(data, group)

    def run_after(self, group: int, block: EventBlock) -> StoredRun | None:
        """The group's latest stored event if `block` is its last one, and nothing was removed since."""
        run = self._runs.get(group)
        return None if run is None or self._removals or run.last_block is not block else run

    def run_after_hash(self, group: int, parent_hash: BlockHash | None) -> StoredRun:
        """The same by the last block's hash; a new event where there is none."""
        run = self._runs.get(group)
        if run is None or self._removals or parent_hash is None or run.last_hash != parent_hash:
            blocks: list[KVCacheStoredBlockData] = []
            self.add(KVCacheStoredData(parent_hash, blocks), group)
            run = self._runs[group] = StoredRun(blocks)
        return run

    def remove(self, group: int, name: BlockHash) -> None:
        """A removal. It is merged with others until an event of another kind comes."""
        names = self._removals.get(group)
        if names is None:
            names = self._removals[group] = []
        names.append(name)
        self._runs.pop(group, None)

    def close(self) -> None:
        """Nothing more is merged with the events so far."""
        self._end_removals()
        self._runs.clear()

    def take(self) -> list[KVCacheEvent]:
        """All events, which are complete now."""
        self.close()
        events = self.events
        self.events = []
        return events

    def make(self, event_id: int, data: KVCacheEventData, group: int) -> KVCacheEvent:
        """An event with this rank's description, not added."""
        window = self.windows.get(group, self._window)
        return KVCacheEvent(event_id, data, window, self.algorithm, self._rank, None if group == NO_GROUP else group)

    def drop_runs(self) -> None:
        """No later block is merged with an event so far: the oldest events are about to be dropped."""
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
