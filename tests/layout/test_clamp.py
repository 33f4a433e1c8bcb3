"""How long a sequence can become in the slots that there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.config import LayerConfig
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.layout.batches import history_slots
from kv_cache_manager_v2.layout.pools import build_layout
from kv_cache_manager_v2.layout.sizing import clamp_max_seq_len, size_levels
from tests.support.models import MIB, attention, model, ssm

FULL = (attention(0, 2 * MIB),)
WINDOW = (attention(0, 2 * MIB, window=32),)
BOTH = (attention(0, 2 * MIB, window=32), attention(1, 2 * MIB))


@pytest.mark.parametrize("max_util", [0.97, 1.0])
@pytest.mark.parametrize(
    ("layers", "batch_size", "upper", "expected"),
    [
        (FULL, 1, 0, 0),
        (FULL, 1, 32, 32),
        (FULL, 1, 64, 32),
        (FULL, 2, 64, 0),
        (FULL, 3, 64, 0),
        (WINDOW, 1, 96, 96),
        (BOTH, 1, 96, 96),
        (BOTH, 2, 96, 32),
    ],
)
def test_edges(layers: tuple[LayerConfig, ...], batch_size: int, upper: int, expected: int, max_util: float) -> None:
    """2 MiB slots, a quota of one slot for each layer, blocks of 32 tokens; the same with the default threshold and with 1.0."""
    config = model(layers, gpu=2 * MIB * len(layers), max_util=max_util)
    layout = build_layout(config)
    slots = size_levels(layout, config)[0].slots
    assert clamp_max_seq_len(layout, slots, batch_size, upper, max_util) == expected


def test_states_count() -> None:
    """Each request needs its state: with three of them, no fourth request fits, whatever its length."""
    layout = build_layout(model([attention(0, 64), ssm(1, 128)]))
    assert clamp_max_seq_len(layout, [100, 3], 3, 1 << 40) == 98 * 32
    assert clamp_max_seq_len(layout, [100, 3], 4, 1 << 40) == 0


def test_the_last_request_must_be_resumable() -> None:
    """With 100 slots and a threshold of 0.5, all requests but the last may take 50 slots together."""
    layout = build_layout(model([attention(0, 64)]))
    assert clamp_max_seq_len(layout, [100], 1, 1 << 40, 0.5) == 100 * 32
    assert clamp_max_seq_len(layout, [100], 2, 1 << 40, 0.5) == 50 * 32
    assert clamp_max_seq_len(layout, [100], 11, 1 << 40, 0.5) == 41 * 32
    assert clamp_max_seq_len(layout, [100], 11, 1 << 40, 1.0) == 90 * 32


def test_a_window_alone_has_no_limit() -> None:
    """A window's pages do not grow with the length, so the bound itself is the answer, whole block or not."""
    layout = build_layout(model(WINDOW))
    assert clamp_max_seq_len(layout, [2], 1, (1 << 40) + 7) == (1 << 40) + 7


def test_scratch_counts() -> None:
    """With scratch reuse a prompt must also fit while it is prefilled in one step."""
    layers = [attention(n, 64, window=32) for n in range(4)]
    layout = build_layout(model(layers, scratch_rewind=0))
    # 20 slots: 1 for the last block, and 19 that hold 4 scratch blocks each
    assert clamp_max_seq_len(layout, [20], 1, 1 << 40) == (19 * 4 + 1) * 32


def test_bad_arguments() -> None:
    """No batch and no bound below zero."""
    layout = build_layout(model(FULL))
    with pytest.raises(AssertionError, match="batch_size is 0"):
        clamp_max_seq_len(layout, [1], 0, 32)
    with pytest.raises(ConfigError, match="upper is -1"):
        clamp_max_seq_len(layout, [1], 1, -1)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 4), st.integers(0, 300), st.integers(1, 40))
def test_it_is_the_largest(full: int, windowed: int, batch_size: int, upper: int, window: int) -> None:
    """The answer fits, and no multiple of the block length above it up to the bound does, nor the bound."""
    layout = build_layout(model([attention(0, 64), attention(1, 128, window=window)], tokens_per_block=8))
    slots = [full, windowed]

    def fits(tokens: int) -> bool:
        need, other = history_slots(layout, tokens), history_slots(layout, 1)
        return all(need[group] + (batch_size - 1) * other[group] <= slots[group] for group in range(2))

    answer = clamp_max_seq_len(layout, slots, batch_size, upper)
    assert 0 <= answer <= upper
    assert answer == upper or answer % 8 == 0
    assert answer == 0 or fits(answer)
    for tokens in [*range(answer + 1, upper + 1)]:
        if tokens % 8 == 0 or tokens == upper:
            assert not fits(tokens)
