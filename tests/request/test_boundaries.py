"""Boundary values: lengths around zero, around a block, around a window, and arguments that can never be right."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable

import pytest

from kv_cache_manager_v2 import BAD_PAGE_INDEX, BeamIndex, CacheLevel, ConfigError, KVCacheError, LayerGroupId, ReuseScope
from kv_cache_manager_v2.config import BufferConfig
from kv_cache_manager_v2.ids import INT32_MAX, LifeCycleId, PageIndexMode, PoolGroupId, PoolId
from kv_cache_manager_v2.layout.page_index import PageIndexConverter
from kv_cache_manager_v2.layout.pools import BufferPlace, build_layout
from kv_cache_manager_v2.layout.sizing import size_levels
from tests.support import inside
from tests.support.rig import GIB, GRAIN, KEY, KIB, Rig, attention, model, small, toks


@pytest.mark.parametrize("seeded", [(), (1,), (1, 3), (1, 2, 3, 4)])
def test_roots_without_children(seeded: tuple[int, ...]) -> None:
    """Scopes that were looked up but never committed to leave nothing to clear: clear returns at once, twice, and starts afresh."""
    with Rig(small(16, tokens_per_block=2)) as rig:
        for lora in (1, 2, 3, 4):
            if lora in seeded:
                rig.seed(toks(0, 4), ReuseScope(lora))
            else:
                idle = rig.start(toks(0, 4), ReuseScope(lora))
                assert idle.cache.resize(3)
                idle.close()
        rig.manager.clear_reusable_blocks()
        rig.manager.clear_reusable_blocks()
        assert (inside.num_tree_blocks(rig.manager), inside.num_roots(rig.manager)) == (0, 0)
        rig.seed(toks(0, 2), ReuseScope(5))
        assert rig.reused(toks(0, 2), ReuseScope(5)) == 2
        assert inside.num_roots(rig.manager) == 1


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("backoff", [0, 1, 3, 7, 8, 9, 31, 32, 40])
def test_backoff_never_goes_below_zero(backoff: int, partial: bool) -> None:
    """What matches is the common beginning less the back-off, never less than nothing; probe and create agree; commits are
    whole."""
    with Rig(small(8, tokens_per_block=8, backoff=backoff, partial=partial)) as rig:
        rig.seed(toks(0, 32))
        assert inside.coverage(rig.manager, toks(0, 32), 0) == [8] * 4
        for length in (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32):
            common = length if partial else length // 8 * 8
            assert rig.reused(toks(0, length)) == max(0, common - backoff), length
        assert rig.reused(toks(0, 50)) == 32 - min(backoff, 32)


@pytest.mark.parametrize("history", [0, 5, 12, 15, 16])
def test_capacity_below_history_is_refused(history: int) -> None:
    """A clean error that changes nothing; a capacity equal to the history is fine."""
    with Rig(small(8)) as rig:
        cache = rig.create()
        assert cache.resume(rig.stream)
        assert cache.resize(16, history)
        for capacity in range(history):
            with pytest.raises(ConfigError):
                cache.resize(capacity, history)
            with pytest.raises(ConfigError):
                cache.resize(capacity)
            with pytest.raises(ConfigError):
                cache.capacity = capacity
            assert (cache.capacity, cache.history_length, cache.num_blocks) == (16, history, 4)
        assert cache.resize(history, history)
        assert cache.num_blocks == -(-history // 4)


def test_history_never_goes_back_capacity_may() -> None:
    """A smaller history is refused without change; a smaller capacity shortens the index list."""
    with Rig(small(8, kinds=["full"])) as rig:
        cache = rig.create()
        assert cache.resume(rig.stream)
        assert cache.resize(16, 8)
        for history in range(8):
            with pytest.raises(ConfigError):
                cache.resize(16, history)
            with pytest.raises(ConfigError):
                cache.history_length = history
        assert (cache.capacity, cache.history_length) == (16, 8)
        assert cache.resize(8, 8)
        assert len(rig.manager_indices(cache)) == 2


def test_index_buffers_of_the_engine() -> None:
    """Too short: refused before anything is written. Too long: the rest is BAD. Growing past it: refused, no page taken.
    After suspend and close nothing is written to it any more."""
    with Rig(small(8)) as rig:
        cache = rig.create()
        assert cache.resume(rig.stream)
        assert cache.resize(8)
        group = rig.group(0)
        with pytest.raises(ConfigError):
            cache.set_base_page_index_buf(0, group, array("i", [123]))
        for wrong in (array("q", [0] * 8), bytes(32), [0] * 8, memoryview(array("i", [0] * 8)).toreadonly()):
            with pytest.raises(ConfigError):
                cache.set_base_page_index_buf(0, group, wrong)  # type: ignore[arg-type]
        buffer = array("i", [123] * 4)
        own = rig.indices(cache)
        cache.set_base_page_index_buf(0, group, buffer)
        assert list(buffer) == [*own, BAD_PAGE_INDEX, BAD_PAGE_INDEX]
        assert cache.resize(16)
        assert all(index >= 0 for index in buffer)
        free = rig.counts().free
        with pytest.raises(ConfigError, match="too short"):
            cache.resize(17)
        assert (cache.capacity, rig.counts().free) == (16, free)
        assert cache.resize(5)
        assert list(buffer[2:]) == [BAD_PAGE_INDEX] * 2
        cache.set_base_page_index_buf(0, group, None)
        kept = list(buffer)
        assert cache.resize(12)
        assert list(buffer) == kept
        cache.set_base_page_index_buf(0, group, buffer)
        cache.close()
        assert list(buffer) == [BAD_PAGE_INDEX] * 4
        buffer[:] = array("i", [7] * 4)
        rig.seed(toks(0, 8))
        assert list(buffer) == [7] * 4


@pytest.mark.parametrize("override", [0, -64, 48, 256, 127])
def test_override_must_divide_the_block(override: int) -> None:
    """A zero, negative, larger or non-dividing tokens_per_block_override is a configuration error, never a crash; 64 of 128 is
    fine."""
    with pytest.raises(ConfigError, match="tokens_per_block_override"):
        model([attention(0, 4 * KIB, override=override)], tokens_per_block=128)
    assert model([attention(0, 4 * KIB, override=64)], tokens_per_block=128).layers[0].buffers[0] == BufferConfig(KEY, 4 * KIB, 64)


@pytest.mark.parametrize("value", [0, -0.1, 1.1, math.nan, math.inf, -math.inf, True, "0.9"])
def test_utilisation_threshold_out_of_range(value: float) -> None:
    """Construction fails with a value error that names the field; 1.0 is valid."""
    with pytest.raises(ValueError, match="max_util_for_resume"):
        model([attention(0, KIB)], max_util=value)
    assert model([attention(0, KIB)], max_util=1.0).max_util_for_resume == 1.0


@pytest.mark.parametrize(("first", "second"), [(80, 96), (33, 64), (1, 32), (95, 96), (64, 96)])
def test_window_of_one_token(first: int, second: int) -> None:
    """The input token is the whole window: a stale window page that covers part of a block never limits a match."""
    with Rig(model([attention(0, 4 * KIB), attention(1, 4 * KIB, window=1)], min_snapshot=True)) as rig:
        rig.extend(toks(0, first))
        assert rig.extend(toks(0, second)) == first
        assert rig.probe(toks(0, second)) == second
        again = rig.start(toks(0, second))
        assert again.advance(toks(700, 705))
        again.check()


@pytest.mark.parametrize(("size", "window"), [(32, 8), (32, 1), (32, 33), (4, 8), (4, 7), (4, 9), (4, 1), (1, 3)])
def test_where_a_window_slides(size: int, window: int) -> None:
    """A block is live exactly while it holds one of the window - 1 positions before the history's end, or later ones."""
    with Rig(model([attention(0, 16 * size, window=window)], tokens_per_block=size)) as rig:
        cache = rig.create()
        assert cache.resume(rig.stream)
        for history in range(64):
            assert cache.resize(history + 1, history)
            live = [block for block in range(cache.num_blocks) if (block + 1) * size > history + 1 - window]
            assert rig.blocks_mapped(cache) == live, history


