"""Questions of tests and tools about the internal state of a manager, and calls that stage a state for a test.

A question changes nothing and returns plain records. A call that changes something has a name that says so (`make_`, `close_`,
`set_`, `force_`). Nothing here is part of the interface for engines, and internal structures may change. Each
call takes the manager's lock, so another thread may ask while the engine works.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, NamedTuple

from kv_cache_manager_v2.config import BatchDesc, SwaScratchReuseConfig
from kv_cache_manager_v2.errors import ConfigError, OutOfPagesError
from kv_cache_manager_v2.ids import GPU_LEVEL, NULL_POINT, PRIORITY_DEFAULT, CacheLevel, LifeCycleId, PageStatus, PoolGroupId
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.layout import sizing
from kv_cache_manager_v2.layout.batches import batch_slots
from kv_cache_manager_v2.layout.pools import build_layout
from kv_cache_manager_v2.listener import CacheListener
from kv_cache_manager_v2.manager import KVCacheManager
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.request.request import CLOSED
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.match import match
from kv_cache_manager_v2.reuse.tokens import Tokens, pack
from kv_cache_manager_v2.reuse.tree import BLOCK_NEW
from kv_cache_manager_v2.statistics import StorageStatistics
from kv_cache_manager_v2.storage.page import Page

SAMPLES_ENOUGH: Final = 2001  # closed requests that `force_rebalance_precondition` pretends to have seen

# --- slots


class SlotCounts(NamedTuple):
    """Slots of one pool group on one level: total = free + evictable + unavailable."""

    total: int
    free: int
    evictable: int
    unavailable: int


def slot_counts(manager: KVCacheManager, level: int = 0, pool_group: int = 0) -> SlotCounts:
    """O(1)."""
    hierarchy = manager.shared.hierarchy
    with manager.shared.lock:
        return SlotCounts(
            hierarchy.total(level, pool_group),
            hierarchy.free(level, pool_group),
            hierarchy.evictable(level, pool_group),
            hierarchy.unavailable(level, pool_group),
        )


def all_slot_counts(manager: KVCacheManager) -> list[SlotCounts]:
    """Of every level and pool group, level by level."""
    levels = range(manager.shared.hierarchy.num_levels)
    groups = range(manager.shared.layout.num_pool_groups)
    with manager.shared.lock:
        return [slot_counts(manager, level, group) for level in levels for group in groups]


def storage_statistics(manager: KVCacheManager, cache_level: CacheLevel = GPU_LEVEL) -> list[StorageStatistics]:
    """By pool group. Raises ConfigError for a level that does not exist."""
    return manager.get_storage_statistics(cache_level)


def storage_utilization(manager: KVCacheManager, level: CacheLevel = GPU_LEVEL) -> list[float]:
    """Share of unavailable slots, 0..1, by pool group, which `resume` compares with `max_util_for_resume`."""
    return [item.unavailable / item.total if item.total else 0.0 for item in manager.get_storage_statistics(level)]


# --- pages


class PageInfo(NamedTuple):
    """The state of a page at the time of the call."""

    life_cycle: int
    level: int
    slot: int
    coverage: int  # attention: first tokens of its block that are valid; recurrent: position of the snapshot in the block
    priority: int
    status: PageStatus
    holds: int
    locks: int
    queued: bool  # whether it is in an eviction list
    linked: bool  # whether a block of the tree lists it
    plans: int  # planned drops that mark it


def page_info(page: Page | None) -> PageInfo | None:
    """The record of a page; None for none."""
    if page is None:
        return None
    return PageInfo(
        page.life_cycle,
        page.level,
        page.slot,
        page.coverage,
        page.priority,
        page.status(),
        page.holds,
        page.locks,
        page.queued,
        page.owner is not None,
        page.plans,
    )


def request_pages(cache: KVCache, life_cycle: int, beam: int = 0) -> list[Page | None]:
    """A request's pages of an attention life cycle, by block ordinal; stale ones that wait for a commit are listed too.

    Raises ConfigError for a life cycle that is recurrent or does not exist.
    """
    shared = cache.state.shared
    with shared.lock:
        table = cache.state.table(life_cycle, beam)
        if table is None:
            raise ConfigError(f"life cycle {life_cycle} is recurrent, or there is no such one: attention has {shared.attention}")
        return list(table.pages)


def state_page(cache: KVCache, beam: int = 0) -> Page | None:
    """The page of a request's live recurrent state; None without one."""
    recurrent_states = cache.state.recurrent_states()
    return recurrent_states[beam].page if recurrent_states else None


