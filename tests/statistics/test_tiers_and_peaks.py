"""From which tier reused tokens had to be brought, and the largest occupation between two readings."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_cache_manager_v2 import (
    GPU_LEVEL,
    CacheLevel,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCache,
    LifeCycleId,
    LogicError,
    PoolGroupPeakBlockStats,
    ReusedBlocksByLevel,
    introspection,
)
from tests.statistics.helpers import blocks, forget, iteration, open_cache, rig_of, seed, suspended_cache
from tests.support import inside
from tests.support.engine import Token
from tests.support.models import GRAIN, Kind, hybrid, model, small, ssm
from tests.support.rig import DISK, GPU, HOST, Rig, toks


def test_all_on_the_gpu_then_most_on_the_host() -> None:
    """4 blocks on the GPU: all tokens are the GPU's. Shrunk to 1 block: 3 are the host's, and as many are onboarded later."""
    with rig_of(blocks(4, host=4)) as rig:
        manager = rig.manager
        seed(rig, 0, 16)
        cache = suspended_cache(rig, toks(0, 16))
        assert cache.cached_tokens_by_level == [16, 0]
        assert cache._get_last_cached_token_level() == GPU
        cache.close()
        assert manager.resize(GPU_LEVEL, GRAIN)
        cache = suspended_cache(rig, toks(0, 16))
        assert cache.cached_tokens_by_level == [4, 12]
        assert cache._get_last_cached_token_level() == HOST
        assert manager.resize(GPU_LEVEL, 4 * GRAIN)
        forget(rig)
        assert cache.resume(rig.stream)
        cache.commit_pending_stats()
        assert iteration(rig).iter_onboard_blocks == 3
        assert manager.get_and_reset_iteration_cached_tokens_by_level() == [4, 12]
        assert manager.get_and_reset_iteration_cached_tokens_by_level() == [0, 0]
        assert manager.get_and_reset_iteration_reused_blocks_by_level() == {LifeCycleId(0): ReusedBlocksByLevel([1, 3], [0, 0])}
        assert manager.get_and_reset_iteration_reused_blocks_by_level() == {}


def test_three_tiers(tmp_path: Path) -> None:
    """160 tokens in blocks of 32: 64 from the GPU, 64 from the host, 32 from the disk."""
    with rig_of(blocks(5, host=2, disk=(str(tmp_path), 2), tokens_per_block=32)) as rig:
        seed(rig, 0, 160)
        assert rig.manager.resize(GPU_LEVEL, 2 * GRAIN)
        cache = suspended_cache(rig, toks(0, 160))
        assert cache.cached_tokens_by_level == [64, 64, 32]
        assert cache._get_last_cached_token_level() == DISK
        assert suspended_cache(rig, toks(0, 64))._get_last_cached_token_level() == GPU
        assert suspended_cache(rig, toks(500, 564))._get_last_cached_token_level() is None
        part = suspended_cache(rig, toks(0, 150))
        assert part.cached_tokens_by_level == [64, 64, 22]
        for one in (cache, part):
            one.commit_pending_stats()
        assert rig.manager.get_and_reset_iteration_cached_tokens_by_level() == [128, 128, 54]
        by_level = rig.manager.get_and_reset_iteration_reused_blocks_by_level()[LifeCycleId(0)]
        assert by_level == ReusedBlocksByLevel([4, 4, 1], [0, 0, 1])


def test_a_block_is_credited_to_the_coldest_page_that_it_loads() -> None:
    """Full attention on the GPU and a window page on the host, or the other way round: the block is the host's."""
    with rig_of(blocks(13, ["full", (16, 0)], host=13)) as rig:
        seed(rig, 0, 16)
        hog = open_cache(rig)
        assert hog.resize(16)  # which takes the 5 free slots and 3 of the 8 pages, the tail's first
        cache = suspended_cache(rig, toks(0, 16))
        levels = list(zip(*[introspection.path_levels(rig.manager, toks(0, 16), index) for index in (0, 1)], strict=True))
        by_block = [max(of_block) for of_block in levels]
        assert sorted(by_block) == [0, 0, 1, 1]
        assert levels[:2] == [(0, 0), (0, 0)]
        assert sorted(levels[2]) == [0, 1], "only one of its pages was pushed out"
        assert levels[3] == (1, 1)
        assert cache.cached_tokens_by_level == [4 * by_block.count(0), 4 * by_block.count(1)]


def test_what_a_window_does_not_load_is_credited_to_its_tier() -> None:
    """Window 8 of 16 tokens, all on the host: the half that nothing loads is the host's too."""
    with rig_of(blocks(8, [(8, 0)], host=8)) as rig:
        seed(rig, 0, 16)
        hog = open_cache(rig)
        assert hog.resize(32)
        hog.close()
        cache = suspended_cache(rig, toks(0, 16))
        assert cache.num_committed_tokens == 16
        assert cache.cached_tokens_by_level == [0, 16]


