"""The records of which events consist, and their form as dictionaries for JSON.

A record is a value: it can be pickled, compares by content, and does not change once a reader can see it. A stored block keeps its
tokens packed, as they were committed, and unpacks them when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, SupportsIndex, TypeAlias

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.arguments import (
    at_least,
    each_of,
    given,
    instance,
    instances,
    items_of,
    mapping,
    shown,
    text,
    unsigned,
    whole,
)
from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.ids import DIGEST_BYTES, TOKEN_ID_LIMIT
from kv_cache_manager_v2.reuse.tokens import TOKEN_BYTES, pack, unpack

BlockHash: TypeAlias = int | str  # an unsigned 64-bit number, or the digest in hexadecimal
MmKey: TypeAlias = tuple[Any, ...]  # (digest, position in the item), optionally followed by a uuid and a bool

NO_GROUP: Final = -1  # the layer group of events that belong to none


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class UniqueToken:
    """One token of a stored block: an id, or a digest in hexadecimal.

    Events of the cache use ids and digests without an extra id. Events that an engine adds may use any string and any integers.
    """

    token_id: int | str
    token_extra_id: int = 0


@mypyc_attr(native_class=False)
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
        self._block_hash = block_hash_of(block_hash, "block_hash")
        self._tokens: tuple[UniqueToken, ...] = ()  # used if the tokens cannot be packed
        if isinstance(tokens, bytes):
            self._packed = tokens
            if len(tokens) % TOKEN_BYTES != 0:
                raise ConfigError(f"tokens are {len(tokens)} bytes; packed tokens must be a multiple of {TOKEN_BYTES} bytes")
        else:
            records = instances(tokens, UniqueToken, "tokens")
            packed = _packed(records)
            if packed is None:
                self._tokens = tuple(records)
            self._packed = packed or b""
        self._cache_level = at_least(cache_level, "cache_level", 0)
        self._priority = at_least(priority, "priority", 0)
        self._mm_keys: Sequence[MmKey] = ()
        if not isinstance(mm_keys, tuple) or len(mm_keys) > 0:  # nearly always empty: skip the copy
            self._mm_keys = [_mm_key(key) for key in items_of(mm_keys, "mm_keys", "tuples")]
        self._cache_salt = None if cache_salt is None else text(cache_salt, "cache_salt")

    @property
    def block_hash(self) -> BlockHash:
        return self._block_hash

    @property
    def tokens(self) -> list[UniqueToken]:
        """The tokens, as a new list. O(tokens)."""
        if self._tokens:
            return list(self._tokens)
        return [UniqueToken(token.hex() if isinstance(token, bytes) else token) for token in unpack(self._packed)]

    @property
    def packed_tokens(self) -> bytes:
        """The tokens as bytes: 4 per id, little-endian; a digest is the word 0x80000000 and its 32 bytes. O(1).

        Raises LogicError if a token has an extra id, or is a string other than a digest: read `tokens` then.
        """
        if self._tokens:
            raise LogicError("this block's tokens are not all ids or digests, so they cannot be packed; read `tokens` instead")
        return self._packed

    @property
    def content(self) -> bytes | tuple[UniqueToken, ...]:
        """The packed tokens, or the records if they cannot be packed. Equal for two blocks exactly if their tokens are. O(1)."""
        return self._tokens or self._packed

    @property
    def cache_level(self) -> int:
        return self._cache_level

    @property
    def priority(self) -> int:
        return self._priority

    @property
    def mm_keys(self) -> list[MmKey]:
        """The multimodal items in the block and their positions, as a new list."""
        return list(self._mm_keys)

    @property
    def cache_salt(self) -> str | None:
        """None in events of the cache: the salt of the scope is part of the hash and is not published."""
        return self._cache_salt

    def _values(self) -> tuple[BlockHash, bytes | tuple[UniqueToken, ...], int, int, list[MmKey], str | None]:
        return self._block_hash, self.content, self._cache_level, self._priority, list(self._mm_keys), self._cache_salt

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVCacheStoredBlockData):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash((self._block_hash, self.content))

    def __reduce__(self) -> tuple[type[KVCacheStoredBlockData], tuple[object, ...]]:
        return KVCacheStoredBlockData, self._values()

    def __repr__(self) -> str:
        return (
            f"KVCacheStoredBlockData(block_hash={self._block_hash!r}, tokens={self.tokens!r}, cache_level={self._cache_level}, "
            f"priority={self._priority}, mm_keys={self.mm_keys!r}, cache_salt={self._cache_salt!r})"
        )


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class KVCacheCreatedData:
    """The number of blocks on each cache level, for one layer group or for all."""

    num_blocks_per_cache_level: Sequence[int]


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class KVCacheStoredData:
    """Blocks that have become reusable. Each is the child of the one before it.

    The first is a child of `parent_hash`, or begins a prompt if that is None.
    """

    parent_hash: BlockHash | None
    blocks: Sequence[KVCacheStoredBlockData]


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class KVCacheRemovedData:
    """Blocks that are no longer reusable in the event's layer group."""

    block_hashes: Sequence[BlockHash]


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class KVCacheUpdatedData:
    """A block has moved to another cache level, or its priority has changed. A field is None if it has not changed."""

    block_hash: BlockHash
    cache_level: KVCacheEventDiff | None
    priority: KVCacheEventDiff | None


