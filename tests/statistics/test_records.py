"""The records: deltas that add up, and the face of a manager on which nothing has happened."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

import kv_cache_manager_v2
from kv_cache_manager_v2 import (
    ConfigError,
    KVCacheIterationStatsDelta,
    KVCacheStatsDelta,
    MovementCounters,
    PoolGroupPeakBlockStats,
    ReusedBlocksByLevel,
    SsmSnapshotIterationStatsDelta,
    StorageStatistics,
)
from kv_cache_manager_v2.statistics import StatsDelta
from tests.statistics.helpers import blocks, iteration, open_cache, rig_of

DELTAS: list[StatsDelta] = [
    KVCacheStatsDelta(4, 3, 2, 1),
    KVCacheIterationStatsDelta(4, 3, 2, 1, iter_offload_blocks=7, iter_disk_dropped_blocks=9),
    SsmSnapshotIterationStatsDelta(4, 3, 1, 96, 32, 2, 1),
]


@pytest.mark.parametrize("delta", DELTAS, ids=lambda delta: type(delta).__name__)
def test_deltas_add_subtract_copy_and_clear(delta: StatsDelta) -> None:
    """Field by field; a copy is equal and apart; a cleared delta is empty and equal to a new one."""
    twice = delta.copy()
    assert twice == delta
    twice.add(delta)
    assert vars(twice) == {name: 2 * value for name, value in vars(delta).items()}
    assert twice != delta
    twice.subtract(delta)
    assert twice == delta
    twice.clear()
    assert twice == type(delta)()
    assert [twice.empty, delta.empty] == [True, False]
    assert pickle.loads(pickle.dumps(delta)) == copy.deepcopy(delta) == delta


def test_hit_rates() -> None:
    """3 reused of 4 looked up are 0.75; nothing looked up is 0."""
    assert KVCacheIterationStatsDelta(iter_reused_blocks=3, iter_missed_blocks=1).iter_cache_hit_rate == 0.75
    assert KVCacheIterationStatsDelta().iter_cache_hit_rate == 0.0
    assert SsmSnapshotIterationStatsDelta(iter_snapshot_lookups=4, iter_snapshot_hits=1).iter_snapshot_hit_rate == 0.25
    assert SsmSnapshotIterationStatsDelta().iter_snapshot_hit_rate == 0.0


def test_plain_records() -> None:
    """Equal by value; a storage record derives what is available."""
    assert PoolGroupPeakBlockStats(1, 2, 3) == PoolGroupPeakBlockStats(available=1, unavailable=2, evictable=3)
    assert ReusedBlocksByLevel([1, 0], [0, 1]) == ReusedBlocksByLevel(full=[1, 0], partial=[0, 1])
    stats = StorageStatistics((64,), 10, 3, 2)
    assert (stats.available, stats.unavailable) == (5, 5)


def test_movement_is_summed_over_life_cycles() -> None:
    counters = MovementCounters(2, 3)
    counters.moved[0][0][1] = 3
    counters.moved[1][0][1] = 4
    counters.dropped[1][2] = 5
    assert (counters.pages_moved(0, 1), counters.pages_moved(1, 0)) == (7, 0)
    assert (counters.pages_dropped(2), counters.pages_dropped(0)) == (5, 0)


@pytest.mark.parametrize("enabled", [False, True])
def test_the_fresh_face_is_empty_and_counts_iff_enabled(enabled: bool) -> None:
    """Nothing has happened: all is empty. After 8 tokens of growth, 2 blocks are counted exactly if statistics are on."""
    with rig_of(blocks(4, stats=enabled)) as rig:
        manager = rig.manager
        assert manager.get_committed_stats() == KVCacheStatsDelta()
        assert manager.get_and_reset_iteration_stats() == {}
        assert manager.get_and_reset_ssm_snapshot_iteration_stats() == {}
        assert manager.get_and_reset_iteration_reused_blocks_by_level() == {}
        assert manager.get_and_reset_iteration_cached_tokens_by_level() == [0]
        assert manager.get_and_reset_iteration_disk_prefetch_blocks() == 0
        assert manager.get_and_reset_iteration_suspend_resume_stats() == (0, 0)
        assert manager.get_and_reset_iteration_peak_block_stats() == [PoolGroupPeakBlockStats(4, 0, 0)]
        assert manager.get_dirty_stats_kv_cache_ids() == set()
        cache = open_cache(rig, id=1)
        assert cache.resize(8)
        assert manager.get_dirty_stats_kv_cache_ids() == ({1} if enabled else set())
        taken = 2 if enabled else 0
        assert cache.commit_pending_stats() == KVCacheStatsDelta(taken, taken, 0, taken)
        assert manager.get_committed_stats() == KVCacheStatsDelta(taken, taken, 0, taken)
        delta = iteration(rig)
        assert (delta.iter_alloc_total_blocks, delta.iter_missed_blocks) == (taken, taken)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("number", [0, 11, 2**63, 2**64 - 1])
def test_dirty_and_excluded_ids(enabled: bool, number: int) -> None:
    """The sets work whether or not anything is counted, over the whole unsigned 64-bit range; None is ignored; excluding cleans."""
    with rig_of(blocks(4, stats=enabled)) as rig:
        manager = rig.manager
        for call in (
            manager.mark_stats_dirty,
            manager.clear_stats_dirty,
            manager.mark_stats_excluded,
            manager.clear_stats_excluded,
        ):
            call(None)
        assert not manager.is_stats_excluded(None)
        assert manager.get_dirty_stats_kv_cache_ids() == set()
        manager.mark_stats_dirty(number)
        dirty = manager.get_dirty_stats_kv_cache_ids()
        assert dirty == {number}
        dirty.clear()
        assert manager.get_dirty_stats_kv_cache_ids() == {number}, "the getter gives a copy"
        manager.mark_stats_excluded(number)
        assert manager.is_stats_excluded(number)
        assert manager.get_dirty_stats_kv_cache_ids() == set()
        manager.mark_stats_dirty(number)
        assert manager.get_dirty_stats_kv_cache_ids() == set(), "an excluded id is never dirty"
        manager.clear_stats_excluded(number)
        assert not manager.is_stats_excluded(number)
        manager.mark_stats_dirty(number)
        manager.clear_stats_dirty(number)
        assert manager.get_dirty_stats_kv_cache_ids() == set()


def test_the_fields_that_engines_copy() -> None:
    """Fifteen names, each a field, under both names by which engines ask for them; ours are more."""
    names = kv_cache_manager_v2._KV_CACHE_ITERATION_STATS_DELTA_FIELDS
    assert names == KVCacheIterationStatsDelta._field_names
    assert len(set(names)) == 15
    ours = [field.name for field in dataclasses.fields(KVCacheIterationStatsDelta)]
    assert set(ours) - set(names) == {"iter_gpu_dropped_blocks", "iter_disk_dropped_blocks", "iter_lost_blocks"}


def test_reused_blocks_by_level_add_up() -> None:
    """Level by level; lists grow to the longer one; the other table stays."""
    total = ReusedBlocksByLevel()
    assert total.empty is True
    other = ReusedBlocksByLevel([1, 2], [0, 0, 3])
    total.add(other)
    total.add(ReusedBlocksByLevel([1], []))
    assert (total.full, total.partial, total.empty) == ([2, 2], [0, 0, 3], False)
    assert other == ReusedBlocksByLevel([1, 2], [0, 0, 3])
    assert ReusedBlocksByLevel([0, 0], [0]).empty is True
    with pytest.raises(ConfigError, match="other"):
        total.add([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["snapshot_lookups", "snapshot_hits", "reused_tokens", "unaligned_snapshot_hits", "hit_rate"])
def test_old_names_of_snapshot_fields_warn(name: str) -> None:
    """For one release the fields can be read by their names without `iter_`; what never was a field is an AttributeError."""
    delta = SsmSnapshotIterationStatsDelta(4, 3, 1, 96, 32, 2, 1)
    current = "iter_snapshot_hit_rate" if name == "hit_rate" else f"iter_{name}"
    with pytest.warns(DeprecationWarning, match=f"{name} is now {current}"):
        assert getattr(delta, name) == getattr(delta, current)
    assert not hasattr(delta, "lookups")
    assert not hasattr(delta, "_field")
    with rig_of(blocks(2)) as rig, pytest.warns(DeprecationWarning, match="get_and_reset_ssm_snapshot_iteration_stats"):
        assert rig.manager.get_and_reset_iteration_ssm_snapshot_stats() == {}
