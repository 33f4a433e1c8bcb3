"""Where a request's pages are: resumed to the GPU, suspended, prefetched, closed.

Rule: an ACTIVE request locks each of its live pages, a SUSPENDED one holds them, and nothing is in between when a call
returns. Live means not stale at the present history; a stale page that waits for its block's commit is held in either request.
"""

from __future__ import annotations

from kv_cache_manager_v2.errors import ConfigError, KVCacheError
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, GPU_LEVEL, NULL_POINT, PRIORITY_DEFAULT, CacheTier, Point, Stream
from kv_cache_manager_v2.request import scratch
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.commit import stop_committing
from kv_cache_manager_v2.request.counts import end_stats
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.request.page_index_row import SlotWriter
from kv_cache_manager_v2.request.private_pages import private_copy
from kv_cache_manager_v2.request.request import ACTIVE, CLOSED, SUSPENDED, Request
from kv_cache_manager_v2.storage.page import Page
from kv_cache_manager_v2.storage.planner import Shortage


def live_pages(request: Request) -> list[Page]:
    """The pages that the next step may read, in block order, life cycle by life cycle."""
    live: list[Page] = []
    for table in request.tables:
        beg, end = table.stale(request.history)
        for ordinal in range(beg):
            page = table.pages[ordinal]
            if page is not None:
                live.append(page)
        for ordinal in range(end, len(table.pages)):
            page = table.pages[ordinal]
            if page is not None:
                live.append(page)
    for recurrent in request.recurrent_states():
        if recurrent.page is not None:
            live.append(recurrent.page)
    return live


def pages_by_level(request: Request) -> list[list[int]]:
    """The live pages counted by life cycle, then by the level that they are on now. O(blocks)."""
    counts = [[0] * request.shared.hierarchy.num_levels for _life_cycle in request.shared.life_cycles]
    for page in live_pages(request):
        counts[page.life_cycle][page.level] += 1
    return counts


def resume(request: Request) -> bool:
    """Bring every live page to the GPU and lock it; False, with nothing changed but `last_shortage`, if that cannot be done now.

    The first resume copies a partly matched last block into slots of its own, so that the tree never sees our writes.
    """
    shared = request.shared
    hierarchy = shared.hierarchy
    closed = _closed_gate(shared)
    if closed is not None:
        request.last_shortage = closed
        return False
    pages = live_pages(request)
    for page in pages:
        if page.lost:
            request.await_page(page)
    if request.loads is not None:
        request.require(SUSPENDED, "resume()")
    spans = scratch.spans(request, request.history, request.capacity)
    need = scratch.missing(request, spans)
    _add_slots_to_start(request, need)
    shortage = hierarchy.acquire(need, pages)
    if shortage is not None and shortage.permanent:
        shortage = _claim(request, need, pages, shortage)
    if shortage is not None:
        request.last_shortage = shortage
        return False
    for page in pages:
        hierarchy.lock_held(page)
    try:
        _wait_for_all(request, pages)
        _start_private(request)
    except KVCacheError:  # the device refused a wait or a copy: back to where we were
        queued = shared.timeline.record_or_wait(request.stream)
        for page in pages:
            hierarchy.hold_locked(page, queued)
        raise
    try:
        scratch.take(request, spans)
    except KVCacheError:  # what it has of its own by now, it keeps
        queued = shared.timeline.record_or_wait(request.stream)
        scratch.give_back_all(request, queued)
        for page in live_pages(request):
            hierarchy.hold_locked(page, queued)
        raise
    request.status = ACTIVE
    for table in request.tables:
        _write_row(table, request.history)
    request.last_shortage = None
    if shared.ledger.enabled and request.started and not request.excluded():
        shared.ledger.resumed += 1
    request.started = True
    return True


