"""Scratch slots: what a long prefill step lends to blocks that nobody reads after the step.

Rule: a block that will be out of its window when the step ends needs its keys and values only while one layer executes, so the
blocks of the scratch range share a few slots, layer after layer. A scratch block has no page and reads BAD; its page indices
come from the converter, which is told the range and the slots (`ScratchDesc`). What lies in scratch is never offered for reuse.
"""

from __future__ import annotations

from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.ids import PRIORITY_DEFAULT, Point
from kv_cache_manager_v2.layout.arithmetic import HalfOpenRange
from kv_cache_manager_v2.layout.page_index import ScratchDesc
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.request import Request


def spans(state: Request, history: int, capacity: int) -> list[tuple[int, int]]:
    """The scratch range of each lane at these lengths; an empty list while scratch is off."""
    if not state.scratch:
        return []
    return [lane.life_cycle.scratch(history, capacity, state.shared.max_rewind) for lane in state.lanes]


def slots(state: Request, lane: BlockTable, span: tuple[int, int]) -> int:
    """Slots that the blocks of a scratch range share."""
    beg, end = span
    return state.shared.layout.scratch_slots(lane.index, end - beg) if end > beg else 0


def missing(state: Request, of_lanes: list[tuple[int, int]]) -> list[int]:
    """Slots, by pool group, that the lanes' scratch ranges need beyond those that they have."""
    need = [0] * state.shared.layout.num_pool_groups
    for number, span in enumerate(of_lanes):
        lane = state.lanes[number]
        need[lane.pool_group] += max(0, slots(state, lane, span) - len(lane.scratch))
    return need


def take(state: Request, of_lanes: list[tuple[int, int]]) -> None:
    """Take the slots that the ranges need, which have been made free; our stream waits for their last users."""
    shared = state.shared
    for number, span in enumerate(of_lanes):
        lane = state.lanes[number]
        lane.scratch_span = span
        while len(lane.scratch) < slots(state, lane, span):
            page = shared.hierarchy.new_page(lane.index, PRIORITY_DEFAULT)
            lane.scratch.append(page)
            shared.timeline.wait(state.stream, page.ready)


def give_back(state: Request, of_lanes: list[tuple[int, int]], point: Point) -> None:
    """Give back the slots that the ranges no longer need; `point` is the end of our work on them."""
    for number, span in enumerate(of_lanes):
        lane = state.lanes[number]
        keep = slots(state, lane, span)
        while len(lane.scratch) > keep:
            state.shared.hierarchy.unlock(lane.scratch.pop(), point)
        lane.scratch_span = span


def give_back_all(state: Request, point: Point) -> None:
    """Suspended and closed requests have no scratch."""
    for lane in state.lanes:
        while lane.scratch:
            state.shared.hierarchy.unlock(lane.scratch.pop(), point)
        lane.scratch_span = (0, 0)


def check_capacity_change(state: Request, history: int) -> None:
    """Raise LogicError if blocks that lie in scratch now would have to become pages: their bytes are gone."""
    least = max(0, state.capacity - state.shared.max_rewind)
    if state.holds_scratch() and not least <= history:
        raise LogicError(
            f"with scratch reuse the capacity can change only once the history has reached {least} (capacity {state.capacity} less "
            f"max_rewind_len {state.shared.max_rewind}); it is {history}: advance it first, or in the same step"
        )


def describe(lane: BlockTable) -> ScratchDesc:
    """What the page-index converter needs; valid until the lengths change."""
    beg, end = lane.scratch_span
    return ScratchDesc(HalfOpenRange(beg, end), [page.slot for page in lane.scratch])


def switch(state: Request, on: bool) -> None:
    """Turn scratch reuse on or off for one request; only at lengths that need none. Raises ConfigError, nothing changed."""
    shared = state.shared
    if on == state.scratch:
        return
    if on and not shared.scratch:
        raise ConfigError("enable_swa_scratch_reuse: the manager was configured without swa_scratch_reuse")
    before = state.scratch
    state.scratch = True
    needed = any(end > beg for beg, end in spans(state, state.history, state.capacity))
    state.scratch = before
    if needed:
        raise ConfigError(
            f"enable_swa_scratch_reuse={on}: scratch blocks are needed at history {state.history} and capacity {state.capacity}; "
            "advance the history first"
        )
    state.scratch = on
    state.set_history(state.history)
