"""How a quota becomes slots, seen from what the slots are for: batches that must run, shares that follow the typical step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kv_cache_manager_v2 import BatchDesc, ConfigError, GpuCacheTierConfig, KVCacheDesc, KVCacheManagerConfig
from kv_cache_manager_v2.config import LayerConfig
from kv_cache_manager_v2.layout.pools import build_layout
from kv_cache_manager_v2.layout.sizing import grains_for_slots, grains_to_slots, min_quota, min_slots, size_levels, split_quota
from tests.support.rig import GIB, GRAIN, KIB, MIB, Request, Rig, attention, batch, model, ssm, toks

WINDOWED_SLOT = 768 * KIB
FULL_SLOT = 1280 * KIB


def two_groups(
    gpu: int = 128 * MIB,
    typical: BatchDesc | None = None,
    constraints: list[BatchDesc] | None = None,
    ratio: list[float] | None = None,
    max_util: float = 0.97,
) -> KVCacheManagerConfig:
    """A layer of window 128 with 32 sink tokens, and a full one: a pool group each. Its full blocks are larger."""
    layers: list[LayerConfig] = [attention(0, WINDOWED_SLOT, window=128, sink=32), attention(1, FULL_SLOT)]
    return model(layers, gpu=gpu, typical_step=typical, constraints=constraints or [], ratio=ratio, max_util=max_util)


def gpu_slots(config: KVCacheManagerConfig) -> list[int]:
    return list(size_levels(build_layout(config), config)[0].slots)


def shares(config: KVCacheManagerConfig) -> list[float]:
    """Share of each pool group of the GPU's slots, in bytes."""
    layout = build_layout(config)
    slots = size_levels(layout, config)[0].slots
    nbytes = [count * layout.slot_bytes(group) for group, count in enumerate(slots)]
    return [n / sum(nbytes) for n in nbytes]


def exact(config: KVCacheManagerConfig) -> KVCacheManagerConfig:
    """The same with the fewest bytes of GPU memory that hold its floors."""
    layout = build_layout(config)
    quota = min_quota(layout.slot_sizes, min_slots(layout, config), GRAIN)
    assert quota < 4 * GIB
    return replace(config, cache_tiers=[GpuCacheTierConfig(quota)])


def test_slots_of_a_level_are_plain_ints() -> None:
    """Slot counts are ints that report total, free and occupied: 3 of 3 free, none taken."""
    from kv_cache_manager_v2 import EmulatedDriver
    from kv_cache_manager_v2.device.timeline import Timeline
    from kv_cache_manager_v2.storage.allocator import SlotAllocator

    driver = EmulatedDriver()
    timeline = Timeline(driver)
    allocator = SlotAllocator(timeline, 3)
    assert (allocator.capacity, allocator.free) == (3, 3)
    assert type(allocator.free) is int
    slot, _ready = allocator.allocate()
    assert type(slot) is int
    assert allocator.free == 2
    timeline.close()
    driver.close()


def test_grains_become_slots_and_slots_grains() -> None:
    """157 slots of [16252928, 4063232] bytes, 16 MiB grains: back and forth gives at least 157, of no more grains."""
    sizes = [16_252_928, 4_063_232]
    grains = grains_for_slots(157, sizes, 16 * MIB)
    slots = grains_to_slots(grains, sizes, 16 * MIB)
    assert slots >= 157
    assert grains_for_slots(slots, sizes, 16 * MIB) <= grains


def test_exactly_the_grains_of_the_minimum_keep_every_minimum() -> None:
    """Minima of 157, 3907 and 157 slots, exactly their grains, shares .2/.5/.3: each is kept."""
    sizes = [[16_252_928, 4_063_232], [2_031_616], [8_126_464, 507_904]]
    minima = [157, 3907, 157]
    quota = min_quota(sizes, minima, 16 * MIB)
    slots = split_quota(quota, 16 * MIB, sizes, [0.2, 0.5, 0.3], minima)
    assert all(got >= least for got, least in zip(slots, minima, strict=True))


def test_default_shares() -> None:
    """Without a hint the window's share is the smaller one, and shares sum to 1."""
    got = shares(two_groups())
    assert got[0] < got[1]
    assert math.isclose(sum(got), 1)


def test_short_requests() -> None:
    """64 requests of 64 tokens: the shares are those of the slots' bytes, 0.6 to 1."""
    got = shares(two_groups(gpu=512 * MIB, typical=batch(64, 64)))
    assert got[0] / got[1] == pytest.approx(0.6, abs=0.15)


def test_long_requests() -> None:
    """32 requests of 4096 tokens, 4000 of them history: the window takes less than 15 %."""
    assert shares(two_groups(gpu=512 * MIB, typical=batch(32, 4096, 4000)))[0] < 0.15


