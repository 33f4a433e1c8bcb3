from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

BlockHash: TypeAlias = int | str
MmKey: TypeAlias = tuple[Any, ...]
NO_GROUP: Final = -1

@dataclass(frozen=True)
class UniqueToken:
    token_id: int | str
    token_extra_id: int = 0

@dataclass(frozen=True)
class KVCacheEventDiff:
    old_value: int
    new_value: int

class KVCacheStoredBlockData:
    def __init__(
        self,
        block_hash: BlockHash,
        tokens: Sequence[UniqueToken] | bytes,
        cache_level: int,
        priority: int,
        mm_keys: Sequence[MmKey] = (),
        cache_salt: str | None = None,
    ) -> None: ...
    @property
    def block_hash(self) -> BlockHash: ...
    @property
    def tokens(self) -> list[UniqueToken]: ...
    @property
    def packed_tokens(self) -> bytes: ...
    @property
    def content(self) -> bytes | tuple[UniqueToken, ...]: ...
    @property
    def cache_level(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def mm_keys(self) -> list[MmKey]: ...
    @property
    def cache_salt(self) -> str | None: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[type[KVCacheStoredBlockData], tuple[object, ...]]: ...

@dataclass(frozen=True)
class KVCacheCreatedData:
    num_blocks_per_cache_level: Sequence[int]

@dataclass(frozen=True)
class KVCacheStoredData:
    parent_hash: BlockHash | None
    blocks: Sequence[KVCacheStoredBlockData]

@dataclass(frozen=True)
class KVCacheRemovedData:
    block_hashes: Sequence[BlockHash]

@dataclass(frozen=True)
class KVCacheUpdatedData:
    block_hash: BlockHash
    cache_level: KVCacheEventDiff | None
    priority: KVCacheEventDiff | None

KVCacheEventData: TypeAlias = KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData

@dataclass(frozen=True)
class KVCacheEvent:
    event_id: int
    data: KVCacheEventData
    window_size: int
    hash_algo: str | None = None
    attention_dp_rank: int | None = None
    layer_group_id: int | None = None

    def to_dict(self) -> dict[str, Any]: ...

@dataclass(frozen=True)
class EventSnapshot:
    events: Sequence[KVCacheEvent]
    next_event_id: int

def serialize_events(events: Iterable[KVCacheEvent]) -> list[dict[str, Any]]: ...
def block_hash_of(value: object, name: str) -> BlockHash: ...
def group_of(layer_group_id: object) -> int: ...
def groups_of(layer_group_ids: object) -> list[int]: ...
def names_of(block_hashes: object) -> list[BlockHash | bytes]: ...
def windows_of(given: object) -> dict[int, int]: ...
