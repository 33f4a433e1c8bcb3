"""Chained block keys, by which events, routers and probes name cached blocks; and the scopes that separate tenants.

A key names a block. It never decides a match, which compares tokens. It is computed once, on demand.

An engine can compute the same keys. This is the framing of the hashed bytes. Scope bytes: a mask byte (bit 0: lora_id given, bit 1:
salt given), then each given field as 8 bytes, little-endian, unsigned. Root key: hash of the scope bytes. Block key: hash of the
parent's key and the block's tokens. An id is 4 bytes, little-endian. The framing of a digest depends on the hash:

    blake3    the word 0x80000000 (no id has its top bit set), then the 32 bytes: different tokens always give different input
    sha256    the 32 bytes alone, as in other systems: a digest may have the bytes of eight ids, and then two blocks share a key
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from hashlib import sha256
from typing import Final, SupportsIndex, TypeAlias

from blake3 import blake3

from kv_cache_manager_v2.arguments import at_least, shown, text, unsigned_or_none, whole
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.reuse.tokens import TOKEN_BYTES, Tokens, TokenSequence, has_digest, pack, unpack

FIELD_BYTES: Final = 8
_LORA_BIT: Final = 1
_SALT_BIT: Final = 2


def scope_number(value: object, name: str) -> int | None:
    """The number of a LoRA id or a salt. That of a string is the first 8 bytes of its UTF-8's SHA-256, little-endian."""
    if isinstance(value, str):
        return int.from_bytes(sha256(value.encode("utf-8", "surrogatepass")).digest()[:FIELD_BYTES], "little")
    return unsigned_or_none(value, name)


class ReuseScope:
    """Which requests may share cached blocks: those with equal LoRA id and equal salt. None differs from 0.

    Each is an unsigned 64-bit integer, or a string, of which the first 8 bytes of the SHA-256 (little-endian) are the integer.
    """

    def __init__(self, lora_id: SupportsIndex | str | None = None, salt: SupportsIndex | str | None = None) -> None:
        self.lora_id: Final[int | None] = scope_number(lora_id, "lora_id")
        self.salt: Final[int | None] = scope_number(salt, "salt")
        mask = (0 if lora_id is None else _LORA_BIT) | (0 if salt is None else _SALT_BIT)
        self.data: Final[bytes] = bytes([mask]) + _field(self.lora_id) + _field(self.salt)  # the scope bytes

    def __iter__(self) -> Iterator[int | None]:
        return iter((self.lora_id, self.salt))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, position: SupportsIndex) -> int | None:
        """Index the tuple (lora_id, salt)."""
        fields = (self.lora_id, self.salt)
        number = whole(position, "position")
        if not -2 <= number < 2:
            raise IndexError(f"a scope has two fields, not one at {number}")
        return fields[0] if number in (0, -2) else fields[1]

    def _replace(self, **fields: SupportsIndex | str | None) -> ReuseScope:
        """A copy with some fields changed. Raises ConfigError for an unknown field."""
        unknown = sorted(fields.keys() - {"lora_id", "salt"})
        if unknown:
            raise ConfigError(f"a scope has no field {unknown[0]!r}; its fields are lora_id and salt")
        return ReuseScope(fields.get("lora_id", self.lora_id), fields.get("salt", self.salt))

    def __eq__(self, other: object) -> bool:
        """A scope also equals the tuple (lora_id, salt)."""
        if isinstance(other, ReuseScope):
            return self.data == other.data
        if isinstance(other, tuple):
            same: bool = other == (self.lora_id, self.salt)
            return same
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self.lora_id, self.salt))

    def __repr__(self) -> str:
        return f"ReuseScope(lora_id={self.lora_id}, salt={self.salt})"

    def __reduce__(self) -> tuple[type[ReuseScope], tuple[int | None, int | None]]:
        return ReuseScope, (self.lora_id, self.salt)


ScopeLike: TypeAlias = ReuseScope | tuple[SupportsIndex | str | None, SupportsIndex | str | None]  # a scope, or (lora_id, salt)


def scope_of(value: object, name: str = "reuse_scope") -> ReuseScope:
    """Convert an argument to a scope: a ReuseScope, a tuple (lora_id, salt), or None for neither. Raises ConfigError."""
    if isinstance(value, ReuseScope):
        return value
    if value is None:
        return ReuseScope()
    if isinstance(value, tuple) and len(value) == 2:
        return ReuseScope(value[0], value[1])
    raise ConfigError(f"{name} is {shown(value)}; it must be a ReuseScope, a tuple (lora_id, salt), or None")


