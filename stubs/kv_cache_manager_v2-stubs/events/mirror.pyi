from collections.abc import Iterable, Sequence

from kv_cache_manager_v2.events.records import NO_GROUP as NO_GROUP
from kv_cache_manager_v2.events.records import BlockHash, EventSnapshot, KVCacheEvent, UniqueToken

class MirroredBlock:
    parent_hash: BlockHash | None
    content: bytes | tuple[UniqueToken, ...]
    levels: dict[int, int]

    def __init__(self, parent_hash: BlockHash | None, content: bytes | tuple[UniqueToken, ...]) -> None: ...
    @property
    def packed_tokens(self) -> bytes: ...

class EventMirror:
    blocks: dict[BlockHash, MirroredBlock]
    next_event_id: int

    def __init__(self, snapshot: EventSnapshot | None = None) -> None: ...
    def reset(self, snapshot: EventSnapshot) -> None: ...
    def apply(self, events: Iterable[KVCacheEvent]) -> bool: ...
    def num_cached(self, block_hashes: Sequence[BlockHash], layer_group_id: int) -> int: ...
