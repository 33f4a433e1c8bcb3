"""Resume, suspend, prefetch and close: which levels a request's pages are on, and whether they are locked or held.

Rule: an ACTIVE request locks its live pages, a SUSPENDED one holds them. Pages are unlocked and released from the last block to the
first, so that the tail of a path is evicted before its head.
"""

from __future__ import annotations

from kv_cache_manager_v2.errors import ConfigError, KVCacheError
from kv_cache_manager_v2.ids import GPU_LEVEL, NULL_POINT, PRIORITY_DEFAULT, CacheTier, Point, Stream
from kv_cache_manager_v2.request import ending, publication, scratch
from kv_cache_manager_v2.request.commit import stop_committing
from kv_cache_manager_v2.request.counts import end_stats
from kv_cache_manager_v2.request.request import ACTIVE, CLOSED, SUSPENDED, Request
from kv_cache_manager_v2.request.reservation import Reservation
from kv_cache_manager_v2.storage.page import Page
from kv_cache_manager_v2.storage.planner import Shortage


def pages_by_level(request: Request) -> list[list[int]]:
    """The number of live pages by life cycle, then by their present level. O(live blocks)."""
    counts = [[0] * request.shared.hierarchy.num_levels for _life_cycle in request.shared.life_cycles]
    for page in request.live_pages():
        counts[page.life_cycle][page.level] += 1
    return counts


def cost_of_return(request: Request, pool_group: int) -> tuple[int, int]:
    """GPU slots of a pool group that suspending an ACTIVE request can free, and the bytes that it must load to come back.

    Pages that other ACTIVE requests use too are not counted. O(live pages).
    """
    slots, nbytes = 0, 0
    sizes = request.shared.layout.slot_sizes
    for page in request.live_pages():
        if page.locks == 1:
            nbytes += sum(sizes[page.pool_group])
            if page.pool_group == pool_group:
                slots += 1
    for table in request.tables:
        if table.pool_group == pool_group:
            slots += len(table.scratch)
    return slots, nbytes


def resume(request: Request, stream: Stream) -> bool:
    """Onload and lock every live page. Returns False, with nothing changed but `last_shortage`, on a shortage.

    The first resume copies a partly matched last block and a matched snapshot into the request's own slots, since the request
    writes to them.
    """
    shared = request.shared
    pages = request.live_pages()
    pages.reverse()
    for page in pages:
        if page.lost:
            request.lose(page)
    request.require_bytes("resume()")
    publication.check_stream(request, stream, "resume()")
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
    """One resume: the pages that it reserves, copies and installs."""

    def __init__(self, request: Request, stream: Stream) -> None:
        self.request = request
        self.stream = stream
        self.reservation = Reservation(request.shared, stream)
        self.spans = scratch.spans(request, request.history, request.capacity)
        self.taken: list[Page] = []  # pages that leave the tree and become the request's own, instead of being copied
        self.sources: list[Page] = []  # pages to copy, in the order of the reserved copies
        self.point = NULL_POINT  # end of the copies

    def make_room(self, pages: list[Page]) -> Shortage | None:
        """Onload the pages and free the slots that the request needs. On a shortage nothing changes."""
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
        """Pages of the tree to which the request would write: those of the partly matched last block, and the snapshot."""
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
        """Choose the pages that leave the tree, since the GPU can never hold both source and copy.

        Only pages without another user are chosen.
        """
        request = self.request
        tail = [page for page in self._borrowed() if request.shared.life_cycles[page.life_cycle].is_attention]
        if all(_only_user(page) for page in tail):
            self.taken.extend(tail)
        recurrent = request.recurrent
        if recurrent is not None and recurrent.page is not None and recurrent.borrowed and _only_user(recurrent.page):
            self.taken.append(recurrent.page)

    def queue(self, pages: list[Page]) -> None:
        """Reserve the slots, make the stream wait for the bytes of all pages and for the slots, and queue the copies."""
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
        """Make the request ACTIVE."""
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
        if request.batch_rows is not None:
            request.batch_rows.publish_state(request)
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
    """Whether no other request uses a page that this request holds."""
    return page.holds == 1 and page.locks == 0


