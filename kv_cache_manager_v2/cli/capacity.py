"""How large the tiers of a replay are: blocks of the user's cache, in pages of a few bytes.

Rule: what decides a replay is how many blocks each tier holds, so that number is exact; how large a page is only decides how much
memory the replay itself needs. A tier's size is rounded up to a granularity of mebibytes, so the page size is chosen such that
the rounding adds no block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from kv_cache_manager_v2 import (
    CacheTier,
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
SEARCH_BYTES: Final = 4096  # page sizes up to here, or twice the least, are tried one by one
SEARCH_TOTAL_BYTES: Final = 256 << 20  # larger ones are tried as long as all tiers together are no larger than this
TIER_NAMES: Final = {CacheTier.GPU_MEM: "gpu", CacheTier.HOST_MEM: "host", CacheTier.DISK: "disk"}


@dataclass(frozen=True)
class TierBlocks:
    """One tier and how many blocks it is to hold."""

    tier: CacheTier
    num_blocks: int


@dataclass(frozen=True)
class Capacity:
    """A configuration for a replay. `num_blocks[level]` is what the manager will really provide."""

    layers: Layers
    config: KVCacheManagerConfig
    page_bytes: int
    tier_names: list[str]  # by cache level
    num_blocks: list[int]  # by cache level: blocks that have their pages of all kinds of layers there
    num_pages: list[int]  # by cache level


def blocks_of_gib(gib: float, bytes_per_token: int, tokens_per_block: int) -> int:
    """How many whole blocks of real KV a tier of that size would hold."""
    return int(Fraction(gib) * GIB) // (bytes_per_token * tokens_per_block)


def plan_capacity(
    tiers: Sequence[TierBlocks], tokens_per_block: int, least_page_bytes: int, disk_path: str, layers: Layers = FULL
) -> Capacity:
    """A configuration whose tiers hold the wanted numbers of blocks, in pages of at least `least_page_bytes`.

    A block counts with its pages of all kinds of layers, so two kinds make twice as many pages as blocks. Where no page size of
    reasonable size makes all tiers exact, they are as little larger as can be, and `num_blocks` says so.
    """
    kinds = len(layers.kinds)
    tiers = [TierBlocks(tier.tier, tier.num_blocks * kinds) for tier in tiers]  # in pages from here on
    page_bytes = choose_page_bytes(tiers, max(MIN_PAGE_BYTES, least_page_bytes))
    config = KVCacheManagerConfig(
        tokens_per_block,
        [_tier_config(tier, page_bytes, disk_path) for tier in tiers],
        layers.configs(page_bytes),
        max_util_for_resume=1.0,  # a replay fills its memory to the last block
        commit_min_snapshot=layers.snapshot_every is not None,
        commit_stats_on_close=True,
    )
    sizings, _raised = plan_levels(build_layout(config), config)  # the pages are made up: no warning about their bytes
    for tier_config, sizing in zip(config.cache_tiers, sizings, strict=True):
        tier_config.quota = sizing.quota  # raised to the minimum here, so that the manager has nothing to warn of
    num_pages = [sizing.slots[0] for sizing in sizings]  # one pool group: all pages have one size
    num_blocks = [count // kinds for count in num_pages]
    return Capacity(layers, config, page_bytes, [TIER_NAMES[tier.tier] for tier in tiers], num_blocks, num_pages)


def choose_page_bytes(tiers: Sequence[TierBlocks], least: int) -> int:
    """The smallest page size from `least` on with which every tier holds exactly its blocks, else the best that was tried.

    Small pages are tried one by one. With few blocks, larger pages come in question too, as long as the tiers stay small: those
    with which some tier fills a whole number of granules.
    """
    candidates = set(range(least, max(SEARCH_BYTES, 2 * least) + 1))
    largest = SEARCH_TOTAL_BYTES // sum(tier.num_blocks for tier in tiers)
    sizes = [(tier.num_blocks, tier_granularity(tier.tier, 1)) for tier in tiers]
    for num_blocks, granularity in sizes:
        if granularity > SEARCH_BYTES:  # a smaller granularity is exact for every page that is no smaller
            most_granules = largest * num_blocks // granularity
            candidates.update(granules * granularity // num_blocks for granules in range(1, most_granules + 1))
    best, best_excess = least, float("inf")
    for page_bytes in sorted(candidates):
        if page_bytes < least:
            continue
        # a tier's granularity grows with its size, always by a factor: what does not fit the smallest one fits no other
        excess = max([(-num_blocks * page_bytes) % granularity // page_bytes / num_blocks for num_blocks, granularity in sizes])
        if excess < best_excess:
            excess = max([_provided(tier, page_bytes) / tier.num_blocks - 1 for tier in tiers])
        if excess == 0:
            return page_bytes
        if excess < best_excess:
            best, best_excess = page_bytes, excess
    return best


def _provided(tier: TierBlocks, page_bytes: int) -> int:
    """How many pages fit a tier whose quota was rounded up."""
    nbytes = tier.num_blocks * page_bytes
    granularity = tier_granularity(tier.tier, nbytes)
    return (-(-nbytes // granularity) * granularity) // page_bytes


def _tier_config(
    tier: TierBlocks, page_bytes: int, disk_path: str
) -> GpuCacheTierConfig | HostCacheTierConfig | DiskCacheTierConfig:
    quota = tier.num_blocks * page_bytes
    if tier.tier is CacheTier.GPU_MEM:
        return GpuCacheTierConfig(quota)
    if tier.tier is CacheTier.HOST_MEM:
        return HostCacheTierConfig(quota)
    return DiskCacheTierConfig(quota, disk_path)