def active_page_stats(cache: KVCache) -> tuple[list[int], list[int]]:
    """(live pages by level, evictable live pages that are in no eviction list by level) of an open request.

    The second list is all zeros unless the storage has lost track of a page.
    """
    state = cache.state
    hierarchy = state.shared.hierarchy
    with state.shared.lock:
        counted = [0] * hierarchy.num_levels
        forgotten = [0] * hierarchy.num_levels
        for page in live_pages(cache):
            counted[page.level] += 1
            status = page.status()
            kept = status == PageStatus.LOCKED or (status == PageStatus.HELD and page.level == hierarchy.num_levels - 1)
            if not kept and not page.queued:
                forgotten[page.level] += 1
    return counted, forgotten


def live_pages(cache: KVCache) -> list[Page]:
    """The pages that a request's next step may read, recurrent state included; neither scratch nor stale ones."""
    with cache.state.shared.lock:
        return cache.state.live_pages()


def committed_page_is_linked(cache: KVCache, ordinal: int, life_cycle: int) -> bool | None:
    """Whether the request's page of a committed block is the tree's; None if it has none there, or the block is not committed."""
    pages = request_pages(cache, life_cycle)
    if not 0 <= ordinal < len(pages) or ordinal * cache.tokens_per_block >= cache.num_committed_tokens:
        return None
    page = pages[ordinal]
    return None if page is None else page.owner is not None


def is_commit_allowed(cache: KVCache) -> bool:
    """Whether tokens may still be committed. False after `stop_committing`, a commit with `is_end`, or `close`."""
    return cache.state.commit_allowed and cache.state.status != CLOSED


# --- the reuse tree


def num_tree_blocks(manager: KVCacheManager) -> int:
    """Cached blocks, roots not counted."""
    return manager.shared.tree.num_blocks


def num_roots(manager: KVCacheManager) -> int:
    """The number of scopes that have cached blocks, or blocks being computed."""
    return len(manager.shared.tree.roots())


def all_tree_blocks(manager: KVCacheManager) -> list[Block]:
    """Every cached block, parents before children; O(blocks)."""
    with manager.shared.lock:
        return manager.shared.tree.all_blocks()


def all_tree_pages_droppable(manager: KVCacheManager) -> bool:
    """Whether no cached page is held or locked. True once every request is closed."""
    with manager.shared.lock:
        pages = [page for block in manager.shared.tree.all_blocks() for page in block.pages if page is not None]
        return all(page.status() == PageStatus.DROPPABLE for page in pages)


def tree_path(manager: KVCacheManager, tokens: Sequence[int | bytes], scope: ReuseScope | None = None) -> list[Block]:
    """The blocks along the tokens: full ones that are equal, then the one of the longest common beginning, if any. Blocks count
    whether or not they have pages."""
    with manager.shared.lock:
        node = manager.shared.tree.find_root(scope if scope is not None else ReuseScope())
        path: list[Block] = []
        rest = list(tokens)
        while node is not None and rest:
            best: Block | None = None
            most = 0
            for child in node.child_blocks():
                common = _common(child.token_list(), rest)
                if common > most:
                    best, most = child, common
            node = None
            if best is not None:
                path.append(best)
                rest = rest[most:]
                if most == best.num_tokens:
                    node = best
        return path