@pytest.mark.parametrize("length", [1, 31, 62, 63])
def test_no_empty_nodes(length: int) -> None:
    """Partial reuse off: part of a cached block matches nothing, and leaves no node behind; eviction empties the tree."""
    with Rig(small(4, tokens_per_block=64, partial=False)) as rig:
        rig.seed(toks(0, 64))
        cache = rig.create(toks(0, length))
        assert cache.num_committed_tokens == 0
        assert cache.resume(rig.stream)
        cache.close()
        assert inside.num_tree_blocks(rig.manager) == 1
        rig.take(4).close()
        assert inside.num_tree_blocks(rig.manager) == 0


@pytest.mark.parametrize("partial", [True, False])
def test_whole_prompt_cached(partial: bool) -> None:
    """A full hit, a hit but for the last token, then on from there: one chain, no second copy of a block."""
    with Rig(small(16, partial=partial)) as rig:
        rig.seed(toks(0, 8))
        whole = rig.start(toks(0, 8))
        assert len(whole.tokens) == 8
        whole.close()
        request = rig.start(toks(0, 7))
        assert len(request.tokens) == (7 if partial else 4)
        assert request.advance(toks(len(request.tokens), 8))
        assert request.advance(toks(8, 12))
        request.check()
        request.close()
        assert rig.reused(toks(0, 12)) == 12
        assert inside.num_tree_blocks(rig.manager) == 3


