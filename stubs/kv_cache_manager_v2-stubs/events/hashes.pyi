from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, TypeAlias

from kv_cache_manager_v2.events.records import BlockHash
from kv_cache_manager_v2.reuse.keys import BlockKeys, ReuseScope

V1_BLOCK_KEY: Final = "v1_block_key"
HASH_ALGORITHMS: Final = ("v1_block_key", "v2_sha256", "v2_sha256_64", "v2_blake3", "v2_blake3_64", "auto")

BlockName: TypeAlias = int | bytes

class HashedBlock:
    parent: HashedBlock | None
    tokens: bytes
    is_text: bool
    scope: ReuseScope
    key: bytes | None
    v1: int

    def __init__(self, parent: HashedBlock | None, tokens: bytes, num_tokens: int, scope: ReuseScope) -> None: ...
    def is_root(self) -> bool: ...

class BlockHashes(ABC):
    algorithm: str
    keys: BlockKeys

    def __init__(self, algorithm: str, keys: BlockKeys) -> None: ...
    @abstractmethod
    def hash_of(self, block: HashedBlock) -> BlockHash: ...
    @abstractmethod
    def name_of(self, block: HashedBlock) -> BlockName: ...
    @property
    def names_are_keys(self) -> bool: ...
    @property
    def needs_keys(self) -> bool: ...
    def key_of(self, block: HashedBlock) -> bytes: ...

def make_block_hashes(algorithm: str) -> BlockHashes: ...
def short_hash(key: bytes) -> int: ...
def v1_block_hash(
    tokens: Sequence[int], parent_hash: int | None = None, lora_id: int | None = None, salt: int | None = None
) -> int: ...
