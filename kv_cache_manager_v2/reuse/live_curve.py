"""The live hit curve of a manager: what caches of other sizes would find of the prompts that come.

It sees tokens, not the tree's blocks: a block that the cache has dropped is known by a hash of its prefix. Which blocks are sampled
is decided by four words of a block and its ordinal, so the hash of a prefix is computed for sampled blocks only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from librt.strings import read_i32_le
from mypy_extensions import i64
from xxhash import xxh3_64

from kv_cache_manager_v2.planning.hit_curve import HitCurve
from kv_cache_manager_v2.planning.sampled_curve import HASH_BITS, KEY_BITS, SampledCurve, SampledPath
from kv_cache_manager_v2.reuse import sibling_trie
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.tokens import TOKEN_BYTES, TokenSequence

REACH: Final = 8  # the largest size of the curve, in sizes of the cache
MANY: Final = 8  # continuations in the cache that make a path a stem
FACTOR: Final = 0x61C88647  # odd, below 2**31: 2**32 times the golden ratio, negated
WORD_MASK: Final = (1 << HASH_BITS) - 1
IDENTITY_MASK: Final = (1 << KEY_BITS) - 1


class LiveCurve:
    """Samples the paths of requests. Guarded by the manager's lock."""

    def __init__(self, tokens_per_block: int, rate: float, num_blocks: int) -> None:
        """`rate` is the share of the blocks that are sampled at first, `num_blocks` the size of the cache."""
        self._size = tokens_per_block
        self._curve = SampledCurve(tokens_per_block, rate, REACH * num_blocks)

    @property
    def rate(self) -> float:
        """The share of the blocks that are sampled now."""
        return self._curve.rate

    def restart(self) -> None:
        """Count anew."""
        self._curve.restart()

    def curve(self, warmer: int, block_bytes: int) -> HitCurve:
        """See `SampledCurve.curve`."""
        return self._curve.curve(warmer, block_bytes)

    def look_up(self, scope: ReuseScope, tokens: TokenSequence, matched: Sequence[Block]) -> None:
        """Count a look-up, and the use of the prompt's blocks. `matched` are the blocks that the cache has. O(bytes)."""
        if tokens.num_tokens == 0:
            return
        stem = _stem_of(matched) if self._curve.rate < 1.0 else 0
        size = self._size
        if tokens.digests:
            ends = [tokens.byte_offset(position) for position in range(size, tokens.num_tokens, size)]
        else:
            ends = list(range(TOKEN_BYTES * size, len(tokens.data), TOKEN_BYTES * size))
        ends.append(len(tokens.data))
        path = self._sample(scope, tokens.data, ends, stem)
        self._curve.look_up(path, tokens.num_tokens)
        self._curve.touch(path)

    def touch(self, scope: ReuseScope, blocks: Sequence[Block], tail: bytes) -> None:
        """Count the use of a path that ends with a request: full blocks, and the packed tokens after them. O(bytes)."""
        parts = [block.tokens for block in blocks]
        if tail:
            parts.append(tail)
        ends: list[int] = []
        end = 0
        for part in parts:
            end += len(part)
            ends.append(end)
        stem = _stem_of(blocks) if self._curve.rate < 1.0 else 0
        self._curve.touch(self._sample(scope, b"".join(parts), ends, stem))

    def _sample(self, scope: ReuseScope, data: bytes, ends: list[int], stem: int) -> SampledPath:
        """The sampled blocks of a path whose blocks end at these bytes of its packed tokens."""
        path = SampledPath()
        path.stem = stem
        threshold: i64 = self._curve.threshold
        view = memoryview(data)
        hasher = xxh3_64(scope.data)
        hashed = 0  # bytes
        beg: i64 = 0
        for number, byte in enumerate(ends):
            end: i64 = byte
            ordinal: i64 = number + 1
            mark = _hash(data, beg, end, ordinal) if end > beg else threshold
            beg = end
            if mark < threshold or ordinal == stem:
                hasher.update(view[hashed:end])
                hashed = end
                identity = hasher.intdigest() & IDENTITY_MASK
                if mark < threshold:
                    path.keys.append((int(mark) << KEY_BITS) | identity)
                    path.ordinals.append(ordinal - 1)
                if ordinal == stem:
                    path.stem_key = identity | 1
        return path


def _hash(data: bytes, beg: i64, end: i64, ordinal: i64) -> i64:
    """The hash of a block that decides whether it is sampled, 1 to 2**HASH_BITS - 1."""
    third: i64 = (end - beg) // 3 & -4
    mixed = _mixed(ordinal, i64(read_i32_le(data, beg)))
    mixed = _mixed(mixed, i64(read_i32_le(data, beg + third)))
    mixed = _mixed(mixed, i64(read_i32_le(data, end - TOKEN_BYTES - third)))
    mixed = _mixed(mixed, i64(read_i32_le(data, end - TOKEN_BYTES)))
    return mixed if mixed > 0 else 1


def _mixed(before: i64, word: i64) -> i64:
    """31 bits that depend on all bits of both."""
    product = ((before ^ word) & WORD_MASK) * FACTOR
    return (product ^ product >> 15 ^ product >> 31) & WORD_MASK


def _stem_of(blocks: Sequence[Block]) -> int:
    """How many first blocks of a path are a stem: those up to the last one that many cached blocks follow. O(blocks)."""
    for number in range(len(blocks), 0, -1):
        children = blocks[number - 1].children
        if children is not None and sibling_trie.has_many(children, MANY):
            return number
    return 0
