"""The few looks past the public face that acceptance needs: slot counts, and which page a tree block lists.

Rule: read only; every question that a test asks about the inside is asked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kv_cache_manager_v2 import KVCache, KVCacheManager, ReuseScope
from kv_cache_manager_v2.reuse.tokens import pack
from kv_cache_manager_v2.reuse.tree import Block
from kv_cache_manager_v2.sequence import residency
from kv_cache_manager_v2.storage.page import Page


class Counts(NamedTuple):
    """Slots of one pool group on one level."""

    total: int
    free: int
    evictable: int
    unavailable: int


def counts(manager: KVCacheManager, level: int = 0, group: int = 0) -> Counts:
    hierarchy = manager._shared.hierarchy
    return Counts(
        hierarchy.total(level, group),
        hierarchy.free(level, group),
        hierarchy.evictable(level, group),
        hierarchy.unavailable(level, group),
    )


def all_counts(manager: KVCacheManager) -> list[Counts]:
    """Of every level and pool group."""
    hierarchy = manager._shared.hierarchy
    groups = manager._shared.layout.num_pool_groups
    return [counts(manager, level, group) for level in range(hierarchy.num_levels) for group in range(groups)]


def num_tree_blocks(manager: KVCacheManager) -> int:
    return manager._shared.tree.num_blocks


def num_roots(manager: KVCacheManager) -> int:
    return len(manager._shared.tree.roots())


def tree_blocks(manager: KVCacheManager, tokens: Sequence[int | bytes], scope: ReuseScope | None = None) -> list[Block]:
    """The tree's blocks along the tokens: full ones that are equal, then the one of the longest common beginning, if any."""
    node: Block | None = manager._shared.tree.find_root(scope if scope is not None else ReuseScope())
    path: list[Block] = []
    rest = list(tokens)
    while node is not None and rest:
        best, most = None, 0
        for child in node.child_blocks():
            held = child.token_list()
            shared = 0
            while shared < min(len(held), len(rest)) and held[shared] == rest[shared]:
                shared += 1
            if shared > most:
                best, most = child, shared
        if best is None:
            break
        path.append(best)
        if most < len(best.token_list()):
            break
        rest = rest[most:]
        node = best
    return path


def page_of(block: Block, layer_group: int) -> Page | None:
    return block.pages[layer_group]


def coverage(manager: KVCacheManager, tokens: Sequence[int | bytes], layer_group: int) -> list[int]:
    """What the pages along the tokens are good for, block by block; 0 where there is none."""
    found = []
    for block in tree_blocks(manager, tokens):
        page = block.pages[layer_group]
        found.append(0 if page is None else page.coverage)
    return found


def pages_by_level(manager: KVCacheManager, tokens: Sequence[int | bytes], layer_group: int = 0) -> list[int]:
    """Level of each page along the tokens; -1 where there is none."""
    found = []
    for block in tree_blocks(manager, tokens):
        page = block.pages[layer_group]
        found.append(-1 if page is None else page.level)
    return found


class Depths(NamedTuple):
    """How far a prompt matches: reused <= before_hybrid <= divergence <= lookup."""

    reused: int
    before_hybrid: int  # without asking for snapshots of recurrent state
    divergence: int  # longest common beginning with anything cached
    lookup: int


def depths(manager: KVCacheManager, tokens: Sequence[int | bytes], scope: ReuseScope | None = None) -> Depths:
    found = manager._match(scope if scope is not None else ReuseScope(), pack(list(tokens)))
    return Depths(found.num_tokens, found.before_hybrid, found.divergence, found.num_lookup_tokens)


def state_page(cache: KVCache) -> Page | None:
    """The page of a cache's live recurrent state."""
    recurrence = cache._state.recurrence
    return None if recurrence is None else recurrence.page


def drop(manager: KVCacheManager, page: Page | None) -> None:
    """Lose a page, as if it had been evicted."""
    assert page is not None
    manager._shared.tree.drop_page(page)


def narrow(manager: KVCacheManager, block: Block, page: Page | None) -> None:
    """Let a page cover one token less of its block."""
    assert page is not None
    page.coverage -= 1
    manager._shared.tree.hide(block)  # both recount what the block's pages are good for
    manager._shared.tree.show(block)


def live_pages(cache: KVCache) -> list[Page]:
    """The pages that a cache's next step may read."""
    return residency.live_pages(cache._state)
