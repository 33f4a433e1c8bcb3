"""Stale and scratch ranges: the known examples, and all ranges against the definition, block by block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.ids import LifeCycleId
from kv_cache_manager_v2.layout.arithmetic import HalfOpenRange
from kv_cache_manager_v2.layout.life_cycle import NEVER, AttentionLifeCycle, SsmLifeCycle


def window(tokens_per_block: int, size: int | None, sink_blocks: int = 0) -> AttentionLifeCycle:
    return AttentionLifeCycle(LifeCycleId(0), tokens_per_block, size, sink_blocks)


def members(pair: tuple[int, int]) -> set[int]:
    return set(range(*pair))


@pytest.mark.parametrize(
    ("size", "sink_blocks", "history", "stale"),
    [
        (100, 0, 130, (0, 0)),
        (100, 0, 131, (0, 1)),
        (100, 2, 10, (1, 1)),
        (100, 2, 50, (2, 2)),
        (100, 2, 259, (2, 5)),
        (None, 0, 1000, (32, 32)),
    ],
)
def test_stale_examples(size: int | None, sink_blocks: int, history: int, stale: tuple[int, int]) -> None:
    """Stale ranges with blocks of 32 tokens; an empty range is where the next stale block will be."""
    answer = window(32, size, sink_blocks).stale(history)
    if size is None:
        assert members(answer) == set()
    else:
        assert answer == stale


def test_ssm_stale() -> None:
    """Of 100 tokens in blocks of 32 a recurrent life cycle needs the last block only. No later token changes that range."""
    cycle = SsmLifeCycle(LifeCycleId(0), 32)
    assert cycle.stale(100) == (0, 3)
    assert cycle.next_stale_change(100) == NEVER
    assert cycle.get_stale_range(100) == HalfOpenRange(0, 3)
    assert not cycle.is_attention
    assert (cycle.window_size, cycle.num_sink_blocks) == (None, 0)


def test_window_smaller_than_a_block() -> None:
    """Blocks of 32, a window of 8: at 38 blocks 0 and 1 are live, at 39 only block 1; at 32 block 0 is live."""
    cycle = window(32, 8)
    assert 0 not in cycle.get_stale_range(32)
    assert not cycle.get_stale_range(38)
    assert cycle.get_stale_range(39) == HalfOpenRange(0, 1)


def test_window_of_one_at_a_block_boundary() -> None:
    """Window 1 at an exact block boundary: every history block is stale."""
    assert window(32, 1).stale(96) == (0, 3)
    assert window(32, 1).stale(95) == (0, 2)


def test_sinks_are_never_stale() -> None:
    """T = 4, W = 8, 5 sink tokens (2 blocks): at 32 blocks 0, 1, 6, 7 are live."""
    live = set(range(8)) - members(window(4, 8, 2).stale(32))
    assert live == {0, 1, 6, 7}


@pytest.mark.parametrize(
    ("size", "history", "capacity", "rewind", "expected"),
    [
        (64, 64, 512, 0, {*range(2, 14)}),
        (64, 64, 512, 40, {*range(2, 12)}),
        (32, 0, 256, 0, {*range(7)}),
        (32, 0, 256, 64, {*range(5)}),
        (64, 0, 256, 0, {*range(6)}),
        (64, 256, 352, 0, {8}),
        (64, 0, 256, 32, {*range(5)}),
        (64, 256, 352, 32, set()),
        (128, 0, 1024, 0, {*range(28)}),
        (None, 0, 1024, 0, set()),
    ],
)
def test_scratch_examples(size: int | None, history: int, capacity: int, rewind: int, expected: set[int]) -> None:
    """Blocks that the next step computes and then leaves are scratch, here with blocks of 32 tokens."""
    assert members(window(32, size).scratch(history, capacity, rewind)) == expected


@given(
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(1, 40)),
    st.integers(0, 4),
    st.integers(0, 120),
)
def test_stale_means_no_query_reads_the_block(tokens_per_block: int, size: int | None, sinks: int, history: int) -> None:
    """A block is stale iff it is no sink, and each of its tokens lies before the positions that the query at `history` sees."""
    sink_blocks = sinks if size is not None else 0
    cycle = window(tokens_per_block, size, sink_blocks)
    stale = members(cycle.stale(history))
    first_seen = 0 if size is None else history + 1 - size
    for block in range(history // tokens_per_block + 2):
        out_of_window = (block + 1) * tokens_per_block <= first_seen
        assert (block in stale) == (out_of_window and block >= sink_blocks)


@given(
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(1, 40)),
    st.integers(0, 4),
    st.integers(0, 120),
)
def test_next_stale_change(tokens_per_block: int, size: int | None, sinks: int, history: int) -> None:
    """The next change is the first history above with other stale blocks."""
    cycle = window(tokens_per_block, size, sinks if size is not None else 0)
    answer = cycle.next_stale_change(history)
    assert answer > history
    now = members(cycle.stale(history))
    for later in range(history + 1, min(answer, history + 100)):
        assert members(cycle.stale(later)) == now
    if answer != NEVER:
        assert members(cycle.stale(answer)) != now
    else:
        assert size is None


@given(
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(1, 40)),
    st.integers(0, 3),
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(0, 30),
)
def test_scratch_definition(tokens_per_block: int, size: int | None, sinks: int, history: int, growth: int, rewind: int) -> None:
    """Scratch blocks are those wholly beyond the history that are stale once all but the rewind tail is history."""
    cycle = window(tokens_per_block, size, sinks if size is not None else 0)
    capacity = history + growth
    stale_then = members(cycle.stale(max(0, capacity - rewind)))
    num_blocks = -(-capacity // tokens_per_block)
    expected = {block for block in range(num_blocks) if block in stale_then and block * tokens_per_block >= history}
    assert members(cycle.scratch(history, capacity, rewind)) == expected
    assert not expected & members(cycle.stale(history))


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 3))
def test_structural_floor_of_a_window(tokens_per_block: int, size: int, sink_blocks: int) -> None:
    """The floor is the most blocks that a decoding request of the window ever holds: each step adds one token, then settles it."""
    cycle = window(tokens_per_block, size, sink_blocks)
    most = max(cycle.blocks(history, history + 1) for history in range((sink_blocks + 3) * tokens_per_block + 3 * size))
    assert cycle.structural_floor(0) == most


def test_structural_floors() -> None:
    """Blocks of 32: a window of 100 needs 5; full attention as much as the widest window, at least 1; a state 1."""
    assert window(32, 100).structural_floor(0) == 5
    assert window(32, None).structural_floor(5) == 5
    assert window(32, None).structural_floor(0) == 1
    assert SsmLifeCycle(LifeCycleId(0), 32).structural_floor(5) == 1


def test_blocks() -> None:
    """Blocks of one request: capacity in blocks less the stale ones; one state for SSM, with no token at all too."""
    assert window(32, None).blocks(0, 0) == 0
    assert window(32, None).blocks(64, 65) == 3
    assert window(32, 100).blocks(131, 132) == 4
    assert SsmLifeCycle(LifeCycleId(0), 32).blocks(0, 0) == 1


def test_coverage() -> None:
    """Attention reuses any prefix of what a page covers, SSM exactly its snapshot or nothing."""
    assert [window(32, None).usable_tokens(20, tokens) for tokens in (10, 20, 30)] == [10, 20, 20]
    assert [SsmLifeCycle(LifeCycleId(0), 32).usable_tokens(20, tokens) for tokens in (10, 20, 30)] == [0, 20, 20]


def test_what_ends_a_path() -> None:
    """Losing a page of full attention or of a sink ends every longer match; one of a window or a snapshot does not."""
    assert window(32, None).loss_ends_path(7)
    assert window(32, 64, 2).loss_ends_path(1)
    assert not window(32, 64, 2).loss_ends_path(2)
    assert not SsmLifeCycle(LifeCycleId(0), 32).loss_ends_path(0)
