"""The event manager: a stream of events about blocks that become reusable, move between levels or are removed.

The cache only queues a short record of each change. The next flush or snapshot hashes and orders them, without the manager's lock.

    page_stored, ...  ->  event records  ->  pending events  ->  ready events  ->  get_latest_events
    under the manager's lock            flush_iteration_events                any thread

Rule: in each layer group, a block is stored before it moves or is removed, is removed once, and is stored again only after that. So
a snapshot, followed by the events from its `next_event_id` on, always gives the cached blocks (`EventMirror` computes them). Event
ids count up by one. A gap means that the reader was too slow and the oldest events were dropped (see `num_dropped_events`).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, SupportsFloat, SupportsIndex, TypeAlias

from kv_cache_manager_v2 import arguments
from kv_cache_manager_v2.arguments import Integers
from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.events.announced import AnnouncedBlocks
from kv_cache_manager_v2.events.blocks import (
    BLOCK_REMOVED,
    GROUP_BITS,
    GROUP_MASK,
    MOVED,
    PAGE_REMOVED,
    STORED,
    EventBlock,
    EventRecord,
    event_block_of,
    level_in,
    mm_keys_of,
    pack_state,
    priority_in,
    tree_block,
)
from kv_cache_manager_v2.events.hashes import make_block_hashes
from kv_cache_manager_v2.events.pending import PendingEvents, StoredRun
from kv_cache_manager_v2.events.ready import ReadyEvents
from kv_cache_manager_v2.events.records import (
    NO_GROUP,
    BlockHash,
    EventSnapshot,
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventDiff,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    MmKey,
    block_hash_of,
    group_of,
    groups_of,
    names_of,
    windows_of,
)
from kv_cache_manager_v2.listener import CachedBlock, CacheListener
from kv_cache_manager_v2.reuse.block import Block

EventGather: TypeAlias = Callable[[list[KVCacheEvent]], list[list[KVCacheEvent]]]
BlockHashes: TypeAlias = BlockHash | bytes | Iterable[BlockHash | bytes]  # one block or several
MAX_RECORDS: Final = 1 << 18  # a longer queue is processed at once: it bounds the memory of an engine that never flushes
MAX_UUIDS: Final = 1 << 16  # multimodal items whose uuid is kept

_log: Final = logging.getLogger(__name__)
_DEFAULT_HASH: Final = "v2_blake3"
_SNAPSHOT_ID: Final = -1


class KVCacheEventManager(CacheListener):
    """Publishes what one manager caches, as events. Pass it to one `KVCacheManager` as `event_manager`.

    Call `flush_iteration_events` once per iteration; `get_latest_events` may be called on any thread. `max_kv_event_entries` is how
    many events may wait for a reader; 0 turns events off. `hash_algo` is how events name blocks (see hashes.py). None uses the
    manager's own keys: "v2_blake3", or "v2_sha256" with `block_key_hash="sha256"`. Each event carries the window of its layer group
    from `window_size_by_layer_group`, or `window_size` for a group not listed.

    `attention_dp_gather` is a collective call that returns the events of all ranks to every rank. With it, rank 0 publishes for all
    ranks, and (rank, event id) identifies an event. `mm_token_id_offset` is the id above which ids are positions of multimodal
    items; with it, stored blocks list their items. Raises ConfigError (a ValueError).
    """

    def __init__(
        self,
        max_kv_event_entries: SupportsIndex,
        *,
        window_size: SupportsIndex = 0,
        attention_dp_rank: SupportsIndex | None = None,
        attention_dp_gather: EventGather | None = None,
        hash_algo: str | None = None,
        window_size_by_layer_group: Mapping[int, SupportsIndex] | None = None,
        mm_token_id_offset: SupportsIndex | None = None,
    ) -> None:
        self._records: list[EventRecord] = []  # written under the cache manager's lock
        self._max = arguments.whole(max_kv_event_entries, "max_kv_event_entries")
        self._enabled = self._max > 0
        self._follows_manager = hash_algo is None  # name blocks by the manager's own keys
        self._hashes = make_block_hashes(_DEFAULT_HASH if hash_algo is None else arguments.text(hash_algo, "hash_algo"))
        self._key_hash: str | None = None  # `block_key_hash` of the manager; None until `attached`
        window = arguments.at_least(window_size, "window_size", 0)
        windows = {} if window_size_by_layer_group is None else windows_of(window_size_by_layer_group)
        self._rank = arguments.at_least_or_none(attention_dp_rank, "attention_dp_rank", 0)
        if attention_dp_gather is not None:
            arguments.function(attention_dp_gather, "attention_dp_gather")
        self._gather = attention_dp_gather
        self._mm_offset = arguments.at_least_or_none(mm_token_id_offset, "mm_token_id_offset", 0)
        self._uuids: dict[bytes, str] = {}  # of multimodal items by digest; written under the cache manager's lock
        # guarded by `_work`
        self._work: Final = threading.Lock()
        self._pending = PendingEvents(window, windows, self._rank)
        self._pending.algorithm = self._hashes.algorithm
        self._announced = AnnouncedBlocks(self._hashes)
        self._ready = ReadyEvents()

    def __del__(self) -> None:
        """Unlink unprocessed blocks: deallocating a long chain through its last block would overflow the C stack."""
        records: list[EventRecord] = getattr(self, "_records", [])  # absent if the constructor raised
        for record in records:
            record.event_block.parent = None

    def __reduce__(self) -> str:
        raise LogicError(
            "a KVCacheEventManager cannot be copied or pickled: it belongs to its manager; copy the result of `snapshot_events()`"
        )

    # --- settings

    @property
    def hash_algo(self) -> str:
        """The name of the hash algorithm; for `auto`, the one that it selects."""
        return self._hashes.algorithm

    @property
    def num_dropped_events(self) -> int:
        """Events dropped so far because more than `max_kv_event_entries` waited for a reader."""
        return self._ready.num_dropped

    @property
    def window_size_by_layer_group(self) -> dict[int, int]:
        """The windows by layer group, a copy. Set it before `add_created_event`: it does not change existing events."""
        return dict(self._pending.windows)

    @window_size_by_layer_group.setter
    def window_size_by_layer_group(self, windows: Mapping[int, SupportsIndex]) -> None:
        self._pending.windows = windows_of(windows)

    def set_layer_group_window_sizes(self, windows: Mapping[int, SupportsIndex]) -> None:
        """Set `window_size_by_layer_group`, once the manager has grouped the layers."""
        self._pending.windows = windows_of(windows)

    # --- calls of the cache (CacheListener): O(1) each

    def attached(self, block_key_hash: str) -> None:
        with self._work:
            self._key_hash = block_key_hash
            if self._follows_manager and self._hashes.keys.name != block_key_hash:
                if self._pending.next_id > 0:
                    raise ConfigError(
                        f"this event manager has published events with hash_algo={self._hashes.algorithm!r}, but this manager has "
                        f"block_key_hash={block_key_hash!r}: give each manager its own event manager, or set hash_algo"
                    )
                self._hashes = make_block_hashes(f"v2_{block_key_hash}")
                self._pending.algorithm = self._hashes.algorithm
                self._announced = AnnouncedBlocks(self._hashes)

    def page_stored(self, block: CachedBlock, life_cycle: int, level: int, priority: int, covers_block: bool) -> None:
        if covers_block and self._enabled:
            assert isinstance(block, Block)
            self._queue(EventRecord(STORED, event_block_of(block), block, life_cycle, level, priority))

    def page_removed(self, block: CachedBlock, life_cycle: int) -> None:
        assert isinstance(block, Block)
        event_block = block.event_state
        if event_block is not None:
            assert isinstance(event_block, EventBlock)
            self._queue(EventRecord(PAGE_REMOVED, event_block, block, life_cycle, 0, 0))

    def block_removed(self, block: CachedBlock) -> None:
        assert isinstance(block, Block)
        event_block = block.event_state
        if event_block is not None:
            assert isinstance(event_block, EventBlock)
            self._queue(EventRecord(BLOCK_REMOVED, event_block, block, 0, 0, 0))

    def page_moved(self, block: CachedBlock, life_cycle: int, source: int, destination: int) -> None:
        assert isinstance(block, Block)
        event_block = block.event_state
        if event_block is not None:
            assert isinstance(event_block, EventBlock)
            self._queue(EventRecord(MOVED, event_block, block, life_cycle, destination, 0))

    def item_named(self, digest: bytes, uuid: str) -> None:
        """Keep the uuid of a multimodal item. Only the latest uuid of an item, and the latest `MAX_UUIDS` items, are kept."""
        if self._enabled and self._mm_offset is not None:
            uuids = self._uuids
            uuids.pop(digest, None)
            uuids[digest] = uuid
            if len(uuids) > MAX_UUIDS:
                del uuids[next(iter(uuids))]

    def _queue(self, record: EventRecord) -> None:
        records = self._records
        records.append(record)
        if len(records) >= MAX_RECORDS:
            with self._work:
                self._process()

    # --- events that an engine adds

    def add_created_event(self, num_blocks_per_cache_level: Integers, layer_group_ids: Integers | None = None) -> None:
        """Add an event with the number of blocks on each cache level: one per layer group, or one for all groups (None)."""
        counts = arguments.wholes(num_blocks_per_cache_level, "num_blocks_per_cache_level", 0)
        groups = [NO_GROUP] if layer_group_ids is None else groups_of(layer_group_ids)
        with self._work:
            if self._open_stream():
                for group in groups:
                    self._pending.add(KVCacheCreatedData(list(counts)), group)

    def add_stored_event(
        self, parent_hash: BlockHash | None, blocks: Sequence[KVCacheStoredBlockData], layer_group_id: SupportsIndex | None = None
    ) -> None:
        """Add an event about blocks that the cache does not know. Their removal must be added too: the cache will not do so."""
        parent = None if parent_hash is None else block_hash_of(parent_hash, "parent_hash")
        stored = arguments.instances(blocks, KVCacheStoredBlockData, "blocks")
        group = group_of(layer_group_id)
        with self._work:
            if self._open_stream() and stored:
                run = self._pending.run_after_hash(group, parent)
                run.blocks.extend(stored)
                run.last_block = None
                run.last_hash = stored[-1].block_hash

    def add_removed_event(self, block_hashes: BlockHashes, layer_group_id: SupportsIndex | None = None) -> None:
        """Add an event that removes blocks. A hash is passed through unchanged.

        Bytes are the chained key of an announced block, which is then no longer announced; unknown keys are ignored.
        """
        group = group_of(layer_group_id)
        names = names_of(block_hashes)
        with self._work:
            if not self._open_stream():
                return
            for name in names:
                if not isinstance(name, bytes):
                    self._pending.remove(group, name)
                    continue
                event_block = self._find(name)
                if event_block is None:
                    continue
                if group == NO_GROUP:
                    self._remove_block(event_block)
                else:
                    self._remove_page(event_block, group)

    def add_updated_event(
        self,
        block_hash: BlockHash | bytes,
        cache_level: KVCacheEventDiff | None = None,
        priority: KVCacheEventDiff | None = None,
        layer_group_id: SupportsIndex | None = None,
    ) -> None:
        """Add an event about a change of level or priority; does nothing if both are None.

        A hash is passed through unchanged. Bytes are the chained key of an announced block; unknown keys are ignored.
        """
        given = block_hash if isinstance(block_hash, bytes) else block_hash_of(block_hash, "block_hash")
        moved = arguments.instance_or_none(cache_level, KVCacheEventDiff, "cache_level")
        valued = arguments.instance_or_none(priority, KVCacheEventDiff, "priority")
        group = group_of(layer_group_id)
        if moved is None and valued is None:
            return
        with self._work:
            if not self._open_stream():
                return
            name: BlockHash
            if isinstance(given, bytes):
                event_block = self._find(given)
                if event_block is None or (group != NO_GROUP and not event_block.state(group)):
                    return
                name = self._hashes.hash_of(event_block)
            else:
                name = given
            self._pending.add(KVCacheUpdatedData(name, moved, valued), group)

    def add_stored_block_event_from_block(self, block: object) -> None:
        """Tell of every page of a block of the tree, as the cache does (see `introspection.make_test_block`)."""
        for life_cycle in range(len(tree_block(block).pages)):
            self.add_stored_life_cycle_event_from_block(block, life_cycle)

    def add_stored_life_cycle_event_from_block(self, block: object, life_cycle: SupportsIndex) -> None:
        """Tell of the page of one life cycle, if the block has one."""
        page = tree_block(block).page(arguments.at_least(life_cycle, "life_cycle", 0))
        if page is not None:
            covers = page.coverage >= tree_block(block).num_tokens
            self.page_stored(tree_block(block), page.life_cycle, page.level, page.priority, covers)

    def add_removed_life_cycle_event(self, block_key: bytes, life_cycle: SupportsIndex) -> None:
        """Remove an announced block from one life cycle, by its chained key."""
        self.add_removed_event(arguments.octets(block_key, "block_key"), arguments.at_least(life_cycle, "life_cycle", 0))

    # --- the stream

    def flush_iteration_events(self) -> None:
        """Make the events since the last flush available to readers. Call it once per iteration, on every rank.

        The oldest events beyond `max_kv_event_entries` are dropped. An exception of the gather call is passed on, and the events
        are kept for the next flush.
        """
        if not self._enabled:
            return
        with self._work:
            self._process()
            events = self._pending.take()
        gather = self._gather
        if gather is None:
            if events:
                self._ready.publish(events, self._max)
            return
        self._ready.drop_oldest(events, self._max)
        try:
            gathered = [list(of_rank) for of_rank in gather(list(events))]
        except BaseException:
            with self._work:
                self._pending.events = events + self._pending.events
            raise
        if self._rank is not None and self._rank != 0:
            return
        published: list[KVCacheEvent] = []
        for of_rank in gathered:
            self._ready.drop_oldest(of_rank, self._max)
            published.extend(of_rank)
        self._ready.publish(published, self._max * max(1, len(gathered)))

    def get_latest_events(self, timeout_ms: SupportsFloat | None = None) -> list[KVCacheEvent]:
        """Return all events that are ready, oldest first; wait for one if there is none. [] after `timeout_ms` without one.

        A timeout of 0 or less does not wait. None waits without limit, except that it returns [] at once if events are turned off.
        May be called on any thread. No lock is held during the wait.
        """
        left = math.inf if timeout_ms is None else arguments.real(timeout_ms, "timeout_ms") / 1000.0
        if math.isnan(left):
            raise ConfigError("timeout_ms is nan; it must be a number of milliseconds, or None to wait without limit")
        return self._ready.take(left) if self._enabled else []

    def snapshot_events(self) -> EventSnapshot:
        """All announced blocks as stored events with id -1, and the id of the first event that is not included.

        A reader must skip later events with smaller ids. O(announced blocks). Raises LogicError if events are turned off.
        """
        if not self._enabled:
            raise LogicError(f"snapshot_events(): events are turned off; set max_kv_event_entries, now {self._max}, above 0")
        with self._work:
            self._process()
            self._pending.close()
            events: list[KVCacheEvent] = []
            runs: dict[int, StoredRun] = {}
            for event_block in self._announced.blocks():
                groups = event_block.groups
                group = 0
                while groups:
                    state = groups & GROUP_MASK
                    if state:
                        run = runs.get(group)
                        if run is None or run.last_block is not event_block.parent:
                            run = runs[group] = StoredRun([])
                            data = KVCacheStoredData(self._parent_hash(event_block), run.blocks)
                            events.append(self._pending.make(_SNAPSHOT_ID, data, group))
                        run.blocks.append(self._stored_block(event_block, state))
                        run.last_block = event_block
                    groups >>= GROUP_BITS
                    group += 1
            return EventSnapshot(events, self._pending.next_id)

    # --- processing event records; the caller holds `_work`

    def _open_stream(self) -> bool:
        """Process the queued changes, which precede what the engine adds. Returns whether events are on."""
        if self._enabled:
            self._process()
        return self._enabled

    def _process(self) -> None:
        records = self._records
        count = len(records)  # other threads may append meanwhile: the next two lines take exactly these records
        batch = records[:count]
        del records[:count]
        shared_keys = False
        for index in range(count):
            record = batch[index]
            event_block = record.event_block
            if index == 0:
                shared_keys = self._hashes.needs_keys and type(record.tree_block.tree.keys) is type(self._hashes.keys)
            kind = int(record.kind)
            if kind == STORED:
                if shared_keys and event_block.key is None:
                    event_block.key = record.tree_block.key
                self._announce(event_block, int(record.group), int(record.level), int(record.priority))
                if shared_keys and record.tree_block.key is None:
                    record.tree_block.key = event_block.key
            elif kind == MOVED:
                self._move(event_block, int(record.group), int(record.level))
            elif kind == PAGE_REMOVED:
                self._remove_page(event_block, int(record.group))
            else:
                self._remove_block(event_block)
                event_block.parent = None  # this was the block's last change
        if len(self._pending.events) > 2 * self._max:
            self._pending.drop_runs()
            self._ready.drop_oldest(self._pending.events, self._max)

    def _announce(self, event_block: EventBlock, group: int, level: int, priority: int) -> None:
        if event_block.state(group):
            return  # a block that was hidden during a load reports its pages again
        if event_block.groups == 0:
            self._announced.add(event_block)
        state = pack_state(level, priority)
        event_block.set_state(group, state)
        if not event_block.waiting:
            self._store(event_block, group, state)

    def _store(self, event_block: EventBlock, group: int, state: int) -> None:
        """Add a block to the group's stored event."""
        parent = event_block.predecessor()
        run = self._pending.run_after(group, parent)
        if run is None:
            run = self._pending.run_after_hash(group, self._parent_hash(event_block))
        stored = self._stored_block(event_block, state)
        run.blocks.append(stored)
        run.last_block = event_block
        run.last_hash = stored.block_hash

    def _move(self, event_block: EventBlock, group: int, level: int) -> None:
        state = event_block.state(group)
        before = level_in(state)
        if not state or before == level:
            return
        event_block.set_state(group, pack_state(level, priority_in(state)))
        if not event_block.waiting:
            changed = KVCacheEventDiff(before, level)
            self._pending.add(KVCacheUpdatedData(self._hashes.hash_of(event_block), changed, None), group)

    def _remove_page(self, event_block: EventBlock, group: int) -> None:
        if not event_block.state(group):
            return
        if not event_block.waiting:
            self._pending.remove(group, self._hashes.hash_of(event_block))
        event_block.set_state(group, 0)
        if event_block.groups == 0:
            successor = self._announced.remove(event_block)
            if successor is not None:
                self._store_all(successor)

    def _remove_block(self, event_block: EventBlock) -> None:
        groups = event_block.groups
        group = 0
        while groups:
            if groups & GROUP_MASK:
                self._remove_page(event_block, group)
            groups >>= GROUP_BITS
            group += 1

    def _store_all(self, event_block: EventBlock) -> None:
        """Add the stored events of a block that waited, in all of its layer groups."""
        groups = event_block.groups
        group = 0
        while groups:
            if groups & GROUP_MASK:
                self._store(event_block, group, groups & GROUP_MASK)
            groups >>= GROUP_BITS
            group += 1

    def _find(self, key: bytes) -> EventBlock | None:
        """The announced block with a chained key. Warns once if it is not found and the manager's keys use another hash."""
        found = self._announced.find(key)
        if found is None and self._key_hash is not None and self._key_hash != self._hashes.keys.name:
            _log.warning(
                "no announced block has the key %s: events use %s keys (hash_algo=%r), the manager uses %s; set both to one hash",
                key.hex(),
                self._hashes.keys.name,
                self._hashes.algorithm,
                self._key_hash,
            )
            self._key_hash = None
        return found

    def _parent_hash(self, event_block: EventBlock) -> BlockHash | None:
        parent = event_block.parent
        assert parent is not None, "a block lost its parent before it was announced"
        return None if parent.is_root() else self._hashes.hash_of(parent)

    def _stored_block(self, event_block: EventBlock, state: int) -> KVCacheStoredBlockData:
        mm_keys: list[MmKey] | tuple[MmKey, ...] = ()
        if self._mm_offset is not None:
            mm_keys = mm_keys_of(event_block, self._mm_offset, self._uuids)
        name = self._hashes.hash_of(event_block)
        return KVCacheStoredBlockData(name, event_block.tokens, level_in(state), priority_in(state), mm_keys)
