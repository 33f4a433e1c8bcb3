"""Statistics: what is counted, once, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_cache_manager_v2 import KVCacheManagerConfig
from tests.support import inside
from tests.support.rig import GPU, HOST, Rig, hybrid, small, toks


def iteration(rig: Rig, layer: int = 0) -> dict[str, int]:
    """What the layer's group counted since the last reading; fields of 0 left out."""
    for group, delta in rig.manager.get_and_reset_iteration_stats().items():
        if group == rig.group(layer):
            return {name: value for name, value in vars(delta).items() if value}
    return {}


@pytest.mark.parametrize("undo", ["shrink", "discard"])
def test_work_undone_is_not_counted(undo: str) -> None:
    """Growth that is taken back in the same step reports nothing; a later real one counts once."""
    with Rig(small(8)) as rig:
        cache = rig.create(None, id=5)
        assert cache.resume(rig.stream)
        assert cache.resize(4)
        cache.commit_pending_stats()
        rig.manager.get_and_reset_iteration_stats()
        assert cache.resize(8)
        if undo == "shrink":
            assert cache.resize(4)
        else:
            cache.discard_pending_stats()
            assert cache.resize(4)
        delta = cache.commit_pending_stats()
        assert delta.empty
        assert iteration(rig) == {}
        assert cache.resize(8)
        delta = cache.commit_pending_stats()
        assert (delta.alloc_total_blocks, delta.alloc_new_blocks) == (1, 1)
        assert iteration(rig)["iter_alloc_total_blocks"] == 1


def test_allocation_prompt_and_generation() -> None:
    """8 tokens of prompt, 4 a block: 2 taken and 2 missed; then one of generation, which cannot be missed."""
    with Rig(small(8)) as rig:
        request = rig.request(toks(0, 8))
        assert request.resume()
        assert request.advance(toks(0, 8))
        delta = request.cache.commit_pending_stats()
        assert (delta.alloc_total_blocks, delta.alloc_new_blocks, delta.missed_blocks, delta.reused_blocks) == (2, 2, 2, 0)
        rig.manager.get_and_reset_iteration_stats()
        assert request.advance(toks(8, 9))
        delta = request.cache.commit_pending_stats()
        assert (delta.alloc_total_blocks, delta.missed_blocks) == (1, 0)
        assert iteration(rig)["iter_gen_alloc_blocks"] == 1


def test_a_partial_hit_is_counted() -> None:
    """9 tokens cached, 10 asked: reused 3 (2 whole blocks, 1 partial), taken 1, copied 1, missed 0."""
    with Rig(small(8)) as rig:
        rig.seed(toks(0, 9))
        rig.manager.get_and_reset_iteration_stats()
        request = rig.start(toks(0, 10))
        assert request.cache.resize(10)
        delta = request.cache.commit_pending_stats()
        assert (delta.reused_blocks, delta.alloc_total_blocks, delta.missed_blocks) == (3, 1, 0)
        counted = iteration(rig)
        assert counted["iter_full_reused_blocks"] == 2
        assert counted["iter_partial_reused_blocks"] == 1
        assert counted["iter_intra_device_copy_blocks"] == 1


def test_dirty_ids() -> None:
    """An id is dirty from the first count to the commit or discard; a closed cache is never dirty."""
    with Rig(small(8)) as rig:
        cache = rig.create(toks(0, 8), id=101)
        assert cache.resume(rig.stream)
        assert cache.resize(8)
        assert rig.manager.get_dirty_stats_kv_cache_ids() == {101}
        cache.commit_pending_stats()
        assert rig.manager.get_dirty_stats_kv_cache_ids() == set()
        assert cache.resize(12)
        cache.discard_pending_stats()
        assert rig.manager.get_dirty_stats_kv_cache_ids() == set()
        assert cache.resize(16)
        assert rig.manager.get_dirty_stats_kv_cache_ids() == {101}
        cache.close()
        assert rig.manager.get_dirty_stats_kv_cache_ids() == set()


def test_reading_resets() -> None:
    """A second reading is empty; the committed totals only grow."""
    with Rig(small(8)) as rig:
        totals = []
        for tag in range(3):
            request = rig.start(toks(tag * 100, tag * 100 + 8))
            assert request.advance(toks(tag * 100, tag * 100 + 8))
            request.cache.commit_pending_stats()
            assert iteration(rig)
            assert iteration(rig) == {}
            totals.append(rig.manager.get_committed_stats().alloc_total_blocks)
            request.close()
        assert totals == [2, 4, 6]


def test_stale_blocks_are_not_reused() -> None:
    """Window 8, 16 tokens cached, 15 asked: what is held counts, 1 whole block and 1 partial; 1 taken, by a copy."""
    with Rig(small(8, kinds=[(8, 0)])) as rig:
        rig.seed(toks(0, 16))
        rig.manager.get_and_reset_iteration_stats()
        request = rig.start(toks(0, 15))
        assert request.cache.resize(16)
        delta = request.cache.commit_pending_stats()
        assert (delta.reused_blocks, delta.alloc_total_blocks) == (2, 1)
        counted = iteration(rig)
        assert (counted["iter_full_reused_blocks"], counted["iter_partial_reused_blocks"]) == (1, 1)
        assert counted["iter_intra_device_copy_blocks"] == 1