def _common(first: Sequence[int | bytes], second: Sequence[int | bytes]) -> int:
    """Length of the common beginning."""
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length


def page_of(block: Block, life_cycle: int) -> Page | None:
    """The page that a block lists."""
    return block.page(life_cycle)


def path_coverage(manager: KVCacheManager, tokens: Sequence[int | bytes], life_cycle: int) -> list[int]:
    """How many tokens of each block along the path its page covers; 0 where there is no page."""
    pages = [block.page(life_cycle) for block in tree_path(manager, tokens)]
    return [0 if page is None else page.coverage for page in pages]


def path_levels(manager: KVCacheManager, tokens: Sequence[int | bytes], life_cycle: int = 0) -> list[int]:
    """The level of each page along the tokens; -1 where there is none."""
    pages = [block.page(life_cycle) for block in tree_path(manager, tokens)]
    return [-1 if page is None else page.level for page in pages]


class MatchDepths(NamedTuple):
    """How far a prompt matches: reused <= before_hybrid <= divergence <= lookup."""

    reused: int
    before_hybrid: int  # if no recurrent state had to be found
    divergence: int  # longest common beginning with anything cached, before back-off and missing pages
    lookup: int


def reuse_match_depths(manager: KVCacheManager, scope: ReuseScope | None, tokens: Tokens) -> MatchDepths:
    """What `create_kv_cache` would find, with the manager's own settings."""
    config = manager.init_config
    with manager.shared.lock:
        found = match(
            manager.shared.tree, scope or ReuseScope(), pack(tokens), config.enable_partial_reuse, config.reuse_match_backoff
        )
    return MatchDepths(found.num_tokens, found.before_hybrid, found.divergence, found.num_lookup_tokens)


def reuse_match_pages(
    manager: KVCacheManager, scope: ReuseScope | None, tokens: Tokens, life_cycle: int, enable_partial: bool = False
) -> tuple[int, list[tuple[int, int] | None]]:
    """(matched tokens, and (slot id, coverage) of the life cycle's page in each matched block, or None), without back-off."""
    with manager.shared.lock:
        found = match(manager.shared.tree, scope or ReuseScope(), pack(tokens), enable_partial, 0)
        pages = [block.page(life_cycle) for block in found.blocks]
        return found.num_tokens, [None if page is None else (page.slot, page.coverage) for page in pages]


def reuse_match_planned_drop_counts(
    manager: KVCacheManager, scope: ReuseScope | None, tokens: Tokens, life_cycle: int, enable_partial: bool = False
) -> list[int]:
    """How many planned drops name the life cycle's page in each matched block; 0 where there is none."""
    with manager.shared.lock:
        found = match(manager.shared.tree, scope or ReuseScope(), pack(tokens), enable_partial, 0)
        pages = [block.page(life_cycle) for block in found.blocks]
        return [0 if page is None else page.plans for page in pages]


# --- staged blocks


class StagedBlock:
    """A block that a test put into the tree, with real GPU pages of undefined contents. Opaque."""

    def __init__(self, shared: ManagerState, block: Block) -> None:
        self.shared = shared
        self.block = block
        self.closed = False