class BlockKeys(ABC):
    """A chain of block keys with one hash function."""

    def __init__(self, name: str) -> None:
        self.name: Final = name  # a value of `block_key_hash`

    @abstractmethod
    def digest(self, data: bytes) -> bytes:
        """The 32-byte hash of some bytes."""

    def root_key(self, scope: ReuseScope) -> bytes:
        """The key that precedes the first block of a scope in the chain."""
        return self.digest(scope.data)

    @abstractmethod
    def block_key(self, parent_key: bytes, tokens: bytes) -> bytes:
        """The key of a block, full or partial, from its packed tokens."""

    @abstractmethod
    def prefix_keys(self, parent_key: bytes, tokens: bytes, ends: list[int]) -> list[bytes]:
        """The `block_key` of each prefix of `tokens` that ends at one of `ends`, which ascend. O(bytes + ends)."""


class Blake3Keys(BlockKeys):
    """BLAKE3, 256 bits: the default. Tokens are hashed as they are packed, so no two blocks share a key."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._spare: list[blake3] = []  # a hasher that no thread uses: making one takes longer than hashing a block

    def digest(self, data: bytes) -> bytes:
        try:
            hasher = self._spare.pop()
        except IndexError:  # the first digest, or another thread computes one
            hasher = blake3()
        hasher.update(data)
        key = hasher.digest()
        hasher.reset()
        self._spare.append(hasher)
        return key

    def block_key(self, parent_key: bytes, tokens: bytes) -> bytes:
        return self.digest(parent_key + tokens)

    def prefix_keys(self, parent_key: bytes, tokens: bytes, ends: list[int]) -> list[bytes]:
        keys: list[bytes] = []
        hasher = blake3(parent_key)
        beg = 0
        for end in ends:
            hasher.update(tokens[beg:end])
            keys.append(hasher.digest())  # a digest does not end the hash: more bytes may follow
            beg = end
        return keys


class Sha256Keys(BlockKeys):
    """SHA-256, for exchange with systems that use SHA-256 chains. Two blocks may share a key: see the framing above."""

    def digest(self, data: bytes) -> bytes:
        return sha256(data).digest()

    def block_key(self, parent_key: bytes, tokens: bytes) -> bytes:
        return sha256(parent_key + _without_marks(tokens)).digest()

    def prefix_keys(self, parent_key: bytes, tokens: bytes, ends: list[int]) -> list[bytes]:
        keys: list[bytes] = []
        hasher = sha256(parent_key)
        beg = 0
        for end in ends:
            hasher.update(_without_marks(tokens[beg:end]))
            keys.append(hasher.digest())
            beg = end
        return keys


def make_block_keys(name: str) -> BlockKeys:
    """The key chain for a value of `block_key_hash`. Raises ConfigError for an unknown one."""
    if name == "blake3":
        return Blake3Keys(name)
    if name == "sha256":
        return Sha256Keys(name)
    raise ConfigError(f"block_key_hash is {name!r}; it must be 'blake3' or 'sha256'")


def _without_marks(tokens: bytes) -> bytes:
    """Packed tokens without the mark before each digest."""
    if not has_digest(tokens):
        return tokens
    parts: list[bytes] = []
    for token in unpack(tokens):
        parts.append(token if isinstance(token, bytes) else token.to_bytes(TOKEN_BYTES, "little"))
    return b"".join(parts)


def sequence_to_blockchain_keys(
    tokens_per_block: SupportsIndex, reuse_scope: ScopeLike | None, tokens: Tokens, block_key_hash: str = "blake3"
) -> Iterator[tuple[list[int | bytes], bytes]]:
    """Yield the keys of a prompt's blocks: first ([], root key), then (tokens, key) of each block. The last block may be partial.

    Accepts the same tokens as `pack`. A digest is returned as its 32 bytes. Raises ConfigError at the call, before any item.
    """
    length = at_least(tokens_per_block, "tokens_per_block", 1)
    scope = scope_of(reuse_scope)
    return _chain(length, scope, pack(tokens), make_block_keys(text(block_key_hash, "block_key_hash")))


def _chain(
    tokens_per_block: int, scope: ReuseScope, sequence: TokenSequence, keys: BlockKeys
) -> Iterator[tuple[list[int | bytes], bytes]]:
    key = keys.root_key(scope)
    yield [], key
    for beg in range(0, sequence.num_tokens, tokens_per_block):
        data = sequence.slice_bytes(beg, min(beg + tokens_per_block, sequence.num_tokens))
        key = keys.block_key(key, data)
        yield unpack(data), key


def _field(value: int | None) -> bytes:
    """One scope field as it is hashed."""
    return b"" if value is None else value.to_bytes(8, "little")