def _claim(request: Request, need: list[int], pages: list[Page], shortage: Shortage) -> Shortage | None:
    """Take what the first resume would copy, the partly matched last block and the snapshot, out of the tree instead, where it is
    cached for nobody but us: there is no room for both source and copy, and never will be. On a Shortage nothing has changed."""
    claimed: list[Page] = []
    tail = request.borrowed_tail and _tail_is_ours(request)
    if tail:
        for table in request.tables:
            source = table.pages[-1]
            if source is not None:
                claimed.append(source)
    recurrent = request.recurrent
    snapshot = recurrent.page if recurrent is not None and recurrent.borrowed else None
    if snapshot is not None and _only_ours(snapshot):
        claimed.append(snapshot)
    else:
        snapshot = None
    if not claimed:
        return shortage
    less = list(need)
    for page in claimed:
        less[page.pool_group] -= 1
    still = request.shared.hierarchy.acquire(less, pages)
    if still is not None:
        return still
    for page in claimed:
        request.shared.tree.drop_page(page)
    if tail:
        request.borrowed_tail = False
    if recurrent is not None and snapshot is not None:
        recurrent.borrowed = False
    return None


def _tail_is_ours(request: Request) -> bool:
    for table in request.tables:
        source = table.pages[-1]
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


def _wait_for_all(request: Request, pages: list[Page]) -> None:
    """Our stream waits until the bytes of each page are there."""
    shared = request.shared
    waited: Point = NULL_POINT
    for page in pages:
        if page.ready != waited:
            shared.timeline.wait(request.stream, page.ready)
            waited = page.ready
        if page.transfers > 0:
            request.await_page(page)


def _add_slots_to_start(request: Request, need: list[int]) -> None:
    """Add the slots, by pool group, that the first resume takes: the private copy of a partly matched block, and the live state."""
    if request.borrowed_tail:
        for table in request.tables:
            if table.pages[-1] is not None:
                need[table.pool_group] += 1
    recurrent = request.recurrent
    if recurrent is not None and recurrent.needs_slot():
        need[recurrent.pool_group] += 1


def _start_private(request: Request) -> None:
    """First resume: give the request slots of its own for what it will write, filled in our stream's order.

    All or nothing: if the device refuses a copy, the slots taken are given back and the error is passed on.
    """
    shared = request.shared
    hierarchy = shared.hierarchy
    recurrent = request.recurrent
    sources: list[Page | None] = []
    copies: list[Page] = []
    try:
        if request.borrowed_tail:
            for table in request.tables:
                source = table.pages[-1]
                if source is not None:
                    sources.append(source)
                    copies.append(private_copy(request, table.index, source, source.priority))
        if recurrent is not None and recurrent.needs_slot():
            sources.append(recurrent.page)
            copies.append(private_copy(request, recurrent.index, recurrent.page, PRIORITY_DEFAULT))
        if not copies:
            request.borrowed_tail = False
            return
        point = shared.timeline.record(request.stream)
    except KVCacheError:
        queued = shared.timeline.record_or_wait(request.stream)  # earlier copies may still be under way
        for copy in copies:
            hierarchy.unlock(copy, queued)
        raise
    for source in sources:
        if source is not None:
            _count_copy(request, source)
            hierarchy.unlock(source, point)
    taken = 0
    if request.borrowed_tail:
        for table in request.tables:
            if table.pages[-1] is not None:
                table.pages[-1] = copies[taken]
                taken += 1
        request.borrowed_tail = False
    if recurrent is not None and taken < len(copies):
        recurrent.page = copies[taken]
        recurrent.borrowed = False


def _count_copy(request: Request, source: Page) -> None:
    """A partly matched block was copied: it would have been missed if the tree has dropped it since."""
    pending = request.pending
    if pending is None or not request.shared.life_cycles[source.life_cycle].is_attention:
        return
    pending.copied[source.life_cycle] += 1
    if source.owner is None and pending.tail_matched:
        pending.copies_missed[source.life_cycle] += 1
    pending.dirty = True
    request.mark_dirty()


def _write_row(table: BlockTable, history: int) -> None:
    """Publish the slot ids of a table's live pages."""
    beg, end = table.stale(history)
    slots = SlotWriter()
    for ordinal, page in enumerate(table.pages):
        slots.add(page.slot if page is not None and not beg <= ordinal < end else BAD_PAGE_INDEX)
    table.row.fill(slots.values())


def suspend(request: Request) -> None:
    """Turn every lock into a hold. Needs no room anywhere: pages stay where they are until somebody needs their slots."""
    shared = request.shared
    _suspend_at(request, shared.timeline.record(request.stream))
    if shared.ledger.enabled and not request.excluded():
        shared.ledger.suspended += 1


