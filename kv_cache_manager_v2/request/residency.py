"""Where a request's pages are: resumed to the GPU, suspended, prefetched, closed.

Rule: an ACTIVE request locks its live pages, a SUSPENDED one holds them. Whatever ends a request's use of pages does so from the
last block to the first, so that the tail of a path is evicted before its head.
"""

from __future__ import annotations

from kv_cache_manager_v2.errors import ConfigError, KVCacheError
from kv_cache_manager_v2.ids import GPU_LEVEL, NULL_POINT, PRIORITY_DEFAULT, CacheTier, Point, Stream
from kv_cache_manager_v2.request import scratch
from kv_cache_manager_v2.request.commit import stop_committing
from kv_cache_manager_v2.request.counts import end_stats
from kv_cache_manager_v2.request.request import ACTIVE, CLOSED, SUSPENDED, Request
from kv_cache_manager_v2.request.reservation import Reservation
from kv_cache_manager_v2.storage.page import Page
from kv_cache_manager_v2.storage.planner import Shortage


def pages_by_level(request: Request) -> list[list[int]]:
    """The live pages counted by life cycle, then by the level that they are on now. O(live blocks)."""
    counts = [[0] * request.shared.hierarchy.num_levels for _life_cycle in request.shared.life_cycles]
    for page in request.live_pages():
        counts[page.life_cycle][page.level] += 1
    return counts


def resume(request: Request, stream: Stream) -> bool:
    """Bring every live page to the GPU and lock it; False, with nothing changed but `last_shortage`, if that cannot be done now.

    The first resume copies a partly matched last block and a matched snapshot into slots of the request, so that the tree never
    sees what the request writes.
    """
    shared = request.shared
    pages = request.live_pages()
    pages.reverse()
    for page in pages:
        if page.lost:
            request.lose(page)
    request.require_bytes("resume()")
    shortage = _utilization_limit(request, pages)
    if shortage is not None:
        request.last_shortage = shortage
        return False
    start = _Start(request, stream)
    shortage = start.make_room(pages)
    if shortage is not None:
        request.last_shortage = shortage
        return False
    with start.reservation:
        start.queue(pages)
    start.install(pages)
    if shared.ledger.enabled and request.started and not request.excluded():
        shared.ledger.resumed += 1
    request.started = True
    return True


class _Start:
    """One resume: what it reserves, copies and installs."""

    def __init__(self, request: Request, stream: Stream) -> None:
        self.request = request
        self.stream = stream
        self.reservation = Reservation(request.shared, stream)
        self.spans = scratch.spans(request, request.history, request.capacity)
        self.taken: list[Page] = []  # pages that leave the tree instead of being copied
        self.sources: list[Page] = []  # pages that are copied, as the copies are reserved
        self.point = NULL_POINT  # the end of the copies

    def make_room(self, pages: list[Page]) -> Shortage | None:
        """Bring the pages to the GPU and make the slots free that the request takes, or change nothing."""
        request = self.request
        need = scratch.missing(request, self.spans)
        for page in self._borrowed():
            need[page.pool_group] += 1
        recurrent = request.recurrent
        if recurrent is not None and recurrent.page is None:
            need[recurrent.pool_group] += 1
        shortage = self.reservation.make_free(need, pages)
        if shortage is not None and shortage.permanent:
            self._choose_taken()
            if self.taken:
                for page in self.taken:
                    need[page.pool_group] -= 1
                shortage = self.reservation.make_free(need, pages)
        return shortage

    def _borrowed(self) -> list[Page]:
        """The tree's pages that the request would write into: of the partly matched last block, and the snapshot."""
        request = self.request
        borrowed: list[Page] = []
        if request.borrowed_tail:
            for table in request.tables:
                page = table.pages[-1]
                if page is not None:
                    borrowed.append(page)
        recurrent = request.recurrent
        if recurrent is not None and recurrent.page is not None and recurrent.borrowed:
            borrowed.append(recurrent.page)
        return borrowed

    def _choose_taken(self) -> None:
        """There will never be slots for both source and copy: pages that no other request needs leave the tree instead."""
        request = self.request
        tail = [page for page in self._borrowed() if request.shared.life_cycles[page.life_cycle].is_attention]
        if all(_only_user(page) for page in tail):
            self.taken.extend(tail)
        recurrent = request.recurrent
        if recurrent is not None and recurrent.page is not None and recurrent.borrowed and _only_user(recurrent.page):
            self.taken.append(recurrent.page)

    def queue(self, pages: list[Page]) -> None:
        """Reserve the slots; the stream waits for the bytes of all pages and for the slots, and copies."""
        request = self.request
        timeline = request.shared.timeline
        reservation = self.reservation
        for page in self._borrowed():
            if page not in self.taken:
                self.sources.append(page)
                reservation.reserve(page.life_cycle, page.pool_group, PRIORITY_DEFAULT)
        recurrent = request.recurrent
        if recurrent is not None and recurrent.page is None:
            reservation.reserve(recurrent.index, recurrent.pool_group, PRIORITY_DEFAULT)
        scratch.reserve(request, self.spans, reservation)
        waited: Point = NULL_POINT
        for page in pages:
            if page.ready != waited:
                timeline.wait(self.stream, page.ready)
                waited = page.ready
        reservation.wait()
        for number, source in enumerate(self.sources):
            reservation.copy(source, reservation.pages[number])
        if self.sources:
            self.point = timeline.record(self.stream)

    def install(self, pages: list[Page]) -> None:
        """The request is ACTIVE."""
        request = self.request
        shared = request.shared
        for page in self.taken:
            shared.tree.drop_page(page)
        for page in pages:
            shared.hierarchy.lock_held(page)
            if page.transfers > 0:
                request.await_page(page)
        for source in self.sources:
            _count_copy(request, source)
        self._install_copies()
        scratch.install(request, self.spans, self.reservation)
        for source in self.sources:
            shared.hierarchy.unlock(source, self.point)
        request.borrowed_tail = False
        request.stream = self.stream
        request.stream_set = True
        request.status = ACTIVE
        shared.num_active += 1
        for table in request.tables:
            table.publish()
        request.last_shortage = None

    def _install_copies(self) -> None:
        request = self.request
        reservation = self.reservation
        if request.borrowed_tail:
            for table in request.tables:
                source = table.pages[-1]
                if source is not None and source not in self.taken:
                    table.pages[-1] = reservation.next(table.index, source.priority)
        recurrent = request.recurrent
        if recurrent is not None and recurrent.needs_slot():
            if recurrent.page is None or recurrent.page not in self.taken:
                recurrent.page = reservation.next(recurrent.index, PRIORITY_DEFAULT)
            recurrent.borrowed = False


