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


def set_width(state: Request, width: int) -> None:
    """Widen or narrow. Raises ConfigError or LogicError for a width that cannot be, OutOfPagesError if copies find no room:
    nothing changed."""
    if width < 1:
        raise ConfigError(f"beam width {width} is out of range: it must be at least 1")
    if width == state.width:
        return
    if state.status != ACTIVE:
        raise LogicError("the beam width can change only while the cache is ACTIVE")
    if any(lane.scratch for lane in state.lanes):
        raise LogicError("the beam width cannot change while scratch slots are in use: finish the prefill first")
    if width > state.width:
        _widen(state, width)
    else:
        _narrow(state, width)


def _widen(state: Request, width: int) -> None:
    shared = state.shared
    first = state.history // state.tokens_per_block  # blocks before this one are full history, and shared
    extra = width - state.width
    need = [0] * shared.layout.num_pool_groups
    for lane in state.main_lanes:
        for page in lane.pages[first:]:
            need[lane.pool_group] += extra if page is not None else 0
    if state.recurrence is not None:
        need[state.recurrence.pool_group] += extra
    shortage = shared.hierarchy.acquire(need, [])
    if shortage is not None:
        state.last_shortage = shortage
        raise OutOfPagesError(f"no pages for beam width {width}: {shortage}")
    lanes: list[BlockTable] = []
    recurrences: list[RecurrentState] = []
    try:
        for _beam in range(extra):
            for lane in state.main_lanes:
                lanes.append(_copy_lane(state, lane, first))
            if state.recurrence is not None:
                recurrences.append(_copy_recurrence(state, state.recurrence))
    except KVCacheError:
        queued = shared.timeline.record_or_wait(state.stream)  # earlier copies may still be under way
        for lane in lanes:
            _free_lane(state, lane, queued)
        for recurrence in recurrences:
            recurrence.give_up(shared.hierarchy, True, queued)
        raise
    _count_copies(state, lanes, first)
    state.lanes = state.lanes + lanes
    state.extra_recurrences.extend(recurrences)
    state.width = width


def _count_copies(state: Request, lanes: list[BlockTable], first: int) -> None:
    """Count the pages that further beams took: the copied one as a copy, all behind it as if the beams had grown."""
    pending = state.pending
    if pending is None:
        return
    pending.before_growth(state.history)
    partial = state.history % state.tokens_per_block != 0
    for lane in lanes:
        behind = first + 1 if partial else first
        if partial and first < len(lane.pages) and lane.pages[first] is not None:
            pending.copied[lane.index] += 1
            pending.dirty = True
        lane.pending_from = behind
        state.count_taken(lane, behind, sum([1 for page in lane.pages[behind:] if page is not None]))
    state.mark_dirty()


def _copy_lane(state: Request, source: BlockTable, first: int) -> BlockTable:
    """A lane of a further beam: nothing before block `first`, from there private pages; the one where the history ends is
    copied."""
    lane = BlockTable(source.life_cycle, source.pool_group)
    partial = state.history % state.tokens_per_block != 0
    try:
        for ordinal, page in enumerate(source.pages):
            if ordinal < first or page is None:
                lane.pages.append(None)
                lane.row.append(BAD_PAGE_INDEX)
                continue
            own = private_copy(state, page.life_cycle, page if partial and ordinal == first else None, page.priority)
            lane.pages.append(own)
            lane.row.append(own.slot)
    except KVCacheError:
        _free_lane(state, lane, state.shared.timeline.record_or_wait(state.stream))
        raise
    return lane


def _copy_recurrence(state: Request, source: RecurrentState) -> RecurrentState:
    twin = RecurrentState(source.life_cycle, source.pool_group)
    page = source.page
    assert page is not None, "an ACTIVE request has its state"
    twin.page = private_copy(state, source.index, page, page.priority)
    return twin


