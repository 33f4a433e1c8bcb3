"""How a request starts: from what of its prompt is cached.

Rule: creation takes no GPU memory and moves nothing. It holds the pages of the match, wherever they lie, and counts what they save.
"""

from __future__ import annotations

from typing import Final

from kv_cache_manager_v2.ids import GPU_LEVEL
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.page_index_row import bad_run
from kv_cache_manager_v2.request.request import Request
from kv_cache_manager_v2.request.statistics_ledger import PendingStats
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.match import Match
from kv_cache_manager_v2.reuse.tokens import TokenSequence
from kv_cache_manager_v2.statistics import SsmSnapshotIterationStatsDelta

NO_LEVEL: Final = -1


def take_up(request: Request, match: Match, tokens: TokenSequence) -> None:
    """Start a new request from a match: hold the pages that it needs, none of them moved, and stand SUSPENDED at its length."""
    shared = request.shared
    count = match.num_tokens
    size = request.tokens_per_block
    priorities = _matched_priorities(request, match)
    request.committed = count
    request.divergence = match.divergence
    request.before_hybrid = match.before_hybrid
    request.set_history(count)
    request.set_capacity(count)
    full = count // size
    request.has_digests = bool(tokens.digests) and tokens.digests[0] < count
    request.path = match.blocks[:full]
    request.tail.write(tokens.slice_bytes(full * size, count))
    request.borrowed_tail = count % size != 0
    if full > 0:
        request.tip = match.blocks[full - 1]
        shared.tree.pin(match.blocks[full - 1])
    held: list[int] = []
    cold = 0
    for number, table in enumerate(request.tables):
        some, some_cold = _hold_matched(request, table, match, priorities[number] if priorities else [])
        held.append(some)
        cold += some_cold
    recurrent = request.recurrent
    if recurrent is not None and count > 0:
        snapshot = match.blocks[-1].page(recurrent.index)
        assert snapshot is not None, "a match ends at a snapshot"
        recurrent.borrow(shared.hierarchy, snapshot)
    _credit_levels(request, match, held, cold)
    if request.pending is not None:
        _count_reuse(request, request.pending, match, held, cold)
    shared.tuner.sample_reused(count)


def _matched_priorities(request: Request, match: Match) -> list[list[int]]:
    """The callback's priority of each page that the match gives, table by table; empty without a callback. Changes nothing."""
    if request.priority is None:
        return []
    priorities: list[list[int]] = []
    for table in request.tables:
        beg, end = table.life_cycle.stale(match.num_tokens)
        asked: list[int] = []
        for ordinal, block in enumerate(match.blocks):
            if not beg <= ordinal < end and block.page(table.index) is not None:
                asked.append(request.page_priority(ordinal, table.life_cycle))
        priorities.append(asked)
    return priorities


def _hold_matched(request: Request, table: BlockTable, match: Match, priorities: list[int]) -> tuple[int, int]:
    """Hold the pages of one life cycle that are not stale at the matched length; how many, and how many of them are not on the
    GPU."""
    hierarchy = request.shared.hierarchy
    beg, end = table.life_cycle.stale(match.num_tokens)
    held = 0
    cold = 0
    for ordinal, block in enumerate(match.blocks):
        page = None if beg <= ordinal < end else block.page(table.index)
        if page is not None:
            if priorities:
                hierarchy.raise_priority(page, priorities[held])
            hierarchy.hold(page)
            held += 1
            if page.level != GPU_LEVEL:
                cold += 1
        table.pages.append(page)
    table.row.fill(bad_run(request.num_blocks))
    return held, cold


def _credit_levels(request: Request, match: Match, held: list[int], cold: int) -> None:
    """Attribute the reused tokens of each block to the coldest level among the attention pages that it loads.

    A block that is stale in every life cycle loads none: its tokens belong to the coldest level of the pages that are cached, the
    GPU if there are none. Without attention the level is the snapshot's. `held` counts the pages of each table, `cold` those
    of all tables that are not on the GPU.
    """
    size = request.tokens_per_block
    if not request.tables and request.recurrent is not None and request.recurrent.page is not None:
        request.cached_tokens_by_level[request.recurrent.page.level] += request.committed
        return
    if cold == 0 and max(held, default=0) == request.num_blocks:  # no block is stale everywhere
        request.cached_tokens_by_level[GPU_LEVEL] += request.committed
        return
    for ordinal in range(request.num_blocks):
        level = NO_LEVEL
        for table in request.tables:
            page = table.pages[ordinal]
            if page is not None and page.level > level:
                level = page.level
        if level == NO_LEVEL:
            level = _coldest_cached(request, match.blocks[ordinal])
        request.cached_tokens_by_level[level] += min(size, request.committed - ordinal * size)


def _coldest_cached(request: Request, block: Block) -> int:
    """The coldest level of the block's cached attention pages; the GPU if it has none."""
    level: int = GPU_LEVEL
    for table in request.tables:
        page = block.page(table.index)
        if page is not None and page.level > level:
            level = page.level
    return level


def _count_reuse(request: Request, pending: PendingStats, match: Match, held: list[int], cold: int) -> None:
    """Count the blocks that the match saved, by the level of their pages, and the look-up of a snapshot.

    `held` pages by table, `cold` ones of all tables that are not on the GPU.
    """
    full = match.num_tokens // request.tokens_per_block
    for number, table in enumerate(request.tables):
        if cold == 0:
            partial = 1 if full < len(table.pages) and table.pages[full] is not None else 0
            pending.found(table.index, GPU_LEVEL, held[number] - partial, partial)
            continue
        for ordinal, page in enumerate(table.pages):
            if page is not None:
                partial = 0 if ordinal < full else 1
                pending.found(table.index, page.level, 1 - partial, partial)
    for level, count in enumerate(request.cached_tokens_by_level):
        pending.reused_tokens_by_level[level] = count
    pending.tail_matched = True
    request.settle_counts()
    looked_up = request.recurrent is not None and match.num_lookup_tokens > 0
    if looked_up:
        snapshots = pending.snapshots = SsmSnapshotIterationStatsDelta()
        snapshots.iter_snapshot_lookups = 1
        snapshots.iter_reused_tokens = match.num_tokens
        snapshots.iter_unreused_tokens = match.num_lookup_tokens - match.num_tokens
        if match.num_tokens == 0:
            snapshots.iter_snapshot_misses = 1
        else:
            snapshots.iter_snapshot_hits = 1
            if match.num_tokens % request.tokens_per_block == 0:
                snapshots.iter_aligned_snapshot_hits = 1
            else:
                snapshots.iter_unaligned_snapshot_hits = 1
    pending.dirty = match.num_tokens > 0 or looked_up
    request.mark_dirty()
