"""Short ways to write models: one line a layer."""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache_manager_v2.config import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    CacheTierConfig,
    GpuCacheTierConfig,
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

KEY = DataRole("key")
VALUE = DataRole("value")


def buffers(*sizes: int, override: int | None = None) -> list[BufferConfig]:
    """Buffers named key, value, key_scale, value_scale, b4, b5, ..."""
    names = ["key", "value", "key_scale", "value_scale"] + [f"b{number}" for number in range(4, len(sizes))]
    return [BufferConfig(DataRole(name), size, override) for name, size in zip(names, sizes, strict=False)]


def attention(
    layer: int, *sizes: int, window: int | None = None, sink: int | None = None, override: int | None = None
) -> AttentionLayerConfig:
    return AttentionLayerConfig(LayerId(layer), buffers(*sizes, override=override), window, sink)


def ssm(layer: int, *sizes: int) -> SsmLayerConfig:
    return SsmLayerConfig(LayerId(layer), buffers(*sizes))


def model(
    *layers: LayerConfig,
    tokens_per_block: int = 32,
    gpu: int = 64 * MIB,
    colder: Sequence[CacheTierConfig] = (),
    constraints: Sequence[BatchDesc] = (),
    typical_step: BatchDesc | None = None,
    ratio: Sequence[float] | None = None,
    max_util: float = 0.97,
    scratch_rewind: int | None = None,
    strict_quota: bool = False,
) -> KVCacheManagerConfig:
    """A configuration of these layers; scratch reuse is on if a rewind length is given."""
    return KVCacheManagerConfig(
        tokens_per_block,
        [GpuCacheTierConfig(gpu), *colder],
        list(layers),
        max_util_for_resume=max_util,
        constraints=constraints,
        typical_step=typical_step,
        initial_pool_ratio=ratio,
        swa_scratch_reuse=None if scratch_rewind is None else SwaScratchReuseConfig(scratch_rewind),
        commit_min_snapshot=any(isinstance(layer, SsmLayerConfig) for layer in layers),
        strict_quota=strict_quota,
    )


def batch(count: int, capacity: int, history: int = 0, system_prompt: int = 0) -> BatchDesc:
    """`count` requests of the same shape."""
    return BatchDesc([KVCacheDesc(capacity, history) for _number in range(count)], system_prompt)
