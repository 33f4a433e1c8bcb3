"""Configuration by the path under which engines of the reference import it."""

from __future__ import annotations

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
    SsmLayerConfig,
    SwaScratchReuseConfig,
)
from kv_cache_manager_v2.ids import DataRole

__all__ = [
    "AttentionLayerConfig",
    "BatchDesc",
    "BufferConfig",
    "CacheTierConfig",
    "DataRole",
    "DiskCacheTierConfig",
    "GpuCacheTierConfig",
    "HostCacheTierConfig",
    "KVCacheDesc",
    "KVCacheManagerConfig",
    "SsmLayerConfig",
    "SwaScratchReuseConfig",
]
