"""Made-up tokens: a function of (id, position, seed), the same with and without numpy."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.cli.contents import (
    FINGERPRINT_BYTES,
    ArrayTokenSource,
    NumpyTokenSource,
    TokenRangeError,
    TokenSource,
)

MAKERS: list[Callable[[int, int], TokenSource]] = [ArrayTokenSource, NumpyTokenSource]
EITHER = pytest.mark.parametrize("make", MAKERS, ids=["array", "numpy"])


@EITHER
def test_two_ids_share_no_token_at_any_position(make: Callable[[int, int], TokenSource]) -> None:
    source = make(8, 3)
    tokens = list(source.prompt(list(range(100)), 800)) + list(source.output(50)) + list(source.output(50))
    assert len(set(tokens)) == 900
    assert all(0 <= token < 1 << 31 for token in tokens)


@EITHER
def test_a_partial_block_is_the_beginning_of_its_ids_block(make: Callable[[int, int], TokenSource]) -> None:
    source = make(8, 0)
    whole = list(source.prompt([4, 9], 16))
    assert list(source.prompt([4, 9], 11)) == whole[:11]
    assert list(source.prompt([9], 8)) == whole[8:]


@EITHER
def test_tokens_after_the_last_id_occur_nowhere_else(make: Callable[[int, int], TokenSource]) -> None:
    source = make(8, 0)
    first, second = (list(source.prompt([4, 9], 21)) for _time in range(2))
    assert first[:16] == second[:16]
    assert len({*first, *second}) == 16 + 5 + 5


@EITHER
def test_the_seed_changes_the_tokens(make: Callable[[int, int], TokenSource]) -> None:
    assert list(make(8, 1).prompt([0], 8)) != list(make(8, 2).prompt([0], 8))
    assert list(make(8, 1).prompt([0], 8)) == list(make(8, 1).prompt([0], 8))


@given(
    st.integers(1, 9),
    st.integers(0, 1 << 40),
    st.lists(st.lists(st.integers(-(1 << 70), 1 << 70), min_size=1, max_size=5), max_size=5),
)
def test_both_sources_say_the_same(block_size: int, seed: int, prompts: list[list[int]]) -> None:
    """Tokens, outputs, joins and fingerprints agree to the bit, whatever the ids and where the range wraps."""
    plain, fast = ArrayTokenSource(block_size, seed), NumpyTokenSource(block_size, seed)
    for ids in prompts:
        length = block_size * len(ids) - block_size // 2
        left, right = plain.prompt(ids, length), fast.prompt(ids, length)
        assert left.tobytes() == right.tobytes()
        left, right = plain.joined([left, plain.output(3)]), fast.joined([right, fast.output(3)])
        assert left.tobytes() == right.tobytes()
        assert plain.fingerprints(left) == fast.fingerprints(right)


@EITHER
def test_a_fingerprint_depends_on_every_token_before_and_on_none_after(make: Callable[[int, int], TokenSource]) -> None:
    source = make(8, 0)
    tokens = array("i", range(40))
    before = source.fingerprints(tokens)
    tokens[17] += 1
    after = source.fingerprints(tokens)
    assert len(after) == 40 * FINGERPRINT_BYTES
    same = [before[i : i + 4] == after[i : i + 4] for i in range(0, len(after), FINGERPRINT_BYTES)]
    assert same == [True] * 17 + [False] * 23


def test_too_many_distinct_blocks_are_an_error() -> None:
    with pytest.raises(TokenRangeError, match="3 distinct blocks of 1073741824"):
        ArrayTokenSource(1 << 30, 0).prompt([1, 2, 3], 1)