def _only_user(page: Page) -> bool:
    """Whether a page that the request holds is needed by no other request."""
    return page.holds == 1 and page.locks == 0


def _utilization_limit(request: Request, pages: list[Page]) -> Shortage | None:
    """A GPU pool group that other requests use beyond `max_util_for_resume`: those that run need what is left to go on.

    It limits nothing while no request runs, and never counts pages that the request itself holds.
    """
    shared = request.shared
    hierarchy = shared.hierarchy
    for group in range(shared.layout.num_pool_groups):
        if shared.num_active > 0 and hierarchy.utilization(GPU_LEVEL, group) > shared.max_util_for_resume:
            used = hierarchy.unavailable(GPU_LEVEL, group)
            for page in pages:
                if page.pool_group == group and page.level == GPU_LEVEL and page.locks == 0 and not page.queued:
                    used -= 1
            allowed = int(hierarchy.total(GPU_LEVEL, group) * shared.max_util_for_resume)
            if used > allowed:
                return Shortage(group, GPU_LEVEL, used - allowed, False, True)
    return None


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


def suspend(request: Request) -> None:
    """Turn every lock into a hold. Needs no slot anywhere: pages stay where they are until somebody needs their slots."""
    shared = request.shared
    _suspend_at(request, shared.timeline.record(request.stream))
    if shared.ledger.enabled and not request.excluded():
        shared.ledger.suspended += 1


def _suspend_at(request: Request, point: Point) -> None:
    hierarchy = request.shared.hierarchy
    for table in request.tables:
        table.row.detach()
        table.row.blank()
        table.trim_scratch(0, point)
    for page in request.live_pages():
        hierarchy.hold_locked(page, point)
    request.status = SUSPENDED
    request.shared.num_active -= 1


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
    """Whether every live page is on the GPU with its bytes in place: a stream that resumes now waits for nothing. Never blocks.

    False for good if a load has failed.
    """
    timeline = request.shared.timeline
    pages = request.live_pages()
    for page in pages:
        if page.lost:
            request.lose(page)
    if request.loads is not None:
        request.check_transfers()
    if request.lost:
        request.loss_told = True
        return False
    loaded = True
    for page in pages:
        loaded = loaded and page.level == GPU_LEVEL and page.transfers == 0 and timeline.done(page.ready)
    return loaded


def prefetch(request: Request, level: int) -> bool:
    """Move the live pages that are colder than `level` up to it; False, with nothing changed, if it has too few slots."""
    hierarchy = request.shared.hierarchy
    if not 0 <= level < hierarchy.num_levels:
        raise ConfigError(f"prefetch level {level} is out of range; this manager has levels 0..{hierarchy.num_levels - 1}")
    pages = request.live_pages()
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
    """Publish what may be published and end the use of every page, the last block's first. Idempotent."""
    if request.status == CLOSED:
        return
    shared = request.shared
    point = NULL_POINT
    if request.loads is not None:
        request.check_transfers()
    if request.status == ACTIVE:
        try:
            point = shared.timeline.record(request.stream)
        except KVCacheError:
            _leave_stream(request)
    if request.lost:
        request.commit_allowed = False
    else:
        stop_committing(request, False, point)
    if request.loads is not None:
        shared.closed_loads.append(request.loads)
        request.loads = None
    if request.capacity > 0 and not request.excluded():
        shared.tuner.sample_closed(*request.mean_lengths())
    _end_pages(request, point)
    if request.tip is not None:
        shared.tree.unpin(request.tip)
        request.tip = None
    if request.status == ACTIVE:
        shared.num_active -= 1
    request.status = CLOSED
    request.num_blocks = 0
    del shared.open[request.serial]
    end_stats(request)


def _leave_stream(request: Request) -> None:
    """The stream of a running request is gone, or the device fails: do without the stream. What is under way on it is waited for
    now, or when the pages are used next."""
    _suspend_at(request, request.shared.timeline.record_or_wait(request.stream))


def _end_pages(request: Request, point: Point) -> None:
    """Unlock or release all pages, the last block's first; `point` is the end of the request's work on them."""
    hierarchy = request.shared.hierarchy
    active = request.status == ACTIVE
    for table in request.tables:
        table.row.blank()
        table.row.detach()
        table.trim_scratch(0, point)
    for ordinal in range(request.num_blocks - 1, -1, -1):
        for table in request.tables:
            table.end_page(ordinal, active, point)
    for table in request.tables:
        table.pages = []
    for recurrent in request.recurrent_states():
        recurrent.end(hierarchy, active, point)
