"""The live hit curve of a manager: what caches of other sizes would find of the prompts that come.

It sees tokens, not the tree's blocks: a block that the cache has dropped is known by a hash of its prefix. Which blocks are sampled
is decided by two words of a block and its ordinal, so the hash of a prefix is computed for sampled blocks only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from librt.strings import read_i32_le
from mypy_extensions import i64
from xxhash import xxh3_64_intdigest

from kv_cache_manager_v2.planning.hit_curve import HitCurve
from kv_cache_manager_v2.planning.sampled_curve import HASH_BITS, KEY_BITS, SampledCurve, SampledPath
from kv_cache_manager_v2.reuse import sibling_trie
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.tokens import TOKEN_BYTES, TokenSequence

REACH: Final = 8  # the largest size of the curve, in sizes of the cache
MANY: Final = 8  # continuations in the cache that make a path a stem
CHUNK: Final = 16384  # bytes: a prefix is hashed in chunks, each with the hash of those before it as seed
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

    def look_up(self, scope: ReuseScope, tokens: TokenSequence, matched: Sequence[Block]) -> SampledPath:
        """Count a look-up, and the use of the prompt's blocks. `matched` are the blocks that the cache has. O(bytes)."""
        size = self._size
        ends: list[int] | None = None
        if tokens.digests:
            ends = [tokens.byte_offset(position) for position in range(size, tokens.num_tokens, size)]
            ends.append(len(tokens.data))
        path = self._sample(scope, tokens.data, ends, self._stem_of(matched))
        path.num_whole = tokens.num_tokens // size
        self._curve.look_up(path, tokens.num_tokens)
        self._curve.touch(path)
        return path

    def end(self, scope: ReuseScope, prompt: SampledPath | None, blocks: Sequence[Block], tail: bytes) -> None:
        """Count the use of a path that ends with a request: full blocks, and the packed tokens after them.

        `prompt` is what `look_up` has returned, if there was a look-up. O(blocks), and O(bytes) if a block after it is sampled.
        """
        if prompt is not None and not self._samples_any(prompt.num_whole, blocks, tail):
            self._curve.touch(prompt)
            return
        parts = [block.tokens for block in blocks]
        if tail:
            parts.append(tail)
        ends: list[int] = []
        end = 0
        for part in parts:
            end += len(part)
            ends.append(end)
        self._curve.touch(self._sample(scope, b"".join(parts), ends, self._stem_of(blocks)))

    def _samples_any(self, first: int, blocks: Sequence[Block], tail: bytes) -> bool:
        """Whether a block from ordinal `first` on, or the tail after them, is sampled."""
        threshold: i64 = self._curve.threshold
        for ordinal in range(first, len(blocks)):
            tokens = blocks[ordinal].tokens
            if _hash(tokens, 0, len(tokens), ordinal) < threshold:
                return True
        return len(tail) > 0 and _hash(tail, 0, len(tail), len(blocks)) < threshold

    def _sample(self, scope: ReuseScope, data: bytes, ends: list[int] | None, stem: int) -> SampledPath:
        """The sampled blocks of a path whose blocks end at these bytes of its packed tokens; None for blocks of text."""
        path = SampledPath()
        path.stem = stem
        threshold: i64 = self._curve.threshold
        view = memoryview(data)
        seed = xxh3_64_intdigest(memoryview(scope.data))
        hashed = 0  # bytes, in whole chunks
        total: i64 = len(data)
        step: i64 = TOKEN_BYTES * self._size
        last: i64 = stem - 1
        beg: i64 = 0
        ordinal: i64 = 0
        while beg < total:
            end = min(beg + step, total) if ends is None else i64(ends[ordinal])
            mark = _hash(data, beg, end, ordinal)
            if mark < threshold or ordinal == last:
                byte = int(end)
                while hashed + CHUNK <= byte:
                    seed = xxh3_64_intdigest(view[hashed : hashed + CHUNK], seed)
                    hashed += CHUNK
                identity = xxh3_64_intdigest(view[hashed:byte], seed) & IDENTITY_MASK
                if mark < threshold:
                    path.keys.append((int(mark) << KEY_BITS) | identity)
                    path.ordinals.append(int(ordinal))
                if ordinal == last:
                    path.stem_key = identity | 1
            beg = end
            ordinal += 1
        return path

    def _stem_of(self, blocks: Sequence[Block]) -> int:
        """How many first blocks of a path are a stem: those up to the last one that many cached blocks follow. O(blocks).

        0 if every block is sampled.
        """
        if self._curve.rate < 1.0:
            for number in range(len(blocks), 0, -1):
                children = blocks[number - 1].children
                if children is not None and sibling_trie.has_many(children, MANY):
                    return number
        return 0


def _hash(data: bytes, beg: i64, end: i64, ordinal: i64) -> i64:
    """The hash of a block that decides whether it is sampled, 1 to 2**HASH_BITS - 1, from two of its words."""
    middle: i64 = (beg + end) >> 1 & -4
    mixed = _mixed(_mixed(ordinal + 1, i64(read_i32_le(data, middle))), i64(read_i32_le(data, end - TOKEN_BYTES)))
    return mixed if mixed > 0 else 1


def _mixed(before: i64, word: i64) -> i64:
    """31 bits that depend on all bits of both."""
    product = ((before ^ word) & WORD_MASK) * FACTOR
    return (product ^ product >> 15 ^ product >> 31) & WORD_MASK
