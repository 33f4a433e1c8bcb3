"""Questions of tests and tools about the internal state of a manager, and calls that stage a state for a test.

A question changes nothing and returns plain records. A call that changes something has a name that says so (`make_`, `close_`,
`set_`, `force_`). Nothing here is part of the interface for engines, and internal structures may change. Each
call takes the manager's lock, so another thread may ask while the engine works.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from kv_cache_manager_v2.config import BatchDesc, SwaScratchReuseConfig
from kv_cache_manager_v2.ids import GPU_LEVEL, CacheLevel, LifeCycleId, PageStatus, PoolGroupId
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.listener import CacheListener
from kv_cache_manager_v2.manager import KVCacheManager
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.tokens import Tokens
from kv_cache_manager_v2.statistics import StorageStatistics
from kv_cache_manager_v2.storage.page import Page

SAMPLES_ENOUGH: Final = 2001

class SlotCounts(NamedTuple):
    """Slots of one pool group on one level: total = free + evictable + unavailable."""

    total: int
    free: int
    evictable: int
    unavailable: int

def slot_counts(manager: KVCacheManager, level: int = 0, pool_group: int = 0) -> SlotCounts:
    """O(1)."""

def all_slot_counts(manager: KVCacheManager) -> list[SlotCounts]:
    """Of every level and pool group, level by level."""

def storage_statistics(manager: KVCacheManager, cache_level: CacheLevel = GPU_LEVEL) -> list[StorageStatistics]:
    """By pool group. Raises ConfigError for a level that does not exist."""

def storage_utilization(manager: KVCacheManager, level: CacheLevel = GPU_LEVEL) -> list[float]:
    """Share of unavailable slots, 0..1, by pool group, which `resume` compares with `max_util_for_resume`."""

class PageInfo(NamedTuple):
    """The state of a page at the time of the call."""

    life_cycle: int
    level: int
    slot: int
    coverage: int
    priority: int
    status: PageStatus
    holds: int
    locks: int
    queued: bool
    linked: bool
    plans: int

def page_info(page: Page | None) -> PageInfo | None:
    """The record of a page; None for none."""

def request_pages(cache: KVCache, life_cycle: int, beam: int = 0) -> list[Page | None]:
    """A request's pages of an attention life cycle, by block ordinal; stale ones that wait for a commit are listed too.

    Raises ConfigError for a life cycle that is recurrent or does not exist.
    """

def state_page(cache: KVCache, beam: int = 0) -> Page | None:
    """The page of a request's live recurrent state; None without one."""

def active_page_stats(cache: KVCache) -> tuple[list[int], list[int]]:
    """(live pages by level, evictable live pages that are in no eviction list by level) of an open request.

    The second list is all zeros unless the storage has lost track of a page.
    """

def live_pages(cache: KVCache) -> list[Page]:
    """The pages that a request's next step may read, recurrent state included; neither scratch nor stale ones."""

def committed_page_is_linked(cache: KVCache, ordinal: int, life_cycle: int) -> bool | None:
    """Whether the request's page of a committed block is the tree's; None if it has none there, or the block is not committed."""

def is_commit_allowed(cache: KVCache) -> bool:
    """Whether tokens may still be committed. False after `stop_committing`, a commit with `is_end`, or `close`."""

def num_tree_blocks(manager: KVCacheManager) -> int:
    """Cached blocks, roots not counted."""

def num_roots(manager: KVCacheManager) -> int:
    """The number of scopes that have cached blocks, or blocks being computed."""

def all_tree_blocks(manager: KVCacheManager) -> list[Block]:
    """Every cached block, parents before children; O(blocks)."""

def all_tree_pages_droppable(manager: KVCacheManager) -> bool:
    """Whether no cached page is held or locked. True once every request is closed."""

def tree_path(manager: KVCacheManager, tokens: Sequence[int | bytes], scope: ReuseScope | None = None) -> list[Block]:
    """The blocks along the tokens: full ones that are equal, then the one of the longest common beginning, if any. Blocks count
    whether or not they have pages."""

def page_of(block: Block, life_cycle: int) -> Page | None:
    """The page that a block lists."""

def path_coverage(manager: KVCacheManager, tokens: Sequence[int | bytes], life_cycle: int) -> list[int]:
    """How many tokens of each block along the path its page covers; 0 where there is no page."""

def path_levels(manager: KVCacheManager, tokens: Sequence[int | bytes], life_cycle: int = 0) -> list[int]:
    """The level of each page along the tokens; -1 where there is none."""

