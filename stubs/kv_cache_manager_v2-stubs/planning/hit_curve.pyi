"""Hit tokens by cache size: a line through points, which only rises."""

from typing import SupportsIndex

class HitCurve:
    """Hit tokens of the counted requests for every cache size in blocks, and their input tokens.

    The curve is straight between its points, and level after the last one.
    """

    sizes: list[int]
    hit_tokens: list[int]
    total_tokens: int
    exact: bool
    block_bytes: int

    def __init__(self, sizes: list[int], hit_tokens: list[int], total_tokens: int, exact: bool, block_bytes: int = 0) -> None: ...
    @property
    def ceiling(self) -> int:
        """Hit tokens without a limit of the size."""

    @property
    def ceiling_size(self) -> int:
        """The smallest size in blocks with all these hits."""

    def hits(self, size: SupportsIndex) -> int:
        """Hit tokens of a cache of `size` blocks. O(log points)."""

    def ratio(self, size: SupportsIndex) -> float:
        """Hit tokens by input tokens at a size in blocks."""

    @property
    def ratios(self) -> list[float]:
        """Hit tokens by input tokens, at each of `sizes`."""

    def after(self, warmer: SupportsIndex) -> HitCurve:
        """The curve of a tier below others that have `warmer` blocks together: what it finds and they do not."""

    def size_for(self, hit_tokens: SupportsIndex) -> int | None:
        """The smallest size in blocks with at least so many hit tokens; None if no size has them. O(log points)."""

    def knee(self) -> int:
        """The size in blocks after which more memory pays less than on average up to the ceiling.

        There the share of the ceiling's hits exceeds the share of the ceiling's size by most. If it never does, the knee is the
        ceiling's size.
        """

def points_of(slopes: dict[int, int]) -> tuple[list[int], list[int]]:
    """Sizes and hit tokens of a curve. `slopes[size]` is by how much more than `size - 1` adds to its predecessor, `size` adds."""