def _utilization_limit(request: Request, pages: list[Page]) -> Shortage | None:
    """The shortage of a GPU pool group of which other requests use more than `max_util_for_resume`; None if there is none.

    The rest is reserved for the growth of running requests. The limit does not apply while no request is ACTIVE, and does not count
    pages that the request itself holds.
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
    """Count the copy of a partly matched block. It counts as missed if the block has left the tree."""
    pending = request.pending
    if pending is None or not request.shared.life_cycles[source.life_cycle].is_attention:
        return
    pending.copied[source.life_cycle] += 1
    if source.owner is None and pending.tail_matched:
        pending.copies_missed[source.life_cycle] += 1
    pending.dirty = True
    request.mark_dirty()


def suspend(request: Request) -> None:
    """Turn every lock into a hold. No page moves until its slot is needed. Tokens committed ahead are taken back."""
    shared = request.shared
    point = shared.timeline.record(request.stream)
    publication.take_back(request)
    _suspend_at(request, point)
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
    if request.batch_rows is not None:
        request.batch_rows.publish_state(request)


def change_stream(request: Request, stream: Stream) -> None:
    """Use another stream from now on, which waits for the previous one.

    Raises, with nothing changed, for an invalid stream, and LogicError while blocks depend on a step of the previous stream that
    may not be queued yet.
    """
    timeline = request.shared.timeline
    if stream != request.stream:
        publication.check_settled(request, "cuda_stream")
    publication.check_stream(request, stream, "cuda_stream")
    timeline.record(stream)
    if request.status == ACTIVE and stream != request.stream:
        try:
            timeline.wait(stream, timeline.record(request.stream))
        except KVCacheError:  # the previous stream no longer exists
            request.shared.driver.synchronize()
    request.stream = stream
    request.stream_set = True


def is_loaded(request: Request) -> bool:
    """Whether the bytes of every live page are on the GPU, so that a resume waits for no load. Never blocks.

    Always False after a load has failed.
    """
    timeline = request.shared.timeline
    pages = request.live_pages()
    for page in pages:
        if page.lost:
            request.lose(page)
    if request.loads is not None:
        request.check_transfers()
    if request.lost:
        request.loss_reported = True
        return False
    loaded = True
    for page in pages:
        loaded = loaded and page.level == GPU_LEVEL and page.transfers == 0 and timeline.done(page.ready)
    return loaded


def prefetch(request: Request, level: int) -> bool:
    """Onload the live pages that are colder than `level` to that level. False, with nothing changed, if it has too few slots."""
    hierarchy = request.shared.hierarchy
    if not 0 <= level < hierarchy.num_levels:
        raise ConfigError(f"prefetch(): level {level} is out of range; this manager has levels 0..{hierarchy.num_levels - 1}")
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


def close(request: Request, expect: str | None = None) -> None:
    """Add the committed pages to the tree and end the use of every page, from the last block to the first. Idempotent.

    `expect`: "more" or "end", what the engine says about the conversation; None if it says nothing.
    """
    if request.status == CLOSED:
        return
    shared = request.shared
    point = NULL_POINT
    recorded = True
    worth = ending.class_of(request, expect)
    if request.loads is not None:
        request.check_transfers()
    if request.status == ACTIVE:
        try:
            point = shared.timeline.record(request.stream)
        except KVCacheError:  # the stream no longer exists, or the device refuses it
            point = shared.timeline.record_or_wait(request.stream)
            recorded = False
    publication.take_back(request)
    publication.end_use(request)
    if not recorded:
        _suspend_at(request, point)  # work queued on the stream is waited for when the pages are used next
        point = NULL_POINT
    if request.lost:
        request.commit_allowed = False
    else:
        stop_committing(request, False, point)
    if request.loads is not None:
        shared.closed_loads.append(request.loads)
        request.loads = None
    if request.capacity > 0 and not request.excluded():
        shared.tuner.sample_closed(*request.mean_lengths())
        if shared.live_curve is not None:
            shared.live_curve.end(request.scope, request.sampled, request.path, request.tail.getvalue())
    if worth >= 0:
        ending.set_class(request, worth)
    _end_pages(request, point)
    if shared.tree.duplicates:
        shared.tree.forget_duplicates(request.path)
    if request.tip is not None:
        shared.tree.unpin(request.tip)
        request.tip = None
    if request.status == ACTIVE:
        shared.num_active -= 1
    request.status = CLOSED
    request.num_blocks = 0
    del shared.open[request.serial]
    end_stats(request)


def close_poisoned(request: Request) -> None:
    """Close the request of a poisoned manager: neither its pages nor the device are touched, since their structures are broken.

    Its row of a batch table is free again: the manager may be repaired later, and no other call would free the row.
    """
    request.status = CLOSED
    request.num_blocks = 0
    request.shared.open.pop(request.serial, None)
    if request.batch_rows is not None:
        request.batch_rows.remove(request)


def _end_pages(request: Request, point: Point) -> None:
    """Unlock or release all pages, from the last block to the first. `point` is the end of the request's work on them."""
    hierarchy = request.shared.hierarchy
    active = request.status == ACTIVE
    if request.batch_rows is not None:
        request.batch_rows.remove(request)
    for table in request.tables:
        table.row.blank()
        table.row.detach()
        table.trim_scratch(0, point)
    tables = request.tables
    for ordinal in range(request.num_blocks - 1, -1, -1):
        for table in tables:
            page = table.pages[ordinal]
            if page is None:
                continue
            if active and not table.stale_start <= ordinal < table.stale_end:
                hierarchy.unlock(page, point)
            else:
                hierarchy.release_youngest(page)
    for table in tables:
        table.pages = []
    for recurrent in request.recurrent_states():
        recurrent.end(hierarchy, active, point)
