"""Chained block keys: the names by which the outside knows cached blocks, and the scopes that keep tenants apart.

Rule: a key names a block for events, routers and probes by key. It never decides a match of tokens. It is computed once, on demand.

Framing, so that an engine can compute the same keys. Scope bytes: a mask byte (bit 0: lora_id given, bit 1: salt given), then each
given field as 8 bytes, little-endian, unsigned. Root key: hash of the scope bytes. Block key: hash of the parent's key and the
block's tokens. An id is 4 bytes, little-endian. A digest depends on the hash:

    blake3    the word 0x80000000 (no id has its top bit set), then the 32 bytes: different tokens always give different input
    sha256    the 32 bytes alone, as other systems do: a digest can have the bytes of eight ids, and then two blocks share a key
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final, SupportsIndex, TypeAlias

from kv_cache_manager_v2.reuse.tokens import Tokens

KEY_BYTES: Final = 32

class ReuseScope:
    """Who may share cached blocks: requests of equal LoRA id and equal salt. None is a value of its own, different from 0."""

    lora_id: Final[int | None]
    salt: Final[int | None]
    data: Final[bytes]

    def __init__(self, lora_id: SupportsIndex | None = None, salt: SupportsIndex | None = None) -> None: ...
    def __iter__(self) -> Iterator[int | None]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, position: SupportsIndex) -> int | None:
        """As of the tuple (lora_id, salt)."""

    def __eq__(self, other: object) -> bool:
        """Equal to the tuple (lora_id, salt) too."""

    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[type[ReuseScope], tuple[int | None, int | None]]: ...

ScopeLike: TypeAlias = ReuseScope | tuple[SupportsIndex | None, SupportsIndex | None]

def scope_of(value: object, name: str = "reuse_scope") -> ReuseScope:
    """The scope that a caller means: a ReuseScope, a tuple (lora_id, salt), or None for no LoRA and no salt."""

class BlockKeys(ABC):
    """The hash chain over one choice of hash function."""

    name: str

    def __init__(self, name: str) -> None: ...
    @abstractmethod
    def digest(self, data: bytes) -> bytes:
        """The 32-byte hash of some bytes."""

    def root_key(self, scope: ReuseScope) -> bytes:
        """The key that a scope's first block is chained to."""

    @abstractmethod
    def block_key(self, parent_key: bytes, tokens: bytes) -> bytes:
        """The key of a block, full or partial, from its packed tokens."""

    @abstractmethod
    def prefix_keys(self, parent_key: bytes, tokens: bytes, ends: list[int]) -> list[bytes]:
        """`block_key` of the first ends[0], ends[1], ... bytes of some packed tokens; `ends` ascend. O(bytes + ends)."""

class Blake3Keys(BlockKeys):
    """BLAKE3, 256 bits: the default. Tokens are hashed as they are packed, so no two blocks share a key."""

    def digest(self, data: bytes) -> bytes: ...
    def block_key(self, parent_key: bytes, tokens: bytes) -> bytes: ...
    def prefix_keys(self, parent_key: bytes, tokens: bytes, ends: list[int]) -> list[bytes]: ...

class Sha256Keys(BlockKeys):
    """SHA-256: for exchange with systems that name blocks by SHA-256 chains. Two blocks may share a key: see the framing above."""

    def digest(self, data: bytes) -> bytes: ...
    def block_key(self, parent_key: bytes, tokens: bytes) -> bytes: ...
    def prefix_keys(self, parent_key: bytes, tokens: bytes, ends: list[int]) -> list[bytes]: ...

def make_block_keys(name: str) -> BlockKeys:
    """The hash chain by the name of its hash, as the configuration gives it. Raises ConfigError for an unknown one."""

def sequence_to_blockchain_keys(
    tokens_per_block: SupportsIndex, reuse_scope: ScopeLike | None, tokens: Tokens, block_key_hash: str = "blake3"
) -> Iterator[tuple[list[int | bytes], bytes]]:
    """The keys of a prompt's blocks, lazily: first ([], root key), then (tokens of the block, key), the last block possibly short.

    Takes the same tokens as `pack`; a digest is returned as its 32 bytes. Raises ConfigError before the first item.
    """
