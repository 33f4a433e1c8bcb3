"""Where a request's pages are: resumed to the GPU, suspended, prefetched, closed.

Rule: an ACTIVE request locks each of its live pages, a SUSPENDED one holds them, and nothing is in between when a call
returns. Live means not stale at the present history; a stale page that waits for its block's commit is held in either state.
"""

from __future__ import annotations

from kv_cache_manager_v2.errors import ConfigError, KVCacheError
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, GPU_LEVEL, NULL_POINT, PRIORITY_DEFAULT, CacheTier, Point, Stream
from kv_cache_manager_v2.request import scratch
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.commit import stop_committing
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.request.page_index_row import SlotWriter
from kv_cache_manager_v2.request.private_pages import private_copy
from kv_cache_manager_v2.request.request import ACTIVE, CLOSED, SUSPENDED, Request
from kv_cache_manager_v2.storage.page import Page
from kv_cache_manager_v2.storage.planner import Shortage


def live_pages(state: Request) -> list[Page]:
    """The pages that the next step may read, in block order, life cycle by life cycle."""
    live: list[Page] = []
    for lane in state.lanes:
        beg, end = lane.stale(state.history)
        for ordinal in range(beg):
            page = lane.pages[ordinal]
            if page is not None:
                live.append(page)
        for ordinal in range(end, len(lane.pages)):
            page = lane.pages[ordinal]
            if page is not None:
                live.append(page)
    for recurrence in state.recurrences():
        if recurrence.page is not None:
            live.append(recurrence.page)
    return live


def pages_by_level(state: Request) -> list[list[int]]:
    """The live pages counted by life cycle, then by the level that they are on now. O(blocks)."""
    counts = [[0] * state.shared.hierarchy.num_levels for _life_cycle in state.shared.life_cycles]
    for page in live_pages(state):
        counts[page.life_cycle][page.level] += 1
    return counts


def resume(state: Request) -> bool:
    """Bring every live page to the GPU and lock it; False, with nothing changed but `last_shortage`, if that cannot be done now.

    The first resume copies a partly matched last block into slots of its own, so that the tree never sees our writes.
    """
    shared = state.shared
    hierarchy = shared.hierarchy
    closed = _closed_gate(shared)
    if closed is not None:
        state.last_shortage = closed
        return False
    pages = live_pages(state)
    for page in pages:
        if page.lost:
            state.await_page(page)
    if state.provision is not None:
        state.require(SUSPENDED, "resume()")
    spans = scratch.spans(state, state.history, state.capacity)
    need = scratch.missing(state, spans)
    _add_slots_to_start(state, need)
    shortage = hierarchy.acquire(need, pages)
    if shortage is not None and shortage.permanent:
        shortage = _claim(state, need, pages, shortage)
    if shortage is not None:
        state.last_shortage = shortage
        return False
    for page in pages:
        hierarchy.lock_held(page)
    try:
        _wait_for_all(state, pages)
        _start_private(state)
    except KVCacheError:  # the device refused a wait or a copy: back to where we were
        queued = shared.timeline.record_or_wait(state.stream)
        for page in pages:
            hierarchy.hold_locked(page, queued)
        raise
    try:
        scratch.take(state, spans)
    except KVCacheError:  # what it has of its own by now, it keeps
        queued = shared.timeline.record_or_wait(state.stream)
        scratch.give_back_all(state, queued)
        for page in live_pages(state):
            hierarchy.hold_locked(page, queued)
        raise
    state.status = ACTIVE
    for lane in state.lanes:
        _write_row(lane, state.history)
    state.last_shortage = None
    if shared.ledger.enabled and state.started and not state.excluded():
        shared.ledger.resumed += 1
    state.started = True
    return True


def _claim(state: Request, need: list[int], pages: list[Page], shortage: Shortage) -> Shortage | None:
    """Take what the first resume would copy, the partly matched last block and the snapshot, out of the tree instead, where it is
    cached for nobody but us: there is no room for both source and copy, and never will be. On a Shortage nothing has changed."""
    claimed: list[Page] = []
    tail = state.borrowed_tail and _tail_is_ours(state)
    if tail:
        for lane in state.lanes:
            source = lane.pages[-1]
            if source is not None:
                claimed.append(source)
    recurrence = state.recurrence
    snapshot = recurrence.page if recurrence is not None and recurrence.borrowed else None
    if snapshot is not None and _only_ours(snapshot):
        claimed.append(snapshot)
    else:
        snapshot = None
    if not claimed:
        return shortage
    less = list(need)
    for page in claimed:
        less[page.pool_group] -= 1
    still = state.shared.hierarchy.acquire(less, pages)
    if still is not None:
        return still
    for page in claimed:
        state.shared.tree.drop_page(page)
    if tail:
        state.borrowed_tail = False
    if recurrence is not None and snapshot is not None:
        recurrence.borrowed = False
    return None