def test_stale_blocks_are_credited_where_their_pages_lie() -> None:
    """Two windows, 24 tokens: a block that one window loads counts by that page; one that none loads by its coldest cached page."""
    with rig_of(blocks(12, [(8, 0), (16, 0)], host=12)) as rig:
        seed(rig, 0, 24)
        for taken in (0, 1, 4, 8, 12):
            if taken:
                open_cache(rig).resize(taken * 2)
            levels = [introspection.path_levels(rig.manager, toks(0, 24), index) for index in (0, 1)]
            cache = suspended_cache(rig, toks(0, 24))
            assert cache.num_committed_tokens == 24
            expected = [0, 0]
            for ordinal in range(6):
                loading = [levels[index][ordinal] for index, first in ((0, 4), (1, 2)) if ordinal >= first]
                expected[max([*(loading or (levels[0][ordinal], levels[1][ordinal])), 0])] += 4
            assert cache.cached_tokens_by_level == expected
            cache.close()


def test_a_model_without_attention_is_credited_to_its_snapshot() -> None:
    """Recurrent layers only: all reused tokens come from where the snapshot lies."""
    tiers = [GpuCacheTierConfig(2 * GRAIN), HostCacheTierConfig(4 * GRAIN)]
    with Rig(model([ssm(0, GRAIN)], tokens_per_block=4, tiers=tiers, max_util=1.0), engine=False) as rig:
        cache = open_cache(rig)
        assert cache.resize(8)
        cache.commit(toks(0, 8))
        cache.close()
        hogs = [open_cache(rig), open_cache(rig)]
        cache = suspended_cache(rig, toks(0, 8))
        assert cache.num_committed_tokens == 8
        assert cache.cached_tokens_by_level == [0, 8]
        for hog in hogs:
            hog.close()


@pytest.mark.parametrize("kinds", [("full",), ((8, 0),), ("full", (8, 4)), ((8, 0), (16, 4))])
@pytest.mark.parametrize("length", [1, 3, 4, 9, 16, 23, 24])
def test_the_tiers_sum_to_the_reuse_length(kinds: tuple[Kind, ...], length: int) -> None:
    """Whatever lies where: tokens by level sum to the reuse length, blocks by level to the reused blocks."""
    with rig_of(blocks(6 * len(kinds), kinds, host=12)) as rig:
        manager = rig.manager
        seed(rig, 0, 24)
        seed(rig, 100, 116)
        cache = suspended_cache(rig, toks(0, length))
        assert sum(cache.cached_tokens_by_level) == cache.num_committed_tokens
        reused = cache.commit_pending_stats().reused_blocks
        tables = manager.get_and_reset_iteration_reused_blocks_by_level().values()
        assert sum(sum(table.full) + sum(table.partial) for table in tables) == reused
        assert sum(manager.get_and_reset_iteration_cached_tokens_by_level()) == cache.num_committed_tokens


# --- snapshots


@pytest.mark.parametrize(
    ("cached", "query", "numbers"),
    [(0, 48, (1, 0, 1, 0, 48, 0, 0)), (32, 48, (1, 1, 0, 32, 16, 1, 0)), (48, 64, (1, 1, 0, 48, 16, 0, 1))],
)
def test_snapshot_lookups(cached: int, query: int, numbers: tuple[int, ...]) -> None:
    """(lookups, hits, misses, reused, unreused, aligned, unaligned); the expected prompt length never enters."""
    with Rig(hybrid(4, 8, tokens_per_block=32), engine=False) as rig:
        if cached:
            seed(rig, 0, cached)
        cache = suspended_cache(rig, toks(0, query), id=101, expected=query + 17)
        manager = rig.manager
        assert manager.get_dirty_stats_kv_cache_ids() == {101}
        assert manager.get_and_reset_ssm_snapshot_iteration_stats() == {}
        cache.commit_pending_stats()
        assert manager.get_dirty_stats_kv_cache_ids() == set()
        (delta,) = manager.get_and_reset_ssm_snapshot_iteration_stats().values()
        assert tuple(vars(delta).values()) == numbers
        assert manager.get_and_reset_ssm_snapshot_iteration_stats() == {}


def test_no_lookup_without_tokens_and_none_after_a_discard() -> None:
    """An empty prompt and none at all look nothing up; a discarded look-up leaves no residue."""
    with Rig(hybrid(4, 8), engine=False) as rig:
        manager = rig.manager
        nothing: list[list[Token] | None] = [None, []]
        for tokens in nothing:
            suspended_cache(rig, tokens, id=1).commit_pending_stats()
            assert manager.get_dirty_stats_kv_cache_ids() == set()
        cache = suspended_cache(rig, toks(0, 8), id=2)
        assert manager.get_dirty_stats_kv_cache_ids() == {2}
        cache.discard_pending_stats()
        assert manager.get_dirty_stats_kv_cache_ids() == set()
        cache.commit_pending_stats()
        assert manager.get_and_reset_ssm_snapshot_iteration_stats() == {}


