"""Managers with blocks of known sizes, and short ways to read their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kv_cache_manager_v2 import (
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCache,
    KVCacheIterationStatsDelta,
    KVCacheManagerConfig,
    KVCacheStatsDelta,
    LifeCycleId,
)
from kv_cache_manager_v2.config import CacheTierConfig
from tests.support.engine import Token
from tests.support.models import GRAIN, Kind, layers_of, model
from tests.support.rig import Rig, toks

BLOCK = 4  # tokens


def blocks(
    gpu: int,
    kinds: Sequence[Kind] = ("full",),
    host: int = 0,
    disk: tuple[str, int] | None = None,
    partial: bool = True,
    tokens_per_block: int = BLOCK,
    stats: bool = True,
) -> KVCacheManagerConfig:
    """Layers of one buffer each, and tiers of this many blocks of 2 MiB (`disk`: directory, blocks), which the layer groups
    share."""
    tiers: list[CacheTierConfig] = [GpuCacheTierConfig(gpu * GRAIN)]
    if host:
        tiers.append(HostCacheTierConfig(host * GRAIN))
    if disk is not None:
        tiers.append(DiskCacheTierConfig(disk[1] * GRAIN, disk[0]))
    config = model(layers_of(kinds, GRAIN), tokens_per_block=tokens_per_block, tiers=tiers, max_util=1.0, partial=partial)
    return replace(config, enable_stats=stats)


def rig_of(config: KVCacheManagerConfig) -> Rig:
    """A rig without an engine, since these tests compare only counts."""
    return Rig(config, engine=False)


def open_cache(
    rig: Rig, tokens: Sequence[Token] | None = None, id: int | None = None, expected: int | None = None, request_stats: bool = False
) -> KVCache:
    """A cache, ACTIVE, that the rig closes with itself."""
    cache = suspended_cache(rig, tokens, id, expected, request_stats)
    assert cache.resume(rig.stream)
    return cache


def suspended_cache(
    rig: Rig, tokens: Sequence[Token] | None = None, id: int | None = None, expected: int | None = None, request_stats: bool = False
) -> KVCache:
    cache = rig.manager.create_kv_cache(None, tokens, id, expected_prompt_length=expected, enable_request_stats=request_stats)
    return rig.own(cache)


def seed(rig: Rig, beg: int, end: int) -> None:
    """Cache tokens beg..end-1, and discard the counts of doing so."""
    rig.seed(toks(beg, end))
    forget(rig)


def forget(rig: Rig) -> None:
    """Reset every statistic that resets when it is read."""
    manager = rig.manager
    manager.get_and_reset_iteration_stats()
    manager.get_and_reset_ssm_snapshot_iteration_stats()
    manager.get_and_reset_iteration_reused_blocks_by_level()
    manager.get_and_reset_iteration_cached_tokens_by_level()
    manager.get_and_reset_iteration_disk_prefetch_blocks()
    manager.get_and_reset_iteration_suspend_resume_stats()
    manager.get_and_reset_iteration_peak_block_stats_by_level()


def iteration(rig: Rig, life_cycle: int = 0) -> KVCacheIterationStatsDelta:
    """The counts of a life cycle since the last reading; all zero if it is not listed."""
    return rig.manager.get_and_reset_iteration_stats().get(LifeCycleId(life_cycle), KVCacheIterationStatsDelta())


def request(total: int, missed: int, reused: int = 0) -> KVCacheStatsDelta:
    """The counts of a request: blocks allocated, missed and reused."""
    return KVCacheStatsDelta(total, total, reused, missed)
