"""When a request's counts become the manager's, which ids are dirty, and what happens to counts that nothing committed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kv_cache_manager_v2 import KVCache
from tests.statistics.helpers import blocks, open_cache, rig_of, suspended_cache
from tests.support.rig import toks

LOST = "closed before it committed its statistics"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if LOST in record.getMessage()]


def test_counts_lost_at_a_close_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """By default a request that closes without a commit counts nowhere; the first one of a manager is logged."""
    with rig_of(blocks(8)) as rig:
        for _ in range(3):
            cache = open_cache(rig)
            assert cache.resize(8)
            cache.close()
        assert rig.manager.get_committed_stats().empty
        [line] = lines(caplog)
        assert "commit_stats_on_close=True" in line


def test_counts_of_a_request_are_lost_without_the_managers_too(caplog: pytest.LogCaptureFixture) -> None:
    """Statistics of the manager are off, and the request has asked for its own: only its commit returns them."""
    with rig_of(blocks(8, stats=False)) as rig:
        kept = open_cache(rig, request_stats=True)
        assert kept.resize(8)
        assert kept.commit_pending_stats().alloc_total_blocks == 2
        kept.close()
        assert lines(caplog) == []
        for _ in range(2):
            cache = open_cache(rig, request_stats=True)
            assert cache.resize(8)
            cache.close()
        [line] = lines(caplog)
        assert "commit_stats_on_close" not in line, "there is nothing to commit to"


@pytest.mark.parametrize("end", ["commit_pending_stats", "discard_pending_stats"])
def test_counts_that_an_engine_dealt_with_are_not_lost(caplog: pytest.LogCaptureFixture, end: str) -> None:
    """Nothing is said of requests that committed or discarded, counted nothing, are dummies, or of a request without statistics."""
    with rig_of(blocks(8)) as rig:
        cache = open_cache(rig)
        assert cache.resize(8)
        getattr(cache, end)()
        cache.close()
        suspended_cache(rig, toks(0, 8)).close()
        rig.manager.mark_stats_excluded(77)
        dummy = open_cache(rig, id=77)
        assert dummy.resize(8)
        dummy.close()
    with rig_of(blocks(8, stats=False)) as rig:
        cache = open_cache(rig)
        assert cache.resize(8)
        cache.close()
    assert lines(caplog) == []


@pytest.mark.parametrize("suspended", [False, True])
def test_a_close_commits_where_it_should(caplog: pytest.LogCaptureFixture, suspended: bool) -> None:
    """With `commit_stats_on_close` a close counts what a commit just before it would have counted."""
    totals = []
    for on_close in (False, True):
        with rig_of(replace(blocks(8), commit_stats_on_close=on_close)) as rig:
            cache = open_cache(rig, id=5)
            assert cache.resize(10)
            cache.commit(toks(0, 10))
            if suspended:
                cache.suspend()
            if not on_close:
                cache.commit_pending_stats()
            cache.close()
            assert rig.manager.get_dirty_stats_kv_cache_ids() == set()
            reader = suspended_cache(rig, toks(0, 10))
            if not on_close:
                reader.commit_pending_stats()
            reader.close()
            totals.append((rig.manager.get_committed_stats(), rig.manager.get_and_reset_iteration_stats()))
    assert totals[0] == totals[1]
    assert totals[0][0].reused_blocks == 3
    assert lines(caplog) == []


@pytest.mark.parametrize("stats", [True, False])
@pytest.mark.parametrize("end", [KVCache.commit_pending_stats, KVCache.discard_pending_stats, KVCache.close])
def test_a_dirty_mark_ends_with_the_counts(stats: bool, end: Callable[[KVCache], object]) -> None:
    """Commit, discard and close clear the id, whether statistics are on or not, and whether anything was counted or not."""
    with rig_of(blocks(8, stats=stats)) as rig:
        cache = open_cache(rig, id=17)
        rig.manager.mark_stats_dirty(17)
        assert rig.manager.get_dirty_stats_kv_cache_ids() == {17}
        end(cache)
        assert rig.manager.get_dirty_stats_kv_cache_ids() == set()


@pytest.mark.parametrize("end", [KVCache.commit_pending_stats, KVCache.discard_pending_stats, KVCache.close])
@pytest.mark.parametrize("first", [0, 1])
def test_an_id_is_dirty_while_any_request_of_it_has_counts(end: Callable[[KVCache], object], first: int) -> None:
    """Requests may share an id: what one of them does leaves the other's mark."""
    with rig_of(blocks(8)) as rig:
        requests = [open_cache(rig, id=9), open_cache(rig, id=9), open_cache(rig, id=8)]
        for cache in requests:
            assert cache.resize(8)
        end(requests[first])
        assert rig.manager.get_dirty_stats_kv_cache_ids() == {8, 9}
        assert not requests[1 - first].commit_pending_stats().empty
        assert rig.manager.get_dirty_stats_kv_cache_ids() == {8}
        assert not requests[2].commit_pending_stats().empty


def test_shrinking_one_request_leaves_the_mark_of_another_of_its_id() -> None:
    """Growth that is taken back counts nothing; the id stays dirty for the request that kept its blocks."""
    with rig_of(blocks(8)) as rig:
        one, other = open_cache(rig, id=9), open_cache(rig, id=9)
        assert one.resize(8)
        assert other.resize(8)
        assert other.resize(0)
        assert rig.manager.get_dirty_stats_kv_cache_ids() == {9}
        rig.manager.mark_stats_dirty(9)
        assert one.resize(0)
        assert rig.manager.get_dirty_stats_kv_cache_ids() == set()


def test_a_mark_by_hand_does_not_outlive_an_exclusion() -> None:
    """An excluded id is never dirty."""
    with rig_of(blocks(8)) as rig:
        rig.manager.mark_stats_dirty(3)
        rig.manager.mark_stats_excluded(3)
        rig.manager.mark_stats_dirty(3)
        assert rig.manager.get_dirty_stats_kv_cache_ids() == set()


def test_the_end_of_an_exclusion_marks_counts_that_can_be_committed_again() -> None:
    """The id is dirty once more, for each of its requests that has counts, and for no other id."""
    with rig_of(blocks(8)) as rig:
        one, other, empty = open_cache(rig, id=9), open_cache(rig, id=9), open_cache(rig, id=8)
        assert one.resize(8)
        rig.manager.mark_stats_excluded(9)
        rig.manager.mark_stats_excluded(8)
        assert other.resize(8)
        rig.manager.clear_stats_excluded(9)
        rig.manager.clear_stats_excluded(8)
        assert rig.manager.get_dirty_stats_kv_cache_ids() == {9}
        assert not one.commit_pending_stats().empty
        assert rig.manager.get_dirty_stats_kv_cache_ids() == {9}
        assert not other.commit_pending_stats().empty
        assert empty.commit_pending_stats().empty
        assert rig.manager.get_dirty_stats_kv_cache_ids() == set()
