"""One request at a time: lengths, page indices, quotas, reuse of what was committed."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import (
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    OutOfPagesError,
    PageStatus,
)
from kv_cache_manager_v2.config import LayerConfig
from tests.support import inside
from tests.support.engine import Token
from tests.support.models import KIB, MIB, attention, model, small
from tests.support.rig import Rig, mixed, toks


def alternating(count: int, *sizes: int, window: int, sink: int) -> list[LayerConfig]:
    """Window layers with sinks, and full ones, in turn."""
    return [
        attention(layer, *sizes, window=window if layer % 2 == 0 else None, sink=sink if layer % 2 == 0 else None)
        for layer in range(count)
    ]


@pytest.mark.parametrize("own_buffer", [False, True])
def test_capacity_shrinks_one_by_one_to_the_prompt(own_buffer: bool) -> None:
    """From 320 tokens back to the 32 of the prompt, one by one: always True, and blocks are removed as they become empty."""
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
