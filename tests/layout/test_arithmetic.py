"""Integer arithmetic against Fraction, and the half-open range as a set."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.layout.arithmetic import HalfOpenRange, ceil_div, exact_div, round_down, round_half_even, round_up

SIGNED = st.integers(-(10**20), 10**20)
NATURAL = st.integers(0, 10**20)
POSITIVE = st.integers(1, 10**12)


@given(SIGNED, POSITIVE)
def test_quotients(a: int, b: int) -> None:
    """ceil_div, round_up and round_down are exact also where floats are not."""
    assert ceil_div(a, b) == math.ceil(Fraction(a, b))
    assert round_up(a, b) == math.ceil(Fraction(a, b)) * b
    assert round_down(a, b) == math.floor(Fraction(a, b)) * b


@given(NATURAL, POSITIVE)
def test_round_half_even(a: int, b: int) -> None:
    """Nearest integer, halves to even: what round() does to an exact fraction."""
    assert round_half_even(a, b) == round(Fraction(a, b))


def test_round_half_even_ties() -> None:
    """0.5, 1.5, 2.5, 3.5 give 0, 2, 2, 4."""
    assert [round_half_even(a, 2) for a in (1, 3, 5, 7)] == [0, 2, 2, 4]


def test_exact_div() -> None:
    """An inexact quotient, or a zero divisor, is a configuration error."""
    assert exact_div(12, 4) == 3
    with pytest.raises(ConfigError, match="13 is not a multiple of 4"):
        exact_div(13, 4)
    with pytest.raises(ConfigError, match="is not a multiple of 0"):
        exact_div(13, 0)


SMALL = st.integers(-5, 12)


@given(SMALL, SMALL, SMALL, SMALL)
def test_range_is_a_set_of_integers(a: int, b: int, c: int, d: int) -> None:
    """Length, truth, membership, equality and intersection are those of the set of members; all empty ranges are equal."""
    one, two = HalfOpenRange(a, b), HalfOpenRange(c, d)
    set_one, set_two = set(range(a, b)), set(range(c, d))
    assert len(one) == len(set_one)
    assert bool(one) == bool(set_one)
    assert all((n in one) == (n in set_one) for n in range(-6, 14))
    assert "1" not in one
    assert (one == two) == (set_one == set_two)
    if one == two:
        assert hash(one) == hash(two)
    assert set(range(*one.intersect(two))) == set_one & set_two


def test_range_unpacks_and_prints() -> None:
    """A range unpacks as its two ends, and its repr makes it again."""
    beg, end = HalfOpenRange(2, 5)
    assert (beg, end) == (2, 5)
    assert repr(HalfOpenRange(2, 5)) == "HalfOpenRange(2, 5)"
    assert HalfOpenRange(2, 5) != (2, 5)