def _tail_is_ours(state: Request) -> bool:
    for lane in state.lanes:
        source = lane.pages[-1]
        if source is not None and not _only_ours(source):
            return False
    return True


def _only_ours(page: Page) -> bool:
    """Whether a page that we hold is needed by no other request."""
    return page.holds == 1 and page.locks == 0


def _closed_gate(shared: ManagerState) -> Shortage | None:
    """A GPU pool group that is used beyond `max_util_for_resume`: who runs there needs what is left to go on."""
    hierarchy = shared.hierarchy
    for group in range(shared.layout.num_pool_groups):
        if hierarchy.utilization(GPU_LEVEL, group) > shared.max_util_for_resume:
            allowed = int(hierarchy.total(GPU_LEVEL, group) * shared.max_util_for_resume)
            return Shortage(group, GPU_LEVEL, hierarchy.unavailable(GPU_LEVEL, group) - allowed, False, True)
    return None


def _wait_for_all(state: Request, pages: list[Page]) -> None:
    """Our stream waits until the bytes of each page are there."""
    shared = state.shared
    waited: Point = NULL_POINT
    for page in pages:
        if page.ready != waited:
            shared.timeline.wait(state.stream, page.ready)
            waited = page.ready
        if page.transfers > 0:
            state.await_page(page)


def _add_slots_to_start(state: Request, need: list[int]) -> None:
    """Add the slots, by pool group, that the first resume takes: the private copy of a partly matched block, and the live state."""
    if state.borrowed_tail:
        for lane in state.lanes:
            if lane.pages[-1] is not None:
                need[lane.pool_group] += 1
    recurrence = state.recurrence
    if recurrence is not None and recurrence.needs_slot():
        need[recurrence.pool_group] += 1


def _start_private(state: Request) -> None:
    """First resume: give the request slots of its own for what it will write, filled in our stream's order.

    All or nothing: if the device refuses a copy, the slots taken are given back and the error is passed on.
    """
    shared = state.shared
    hierarchy = shared.hierarchy
    recurrence = state.recurrence
    sources: list[Page | None] = []
    copies: list[Page] = []
    try:
        if state.borrowed_tail:
            for lane in state.lanes:
                source = lane.pages[-1]
                if source is not None:
                    sources.append(source)
                    copies.append(private_copy(state, lane.index, source, source.priority))
        if recurrence is not None and recurrence.needs_slot():
            sources.append(recurrence.page)
            copies.append(private_copy(state, recurrence.index, recurrence.page, PRIORITY_DEFAULT))
        if not copies:
            state.borrowed_tail = False
            return
        point = shared.timeline.record(state.stream)
    except KVCacheError:
        queued = shared.timeline.record_or_wait(state.stream)  # earlier copies may still be under way
        for copy in copies:
            hierarchy.unlock(copy, queued)
        raise
    for source in sources:
        if source is not None:
            _count_copy(state, source)
            hierarchy.unlock(source, point)
    taken = 0
    if state.borrowed_tail:
        for lane in state.lanes:
            if lane.pages[-1] is not None:
                lane.pages[-1] = copies[taken]
                taken += 1
        state.borrowed_tail = False
    if recurrence is not None and taken < len(copies):
        recurrence.page = copies[taken]
        recurrence.borrowed = False


def _count_copy(state: Request, source: Page) -> None:
    """A partly matched block was copied: it would have been missed if the tree has dropped it since."""
    pending = state.pending
    if pending is None or not state.shared.life_cycles[source.life_cycle].is_attention:
        return
    pending.copied[source.life_cycle] += 1
    if source.owner is None and pending.tail_matched:
        pending.copies_missed[source.life_cycle] += 1
    pending.dirty = True
    state.mark_dirty()


def _write_row(lane: BlockTable, history: int) -> None:
    """Publish the slot ids of a lane's live pages."""
    beg, end = lane.stale(history)
    slots = SlotWriter()
    for ordinal, page in enumerate(lane.pages):
        slots.add(page.slot if page is not None and not beg <= ordinal < end else BAD_PAGE_INDEX)
    lane.row.fill(slots.values())


