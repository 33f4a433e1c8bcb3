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


def stay_inside_block(request: Request, capacity: int) -> bool:
    """The decode step: a capacity that needs the blocks that there are. False, nothing changed, if it is not that simple."""
    if (
        request.block_start < capacity <= request.block_end
        and capacity >= request.history
        and request.status == ACTIVE
        and request.loads is None
        and not request.lost
        and (not request.scratch or (capacity < request.scratch_from and not request.holds_scratch()))
    ):
        request.capacity = capacity
        request.last_shortage = None
        request.capacity_sum += capacity
        request.history_sum += request.history
        request.num_samples += 1
        return True
    return False


def add_blocks(request: Request, capacity: int) -> bool:
    """The decode step that needs another block, or more: there are free slots, nothing leaves and nobody is asked. False, nothing
    changed, if it is not that simple.

    Does what `resize` does with that capacity. Lock held; the caller has checked that the request is ACTIVE.
    """
    if capacity <= request.block_end or request.scratch or request.priority is not None:
        return False
    shared = request.shared
    blocks = -(-capacity // request.tokens_per_block)
    wanted = (blocks - request.num_blocks) * request.width
    cells = shared.hierarchy.gpu
    for group in range(len(shared.tables_in_group)):
        if shared.tables_in_group[group] * wanted > cells[group].allocator.free:
            return False
    for table in request.tables:
        if table.row.buffer is not None and table.row.max_blocks() < blocks:
            return False
    if request.pending is not None:
        request.pending.before_growth(request.history)
    count = blocks - request.num_blocks
    try:
        for table in request.tables:
            _add_pages(request, table, count)  # behind the history: none is stale
    except KVCacheError:
        _take_back(request)
        raise
    for table in request.tables:
        request.count_taken(table, request.num_blocks, count)
    request.mark_dirty()
    request.set_capacity(capacity)
    request.last_shortage = None
    return True


def resize(request: Request, capacity: int, history: int) -> bool:
    """Move to these lengths; False, with nothing changed but `last_shortage`, if the pages cannot be had.

    Raises ConfigError for lengths that can never be right. After a failure of the device that is raised, the history may have
    advanced. The caller has checked that the request is ACTIVE.
    """
    check_lengths(request, capacity, history)
    blocks = -(-capacity // request.tokens_per_block)
    if blocks > request.num_blocks:
        _check_room(request, blocks)
    spans = scratch.spans(request, history, capacity)
    leaving = pages_leaving(request, history)
    leaving.extend(_pages_for_scratch(request, spans))
    need = scratch.missing(request, spans)
    _add_new_blocks(request, need, history, blocks, spans)
    priorities = _new_priorities(request, blocks, need)
    if not _make_room(request, need, leaving, spans, history):
        return False
    if blocks > request.num_blocks and request.pending is not None:
        request.pending.before_growth(request.history)
    request.set_history(history)
    if blocks < request.num_blocks:
        _shrink(request, blocks)
    try:
        taken = _grow(request, blocks, priorities, spans)
        scratch.take(request, spans)
    except KVCacheError:
        _take_back(request)
        _stand_at(request, history)
        raise
    for number, count in enumerate(taken):
        request.count_taken(request.tables[number], request.num_blocks, count)
    request.mark_dirty()
    request.set_capacity(capacity)
    request.last_shortage = None
    return True


def advance_history(request: Request, history: int, point: Point) -> None:
    """Settle tokens: pages that fall out of a window go, scratch that is no longer needed too. Needs no page.

    `point` is the end of our work on them.
    """
    leaving = pages_leaving(request, history)
    spans = scratch.spans(request, history, request.capacity)
    if leaving or spans:
        _let_go(request, leaving, spans, point)
    request.set_history(history)


def _make_room(request: Request, need: list[int], leaving: list[Leaving], spans: list[tuple[int, int]], history: int) -> bool:
    """Let go of what the new lengths do not need and free the slots that they do, or change nothing.

    What leaves counts as room for what comes: a window that slides needs no more pages than it has.
    """
    hierarchy = request.shared.hierarchy
    given = [item.page for item in leaving if not item.stays_held]
    for number, span in enumerate(spans):
        table = request.tables[number]
        given.extend(table.scratch[scratch.slots(request, table, span) :])
    if any(need):
        if leaving or given:
            parked = [item.page for item in leaving if item.stays_held]
            shortage = hierarchy.foresee(need, given, parked)
        else:
            shortage = hierarchy.acquire(need, [])
        if shortage is not None:
            group = shortage.pool_group
            if not shortage.permanent and need[group] + _staying(request, group, leaving, given) > hierarchy.total(
                GPU_LEVEL, group
            ):
                shortage.permanent = True
            request.last_shortage = shortage
            return False
    if leaving or given:
        _let_go(request, leaving, spans, request.shared.timeline.record(request.stream))
        if any(need):
            try:
                shortage = hierarchy.acquire(need, [])
            except KVCacheError:
                _stand_at(request, history)
                raise
            assert shortage is None, "what was foreseen fits"
    return True


def _stand_at(request: Request, history: int) -> None:
    """The device failed when pages had been let go: the history has advanced all the same. With scratch reuse, where blocks behind
    the history may have lost their pages too, the capacity is cut to it."""
    request.set_history(history)
    if request.scratch:
        scratch.give_back_all(request, request.shared.timeline.record(request.stream))
        _shrink(request, -(-history // request.tokens_per_block))
        request.set_capacity(history)


def _staying(request: Request, group: int, leaving: list[Leaving], given: list[Page]) -> int:
    """GPU slots of a pool group that the request itself goes on using: no eviction gets those. O(blocks), on a shortage only."""
    count = 0
    for table in request.tables:
        if table.pool_group == group:
            beg, end = table.stale(request.history)
            count += len(table.scratch)
            for ordinal, page in enumerate(table.pages):
                if page is not None and not beg <= ordinal < end:
                    count += 1
    for recurrent in request.recurrent_states():
        if recurrent.pool_group == group and recurrent.page is not None:
            count += 1
    for page in given:
        if page.pool_group == group:
            count -= 1
    for item in leaving:
        if item.table.pool_group == group and item.stays_held:
            count -= 1
    return count


def _let_go(request: Request, leaving: list[Leaving], spans: list[tuple[int, int]], point: Point) -> None:
    """Unlock pages that fell out of a window or whose block lies in scratch now, and give back scratch slots; `point` is the end of
    our work on them.

    A page whose block may still be committed stays held, so that a later commit can publish it; every other one is given up.
    """
    hierarchy = request.shared.hierarchy
    for item in leaving:
        item.table.row.set(item.ordinal, BAD_PAGE_INDEX)
        if item.stays_held:
            hierarchy.hold_locked(item.page, point)
        else:
            item.table.pages[item.ordinal] = None
            hierarchy.unlock(item.page, point)
    scratch.give_back(request, spans, point)


def check_lengths(request: Request, capacity: int, history: int) -> None:
    """Raise ConfigError unless history <= capacity and the history does not go back."""
    if history < request.history:
        raise ConfigError(f"history_length {history} is below the present {request.history}: settled tokens cannot be unsettled")
    if capacity >= WORD_LIMIT:
        raise ConfigError(f"capacity {capacity} is beyond all bounds; it must be below 2**63")
    if capacity < history:
        raise ConfigError(f"capacity {capacity} is below history_length {history}: it must cover the history")
    if capacity != request.capacity:
        scratch.check_capacity_change(request, history)


class Leaving:
    """A locked page that the new lengths do not need: it falls out of its window, or its block lies in scratch now."""

    def __init__(self, table: BlockTable, ordinal: int, page: Page, stays_held: bool) -> None:
        self.table = table
        self.ordinal = ordinal
        self.page = page
        self.stays_held = stays_held  # it waits for its block's commit


def pages_leaving(request: Request, history: int) -> list[Leaving]:
    """The locked pages that fall out of a window when `history` tokens are settled."""
    leaving: list[Leaving] = []
    if history < request.next_stale:
        return leaving
    for table in request.tables:
        _old_beg, old_end = table.stale(request.history)
        beg, end = table.stale(history)
        for ordinal in range(max(old_end, beg), end):
            page = table.pages[ordinal]
            if page is not None:
                leaving.append(Leaving(table, ordinal, page, _stays_held(request, ordinal)))
    return leaving


def _pages_for_scratch(request: Request, spans: list[tuple[int, int]]) -> list[Leaving]:
    """Pages of blocks that the scratch range has grown over: what is written there next goes to scratch."""
    leaving: list[Leaving] = []
    for number, (beg, end) in enumerate(spans):
        table = request.tables[number]
        for ordinal in range(beg, min(end, len(table.pages))):
            page = table.pages[ordinal]
            if page is not None:
                leaving.append(Leaving(table, ordinal, page, False))
    return leaving


def _stays_held(request: Request, ordinal: int) -> bool:
    """Whether a stale page still waits for its block's commit."""
    return request.commit_allowed and not request.shared.commit_min_snapshot and ordinal >= len(request.path)


def _check_room(request: Request, blocks: int) -> None:
    for table in request.tables:
        most = table.row.max_blocks()
        if most < blocks:
            raise ConfigError(
                f"page-index buffer of layer group {table.index} too short: {most} entries for {blocks} blocks; attach a longer one"
            )


def _add_new_blocks(request: Request, need: list[int], history: int, blocks: int, spans: list[tuple[int, int]]) -> None:
    """Add the slots for the new blocks, by pool group: none for blocks that are stale already, or lie in scratch."""
    for number, table in enumerate(request.tables):
        beg, end = table.life_cycle.stale(history)
        absent = max(0, min(end, blocks) - max(beg, request.num_blocks))
        if spans:
            beg, end = spans[number]
            absent += max(0, min(end, blocks) - max(beg, request.num_blocks))
        need[table.pool_group] += max(0, blocks - request.num_blocks - absent)


def _new_priorities(request: Request, blocks: int, need: list[int]) -> list[int]:
    """The callback's priority of each new page, table by table; empty without a callback.

    Asked before anything changes, and not for a length that can never be had: it may be far off.
    """
    if request.priority is None:
        return []
    for group in range(len(need)):
        if need[group] > request.shared.hierarchy.total(GPU_LEVEL, group):
            return []
    priorities: list[int] = []
    for table in request.tables:
        for ordinal in range(request.num_blocks, blocks):
            priorities.append(request.page_priority(ordinal, table.life_cycle))
    return priorities


def _grow(request: Request, blocks: int, priorities: list[int], spans: list[tuple[int, int]]) -> list[int]:
    """Add blocks, whose slots have been made free: one locked page a table, none where the block is stale or lies in scratch.

    Returns the pages taken, by table; empty if there are no blocks to add.
    """
    counts: list[int] = []
    if blocks <= request.num_blocks:
        return counts
    asked = 0
    for number, table in enumerate(request.tables):
        beg, end = table.life_cycle.stale(request.history)
        scratch_beg, scratch_end = spans[number] if spans else (0, 0)
        taken = 0
        for ordinal in range(request.num_blocks, blocks):
            priority = priorities[asked] if priorities else PRIORITY_DEFAULT
            asked += 1
            if beg <= ordinal < end or scratch_beg <= ordinal < scratch_end:
                table.pages.append(None)
                table.row.append(BAD_PAGE_INDEX)
                continue
            _add_page(request, table, priority)
            taken += 1
        counts.append(taken)
    return counts


def _take_back(request: Request) -> None:
    """The device failed while blocks were added: they go again."""
    for table in request.tables:
        table.row.truncate(request.num_blocks)
        while len(table.pages) > request.num_blocks:
            page = table.pages.pop()
            if page is not None:
                request.shared.hierarchy.unlock(page, NULL_POINT)


def _add_page(request: Request, table: BlockTable, priority: int) -> None:
    """One more block of a table, in a slot that has been made free."""
    table.row.append(_new_page(request, table, priority).slot)


def _add_pages(request: Request, table: BlockTable, count: int) -> None:
    """As `_add_page`, for several blocks at the default priority: the row grows at once."""
    if count == 1:
        _add_page(request, table, PRIORITY_DEFAULT)
        return
    slots = SlotWriter()
    for _block in range(count):
        slots.add(_new_page(request, table, PRIORITY_DEFAULT).slot)
    table.row.extend(slots.values())


def _new_page(request: Request, table: BlockTable, priority: int) -> Page:
    """A table's next page; our stream waits until the last user of its slot is done."""
    page = request.shared.hierarchy.new_page(table.index, priority)
    table.pages.append(page)
    if page.ready != NULL_POINT:
        request.shared.timeline.wait(request.stream, page.ready)
    return page


def _shrink(request: Request, blocks: int) -> None:
    """Give up the trailing blocks, the last one first."""
    hierarchy = request.shared.hierarchy
    point = request.shared.timeline.record(request.stream)
    for table in request.tables:
        beg, end = table.stale(request.history)
        table.row.truncate(blocks)
        while len(table.pages) > blocks:
            ordinal = len(table.pages) - 1
            page = table.pages.pop()
            if page is None:
                continue
            request.count_given_back(table, ordinal)
            if beg <= ordinal < end:
                hierarchy.release(page)  # held for a late commit
            else:
                hierarchy.unlock(page, point)
        table.pending_from = min(table.pending_from, blocks)
    request.unmark_if_undone()
