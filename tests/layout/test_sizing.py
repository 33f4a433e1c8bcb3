"""From quotas to slots: grains, splits, floors, weights, and whole levels."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.config import DiskCacheTierConfig, HostCacheTierConfig, KVCacheManagerConfig, tier_granularity
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import CacheLevel, CacheTier
from kv_cache_manager_v2.layout import sizing as sizing_module
from kv_cache_manager_v2.layout.pools import StorageLayout, build_layout
from kv_cache_manager_v2.layout.sizing import (
    FROM_CONSTRAINTS,
    FROM_DEFAULT,
    FROM_RATIO,
    FROM_TUNING,
    FROM_TYPICAL_STEP,
    LevelSizing,
    exact_fraction,
    grains_for_slots,
    grains_to_slots,
    initial_weights,
    integer_weights,
    min_quota,
    min_slots,
    normalised,
    resized,
    size_levels,
    split_quota,
    weights_from_length,
)
from tests.support.models import GIB, KIB, MIB, attention, batch, model, ssm

GRAIN = 2 * MIB


def sized(config: KVCacheManagerConfig) -> tuple[StorageLayout, LevelSizing]:
    """The layout and the GPU's sizing."""
    layout = build_layout(config)
    return layout, size_levels(layout, config)[0]


# --- grains


def test_granularity() -> None:
    """Grains: GPU 2 MiB below 2 GiB, 4 MiB at 2 GiB, ... 32 MiB from 16 GiB on; host 4 KiB; disk 2 MiB."""
    expected = {1: 2, GIB: 2, 2 * GIB - 1: 2, 2 * GIB: 4, 4 * GIB - 1: 4, 4 * GIB: 8, 8 * GIB: 16, 16 * GIB: 32, 500 * GIB: 32}
    for quota, grain in expected.items():
        assert tier_granularity(CacheTier.GPU_MEM, quota) == grain * MIB
    for quota in (1, 500 * GIB):
        assert tier_granularity(CacheTier.HOST_MEM, quota) == 4 * KIB
        assert tier_granularity(CacheTier.DISK, quota) == 2 * MIB


def test_grains_refine() -> None:
    """157 slots of [16252928, 4063232] bytes at 16 MiB convert to grains and back to at least 157, no grain more."""
    sizes = [16252928, 4063232]
    grains = grains_for_slots(157, sizes, 16 * MIB)
    slots = grains_to_slots(grains, sizes, 16 * MIB)
    assert slots >= 157
    assert grains_for_slots(slots, sizes, 16 * MIB) <= grains


def test_the_example_that_trips_a_heuristic() -> None:
    """With buffers of 1.99, 1.99, 2.01 and 2.01 MiB, 6 grains of 2 MiB hold exactly one slot."""
    sizes = [2107637, 2107637, 2086666, 2086666]
    assert grains_to_slots(6, sizes, GRAIN) == 1
    assert grains_to_slots(5, sizes, GRAIN) == 0


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=4), st.integers(1, 3000), st.integers(0, 200))
def test_grains_to_slots_is_the_optimum(sizes: list[int], granularity: int, grains: int) -> None:
    """The answer fits, and one slot more does not."""
    slots = grains_to_slots(grains, sizes, granularity)
    assert slots == 0 or grains_for_slots(slots, sizes, granularity) <= grains
    assert grains_for_slots(slots + 1, sizes, granularity) > grains


# --- splitting


def test_one_group() -> None:
    """256 MiB in grains of 2 MiB give one group 4096 slots of 64 KiB."""
    assert split_quota(256 * MIB, GRAIN, [[64 * KIB]], [1.0], [1]) == [4096]


def test_ratio_preserves_floors() -> None:
    """With exactly the grains for the floors [157, 3907, 157], and ratio .2/.5/.3, every floor is kept."""
    sizes = [[16252928, 4063232], [524288], [4063232, 1048576]]
    floors = [157, 3907, 157]
    grain = 16 * MIB
    quota = min_quota(sizes, floors, grain)
    slots = split_quota(quota, grain, sizes, [0.2, 0.5, 0.3], floors)
    assert all(count >= floor for count, floor in zip(slots, floors, strict=True))
    with pytest.raises(ConfigError, match=f"insufficient quota: {quota - grain} bytes"):
        split_quota(quota - grain, grain, sizes, [0.2, 0.5, 0.3], floors)