def _free_lane(state: Request, lane: BlockTable, point: Point) -> None:
    """Give up all pages of a lane; stale ones that wait for a commit are held, all others locked."""
    beg, end = lane.stale(state.history)
    for ordinal in range(len(lane.pages) - 1, -1, -1):
        page = lane.pages[ordinal]
        if page is not None:
            lane.pages[ordinal] = None
            if beg <= ordinal < end:
                state.shared.hierarchy.release(page)
            else:
                state.shared.hierarchy.unlock(page, point)
    lane.row.blank()
    lane.row.detach()


def _narrow(state: Request, width: int) -> None:
    """Drop the last beams; the beam that the last committed token came from becomes beam 0 if it would go."""
    if state.last_beam >= width:
        exchange_beams(state, state.last_beam)
    point = state.shared.timeline.record(state.stream)
    keep = width * len(state.main_lanes)
    for lane in state.lanes[keep:]:
        _free_lane(state, lane, point)
    state.lanes = state.lanes[:keep]
    for recurrence in state.extra_recurrences[width - 1 :]:
        recurrence.give_up(state.shared.hierarchy, True, point)
    del state.extra_recurrences[width - 1 :]
    state.width = width
    if width == 1:
        state.main_lanes = state.lanes
        state.tail_beam = ANY_BEAM
        state.last_beam = 0


def exchange_beams(state: Request, beam: int) -> None:
    """Beam 0 and the beam that the last committed token came from swap all that is not committed in full blocks."""
    for ordinal in range(len(state.path), state.num_blocks):
        exchange_pages(state, ordinal, beam)
    recurrence = state.recurrence
    if recurrence is not None:
        other = state.extra_recurrences[beam - 1]
        recurrence.page, other.page = other.page, recurrence.page
    if state.tail_beam == beam:
        state.tail_beam = 0
    state.last_beam = 0


def exchange_pages(state: Request, ordinal: int, beam: int) -> None:
    """Beam 0 and another one swap their pages of one block."""
    count = len(state.main_lanes)
    for number, lane in enumerate(state.main_lanes):
        other = state.lanes[beam * count + number]
        mine, theirs = lane.pages[ordinal], other.pages[ordinal]
        if theirs is None:
            continue  # shared with beam 0
        lane.pages[ordinal], other.pages[ordinal] = theirs, mine
        beg, end = lane.stale(state.history)
        if state.status == ACTIVE and not beg <= ordinal < end:
            lane.row.set(ordinal, theirs.slot)
            other.row.set(ordinal, mine.slot if mine is not None else BAD_PAGE_INDEX)


def choose_beams(state: Request, count: int, indices: Sequence[int] | None) -> list[int]:
    """The beam of each block that `count` more tokens touch, from the first one that is not full yet. Changes nothing.

    `indices` names a beam for each token; None means beam 0. Raises ConfigError for a beam that there is not, or a block whose
    tokens name different beams.
    """
    if indices is not None and len(indices) != count:
        raise ConfigError(f"beam_search_indices has {len(indices)} entries for {count} tokens")
    size = state.tokens_per_block
    chosen: list[int] = []
    beam = state.tail_beam
    position = state.tail_length()
    for index in range(count):
        wanted = 0 if indices is None else indices[index]
        if not 0 <= wanted < state.width:
            raise ConfigError(f"beam_search_indices[{index}] is {wanted}; the beams are 0..{state.width - 1}")
        if beam not in (ANY_BEAM, wanted):
            raise ConfigError(
                f"block {len(state.path) + len(chosen)} would mix beams {beam} and {wanted}: "
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


def settle_block(state: Request, ordinal: int, beam: int, point: Point) -> None:
    """A block is about to be committed from one beam: its pages become beam 0's, the other beams' are given up."""
    if beam > 0:
        exchange_pages(state, ordinal, beam)
    for lane in state.lanes[len(state.main_lanes) :]:
        page: Page | None = lane.pages[ordinal]
        if page is None:
            continue
        lane.pages[ordinal] = None
        lane.row.set(ordinal, BAD_PAGE_INDEX)
        beg, end = lane.stale(state.history)
        if beg <= ordinal < end:
            state.shared.hierarchy.release(page)
        else:
            state.shared.hierarchy.unlock(page, point)
