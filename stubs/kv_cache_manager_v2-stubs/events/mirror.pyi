from collections.abc import Iterable, Sequence

from kv_cache_manager_v2.events.records import NO_GROUP as NO_GROUP
from kv_cache_manager_v2.events.records import BlockHash, EventSnapshot, KVCacheEvent

class MirroredBlock:
    parent_hash: BlockHash | None
    packed_tokens: bytes
    levels: dict[int, int]

    def __init__(self, parent_hash: BlockHash | None, packed_tokens: bytes) -> None: ...

class EventMirror:
    blocks: dict[BlockHash, MirroredBlock]
    next_event_id: int

    def __init__(self, snapshot: EventSnapshot | None = None) -> None: ...
    def reset(self, snapshot: EventSnapshot) -> None: ...
    def apply(self, events: Iterable[KVCacheEvent]) -> bool: ...
    def num_cached(self, block_hashes: Sequence[BlockHash], layer_group_id: int) -> int: ...