def test_bankers_rounding() -> None:
    """5 grains in equal parts: the first group gets round(2.5) = 2, the second what remains, 3; 7 grains give 4 and 3."""
    assert split_quota(5 * GRAIN, GRAIN, [[GRAIN], [GRAIN]], [0.5, 0.5], [1, 1]) == [2, 3]
    assert split_quota(7 * GRAIN, GRAIN, [[GRAIN], [GRAIN]], [0.5, 0.5], [1, 1]) == [4, 3]


def test_unused_remainder_flows_to_heavier_groups() -> None:
    """What the lighter group cannot use is shared by the heavier ones."""
    assert split_quota(10 * GRAIN, GRAIN, [[3 * GRAIN], [GRAIN]], [0.4, 0.6], [1, 1]) == [1, 7]


def test_the_lightest_group_chooses_first() -> None:
    """14 bytes for slots of 2, weights 2 : 1. The lighter one gets round(4.67) = 5 bytes, uses 4, and leaves 10, not 9."""
    assert split_quota(14, 1, [[2], [2]], [2.0, 1.0], [3, 1]) == [5, 2]


def test_a_group_at_its_floor_leaves_first() -> None:
    """A group whose share gives exactly its floor is fixed too; the others then share anew, here 7 for the first."""
    assert split_quota(13, 1, [[1], [1], [5]], [4.0, 1.0, 4.0], [1, 1, 1]) == [7, 1, 1]


def test_left_over_grains_are_handed_out() -> None:
    """What the heaviest group cannot use goes to a lighter one that can."""
    # shares of 11 grains: 3 to the first (3 slots), 8 to the second, which uses 5: 3 grains would be lost
    assert split_quota(11 * GRAIN, GRAIN, [[GRAIN], [5 * GRAIN]], [0.3, 0.7], [1, 1]) == [6, 1]


def test_slots_fill_their_grains() -> None:
    """A count is raised to what its grains hold, also for a group at its floor."""
    assert split_quota(4 * GRAIN, GRAIN, [[GRAIN // 8], [GRAIN]], [0.01, 0.99], [1, 1]) == [8, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((GRAIN + 1, GRAIN, [[8]], [1.0], [1]), "not a multiple of the granularity 2097152; round it up to 4194304"),
        ((GRAIN, GRAIN, [[8]], [0.0], [1]), "must be positive"),
        ((GRAIN, GRAIN, [[8]], [float("nan")], [1]), "must be positive"),
        ((GRAIN, GRAIN, [[8]], [0.5, 0.5], [1]), "for 1 pool groups"),
        ((GRAIN, GRAIN, [[8], [8]], [0.5, 0.5], [1, 1]), "insufficient quota"),
    ],
)
def test_bad_splits(arguments: tuple[int, int, list[list[int]], list[float], list[int]], message: str) -> None:
    """A split that cannot be made is refused, with the numbers."""
    with pytest.raises(ConfigError, match=message):
        split_quota(*arguments)


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int, list[list[int]], list[float], list[int]]:
    groups = draw(st.integers(1, 5))
    granularity = draw(st.integers(1, 1000))
    sizes = [draw(st.lists(st.integers(1, 4000), min_size=1, max_size=3)) for _group in range(groups)]
    weights = [draw(st.floats(1e-6, 1e6)) for _group in range(groups)]
    floors = [draw(st.integers(0, 6)) for _group in range(groups)]
    spare = draw(st.integers(0, 60))
    return min_quota(sizes, floors, granularity) + spare * granularity, granularity, sizes, weights, floors


@given(splits())
def test_split_properties(split: tuple[int, int, list[list[int]], list[float], list[int]]) -> None:
    """Floors kept, no overspending, nothing left that one more slot of any group could use, same answer each time."""
    quota, granularity, sizes, weights, floors = split
    slots = split_quota(*split)
    assert all(count >= floor for count, floor in zip(slots, floors, strict=True))
    rest = quota - min_quota(sizes, slots, granularity)
    assert rest >= 0
    for group in range(len(sizes)):
        more = list(slots)
        more[group] += 1
        assert min_quota(sizes, more, granularity) > quota
    assert split_quota(quota, granularity, [list(group) for group in sizes], list(weights), list(floors)) == slots


