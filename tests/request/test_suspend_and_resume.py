"""Suspend, resume, and calls that are all or nothing."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import CacheLevel, HostCacheTierConfig, KVCache, LogicError
from tests.support import inside
from tests.support.models import KIB, MIB, attention, batch, model, small
from tests.support.rig import DISK, HOST, Rig, toks


@pytest.mark.parametrize("wanted", [1, 2, 3, 4])
@pytest.mark.parametrize("host_slots", [0, 1, 2, 3])
def test_suspend_where_nothing_below_takes_the_pages(host_slots: int, wanted: int) -> None:
    """A suspended request holds all 4 slots, and the colder level has fewer: another request gets the slots of offloaded pages,
    else False. No held page is dropped."""
    with Rig(small(4, host_slots=host_slots)) as rig:
        first = rig.start()
        assert first.advance(toks(0, 16))
        first.cache.stop_committing()
        first.suspend()
        second = rig.start()
        before = inside.all_counts(rig.manager)
        grown = second.cache.resize(4 * wanted)
        assert grown == (wanted <= host_slots)
        if not grown:
            assert inside.all_counts(rig.manager) == before
            assert second.cache.capacity == 0
        second.close()
        assert first.resume()
        first.check()


@pytest.mark.parametrize("big", [0, 1])
def test_the_gate_is_per_pool_group(big: int) -> None:
    """An empty pool group does not hide a full one. The refused cache stays SUSPENDED, and `last_shortage` names the group."""
    layers = [attention(0, MIB + 1, window=32), attention(1, KIB)]
    if big == 1:
        layers = [attention(0, KIB, window=32), attention(1, MIB + 1)]
    config = model(layers, gpu=4 * MIB, max_util=0.9, constraints=[batch(1, 32)], typical_step=batch(1, 32))
    with Rig(config) as rig:
        while rig.counts(group=big).unavailable <= 0.9 * rig.counts(group=big).total:
            request = rig.start()
            assert request.cache.resize(32)
        late = rig.create()
        assert late.resume(rig.stream) is False
        assert late.status is KVCache.Status.SUSPENDED
        shortage = late.last_shortage
        assert shortage is not None
        assert (shortage.pool_group, shortage.over_limit, shortage.permanent) == (big, True, False)


@pytest.mark.parametrize("schedule", ["eager", "random"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("exclusive", [False, True])
def test_a_load_does_not_evict_what_it_loads(depth: int, schedule: str, exclusive: bool) -> None:
    """A prefix on the host, a GPU full of another cached one: the first is onloaded whole while the other makes room.

    An exclusive host tier has room for what leaves the GPU. In an inclusive one, a clean copy may take the place of an older page.
    """
    config = small(4, host_slots=4)
    config.cache_tiers = [config.cache_tiers[0], HostCacheTierConfig(config.cache_tiers[1].quota, exclusive)]
    with Rig(config, schedule, depth) as rig:
        first, second = toks(0, 16), toks(100, 116)
        rig.seed(first)
        rig.seed(second)
        assert inside.pages_by_level(rig.manager, first) == [1] * 4
        request = rig.start(first[: 4 * depth])
        assert len(request.tokens) == 4 * depth
        request.check()
        assert rig.probe(first) >= (16 if exclusive else 4 * depth)
        request.close()
        assert not exclusive or rig.probe(second) == 16
        again = rig.start(second)
        again.check()


@pytest.mark.parametrize("length", [0, 3, 8, 10])
def test_close_before_the_first_resume(length: int) -> None:
    """Close releases what the match held: every page of the tree is evictable again."""
    with Rig(small(8)) as rig:
        rig.seed(toks(0, 10))
        before = rig.counts()
        cache = rig.create(toks(0, length))
        assert cache.num_committed_tokens == length
        cache.close()
        assert rig.counts() == before
        assert before.evictable == 3
        assert rig.counts().unavailable == 0


def test_resume_without_a_stream() -> None:
    """`resume` refuses it, and the cache is unchanged."""
    with Rig(small(8)) as rig:
        cache = rig.create()
        with pytest.raises(LogicError, match="stream"):
            cache.resume()
        assert cache.status is KVCache.Status.SUSPENDED
        with pytest.raises(ValueError, match="cuda_stream"):
            _ = cache.cuda_stream
        cache.cuda_stream = rig.stream
        assert cache.resume()
        assert cache.resize(8)
        cache.suspend()
        assert cache.resume()


@pytest.mark.parametrize("schedule", ["eager", "random"])
def test_prefetch(tmp_path: object, schedule: str) -> None:
    """Pages on disk move to the host, all of them, none to the GPU, and are known to the eviction there."""
    with Rig(small(4, host_slots=4, disk=(str(tmp_path), 4)), schedule, 1) as rig:
        request = rig.start()
        assert request.advance(toks(0, 16))
        request.suspend()
        other = rig.start()
        assert other.cache.resize(16)  # ours go to the host
        other.suspend()
        last = rig.start()
        assert last.cache.resize(16)  # the other's go to the host, ours to disk
        assert rig.counts(2).unavailable == 4  # held, on the last level
        last.close()
        other.close()
        free = rig.counts(0).free
        assert request.cache.prefetch(HOST)
        rig.driver.synchronize()
        rig.manager.probe_reuse(None, [])
        rig.create().close()
        assert rig.counts(2).free == 4
        assert rig.counts(1) == (4, 0, 4, 0)
        assert rig.counts(0).free == free
        assert request.cache.prefetch(DISK)  # warmer already: nothing to do
        assert rig.counts(1) == (4, 0, 4, 0)
        assert request.resume()
        with pytest.raises(LogicError):
            request.cache.prefetch(HOST)
        request.check()


def test_prefetch_without_a_host(tmp_path: object) -> None:
    """GPU and disk only: level 1 is the disk, and prefetching to it is a no-op that succeeds."""
    with Rig(small(4, disk=(str(tmp_path), 4))) as rig:
        request = rig.start()
        assert request.advance(toks(0, 16))
        request.suspend()
        rig.take(4).close()
        before = inside.all_counts(rig.manager)
        assert request.cache.prefetch(CacheLevel(1))
        assert inside.all_counts(rig.manager) == before
        assert request.resume()
        request.check()


def test_prefetch_to_a_level_that_is_too_small(tmp_path: object) -> None:
    """4 pages do not fit a host of 2: False, nothing moved, nothing lost; a level that does not exist raises."""
    with Rig(small(4, host_slots=2, disk=(str(tmp_path), 8))) as rig:
        request = rig.start()
        assert request.advance(toks(0, 16))
        request.suspend()
        first, second = rig.start(), rig.request()
        assert first.cache.resize(16)
        first.suspend()
        assert second.resume()
        assert second.cache.resize(8)
        second.close()
        first.close()
        before = inside.all_counts(rig.manager)
        assert request.cache.prefetch(HOST) is False
        assert request.cache.last_shortage is not None
        assert inside.all_counts(rig.manager) == before
        for level in (-1, 3):
            with pytest.raises((LogicError, ValueError)):
                request.cache.prefetch(CacheLevel(level))
        assert request.resume()
        request.check()


@pytest.mark.parametrize("full", [True, False])
def test_a_failed_resume_changes_nothing(full: bool) -> None:
    """Neither the stream nor a page changes, and the call can be tried again."""
    with Rig(small(4)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 8))
        request.suspend()
        other = rig.take(2)
        third = rig.request(toks(50, 54)) if full else rig.request(toks(0, 6))
        elsewhere = rig.new_stream()
        third.cache.cuda_stream = rig.stream
        before = inside.all_counts(rig.manager)
        if not full:
            assert len(third.tokens) == 6
            assert third.cache.resume(elsewhere) is False
            assert third.cache.cuda_stream == rig.stream
            assert inside.all_counts(rig.manager) == before
        other.close()
        assert third.resume()
        third.check()
        assert request.resume()
        request.check()


def test_a_device_that_refuses_to_say_whether_work_is_over_fails_no_call() -> None:
    """The query is only an optimisation: without its answer, calls succeed and work is still ordered."""
    with Rig(small(4, host_slots=4), schedule="random", seed=3) as rig:
        rig.driver.fail("query_event", 1, None)
        request = rig.start()
        assert request.advance(toks(0, 12))
        request.suspend()
        other = rig.start()
        assert other.advance(toks(100, 112))
        other.suspend()
        assert request.resume()
        request.check()
        rig.driver.heal()
        request.close()
        other.close()
