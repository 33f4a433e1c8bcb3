"""Resize: history advances, capacity grows or shrinks.

Rule: everything is checked and planned before anything changes. A step inside a block changes two integers; otherwise the cost
is that of the blocks that come, go or fall out of a window, never of the sequence.
"""

from __future__ import annotations

from kv_cache_manager_v2.arguments import WORD_LIMIT
from kv_cache_manager_v2.errors import ConfigError, KVCacheError
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, GPU_LEVEL, NULL_POINT, PRIORITY_DEFAULT, Point
from kv_cache_manager_v2.request import scratch
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.page_index_row import SlotWriter
from kv_cache_manager_v2.request.request import ACTIVE, Request
from kv_cache_manager_v2.storage.page import Page


def stay_inside_block(state: Request, capacity: int) -> bool:
    """The decode step: a capacity that needs the blocks that there are. False, nothing changed, if it is not that simple."""
    if (
        state.steady_above < capacity <= state.steady_to
        and capacity >= state.history
        and state.status == ACTIVE
        and state.provision is None
        and not state.lost
        and (not state.scratch or (capacity < state.scratch_from and not state.holds_scratch()))
    ):
        state.capacity = capacity
        state.last_shortage = None
        state.capacity_sum += capacity
        state.history_sum += state.history
        state.num_samples += 1
        return True
    return False


