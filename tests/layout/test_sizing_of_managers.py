"""How a quota becomes slots, seen from what the slots are for: batches that must run, shares that follow the typical step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kv_cache_manager_v2 import BatchDesc, GpuCacheTierConfig, KVCacheDesc, KVCacheManagerConfig
from kv_cache_manager_v2.config import LayerConfig
from kv_cache_manager_v2.layout.pools import build_layout
from kv_cache_manager_v2.layout.sizing import min_quota, min_slots, size_levels
from tests.support.models import GIB, GRAIN, KIB, MIB, attention, batch, model, ssm
from tests.support.rig import Request, Rig, mixed, toks

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


@pytest.mark.parametrize("max_util", [0.95, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("count", [1, 5, 32])
def test_a_declared_batch_is_resumable(max_util: float, count: int) -> None:
    """A constraint's requests all resume and take their token, at exactly the bytes of the floors."""
    with Rig(exact(two_groups(constraints=[batch(count, 1)], max_util=max_util)), engine=False) as rig:
        caches = [rig.create() for _ in range(count)]
        for cache in caches:
            assert cache.resume(rig.stream), cache.last_shortage
        for cache in caches:
            cache.capacity = 1
