"""Rules for every call of a request: all or nothing, the tail evicted first, losses reported, limits exact."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest

from kv_cache_manager_v2 import ConfigError, KVCache, KVCacheError, PageDataLostError
from tests.support.models import Kind, small
from tests.support.rig import GPU, Rig, toks

ENDS: dict[str, Callable[[Rig, KVCache], None]] = {
    "active": lambda rig, cache: cache.close(),
    "suspended": lambda rig, cache: (cache.suspend(), cache.close())[1],  # type: ignore[func-returns-value]
    "prefetched": lambda rig, cache: (cache.suspend(), cache.prefetch(GPU), cache.close())[2],  # type: ignore[func-returns-value]
    "fork": lambda rig, cache: (cache.fork().close(), cache.close())[1],  # type: ignore[func-returns-value]
    "fork last": lambda rig, cache: close_fork_last(cache),
    "resumed": lambda rig, cache: (cache.suspend(), cache.resume(rig.stream), cache.close())[2],  # type: ignore[func-returns-value]
}


def close_fork_last(cache: KVCache) -> None:
    twin = cache.fork()
    cache.suspend()
    cache.close()
    twin.close()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("host_slots", [0, 4])
def test_the_tail_of_a_path_is_evicted_before_its_head(end: str, host_slots: int) -> None:
    """However a request ends, the tokens that are still found shrink block by block from the end."""
    with Rig(small(16, host_slots=host_slots), engine=False) as rig:
        tokens = toks(0, 40)
        cache = rig.open()
        assert cache.resize(40)
        cache.commit(tokens)
        ENDS[end](rig, cache)
        hog = rig.open()
        found = []
        for blocks in range(6, 16):
            assert hog.resize(4 * blocks)
            found.append(rig.probe(tokens))
        assert found == [min(40, 4 * (16 + host_slots - blocks)) for blocks in range(6, 16)]


def resumed_on_a_refused_load(rig: Rig) -> KVCache:
    """A request whose pages are read from a disk that fails."""
    for beg in (0, 100):
        rig.seed(toks(beg, beg + 16), chunk=4)
    rig.driver.fail("read_file", times=None)
    cache = rig.open(toks(0, 16))
    rig.driver.synchronize()
    return cache


def test_a_refused_load_is_told_by_the_close_and_by_the_log(tmp_path: object, caplog: pytest.LogCaptureFixture) -> None:
    """A request resumed and its load failed: close() closes, then raises, and one log line names the request."""
    with Rig(small(4, disk=(str(tmp_path), 16)), engine=False) as rig:
        cache = resumed_on_a_refused_load(rig)
        with caplog.at_level(logging.ERROR), pytest.raises(PageDataLostError):
            cache.close()
        assert cache.status == KVCache.Status.CLOSED
        cache.close()
        assert len([record for record in caplog.records if f"request {cache.id}" in record.getMessage()]) == 1
        rig.driver.heal()


@pytest.mark.parametrize("told", ["call", "with", "is_loaded"])
def test_a_loss_is_told_once(told: str, tmp_path: object) -> None:
    """close() does not raise after another call has reported the loss, or while an exception leaves a `with` block."""
    with Rig(small(4, disk=(str(tmp_path), 16)), engine=False) as rig:
        cache = resumed_on_a_refused_load(rig)
        if told == "call":
            with pytest.raises(PageDataLostError):
                cache.resize(20)
        elif told == "is_loaded":
            assert not cache.is_loaded
        else:
            with pytest.raises(ZeroDivisionError), cache:
                raise ZeroDivisionError
        cache.close()
        rig.driver.heal()


def test_a_lone_request_comes_back_whatever_it_holds() -> None:
    """max_util_for_resume keeps slots for requests that run; alone, a request that holds the whole GPU resumes."""
    with Rig(small(16, max_util=0.5), engine=False) as rig:
        cache = rig.open()
        assert cache.resize(64)
        cache.suspend()
        assert cache.resume(rig.stream)
        assert cache.resize(16, 0)
        cache.suspend()
        other = rig.open()
        assert other.resize(48)
        assert not cache.resume(rig.stream), "another request runs, and uses more than half"
        assert cache.last_shortage is not None
        assert cache.last_shortage.over_limit
        other.suspend()
        assert cache.resume(rig.stream), "its own pages, and nothing that runs"


@pytest.mark.parametrize("lengths", [(1 << 40, 1 << 40), (1 << 62, 1 << 62), (1 << 40, 0)])
def test_a_length_far_off_is_refused_at_once(lengths: tuple[int, int]) -> None:
    """A window needs few pages wherever it is, and a row an entry for every block."""
    with Rig(small(8, kinds=((8, 0),)), engine=False) as rig:
        cache = rig.open()
        assert cache.resize(8)
        began = time.process_time()
        if lengths[1]:
            with pytest.raises(ConfigError, match="at most"):
                cache.resize(*lengths)
        else:
            assert not cache.resize(*lengths)
        assert time.process_time() - began < 1
        assert (cache.capacity, cache.history_length) == (8, 0)


def test_there_is_no_scratch_descriptor_without_scratch_blocks() -> None:
    with Rig(small(32, kinds=((8, 0), "full"), scratch_rewind=0), engine=False) as rig:
        cache = rig.open()
        assert cache.resize(32)
        window = 0 if cache.get_scratch_desc(0) is not None else 1
        assert cache.get_scratch_desc(window) is not None
        assert cache.get_scratch_desc(1 - window) is None, "nothing leaves full attention"
        cache.commit(toks(0, 32))
        assert cache.get_scratch_desc(window) is None


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_commit_that_the_device_refuses_commits_nothing(nth: int) -> None:
    """The blocks are cached by another request, ready at different points of a blocked stream: adopting each needs one more
    wait."""
    with Rig(small(16), engine=False) as rig:
        busy = rig.new_stream()
        gate = rig.driver.gate(busy)
        other = rig.create()
        assert other.resume(busy)
        assert other.resize(12)
        for beg in (0, 4, 8):
            other.commit(toks(beg, beg + 4))
            rig.driver.launch(busy, lambda: None)
        cache = rig.open()
        assert cache.resize(16)
        cache.commit(toks(0, 2))
        rig.driver.fail("wait_event", nth)
        with pytest.raises(KVCacheError, match="injected"):
            cache.commit(toks(2, 13))
        assert (cache.num_committed_tokens, cache.committed_tokens) == (2, toks(0, 2))
        rig.manager.check_invariants()
        cache.commit(toks(2, 13))
        assert cache.committed_tokens == toks(0, 13)
        assert rig.indices(cache)[:3] == rig.indices(other)
        rig.manager.check_invariants()
        gate.open()


@pytest.mark.parametrize("kinds", [("full",), ("full", (8, 0)), ("full", (8, 0), (12, 0), (16, 0))])
@pytest.mark.parametrize("history", [None, 0], ids=["quick", "long"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_growth_that_the_device_refuses_adds_nothing(kinds: tuple[Kind, ...], history: int | None, nth: int) -> None:
    """The free slots were used last on other, busy streams, one after the other, so that growing has to wait for each of these."""
    with Rig(small(8 * len(kinds), kinds=kinds), schedule="random", seed=1, engine=False) as rig:
        streams = [rig.driver.create_stream() for _number in range(4)]
        gates = [rig.driver.gate(stream) for stream in streams]
        others = [rig.manager.create_kv_cache() for _stream in streams]
        for other, stream in zip(others, streams, strict=True):
            assert other.resume(stream)
            assert other.resize(8)
        for other in others:
            other.close()
        cache = rig.open()
        free = rig.manager.get_storage_statistics()[0].free
        rig.driver.fail("wait_event", nth)
        with pytest.raises(KVCacheError, match="injected"):
            cache.resize(32, history)
        assert (cache.capacity, cache.num_blocks) == (0, 0)
        assert rig.manager.get_storage_statistics()[0].free == free
        rig.manager.check_invariants()
        assert cache.resize(32, history)
        rig.manager.check_invariants()
        cache.close()
        for gate in gates:
            gate.open()
        for stream in streams:
            rig.driver.destroy_stream(stream)
