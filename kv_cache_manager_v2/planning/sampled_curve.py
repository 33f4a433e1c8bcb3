"""The hit curve of an LRU cache, estimated from a sample of the blocks while requests come.

A block is in the sample if a hash of it is below a threshold, so all its uses are seen or none (Waldspurger et al., "Efficient MRC
construction with SHARDS", 2015). The sample has a fixed size. When it is full, blocks out of reach leave it; if that is not enough,
the threshold falls, and blocks above it leave too. What was counted before keeps the weight that it had.

Three things keep the error small:

- The distance of a block is the part of its own path before it, which is known, and the sampled blocks of other paths between,
  divided by the rate.
- A *stem*, the first blocks that many conversations share, is counted exactly: as one sampled block, it would be in the sample with
  all of its uses, or with none.
- The sampled blocks have more or fewer tokens than the rate says. Their hits are scaled to the known number of tokens of all blocks
  that are in no stem.
"""

from __future__ import annotations

from typing import Final

from librt.vecs import vec

from kv_cache_manager_v2.planning.hit_curve import HitCurve
from kv_cache_manager_v2.planning.sampled_stack import NEVER, SampledStack

HASH_BITS: Final = 31  # of the hash that is compared with the threshold
KEY_BITS: Final = 31  # of the rest of a key: a key above all others still fits 63 bits
MOST_BLOCKS: Final = 18_000  # in the sample: it takes 1 MB at most, with all that belongs to it
FALL: Final = 0.75  # what the rate is multiplied by if the sample is still this full without the blocks out of reach
LINEAR: Final = 256  # distances below have a bucket each; above, an octave has half as many buckets
BUCKETS: Final = LINEAR + LINEAR // 2 * 40


class SampledPath:
    """The sampled blocks of one path: their keys and their ordinals, both in path order.

    A key is (hash << KEY_BITS) | identity, where the hash decides on the sample and the identity tells apart what shares a hash.
    """

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.ordinals: list[int] = []
        self.num_whole = 0  # full blocks
        self.stem = 0  # first blocks that many conversations share
        self.stem_key = 0  # of the last of them; its hash is 0, so that it stays in the sample


