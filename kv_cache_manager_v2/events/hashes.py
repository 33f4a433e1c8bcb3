"""The hashes by which events name blocks.

A block's hash depends only on its tokens, all tokens before it and its scope. It is computed once, when an event first needs it. A
`HashedBlock` outlives the cached block and keeps its tokens, so that a dropped block can still be named.

    v2_blake3, v2_sha256          the 32-byte chained key of reuse/keys.py, as 64 hexadecimal digits
    v2_blake3_64, v2_sha256_64    the first 8 bytes of that key, big-endian, unsigned
    v1_block_key                  an older 64-bit hash of ids; a block with a digest in it or before it gets v2_sha256_64
    auto                          v1_block_key
"""

from __future__ import annotations

import logging
import struct
from abc import ABC, abstractmethod
from typing import Final, SupportsIndex, TypeAlias

from mypy_extensions import i64, mypyc_attr

from kv_cache_manager_v2.arguments import Integers, items_of, unsigned_or_none
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.events.records import BlockHash
from kv_cache_manager_v2.reuse.keys import BlockKeys, ReuseScope, make_block_keys
from kv_cache_manager_v2.reuse.tokens import TOKEN_BYTES, pack

_log: Final = logging.getLogger(__name__)

V1_BLOCK_KEY: Final = "v1_block_key"
HASH_ALGORITHMS: Final[tuple[str, ...]] = (V1_BLOCK_KEY, "v2_sha256", "v2_sha256_64", "v2_blake3", "v2_blake3_64", "auto")

BlockName: TypeAlias = int | bytes  # a block's hash in its shortest form: the number, or the key in place of its digits

_MASK_32: Final = (1 << 32) - 1
_MASK_64: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B9
_UNKNOWN: Final = -1  # not computed yet
_UNNAMEABLE: Final = -2  # the block or an earlier one has a digest, which v1 cannot hash


@mypyc_attr(acyclic=True)
class HashedBlock:
    """The input of a block's hash. The root of a scope has no tokens and no parent.

    A long chain must be unlinked before its last block is deallocated: see `KVCacheEventManager.__del__`.
    """

    def __init__(self, parent: HashedBlock | None, tokens: bytes, num_tokens: int, scope: ReuseScope) -> None:
        self.parent = parent  # None for a root, and once the block's removal has been processed
        self.tokens = tokens  # packed
        self.is_text: bool = len(tokens) == TOKEN_BYTES * num_tokens  # no digests
        self.scope = scope
        self.key: bytes | None = None  # chained key, once computed
        self.v1: int = 0 if parent is None else _UNKNOWN

    def is_root(self) -> bool:
        return not self.tokens


class BlockHashes(ABC):
    """One hash algorithm."""

    def __init__(self, algorithm: str, keys: BlockKeys) -> None:
        self.algorithm = algorithm
        self.keys = keys

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
        return True

    @property
    def names_are_keys(self) -> bool:
        """Whether `name_of` is the chained key."""
        return False

    def key_of(self, block: HashedBlock) -> bytes:
        """The chained key. O(ancestors whose key is not computed yet)."""
        key = block.key
        if key is not None:
            return key
        missing: list[HashedBlock] = []
        node = block
        while key is None:
            missing.append(node)
            parent = node.parent
            if parent is None:
                assert node.is_root(), "a block lost its parent before it was hashed"
                key = node.key = self.keys.root_key(node.scope)
                missing.pop()
            else:
                node = parent
                key = node.key
        while missing:
            node = missing.pop()
            if node.is_text:
                key = node.key = self.keys.digest(key + node.tokens)  # like `block_key`, but without a search for digests
            else:
                key = node.key = self.keys.block_key(key, node.tokens)
        return key


class _HexHashes(BlockHashes):
    def hash_of(self, block: HashedBlock) -> BlockHash:
        return self.key_of(block).hex()

    def name_of(self, block: HashedBlock) -> BlockName:
        return self.key_of(block)

    @property
    def names_are_keys(self) -> bool:
        return True


class _ShortHashes(BlockHashes):
    def hash_of(self, block: HashedBlock) -> BlockHash:
        return short_hash(self.key_of(block))

    def name_of(self, block: HashedBlock) -> BlockName:
        return short_hash(self.key_of(block))