# --- peaks


def peaks(rig: Rig, level: int = 0) -> PoolGroupPeakBlockStats:
    (only,) = rig.manager.get_and_reset_iteration_peak_block_stats(CacheLevel(level))
    return only


def test_a_spike_between_two_readings_is_seen() -> None:
    """Each field for itself: most available, most unavailable, most evictable. The next window starts from the values of now."""
    with rig_of(blocks(8, host=8)) as rig:
        seed(rig, 0, 8)
        assert peaks(rig) == PoolGroupPeakBlockStats(8, 0, 2)
        cache = open_cache(rig, toks(0, 8))
        assert cache.resize(24)
        cache.suspend()
        cache.close()
        assert peaks(rig) == PoolGroupPeakBlockStats(8, 6, 6)
        assert peaks(rig) == PoolGroupPeakBlockStats(8, 0, 2)


def test_peaks_are_noted_by_every_change_not_only_by_commits() -> None:
    """Growth without a commit of statistics, a prefetch, a resize of a level: each is seen although it is over by the reading."""
    with rig_of(blocks(4, host=4)) as rig:
        cache = open_cache(rig)
        assert cache.resize(12)
        assert cache.resize(4)
        assert peaks(rig).unavailable == 3
        cache.suspend()
        hog = open_cache(rig)
        assert hog.resize(16)
        hog.close()
        assert peaks(rig, 1).unavailable == 1, "it was offloaded, and is held on the last level"
        assert cache.prefetch(GPU_LEVEL)
        assert peaks(rig, 1).unavailable == 1
        assert peaks(rig, 1) == PoolGroupPeakBlockStats(4, 0, 0)
        assert rig.manager.resize(HOST, 8 * GRAIN)
        assert rig.manager.resize(HOST, 4 * GRAIN)
        assert peaks(rig, 1).available == 8
        assert peaks(rig, 1).available == 4


def test_peaks_of_all_levels_at_once() -> None:
    """By level, then by pool group; reading resets them all."""
    with Rig(hybrid(2, 4, host_slots=4), engine=False) as rig:
        cache = open_cache(rig)
        assert cache.resize(8)
        cache.close()
        first = rig.manager.get_and_reset_iteration_peak_block_stats_by_level()
        assert [len(groups) for groups in first] == [2, 2]
        assert [group.unavailable for group in first[0]] == [2, 1]
        second = rig.manager.get_and_reset_iteration_peak_block_stats_by_level()
        assert [group.unavailable for group in second[0]] == [0, 0]


def test_without_statistics_the_peak_is_what_readings_see() -> None:
    """Off: nothing is noted between readings; the reading itself still gives the values of now."""
    with rig_of(blocks(4, stats=False)) as rig:
        cache = open_cache(rig)
        assert cache.resize(16)
        assert cache.resize(4)
        assert peaks(rig) == PoolGroupPeakBlockStats(4, 1, 0)
        cache.close()
        assert peaks(rig).unavailable == 1, "where the window began"
        assert peaks(rig) == PoolGroupPeakBlockStats(4, 0, 0)


def test_storage_statistics_name_slot_sizes() -> None:
    with Rig(small(4), engine=False) as rig:
        (stats,) = rig.manager.get_storage_statistics()
        assert stats.total == stats.free == stats.available == 4
        assert (stats.evictable, stats.unavailable) == (0, 0)
        assert list(stats.slot_sizes) == [rig.manager.get_page_stride(*rig.manager.all_buffer_ids[0])]


def test_a_call_that_raises_leaves_its_peaks_behind() -> None:
    """A forgotten cache is closed by the next call, even if that call is refused: what it gave up is seen although it is taken
    again before the reading."""
    with rig_of(blocks(4)) as rig:
        cache: KVCache | None = rig.manager.create_kv_cache()
        assert cache is not None
        assert cache.resume(rig.stream)
        assert cache.resize(16)
        other = open_cache(rig)
        forget(rig)
        cache = None
        with pytest.warns(ResourceWarning, match="dropped without close"), pytest.raises(LogicError, match="SUSPENDED"):
            other.resume()
        assert other.resize(16)
        assert peaks(rig) == PoolGroupPeakBlockStats(4, 4, 0)


def test_storage_statistics_are_the_books() -> None:
    """Per pool group: total, free, evictable, and what follows from them."""
    with Rig(small(8, host_slots=4)) as rig:
        rig.seed(toks(0, 8))
        rig.take(3)
        for level in (GPU, HOST):
            (stats,) = rig.manager.get_storage_statistics(level)
            assert (stats.total, stats.free, stats.evictable, stats.unavailable) == tuple(inside.counts(rig.manager, level))
            assert stats.available == stats.free + stats.evictable
        assert list(rig.manager.get_life_cycle_pool_group_indices()) == [0]