def test_a_request_without_tokens_has_a_state_slot() -> None:
    """Requests of capacity 64 and 0: 2 state slots and 2 of attention."""
    layers: list[LayerConfig] = [attention(0, 2 * MIB), ssm(1, 2 * MIB + 2)]
    desc = BatchDesc([KVCacheDesc(64, 63), KVCacheDesc(0, 0)])
    config = exact(model(layers, constraints=[desc], max_util=1.0))
    assert gpu_slots(config) == [2, 2]


def test_constraints_raise_a_share() -> None:
    """A constraint of many short requests raises the window's share above that of the typical step."""
    typical = batch(32, 4096, 4000)
    free = shares(two_groups(gpu=512 * MIB, typical=typical))
    bound = shares(two_groups(gpu=512 * MIB, typical=typical, constraints=[batch(16, 256, 128)]))
    assert bound[0] > free[0]


def test_a_constraint_is_resumable_under_the_gate() -> None:
    """32 requests of one token, max_util_for_resume 0.95, exactly the bytes: all 32 resume, then each has its token."""
    with Rig(exact(two_groups(constraints=[batch(32, 1)], max_util=0.95)), engine=False) as rig:
        caches = [rig.create() for _ in range(32)]
        for cache in caches:
            assert cache.resume(rig.stream)
        for cache in caches:
            cache.capacity = 1


def test_floors_override_the_initial_ratio() -> None:
    """[0.8, 0.2] with a constraint of 256 requests of 256 tokens: the second group gets more than 0.2, the first less than 0.8."""
    config = two_groups(typical=batch(32, 4096, 4000), constraints=[batch(256, 256, 128)], ratio=[0.8, 0.2])
    got = shares(config)
    assert got[1] > 0.2
    assert got[0] < 0.8
    assert math.isclose(sum(got), 1)


def test_the_ratio_has_a_weight_for_each_layer_group() -> None:
    """[.25, .75] for two layer groups that share a pool group is accepted: that has all of it."""
    layers: list[LayerConfig] = [attention(0, MIB, window=128), attention(1, MIB)]
    config = model(layers, ratio=[0.25, 0.75])
    assert shares(config) == [1.0]
    assert size_levels(build_layout(config), config)[0].weights == [1.0]


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        ([], "initial_pool_ratio length"),
        ([1.0], "initial_pool_ratio length"),
        ([0.0, 1.0], "values must be positive"),
        ([-0.1, 1.1], "values must be positive"),
        ([0.4, 0.5], "values must sum to 1.0"),
    ],
)
def test_invalid_ratios(ratio: list[float], words: str) -> None:
    """Length, sign and sum are checked."""
    with pytest.raises(ValueError, match=words) as refused:
        two_groups(ratio=ratio)
    assert isinstance(refused.value, ConfigError)


@pytest.mark.parametrize("value", [0.0, -0.1, 1.1, math.nan])
def test_invalid_utilisation(value: float) -> None:
    """max_util_for_resume lies in (0, 1]."""
    with pytest.raises(ValueError, match="max_util_for_resume must be in"):
        two_groups(max_util=value)
    assert two_groups(max_util=1.0).max_util_for_resume == 1.0


def test_rounding() -> None:
    """5 grains, slots of one byte less than a grain (window 32) and of a grain, constraint of 32 tokens: 2 and 3 slots."""
    layers: list[LayerConfig] = [attention(0, GRAIN - 1, window=32), attention(1, GRAIN)]
    assert gpu_slots(model(layers, gpu=5 * GRAIN, constraints=[batch(1, 32)])) == [2, 3]


@pytest.mark.parametrize("system_prompt", [0, 64, 50, 256])
@pytest.mark.parametrize("max_util", [1.0, 0.97])
def test_a_declared_batch_runs_at_exactly_its_bytes(system_prompt: int, max_util: float) -> None:
    """4 requests of 512 tokens that share a system prompt, not a byte more than the floors: all resume, reuse the prompt, and
    grow."""
    layers: list[LayerConfig] = [attention(0, 48 * KIB, window=128, sink=32), attention(1, 80 * KIB)]
    config = exact(model(layers, constraints=[batch(4, 512, 0, system_prompt)], max_util=max_util))
    with Rig(config) as rig:
        run_batch(rig, 4, 512, system_prompt)


