"""Configuration and sizing: what a quota becomes."""

from __future__ import annotations

import math

import pytest

from kv_cache_manager_v2 import BatchDesc, ConfigError, KVCacheDesc
from kv_cache_manager_v2.config import LayerConfig
from kv_cache_manager_v2.layout.pools import build_layout
from kv_cache_manager_v2.layout.sizing import size_levels
from tests.layout.test_sizing_of_managers import exact, gpu_slots, shares, two_groups
from tests.support.rig import GRAIN, KIB, MIB, Rig, attention, batch, hybrid, mixed, model, ssm, toks


@pytest.mark.parametrize("ratio", [[0.8, 0.2], [0.99, 0.01], [0.5, 0.5], [0.1, 0.9]])
@pytest.mark.parametrize("count", [64, 256])
def test_constraint_floors_beat_the_ratio(ratio: list[float], count: int) -> None:
    """A declared batch can run whatever split was asked for: each group has the slots that the batch needs."""
    config = two_groups(typical=batch(32, 4096, 4000), constraints=[batch(count, 256, 128)], ratio=ratio)
    slots = gpu_slots(config)
    assert slots[0] >= math.ceil(count * 8 / 0.97)
    assert slots[1] >= math.ceil(count * 8 / 0.97)
    if (ratio, count) == ([0.8, 0.2], 256):
        got = shares(config)
        assert got[1] > 0.2
        assert got[0] < 0.8


@pytest.mark.parametrize("ratio", [[], [1.0], [0, 1], [-0.1, 1.1], [0.4, 0.5], [0.3, 0.3, 0.4], [math.nan, 0.5], [math.inf, 0.5]])
def test_bad_ratios(ratio: list[float]) -> None:
    """Value errors for length, sign and sum."""
    with pytest.raises(ConfigError, match="initial_pool_ratio"):
        two_groups(ratio=ratio)


def test_two_layer_groups_one_pool() -> None:
    """One weight for each layer group, though they share a pool group, which gets all."""
    layers: list[LayerConfig] = [attention(0, MIB, window=128), attention(1, MIB)]
    for ratio in ([0.25, 0.75], [0.5, 0.5]):
        config = model(layers, ratio=ratio)
        assert size_levels(build_layout(config), config)[0].weights == [1.0]
        assert gpu_slots(config) == [64]
    with pytest.raises(ConfigError):
        model(layers, ratio=[1.0])


@pytest.mark.parametrize("gpu", [1, 2 * MIB, 212_549_334, 212_549_335, 1 << 33])
def test_the_sizing_ends(gpu: int) -> None:
    """Twelve layers of ten sizes and three windows, odd quotas: it returns, with every floor kept and no grain beyond the quota."""
    sizes = [(64, 128), (64, 128), (16, None), (512, 8), (512, 8), (4.125, None), (128, 8), (128, 8), (64, 128), (0.5, None)]
    layers: list[LayerConfig] = [attention(n, int(kib * KIB), window=window) for n, (kib, window) in enumerate(sizes)]
    layers += [attention(10, 256 * KIB, window=128), attention(11, 256 * KIB, window=128)]
    config = model(
        layers, tokens_per_block=128, gpu=gpu, typical_step=batch(3, 4197, 4196), constraints=[batch(1, 4197), batch(1, 7168)]
    )
    layout = build_layout(config)
    sizing = size_levels(layout, config)[0]
    assert all(have >= floor for have, floor in zip(sizing.slots, sizing.floors, strict=True))
    used = sum(math.ceil(n * size / GRAIN) * GRAIN for g, n in enumerate(sizing.slots) for size in layout.slot_sizes[g])
    assert used <= sizing.quota


@pytest.mark.parametrize("grains", [3, 4, 5, 6, 7, 11])
def test_rounding(grains: int) -> None:
    """Slots of a byte less than a grain, and of a grain: all grains are used, none is asked for twice; 5 are 2 and 3;
    repeatable."""
    layers: list[LayerConfig] = [attention(0, GRAIN - 1, window=32), attention(1, GRAIN)]
    config = model(layers, gpu=grains * GRAIN, constraints=[batch(1, 32)])
    slots = gpu_slots(config)
    assert sum(slots) == max(grains, 4)
    if grains == 5:
        assert slots == [2, 3]
    assert all(gpu_slots(config) == slots for _ in range(3))


@pytest.mark.parametrize("override", [64, 32, 1])
def test_other_block_lengths(override: int) -> None:
    """128 tokens a block, a layer with smaller ones: prompt 163, decode 97, then 260 reused and 79 more; indices expand for that
    layer."""
    bytes_per_token = 64
    layers: list[LayerConfig] = [
        attention(0, 128 * bytes_per_token),
        attention(1, override * bytes_per_token, override=override),
    ]
    with Rig(model(layers, tokens_per_block=128)) as rig:
        tokens = mixed(0, 339)
        request = rig.start(tokens[:163])
        request.prefill(tokens[:163], 100)
        for position in range(163, 260):
            assert request.advance(tokens[position : position + 1])
        group = rig.group(1)
        base = list(request.cache.get_aggregated_page_indices(group))
        converter = rig.manager.get_page_index_converter(layers[1].layer_id, layers[1].buffers[0].role)
        assert len(list(converter(base))) == len(base) * 128 // override
        request.close()
        again = rig.start(tokens)
        assert len(again.tokens) == 260
        again.prefill(tokens, 79)
        again.check()


def test_zero_token_requests_are_sized() -> None:
    """A batch of requests of 64 and 0 tokens: two states, two blocks."""
    layers: list[LayerConfig] = [attention(0, 2 * MIB), ssm(1, 2 * MIB + 2)]
    config = exact(model(layers, constraints=[BatchDesc([KVCacheDesc(64, 63), KVCacheDesc(0, 0)])], max_util=1.0))
    assert gpu_slots(config) == [2, 2]
    with Rig(config, engine=False) as rig:
        busy, idle = rig.create(), rig.create()
        assert busy.resume(rig.stream)
        assert busy.resize(64, 63)
        assert idle.resume(rig.stream)


def test_clamp_counts_states() -> None:
    """One state for each request of the batch: where they are fewer, no length fits."""
    with Rig(hybrid(2, 16)) as rig:
        assert rig.manager.clamp_max_seq_len_for_mem(1, 64) == 64
        assert rig.manager.clamp_max_seq_len_for_mem(2, 64) == 60
        assert rig.manager.clamp_max_seq_len_for_mem(3, 64) == 0
        assert rig.reused(toks(0, 4)) == 0
