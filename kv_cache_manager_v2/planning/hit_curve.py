"""Hit tokens by cache size: a line through points, which only rises."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import SupportsIndex

from kv_cache_manager_v2.arguments import at_least


class HitCurve:
    """Hit tokens of the counted requests for every cache size in blocks, and their input tokens.

    The curve is straight between its points, and level after the last one.
    """

    def __init__(self, sizes: list[int], hit_tokens: list[int], total_tokens: int, exact: bool, block_bytes: int = 0) -> None:
        assert len(sizes) == len(hit_tokens) > 0, (len(sizes), len(hit_tokens))
        assert sizes[0] == hit_tokens[0] == 0, "an empty cache finds nothing"
        self.sizes = sizes  # blocks, ascending
        self.hit_tokens = hit_tokens  # at these sizes, never less than at a smaller one
        self.total_tokens = total_tokens
        self.exact = exact  # whether every size is exact; else those of the points, or none of an estimate
        self.block_bytes = block_bytes  # of a block in all layers; 0 if it is not known

    @property
    def ceiling(self) -> int:
        """Hit tokens without a limit of the size."""
        return self.hit_tokens[len(self.hit_tokens) - 1]

    @property
    def ceiling_size(self) -> int:
        """The smallest size in blocks with all these hits."""
        size = self.size_for(self.ceiling)
        assert size is not None
        return size

    def hits(self, size: SupportsIndex) -> int:
        """Hit tokens of a cache of `size` blocks. O(log points)."""
        size = at_least(size, "size", 0)
        at = bisect_right(self.sizes, size)
        if at == len(self.sizes):
            return self.ceiling
        left, right = self.sizes[at - 1], self.sizes[at]
        low, high = self.hit_tokens[at - 1], self.hit_tokens[at]
        return low + (high - low) * (size - left) // (right - left)

    def ratio(self, size: SupportsIndex) -> float:
        """Hit tokens by input tokens at a size in blocks."""
        return self.hits(size) / self.total_tokens if self.total_tokens else 0.0

    @property
    def ratios(self) -> list[float]:
        """Hit tokens by input tokens, at each of `sizes`."""
        return [self.ratio(size) for size in self.sizes]

    def after(self, warmer: SupportsIndex) -> HitCurve:
        """The curve of a tier below others that have `warmer` blocks together: what it finds and they do not."""
        warmer = at_least(warmer, "warmer", 0)
        before = self.hits(warmer)
        points = [(size, hits) for size, hits in zip(self.sizes, self.hit_tokens, strict=True) if size > warmer]
        sizes, hit_tokens = [0, *(size - warmer for size, _hits in points)], [0, *(hits - before for _size, hits in points)]
        return HitCurve(sizes, hit_tokens, self.total_tokens, self.exact, self.block_bytes)

    def size_for(self, hit_tokens: SupportsIndex) -> int | None:
        """The smallest size in blocks with at least so many hit tokens; None if no size has them. O(log points)."""
        hit_tokens = at_least(hit_tokens, "hit_tokens", 0)
        at = bisect_left(self.hit_tokens, hit_tokens)
        if at == len(self.hit_tokens):
            return None
        if at == 0:
            return 0
        left, right = self.sizes[at - 1], self.sizes[at]
        low, high = self.hit_tokens[at - 1], self.hit_tokens[at]
        return left - (low - hit_tokens) * (right - left) // (high - low)

    def knee(self) -> int:
        """The size in blocks after which more memory pays less than on average up to the ceiling.

        There the share of the ceiling's hits exceeds the share of the ceiling's size by most. If it never does, the knee is the
        ceiling's size.
        """
        full, ceiling = self.ceiling_size, self.ceiling
        most, size_of_most = 0, full
        for size, hit_tokens in zip(self.sizes, self.hit_tokens, strict=True):
            excess = hit_tokens * full - size * ceiling
            if excess > most:
                most, size_of_most = excess, size
        return size_of_most


def points_of(slopes: dict[int, int]) -> tuple[list[int], list[int]]:
    """Sizes and hit tokens of a curve. `slopes[size]` is by how much more than `size - 1` adds to its predecessor, `size` adds."""
    sizes, hit_tokens = [0], [0]
    slope = at = hits = 0
    for size in sorted(slopes):
        change = slopes[size]
        if change == 0:
            continue
        if size - 1 > at:
            hits += slope * (size - 1 - at)
            at = size - 1
            sizes.append(at)
            hit_tokens.append(hits)
        slope += change
    assert slope == 0, "the last change of a slope ends the curve"
    return sizes, hit_tokens
