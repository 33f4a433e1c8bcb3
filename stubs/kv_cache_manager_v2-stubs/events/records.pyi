"""What events say: value records, and the dictionaries that they become in JSON.

Rule: a record is a value. It pickles, compares by content and never changes once a reader can see it. A stored block keeps its
tokens packed, as they were committed, until they are read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, SupportsIndex, TypeAlias

BlockHash: TypeAlias = int | str
MmKey: TypeAlias = tuple[Any, ...]
NO_GROUP: Final = -1

@dataclass(frozen=True)
class UniqueToken:
    """One token of a stored block: its id, or a digest in hexadecimal.

    The cache's own events have ids and digests, and no extra id. Events of an engine's own may have any string and any integers.
    """

    token_id: int | str
    token_extra_id: int = 0

@dataclass(frozen=True)
class KVCacheEventDiff:
    """A value that changed."""

    old_value: int
    new_value: int

class KVCacheStoredBlockData:
    """One block that became reusable in one layer group."""

    def __init__(
        self,
        block_hash: BlockHash,
        tokens: Sequence[UniqueToken] | bytes,
        cache_level: SupportsIndex,
        priority: SupportsIndex,
        mm_keys: Sequence[MmKey] = (),
        cache_salt: str | None = None,
    ) -> None:
        """`tokens` are `UniqueToken` records, or packed as `reuse/tokens.py` packs them. Raises ConfigError."""

    @property
    def block_hash(self) -> BlockHash: ...
    @property
    def tokens(self) -> list[UniqueToken]:
        """A new list; O(tokens)."""

    @property
    def packed_tokens(self) -> bytes:
        """The tokens as bytes: 4 a token, little-endian; a digest is the word 0x80000000 and its 32 bytes. O(1).

        Raises LogicError for tokens with extra ids, and for strings that are no digests: these exist in `tokens` alone.
        """

    @property
    def content(self) -> bytes | tuple[UniqueToken, ...]:
        """Equal for two blocks exactly if their tokens are: packed, or as records where they cannot be packed. O(1)."""

    @property
    def cache_level(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def mm_keys(self) -> list[MmKey]:
        """Where multimodal items lie in the block: a new list."""

    @property
    def cache_salt(self) -> str | None:
        """None in the cache's own events: the scope's salt enters the hash, and is published nowhere else."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[type[KVCacheStoredBlockData], tuple[object, ...]]: ...

@dataclass(frozen=True)
class KVCacheCreatedData:
    """A layer group exists, with so many blocks on each cache level."""

    num_blocks_per_cache_level: Sequence[int]

@dataclass(frozen=True)
class KVCacheStoredData:
    """Blocks that became reusable: each is the child of the one before it, the first of `parent_hash` (None: begins a prompt)."""

    parent_hash: BlockHash | None
    blocks: Sequence[KVCacheStoredBlockData]

@dataclass(frozen=True)
class KVCacheRemovedData:
    """Blocks that are no longer reusable in the event's layer group."""

    block_hashes: Sequence[BlockHash]

@dataclass(frozen=True)
class KVCacheUpdatedData:
    """A block moved to another cache level, or its priority changed; None for what did not."""

    block_hash: BlockHash
    cache_level: KVCacheEventDiff | None
    priority: KVCacheEventDiff | None

KVCacheEventData: TypeAlias = KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData

@dataclass(frozen=True)
class KVCacheEvent:
    """One change. `event_id` counts up from 0 within a rank; -1 in a snapshot, which is no part of the stream."""

    event_id: int
    data: KVCacheEventData
    window_size: int
    hash_algo: str | None = None
    attention_dp_rank: int | None = None
    layer_group_id: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: a type name in every record; rank, hash and layer group only where they are given."""

@dataclass(frozen=True)
class EventSnapshot:
    """All that is reusable now, as stored events, and the id of the first event of the stream that is not in it."""

    events: Sequence[KVCacheEvent]
    next_event_id: int

def serialize_events(events: Iterable[KVCacheEvent]) -> list[dict[str, Any]]:
    """`to_dict` of each. Raises ConfigError for what is no event."""

def block_hash_of(value: object, name: str) -> BlockHash:
    """A name of a block as events carry it."""

def group_of(layer_group_id: object) -> int:
    """A layer group as a number; NO_GROUP for None."""

def groups_of(layer_group_ids: object) -> list[int]:
    """Some layer groups."""

def names_of(block_hashes: object) -> list[BlockHash | bytes]:
    """The names of one block, or of several: hashes, and chained keys as bytes."""

def windows_of(given: object) -> dict[int, int]:
    """Windows by layer group, a copy."""
