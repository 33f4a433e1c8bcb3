"""Models of the layout room: layers as arguments, colder tiers behind the GPU."""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache_manager_v2.config import BatchDesc, CacheTierConfig, GpuCacheTierConfig, KVCacheManagerConfig, LayerConfig
from tests.support import models
from tests.support.models import MIB


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
    return models.model(
        layers,
        tokens_per_block=tokens_per_block,
        tiers=[GpuCacheTierConfig(gpu), *colder],
        constraints=constraints,
        typical_step=typical_step,
        ratio=ratio,
        max_util=max_util,
        scratch_rewind=scratch_rewind,
        strict_quota=strict_quota,
    )