def add_blocks(state: Request, capacity: int) -> bool:
    """The decode step that needs another block, or more: there are free slots, nothing leaves and nobody is asked. False, nothing
    changed, if it is not that simple.

    Does what `resize` does with that capacity. Lock held; the caller has checked that the request is ACTIVE.
    """
    if capacity <= state.steady_to or state.scratch or state.priority is not None:
        return False
    shared = state.shared
    blocks = -(-capacity // state.tokens_per_block)
    wanted = (blocks - state.num_blocks) * state.width
    allocators = shared.hierarchy.levels.allocators
    for group in range(len(shared.lanes_in_group)):
        if shared.lanes_in_group[group] * wanted > allocators[group].free:
            return False
    for lane in state.lanes:
        if lane.row.buffer is not None and lane.row.room() < blocks:
            return False
    if state.pending is not None:
        state.pending.before_growth(state.history)
    count = blocks - state.num_blocks
    try:
        for lane in state.lanes:
            _add_pages(state, lane, count)  # behind the history: none is stale
    except KVCacheError:
        _take_back(state)
        raise
    for lane in state.lanes:
        state.count_taken(lane, state.num_blocks, count)
    state.mark_dirty()
    state.set_capacity(capacity)
    state.last_shortage = None
    return True


def resize(state: Request, capacity: int, history: int) -> bool:
    """Move to these lengths; False, with nothing changed but `last_shortage`, if the pages cannot be had.

    Raises ConfigError for lengths that can never be right. After a failure of the device that is raised, the history may have
    advanced. The caller has checked that the request is ACTIVE.
    """
    check_lengths(state, capacity, history)
    blocks = -(-capacity // state.tokens_per_block)
    if blocks > state.num_blocks:
        _check_room(state, blocks)
    spans = scratch.spans(state, history, capacity)
    leaving = pages_leaving(state, history)
    leaving.extend(_pages_for_scratch(state, spans))
    need = scratch.missing(state, spans)
    _add_new_blocks(state, need, history, blocks, spans)
    priorities = _new_priorities(state, blocks, need)
    if not _make_room(state, need, leaving, spans, history):
        return False
    if blocks > state.num_blocks and state.pending is not None:
        state.pending.before_growth(state.history)
    state.set_history(history)
    if blocks < state.num_blocks:
        _shrink(state, blocks)
    try:
        taken = _grow(state, blocks, priorities, spans)
        scratch.take(state, spans)
    except KVCacheError:
        _take_back(state)
        _stand_at(state, history)
        raise
    for number, count in enumerate(taken):
        state.count_taken(state.lanes[number], state.num_blocks, count)
    state.mark_dirty()
    state.set_capacity(capacity)
    state.last_shortage = None
    return True


def advance_history(state: Request, history: int, point: Point) -> None:
    """Settle tokens: pages that fall out of a window go, scratch that is no longer needed too. Needs no page.

    `point` is the end of our work on them.
    """
    leaving = pages_leaving(state, history)
    spans = scratch.spans(state, history, state.capacity)
    if leaving or spans:
        _let_go(state, leaving, spans, point)
    state.set_history(history)


def _make_room(state: Request, need: list[int], leaving: list[Leaving], spans: list[tuple[int, int]], history: int) -> bool:
    """Let go of what the new lengths do not need and free the slots that they do, or change nothing.

    What leaves counts as room for what comes: a window that slides needs no more pages than it has.
    """
    hierarchy = state.shared.hierarchy
    given = [item.page for item in leaving if not item.stays_held]
    for number, span in enumerate(spans):
        lane = state.lanes[number]
        given.extend(lane.scratch[scratch.slots(state, lane, span) :])
    if any(need):
        if leaving or given:
            parked = [item.page for item in leaving if item.stays_held]
            shortage = hierarchy.foresee(need, given, parked)
        else:
            shortage = hierarchy.acquire(need, [])
        if shortage is not None:
            group = shortage.pool_group
            if not shortage.permanent and need[group] + _staying(state, group, leaving, given) > hierarchy.total(GPU_LEVEL, group):
                shortage.permanent = True
            state.last_shortage = shortage
            return False
    if leaving or given:
        _let_go(state, leaving, spans, state.shared.timeline.record(state.stream))
        if any(need):
            try:
                shortage = hierarchy.acquire(need, [])
            except KVCacheError:
                _stand_at(state, history)
                raise
            assert shortage is None, "what was foreseen fits"
    return True


def _stand_at(state: Request, history: int) -> None:
    """The device failed when pages had been let go: the history has advanced all the same. With scratch reuse, where blocks behind
    the history may have lost their pages too, the capacity is cut to it."""
    state.set_history(history)
    if state.scratch:
        scratch.give_back_all(state, state.shared.timeline.record(state.stream))
        _shrink(state, -(-history // state.tokens_per_block))
        state.set_capacity(history)


def _staying(state: Request, group: int, leaving: list[Leaving], given: list[Page]) -> int:
    """GPU slots of a pool group that the request itself goes on using: no eviction gets those. O(blocks), on a shortage only."""
    count = 0
    for lane in state.lanes:
        if lane.pool_group == group:
            beg, end = lane.stale(state.history)
            count += len(lane.scratch)
            for ordinal, page in enumerate(lane.pages):
                if page is not None and not beg <= ordinal < end:
                    count += 1
    for recurrence in state.recurrences():
        if recurrence.pool_group == group and recurrence.page is not None:
            count += 1
    for page in given:
        if page.pool_group == group:
            count -= 1
    for item in leaving:
        if item.lane.pool_group == group and item.stays_held:
            count -= 1
    return count


def _let_go(state: Request, leaving: list[Leaving], spans: list[tuple[int, int]], point: Point) -> None:
    """Unlock pages that fell out of a window or whose block lies in scratch now, and give back scratch slots; `point` is the end of
    our work on them.

    A page whose block may still be committed stays held, so that a later commit can publish it; every other one is given up.
    """
    hierarchy = state.shared.hierarchy
    for item in leaving:
        item.lane.row.set(item.ordinal, BAD_PAGE_INDEX)
        if item.stays_held:
            hierarchy.hold_locked(item.page, point)
        else:
            item.lane.pages[item.ordinal] = None
            hierarchy.unlock(item.page, point)
    scratch.give_back(state, spans, point)


def check_lengths(state: Request, capacity: int, history: int) -> None:
    """Raise ConfigError unless history <= capacity and the history does not go back."""
    if history < state.history:
        raise ConfigError(f"history_length {history} is below the present {state.history}: settled tokens cannot be unsettled")
    if capacity >= WORD_LIMIT:
        raise ConfigError(f"capacity {capacity} is beyond all bounds; it must be below 2**63")
    if capacity < history:
        raise ConfigError(f"capacity {capacity} is below history_length {history}: it must cover the history")
    if capacity != state.capacity:
        scratch.check_capacity_change(state, history)


class Leaving:
    """A locked page that the new lengths do not need: it falls out of its window, or its block lies in scratch now."""

    def __init__(self, lane: BlockTable, ordinal: int, page: Page, stays_held: bool) -> None:
        self.lane = lane
        self.ordinal = ordinal
        self.page = page
        self.stays_held = stays_held  # it waits for its block's commit


def pages_leaving(state: Request, history: int) -> list[Leaving]:
    """The locked pages that fall out of a window when `history` tokens are settled."""
    leaving: list[Leaving] = []
    if history < state.next_stale:
        return leaving
    for lane in state.lanes:
        _old_beg, old_end = lane.stale(state.history)
        beg, end = lane.stale(history)
        for ordinal in range(max(old_end, beg), end):
            page = lane.pages[ordinal]
            if page is not None:
                leaving.append(Leaving(lane, ordinal, page, _stays_held(state, ordinal)))
    return leaving


def _pages_for_scratch(state: Request, spans: list[tuple[int, int]]) -> list[Leaving]:
    """Pages of blocks that the scratch range has grown over: what is written there next goes to scratch."""
    leaving: list[Leaving] = []
    for number, (beg, end) in enumerate(spans):
        lane = state.lanes[number]
        for ordinal in range(beg, min(end, len(lane.pages))):
            page = lane.pages[ordinal]
            if page is not None:
                leaving.append(Leaving(lane, ordinal, page, False))
    return leaving


def _stays_held(state: Request, ordinal: int) -> bool:
    """Whether a stale page still waits for its block's commit."""
    return state.commit_allowed and not state.shared.commit_min_snapshot and ordinal >= len(state.path)


def _check_room(state: Request, blocks: int) -> None:
    for lane in state.lanes:
        room = lane.row.room()
        if room < blocks:
            raise ConfigError(
                f"page-index buffer of layer group {lane.index} too short: {room} entries for {blocks} blocks; attach a longer one"
            )


def _add_new_blocks(state: Request, need: list[int], history: int, blocks: int, spans: list[tuple[int, int]]) -> None:
    """Add the slots for the new blocks, by pool group: none for blocks that are stale already, or lie in scratch."""
    for number, lane in enumerate(state.lanes):
        beg, end = lane.life_cycle.stale(history)
        absent = max(0, min(end, blocks) - max(beg, state.num_blocks))
        if spans:
            beg, end = spans[number]
            absent += max(0, min(end, blocks) - max(beg, state.num_blocks))
        need[lane.pool_group] += max(0, blocks - state.num_blocks - absent)


def _new_priorities(state: Request, blocks: int, need: list[int]) -> list[int]:
    """The callback's priority of each new page, lane by lane; empty without a callback.

    Asked before anything changes, and not for a length that can never be had: it may be far off.
    """
    if state.priority is None:
        return []
    for group in range(len(need)):
        if need[group] > state.shared.hierarchy.total(GPU_LEVEL, group):
            return []
    priorities: list[int] = []
    for lane in state.lanes:
        for ordinal in range(state.num_blocks, blocks):
            priorities.append(state.page_priority(ordinal, lane.life_cycle))
    return priorities


def _grow(state: Request, blocks: int, priorities: list[int], spans: list[tuple[int, int]]) -> list[int]:
    """Add blocks, whose slots have been made free: one locked page a lane, none where the block is stale or lies in scratch.

    Returns the pages taken, by lane; empty if there are no blocks to add.
    """
    counts: list[int] = []
    if blocks <= state.num_blocks:
        return counts
    asked = 0
    for number, lane in enumerate(state.lanes):
        beg, end = lane.life_cycle.stale(state.history)
        scratch_beg, scratch_end = spans[number] if spans else (0, 0)
        taken = 0
        for ordinal in range(state.num_blocks, blocks):
            priority = priorities[asked] if priorities else PRIORITY_DEFAULT
            asked += 1
            if beg <= ordinal < end or scratch_beg <= ordinal < scratch_end:
                lane.pages.append(None)
                lane.row.append(BAD_PAGE_INDEX)
                continue
            _add_page(state, lane, priority)
            taken += 1
        counts.append(taken)
    return counts


def _take_back(state: Request) -> None:
    """The device failed while blocks were added: they go again."""
    for lane in state.lanes:
        lane.row.truncate(state.num_blocks)
        while len(lane.pages) > state.num_blocks:
            page = lane.pages.pop()
            if page is not None:
                state.shared.hierarchy.unlock(page, NULL_POINT)


def _add_page(state: Request, lane: BlockTable, priority: int) -> None:
    """One more block of a lane, in a slot that has been made free."""
    lane.row.append(_new_page(state, lane, priority).slot)


def _add_pages(state: Request, lane: BlockTable, count: int) -> None:
    """As `_add_page`, for several blocks at the default priority: the row grows at once."""
    if count == 1:
        _add_page(state, lane, PRIORITY_DEFAULT)
        return
    slots = SlotWriter()
    for _block in range(count):
        slots.add(_new_page(state, lane, PRIORITY_DEFAULT).slot)
    lane.row.extend(slots.values())


def _new_page(state: Request, lane: BlockTable, priority: int) -> Page:
    """A lane's next page; our stream waits until the last user of its slot is done."""
    page = state.shared.hierarchy.new_page(lane.index, priority)
    lane.pages.append(page)
    if page.ready != NULL_POINT:
        state.shared.timeline.wait(state.stream, page.ready)
    return page


def _shrink(state: Request, blocks: int) -> None:
    """Give up the trailing blocks, the last one first."""
    hierarchy = state.shared.hierarchy
    point = state.shared.timeline.record(state.stream)
    for lane in state.lanes:
        beg, end = lane.stale(state.history)
        lane.row.truncate(blocks)
        while len(lane.pages) > blocks:
            ordinal = len(lane.pages) - 1
            page = lane.pages.pop()
            if page is None:
                continue
            state.count_given_back(lane, ordinal)
            if beg <= ordinal < end:
                hierarchy.release(page)  # held for a late commit
            else:
                hierarchy.unlock(page, point)
        lane.pending_from = min(lane.pending_from, blocks)
    state.unmark_if_undone()