@given(splits(), st.sampled_from([0.125, 8.0, 1024.0]))
def test_only_proportions_of_weights_count(split: tuple[int, int, list[list[int]], list[float], list[int]], factor: float) -> None:
    """Scaling all weights by the same power of two changes nothing."""
    quota, granularity, sizes, weights, floors = split
    scaled = [weight * factor for weight in weights]
    assert split_quota(quota, granularity, sizes, scaled, floors) == split_quota(*split)


def test_integer_weights_are_exact() -> None:
    """Floats become integers in exactly their proportions."""
    assert integer_weights([0.25, 0.5, 3.0]) == [1, 2, 12]
    first, second = integer_weights([0.1, 0.2])
    assert second == 2 * first
    assert normalised([1, 3]) == [0.25, 0.75]
    assert normalised([0, 0]) == [0.5, 0.5]


# --- floors


def test_structural_floors() -> None:
    """Blocks of 32: a window of 100 needs 5, full attention as much, a state 1; life cycles that share a group add up."""
    config = model([attention(0, 64, window=100), attention(1, 128), ssm(2, 8)])
    assert min_slots(build_layout(config), config) == [5, 5, 1]
    config = model([attention(0, 64, window=100), attention(1, 64)])
    assert min_slots(build_layout(config), config) == [10]


def test_resume_headroom() -> None:
    """A constraint's floor is raised by 1 / max_util_for_resume, in decimal arithmetic: 97 / 0.97 is 100, not 101."""
    for max_util, expected in ((1.0, 97), (0.97, 100), (0.5, 194), (0.95, 103)):
        config = model([attention(0, 64)], constraints=[batch(97, 32)], max_util=max_util)
        assert min_slots(build_layout(config), config) == [expected]
    assert exact_fraction(0.97) == (97, 100)
    assert exact_fraction(1e-05) == (1, 100000)


def test_floor_is_the_maximum_over_constraints() -> None:
    """Each constraint alone must fit; colder levels have to hold one request, not the GPU's batches."""
    many_short, one_long = batch(10, 32), batch(1, 3200)
    config = model([attention(0, 64, window=32), attention(1, 128)], constraints=[many_short, one_long], max_util=1.0)
    layout = build_layout(config)
    assert min_slots(layout, config) == [100, 100]
    assert min_slots(layout, config, CacheLevel(1)) == [2, 2]


# --- weights


def test_weights_without_any_hint() -> None:
    """One request with history 2048 and capacity 2049: 65 blocks against 5, exactly, not rounded to grains."""
    config = model([attention(0, 16 * KIB), attention(1, 32 * KIB, window=128)])
    weights, origin = initial_weights(build_layout(config), config)
    assert origin == FROM_DEFAULT
    assert weights == normalised([65 * 16, 5 * 32])
    assert weights[0] / weights[1] == pytest.approx(6.5)


def test_weights_precedence() -> None:
    """initial_pool_ratio before typical_step before constraints before the default."""
    layers = [attention(0, 64), attention(1, 128, window=64)]
    typical, constraint = batch(2, 320, 319), batch(1, 640)
    config = model(layers, typical_step=typical, constraints=[constraint], ratio=[0.2, 0.8])
    assert initial_weights(build_layout(config), config) == ([0.2, 0.8], FROM_RATIO)
    config = model(layers, typical_step=typical, constraints=[constraint])
    assert initial_weights(build_layout(config), config) == (normalised([20 * 64, 4 * 128]), FROM_TYPICAL_STEP)
    config = model(layers, constraints=[constraint], max_util=1.0)
    assert initial_weights(build_layout(config), config) == (normalised([20 * 64, 20 * 128]), FROM_CONSTRAINTS)


def test_ratio_is_per_layer_group() -> None:
    """The weights of layer groups that share a pool add up; the pool's share is 1."""
    config = model([attention(0, 64, window=128), attention(1, 64)], ratio=[0.25, 0.75])
    layout, gpu = sized(config)
    assert gpu.weights == [1.0]
    assert gpu.ratio(layout) == [1.0]


def test_typical_step_of_nothing() -> None:
    """A pool group that the typical batch does not use still has a share."""
    config = model([attention(0, 64), ssm(1, 64 * 3)], typical_step=batch(0, 0))
    assert initial_weights(build_layout(config), config)[0] == [0.25, 0.75]


