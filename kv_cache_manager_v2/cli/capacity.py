"""Computes the tier sizes of a replay: the user's number of blocks, in pages of a few bytes.

The result of a replay depends on how many blocks each tier holds, so that number is exact. The page size only decides how much
memory the replay itself needs. A tier's size is rounded up to a granularity of mebibytes, so the page size is chosen such that the
rounding adds no block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from kv_cache_manager_v2 import (
    CacheTier,
    CacheTierConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
)
from kv_cache_manager_v2.cli.layers import FULL, Layers
from kv_cache_manager_v2.config import tier_granularity
from kv_cache_manager_v2.layout.pools import build_layout
from kv_cache_manager_v2.layout.sizing import plan_levels

GIB: Final = 1 << 30
MIN_PAGE_BYTES: Final = 64
SEARCH_BYTES: Final = 4096  # page sizes up to this, or up to twice the least, are tried one by one
SEARCH_TOTAL_BYTES: Final = 256 << 20  # larger page sizes are tried if all tiers together are no larger than this
TIER_NAMES: Final = {CacheTier.GPU_MEM: "gpu", CacheTier.HOST_MEM: "host", CacheTier.DISK: "disk"}


@dataclass(frozen=True)
class TierBlocks:
    """One tier, and the number of blocks that it has to hold."""

    tier: CacheTier
    num_blocks: int


@dataclass(frozen=True)
class Capacity:
    """A configuration for a replay. `num_blocks[level]` is the number of blocks that the manager will provide."""

    layers: Layers
    config: KVCacheManagerConfig
    page_bytes: int
    tier_names: list[str]  # by cache level
    num_blocks: list[int]  # by cache level: blocks with a page of every kind of layer
    num_pages: list[int]  # by cache level; without states that have slots of their own
    num_states: int | None  # slots of recurrent states alone; None if they share the slots of all pages


def blocks_of_gib(gib: float, bytes_per_token: int, tokens_per_block: int) -> int:
    """How many whole blocks of the real model's KV a tier of `gib` GiB would hold."""
    return int(Fraction(gib) * GIB) // (bytes_per_token * tokens_per_block)


def plan_capacity(
    tiers: Sequence[TierBlocks],
    tokens_per_block: int,
    least_page_bytes: int,
    disk_path: str,
    layers: Layers = FULL,
    num_states: int | None = None,
    exclusive: bool = False,
    disk_admission: str = "all",
) -> Capacity:
    """Make a configuration whose tiers hold the wanted numbers of blocks, in pages of at least `least_page_bytes`.

    A block has a page of every kind of layer: with two kinds there are twice as many pages as blocks. With `num_states`, the GPU
    is the only tier, and recurrent states have so many slots of their own there. If no reasonable page size makes all tiers exact,
    they are larger by as little as possible, and the result has the real numbers. `exclusive`: no tier keeps clean copies.
    """
    kinds = len([kind for kind in layers.kinds if num_states is None or not kind.recurrent])
    tiers = [TierBlocks(tier.tier, tier.num_blocks * kinds) for tier in tiers]  # num_blocks now counts pages
    page_bytes = choose_page_bytes(tiers, max(MIN_PAGE_BYTES, least_page_bytes))
    state_bytes = page_bytes
    tier_configs: list[CacheTierConfig] = [_tier_config(tier, page_bytes, disk_path, exclusive, disk_admission) for tier in tiers]
    ratio: list[float] | None = None
    if num_states is not None:
        state_bytes = choose_page_bytes([TierBlocks(CacheTier.GPU_MEM, num_states)], page_bytes + 1)
        quotas = [_provided_bytes(tiers[0].num_blocks * page_bytes), _provided_bytes(num_states * state_bytes)]
        tier_configs = [GpuCacheTierConfig(sum(quotas))]
        ratio = [quota / sum(quotas) for quota in quotas]
    config = KVCacheManagerConfig(
        tokens_per_block,
        tier_configs,
        layers.configs(page_bytes, state_bytes),
        max_util_for_resume=1.0,  # a replay uses all blocks
        initial_pool_ratio=ratio,
        commit_min_snapshot=layers.recurrent,
        snapshot_at_block_ends=layers.snapshots_by_prompt,
        snapshot_at_branches=layers.snapshots_by_prompt,
        commit_stats_on_close=True,
    )
    sizings, _raised = plan_levels(build_layout(config), config)  # no warning about raised quotas: the page size is not the user's
    for tier_config, sizing in zip(config.cache_tiers, sizings, strict=True):
        tier_config.quota = sizing.quota  # raised to the minimum here, so that the manager does not warn
    num_pages = [sizing.slots[0] for sizing in sizings]  # one pool group: all pages have one size
    num_blocks = [count // kinds for count in num_pages]
    states = None if num_states is None else sizings[0].slots[1]
    return Capacity(layers, config, page_bytes, [TIER_NAMES[tier.tier] for tier in tiers], num_blocks, num_pages, states)


def choose_page_bytes(tiers: Sequence[TierBlocks], least: int) -> int:
    """The smallest page size, at least `least`, with which every tier holds exactly its blocks; else the best size tried.

    Small page sizes are tried one by one. While the tiers stay small, larger sizes with which some tier fills a whole number of
    granules are tried too.
    """
    candidates = set(range(least, max(SEARCH_BYTES, 2 * least) + 1))
    largest = SEARCH_TOTAL_BYTES // sum(tier.num_blocks for tier in tiers)
    sizes = [(tier.num_blocks, tier_granularity(tier.tier, 1)) for tier in tiers]
    for num_blocks, granularity in sizes:
        if granularity > SEARCH_BYTES:  # a granularity no larger than the page adds no page
            most_granules = largest * num_blocks // granularity
            candidates.update(granules * granularity // num_blocks for granules in range(1, most_granules + 1))
    best, best_excess = least, float("inf")
    for page_bytes in sorted(candidates):
        if page_bytes < least:
            continue
        # Larger granularities are multiples of smaller ones: a size that does not fit the smallest fits none.
        excess = max([(-num_blocks * page_bytes) % granularity // page_bytes / num_blocks for num_blocks, granularity in sizes])
        if excess < best_excess:
            excess = max([_provided(tier, page_bytes) / tier.num_blocks - 1 for tier in tiers])
        if excess == 0:
            return page_bytes
        if excess < best_excess:
            best, best_excess = page_bytes, excess
    return best


def _provided(tier: TierBlocks, page_bytes: int) -> int:
    """How many pages a tier holds once its quota is rounded up."""
    return _provided_bytes(tier.num_blocks * page_bytes, tier.tier) // page_bytes


def _provided_bytes(nbytes: int, tier: CacheTier = CacheTier.GPU_MEM) -> int:
    """A quota of so many bytes, rounded up."""
    granularity = tier_granularity(tier, nbytes)
    return -(-nbytes // granularity) * granularity


def _tier_config(
    tier: TierBlocks, page_bytes: int, disk_path: str, exclusive: bool, disk_admission: str
) -> GpuCacheTierConfig | HostCacheTierConfig | DiskCacheTierConfig:
    quota = tier.num_blocks * page_bytes
    if tier.tier is CacheTier.GPU_MEM:
        return GpuCacheTierConfig(quota)
    if tier.tier is CacheTier.HOST_MEM:
        return HostCacheTierConfig(quota, exclusive)
    return DiskCacheTierConfig(quota, disk_path, exclusive=exclusive, admission=disk_admission)
