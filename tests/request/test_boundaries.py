"""Boundary values: lengths around zero, a block and a window, and arguments that are never valid."""

from __future__ import annotations

from array import array

import pytest

from kv_cache_manager_v2 import BAD_PAGE_INDEX, ConfigError
from tests.support.models import attention, model, small
from tests.support.rig import Rig, toks


@pytest.mark.parametrize("history", [0, 5, 12, 15, 16])
def test_capacity_below_history_is_refused(history: int) -> None:
    """A capacity below the history raises and changes nothing; an equal one is accepted."""
    with Rig(small(8)) as rig:
        cache = rig.open()
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
        cache = rig.open()
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
        cache = rig.open()
        assert cache.resize(8)
        group = rig.group(0)
        short = array("i", [123])
        with pytest.raises(ConfigError):
            cache.set_base_page_index_buf(0, group, short)
        assert list(short) == [123]
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


@pytest.mark.parametrize("kinds", [["full"], ["full", (64, 0)], [(64, 0)]])
def test_a_request_that_can_never_fit(kinds: list[tuple[int, int] | str]) -> None:
    """`resize` returns False with a permanent shortage. The longest length that fits is that of `clamp_max_seq_len_for_mem`."""
    slots = 4 * len(kinds)
    with Rig(small(max(slots, 36), kinds=kinds)) as rig:
        there = rig.counts().total // len(kinds)
        longest = there * 4
        cache = rig.open()
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


def test_addresses_far_into_a_pool() -> None:
    """With a page stride of 1,039,680 bytes, index 2066 is beyond 2 GiB: bytes written there are read back."""
    with Rig(model([attention(0, 1_039_680)], gpu=2148 << 20)) as rig:
        assert rig.counts().total > 2066
        hog = rig.start()
        assert hog.cache.resize(2064 * 32)
        request = rig.start()
        assert request.advance(toks(0, 128))
        assert max(rig.indices(request.cache)) >= 2066
        request.check()
