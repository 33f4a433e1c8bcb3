"""The records of which events consist, and their form as dictionaries for JSON.

A record is a value: it can be pickled, compares by content, and does not change once a reader can see it. A stored block keeps its
tokens packed, as they were committed, and unpacks them when they are read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, SupportsIndex, TypeAlias

BlockHash: TypeAlias = int | str
MmKey: TypeAlias = tuple[Any, ...]
NO_GROUP: Final = -1

@dataclass(frozen=True)
class UniqueToken:
    """One token of a stored block: an id, or a digest in hexadecimal.

    Events of the cache use ids and digests without an extra id. Events that an engine adds may use any string and any integers.
    """

    token_id: int | str
    token_extra_id: int = 0

@dataclass(frozen=True)
class KVCacheEventDiff:
    """The old and the new value of a field."""

    old_value: int
    new_value: int

class KVCacheStoredBlockData:
    """One block that has become reusable in one layer group."""

    def __init__(
        self,
        block_hash: BlockHash,
        tokens: Sequence[UniqueToken] | bytes,
        cache_level: SupportsIndex,
        priority: SupportsIndex,
        mm_keys: Sequence[MmKey] = (),
        cache_salt: str | None = None,
    ) -> None:
        """`tokens` are `UniqueToken` records, or packed tokens as in `packed_tokens`. Raises ConfigError."""

    @property
    def block_hash(self) -> BlockHash: ...
    @property
    def tokens(self) -> list[UniqueToken]:
        """The tokens, as a new list. O(tokens)."""

    @property
    def packed_tokens(self) -> bytes:
        """The tokens as bytes: 4 per id, little-endian; a digest is the word 0x80000000 and its 32 bytes. O(1).

        Raises LogicError if a token has an extra id, or is a string other than a digest: read `tokens` then.
        """

    @property
    def content(self) -> bytes | tuple[UniqueToken, ...]:
        """The packed tokens, or the records if they cannot be packed. Equal for two blocks exactly if their tokens are. O(1)."""

    @property
    def cache_level(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def mm_keys(self) -> list[MmKey]:
        """The multimodal items in the block and their positions, as a new list."""

    @property
    def cache_salt(self) -> str | None:
        """None in events of the cache: the salt of the scope is part of the hash and is not published."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[type[KVCacheStoredBlockData], tuple[object, ...]]: ...

@dataclass(frozen=True)
class KVCacheCreatedData:
    """The number of blocks on each cache level, for one layer group or for all."""

    num_blocks_per_cache_level: Sequence[int]

@dataclass(frozen=True)
class KVCacheStoredData:
    """Blocks that have become reusable. Each is the child of the one before it.

    The first is a child of `parent_hash`, or begins a prompt if that is None.
    """

    parent_hash: BlockHash | None
    blocks: Sequence[KVCacheStoredBlockData]

@dataclass(frozen=True)
class KVCacheRemovedData:
    """Blocks that are no longer reusable in the event's layer group."""

    block_hashes: Sequence[BlockHash]

@dataclass(frozen=True)
class KVCacheUpdatedData:
    """A block has moved to another cache level, or its priority has changed. A field is None if it has not changed."""

    block_hash: BlockHash
    cache_level: KVCacheEventDiff | None
    priority: KVCacheEventDiff | None

KVCacheEventData: TypeAlias = KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData

@dataclass(frozen=True)
class KVCacheEvent:
    """One event. `event_id` counts up from 0 within a rank; it is -1 in a snapshot, which is not part of the stream."""

    event_id: int
    data: KVCacheEventData
    window_size: int
    hash_algo: str | None = None
    attention_dp_rank: int | None = None
    layer_group_id: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The event as a dictionary for JSON. Every record has a type name; rank, hash and layer group are left out if None."""

@dataclass(frozen=True)
class EventSnapshot:
    """All blocks that are reusable now, as stored events, and the id of the first event that is not included."""

    events: Sequence[KVCacheEvent]
    next_event_id: int

def serialize_events(events: Iterable[KVCacheEvent]) -> list[dict[str, Any]]:
    """`to_dict` of each event. Raises ConfigError for an item that is not an event."""

def block_hash_of(value: object, name: str) -> BlockHash:
    """Validate a block hash as events carry it. Raises ConfigError."""

def group_of(layer_group_id: object) -> int:
    """Validate a layer group; NO_GROUP for None. Raises ConfigError."""

def groups_of(layer_group_ids: object) -> list[int]:
    """Validate a sequence of layer groups. Raises ConfigError."""

def names_of(block_hashes: object) -> list[BlockHash | bytes]:
    """Validate the hashes or chained keys (bytes) of one block or several. Raises ConfigError."""

def windows_of(given: object) -> dict[int, int]:
    """Validate and copy windows by layer group. Raises ConfigError."""