class _V1Hashes(BlockHashes):
    """v1_block_key. Chained SHA-256 keys are computed only for blocks that v1 cannot hash."""

    def __init__(self, keys: BlockKeys) -> None:
        super().__init__(V1_BLOCK_KEY, keys)
        self._warned = False

    @property
    def needs_keys(self) -> bool:
        return False

    def hash_of(self, block: HashedBlock) -> BlockHash:
        return self._number(block)

    def name_of(self, block: HashedBlock) -> BlockName:
        return self._number(block)

    def _number(self, block: HashedBlock) -> int:
        if block.v1 == _UNKNOWN:
            self._mix_up_to(block)
        if block.v1 != _UNNAMEABLE:
            return block.v1
        if not self._warned:
            self._warned = True
            _log.warning(
                "v1_block_key cannot hash multimodal digests: blocks with one, and all after them, get a v2_sha256_64 hash"
            )
        return short_hash(self.key_of(block))

    def _mix_up_to(self, block: HashedBlock) -> None:
        missing: list[HashedBlock] = []
        node = block
        while node.v1 == _UNKNOWN:
            missing.append(node)
            assert node.parent is not None, "a block lost its parent before it was hashed"
            node = node.parent
        while missing:
            parent = node
            node = missing.pop()
            if parent.v1 == _UNNAMEABLE or not node.is_text:
                node.v1 = _UNNAMEABLE
            else:
                node.v1 = _v1(_ids(node.tokens), parent.v1, node.scope.lora_id, node.scope.salt if parent.is_root() else None)


def make_block_hashes(algorithm: str) -> BlockHashes:
    """The hash algorithm for a value of `hash_algo`. Raises ConfigError (a ValueError) for an unknown one."""
    if algorithm == "auto":
        algorithm = V1_BLOCK_KEY
    if algorithm == V1_BLOCK_KEY:
        return _V1Hashes(make_block_keys("sha256"))
    if algorithm == "v2_sha256" or algorithm == "v2_blake3":
        return _HexHashes(algorithm, make_block_keys(algorithm[3:]))
    if algorithm == "v2_sha256_64" or algorithm == "v2_blake3_64":
        return _ShortHashes(algorithm, make_block_keys(algorithm[3:-3]))
    raise ConfigError(f"Unsupported V2 KV cache event hash algorithm {algorithm!r}: must be one of {', '.join(HASH_ALGORITHMS)}")


def short_hash(key: bytes) -> int:
    """The 64-bit form of a chained key: its first 8 bytes, big-endian, unsigned."""
    return int.from_bytes(key[:8], "big")


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
    parent = unsigned_or_none(parent_hash, "parent_hash")
    lora = unsigned_or_none(lora_id, "lora_id")
    extra = unsigned_or_none(salt, "salt")
    ids = _ids(pack(items_of(tokens, "tokens", "ids"), True).data)
    if parent is None:
        return _v1(ids, 0, lora, extra)
    return _v1(ids, parent, lora, None)


def _ids(data: bytes) -> list[int]:
    """Unpack packed ids."""
    return list(struct.unpack(f"<{len(data) // TOKEN_BYTES}I", data))


def _v1(ids: list[int], parent: int, lora_id: int | None, salt: int | None) -> int:
    seed = len(ids) ^ (parent * 0xBF58476D1CE4E5B9 & _MASK_64)
    if salt is not None:
        seed = _mix_64(salt, seed)
    # The 64-bit seed is computed in two 32-bit halves: products and sums then stay below 2**63 and fit an i64 without overflow.
    high: i64 = seed >> 32
    low: i64 = seed & _MASK_32
    value: i64
    for word in ids:
        token: i64 = word
        value = ((token >> 16) ^ token) * 0x45D9F3B & _MASK_32
        value = ((value >> 16) ^ value) * 0x45D9F3B & _MASK_32
        value = ((value >> 16) ^ value) + _GOLDEN & _MASK_32
        sum_low: i64 = value + ((low << 6) & _MASK_32) + ((low >> 2) | ((high & 3) << 30))
        sum_high: i64 = (((high << 6) | (low >> 26)) & _MASK_32) + (high >> 2) + (sum_low >> 32)
        low ^= sum_low & _MASK_32
        high ^= sum_high & _MASK_32
    seed = int(high) << 32 | int(low)
    if lora_id is not None:
        seed = _mix_64(lora_id, seed)
    return seed


def _mix_64(value: int, seed: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK_64
    value ^= value >> 31
    return seed ^ (value + _GOLDEN + (seed << 6) + (seed >> 2) & _MASK_64)