def test_weights_from_length(caplog: pytest.LogCaptureFixture) -> None:
    """The weights are the bytes of one request by pool group; a capacity below the history is raised to it, with a warning."""
    layout = build_layout(model([attention(0, 100), attention(1, 50, window=32), ssm(2, 7)]))
    assert weights_from_length(layout, 64, 320) == normalised([1000, 9 * 50, 7])
    with caplog.at_level(logging.WARNING):
        assert weights_from_length(layout, 64, 10) == normalised([200, 50, 7])
    assert "capacity 10 is below the history 64" in caplog.text


# --- levels


class TestInitialRatio:
    """Window 128 with 32 sinks of 768 KiB, and full attention of 1280 KiB."""

    LAYERS = (attention(0, 768 * KIB, window=128, sink=32), attention(1, 1280 * KIB))

    def ratio(self, config: KVCacheManagerConfig) -> list[float]:
        layout, gpu = sized(config)
        return gpu.ratio(layout)

    def test_constraints_raise_the_window(self) -> None:
        typical = batch(32, 4096, 4000)
        before = self.ratio(model(self.LAYERS, gpu=GIB, typical_step=typical))
        after = self.ratio(model(self.LAYERS, gpu=GIB, typical_step=typical, constraints=[batch(128, 64)]))
        assert after[0] > before[0]

    def test_constraint_that_the_typical_step_covers_changes_nothing(self) -> None:
        typical = batch(8, 2048, 2000)
        before = self.ratio(model(self.LAYERS, gpu=4 * GIB, typical_step=typical))
        assert self.ratio(model(self.LAYERS, gpu=4 * GIB, typical_step=typical, constraints=[batch(4, 64)])) == before

    def test_scratch_lowers_the_window(self) -> None:
        layers = [attention(n, 64 * KIB, window=128) for n in range(16)]
        layers += [attention(16 + n, 32 * KIB) for n in range(16)]
        typical = batch(8, 16384)
        before = self.ratio(model(layers, gpu=16 * GIB, typical_step=typical))
        after = self.ratio(model(layers, gpu=16 * GIB, typical_step=typical, scratch_rewind=0))
        assert after[0] < before[0]

    def test_constraint_fits_under_the_gate(self) -> None:
        """32 requests of one token at 0.95 get 34 slots, so that the last one resumes at 31 / 34."""
        config = model(self.LAYERS, gpu=32 * 2 * MIB, constraints=[batch(32, 1)], max_util=0.95)
        _layout, gpu = sized(config)
        assert all(count >= 34 for count in gpu.slots)

    @pytest.mark.parametrize("prompt", [0, 64, 50, 256])
    def test_a_batch_fits_its_own_bytes(self, prompt: int) -> None:
        """4 requests of 512 tokens at a quota of exactly their slots, each with its share of the prompt."""
        constraint = batch(4, 512, 0, prompt)
        config = model(self.LAYERS, gpu=1, constraints=[constraint], typical_step=constraint, max_util=1.0)
        layout = build_layout(config)
        exact = min_quota(layout.slot_sizes, min_slots(layout, config), GRAIN)
        config.cache_tiers[0].quota = exact
        (gpu,) = size_levels(layout, config)
        shared = prompt // 32
        assert gpu.quota == exact
        assert all(count >= 4 * (16 - shared) + shared for count in gpu.slots)


