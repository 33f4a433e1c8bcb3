"""Slots of a batch: shared prompts, windows, states and scratch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.config import BatchDesc, KVCacheDesc
from kv_cache_manager_v2.layout.batches import batch_slots, history_slots, length_bytes, life_cycle_slots, request_slots
from kv_cache_manager_v2.layout.pools import build_layout
from tests.support.models import attention, batch, model, ssm


def test_zero_token_request_needs_its_state() -> None:
    """{(64, 63), (0, 0)} needs 2 state slots and 2 attention slots; an empty batch needs nothing."""
    layout = build_layout(model([ssm(0, 128), attention(1, 64)]))
    assert batch_slots(layout, BatchDesc([KVCacheDesc(64, 63), KVCacheDesc(0, 0)])) == [2, 2]
    assert batch_slots(layout, BatchDesc([])) == [0, 0]
    assert batch_slots(layout, BatchDesc([], 320)) == [0, 0]


def test_shared_prompt_counts_once() -> None:
    """Full blocks of the common prompt count once; the rest of it and everything else for each request."""
    layout = build_layout(model([attention(0, 64)]))
    for prompt, expected in ((0, 64), (31, 64), (32, 61), (64, 58), (256, 40), (10_000, 312)):
        assert batch_slots(layout, batch(4, 512, 0, prompt)) == [expected]


def test_shared_prompt_out_of_the_window() -> None:
    """Prompt blocks that are stale for all requests are not counted, those stale for some count once."""
    layout = build_layout(model([attention(0, 64, window=32)]))
    # stale at 256: [0, 7); at 100: [0, 2). 8 prompt blocks; both stale: 2.
    both = BatchDesc([KVCacheDesc(257, 256), KVCacheDesc(100, 100)], 256)
    # shared: 8 - 2; first: 9 - 7 own, 1 of them shared; second: 4 - 2 own, but 6 of the prompt are counted as shared
    assert life_cycle_slots(layout, both) == [6 + 1 + 0]


def test_scratch_replaces_blocks() -> None:
    """Scratch blocks are replaced by the slots that they share, exactly: 16 layers, 16384 tokens, W = 128."""
    layers = [attention(layer, 64, window=128) for layer in range(16)]
    layout = build_layout(model(layers, scratch_rewind=0))
    # 512 blocks, of which [0, 508) are scratch: 4 stay, and 508 share ceil(508 / 16) = 32 slots
    assert batch_slots(layout, batch(8, 16384)) == [8 * (4 + 32)]
    assert batch_slots(build_layout(model(layers)), batch(8, 16384)) == [8 * 512]


def test_constraint_with_scratch() -> None:
    """Eleven scratch blocks of 32 layers need one slot: 512 tokens, W = 128, rewind 32."""
    layout = build_layout(model([attention(layer, 64, window=128) for layer in range(32)], scratch_rewind=32))
    assert layout.life_cycles[0].scratch(0, 512, 32) == (0, 11)
    assert batch_slots(layout, batch(4, 512)) == [4 * (5 + 1)]


def test_length_bytes() -> None:
    """Bytes by pool group of one request; at least one slot for each life cycle, also for no token."""
    layout = build_layout(model([attention(0, 100), attention(1, 100, window=32), attention(2, 10, window=64), ssm(3, 7)]))
    assert length_bytes(layout, 0, 0) == [200, 10, 7]
    assert length_bytes(layout, 64, 320) == [(10 + 9) * 100, 10 * 10, 7]


SHAPES = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: KVCacheDesc(max(pair), min(pair)))


@given(st.lists(SHAPES, max_size=4), st.integers(0, 60), st.integers(1, 20), st.integers(0, 9))
def test_without_scratch_against_counting(shapes: list[KVCacheDesc], prompt: int, window: int, sink: int) -> None:
    """Window slots counted block by block: every prompt block that some request needs, and each request's further live blocks."""
    layout = build_layout(model([attention(0, 64, window=window, sink=sink)], tokens_per_block=4))
    cycle = layout.life_cycles[0]
    prompt_blocks = set(range(prompt // 4)) if shapes else set()
    stale = [set(range(*cycle.stale(shape.history_length))) for shape in shapes]
    expected = sum([any(block not in gone for gone in stale) for block in prompt_blocks])
    for shape, gone in zip(shapes, stale, strict=True):
        own = len(set(range(-(-shape.capacity // 4))) - gone)
        expected += max(0, own - len(prompt_blocks - gone))
    assert batch_slots(layout, BatchDesc(shapes, prompt)) == [expected]


@given(SHAPES, st.integers(0, 20), st.integers(1, 20), st.integers(1, 5), st.integers(0, 60))
def test_scratch_against_counting(shape: KVCacheDesc, rewind: int, window: int, layers: int, prompt: int) -> None:
    """A request pays for its live blocks that are neither prompt nor scratch, and for the slots that all its scratch shares."""
    config = model([attention(n, 64, window=window) for n in range(layers)], tokens_per_block=4, scratch_rewind=rewind)
    layout = build_layout(config)
    cycle = layout.life_cycles[0]
    scratch = set(range(*cycle.scratch(shape.history_length, shape.capacity, rewind)))
    gone = set(range(*cycle.stale(shape.history_length))) | scratch
    own = len(set(range(-(-shape.capacity // 4))) - gone) - len(set(range(prompt // 4)) - gone)
    assert request_slots(layout, 0, shape, prompt // 4) == max(0, own) + -(-len(scratch) // layers)


def test_history_slots() -> None:
    """Settled tokens need what is in the windows, one state, and with scratch reuse also room for a prefill in one step."""
    layers = [attention(0, 100), attention(1, 10, window=32), ssm(2, 7)]
    assert history_slots(build_layout(model(layers)), 96) == [3, 1, 1]
    # one step of 1024 tokens: 31 of 32 window blocks are scratch of a layer that fills its slots alone
    assert history_slots(build_layout(model(layers, scratch_rewind=0)), 1024) == [32, 32, 1]