def make_test_block(
    manager: KVCacheManager,
    tokens: Sequence[int | bytes],
    coverage_per_lc: Sequence[int],
    parent: StagedBlock | None = None,
    reuse_scope: ReuseScope | None = None,
) -> StagedBlock:
    """Put a block of these tokens into the tree, with a page of each life cycle whose coverage is not 0.

    Raises ConfigError (a ValueError) for no tokens or too many, a list of another length, a coverage out of range, a parent that
    is not full, or a block that the tree has already or covers; OutOfPagesError without a free slot. Nothing has changed then.
    """
    shared = manager.shared
    packed = pack(list(tokens))
    count = packed.num_tokens
    if not 0 < count <= shared.tokens_per_block:
        raise ConfigError(f"a block of {count} tokens cannot be: it must have 1..{shared.tokens_per_block}")
    if len(coverage_per_lc) != len(shared.life_cycles):
        raise ConfigError(f"{len(coverage_per_lc)} coverages for {len(shared.life_cycles)} life cycles; give one of each for each")
    for coverage in coverage_per_lc:
        if not 0 <= coverage <= count:
            raise ConfigError(f"coverage {coverage} is out of range: the block has {count} tokens")
    with shared.lock:
        if parent is not None and (parent.closed or not parent.block.attached):
            raise ConfigError("the parent has left the tree")
        if parent is not None and parent.block.num_tokens < shared.tokens_per_block:
            raise ConfigError(f"a block of {parent.block.num_tokens} tokens has no children: only a full one has")
        need = [0] * shared.layout.num_pool_groups
        for index, coverage in enumerate(coverage_per_lc):
            need[shared.pool_group_of[index]] += 1 if coverage else 0
        above = parent.block if parent is not None else shared.tree.root(reuse_scope or ReuseScope())
        shared.tree.pin(above)
        try:
            shortage = shared.hierarchy.acquire(need, [])
            if shortage is not None or not above.attached:
                raise OutOfPagesError(f"too few slots for the test block beside its parent: {shortage}")
            block, outcome = shared.tree.insert(above, packed.data, count)
            if outcome != BLOCK_NEW:
                raise ConfigError("the tree has this block already, or a longer one that covers it")
        finally:
            shared.tree.unpin(above)
        for index, coverage in enumerate(coverage_per_lc):
            if coverage:
                page = shared.hierarchy.new_page(index, PRIORITY_DEFAULT)
                shared.tree.install(block, page, coverage)
                shared.hierarchy.unlock(page, NULL_POINT)
    return StagedBlock(shared, block)


def close_test_block(block: StagedBlock) -> None:
    """Remove a test block, its descendants and their pages from the tree. Idempotent."""
    with block.shared.lock:
        if block.closed:
            return
        block.closed = True
        if block.block.attached:
            block.shared.tree.remove(block.block)


def test_block_key(block: StagedBlock) -> bytes:
    """The block's chained key."""
    with block.shared.lock:
        return block.block.block_key()


def event_manager_add_stored_block(event_manager: CacheListener, block: StagedBlock) -> None:
    """Tell a listener of every page of a block, as the tree does when it was stored."""
    for life_cycle in block.shared.life_cycles:
        event_manager_add_stored_life_cycle(event_manager, block, life_cycle.index)


def event_manager_add_stored_life_cycle(event_manager: CacheListener, block: StagedBlock, life_cycle: int) -> None:
    """Tell a listener of one life cycle's page of a block, if it has one."""
    page = block.block.page(life_cycle)
    if page is not None:
        usable = block.shared.life_cycles[life_cycle].usable_tokens(page.coverage, block.block.num_tokens)
        event_manager.page_stored(block.block, life_cycle, page.level, page.priority, usable >= block.block.num_tokens)


# --- sizing and rebalancing


def current_gpu_ratio(manager: KVCacheManager) -> list[float]:
    """Each pool group's share of the bytes of all GPU slots."""
    return manager.shared.hierarchy.sizings[GPU_LEVEL].ratio(manager.shared.layout)


def set_num_sampled_kv_caches(manager: KVCacheManager, count: int) -> None:
    """Set the number of closed requests that were sampled."""
    manager.tuner.num_samples = count


def set_last_adjustment_time(manager: KVCacheManager, seconds: float) -> None:
    """Set the time of the last adjustment, on the manager's clock."""
    manager.tuner.last_adjustment_time = seconds


def set_target_ratio_list_gpu(manager: KVCacheManager, ratios: Sequence[float]) -> None:
    """Set the target shares of the GPU, by pool group. Raises ConfigError unless there is one share per pool group."""
    manager.tuner.set_gpu_weights(list(ratios))