def test_movement_of_states_is_seen_and_not_mixed_in() -> None:
    """Pages of both kinds go down and come up: blocks and bytes for each life cycle; the totals of allocation are attention's
    alone."""
    with Rig(hybrid(2, 4, host_slots=8)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 8))
        request.suspend()
        hogs = [rig.start(), rig.start()]
        assert hogs[0].cache.resize(16)
        rig.manager.get_and_reset_iteration_stats()
        for hog in hogs:
            hog.close()
        totals = rig.manager.get_committed_stats()
        assert request.resume()
        rig.settle()
        deltas = {int(group): delta for group, delta in rig.manager.get_and_reset_iteration_stats().items()}
        assert deltas[0].iter_onboard_blocks == 2
        assert deltas[1].iter_onboard_blocks == 1
        assert min(delta.iter_onboard_bytes for delta in deltas.values()) > 0
        assert rig.manager.get_committed_stats().alloc_total_blocks - totals.alloc_total_blocks == 2


def test_dropped_from_the_host_before_reuse() -> None:
    """Two pages sink; one is loaded again, the other is pushed out of the host: that one counts as wasted, one page of bytes."""
    with Rig(small(2, host_slots=2)) as rig:
        rig.seed(toks(0, 4))
        rig.seed(toks(100, 104))
        rig.take(2).close()
        rig.start(toks(0, 4)).close()
        rig.manager.get_and_reset_iteration_stats()
        for tag in range(5, 8):
            rig.seed(toks(100 * tag, 100 * tag + 8))
            if rig.probe(toks(100, 104)) == 0:
                break
        counted = iteration(rig)
        assert counted["iter_host_dropped_blocks"] >= 1
        size = rig.manager.get_page_stride(*rig.manager.all_buffer_ids[0])
        assert counted["iter_host_dropped_bytes"] == counted["iter_host_dropped_blocks"] * size


def test_preemption_is_no_hit() -> None:
    """8 tokens reused once; suspended and resumed three times: still once; the preemptions have counters of their own."""
    with Rig(small(8)) as rig:
        rig.seed(toks(0, 8))
        rig.manager.get_and_reset_iteration_suspend_resume_stats()
        request = rig.start(toks(0, 8))
        reused = request.cache.commit_pending_stats().reused_blocks
        for _ in range(3):
            request.suspend()
            assert request.resume()
            reused += request.cache.commit_pending_stats().reused_blocks
        assert reused == 2
        assert rig.manager.get_and_reset_iteration_suspend_resume_stats() == (3, 3)
        assert rig.manager.get_and_reset_iteration_suspend_resume_stats() == (0, 0)


def test_peaks() -> None:
    """A spike between two readings is seen; the next window starts from what is there then."""
    with Rig(small(8, host_slots=4)) as rig:
        rig.manager.get_and_reset_iteration_peak_block_stats(GPU)
        rig.take(6).close()
        peak = rig.manager.get_and_reset_iteration_peak_block_stats(GPU)[0]
        assert (peak.unavailable, peak.available) == (6, 8)
        after = rig.manager.get_and_reset_iteration_peak_block_stats(GPU)[0]
        assert (after.unavailable, after.available) == (0, 8)
        assert rig.manager.get_and_reset_iteration_peak_block_stats(HOST)[0].unavailable == 0


def without_stats(config: KVCacheManagerConfig) -> KVCacheManagerConfig:
    return replace(config, enable_stats=False)


def test_statistics_off() -> None:
    """Everything reads 0, and no id is ever dirty."""
    with Rig(without_stats(small(8, host_slots=8))) as rig:
        request = rig.start(toks(0, 8))
        assert request.advance(toks(0, 8))
        assert rig.manager.get_dirty_stats_kv_cache_ids() == set()
        assert request.cache.commit_pending_stats().empty
        request.suspend()
        rig.take(8).close()
        assert request.resume()
        assert iteration(rig) == {}
        assert rig.manager.get_committed_stats().empty
        assert rig.manager.get_and_reset_iteration_suspend_resume_stats() == (0, 0)


def test_storage_statistics_are_the_books() -> None:
    """Per pool group: total, free, evictable, and what follows from them."""
    with Rig(small(8, host_slots=4)) as rig:
        rig.seed(toks(0, 8))
        request = rig.start()
        assert request.cache.resize(12)
        for level in (GPU, HOST):
            (stats,) = rig.manager.get_storage_statistics(level)
            assert (stats.total, stats.free, stats.evictable, stats.unavailable) == tuple(inside.counts(rig.manager, level))
            assert stats.available == stats.free + stats.evictable
        assert list(rig.manager.get_life_cycle_pool_group_indices()) == [0]
