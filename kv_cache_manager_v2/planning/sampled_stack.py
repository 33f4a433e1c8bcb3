"""Blocks of a sample in the order of their last touch, in packed arrays of a fixed size.

A touch names the sampled blocks of one path. A path's prefix is never older than a longer one, so blocks that were touched last by
the same touch are neighbours, and a Fenwick tree counts the blocks by touch, not one by one.
"""

from __future__ import annotations

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i32, i64

EMPTY: Final = 0  # a slot of the table without a block
NEVER: Final = -1  # the touch of a block that is not in the sample


class SampledStack:
    """A hash table from the key of a block to its last touch. Keys are positive integers below 2**62.

    For `most` blocks it takes at most 54 bytes a block, also while `keep` copies.
    """

    def __init__(self, most: int) -> None:
        slots = 8
        while slots * 11 < most * 16:  # at most 11/16 full
            slots *= 2
        self.most = most  # blocks
        self.num_blocks = 0
        self.last_touch = 0  # number of the latest touch; the first is 1
        self._mask: i64 = slots - 1
        self._keys: vec[i64] = vec[i64]([EMPTY] * slots)
        self._touches: vec[i32] = vec[i32]([NEVER] * slots)  # by slot of the table
        self._counts: vec[i32] = vec[i32]([0] * (2 * most + 1))  # Fenwick tree: blocks by the touch that touched them last

    def find(self, key: int) -> int:
        """The touch that touched a block last, or NEVER."""
        slot = self._slot(key)
        return self._touches[slot] if self._keys[slot] == key else NEVER

    def touched_after(self, touch: int) -> int:
        """The number of blocks that a later touch touched last. O(log touches)."""
        counts = self._counts
        node: i64 = touch
        total: i64 = 0
        while node > 0:
            total += i64(counts[node])
            node &= node - 1
        return self.num_blocks - total

    def oldest_within(self, count: int) -> int:
        """The first touch after which at most `count` blocks are younger. O(log touches ** 2)."""
        low, high = 0, self.last_touch
        while low < high:
            half = (low + high) >> 1
            if self.touched_after(half) <= count:
                high = half
            else:
                low = half + 1
        return low

    def touch(self, keys: list[int]) -> None:
        """Make these blocks the youngest. The caller has seen to it that they fit, with `keep`."""
        if not keys:
            return
        if self.last_touch + 1 >= len(self._counts):
            self.keep(1 << 62, 0)
        self.last_touch += 1
        touch: i64 = self.last_touch
        run: i64 = NEVER  # consecutive blocks that one touch had touched last are counted together
        length: i64 = 0
        for number in keys:
            key: i64 = number
            slot = self._slot(key)
            before: i64 = NEVER
            if self._keys[slot] == key:
                before = i64(self._touches[slot])
            else:
                self._keys[slot] = key
                self.num_blocks += 1
            self._touches[slot] = i32(touch)
            if before != run:
                self._count(run, -length)
                run = before
                length = 0
            length += 1
        self._count(run, -length)
        self._count(touch, len(keys))

    def keep(self, limit: int, oldest: int) -> None:
        """Keep the blocks whose key is below `limit` and that a touch from `oldest` on has touched last. O(blocks)."""
        keys: vec[i64] = vec[i64](capacity=self.num_blocks)
        touches: vec[i32] = vec[i32](capacity=self.num_blocks)
        numbers: vec[i32] = vec[i32]([0] * (self.last_touch + 1))  # by touch: 1 if it has blocks that stay, then its new number
        least: i64 = limit
        first: i64 = oldest
        slot: i64 = 0
        while slot <= self._mask:
            key = self._keys[slot]
            touch: i64 = i64(self._touches[slot])
            if key != EMPTY and key < least and touch >= first:
                keys = append(keys, key)
                touches = append(touches, i32(touch))
                numbers[touch] = 1
            self._keys[slot] = EMPTY
            slot += 1
        following: i32 = 0
        at: i64 = 0
        while at < len(numbers):
            following += numbers[at]
            numbers[at] *= following
            at += 1
        at = 0
        while at < len(self._counts):
            self._counts[at] = 0
            at += 1
        self.num_blocks = len(keys)
        self.last_touch = int(following)
        at = 0
        while at < len(keys):
            slot = self._slot(keys[at])
            self._keys[slot] = keys[at]
            self._touches[slot] = numbers[i64(touches[at])]
            self._count(i64(self._touches[slot]), 1)
            at += 1

    def _slot(self, key: i64) -> i64:
        """The slot of a block, or the free one that it would get."""
        keys, mask = self._keys, self._mask
        slot = key & mask
        while keys[slot] != key and keys[slot] != EMPTY:
            slot = (slot + 1) & mask
        return slot

    def _count(self, touch: i64, count: i64) -> None:
        """Add to the number of blocks that a touch was the last to touch."""
        if touch < 0 or count == 0:
            return
        counts = self._counts
        end: i64 = len(counts)
        node = touch
        while node < end:
            counts[node] += i32(count)
            node += node & -node
