"""Short ways to write models: one line a layer, and pools of exactly so many slots."""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache_manager_v2.config import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    CacheTierConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
    LayerConfig,
    SsmLayerConfig,
    SwaScratchReuseConfig,
)
from kv_cache_manager_v2.ids import DataRole, LayerId

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
GRAIN = 2 * MIB  # of the GPU's quota, while that is below 2 GiB

KEY = DataRole("key")
VALUE = DataRole("value")


def attention(
    layer: int, *sizes: int, window: int | None = None, sink: int | None = None, override: int | None = None
) -> AttentionLayerConfig:
    return AttentionLayerConfig(LayerId(layer), buffers(*sizes, override=override), window, sink)


def ssm(layer: int, *sizes: int) -> SsmLayerConfig:
    return SsmLayerConfig(LayerId(layer), buffers(*sizes))


def both(layer: int, sizes: Sequence[int], state_sizes: Sequence[int], window: int | None = None) -> AttentionLayerConfig:
    """A layer with attention, and with states named state0, state1, ..."""
    states = [BufferConfig(DataRole(f"state{number}"), size) for number, size in enumerate(state_sizes)]
    return AttentionLayerConfig(LayerId(layer), buffers(*sizes), window, states=states)


def buffers(*sizes: int, override: int | None = None) -> list[BufferConfig]:
    """Buffers named key, value, key_scale, value_scale, b4, b5, ..."""
    names = ["key", "value", "key_scale", "value_scale"] + [f"b{number}" for number in range(4, len(sizes))]
    return [BufferConfig(DataRole(name), size, override) for name, size in zip(names, sizes, strict=False)]


Kind = str | tuple[int, int]  # "full", "ssm", (window, sink tokens)


def layers_of(kinds: Sequence[Kind], size: int) -> list[LayerConfig]:
    """One layer of one buffer of `size` bytes for each kind: "full", "ssm" or (window, sink)."""
    result: list[LayerConfig] = []
    for number, kind in enumerate(kinds):
        if kind == "ssm":
            result.append(ssm(number, size))
        elif kind == "full":
            result.append(attention(number, size))
        else:
            assert isinstance(kind, tuple)
            result.append(attention(number, size, window=kind[0], sink=kind[1]))
    return result


def slot_size(gpu_slots: int, tokens_per_block: int) -> int:
    """Bytes of a slot of which exactly `gpu_slots` fit one grain of GPU memory (or of `gpu_slots` grains, beyond 64)."""
    step = 16 * tokens_per_block
    size = GRAIN // gpu_slots // step * step
    assert size > 0
    assert GRAIN // size == gpu_slots, (gpu_slots, size)
    return size


def small(
    gpu_slots: int,
    *,
    kinds: Sequence[Kind] = ("full",),
    tokens_per_block: int = 4,
    host_slots: int = 0,
    disk: tuple[str, int] | None = None,
    max_util: float = 1.0,
    partial: bool = True,
    backoff: int = 0,
    min_snapshot: bool | None = None,
    scratch_rewind: int | None = None,
) -> KVCacheManagerConfig:
    """A model whose layers of one kind each share one pool group of exactly so many slots a tier.

    `disk` is (directory, slots): a grain of the disk tier holds as many slots as one of the GPU, so the slots are a multiple.
    """
    size = slot_size(gpu_slots, tokens_per_block)
    tiers: list[CacheTierConfig] = [GpuCacheTierConfig(GRAIN)]
    if host_slots > 0:
        tiers.append(HostCacheTierConfig(host_slots * size))
    if disk is not None:
        assert disk[1] % gpu_slots == 0, "whole grains only"
        tiers.append(DiskCacheTierConfig(disk[1] // gpu_slots * GRAIN, disk[0]))
    return model(
        layers_of(kinds, size),
        tokens_per_block=tokens_per_block,
        tiers=tiers,
        max_util=max_util,
        partial=partial,
        backoff=backoff,
        min_snapshot=min_snapshot,
        scratch_rewind=scratch_rewind,
    )


def hybrid(
    states: int,
    blocks: int,
    *,
    tokens_per_block: int = 4,
    kinds: Sequence[Kind] = ("full",),
    host_slots: int = 0,
    partial: bool = True,
    backoff: int = 0,
) -> KVCacheManagerConfig:
    """Attention layers of one pool group of so many blocks, and a recurrent layer of so many states: a grain of GPU memory each.

    The host, if any, has at least `host_slots` slots of each.
    """
    assert states != blocks, "equal slots would share a pool group"
    sizes = slot_size(blocks, tokens_per_block), slot_size(states, tokens_per_block)
    layers = [*layers_of(kinds, sizes[0]), ssm(len(kinds), sizes[1])]
    tiers: list[CacheTierConfig] = [GpuCacheTierConfig(2 * GRAIN)]
    if host_slots > 0:
        tiers.append(HostCacheTierConfig(2 * host_slots * max(sizes)))
    groups = len(set(kinds))
    return model(
        layers,
        tokens_per_block=tokens_per_block,
        tiers=tiers,
        max_util=1.0,
        partial=partial,
        backoff=backoff,
        ratio=[0.5 / groups] * groups + [0.5],
    )


def model(
    layers: Sequence[LayerConfig],
    *,
    tokens_per_block: int = 32,
    gpu: int = 64 * MIB,
    colder: Sequence[CacheTierConfig] = (),
    tiers: Sequence[CacheTierConfig] | None = None,
    max_util: float = 0.97,
    partial: bool = True,
    backoff: int = 0,
    min_snapshot: bool | None = None,
    constraints: Sequence[BatchDesc] = (),
    typical_step: BatchDesc | None = None,
    ratio: Sequence[float] | None = None,
    scratch_rewind: int | None = None,
    text_only: bool = False,
    strict_quota: bool = False,
) -> KVCacheManagerConfig:
    if min_snapshot is None:
        min_snapshot = any(isinstance(layer.parts()[-1], SsmLayerConfig) for layer in layers)
    return KVCacheManagerConfig(
        tokens_per_block,
        [GpuCacheTierConfig(gpu), *colder] if tiers is None else list(tiers),
        list(layers),
        max_util_for_resume=max_util,
        enable_partial_reuse=partial,
        reuse_match_backoff=backoff,
        constraints=list(constraints),
        typical_step=typical_step,
        initial_pool_ratio=ratio,
        swa_scratch_reuse=None if scratch_rewind is None else SwaScratchReuseConfig(scratch_rewind),
        commit_min_snapshot=min_snapshot,
        text_only=text_only,
        strict_quota=strict_quota,
    )


def batch(count: int, capacity: int, history: int = 0, system_prompt: int = 0) -> BatchDesc:
    return BatchDesc([KVCacheDesc(capacity, history) for _ in range(count)], system_prompt)
