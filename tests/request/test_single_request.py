"""One request at a time: lengths, page indices, quotas, reuse of what was committed."""

from __future__ import annotations

from array import array

import pytest

from kv_cache_manager_v2 import (
    BAD_PAGE_INDEX,
    BufferId,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCache,
    LayerId,
    OutOfPagesError,
    PageStatus,
)
from kv_cache_manager_v2.config import LayerConfig
from tests.support import inside
from tests.support.engine import Token
from tests.support.rig import GPU, KEY, KIB, MIB, Rig, attention, batch, mixed, model, small, toks


def alternating(count: int, *sizes: int, window: int, sink: int) -> list[LayerConfig]:
    """Window layers with sinks, and full ones, in turn."""
    return [
        attention(layer, *sizes, window=window if layer % 2 == 0 else None, sink=sink if layer % 2 == 0 else None)
        for layer in range(count)
    ]


@pytest.mark.parametrize("own_buffer", [False, True])
def test_capacity_shrinks_one_by_one_to_the_prompt(own_buffer: bool) -> None:
    """From 320 tokens back to the 32 of the prompt, one by one: always True, and the blocks go as they empty."""
    with Rig(model(alternating(4, 4 * KIB, window=128, sink=48))) as rig:
        request = rig.start()
        if own_buffer:
            request.use_buffers(16)
        assert request.advance(toks(0, 32))
        cache = request.cache
        assert cache.resize(320)
        for capacity in range(319, 31, -1):
            assert cache.resize(capacity)
            assert cache.num_blocks == -(-capacity // 32)
        assert len(cache.committed_tokens) == 32
        request.check()


def test_a_quota_that_is_no_multiple_of_the_grain_is_rounded_up() -> None:
    """5,619,712 bytes are asked for: at least as many are there."""
    with Rig(model([attention(layer, 8192, 8192) for layer in range(8)], gpu=5_619_712)) as rig:
        assert rig.manager.get_quota(GPU) >= 5_619_712


def test_a_request_fills_the_gpu_to_the_last_block(tmp_path: object) -> None:
    """36 layers, every other with window 128 and a sink, 32 KiB buffers, 32 MiB of GPU, host and disk: a request of 704 tokens fits
    while another of 704 is suspended; a 705th token raises."""
    tiers = [GpuCacheTierConfig(32 * MIB), HostCacheTierConfig(32 * MIB), DiskCacheTierConfig(32 * MIB, str(tmp_path))]
    with Rig(model(alternating(36, 32 * KIB, 32 * KIB, window=128, sink=1), tiers=tiers)) as rig:
        first = rig.start()
        first.prefill(toks(0, 704), 16)
        first.suspend()
        second = rig.start()
        second.prefill(toks(1000, 1704), 16)
        with pytest.raises(OutOfPagesError):
            second.cache.capacity = 705
        assert second.cache.capacity == 704
        second.suspend()
        assert first.resume()
        first.check()


def test_resume_looks_at_each_pool_group() -> None:
    """One pool group is used beyond max_util_for_resume while the bytes of all are not: resume returns False, the cache stays
    SUSPENDED."""
    layers: list[LayerConfig] = [attention(0, MIB + 1, window=32), attention(1, KIB)]
    config = model(layers, gpu=4 * MIB, max_util=0.9, constraints=[batch(1, 32)], typical_step=batch(1, 32))
    with Rig(config) as rig:
        while True:
            totals = [rig.counts(group=group) for group in range(2)]
            if totals[0].unavailable / totals[0].total > 0.9:
                break
            request = rig.start()
            assert request.cache.resize(32)
        used = totals[0].unavailable * (MIB + 1) + totals[1].unavailable * KIB
        there = totals[0].total * (MIB + 1) + totals[1].total * KIB
        assert used / there < 0.9
        late = rig.create()
        assert late.resume(rig.stream) is False
        assert late.status is KVCache.Status.SUSPENDED
        shortage = late.last_shortage
        assert shortage is not None
        assert shortage.pool_group == 0


@pytest.mark.parametrize("requests", [1, 2, 4])
def test_a_prefix_that_ends_inside_a_block_is_reused(requests: int) -> None:
    """After all are closed every page of the tree is droppable, and 345 tokens of an old sequence of 704 match fully, with right
    bytes."""
    with Rig(model(alternating(4, KIB, KIB, window=128, sink=48), gpu=8 * MIB)) as rig:
        sequences = [mixed(10_000 * n, 10_000 * n + 704) for n in range(requests)]
        running = [rig.start() for _ in sequences]
        for beg in range(0, 704, 88):
            for request, tokens in zip(running, sequences, strict=True):
                assert request.advance(tokens[beg : beg + 88])
        for request in running:
            request.close()
        for tokens in sequences:
            for block in inside.tree_blocks(rig.manager, tokens):
                for group in range(2):
                    page = inside.page_of(block, group)
                    assert page is None or page.status() is PageStatus.DROPPABLE
        for tokens in sequences:
            again = rig.start(tokens[:345])
            assert len(again.tokens) == 345
            again.check()
            assert again.advance(toks(90_000, 90_010))
            again.check()
            again.close()


def test_min_snapshot_keeps_what_the_endpoint_needs() -> None:
    """128 tokens, window 64, commit_min_snapshot: pages only at blocks 2 and 3; the first 96 tokens are not reusable, all 128
    are."""
    with Rig(model([attention(0, 8 * KIB, window=64)], min_snapshot=True)) as rig:
        rig.seed(toks(0, 128))
        assert inside.coverage(rig.manager, toks(0, 128), 0) == [0, 0, 32, 32]
        assert rig.probe(toks(0, 96)) == 0
        again = rig.start(toks(0, 128))
        assert len(again.tokens) == 128
        again.check()


def test_backoff_shortens_matches_and_not_commits() -> None:
    """Back-off 3: 32 cached tokens match 29, 2 match none; probe and create agree, and all 4 blocks are stored."""
    with Rig(small(8, tokens_per_block=8, backoff=3)) as rig:
        rig.seed(toks(0, 32))
        assert inside.coverage(rig.manager, toks(0, 32), 0) == [8, 8, 8, 8]
        assert rig.probe(toks(0, 32)) == 29
        assert rig.probe(toks(0, 2)) == 0
        again = rig.start(toks(0, 32))
        assert again.cache.num_committed_tokens == 29
        again.check()


def test_any_sequence_of_tokens_is_an_input() -> None:
    """A tuple of 8 tokens matches the 8 that were committed as a list."""
    with Rig(small(8)) as rig:
        rig.seed(toks(0, 8))
        assert rig.create(tuple(range(8))).num_committed_tokens == 8


def test_the_priority_callback_gets_the_life_cycle() -> None:
    """The second argument is an object that answers get_stale_range and window_size, not an id; it is asked for each page."""
    asked: list[tuple[int, object]] = []

    def priority(ordinal: int, life_cycle: object) -> int:
        asked.append((ordinal, life_cycle))
        assert not isinstance(life_cycle, int)
        window = getattr(life_cycle, "window_size")  # noqa: B009 (an object, as the engine sees it)
        beg, end = getattr(life_cycle, "get_stale_range")(40)  # noqa: B009
        assert (window, (beg, end)) in [(None, (0, 0)), (8, (0, 8))]
        return 50

    with Rig(small(16, kinds=["full", (8, 0)])) as rig:
        request = rig.start(None, None, priority)
        assert request.advance(toks(0, 12))
        assert sorted(ordinal for ordinal, _ in asked) == [0, 0, 1, 1, 2, 2]


def test_index_buffers_of_the_engine_are_checked_and_filled() -> None:
    """A buffer that is one entry too short is refused; in one that is two too long the rest reads BAD."""
    with Rig(small(8)) as rig:
        cache = rig.create()
        assert cache.resume(rig.stream)
        assert cache.resize(8)
        short, long = array("i", [123]), array("i", [123] * 4)
        group = rig.group(0)
        with pytest.raises((ValueError, AssertionError)):
            cache.set_base_page_index_buf(0, group, short)
        assert short[0] == 123
        own = rig.indices(cache)
        cache.set_base_page_index_buf(0, group, long)
        assert list(long) == [*own, BAD_PAGE_INDEX, BAD_PAGE_INDEX]


def test_a_buffer_id_is_a_tuple() -> None:
    """Equality, hash, length and indexing are those of the plain tuple; setting a field raises AttributeError."""
    buffer = BufferId(LayerId(3), KEY)
    assert buffer == (3, "key")
    assert hash(buffer) == hash((3, "key"))
    assert {(3, "key"): 1}[buffer] == 1
    assert len(buffer) == 2
    assert (buffer[0], buffer[1]) == (3, "key")
    with pytest.raises(AttributeError):
        buffer.layer_id = LayerId(4)  # type: ignore[misc]


def test_shrinking_truncates_the_index_array() -> None:
    """From 8 to 4 tokens, 4 a block: blocks and index length go from 2 to 1."""
    with Rig(small(8)) as rig:
        cache = rig.create()
        assert cache.resume(rig.stream)
        assert cache.resize(8)
        assert (cache.num_blocks, len(rig.manager_indices(cache))) == (2, 2)
        assert cache.resize(4)
        assert (cache.num_blocks, len(rig.manager_indices(cache))) == (1, 1)


@pytest.mark.parametrize("own_buffer", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("delayed_commit", [False, True])
def test_512_tokens_from_one(own_buffer: bool, quantised: bool, delayed_commit: bool) -> None:
    """36 layers, window 128 with 48 sink tokens among full ones; steps of 1 to 16 tokens from a prompt of one to 512, bytes
    checked.

    Three layers are checked at each step, all of them at every 128 tokens and at the end.
    """
    sizes = (2 * KIB, 2 * KIB, KIB, KIB) if quantised else (2 * KIB, 2 * KIB)
    with Rig(model(alternating(36, *sizes, window=128, sink=48), gpu=32 * MIB)) as rig:
        engine = rig.engine
        assert engine is not None
        tokens: list[Token] = mixed(0, 512)
        request = rig.start(tokens[:1])
        cache = request.cache
        if own_buffer:
            request.use_buffers(20)
        committed = length = 0
        for size in [1, 1, 14, 16] * 16:
            assert cache.resize(length + size, length)
            engine.step(cache, tokens[length : length + size], tokens[:length], checked=None if length % 128 == 0 else [0, 1, 35])
            length += size
            if not delayed_commit:
                cache.commit(tokens[length - size : length])
            elif length % 64 == 0:
                cache.commit(tokens[committed:length])
                committed = length
            else:
                cache.history_length = length
        request.tokens = tokens
        request.check()
        assert cache.num_committed_tokens == 512
        assert cache.committed_tokens == tokens