class SampledCurve:
    """Takes paths as they are looked up and used, and gives the curve at any time. O(sampled blocks of the path) each."""

    def __init__(self, tokens_per_block: int, rate: float, reach: int, most_blocks: int = MOST_BLOCKS) -> None:
        """`reach` is the largest size of interest, in blocks."""
        self.threshold = max(1, int(rate * (1 << HASH_BITS)))  # blocks whose hash is below are in the sample
        self._size = tokens_per_block
        self._reach = reach
        self._stack = SampledStack(most_blocks)
        self._exact = rate == 1.0
        self.restart()

    @property
    def rate(self) -> float:
        """The share of the blocks that are sampled now."""
        return self.threshold / (1 << HASH_BITS)

    def restart(self) -> None:
        """Forget what was counted, but not which blocks were used."""
        self._hits: vec[float] = vec[float]([0.0] * BUCKETS)  # tokens in the sampled blocks that were found, by distance
        self._stem_hits: vec[float] = vec[float]([0.0] * BUCKETS)  # tokens of stems that were found
        self._sampled = 0.0  # tokens in the sampled blocks, by their weight
        self._unstemmed = 0  # tokens in no stem
        self._total = 0

    def look_up(self, path: SampledPath, num_tokens: int) -> None:
        """Count what caches of each size would find of a prompt. The last block of the path may be partial."""
        stack, size = self._stack, self._size
        scale = 1.0 / self.rate
        stem_touch = stack.find(path.stem_key) if path.stem > 0 else NEVER
        stem = path.stem if stem_touch != NEVER else 0
        own = 0  # sampled blocks of the stem that were used after the stem's end
        run = NEVER  # the touch of the present run of blocks
        between = 0.0  # blocks of other paths that are younger
        found = True
        for number, key in enumerate(path.keys):
            ordinal = path.ordinals[number]
            weight = min(size, num_tokens - ordinal * size) * scale
            if ordinal >= stem:
                self._sampled += weight
            if not found:
                continue
            touch = stack.find(key)
            if touch == NEVER:
                found = ordinal < stem
                continue
            if touch != run:
                run = touch
                between = max(0, stack.touched_after(touch) - number) * scale
            if ordinal >= stem:
                self._hits[_bucket(ordinal + 1 + int(between))] += weight
            elif touch > stem_touch:
                own += 1
        stem_tokens = min(stem * size, num_tokens)
        if stem > 0:
            self._count_stem(stem_tokens, int(max(0, stack.touched_after(stem_touch) - own) * scale))
        self._unstemmed += num_tokens - stem_tokens
        self._total += num_tokens

    def _count_stem(self, num_tokens: int, between: int) -> None:
        """Count the hits of a stem, whose last use has so many blocks of other paths after it. O(buckets)."""
        size = self._size
        last = between - -num_tokens // size
        distance = between + 1
        while distance <= last:
            bucket = _bucket(distance)
            end = min(_last_of(bucket), last)
            self._stem_hits[bucket] += min((end - between) * size, num_tokens) - (distance - 1 - between) * size
            distance = end + 1

    def touch(self, path: SampledPath) -> None:
        """Make the blocks of a path the youngest."""
        keys = path.keys
        if path.stem > 0:
            keys = [path.stem_key, *keys]
        self._make_room(len(keys))
        limit = self.threshold << KEY_BITS
        if keys and max(keys) >= limit:  # the rate has just fallen
            keys = [key for key in keys if key < limit]
        self._stack.touch(keys)

    def _make_room(self, count: int) -> None:
        """Have room for so many more blocks: forget those out of reach, and sample fewer if that is not enough."""
        stack = self._stack
        if stack.num_blocks + count <= stack.most:
            return
        stack.keep(self.threshold << KEY_BITS, stack.oldest_within(int(self._reach * self.rate)))
        while stack.num_blocks + count > FALL * stack.most and self.threshold > 1:
            self._exact = False
            self.threshold = max(1, int(self.threshold * FALL))
            count = int(count * FALL)
            stack.keep(self.threshold << KEY_BITS, 0)

    def curve(self, warmer: int = 0, block_bytes: int = 0) -> HitCurve:
        """The curve of what was looked up since the last restart. O(buckets).

        With `warmer`, that of a tier below others that have so many blocks together: what it finds and they do not.
        """
        scale = self._unstemmed / self._sampled if self._sampled > 0 else 0.0
        sizes, hit_tokens = [0], [0]
        total = 0.0
        for bucket in range(1, BUCKETS):
            more = self._hits[bucket] * scale + self._stem_hits[bucket]
            if more == 0:
                continue
            before = _last_of(bucket - 1)
            if before > sizes[-1]:
                sizes.append(before)
                hit_tokens.append(round(total))
            total += more
            sizes.append(_last_of(bucket))
            hit_tokens.append(round(total))
        whole = HitCurve(sizes, hit_tokens, self._total, self._exact and self.threshold == 1 << HASH_BITS, block_bytes)
        return whole if warmer == 0 else whole.after(warmer)


def _bucket(distance: int) -> int:
    """The bucket of a distance in blocks, at least 1."""
    if distance < LINEAR:
        return distance
    octave = distance.bit_length() - (LINEAR - 1).bit_length()
    return min(LINEAR + octave * (LINEAR // 2) - LINEAR + (distance >> octave), BUCKETS - 1)


def _last_of(bucket: int) -> int:
    """The largest distance of a bucket."""
    if bucket < LINEAR:
        return bucket
    octave, part = divmod(bucket - LINEAR, LINEAR // 2)
    return ((part + LINEAR // 2 + 1) << (octave + 1)) - 1
