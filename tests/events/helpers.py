"""A tree over a fake storage that tells an event manager, and short ways to read what it says."""

from __future__ import annotations

from typing import Any

from kv_cache_manager_v2 import KVCacheManager
from kv_cache_manager_v2.events.manager import KVCacheEventManager
from kv_cache_manager_v2.events.mirror import EventMirror
from kv_cache_manager_v2.events.records import (
    BlockHash,
    KVCacheEvent,
    KVCacheRemovedData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    UniqueToken,
)
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.tokens import pack
from tests.support.storage_rig import make_cell
from tests.support.tree_rig import EMPTY_SCOPE, Cache, Token


def events_of(manager: KVCacheEventManager) -> list[KVCacheEvent]:
    """Flush, and read what there is."""
    manager.flush_iteration_events()
    return manager.get_latest_events(0)


def brief(events: list[KVCacheEvent]) -> list[tuple[Any, ...]]:
    """(kind, layer group, what): stored hashes, removed hashes, (hash, old level, new level), or blocks per level."""
    result: list[tuple[Any, ...]] = []
    for event in events:
        data = event.data
        if isinstance(data, KVCacheStoredData):
            result.append(("stored", event.layer_group_id, [block.block_hash for block in data.blocks]))
        elif isinstance(data, KVCacheRemovedData):
            result.append(("removed", event.layer_group_id, list(data.block_hashes)))
        elif isinstance(data, KVCacheUpdatedData):
            assert data.cache_level is not None
            assert data.priority is None
            diff = data.cache_level
            result.append(("updated", event.layer_group_id, (data.block_hash, diff.old_value, diff.new_value)))
        else:
            result.append(("created", event.layer_group_id, list(data.num_blocks_per_cache_level)))
    return result


def stored(event: KVCacheEvent) -> KVCacheStoredData:
    assert isinstance(event.data, KVCacheStoredData), event
    return event.data


def stored_tokens(event: KVCacheEvent) -> list[list[int | str]]:
    return [[token.token_id for token in block.tokens] for block in stored(event).blocks]


def unique(*tokens: int | str) -> list[UniqueToken]:
    return [UniqueToken(token) for token in tokens]


def block_at(cache: Cache, parent: Block | None, tokens: list[Token], scope: ReuseScope = EMPTY_SCOPE) -> Block:
    """A block below another one (None: below the scope's root), without pages."""
    part = pack(tokens)
    block, _how = cache.tree.insert(parent if parent is not None else cache.tree.root(scope), part.data, part.num_tokens)
    return block


def relocate(block: Block, life_cycle: int, level: int) -> None:
    """Move a block's page to another cache level, as the storage would."""
    page = block.pages[life_cycle]
    assert page is not None
    source = page.level
    page.cell = make_cell(level)
    block.page_relocated(page, source, level)


def mirror_contents(mirror: EventMirror) -> dict[tuple[BlockHash, int], int]:
    """Cache level by (hash, layer group)."""
    return {(name, group): level for name, block in mirror.blocks.items() for group, level in block.levels.items()}


def tree_contents(manager: KVCacheManager) -> dict[tuple[str, int], int]:
    """What a mirror must show of a manager whose events are hexadecimal keys of the tree's own hash: covering pages of blocks."""
    tree = manager.shared.tree
    found: dict[tuple[str, int], int] = {}
    for block in tree.all_blocks():
        for life_cycle in tree.life_cycles:
            page = block.pages[life_cycle.index]
            if page is not None and life_cycle.usable_tokens(page.coverage, block.num_tokens) >= block.num_tokens:
                found[block.block_key().hex(), life_cycle.index] = page.level
    return found