def _suspend_at(request: Request, point: Point) -> None:
    for table in request.tables:
        table.row.detach()
        table.row.blank()
    scratch.give_back_all(request, point)
    for page in live_pages(request):
        request.shared.hierarchy.hold_locked(page, point)
    request.status = SUSPENDED


def change_stream(request: Request, stream: Stream) -> None:
    """Use another stream from now on, which waits for the one before. Raises, with nothing changed, for one that there is not."""
    timeline = request.shared.timeline
    timeline.record(stream)
    if request.status == ACTIVE and stream != request.stream:
        try:
            timeline.wait(stream, timeline.record(request.stream))
        except KVCacheError:  # the stream before is gone
            request.shared.driver.synchronize()
    request.stream = stream
    request.stream_set = True


def is_loaded(request: Request) -> bool:
    """Whether every live page is on the GPU with its bytes in place: a stream that resumes now waits for nothing. Never blocks."""
    shared = request.shared
    for page in live_pages(request):
        if page.level != GPU_LEVEL or page.transfers > 0 or not shared.timeline.done(page.ready):
            return False
    return True


def prefetch(request: Request, level: int) -> bool:
    """Move the live pages that are colder than `level` up to it; False, with nothing changed, if it has no room."""
    hierarchy = request.shared.hierarchy
    if not 0 <= level < hierarchy.num_levels:
        raise ConfigError(f"prefetch level {level} is out of range; this manager has levels 0..{hierarchy.num_levels - 1}")
    pages = live_pages(request)
    from_disk = 0
    if hierarchy.sizings[level].tier == CacheTier.HOST_MEM:
        for page in pages:
            if hierarchy.sizings[page.level].tier == CacheTier.DISK:
                from_disk += 1
    shortage = hierarchy.prefetch(pages, level)
    request.last_shortage = shortage
    if shortage is None and request.shared.ledger.enabled:
        request.shared.ledger.disk_prefetched += from_disk
    return shortage is None


def close(request: Request) -> None:
    """Publish what may be published and give up every page, last block first, so that the tail is evicted first. Idempotent."""
    if request.status == CLOSED:
        return
    shared = request.shared
    point = NULL_POINT
    if request.status == ACTIVE:
        try:
            point = shared.timeline.record(request.stream)
        except KVCacheError:
            _leave_stream(request)
    if request.loads is not None:
        request.check_transfers()
    if request.lost:
        request.commit_allowed = False
    else:
        stop_committing(request, False, point)
    if request.loads is not None:
        shared.closed_loads.append(request.loads)
        request.loads = None
    if request.capacity > 0 and not request.excluded():
        shared.tuner.sample_closed(*request.mean_lengths())
    for table in request.tables:
        table.row.blank()
        table.row.detach()
    _give_up_pages(request, point)
    if request.tip is not None:
        shared.tree.unpin(request.tip)
        request.tip = None
    request.status = CLOSED
    request.num_blocks = 0
    del shared.open[request.serial]
    end_stats(request)


def _leave_stream(request: Request) -> None:
    """The stream of a running request is gone, or the device fails: wait until nothing is under way, and do without the stream.

    If not even that can be had, nobody knows what was written: nothing more is published.
    """
    try:
        request.shared.driver.synchronize()
    except KVCacheError:
        request.commit_allowed = False
    _suspend_at(request, NULL_POINT)


def _give_up_pages(request: Request, point: Point) -> None:
    """Unlock or release all pages, the last block's first; `point` is the end of our work on them."""
    hierarchy = request.shared.hierarchy
    active = request.status == ACTIVE
    scratch.give_back_all(request, point)
    stale = [table.stale(request.history) for table in request.tables]
    for ordinal in range(request.num_blocks - 1, -1, -1):
        for number, table in enumerate(request.tables):
            page = table.pages[ordinal]
            if page is None:
                continue
            beg, end = stale[number]
            if active and not beg <= ordinal < end:
                hierarchy.unlock(page, point)
            else:
                hierarchy.release(page)
    for table in request.tables:
        table.pages = []
    for recurrent in request.recurrent_states():
        recurrent.give_up(hierarchy, active, point)