def test_quota_is_rounded_up() -> None:
    """5,619,712 bytes become 3 grains; nothing is raised, nothing is warned of."""
    layers = [attention(layer, 8192, 8192) for layer in range(8)]
    layout, gpu = sized(model(layers, gpu=5_619_712))
    assert (gpu.asked, gpu.quota) == (5_619_712, 3 * GRAIN)
    assert gpu.slots == [3 * GRAIN // layout.slot_bytes(0)] == [48]


def test_tiny_lower_tiers_are_raised(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """A byte of host and a byte of disk become room for one slot, with one warning that names all figures."""
    layers = [attention(layer, 8192, 8192) for layer in range(8)]
    colder = [HostCacheTierConfig(1), DiskCacheTierConfig(1, str(tmp_path))]
    config = model(layers, gpu=5_619_712, colder=colder)
    layout = build_layout(config)
    with caplog.at_level(logging.WARNING):
        _gpu, host, disk = size_levels(layout, config)
    assert (host.quota, host.slots) == (131072, [1])
    assert (disk.quota, disk.slots) == (2 * MIB, [16])
    assert len(caplog.records) == 1
    assert "HOST_MEM): quota of 1 bytes is below the minimum of 131072 bytes" in caplog.text
    config.strict_quota = True
    with pytest.raises(ConfigError, match="quota of 1 bytes is below the minimum of 131072 bytes"):
        size_levels(layout, config)


def test_gpu_quota_is_raised_to_the_constraints(caplog: pytest.LogCaptureFixture) -> None:
    """A quota below the constraints' floor is raised to it with one warning; strict_quota makes it a ConfigError."""
    config = model([attention(0, MIB)], gpu=10 * MIB, constraints=[batch(97, 32)])
    with caplog.at_level(logging.WARNING):
        _layout, gpu = sized(config)
    assert (gpu.asked, gpu.quota, gpu.slots) == (10 * MIB, 100 * MIB, [100])
    assert len(caplog.records) == 1
    assert "quota of 10485760 bytes is below the minimum of 104857600 bytes" in caplog.text
    assert caplog.records[0].name == sizing_module.__name__
    config.strict_quota = True
    with pytest.raises(ConfigError, match="10485760 bytes is below the minimum of 104857600"):
        sized(config)


def test_all_levels_have_the_same_weights(tmp_path: Path) -> None:
    """Colder levels are divided in the GPU's proportions."""
    colder = [HostCacheTierConfig(512 * MIB), DiskCacheTierConfig(GIB, str(tmp_path))]
    config = model([attention(0, 64 * KIB), attention(1, 32 * KIB, window=128)], gpu=256 * MIB, colder=colder)
    layout = build_layout(config)
    sizings = size_levels(layout, config)
    assert [sizing.tier for sizing in sizings] == [CacheTier.GPU_MEM, CacheTier.HOST_MEM, CacheTier.DISK]
    for sizing in sizings:
        assert sizing.weights == sizings[0].weights
        assert sizing.ratio(layout)[0] == pytest.approx(sizing.weights[0], abs=0.02)


def test_what_bound_the_slots() -> None:
    """The record says which groups the floor decided, where the weights came from, and the minimum."""
    config = model(
        [attention(0, 64 * KIB), attention(1, 128 * KIB, window=128)], gpu=64 * MIB, constraints=[batch(80, 128)], ratio=[0.9, 0.1]
    )
    layout, gpu = sized(config)
    assert gpu.weights_from == FROM_RATIO
    assert gpu.floors == [330, 330]
    assert gpu.pinned == [False, True]
    assert gpu.minimum_quota == min_quota(layout.slot_sizes, gpu.floors, gpu.granularity) == 64 * MIB


class TestResized:
    """Sizing a level anew: with another quota, other weights, or both."""

    CONFIG = model([attention(0, 64 * KIB), attention(1, 128 * KIB, window=128)], gpu=64 * MIB)

    def test_quota(self) -> None:
        layout, gpu = sized(self.CONFIG)
        less = resized(layout, gpu, 32 * MIB + 1)
        assert (less.asked, less.quota, less.granularity) == (32 * MIB + 1, 34 * MIB, GRAIN)
        assert less.weights == gpu.weights
        assert gpu.quota == 64 * MIB

    def test_granularity_stays(self) -> None:
        """The physical chunks keep the size that the first quota gave them."""
        layout, gpu = sized(self.CONFIG)
        assert resized(layout, gpu, 32 * GIB).granularity == GRAIN

    def test_below_the_minimum(self) -> None:
        layout, gpu = sized(self.CONFIG)
        assert resized(layout, gpu, gpu.minimum_quota).slots >= gpu.floors
        with pytest.raises(ConfigError, match=f"is below the minimum of {gpu.minimum_quota} bytes"):
            resized(layout, gpu, gpu.minimum_quota - GRAIN)

    def test_no_grain_is_lost_over_many_rebalances(self) -> None:
        """The quota is what was given, however often it is divided anew, and coming back gives the same slots."""
        layout, gpu = sized(self.CONFIG)
        current = gpu
        for step in range(50):
            share = (1 + step * 7 % 97) / 100
            current = resized(layout, current, None, [share, 1.0 - share])
            assert current.quota == gpu.quota
            assert current.quota - current.used_quota(layout) < GRAIN
            assert current.weights_from == FROM_TUNING
        assert resized(layout, current, None, gpu.weights).slots == gpu.slots
