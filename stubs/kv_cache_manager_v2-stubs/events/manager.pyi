"""The event manager: a stream of events about blocks that become reusable, move between levels or are removed.

The cache only queues a short record of each change. The next flush or snapshot hashes and orders them, without the manager's lock.

    page_stored, ...  ->  event records  ->  pending events  ->  ready events  ->  get_latest_events
    under the manager's lock            flush_iteration_events                any thread

Rule: in each layer group, a block is stored before it moves or is removed, is removed once, and is stored again only after that. So
a snapshot, followed by the events from its `next_event_id` on, always gives the cached blocks (`EventMirror` computes them). Event
ids count up by one. A gap means that the reader was too slow and the oldest events were dropped (see `num_dropped_events`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, SupportsFloat, SupportsIndex, TypeAlias

from kv_cache_manager_v2.arguments import Integers
from kv_cache_manager_v2.events.records import BlockHash, EventSnapshot, KVCacheEvent, KVCacheEventDiff, KVCacheStoredBlockData
from kv_cache_manager_v2.listener import CachedBlock, CacheListener

EventGather: TypeAlias = Callable[[list[KVCacheEvent]], list[list[KVCacheEvent]]]
BlockHashes: TypeAlias = BlockHash | bytes | Iterable[BlockHash | bytes]
MAX_RECORDS: Final[int]
MAX_UUIDS: Final[int]

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
    ) -> None: ...
    def __reduce__(self) -> str: ...
    @property
    def hash_algo(self) -> str:
        """The name of the hash algorithm; for `auto`, the one that it selects."""

    @property
    def num_dropped_events(self) -> int:
        """Events dropped so far because more than `max_kv_event_entries` waited for a reader."""

    @property
    def window_size_by_layer_group(self) -> dict[int, int]:
        """The windows by layer group, a copy. Set it before `add_created_event`: it does not change existing events."""

    @window_size_by_layer_group.setter
    def window_size_by_layer_group(self, windows: Mapping[int, SupportsIndex]) -> None: ...
    def set_layer_group_window_sizes(self, windows: Mapping[int, SupportsIndex]) -> None:
        """Set `window_size_by_layer_group`, once the manager has grouped the layers."""

    def attached(self, block_key_hash: str) -> None: ...
    def page_stored(self, block: CachedBlock, life_cycle: int, level: int, priority: int, covers_block: bool) -> None: ...
    def page_removed(self, block: CachedBlock, life_cycle: int) -> None: ...
    def block_removed(self, block: CachedBlock) -> None: ...
    def page_moved(self, block: CachedBlock, life_cycle: int, source: int, destination: int) -> None: ...
    def item_named(self, digest: bytes, uuid: str) -> None:
        """Keep the uuid of a multimodal item. Only the latest uuid of an item, and the latest `MAX_UUIDS` items, are kept."""

    def add_created_event(self, num_blocks_per_cache_level: Integers, layer_group_ids: Integers | None = None) -> None:
        """Add an event with the number of blocks on each cache level: one per layer group, or one for all groups (None)."""

    def add_stored_event(
        self, parent_hash: BlockHash | None, blocks: Sequence[KVCacheStoredBlockData], layer_group_id: SupportsIndex | None = None
    ) -> None:
        """Add an event about blocks that the cache does not know. Their removal must be added too: the cache will not do so."""

    def add_removed_event(self, block_hashes: BlockHashes, layer_group_id: SupportsIndex | None = None) -> None:
        """Add an event that removes blocks. A hash is passed through unchanged.

        Bytes are the chained key of an announced block, which is then no longer announced; unknown keys are ignored.
        """

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

    def add_stored_block_event_from_block(self, block: object) -> None:
        """Tell of every page of a block of the tree, as the cache does (see `introspection.make_test_block`)."""

    def add_stored_life_cycle_event_from_block(self, block: object, life_cycle: SupportsIndex) -> None:
        """Tell of the page of one life cycle, if the block has one."""

    def add_removed_life_cycle_event(self, block_key: bytes, life_cycle: SupportsIndex) -> None:
        """Remove an announced block from one life cycle, by its chained key."""

    def flush_iteration_events(self) -> None:
        """Make the events since the last flush available to readers. Call it once per iteration, on every rank.

        The oldest events beyond `max_kv_event_entries` are dropped. An exception of the gather call is passed on, and the events
        are kept for the next flush.
        """

    def get_latest_events(self, timeout_ms: SupportsFloat | None = None) -> list[KVCacheEvent]:
        """Return all events that are ready, oldest first; wait for one if there is none. [] after `timeout_ms` without one.

        A timeout of 0 or less does not wait. None waits without limit, except that it returns [] at once if events are turned off.
        May be called on any thread. No lock is held during the wait.
        """

    def snapshot_events(self) -> EventSnapshot:
        """All announced blocks as stored events with id -1, and the id of the first event that is not included.

        A reader must skip later events with smaller ids. O(announced blocks). Raises LogicError if events are turned off.
        """
