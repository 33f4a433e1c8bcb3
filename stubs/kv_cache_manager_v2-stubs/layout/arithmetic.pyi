"""Exact integer arithmetic for sizes and counts. No decision about memory uses floats."""

from collections.abc import Iterator, Sequence
from typing import SupportsIndex, TypeVar

_Id = TypeVar("_Id", bound=SupportsIndex)

def ceil_div(a: int, b: int) -> int:
    """The smallest integer that is at least a / b, for b > 0."""

def round_up(a: int, b: int) -> int:
    """The smallest multiple of b that is at least a, for b > 0."""

def round_down(a: int, b: int) -> int:
    """The largest multiple of b that is at most a, for b > 0."""

def round_half_even(a: int, b: int) -> int:
    """a / b rounded to the nearest integer, halves to the even one, for a >= 0 and b > 0."""

def exact_div(x: SupportsIndex, y: SupportsIndex) -> int:
    """x / y. Raises ConfigError if x is not a multiple of y."""

def typed_range(*bounds: _Id) -> Sequence[_Id]:
    """`range(*bounds)` whose items have the type of the bounds, for loops over ids of a NewType."""

class HalfOpenRange:
    """The integers from beg to end - 1; none if end <= beg. All empty ranges are equal.

    Not a tuple: a compiled subclass of tuple cannot define its length and truth value.
    """

    beg: int
    end: int

    def __init__(self, beg: SupportsIndex, end: SupportsIndex) -> None: ...
    def __len__(self) -> int: ...
    def __bool__(self) -> bool: ...
    def __contains__(self, item: object) -> bool: ...
    def __iter__(self) -> Iterator[int]:
        """Iterates over (beg, end), so that a range unpacks into its bounds. `range(*r)` iterates over the members."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[object, ...]: ...
    def intersect(self, other: HalfOpenRange) -> HalfOpenRange:
        """The members common to both."""
