"""Beam search: several continuations of one prompt in one request.

Blocks that are full of history are shared; blocks that are still written exist once per beam. Widening leaves the full history
blocks to beam 0, and kernels share them: the index rows of other beams have BAD_PAGE_INDEX there. Each further beam gets a copy of
the partial last block and of the recurrent state. A block is committed from one beam: the manager does not know where a token's
bytes are inside a page, so it cannot combine beams.

    beam 0   P  P  P  P  P        history ends in block 3
    beam 1   -  -  -  P  P        -: shared with beam 0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kv_cache_manager_v2.errors import ConfigError, LogicError, OutOfPagesError
from kv_cache_manager_v2.ids import GPU_LEVEL
from kv_cache_manager_v2.request import publication
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.recurrent_state import RecurrentState
from kv_cache_manager_v2.request.request import ACTIVE, Request
from kv_cache_manager_v2.request.reservation import Reservation

ANY_BEAM: Final = -1  # tokens that all beams share: committed before the request was widened


def set_width(request: Request, width: int) -> None:
    """Widen or narrow a request.

    Raises ConfigError for an invalid width, LogicError in a state that does not allow a change, OutOfPagesError if there are too
    few slots for the copies. Nothing has changed then.
    """
    if width < 1:
        raise ConfigError(f"beam_width is {width}; it must be at least 1")
    if width == request.width:
        return
    if request.status != ACTIVE:
        raise LogicError("beam_width can change only while the cache is ACTIVE; resume() it first")
    if any(table.scratch for table in request.tables):
        raise LogicError("beam_width cannot change while scratch slots are in use; finish the prefill first")
    publication.check_settled(request, "beam_width")
    hierarchy = request.shared.hierarchy
    groups = [table.pool_group for table in request.tables] + [state.pool_group for state in request.recurrent_states()]
    most = min([hierarchy.total(GPU_LEVEL, group) for group in groups])
    if width > most:
        raise ConfigError(f"beam_width is {width}; it must be at most {most}: each beam needs a GPU page of its own")
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
    reservation = Reservation(shared, request.stream)
    shortage = reservation.make_free(need, [])
    if shortage is not None:
        request.last_shortage = shortage
        raise OutOfPagesError(f"no pages for beam width {width}: {shortage}")
    with reservation:
        _queue_copies(request, reservation, first, extra)
    tables: list[BlockTable] = []
    for _beam in range(extra):
        for table in request.main_tables:
            tables.append(_further_table(table, first, reservation))
        if request.recurrent is not None:
            request.more_recurrent.append(_further_state(request.recurrent, reservation))
    _count_copies(request, tables, first)
    request.tables = request.tables + tables
    request.width = width


def _queue_copies(request: Request, reservation: Reservation, first: int, extra: int) -> None:
    """Reserve the pages of the further beams, and queue the copies of partly written pages."""
    partial = request.history % request.tokens_per_block != 0
    recurrent = request.recurrent
    for _beam in range(extra):
        for table in request.main_tables:
            for page in table.pages[first:]:
                if page is not None:
                    reservation.reserve(table.index, table.pool_group, page.priority)
        if recurrent is not None:
            reservation.reserve(recurrent.index, recurrent.pool_group, 0)
    reservation.wait()
    at = 0
    for _beam in range(extra):
        for table in request.main_tables:
            for ordinal in range(first, len(table.pages)):
                page = table.pages[ordinal]
                if page is None:
                    continue
                if partial and ordinal == first:
                    reservation.copy(page, reservation.pages[at])
                at += 1
        if recurrent is not None:
            assert recurrent.page is not None, "an ACTIVE request has its state"
            reservation.copy(recurrent.page, reservation.pages[at])
            at += 1


def _further_table(source: BlockTable, first: int, reservation: Reservation) -> BlockTable:
    """The table of a further beam: no pages before block `first`, from there reserved ones."""
    table = BlockTable(source.life_cycle, source.pool_group, source.hierarchy)
    table.stale_start, table.stale_end = source.stale_start, source.stale_end
    for ordinal, page in enumerate(source.pages):
        table.append(None if ordinal < first or page is None else reservation.next(table.index, page.priority))
    return table


def _further_state(source: RecurrentState, reservation: Reservation) -> RecurrentState:
    twin = RecurrentState(source.life_cycle, source.pool_group)
    assert source.page is not None, "an ACTIVE request has its state"
    twin.page = reservation.next(source.index, source.page.priority)
    return twin


def _count_copies(request: Request, tables: list[BlockTable], first: int) -> None:
    """Count the pages of further beams: the copied one as a copy, all later ones as growth."""
    pending = request.pending
    if pending is None:
        return
    pending.before_growth(request.history)
    partial = request.history % request.tokens_per_block != 0
    for table in tables:
        own = first + 1 if partial else first
        if partial and first < len(table.pages) and table.pages[first] is not None:
            pending.copied[table.index] += 1
            pending.dirty = True
        table.pending_from = own
        request.count_allocated(table, own, sum([1 for page in table.pages[own:] if page is not None]))
    request.mark_dirty()


def _narrow(request: Request, width: int) -> None:
    """Remove the last beams. If the beam of the last committed token is among them, it becomes beam 0."""
    point = request.shared.timeline.record(request.stream)
    if request.last_beam >= width:
        request.exchange_beams(request.last_beam)
    keep = width * len(request.main_tables)
    for table in request.tables[keep:]:
        table.shrink(0, point)
        table.row.detach()
    request.tables = request.tables[:keep]
    for recurrent in request.more_recurrent[width - 1 :]:
        recurrent.end(request.shared.hierarchy, True, point)
    del request.more_recurrent[width - 1 :]
    request.width = width
    if width == 1:
        request.main_tables = request.tables
        request.tail_beam = ANY_BEAM
        request.last_beam = 0


def choose_beams(request: Request, count: int, indices: Sequence[int] | None) -> list[int]:
    """The beam from which each block is committed if `count` more tokens are. Changes nothing.

    The first block is the first one that is not full yet. `indices` names a beam for each token; None means beam 0. Raises
    ConfigError for a beam that does not exist, or a block whose tokens name different beams.
    """
    if indices is not None and len(indices) != count:
        raise ConfigError(f"beam_search_indices has {len(indices)} entries; it must have one for each of the {count} tokens")
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