@pytest.mark.parametrize("kinds", [["full"], ["full", (64, 0)], [(64, 0)]])
def test_a_request_that_can_never_fit(kinds: list[tuple[int, int] | str]) -> None:
    """False at once and for good, nothing changed; the longest length that fits is what clamp says."""
    slots = 4 * len(kinds)
    with Rig(small(max(slots, 36), kinds=kinds)) as rig:
        there = rig.counts().total // len(kinds)
        longest = there * 4
        cache = rig.create()
        assert cache.resume(rig.stream)
        assert cache.resize(4)
        before = rig.counts()
        for capacity in (longest + 1, longest + 4, 1_000_000):
            assert cache.resize(capacity) is False
            shortage = cache.last_shortage
            assert shortage is not None
            assert shortage.permanent
            assert shortage.missing > 0
            assert (cache.capacity, cache.num_blocks, rig.counts()) == (4, 1, before)
        assert cache.resize(longest)
        assert cache.last_shortage is None
        if kinds == ["full"]:
            assert rig.manager.clamp_max_seq_len_for_mem(1, longest + 4) == longest


def test_exactly_as_listed() -> None:
    """4 slots: resize(20) is False, the state unchanged; clamp of one sequence to 20 is 16."""
    with Rig(small(4)) as rig:
        cache = rig.create()
        assert cache.resume(rig.stream)
        assert cache.resize(20) is False
        assert (cache.capacity, cache.history_length, cache.num_blocks) == (0, 0, 0)
        assert rig.counts().free == 4
        assert rig.manager.clamp_max_seq_len_for_mem(1, 20) == 16


def test_clamp_at_the_edges() -> None:
    """Tiny quotas: no negative, rounded-up or endless answer."""

    def clamp(windows: list[int | None], batch_size: int, upper: int) -> int:
        layers = [attention(layer, GRAIN, window=window) for layer, window in enumerate(windows)]
        with Rig(model(layers, gpu=GRAIN * len(layers)), engine=False) as rig:
            return rig.manager.clamp_max_seq_len_for_mem(batch_size, upper)

    assert clamp([None], 1, 0) == 0
    assert [clamp([None], 1, upper) for upper in (31, 32, 33, 64)] == [31, 32, 32, 32]
    assert [clamp([None], size, 64) for size in (2, 3)] == [0, 0]
    assert clamp([32], 1, 96) == 96
    assert [clamp([32, None], size, 96) for size in (1, 2)] == [96, 32]


def converter(scale: int, position: int = 0, expansion: int = 1) -> PageIndexConverter:
    place = BufferPlace(LifeCycleId(0), PoolGroupId(0), PoolId(0))
    place.scale, place.position, place.expansion = scale, position, expansion
    return PageIndexConverter(place)


def test_indices_and_addresses_do_not_wrap() -> None:
    """An index past int32 is refused, never wrapped; byte offsets are exact; BAD stays BAD in every conversion."""
    scale = 262_144
    assert list(converter(scale)([8191, BAD_PAGE_INDEX])) == [8191 * scale, BAD_PAGE_INDEX]
    for base in range(8192, 8201):
        with pytest.raises(ConfigError, match="int32"):
            converter(scale)([base])
    assert INT32_MAX < 1_039_680 * 2066
    for mode in (None, PageIndexMode.SHARED, PageIndexMode.PER_LAYER):
        for expansion in (1, 2):
            for position in (0, 1):  # the key half and the value half of a pair
                pages = list(converter(2, position, expansion)([BAD_PAGE_INDEX, 3, BAD_PAGE_INDEX], mode))
                assert pages[:expansion] == pages[2 * expansion :] == [BAD_PAGE_INDEX] * expansion
                assert min(pages[expansion : 2 * expansion]) > 0


def test_a_layout_past_int32_is_refused_at_construction() -> None:
    """2**31 slots are the most that int32 indices can name: one grain more is a configuration error."""
    fits = model([attention(0, 1)], gpu=2 * GIB)
    assert size_levels(build_layout(fits), fits)[0].slots == [1 << 31]
    for config in (model([attention(0, 1)], gpu=4 * GIB), model([attention(0, 1, 1)], gpu=8 * GIB)):
        with pytest.raises(ConfigError, match="int32"):
            size_levels(build_layout(config), config)


def test_addresses_far_into_a_pool() -> None:
    """A page stride of 1,039,680 bytes at index 2066 is past 2 GiB: what is written there is read there."""
    with Rig(model([attention(0, 1_039_680)], gpu=2148 << 20)) as rig:
        assert rig.counts().total > 2066
        hog = rig.start()
        assert hog.cache.resize(2064 * 32)
        request = rig.start()
        assert request.advance(toks(0, 128))
        assert max(rig.indices(request.cache)) >= 2066
        request.check()


def test_refusals_change_nothing() -> None:
    """Every misuse of a fresh cache raises one of ours and leaves it as it was."""
    with Rig(small(8)) as rig:
        cache = rig.create()
        calls: list[Callable[[], object]] = [
            lambda: cache.resize(4),
            lambda: cache.suspend(),
            lambda: cache.commit([1]),
            lambda: cache.prefetch(CacheLevel(5)),
            lambda: cache.resume(),
            lambda: cache.get_base_page_indices(LayerGroupId(7)),
            lambda: cache.get_base_page_indices(rig.group(0), BeamIndex(1)),
        ]
        for call in calls:
            with pytest.raises(KVCacheError):
                call()
        assert (cache.capacity, cache.num_committed_tokens, rig.counts().free) == (0, 0, 8)
        assert cache.resume(rig.stream)
