"""A reading of everything that is counted, which takes nothing from whoever reads changes."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import GPU_LEVEL, KVCache, LifeCycleId, LogicError, ReusedBlocksByLevel
from tests.statistics.helpers import BLOCK, blocks, open_cache, rig_of, suspended_cache
from tests.support.models import GRAIN
from tests.support.rig import Rig, toks


def reuse_from_two_levels(rig: Rig) -> KVCache:
    """16 tokens are cached, then found: 4 on the GPU and 12 on the host, which are loaded by a cache that suspends and resumes."""
    rig.seed(toks(0, 16))
    assert rig.manager.resize(GPU_LEVEL, GRAIN)
    cache = suspended_cache(rig, toks(0, 16))
    assert rig.manager.resize(GPU_LEVEL, 5 * GRAIN)
    assert cache.resume(rig.stream)
    cache.suspend()
    assert cache.resume(rig.stream)
    cache.commit_pending_stats()
    return cache


def changes(rig: Rig) -> object:
    manager = rig.manager
    return (
        manager.get_and_reset_iteration_stats(),
        manager.get_and_reset_iteration_reused_blocks_by_level(),
        manager.get_and_reset_iteration_cached_tokens_by_level(),
        manager.get_and_reset_iteration_suspend_resume_stats(),
        manager.get_and_reset_iteration_disk_prefetch_blocks(),
    )


@pytest.mark.parametrize("readings", [(), (0,), (1,), (0, 1)])
def test_a_reading_takes_nothing_from_a_reader_of_changes(readings: tuple[int, ...]) -> None:
    """Readings after either of two rounds: the changes are those of a manager that is never read, and totals those of both."""
    with rig_of(blocks(5, host=8)) as read, rig_of(blocks(5, host=8)) as unread:
        for number in range(2):
            for rig in (read, unread):
                reuse_from_two_levels(rig).close()
            if number in readings:
                read.manager.read_statistics()
            if number == 0 and len(readings) < 2:
                assert changes(read) == changes(unread)
        assert changes(read) == changes(unread)
        assert read.manager.read_statistics().requests == unread.manager.read_statistics().requests
        assert changes(read) == changes(unread)


def test_a_reading_has_what_was_counted() -> None:
    """Totals of the requests, moves, look-ups and slots, of one moment."""
    with rig_of(blocks(5, host=8)) as rig:
        reuse_from_two_levels(rig)
        before = rig.manager.read_statistics()
        assert before.requests.reused_blocks == [ReusedBlocksByLevel([1, 3], [0, 0])]
        assert before.requests.cached_tokens_by_level == [BLOCK, 3 * BLOCK]
        assert (before.requests.suspensions, before.requests.resumes) == (1, 1)
        assert before.movement.pages_moved(1, 0) == 3
        assert (before.lookups.reused_tokens, before.lookups.lookup_tokens) == (16, 16)
        assert (before.open_requests, before.active_requests, before.cached_blocks, before.poisoned) == (1, 1, 4, False)
        assert before.storage == (
            tuple(rig.manager.get_storage_statistics(0)),
            tuple(rig.manager.get_storage_statistics(1)),
        )
        missing = open_cache(rig, toks(50, 54))
        assert missing.resize(4)
        missing.commit_pending_stats()
        after = rig.manager.read_statistics()
        assert after.requests.missed_blocks[LifeCycleId(0)] == before.requests.missed_blocks[0] + 1
        assert before.movement.pages_moved(1, 0) == 3, "a reading does not change"
    with pytest.raises(LogicError, match="read_statistics"):
        rig.manager.read_statistics()
