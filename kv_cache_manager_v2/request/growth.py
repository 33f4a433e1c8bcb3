"""Resize: the history advances, the capacity grows or shrinks.

A resize plans which pages it needs and which it no longer needs before anything changes. It reserves new pages, queues device work,
and only then changes the lengths and the tables. It costs O(blocks added, removed or made stale), independent of the sequence's
length.
"""

from __future__ import annotations

from typing import Final

from kv_cache_manager_v2.arguments import WORD_LIMIT, shown
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import GPU_LEVEL, NULL_POINT, PRIORITY_DEFAULT, Point
from kv_cache_manager_v2.request import publication, scratch
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.request import Request
from kv_cache_manager_v2.request.reservation import Reservation
from kv_cache_manager_v2.request.snapshot import Snapshot, existing_parent, snapshot_at
from kv_cache_manager_v2.storage.page import Page
from kv_cache_manager_v2.storage.planner import Shortage

MAX_BLOCKS: Final = 1 << 24  # most blocks of one request: an index row has an entry for each block, even without a page


def add_blocks(request: Request, capacity: int) -> bool:
    """The fast form of `resize` for a decode step that needs more blocks. Returns False, with nothing changed, if it does not
    apply.

    It applies if there are free slots, no page leaves a window and there is no priority callback. The lock is held, and the caller
    has checked that the request is ACTIVE.
    """
    if capacity <= request.block_end or request.scratch or request.priority is not None:
        return False
    shared = request.shared
    blocks = -(-capacity // request.tokens_per_block)
    count = blocks - request.num_blocks
    wanted = count * request.width
    cells = shared.hierarchy.gpu
    for group in range(len(shared.tables_in_group)):
        if shared.tables_in_group[group] * wanted > cells[group].allocator.free:
            return False
    for table in request.tables:
        if table.row.is_fixed() and table.row.max_blocks() < blocks:
            return False
    reservation = Reservation(shared, request.stream)
    with reservation:
        for table in request.tables:
            for _block in range(count):
                reservation.reserve(table.index, table.pool_group, PRIORITY_DEFAULT)
        reservation.wait()
    if request.pending is not None:
        request.pending.before_growth(request.history)
    pages = reservation.pages
    for number, table in enumerate(request.tables):  # after the history, so none of the new blocks is stale
        if count == 1:
            table.append(pages[number])
        else:
            table.extend([*pages[number * count : (number + 1) * count]])
        request.count_allocated(table, request.num_blocks, count)
    request.mark_dirty()
    request.set_capacity(capacity)
    request.last_shortage = None
    return True


def resize(request: Request, capacity: int, history: int) -> bool:
    """Set capacity and history. Returns False, with nothing changed but `last_shortage`, if there are too few pages.

    Raises ConfigError for invalid lengths. The caller has checked that the request is ACTIVE. If the device fails, nothing has
    changed.
    """
    check_lengths(request, capacity, history)
    if request.block_start < capacity <= request.block_end and history < request.next_stale and not request.scratch:
        request.set_history(history)
        request.set_capacity(capacity)
        request.last_shortage = None
        return True
    change = _Change(request, capacity, history)
    change.check()
    priorities = change.ask_priorities()
    return _resize(request, change, priorities, snapshot_at(request, history))


def _resize(request: Request, change: _Change, priorities: list[int], snapshot: Snapshot | None) -> bool:
    shared = request.shared
    point = shared.timeline.record(request.stream) if change.needs_point() else NULL_POINT
    reservation = Reservation(shared, request.stream)
    change.reuse_pages(reservation)
    shortage = reservation.make_free(change.need, []) if any(change.need) else None
    with reservation:
        if shortage is not None and not change.hand_over_windows(reservation, point):
            request.last_shortage = change.shortage(shortage)
            return False
        change.reserve(reservation)
        reservation.wait()
        if snapshot is not None:
            with snapshot:
                snapshot.copy(existing_parent(request), request.tail.getvalue())
    change.install(reservation, priorities, point)
    if snapshot is not None:
        snapshot.install()
    request.last_shortage = None
    return True


def advance_history(request: Request, history: int, point: Point) -> None:
    """Install a longer history: unlock pages that leave a window, and scratch slots that are no longer needed.

    `point` is the end of the request's work on them.
    """
    leaving = leaving_windows(request, history)
    _blank_entries(leaving)
    for item in leaving:
        item.table.leave(item.ordinal, item.stays_held, point)
    if request.scratch:
        scratch.trim(request, scratch.spans(request, history, request.capacity), point)
    request.set_history(history)


def check_lengths(request: Request, capacity: int, history: int) -> None:
    """Raise ConfigError unless history <= capacity and the history does not go back."""
    if history < request.history:
        raise ConfigError(f"history_length is {shown(history)}; it must be at least the present one, {request.history}")
    if capacity >= WORD_LIMIT:
        raise ConfigError(f"capacity is {shown(capacity)}; it must be below 2**63")
    if capacity < history:
        raise ConfigError(f"capacity is {shown(capacity)}; it must be at least history_length, {shown(history)}")
    if capacity != request.capacity:
        scratch.check_capacity_change(request, history)


class Leaving:
    """A locked page that the new lengths do not need: its block leaves the window, or becomes a scratch block."""

    def __init__(self, table: BlockTable, ordinal: int, page: Page, stays_held: bool) -> None:
        self.table = table
        self.ordinal = ordinal
        self.page = page
        self.stays_held = stays_held  # whether it is held until its block is committed
        self.reused = False  # whether a new block uses it
        self.handed_over = False  # whether a new block gets its slot


def leaving_windows(request: Request, history: int) -> list[Leaving]:
    """The locked pages that leave a window when the history moves.

    A history that jumps past the capacity was computed elsewhere. A block that is only partly below the old capacity was then never
    written to its end, so its page is not kept for the commit.
    """
    leaving: list[Leaving] = []
    if history < request.next_stale:
        return leaving
    for table in request.tables:
        start, end = table.leaving(history)
        for ordinal in range(start, end):
            page = table.pages[ordinal]
            if page is not None:
                whole = history <= request.capacity or (ordinal + 1) * request.tokens_per_block <= request.capacity
                leaving.append(Leaving(table, ordinal, page, whole and request.waits_for_commit(ordinal)))
    return leaving


def _blank_entries(leaving: list[Leaving]) -> None:
    """Blank the entries of blocks that lose their pages. A run of blocks costs as much as one block."""
    first = 0
    for following in range(1, len(leaving) + 1):
        last = leaving[following - 1]
        if following < len(leaving):
            item = leaving[following]
            if item.table is last.table and item.ordinal == last.ordinal + 1:
                continue
        last.table.row.blank_range(leaving[first].ordinal, last.ordinal + 1)
        first = following


class _Change:
    """The plan of a resize: the pages that it needs, and those that it no longer needs."""

    def __init__(self, request: Request, capacity: int, history: int) -> None:
        self.request = request
        self.capacity = capacity
        self.history = history
        self.blocks = -(-capacity // request.tokens_per_block)
        self.spans = scratch.spans(request, history, capacity)
        self.leaving = leaving_windows(request, history)
        self._leaving_windows = len(self.leaving)  # this many of them, from the front, leave a window
        self._add_blocks_in_scratch()
        self.reused_scratch: list[Page] = []  # scratch slots that are no longer needed and that new blocks use
        self.need = scratch.missing(request, self.spans)
        for number, table in enumerate(request.tables):
            start, end = table.life_cycle.stale(history)
            absent = max(0, min(end, self.blocks) - max(start, request.num_blocks))
            if self.spans:
                start, end = self.spans[number]
                absent += max(0, min(end, self.blocks) - max(start, request.num_blocks))
            self.need[table.pool_group] += max(0, self.blocks - request.num_blocks - absent)
        self.all_need = list(self.need)  # slots needed if no page were reused

    def _add_blocks_in_scratch(self) -> None:
        for number, (start, end) in enumerate(self.spans):
            table = self.request.tables[number]
            for ordinal in range(start, min(end, len(table.pages))):
                page = table.pages[ordinal]
                if page is not None:
                    self.leaving.append(Leaving(table, ordinal, page, False))

    def _impossible(self) -> bool:
        """Whether more slots are needed than the GPU has."""
        hierarchy = self.request.shared.hierarchy
        return any(self.need[group] > hierarchy.total(GPU_LEVEL, group) for group in range(len(self.need)))

    def check(self) -> None:
        """Raise ConfigError for more blocks than an index row can hold."""
        blocks = self.blocks
        if blocks <= self.request.num_blocks:
            return
        for table in self.request.tables:
            most = table.row.max_blocks()
            if most < blocks:
                raise ConfigError(
                    f"page-index buffer of layer group {table.index} too short: {most} entries for {blocks} blocks; "
                    "attach a longer one"
                )
        if blocks > MAX_BLOCKS and not self._impossible():
            raise ConfigError(f"capacity {self.capacity} needs {blocks} blocks; one cache can have at most {MAX_BLOCKS}")

    def ask_priorities(self) -> list[int]:
        """The callback's priority of each new page, table by table; empty without a callback, or if the resize is impossible."""
        request = self.request
        if request.priority is None or self._impossible():
            return []
        priorities: list[int] = []
        for table in request.tables:
            for ordinal in range(request.num_blocks, self.blocks):
                priorities.append(request.page_priority(ordinal, table.life_cycle))
        return priorities

    def needs_point(self) -> bool:
        """Whether a page or slot is unlocked on which the stream may still work, or blocks become computed."""
        request = self.request
        if self.leaving or self.blocks < request.num_blocks or request.holds_scratch():
            return True
        return publication.computes(request, self.history)

    def reuse_pages(self, reservation: Reservation) -> None:
        """Reuse pages and scratch slots that are no longer needed for new blocks of the same pool group.

        Only pages without another user are reused.
        """
        reusable: list[Page] = []
        for item in self.leaving:
            page = item.page
            if self.need[page.pool_group] > 0 and not item.stays_held and _is_private(page):
                item.reused = True
                self.need[page.pool_group] -= 1
                reusable.append(page)
        for number, span in enumerate(self.spans):
            table = self.request.tables[number]
            for page in table.scratch[scratch.slots(self.request, table, span) :]:
                if self.need[page.pool_group] > 0:
                    self.need[page.pool_group] -= 1
                    self.reused_scratch.append(page)
        reusable.extend(self.reused_scratch)
        if reusable:
            reservation.reusable = reusable

    def hand_over_windows(self, reservation: Reservation, point: Point) -> bool:
        """Use the slots of pages that leave a window, and that the tree or other requests go on using, if no others can be had.

        Returns False, with nothing changed, if that is not enough.
        """
        windows = [item for item in self.leaving[: self._leaving_windows] if not item.reused]
        if not windows:
            return False
        given = [item.page for item in windows if not item.stays_held]
        held = [item.page for item in windows if item.stays_held]
        if not reservation.hand_over(self.need, given, held, point):
            return False
        handovers = reservation.handovers
        assert handovers is not None
        pages = [handover.page for handover in handovers.begun]
        for item in windows:
            item.handed_over = item.page in pages
        return True

    def shortage(self, found: Shortage) -> Shortage:
        """The shortage, marked as permanent if no eviction can help."""
        group = found.pool_group
        going = [item.page for item in self.leaving] + self.reused_scratch
        staying = self._staying(group) - sum([1 for page in going if page.pool_group == group])
        if self.all_need[group] + staying > self.request.shared.hierarchy.total(GPU_LEVEL, group):
            found.permanent = True
        return found

    def _staying(self, group: int) -> int:
        """GPU slots of a pool group that the request itself keeps. O(live blocks); needed only on a shortage."""
        pages = self.request.live_pages()
        for table in self.request.tables:
            pages += table.scratch
        return sum([1 for page in pages if page.pool_group == group])

    def reserve(self, reservation: Reservation) -> None:
        """Reserve the slots, in the order in which `install` uses them."""
        request = self.request
        for number, table in enumerate(request.tables):
            stale_start, stale_end = table.life_cycle.stale(self.history)
            start, end = self.spans[number] if self.spans else (0, 0)
            for ordinal in range(request.num_blocks, self.blocks):
                if not (stale_start <= ordinal < stale_end or start <= ordinal < end):
                    reservation.reserve(table.index, table.pool_group, PRIORITY_DEFAULT)
        scratch.reserve(request, self.spans, reservation)

    def install(self, reservation: Reservation, priorities: list[int], point: Point) -> None:
        """Change the tables and the lengths."""
        request = self.request
        publication.set_computed(request, self.history, point)
        _blank_entries(self.leaving)
        for item in self.leaving:
            if item.reused:
                item.table.take(item.ordinal)
            elif item.handed_over:
                item.table.hand_over(item.ordinal, item.stays_held)
            else:
                item.table.leave(item.ordinal, item.stays_held, point)
        reservation.finish_handovers()
        scratch.trim(request, self.spans, point, self.reused_scratch)
        if self.blocks > request.num_blocks and request.pending is not None:
            request.pending.before_growth(request.history)
        request.set_history(self.history)
        if self.capacity < request.committed:
            publication.take_back(request)
        if self.blocks < request.num_blocks:
            shrink(request, self.blocks, point)
        elif self.blocks > request.num_blocks:
            self._grow(reservation, priorities)
        scratch.install(request, self.spans, reservation)
        request.mark_dirty()
        request.set_capacity(self.capacity)

    def _grow(self, reservation: Reservation, priorities: list[int]) -> None:
        """Add blocks. Each has a page, unless it is stale or a scratch block."""
        request = self.request
        asked = 0
        for number, table in enumerate(request.tables):
            start, end = self.spans[number] if self.spans else (0, 0)
            pages: list[Page | None] = []
            taken = 0
            for ordinal in range(request.num_blocks, self.blocks):
                if start <= ordinal < end or table.stale_start <= ordinal < table.stale_end:
                    pages.append(None)
                else:
                    pages.append(reservation.next(table.index, priorities[asked] if priorities else PRIORITY_DEFAULT))
                    taken += 1
                asked += 1
            table.extend(pages)
            request.count_allocated(table, request.num_blocks, taken)


def _is_private(page: Page) -> bool:
    """Whether a locked page has no other user, and its bytes depend on no transfer in flight.

    A page that was part of a cached block (its coverage is not 0) keeps its identity: it may be a duplicate.
    """
    return (
        page.owner is None
        and page.coverage == 0
        and page.locks == 1
        and page.holds == 0
        and page.transfers == 0
        and page.plans == 0
        and not page.lost
    )


def shrink(request: Request, blocks: int, point: Point) -> None:
    """Remove the blocks from `blocks` on, the last one first. `point` is the end of the request's work on them."""
    for table in request.tables:
        for ordinal in range(len(table.pages) - 1, blocks - 1, -1):
            if table.pages[ordinal] is not None:
                request.uncount_page(table, ordinal)
        table.shrink(blocks, point)
    request.clear_dirty_if_undone()
