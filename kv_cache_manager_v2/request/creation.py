"""Creation of a request from the cached prefix of its prompt.

Creation allocates no GPU memory and moves no page. It holds the pages of the match on the levels where they are, and counts them.
"""

from __future__ import annotations

from kv_cache_manager_v2.ids import GPU_LEVEL
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.publication import begin_use
from kv_cache_manager_v2.request.request import Request
from kv_cache_manager_v2.request.statistics_ledger import PendingStats
from kv_cache_manager_v2.reuse.match import Match
from kv_cache_manager_v2.reuse.tokens import TokenSequence
from kv_cache_manager_v2.statistics import SsmSnapshotIterationStatsDelta
from kv_cache_manager_v2.storage.page import MOST_USES, Page


def start(request: Request, match: Match, tokens: TokenSequence) -> None:
    """Start a SUSPENDED request from a match, whose tokens are committed and whose pages it holds. O(blocks x layer groups)."""
    shared = request.shared
    if not request.excluded():
        shared.losses.count(match)
        if shared.live_curve is not None:
            request.sampled = shared.live_curve.look_up(request.scope, tokens, match.blocks)
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
    levels = _hold_matched(request, match, priorities)
    begin_use(request, match.blocks)
    recurrent = request.recurrent
    if recurrent is not None and count > 0:
        snapshot = match.blocks[-1].page(recurrent.index)
        assert snapshot is not None, "a match ends at a snapshot"
        recurrent.borrow(shared.hierarchy, snapshot)
    _credit_levels(request, levels)
    if request.pending is not None:
        _count_lookup(request, request.pending, match)
    shared.tuner.sample_reused(count)


def _matched_priorities(request: Request, match: Match) -> list[list[int]]:
    """The callback's priority of each matched page, table by table; empty without a callback. Changes nothing."""
    if request.priority is None:
        return []
    priorities: list[list[int]] = []
    for table in request.tables:
        start, end = table.life_cycle.stale(match.num_tokens)
        asked: list[int] = []
        for ordinal, block in enumerate(match.blocks):
            if not start <= ordinal < end and block.page(table.index) is not None:
                asked.append(request.page_priority(ordinal, table.life_cycle))
        priorities.append(asked)
    return priorities


class _Column:
    """What one table holds of a match."""

    def __init__(self, table: BlockTable, blocks: int, priorities: list[int]) -> None:
        self.table = table
        self.life_cycle: int = table.index
        self.stale_start = table.stale_start
        self.stale_end = table.stale_end
        self.pages: list[Page | None] = [None] * blocks
        self.priorities = priorities  # from the callback, one for each held page; empty without a callback
        self.held = 0
        self.on_gpu = 0  # pages of full blocks on the GPU, which are counted together at the end


def _hold_matched(request: Request, match: Match, priorities: list[list[int]]) -> list[int]:
    """Hold and count the pages of the match that are not stale.

    Returns the level to which each block's tokens are credited; empty if it is the GPU for all blocks.
    """
    hierarchy = request.shared.hierarchy
    tables = request.tables
    blocks = match.blocks
    pending = request.pending
    full = match.num_tokens // request.tokens_per_block
    counts_uses = hierarchy.counts_uses
    columns: list[_Column] = []
    for number, table in enumerate(tables):
        columns.append(_Column(table, len(blocks), priorities[number] if priorities else []))
    count = len(columns)
    levels: list[int] = []
    for ordinal, block in enumerate(blocks):
        page = block.first
        number = 0
        loaded: int = -1  # the coldest level among the block's pages that are held
        cached: int = GPU_LEVEL  # the coldest level among all of its attention pages
        while page is not None and number < count:  # tables and the pages of a block are both ordered by life cycle
            column = columns[number]
            if column.life_cycle < page.life_cycle:
                number += 1
                continue
            if column.life_cycle == page.life_cycle:
                level = page.cell.level
                if level > cached:
                    cached = level
                if not column.stale_start <= ordinal < column.stale_end:
                    if priorities:
                        hierarchy.raise_priority(page, column.priorities[column.held])
                    hierarchy.hold(page)
                    if counts_uses and page.uses < MOST_USES:
                        page.uses += 1
                    column.pages[ordinal] = page
                    column.held += 1
                    if level > loaded:
                        loaded = level
                    if level == GPU_LEVEL and ordinal < full:
                        column.on_gpu += 1
                    elif pending is not None:
                        pending.found(column.life_cycle, level, 1 if ordinal < full else 0, 0 if ordinal < full else 1)
            page = page.next_in_block
        if loaded < 0:
            loaded = cached
        if loaded != GPU_LEVEL:
            if not levels:
                levels = [GPU_LEVEL] * len(blocks)
            levels[ordinal] = loaded
    for column in columns:
        column.table.share(column.pages)
        if pending is not None:
            pending.found(column.life_cycle, GPU_LEVEL, column.on_gpu, 0)
    request.mark_counted()
    return levels


def _credit_levels(request: Request, levels: list[int]) -> None:
    """Credit the reused tokens of each block to the coldest level among its held attention pages.

    A block that is stale in every life cycle has none held: the coldest level of its cached pages counts. In a model without
    attention, the level of the snapshot counts.
    """
    credit = request.cached_tokens_by_level
    if not request.tables and request.recurrent is not None and request.recurrent.page is not None:
        last: int = request.recurrent.page.level
        credit[last] += request.committed
    elif not levels:
        last = GPU_LEVEL
        credit[last] += request.committed
    else:
        size = request.tokens_per_block
        for ordinal, level in enumerate(levels):
            credit[level] += min(size, request.committed - ordinal * size)
        last = levels[-1]
    if request.committed > 0:
        request.last_cached_level = last


def _count_lookup(request: Request, pending: PendingStats, match: Match) -> None:
    """Count the reused tokens by level, and the snapshot look-up."""
    for level, count in enumerate(request.cached_tokens_by_level):
        pending.reused_tokens_by_level[level] = count
    pending.tail_matched = True
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