def force_rebalance_precondition(manager: KVCacheManager, skew: float = 2.0) -> None:
    """Set up samples, cooldown and targets so that `need_adjustment` becomes true. The first group's target is `skew` times its
    share.

    Raises ConfigError (a ValueError) with fewer than two pool groups.
    """
    ratios = current_gpu_ratio(manager)
    if len(ratios) < 2:
        raise ConfigError("rebalancing needs at least two pool groups; this manager has one")
    ratios[0] *= skew
    total = sum(ratios)
    tuner = manager.tuner
    tuner.num_samples = max(SAMPLES_ENOUGH, tuner.min_samples)
    tuner.last_adjustment_time = tuner.clock() - tuner.cooldown_secs
    tuner.set_gpu_weights([ratio / total for ratio in ratios])


def grains_for_slots(num_slots: int, slot_sizes: Sequence[int], granularity: int) -> int:
    """Grains of memory that the pools of one group need for this many slots."""
    return sizing.grains_for_slots(num_slots, list(slot_sizes), granularity)


def grains_to_slots(grains: int, slot_sizes: Sequence[int], granularity: int) -> tuple[int, int]:
    """(the most slots that fit this many grains, the grains that they use)."""
    slots = sizing.grains_to_slots(grains, list(slot_sizes), granularity)
    return slots, sizing.grains_for_slots(slots, list(slot_sizes), granularity)


def ratio_to_slot_count_list(
    quota: int, slot_sizes: Sequence[Sequence[int]], ratios: Sequence[float], granularity: int, min_slots: Sequence[int]
) -> list[int]:
    """How a quota is divided between pool groups by ratio, with at least the minimum slots of each."""
    return sizing.split_quota(quota, granularity, [list(sizes) for sizes in slot_sizes], list(ratios), list(min_slots))


def compute_slots_for_batch(
    manager: KVCacheManager,
    batch: BatchDesc,
    tokens_per_block: int | None = None,
    swa_scratch_reuse: SwaScratchReuseConfig | None = None,
) -> list[int]:
    """Slots, by pool group, that a batch of requests needs: in this manager, or in one with these settings instead."""
    if tokens_per_block is None and swa_scratch_reuse is None:
        return batch_slots(manager.shared.layout, batch)
    config = manager.init_config
    other = dataclasses.replace(
        config,
        tokens_per_block=config.tokens_per_block if tokens_per_block is None else tokens_per_block,
        swa_scratch_reuse=config.swa_scratch_reuse if swa_scratch_reuse is None else swa_scratch_reuse,
    )
    return batch_slots(build_layout(other), batch)


# --- life cycles


def attention_life_cycle_ids(manager: KVCacheManager) -> list[LifeCycleId]:
    """Ids of the life cycles with full or windowed attention."""
    return [cycle.index for cycle in manager.shared.life_cycles if cycle.is_attention]


def swa_life_cycle_ids(manager: KVCacheManager) -> list[LifeCycleId]:
    """Ids of the life cycles with windowed attention."""
    return [cycle.index for cycle in manager.shared.life_cycles if cycle.window_size is not None]


def ssm_life_cycle_id(manager: KVCacheManager) -> LifeCycleId | None:
    """Id of the life cycle of recurrent layers; None if the model has none."""
    ssm = manager.shared.ssm
    return None if ssm is None else ssm.index


def pool_group_index(manager: KVCacheManager, life_cycle: int, level: CacheLevel = GPU_LEVEL) -> PoolGroupId:
    """The pool group of a life cycle."""
    return manager.get_life_cycle_pool_group_indices(level)[life_cycle]


def life_cycle_pool_group_indices(manager: KVCacheManager, level: CacheLevel = GPU_LEVEL) -> list[PoolGroupId]:
    """The pool group of each life cycle; the same on every level."""
    return manager.get_life_cycle_pool_group_indices(level)
