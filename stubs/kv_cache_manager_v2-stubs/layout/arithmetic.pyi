"""Integer arithmetic that all rooms share.

Rule: sizes and counts are exact ints; no float takes part in a decision about memory.
"""

from collections.abc import Iterator, Sequence
from typing import SupportsIndex, TypeVar

_Id = TypeVar("_Id", bound=SupportsIndex)

def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b, for b > 0."""

def round_up(a: int, b: int) -> int:
    """Smallest multiple of b not below a, for b > 0."""

def round_down(a: int, b: int) -> int:
    """Largest multiple of b not above a, for b > 0."""

def round_half_even(a: int, b: int) -> int:
    """a / b rounded to the nearest integer, halves to the even one, for a >= 0 and b > 0."""

def exact_div(a: SupportsIndex, b: SupportsIndex) -> int:
    """a / b, which must leave no rest. Raises ConfigError otherwise."""

def typed_range(*bounds: _Id) -> Sequence[_Id]:
    """`range(*bounds)`, of the type of its bounds for a type checker: for loops over what a NewType counts."""

class HalfOpenRange:
    """The integers beg, beg+1, ..., end-1; none if end <= beg. All empty ranges are equal.

    Not a tuple: a compiled tuple subclass would lose its own length and truth value.
    """

    beg: int
    end: int

    def __init__(self, beg: SupportsIndex, end: SupportsIndex) -> None: ...
    def __len__(self) -> int: ...
    def __bool__(self) -> bool: ...
    def __contains__(self, item: object) -> bool: ...
    def __iter__(self) -> Iterator[int]:
        """Unpacks as (beg, end), as the reference's named tuple does; iterate `range(*r)` for the members."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[object, ...]: ...
    def intersect(self, other: HalfOpenRange) -> HalfOpenRange:
        """The members common to both."""
