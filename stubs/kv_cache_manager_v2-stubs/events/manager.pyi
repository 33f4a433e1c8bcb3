"""The event manager: what became reusable, moved or went, as a stream that routers read.

Rule: the cache only queues short records of what changed. The next flush or snapshot hashes and orders them, outside of its lock.

    page_stored, ...  ->  event records  ->  pending events  ->  ready events  ->  get_latest_events
    under the manager's lock            flush_iteration_events                any thread

The stream is a contract. Per layer group a block is stored before it is moved or removed, is removed once, and is stored again only
after that; so a snapshot and the events from its `next_event_id` on always give what is cached (`EventMirror` does it). Event ids
count up by one: at a gap the reader was too slow, and events were dropped, oldest first (`num_dropped_events` counts them).
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
    """Pass it to one `KVCacheManager` as `event_manager`, call `flush_iteration_events` once an iteration, read on any thread.

    `max_kv_event_entries` bounds the events that wait for a reader; 0 turns events off. `hash_algo` says how events name blocks
    (see hashes.py); None: by the manager's own keys, "v2_blake3" unless its `block_key_hash` says otherwise. Events carry the
    window of their layer group: `window_size_by_layer_group`, or `window_size` for groups not listed.

    `attention_dp_gather` is a collective call that gives every rank's events to all ranks. With it rank 0 publishes for all ranks,
    and (rank, event id) names an event. `mm_token_id_offset` is the id above which ids count positions of multimodal items; with it
    stored blocks say which items they hold. Raises ConfigError (a ValueError).
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
        """The algorithm's own name, where `auto` was asked for."""

    @property
    def num_dropped_events(self) -> int:
        """Events that no reader will see, since more than `max_kv_event_entries` waited."""

    @property
    def window_size_by_layer_group(self) -> dict[int, int]:
        """A copy. Set it before `add_created_event`; an event keeps the window that held when it arose."""

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
        """An item has one uuid, the latest; those of the latest `MAX_UUIDS` items are kept."""

    def add_created_event(self, num_blocks_per_cache_level: Integers, layer_group_ids: Integers | None = None) -> None:
        """Blocks on each cache level; one event for each layer group, or one for all (None)."""

    def add_stored_event(
        self, parent_hash: BlockHash | None, blocks: Sequence[KVCacheStoredBlockData], layer_group_id: SupportsIndex | None = None
    ) -> None:
        """Blocks that the cache does not know; they are announced as they are, and no removal of them follows by itself."""

    def add_removed_event(self, block_hashes: BlockHashes, layer_group_id: SupportsIndex | None = None) -> None:
        """Hashes pass through. Bytes are chained keys: of announced blocks, which are then no longer so; others are ignored."""

    def add_updated_event(
        self,
        block_hash: BlockHash | bytes,
        cache_level: KVCacheEventDiff | None = None,
        priority: KVCacheEventDiff | None = None,
        layer_group_id: SupportsIndex | None = None,
    ) -> None:
        """Nothing without a difference. Hashes pass through; the key of a block that is not announced is ignored."""

    def flush_iteration_events(self) -> None:
        """Hand over what happened since the last flush; the oldest events beyond the maximum are dropped. Once per iteration, on
        every rank. What a gather raises is passed on, and the events wait for the next flush."""

    def get_latest_events(self, timeout_ms: SupportsFloat | None = None) -> list[KVCacheEvent]:
        """All events that wait, oldest first, once there is any; [] after `timeout_ms` without one, at once if that is not above 0.

        None waits for ever, but with `max_kv_event_entries` <= 0, where no event can come. From any thread; no lock is held while
        it waits.
        """

    def snapshot_events(self) -> EventSnapshot:
        """All announced blocks as stored events with id -1, and the id of the first event that is not in them.

        Skip events with smaller ids that a flush or a reader still gets. O(announced blocks). Raises LogicError if events are off.
        """