def suspend(state: Request) -> None:
    """Turn every lock into a hold. Needs no room anywhere: pages stay where they are until somebody needs their slots."""
    shared = state.shared
    _suspend_at(state, shared.timeline.record(state.stream))
    if shared.ledger.enabled and not state.excluded():
        shared.ledger.suspended += 1


def _suspend_at(state: Request, point: Point) -> None:
    for lane in state.lanes:
        lane.row.detach()
        lane.row.blank()
    scratch.give_back_all(state, point)
    for page in live_pages(state):
        state.shared.hierarchy.hold_locked(page, point)
    state.status = SUSPENDED


def change_stream(state: Request, stream: Stream) -> None:
    """Use another stream from now on, which waits for the one before. Raises, with nothing changed, for one that there is not."""
    timeline = state.shared.timeline
    timeline.record(stream)
    if state.status == ACTIVE and stream != state.stream:
        try:
            timeline.wait(stream, timeline.record(state.stream))
        except KVCacheError:  # the stream before is gone
            state.shared.driver.synchronize()
    state.stream = stream
    state.stream_set = True


def is_loaded(state: Request) -> bool:
    """Whether every live page is on the GPU with its bytes in place: a stream that resumes now waits for nothing. Never blocks."""
    shared = state.shared
    for page in live_pages(state):
        if page.level != GPU_LEVEL or page.transfers > 0 or not shared.timeline.done(page.ready):
            return False
    return True


def prefetch(state: Request, level: int) -> bool:
    """Move the live pages that are colder than `level` up to it; False, with nothing changed, if it has no room."""
    hierarchy = state.shared.hierarchy
    if not 0 <= level < hierarchy.num_levels:
        raise ConfigError(f"prefetch level {level} is out of range; this manager has levels 0..{hierarchy.num_levels - 1}")
    pages = live_pages(state)
    from_disk = 0
    if hierarchy.sizings[level].tier == CacheTier.HOST_MEM:
        for page in pages:
            if hierarchy.sizings[page.level].tier == CacheTier.DISK:
                from_disk += 1
    shortage = hierarchy.prefetch(pages, level)
    state.last_shortage = shortage
    if shortage is None and state.shared.ledger.enabled:
        state.shared.ledger.disk_prefetched += from_disk
    return shortage is None


def close(state: Request) -> None:
    """Publish what may be published and give up every page, last block first, so that the tail is evicted first. Idempotent."""
    if state.status == CLOSED:
        return
    shared = state.shared
    point = NULL_POINT
    if state.status == ACTIVE:
        try:
            point = shared.timeline.record(state.stream)
        except KVCacheError:
            _leave_stream(state)
    if state.provision is not None:
        state.check_transfers()
    if state.lost:
        state.commit_allowed = False
    else:
        stop_committing(state, False, point)
    if state.provision is not None:
        shared.provisions.append(state.provision)
        state.provision = None
    if state.capacity > 0 and not state.excluded():
        shared.tuner.sample_closed(*state.mean_lengths())
    for lane in state.lanes:
        lane.row.blank()
        lane.row.detach()
    _give_up_pages(state, point)
    if state.tip is not None:
        shared.tree.unpin(state.tip)
        state.tip = None
    state.status = CLOSED
    state.num_blocks = 0
    del shared.open[state.serial]
    if state.pending is not None:
        state.pending.clear()
    if state.request_id is not None:
        shared.ledger.dirty.discard(state.request_id)


def _leave_stream(state: Request) -> None:
    """The stream of a running request is gone, or the device fails: wait until nothing is under way, and do without the stream.

    If not even that can be had, nobody knows what was written: nothing more is published.
    """
    try:
        state.shared.driver.synchronize()
    except KVCacheError:
        state.commit_allowed = False
    _suspend_at(state, NULL_POINT)


def _give_up_pages(state: Request, point: Point) -> None:
    """Unlock or release all pages, the last block's first; `point` is the end of our work on them."""
    hierarchy = state.shared.hierarchy
    active = state.status == ACTIVE
    scratch.give_back_all(state, point)
    stale = [lane.stale(state.history) for lane in state.lanes]
    for ordinal in range(state.num_blocks - 1, -1, -1):
        for number, lane in enumerate(state.lanes):
            page = lane.pages[ordinal]
            if page is None:
                continue
            beg, end = stale[number]
            if active and not beg <= ordinal < end:
                hierarchy.unlock(page, point)
            else:
                hierarchy.release(page)
    for lane in state.lanes:
        lane.pages = []
    for recurrence in state.recurrences():
        recurrence.give_up(hierarchy, active, point)
