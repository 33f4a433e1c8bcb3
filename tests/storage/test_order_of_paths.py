"""In whatever way a path becomes evictable, its tail is evicted before its head, on every tier and for every reason."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from kv_cache_manager_v2 import (
    CacheLevel,
    CacheTier,
    CacheTierConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCache,
)
from kv_cache_manager_v2.introspection import request_pages
from tests.support import inside
from tests.support.engine import Token
from tests.support.models import GRAIN, layers_of, model
from tests.support.rig import GPU, Rig, toks

TOKENS = toks(0, 32)  # 8 blocks
SLOT = GRAIN // 2  # the GPU has 8 slots, the host 3, the disk 4


def started(rig: Rig, length: int = len(TOKENS)) -> KVCache:
    cache = rig.manager.create_kv_cache()
    assert cache.resume(rig.stream)
    commit(cache, TOKENS[:length])
    return cache


def commit(cache: KVCache, tokens: list[Token]) -> None:
    assert cache.resize(cache.num_committed_tokens + len(tokens))
    cache.commit(tokens)


def fill_gpu(rig: Rig, most: int = 8) -> None:
    """Another request takes so many slots, or all that it can, and ends."""
    cache = rig.manager.create_kv_cache()
    assert cache.resume(rig.stream)
    while cache.num_blocks < most and cache.resize(cache.capacity + 4):
        pass
    cache.close()


# --- the ways in which a path becomes evictable


def active(rig: Rig) -> None:
    started(rig).close()


def in_chunks(rig: Rig) -> None:
    cache = started(rig, 4)
    for beg in range(4, len(TOKENS), 4):
        commit(cache, TOKENS[beg : beg + 4])
    cache.close()


def suspended(rig: Rig) -> None:
    cache = started(rig)
    cache.suspend()
    cache.close()


def resumed(rig: Rig) -> None:
    cache = started(rig)
    cache.suspend()
    assert cache.resume(rig.stream)
    cache.close()


def prefetched(rig: Rig) -> None:
    cache = started(rig)
    cache.suspend()
    assert cache.prefetch(GPU)
    cache.close()


def moved(rig: Rig) -> None:
    """Some pages were offloaded while the request was suspended."""
    cache = started(rig)
    cache.suspend()
    fill_gpu(rig)
    cache.close()


def moved_in_part(rig: Rig) -> None:
    cache = started(rig)
    cache.suspend()
    fill_gpu(rig, 3)
    cache.close()


def moved_in_part_twice(rig: Rig) -> None:
    """Pages of a first request, and then of another one that has matched the path."""
    cache = started(rig)
    cache.suspend()
    fill_gpu(rig, 2)
    other = rig.manager.create_kv_cache(None, TOKENS)
    cache.close()
    fill_gpu(rig, 4)
    other.close()


def moved_and_prefetched(rig: Rig) -> None:
    cache = started(rig)
    cache.suspend()
    fill_gpu(rig)
    assert cache.prefetch(GPU)
    rig.settle()
    cache.close()


def moved_and_resumed(rig: Rig) -> None:
    cache = started(rig)
    cache.suspend()
    fill_gpu(rig)
    assert cache.resume(rig.stream)
    rig.settle()
    cache.close()


def dropped(rig: Rig) -> None:
    """The handle is dropped without close()."""
    drop(rig, started(rig))


def dropped_suspended(rig: Rig) -> None:
    cache = started(rig)
    cache.suspend()
    drop(rig, cache)


def drop(rig: Rig, cache: KVCache) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del cache
        gc.collect()
        rig.manager.create_kv_cache().close()


def aborted(rig: Rig) -> None:
    """A first request ends in the middle of its prefill."""
    cache = started(rig, 20)
    assert cache.resize(30)
    cache.close()
    rest_of_the_path(rig)


def aborted_suspended(rig: Rig) -> None:
    cache = started(rig, 20)
    assert cache.resize(30)
    cache.suspend()
    cache.close()
    rest_of_the_path(rig)


def rest_of_the_path(rig: Rig) -> None:
    cache = rig.manager.create_kv_cache(None, TOKENS)
    assert cache.resume(rig.stream)
    commit(cache, TOKENS[cache.num_committed_tokens :])
    cache.close()


def matched(rig: Rig) -> None:
    """A request held the path, and never ran."""
    active(rig)
    rig.manager.create_kv_cache(None, TOKENS).close()


def matched_in_part(rig: Rig) -> None:
    active(rig)
    cache = rig.manager.create_kv_cache(None, TOKENS[:16])
    assert cache.resume(rig.stream)
    cache.close()
    rig.manager.create_kv_cache(None, TOKENS[:8]).close()


def two_at_once(rig: Rig) -> None:
    """Two requests use the path; the one that uses more of it ends first."""
    cache = started(rig)
    other = rig.manager.create_kv_cache(None, TOKENS[:16])
    assert other.resume(rig.stream)
    cache.close()
    other.close()


def forked(rig: Rig) -> None:
    cache = started(rig)
    cache.fork().close()
    cache.close()


def forked_and_closed_last(rig: Rig) -> None:
    cache = started(rig)
    fork = cache.fork()
    cache.close()
    fork.close()


def fork_that_ran(rig: Rig) -> None:
    cache = started(rig, 16)
    fork = cache.fork()
    cache.close()
    assert fork.resume(rig.stream)
    commit(fork, TOKENS[16:])
    fork.suspend()
    fork.close()


def stopped(rig: Rig) -> None:
    cache = started(rig)
    cache.stop_committing()
    cache.close()


def withdrawn_plan(rig: Rig) -> None:
    cache = started(rig)
    cache.stop_committing()
    plan = cache.plan_committed_block_drop()
    assert plan is not None
    cache.close()
    del plan
    gc.collect()
    rig.manager.create_kv_cache().close()


def shrunk(rig: Rig) -> None:
    """The GPU was smaller for a time, if the pages have another level."""
    active(rig)
    if len(rig.manager.cache_tier_list) > 1:
        for grains in (3, 4):
            assert rig.manager.resize(GPU, grains * GRAIN)
            rig.settle()


def shrunk_while_suspended(rig: Rig) -> None:
    cache = started(rig)
    cache.suspend()
    if len(rig.manager.cache_tier_list) > 1:
        for grains in (3, 4):
            assert rig.manager.resize(GPU, grains * GRAIN)
            rig.settle()
    cache.close()


WAYS: list[Callable[[Rig], None]] = [
    in_chunks,
    suspended,
    resumed,
    prefetched,
    moved,
    moved_in_part,
    moved_in_part_twice,
    moved_and_prefetched,
    moved_and_resumed,
    dropped,
    dropped_suspended,
    aborted,
    aborted_suspended,
    matched,
    matched_in_part,
    two_at_once,
    forked,
    forked_and_closed_last,
    fork_that_ran,
    stopped,
    withdrawn_plan,
    shrunk,
    shrunk_while_suspended,
]

# --- the reasons for which room is made


def requests(rig: Rig, found: Callable[[], None]) -> None:
    """Another request grows block by block."""
    cache = rig.manager.create_kv_cache()
    assert cache.resume(rig.stream)
    while cache.resize(cache.capacity + 4):
        found()
    cache.close()


def many_requests(rig: Rig, found: Callable[[], None]) -> None:
    """Other requests come, cache a block, and go, until all levels hold nothing else."""
    for number in range(1, 26):
        tokens = toks(1000 * number, 1000 * number + 4)
        cache = rig.manager.create_kv_cache()
        assert cache.resume(rig.stream)
        commit(cache, tokens)
        cache.close()
        found()


def quotas(rig: Rig, found: Callable[[], None]) -> None:
    """The levels shrink, the warmest first."""
    for level, tier in enumerate(rig.manager.cache_tier_list):
        step = SLOT if tier == CacheTier.HOST_MEM else GRAIN
        for count in range(rig.manager.get_quota(CacheLevel(level)) // step - 1, 0, -1):
            assert rig.manager.resize(level, count * step), rig.manager.last_resize
            found()


REASONS: list[Callable[[Rig, Callable[[], None]], None]] = [requests, many_requests, quotas]


def found_under_pressure(
    way: Callable[[Rig], None], reason: Callable[[Rig, Callable[[], None]], None], tiers: str, folder: Path
) -> list[int]:
    """The tokens that are found after each step. Each time the blocks that are left are the first of the path."""
    made: dict[str, CacheTierConfig] = {
        "g": GpuCacheTierConfig(4 * GRAIN),
        "h": HostCacheTierConfig(3 * SLOT),
        "d": DiskCacheTierConfig(2 * GRAIN, str(folder)),
    }
    config = model(layers_of(["full"], SLOT), tokens_per_block=4, tiers=[made[tier] for tier in tiers], max_util=1.0)
    found: list[int] = []
    with Rig(config, engine=False) as rig:

        def look() -> None:
            rig.settle()
            found.append(rig.probe(TOKENS))
            levels = inside.pages_by_level(rig.manager, TOKENS)
            assert levels == sorted(levels), f"after {len(found)} steps the levels of the blocks are {levels}"
            assert found[-1] == 4 * len(levels), f"after {len(found)} steps blocks that cannot be found are kept: {levels}"

        way(rig)
        look()
        reason(rig, look)
    return found


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("tiers", ["g", "gh", "gd", "ghd"])
@pytest.mark.parametrize("way", WAYS)
def test_the_tail_of_a_path_goes_before_its_head(
    way: Callable[[Rig], None], tiers: str, reason: Callable[[Rig, Callable[[], None]], None], tmp_path: Path
) -> None:
    """And as many tokens are found as if the path had been used by one request that was closed while it was ACTIVE."""
    found = found_under_pressure(way, reason, tiers, tmp_path)
    if not (way is moved and reason is quotas):  # a GPU that has no pages of the path gives up none when it shrinks
        assert found == found_under_pressure(active, reason, tiers, tmp_path)
    assert found[-1] < found[0]


def test_the_pages_of_several_layer_groups_go_block_by_block() -> None:
    """A suspended request's last blocks are offloaded first, those of all layer groups together."""
    tiers: list[CacheTierConfig] = [GpuCacheTierConfig(10 * GRAIN), HostCacheTierConfig(20 * SLOT)]
    config = model(layers_of(["full", (36, 0)], SLOT), tokens_per_block=4, tiers=tiers, max_util=1.0)
    with Rig(config, engine=False) as rig:
        cache = started(rig)
        cache.suspend()
        other = rig.manager.create_kv_cache()
        assert other.resume(rig.stream)
        for blocks in range(1, 8):
            assert other.resize(4 * blocks)
            moved = 0
            for number in (0, 1):
                levels = [-1 if page is None else page.level for page in request_pages(cache, number)]
                assert levels == sorted(levels)
                moved += levels.count(1)
            assert moved == max(0, 2 * blocks - 4)  # 16 of 20 slots are in use before
        other.close()
        cache.close()
