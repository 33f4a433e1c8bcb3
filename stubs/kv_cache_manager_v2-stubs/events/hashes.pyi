"""The hashes by which events name blocks.

A block's hash depends only on its tokens, all tokens before it and its scope. It is computed once, when an event first needs it. A
`HashedBlock` outlives the cached block and keeps its tokens, so that a dropped block can still be named.

    v2_blake3, v2_sha256          the 32-byte chained key of reuse/keys.py, as 64 hexadecimal digits
    v2_blake3_64, v2_sha256_64    the first 8 bytes of that key, big-endian, unsigned
    v1_block_key                  an older 64-bit hash of ids; a block with a digest in it or before it gets v2_sha256_64
    auto                          v1_block_key
"""

from abc import ABC, abstractmethod
from typing import Final, SupportsIndex, TypeAlias

from kv_cache_manager_v2.arguments import Integers
from kv_cache_manager_v2.events.records import BlockHash
from kv_cache_manager_v2.reuse.keys import BlockKeys, ReuseScope

V1_BLOCK_KEY: Final = "v1_block_key"
HASH_ALGORITHMS: Final[tuple[str, ...]]
BlockName: TypeAlias = int | bytes

class HashedBlock:
    """The input of a block's hash. The root of a scope has no tokens and no parent.

    A long chain must be unlinked before its last block is deallocated: see `KVCacheEventManager.__del__`.
    """

    parent: HashedBlock | None
    tokens: bytes
    is_text: bool
    scope: ReuseScope
    key: bytes | None
    v1: int

    def __init__(self, parent: HashedBlock | None, tokens: bytes, num_tokens: int, scope: ReuseScope) -> None: ...
    def is_root(self) -> bool: ...

class BlockHashes(ABC):
    """One hash algorithm."""

    algorithm: str
    keys: BlockKeys

    def __init__(self, algorithm: str, keys: BlockKeys) -> None: ...
    @abstractmethod
    def hash_of(self, block: HashedBlock) -> BlockHash:
        """The block's hash, as published. O(ancestors not hashed yet)."""

    @abstractmethod
    def name_of(self, block: HashedBlock) -> BlockName:
        """A value that is equal for two blocks exactly if their published hashes are. Costs as much as `hash_of`.

        Different blocks may share a name: 64-bit hashes can collide, v1 is a weak hash, and see the framing in reuse/keys.py.
        """

    @property
    def needs_keys(self) -> bool:
        """Whether every hash is computed from a chained key."""

    @property
    def names_are_keys(self) -> bool:
        """Whether `name_of` is the chained key."""

    def key_of(self, block: HashedBlock) -> bytes:
        """The chained key. O(ancestors whose key is not computed yet)."""

def make_block_hashes(algorithm: str) -> BlockHashes:
    """The hash algorithm for a value of `hash_algo`. Raises ConfigError (a ValueError) for an unknown one."""

def short_hash(key: bytes) -> int:
    """The 64-bit form of a chained key: its first 8 bytes, big-endian, unsigned."""

def v1_block_hash(
    tokens: Integers,
    parent_hash: SupportsIndex | None = None,
    lora_id: SupportsIndex | None = None,
    salt: SupportsIndex | None = None,
) -> int:
    """The v1 hash of a block of ids. `parent_hash` is None for the first block of a prompt.

    The salt enters the first block only; later blocks depend on it through their parents. The LoRA id enters every block. Raises
    ConfigError for tokens that are not ids.
    """
