"""Ids and constants by the path under which engines of the reference import them."""

from __future__ import annotations

from kv_cache_manager_v2.ids import (
    BAD_PAGE_INDEX,
    CACHE_LEVEL1,
    DEFAULT_BEAM_INDEX,
    GPU_LEVEL,
    BeamIndex,
    BlockOrdinal,
    CacheLevel,
    CacheTier,
    CudaStream,
    LayerGroupId,
    LayerId,
    LifeCycleId,
    MemAddress,
    PageIndexMode,
    PageStatus,
    PoolGroupIndex,
    PoolIndex,
    Priority,
    SlidingWindowSize,
    SlotId,
    TokenId,
)
from kv_cache_manager_v2.reuse.tokens import TokenIdExt

__all__ = [
    "BAD_PAGE_INDEX",
    "CACHE_LEVEL1",
    "DEFAULT_BEAM_INDEX",
    "GPU_LEVEL",
    "BeamIndex",
    "BlockOrdinal",
    "CacheLevel",
    "CacheTier",
    "CudaStream",
    "LayerGroupId",
    "LayerId",
    "LifeCycleId",
    "MemAddress",
    "PageIndexMode",
    "PageStatus",
    "PoolGroupIndex",
    "PoolIndex",
    "Priority",
    "SlidingWindowSize",
    "SlotId",
    "TokenId",
    "TokenIdExt",
]