class MatchDepths(NamedTuple):
    """How far a prompt matches: reused <= before_hybrid <= divergence <= lookup."""

    reused: int
    before_hybrid: int
    divergence: int
    lookup: int

def reuse_match_depths(manager: KVCacheManager, scope: ReuseScope | None, tokens: Tokens) -> MatchDepths:
    """What `create_kv_cache` would find, with the manager's own settings."""

def reuse_match_pages(
    manager: KVCacheManager, scope: ReuseScope | None, tokens: Tokens, life_cycle: int, enable_partial: bool = False
) -> tuple[int, list[tuple[int, int] | None]]:
    """(matched tokens, and (slot id, coverage) of the life cycle's page in each matched block, or None), without back-off."""

def reuse_match_planned_drop_counts(
    manager: KVCacheManager, scope: ReuseScope | None, tokens: Tokens, life_cycle: int, enable_partial: bool = False
) -> list[int]:
    """How many planned drops name the life cycle's page in each matched block; 0 where there is none."""

class StagedBlock:
    """A block that a test put into the tree, with real GPU pages of undefined contents. Opaque."""

    shared: ManagerState
    block: Block
    closed: bool

    def __init__(self, shared: ManagerState, block: Block) -> None: ...

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

def close_test_block(block: StagedBlock) -> None:
    """Remove a test block, its descendants and their pages from the tree. Idempotent."""

def test_block_key(block: StagedBlock) -> bytes:
    """The block's chained key."""

def event_manager_add_stored_block(event_manager: CacheListener, block: StagedBlock) -> None:
    """Tell a listener of every page of a block, as the tree does when it was stored."""

def event_manager_add_stored_life_cycle(event_manager: CacheListener, block: StagedBlock, life_cycle: int) -> None:
    """Tell a listener of one life cycle's page of a block, if it has one."""

def current_gpu_ratio(manager: KVCacheManager) -> list[float]:
    """Each pool group's share of the bytes of all GPU slots."""

def set_num_sampled_kv_caches(manager: KVCacheManager, count: int) -> None:
    """Set the number of closed requests that were sampled."""

def set_last_adjustment_time(manager: KVCacheManager, seconds: float) -> None:
    """Set the time of the last adjustment, on the manager's clock."""

def set_target_ratio_list_gpu(manager: KVCacheManager, ratios: Sequence[float]) -> None:
    """Set the target shares of the GPU, by pool group. Raises ConfigError unless there is one share per pool group."""

def force_rebalance_precondition(manager: KVCacheManager, skew: float = 2.0) -> None:
    """Set up samples, cooldown and targets so that `need_adjustment` becomes true. The first group's target is `skew` times its
    share.

    Raises ConfigError (a ValueError) with fewer than two pool groups.
    """

def grains_for_slots(num_slots: int, slot_sizes: Sequence[int], granularity: int) -> int:
    """Grains of memory that the pools of one group need for this many slots."""

def grains_to_slots(grains: int, slot_sizes: Sequence[int], granularity: int) -> tuple[int, int]:
    """(the most slots that fit this many grains, the grains that they use)."""

def ratio_to_slot_count_list(
    quota: int, slot_sizes: Sequence[Sequence[int]], ratios: Sequence[float], granularity: int, min_slots: Sequence[int]
) -> list[int]:
    """How a quota is divided between pool groups by ratio, with at least the minimum slots of each."""

def compute_slots_for_batch(
    manager: KVCacheManager,
    batch: BatchDesc,
    tokens_per_block: int | None = None,
    swa_scratch_reuse: SwaScratchReuseConfig | None = None,
) -> list[int]:
    """Slots, by pool group, that a batch of requests needs: in this manager, or in one with these settings instead."""

def attention_life_cycle_ids(manager: KVCacheManager) -> list[LifeCycleId]:
    """Ids of the life cycles with full or windowed attention."""

def swa_life_cycle_ids(manager: KVCacheManager) -> list[LifeCycleId]:
    """Ids of the life cycles with windowed attention."""

def ssm_life_cycle_id(manager: KVCacheManager) -> LifeCycleId | None:
    """Id of the life cycle of recurrent layers; None if the model has none."""

def pool_group_index(manager: KVCacheManager, life_cycle: int, level: CacheLevel = GPU_LEVEL) -> PoolGroupId:
    """The pool group of a life cycle."""

def life_cycle_pool_group_indices(manager: KVCacheManager, level: CacheLevel = GPU_LEVEL) -> list[PoolGroupId]:
    """The pool group of each life cycle; the same on every level."""
