"""Exact integer arithmetic for sizes and counts. No decision about memory uses floats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import SupportsIndex, TypeVar, cast

from kv_cache_manager_v2.arguments import instance, whole
from kv_cache_manager_v2.errors import ConfigError

_Id = TypeVar("_Id", bound=SupportsIndex)


def ceil_div(a: int, b: int) -> int:
    """The smallest integer that is at least a / b, for b > 0."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of b that is at least a, for b > 0."""
    return -(-a // b) * b


def round_down(a: int, b: int) -> int:
    """The largest multiple of b that is at most a, for b > 0."""
    return a // b * b


def round_half_even(a: int, b: int) -> int:
    """a / b rounded to the nearest integer, halves to the even one, for a >= 0 and b > 0."""
    quotient, rest = divmod(a, b)
    if 2 * rest > b or (2 * rest == b and quotient % 2 == 1):
        quotient += 1
    return quotient


def exact_div(x: SupportsIndex, y: SupportsIndex) -> int:
    """x / y. Raises ConfigError if x is not a multiple of y."""
    whole_x, whole_y = whole(x, "x"), whole(y, "y")
    if whole_y == 0 or whole_x % whole_y != 0:
        raise ConfigError(f"{whole_x} is not a multiple of {whole_y}")
    return whole_x // whole_y


def typed_range(*bounds: _Id) -> Sequence[_Id]:
    """`range(*bounds)` whose items have the type of the bounds, for loops over ids of a NewType."""
    if not 1 <= len(bounds) <= 3:
        raise ConfigError(f"typed_range takes 1 to 3 bounds, not {len(bounds)}")
    numbers = [whole(bound, "a bound") for bound in bounds]
    if len(numbers) == 3 and numbers[2] == 0:
        raise ConfigError("the step of typed_range is 0; give any other integer")
    return cast("Sequence[_Id]", range(*numbers))


class HalfOpenRange:
    """The integers from beg to end - 1; none if end <= beg. All empty ranges are equal.

    Not a tuple: a compiled subclass of tuple cannot define its length and truth value.
    """

    def __init__(self, beg: SupportsIndex, end: SupportsIndex) -> None:
        self.beg: int = whole(beg, "beg")
        self.end: int = whole(end, "end")

    def __len__(self) -> int:
        return self.end - self.beg if self.end > self.beg else 0

    def __bool__(self) -> bool:
        return self.end > self.beg

    def __contains__(self, item: object) -> bool:
        return isinstance(item, int) and self.beg <= item < self.end

    def __iter__(self) -> Iterator[int]:
        """Iterates over (beg, end), so that a range unpacks into its bounds. `range(*r)` iterates over the members."""
        return iter((self.beg, self.end))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HalfOpenRange):
            return NotImplemented
        if not self and not other:
            return True
        return self.beg == other.beg and self.end == other.end

    def __hash__(self) -> int:
        return hash((self.beg, self.end)) if self else hash((0, 0))

    def __reduce__(self) -> tuple[object, ...]:
        return HalfOpenRange, (self.beg, self.end)

    def __repr__(self) -> str:
        return f"HalfOpenRange({self.beg}, {self.end})"

    def intersect(self, other: HalfOpenRange) -> HalfOpenRange:
        """The members common to both."""
        given = instance(other, HalfOpenRange, "other")
        return HalfOpenRange(max(self.beg, given.beg), min(self.end, given.end))
