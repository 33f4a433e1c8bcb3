"""The tuner: averages, targets, and when an adjustment is due."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kv_cache_manager_v2.config import DiskCacheTierConfig, HostCacheTierConfig, KVCacheManagerConfig
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import CacheLevel
from kv_cache_manager_v2.layout.pools import build_layout
from kv_cache_manager_v2.layout.sizing import normalised, resized, size_levels, weights_from_length
from kv_cache_manager_v2.layout.tuning import MovingAverage, Tuner
from tests.support.models import KIB, MIB, attention, batch, model
from tests.support.rig import Clock

GPU, HOST, DISK = CacheLevel(0), CacheLevel(1), CacheLevel(2)


def two_groups(**changes: object) -> KVCacheManagerConfig:
    """Full attention and a window with slots of their own; any number of samples is enough and nothing has to cool down."""
    config = model([attention(0, 64 * KIB), attention(1, 128 * KIB, window=64)], gpu=64 * MIB, typical_step=batch(4, 1024, 1023))
    eager: dict[str, object] = {
        "rebalance_min_sampled_kv_caches": 1,
        "rebalance_cooldown_secs": 0.0,
        "rebalance_target_ratio_update_interval": 1,
        **changes,
    }
    return dataclasses.replace(config, **eager)  # type: ignore[arg-type]


def make_tuner(config: KVCacheManagerConfig, clock: Clock | None = None) -> Tuner:
    layout = build_layout(config)
    return Tuner(layout, config, size_levels(layout, config), Clock() if clock is None else clock)


def test_moving_average() -> None:
    """w = 1 + d * w; avg += (x - avg) / w: the first samples as in a plain mean, later ones fade."""
    average = MovingAverage(0.5)
    average.add(8.0)
    assert (average.weight, average.value) == (1.0, 8.0)
    average.add(2.0)
    assert (average.weight, average.value) == (1.5, 4.0)
    average.add(11.0)
    assert (average.weight, average.value) == (1.75, 8.0)


def test_gpu_target() -> None:
    """The GPU aims at one request of root-mean-square capacity and history."""
    tuner = make_tuner(two_groups())
    for _number in range(3):
        tuner.sample_closed(320.0, 300.0)
    assert tuner.gpu_weights == weights_from_length(tuner.layout, 300, 320)
    assert tuner.cold_weights is None


def test_long_requests_count_more() -> None:
    """Squares are averaged: 100 and 700 tokens aim at 500, not at 400."""
    tuner = make_tuner(two_groups(rebalance_moving_average_decay=1 - 1e-12))
    tuner.sample_closed(100.0, 100.0)
    tuner.sample_closed(700.0, 700.0)
    assert tuner.gpu_weights == weights_from_length(tuner.layout, 500, 500)


def test_cold_target() -> None:
    """Colder levels aim at a request of the average reused length; no reuse says nothing."""
    tuner = make_tuner(two_groups())
    tuner.sample_reused(0)
    tuner.sample_closed(320.0, 300.0)
    assert tuner.cold_weights is None
    tuner.sample_reused(1000)
    tuner.sample_closed(320.0, 300.0)
    average = MovingAverage(0.9999)
    average.add(0.0)
    average.add(1000.0)
    assert tuner.cold_weights == weights_from_length(tuner.layout, round(average.value), round(average.value))


def test_update_interval() -> None:
    """Targets are computed at every n-th closed request."""
    tuner = make_tuner(two_groups(rebalance_target_ratio_update_interval=3))
    tuner.sample_closed(320.0, 300.0)
    tuner.sample_closed(320.0, 300.0)
    assert tuner.gpu_weights is None
    tuner.sample_closed(320.0, 300.0)
    assert tuner.gpu_weights is not None


def test_no_sample_no_adjustment() -> None:
    """Without targets there is nothing to adjust to, although zero samples are required."""
    assert not make_tuner(two_groups(rebalance_min_sampled_kv_caches=0)).need_adjustment()


def test_minimum_of_samples() -> None:
    """As many samples as the minimum already allow an adjustment, one less does not."""
    tuner = make_tuner(two_groups(rebalance_min_sampled_kv_caches=3))
    for expected in (False, False, True):
        tuner.sample_closed(64.0, 0.0)
        assert tuner.need_adjustment() == expected


def test_cooldown() -> None:
    """An adjustment waits for the cooldown since the last one, or since the start."""
    clock = Clock()
    tuner = make_tuner(two_groups(rebalance_cooldown_secs=10.0), clock)
    tuner.sample_closed(64.0, 0.0)
    assert not tuner.need_adjustment()
    clock.now += 9.5
    assert not tuner.need_adjustment()
    clock.now += 0.5
    assert tuner.need_adjustment()
    tuner.adjusted(clock.now)
    assert not tuner.need_adjustment()
    clock.now += 10.0
    assert tuner.need_adjustment()


def test_threshold() -> None:
    """The same mismatch is one at 1.25 and none at 10."""
    for threshold, expected in ((1.25, True), (10.0, False)):
        tuner = make_tuner(two_groups(rebalance_ratio_threshold=threshold))
        tuner.sample_closed(64.0, 0.0)
        assert tuner.need_adjustment() == expected


def test_boundary_of_the_threshold() -> None:
    """A share that is off by exactly the threshold is a mismatch: it must lie strictly within."""
    config = model([attention(0, 2 * MIB), attention(1, 4 * MIB, window=1)], gpu=24 * MIB, ratio=[0.5, 0.5])
    for threshold, expected in ((1.4, True), (1.5, True), (1.6, False)):
        tuner = make_tuner(dataclasses.replace(config, rebalance_ratio_threshold=threshold))
        assert tuner.sizings[GPU].slots == [6, 3]
        tuner.set_gpu_weights([2 / 3, 1 / 3])  # 8 and 2 slots: shares change by 4/3 and by 2/3
        assert tuner.target_sizing(GPU).slots == [8, 2]
        assert tuner.mismatched(GPU) == expected


def test_targets_are_updated_once_an_interval_has_closed() -> None:
    """Counted since the latest update, whatever the number of closed requests was set to."""
    tuner = make_tuner(two_groups(rebalance_target_ratio_update_interval=10))
    updated: list[bool] = []
    for count in (1003, 1017, 1031):
        tuner.num_samples = count
        for _close in range(2):
            tuner.gpu_weights = None
            tuner.sample_closed(64.0, 0.0)
            updated.append(tuner.target_weights(GPU) is not None)
    assert updated == [True, False] * 3, "the second close of each is no interval"


def test_an_impossible_division_is_no_mismatch() -> None:
    """Shares that give a pool group more slots than int32 page indices can name: no adjustment, and no error from a question."""
    config = model([attention(0, 16), attention(1, 2 * MIB, window=64)], gpu=1 << 37, ratio=[0.1, 0.9])
    tuner = make_tuner(dataclasses.replace(config, rebalance_min_sampled_kv_caches=0, rebalance_cooldown_secs=0.0))
    tuner.set_gpu_weights([0.9, 0.1])
    with pytest.raises(ConfigError, match="int32"):
        resized(tuner.layout, tuner.sizings[GPU], None, [0.9, 0.1])
    assert tuner.target_sizing(GPU) is tuner.sizings[GPU]
    assert not tuner.need_adjustment()


def test_adjusting_ends_the_mismatch() -> None:
    """Once a level has its target sizing, it is not mismatched; skew moves memory, and the quota stays."""
    tuner = make_tuner(two_groups())
    before = tuner.sizings[GPU]
    tuner.sample_closed(64.0, 0.0)
    after = tuner.target_sizing(GPU)
    assert after.slots[0] < before.slots[0]
    assert after.slots[1] > before.slots[1]
    assert after.quota == before.quota
    tuner.set_sizing(GPU, after)
    tuner.adjusted(0.0)
    assert not tuner.need_adjustment()


def test_a_floor_is_no_mismatch() -> None:
    """A level that has its floors and no more is not reported as a mismatch."""
    config = dataclasses.replace(two_groups(), constraints=[batch(60, 64, 0)])
    layout = build_layout(config)
    floors = size_levels(layout, config)[0].floors
    config.cache_tiers[0].quota = sum([floor * layout.slot_bytes(group) for group, floor in enumerate(floors)])
    tuner = make_tuner(config)
    tuner.sample_closed(100_000.0, 99_000.0)  # asks for almost everything for full attention
    assert tuner.gpu_weights is not None
    assert tuner.gpu_weights[0] > 0.9
    assert not tuner.need_adjustment()


def test_first_and_last_level_decide(tmp_path: Path) -> None:
    """The GPU and the last level are looked at, not those between."""
    colder = [HostCacheTierConfig(64 * MIB), DiskCacheTierConfig(64 * MIB, str(tmp_path))]
    config = two_groups()
    config = dataclasses.replace(config, cache_tiers=[*config.cache_tiers, *colder])
    tuner = make_tuner(config)
    tuner.sample_reused(64)
    tuner.sample_closed(1024.0, 1023.0)  # as configured: the GPU fits
    assert [tuner.mismatched(level) for level in (GPU, HOST, DISK)] == [False, True, True]
    assert tuner.need_adjustment()
    tuner.set_sizing(DISK, tuner.target_sizing(DISK))
    assert [tuner.mismatched(level) for level in (GPU, HOST, DISK)] == [False, True, False]
    assert not tuner.need_adjustment()


def test_a_new_quota_is_taken_into_account() -> None:
    """After a resize the target is that of the new quota."""
    tuner = make_tuner(two_groups())
    tuner.sample_closed(64.0, 0.0)
    tuner.set_sizing(GPU, resized(tuner.layout, tuner.sizings[GPU], 128 * MIB))
    assert tuner.target_sizing(GPU).quota == 128 * MIB
    assert tuner.need_adjustment()


def test_one_pool_group_never_needs_it() -> None:
    """With one pool group there is nothing to shift."""
    config = dataclasses.replace(model([attention(0, 64)]), rebalance_min_sampled_kv_caches=0, rebalance_cooldown_secs=0.0)
    tuner = make_tuner(config)
    assert not tuner.need_adjustment()


def test_forced_targets() -> None:
    """A target that is set by hand is used until the next update; a wrong length is refused."""
    tuner = make_tuner(two_groups(rebalance_min_sampled_kv_caches=0))
    current = normalised([count * tuner.layout.slot_bytes(pg) for pg, count in enumerate(tuner.sizings[GPU].slots)])
    tuner.set_gpu_weights([1.0 - current[0], current[0]])
    assert tuner.need_adjustment()
    tuner.set_gpu_weights(current)
    assert not tuner.need_adjustment()
    with pytest.raises(ConfigError, match="3 weights for 2 pool groups"):
        tuner.set_gpu_weights([0.2, 0.3, 0.5])
    one_group = model([attention(0, 64)])
    (foreign,) = size_levels(build_layout(one_group), one_group)
    with pytest.raises(ConfigError, match="1 pool groups; must be 2"):
        tuner.set_sizing(GPU, foreign)