def run_batch(rig: Rig, count: int, length: int, system_prompt: int) -> None:
    """So many requests of this length that share the prompt, all of it, also where it ends inside a block."""
    prompt = toks(0, system_prompt)
    if prompt:
        rig.seed(prompt)
    requests: list[Request] = []
    for number in range(count):
        base = 10_000 * (number + 1)
        request = rig.request(prompt + toks(base, base + length - system_prompt))
        assert len(request.tokens) == system_prompt
        assert request.resume(), request.cache.last_shortage
        requests.append(request)
    for request in requests:
        assert request.cache.resize(length), request.cache.last_shortage
    for number, request in enumerate(requests):
        base = 10_000 * (number + 1)
        request.write(toks(base, base + length - system_prompt))
        request.cache.history_length = length
        request.check()
        request.close()


@pytest.mark.parametrize("first", [0, 1])
def test_each_of_several_constraints_runs(first: int) -> None:
    """Few long requests and many short ones are declared: either batch runs at exactly the bytes of both."""
    layers: list[LayerConfig] = [attention(0, 48 * KIB, window=128, sink=32), attention(1, 80 * KIB)]
    config = exact(model(layers, constraints=[batch(1, 2048, 0), batch(24, 64)]))
    with Rig(config) as rig:
        for number in (first, 1 - first):
            if number == 0:
                run_batch(rig, 1, 2048, 0)
            else:
                run_batch(rig, 24, 64, 0)


def test_a_constraint_that_the_typical_step_covers_changes_nothing() -> None:
    """The shares with a constraint that fits anyway are the shares without it."""
    typical = batch(32, 4096, 4000)
    free = gpu_slots(two_groups(gpu=4 * GIB, typical=typical))
    assert gpu_slots(two_groups(gpu=4 * GIB, typical=typical, constraints=[batch(2, 512, 256)])) == free


def test_models_with_many_windows_construct() -> None:
    """12 layers of 4 windows in 1 GiB, and 12 layers with slots up to 2 x 512 KiB in 212,549,334 bytes: the sizing ends."""
    windows = [None, 128, 1024, 4096]
    config = model([attention(layer, 32 * KIB, 32 * KIB, window=windows[layer % 4]) for layer in range(12)], gpu=GIB)
    assert all(count > 0 for count in gpu_slots(config))
    layers: list[LayerConfig] = [
        attention(0, 64 * KIB, window=128),
        attention(1, 64 * KIB, window=128),
        attention(2, 16 * KIB),
        attention(3, 512 * KIB, window=8),
        attention(4, 512 * KIB, window=8),
        attention(5, 4224),
        attention(6, 128 * KIB, window=8),
        attention(7, 128 * KIB, window=8),
        attention(8, 64 * KIB, window=128),
        attention(9, 512),
        attention(10, 256 * KIB, window=128),
        attention(11, 256 * KIB, window=128),
    ]
    config = model(
        layers,
        tokens_per_block=128,
        gpu=212_549_334,
        typical_step=batch(3, 4197, 4196),
        constraints=[batch(1, 4197), batch(1, 7168)],
    )
    with Rig(config, engine=False) as rig:
        assert len(rig.manager.pool_group_descs) == len(gpu_slots(config))


# --- clamp_max_seq_len_for_mem: 32 tokens a block, slots of 2 MiB


def clamp(layers: list[LayerConfig], gpu: int, batch_size: int, upper: int) -> int:
    with Rig(model(layers, gpu=gpu, max_util=1.0), engine=False) as rig:
        return rig.manager.clamp_max_seq_len_for_mem(batch_size, upper)


@pytest.mark.parametrize(("batch_size", "upper", "length"), [(1, 0, 0), (1, 32, 32), (1, 64, 32), (2, 64, 0), (3, 64, 0)])
def test_clamp_with_one_slot(batch_size: int, upper: int, length: int) -> None:
    """One slot: a sequence of a block, alone; nothing for larger batches; an upper bound of 0 is 0."""
    assert clamp([attention(0, GRAIN)], GRAIN, batch_size, upper) == length


def test_clamp_with_a_window() -> None:
    """Window 32 needs no more slots for 96 tokens than for 32."""
    assert clamp([attention(0, GRAIN, window=32)], GRAIN, 1, 96) == 96


@pytest.mark.parametrize(("batch_size", "length"), [(1, 96), (2, 32)])
def test_clamp_with_a_window_and_full_attention(batch_size: int, length: int) -> None:
    """Four slots: 96 tokens alone, 32 beside another request."""
    assert clamp([attention(0, GRAIN, window=32), attention(1, GRAIN)], 4 * GRAIN, batch_size, 96) == length


def test_clamp_refuses_an_empty_batch() -> None:
    """There is no batch of 0 requests."""
    with pytest.raises(ConfigError):
        clamp([attention(0, GRAIN)], GRAIN, 0, 32)
