"""Chained block keys, by which events, routers and probes name cached blocks; and the scopes that separate tenants.

A key names a block. It never decides a match, which compares tokens. It is computed once, on demand.

An engine can compute the same keys. This is the framing of the hashed bytes. Scope bytes: a mask byte (bit 0: lora_id given, bit 1:
salt given), then each given field as 8 bytes, little-endian, unsigned. Root key: hash of the scope bytes. Block key: hash of the
parent's key and the block's tokens. An id is 4 bytes, little-endian. The framing of a digest depends on the hash:

    blake3    the word 0x80000000 (no id has its top bit set), then the 32 bytes: different tokens always give different input
    sha256    the 32 bytes alone, as in other systems: a digest may have the bytes of eight ids, and then two blocks share a key
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final, SupportsIndex, TypeAlias

from kv_cache_manager_v2.reuse.tokens import Tokens

FIELD_BYTES: Final = 8

def scope_number(value: object, name: str) -> int | None:
    """The number of a LoRA id or a salt. That of a string is the first 8 bytes of its UTF-8's SHA-256, little-endian."""

class ReuseScope:
    """Which requests may share cached blocks: those with equal LoRA id and equal salt. None differs from 0.

    Each is an unsigned 64-bit integer, or a string, of which the first 8 bytes of the SHA-256 (little-endian) are the integer.
    """

    lora_id: Final[int | None]
    salt: Final[int | None]
    data: Final[bytes]

    def __init__(self, lora_id: SupportsIndex | str | None = None, salt: SupportsIndex | str | None = None) -> None: ...
    def __iter__(self) -> Iterator[int | None]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, position: SupportsIndex) -> int | None:
        """Index the tuple (lora_id, salt)."""

    def __eq__(self, other: object) -> bool:
        """A scope also equals the tuple (lora_id, salt)."""

    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[type[ReuseScope], tuple[int | None, int | None]]: ...

ScopeLike: TypeAlias = ReuseScope | tuple[SupportsIndex | str | None, SupportsIndex | str | None]

def scope_of(value: object, name: str = "reuse_scope") -> ReuseScope:
    """Convert an argument to a scope: a ReuseScope, a tuple (lora_id, salt), or None for neither. Raises ConfigError."""

class BlockKeys(ABC):
    """A chain of block keys with one hash function."""

    name: str

    def __init__(self, name: str) -> None: ...
    @abstractmethod
    def digest(self, data: bytes) -> bytes:
        """The 32-byte hash of some bytes."""

    def root_key(self, scope: ReuseScope) -> bytes:
        """The key that precedes the first block of a scope in the chain."""

    @abstractmethod
    def block_key(self, parent_key: bytes, tokens: bytes) -> bytes:
        """The key of a block, full or partial, from its packed tokens."""

    @abstractmethod
    def prefix_keys(self, parent_key: bytes, tokens: bytes, ends: list[int]) -> list[bytes]:
        """The `block_key` of each prefix of `tokens` that ends at one of `ends`, which ascend. O(bytes + ends)."""

class Blake3Keys(BlockKeys):
    """BLAKE3, 256 bits: the default. Tokens are hashed as they are packed, so no two blocks share a key."""

    def __init__(self, name: str) -> None: ...
    def digest(self, data: bytes) -> bytes: ...
    def block_key(self, parent_key: bytes, tokens: bytes) -> bytes: ...
    def prefix_keys(self, parent_key: bytes, tokens: bytes, ends: list[int]) -> list[bytes]: ...

class Sha256Keys(BlockKeys):
    """SHA-256, for exchange with systems that use SHA-256 chains. Two blocks may share a key: see the framing above."""

    def digest(self, data: bytes) -> bytes: ...
    def block_key(self, parent_key: bytes, tokens: bytes) -> bytes: ...
    def prefix_keys(self, parent_key: bytes, tokens: bytes, ends: list[int]) -> list[bytes]: ...

def make_block_keys(name: str) -> BlockKeys:
    """The key chain for a value of `block_key_hash`. Raises ConfigError for an unknown one."""

def sequence_to_blockchain_keys(
    tokens_per_block: SupportsIndex, reuse_scope: ScopeLike | None, tokens: Tokens, block_key_hash: str = "blake3"
) -> Iterator[tuple[list[int | bytes], bytes]]:
    """Yield the keys of a prompt's blocks: first ([], root key), then (tokens, key) of each block. The last block may be partial.

    Accepts the same tokens as `pack`. A digest is returned as its 32 bytes. Raises ConfigError at the call, before any item.
    """