KVCacheEventData: TypeAlias = KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData


@mypyc_attr(native_class=False)
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
        result: dict[str, Any] = {"event_id": self.event_id, "data": _data_dict(self.data), "window_size": self.window_size}
        if self.attention_dp_rank is not None:
            result["attention_dp_rank"] = self.attention_dp_rank
        if self.hash_algo is not None:
            result["hash_algo"] = self.hash_algo
        if self.layer_group_id is not None:
            result["layer_group_id"] = self.layer_group_id
        return result


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class EventSnapshot:
    """All blocks that are reusable now, as stored events, and the id of the first event that is not included."""

    events: Sequence[KVCacheEvent]
    next_event_id: int


def serialize_events(events: Iterable[KVCacheEvent]) -> list[dict[str, Any]]:
    """`to_dict` of each event. Raises ConfigError for an item that is not an event."""
    records = [instance(event, KVCacheEvent, "an item of events") for event in each_of(events, "events", "KVCacheEvent")]
    return [event.to_dict() for event in records]


def block_hash_of(value: object, name: str) -> BlockHash:
    """Validate a block hash as events carry it. Raises ConfigError."""
    return value if isinstance(value, str) else unsigned(value, name)


def group_of(layer_group_id: object) -> int:
    """Validate a layer group; NO_GROUP for None. Raises ConfigError."""
    return NO_GROUP if layer_group_id is None else at_least(layer_group_id, "layer_group_id", 0)


def groups_of(layer_group_ids: object) -> list[int]:
    """Validate a sequence of layer groups. Raises ConfigError."""
    return [at_least(item, "layer_group_ids", 0) for item in items_of(layer_group_ids, "layer_group_ids", "integers")]


def names_of(block_hashes: object) -> list[BlockHash | bytes]:
    """Validate the hashes or chained keys (bytes) of one block or several. Raises ConfigError."""
    single = isinstance(block_hashes, (SupportsIndex, str, bytes))
    given: list[object] = [block_hashes] if single else each_of(block_hashes, "block_hashes", "block hashes")
    return [item if isinstance(item, bytes) else block_hash_of(item, "block_hashes") for item in given]


def windows_of(given: object) -> dict[int, int]:
    """Validate and copy windows by layer group. Raises ConfigError."""
    name = "window_size_by_layer_group"
    items = mapping(given, name, "layer groups to windows").items()
    return {at_least(group, f"a layer group of {name}", 0): at_least(window, f"{name}[{group!r}]", 0) for group, window in items}


def _packed(tokens: Sequence[UniqueToken]) -> bytes | None:
    """Pack tokens; None if the packed form cannot represent them. Raises ConfigError for a field of a wrong class."""
    items: list[object] = []
    exact = True
    for token in tokens:
        token_id = given(token, "token_id")
        extra = whole(given(token, "token_extra_id"), "token_extra_id")
        if isinstance(token_id, str):
            digest = _digest(token_id)
            exact = exact and digest is not None
            items.append(digest)
        else:
            number = whole(token_id, "token_id")
            exact = exact and 0 <= number < TOKEN_ID_LIMIT
            items.append(number)
        exact = exact and extra == 0
    return pack(items).data if exact else None


def _digest(text: str) -> bytes | None:
    """The digest whose hexadecimal digits are given, as `bytes.hex` writes them; None for any other string."""
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        return None
    return digest if len(digest) == DIGEST_BYTES and digest.hex() == text else None


def _mm_key(value: object) -> MmKey:
    if not isinstance(value, tuple) or len(value) < 2 or not isinstance(value[0], bytes):
        raise ConfigError(f"mm_keys has {shown(value)}; each item must be a tuple of a digest and a position")
    return value


def _data_dict(data: KVCacheEventData) -> dict[str, Any]:
    if isinstance(data, KVCacheStoredData):
        return {"type": "stored", "parent_hash": data.parent_hash, "blocks": [_block_dict(block) for block in data.blocks]}
    if isinstance(data, KVCacheRemovedData):
        return {"type": "removed", "block_hashes": list(data.block_hashes)}
    if isinstance(data, KVCacheUpdatedData):
        return {
            "type": "updated",
            "block_hash": data.block_hash,
            "cache_level": _diff_dict(data.cache_level),
            "priority": _diff_dict(data.priority),
        }
    return {"type": "created", "num_blocks_per_cache_level": list(data.num_blocks_per_cache_level)}


def _diff_dict(diff: KVCacheEventDiff | None) -> dict[str, Any] | None:
    if diff is None:
        return None
    return {"type": "event_diff", "new_value": diff.new_value, "old_value": diff.old_value}


def _block_dict(block: KVCacheStoredBlockData) -> dict[str, Any]:
    return {
        "type": "stored_block",
        "block_hash": block.block_hash,
        "tokens": [
            {"type": "unique_token", "token_id": token.token_id, "token_extra_id": token.token_extra_id} for token in block.tokens
        ],
        "cache_level": block.cache_level,
        "priority": block.priority,
        "mm_keys": [_mm_key_dict(key) for key in block.mm_keys],
    }


def _mm_key_dict(key: MmKey) -> dict[str, Any]:
    result: dict[str, Any] = {"type": "mm_key", "hash": key[0].hex(), "start_offset": key[1]}
    if len(key) > 2 and key[2] is not None:
        result["uuid"] = key[2]
    return result
