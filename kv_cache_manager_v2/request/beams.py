"""Beam search: several continuations of one prompt in one request.

Rule: what is settled is shared, what is still written is per beam. Widening leaves the full history blocks to beam 0 (the
others read BAD there: kernels share them) and gives each further beam a copy of the partial last block and of the recurrent
state. A block is committed from one beam: the manager does not know where a token's bytes lie inside a page, so it cannot mix them.

    beam 0   P  P  P  P  P        history ends in block 3
    beam 1   -  -  -  P  P        -: shared with beam 0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kv_cache_manager_v2.errors import ConfigError, KVCacheError, LogicError, OutOfPagesError
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, Point
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.private_pages import private_copy
from kv_cache_manager_v2.request.recurrent_state import RecurrentState
from kv_cache_manager_v2.request.request import ACTIVE, Request
from kv_cache_manager_v2.storage.page import Page

ANY_BEAM: Final = -1  # tokens that all beams share: committed before the request was widened


def set_width(request: Request, width: int) -> None:
    """Widen or narrow. Raises ConfigError or LogicError for a width that cannot be, OutOfPagesError if copies find no room:
    nothing changed."""
    if width < 1:
        raise ConfigError(f"beam width {width} is out of range: it must be at least 1")
    if width == request.width:
        return
    if request.status != ACTIVE:
        raise LogicError("the beam width can change only while the cache is ACTIVE")
    if any(table.scratch for table in request.tables):
        raise LogicError("the beam width cannot change while scratch slots are in use: finish the prefill first")
    if width > request.width:
        _widen(request, width)
    else:
        _narrow(request, width)


def _widen(request: Request, width: int) -> None:
    shared = request.shared
    first = request.history // request.tokens_per_block  # blocks before this one are full history, and shared
    extra = width - request.width
    need = [0] * shared.layout.num_pool_groups
    for table in request.main_tables:
        for page in table.pages[first:]:
            need[table.pool_group] += extra if page is not None else 0
    if request.recurrent is not None:
        need[request.recurrent.pool_group] += extra
    shortage = shared.hierarchy.acquire(need, [])
    if shortage is not None:
        request.last_shortage = shortage
        raise OutOfPagesError(f"no pages for beam width {width}: {shortage}")
    tables: list[BlockTable] = []
    recurrent_states: list[RecurrentState] = []
    try:
        for _beam in range(extra):
            for table in request.main_tables:
                tables.append(_copy_table(request, table, first))
            if request.recurrent is not None:
                recurrent_states.append(_copy_recurrent(request, request.recurrent))
    except KVCacheError:
        queued = shared.timeline.record_or_wait(request.stream)  # earlier copies may still be under way
        for table in tables:
            _free_table(request, table, queued)
        for recurrent in recurrent_states:
            recurrent.give_up(shared.hierarchy, True, queued)
        raise
    _count_copies(request, tables, first)
    request.tables = request.tables + tables
    request.more_recurrent.extend(recurrent_states)
    request.width = width


def _count_copies(request: Request, tables: list[BlockTable], first: int) -> None:
    """Count the pages that further beams took: the copied one as a copy, all behind it as if the beams had grown."""
    pending = request.pending
    if pending is None:
        return
    pending.before_growth(request.history)
    partial = request.history % request.tokens_per_block != 0
    for table in tables:
        behind = first + 1 if partial else first
        if partial and first < len(table.pages) and table.pages[first] is not None:
            pending.copied[table.index] += 1
            pending.dirty = True
        table.pending_from = behind
        request.count_taken(table, behind, sum([1 for page in table.pages[behind:] if page is not None]))
    request.mark_dirty()


def _copy_table(request: Request, source: BlockTable, first: int) -> BlockTable:
    """A table of a further beam: nothing before block `first`, from there private pages; the one where the history ends is
    copied."""
    table = BlockTable(source.life_cycle, source.pool_group)
    partial = request.history % request.tokens_per_block != 0
    try:
        for ordinal, page in enumerate(source.pages):
            if ordinal < first or page is None:
                table.pages.append(None)
                table.row.append(BAD_PAGE_INDEX)
                continue
            own = private_copy(request, page.life_cycle, page if partial and ordinal == first else None, page.priority)
            table.pages.append(own)
            table.row.append(own.slot)
    except KVCacheError:
        _free_table(request, table, request.shared.timeline.record_or_wait(request.stream))
        raise
    return table


def _copy_recurrent(request: Request, source: RecurrentState) -> RecurrentState:
    twin = RecurrentState(source.life_cycle, source.pool_group)
    page = source.page
    assert page is not None, "an ACTIVE request has its state"
    twin.page = private_copy(request, source.index, page, page.priority)
    return twin


def _free_table(request: Request, table: BlockTable, point: Point) -> None:
    """Give up all pages of a table; stale ones that wait for a commit are held, all others locked."""
    beg, end = table.stale(request.history)
    for ordinal in range(len(table.pages) - 1, -1, -1):
        page = table.pages[ordinal]
        if page is not None:
            table.pages[ordinal] = None
            if beg <= ordinal < end:
                request.shared.hierarchy.release(page)
            else:
                request.shared.hierarchy.unlock(page, point)
    table.row.blank()
    table.row.detach()


def _narrow(request: Request, width: int) -> None:
    """Drop the last beams; the beam that the last committed token came from becomes beam 0 if it would go."""
    if request.last_beam >= width:
        exchange_beams(request, request.last_beam)
    point = request.shared.timeline.record(request.stream)
    keep = width * len(request.main_tables)
    for table in request.tables[keep:]:
        _free_table(request, table, point)
    request.tables = request.tables[:keep]
    for recurrent in request.more_recurrent[width - 1 :]:
        recurrent.give_up(request.shared.hierarchy, True, point)
    del request.more_recurrent[width - 1 :]
    request.width = width
    if width == 1:
        request.main_tables = request.tables
        request.tail_beam = ANY_BEAM
        request.last_beam = 0


def exchange_beams(request: Request, beam: int) -> None:
    """Beam 0 and the beam that the last committed token came from swap all that is not committed in full blocks."""
    for ordinal in range(len(request.path), request.num_blocks):
        exchange_pages(request, ordinal, beam)
    recurrent = request.recurrent
    if recurrent is not None:
        other = request.more_recurrent[beam - 1]
        recurrent.page, other.page = other.page, recurrent.page
    if request.tail_beam == beam:
        request.tail_beam = 0
    request.last_beam = 0


def exchange_pages(request: Request, ordinal: int, beam: int) -> None:
    """Beam 0 and another one swap their pages of one block."""
    count = len(request.main_tables)
    for number, table in enumerate(request.main_tables):
        other = request.tables[beam * count + number]
        mine, theirs = table.pages[ordinal], other.pages[ordinal]
        if theirs is None:
            continue  # shared with beam 0
        table.pages[ordinal], other.pages[ordinal] = theirs, mine
        beg, end = table.stale(request.history)
        if request.status == ACTIVE and not beg <= ordinal < end:
            table.row.set(ordinal, theirs.slot)
            other.row.set(ordinal, mine.slot if mine is not None else BAD_PAGE_INDEX)


def choose_beams(request: Request, count: int, indices: Sequence[int] | None) -> list[int]:
    """The beam of each block that `count` more tokens touch, from the first one that is not full yet. Changes nothing.

    `indices` names a beam for each token; None means beam 0. Raises ConfigError for a beam that there is not, or a block whose
    tokens name different beams.
    """
    if indices is not None and len(indices) != count:
        raise ConfigError(f"beam_search_indices has {len(indices)} entries for {count} tokens")
    size = request.tokens_per_block
    chosen: list[int] = []
    beam = request.tail_beam
    position = request.tail_length()
    for index in range(count):
        wanted = 0 if indices is None else indices[index]
        if not 0 <= wanted < request.width:
            raise ConfigError(f"beam_search_indices[{index}] is {wanted}; the beams are 0..{request.width - 1}")
        if beam not in (ANY_BEAM, wanted):
            raise ConfigError(
                f"block {len(request.path) + len(chosen)} would mix beams {beam} and {wanted}: "
                "a block is committed from one beam; gather its tokens into one beam first"
            )
        beam = wanted
        position += 1
        if position == size:
            chosen.append(beam)
            beam = ANY_BEAM
            position = 0
    chosen.append(beam)
    return chosen


def settle_block(request: Request, ordinal: int, beam: int, point: Point) -> None:
    """A block is about to be committed from one beam: its pages become beam 0's, the other beams' are given up."""
    if beam > 0:
        exchange_pages(request, ordinal, beam)
    for table in request.tables[len(request.main_tables) :]:
        page: Page | None = table.pages[ordinal]
        if page is None:
            continue
        table.pages[ordinal] = None
        table.row.set(ordinal, BAD_PAGE_INDEX)
        beg, end = table.stale(request.history)
        if beg <= ordinal < end:
            request.shared.hierarchy.release(page)
        else:
            request.shared.hierarchy.unlock(page, point)
