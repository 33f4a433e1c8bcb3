"""Fork: a second request that continues from the history of an open one, for parallel sampling and tree-of-thought.

The fork holds the same pages (copy on write). The block in which the history ends is copied when the fork first resumes; blocks
after it are the fork's own. Recurrent state is copied at once, since the first request overwrites it.
"""

from __future__ import annotations

from kv_cache_manager_v2.errors import OutOfPagesError
from kv_cache_manager_v2.ids import GPU_LEVEL, NULL_POINT, Point
from kv_cache_manager_v2.request import publication, scratch
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.request import ACTIVE, Request
from kv_cache_manager_v2.request.statistics_ledger import PendingStats
from kv_cache_manager_v2.storage.page import Page


def fork(request: Request, request_id: object) -> Request:
    """Make a SUSPENDED request with the same committed tokens and history. Its capacity is the history.

    Raises LogicError in the middle of a scratch step of which the fork would read blocks, and inside a block whose page cannot be
    copied, OutOfPagesError if recurrent state has to be copied and there is no slot for it; nothing is changed then.
    """
    publication.check_settled(request, "fork()")
    scratch.check_fork(request)
    shared = request.shared
    if request.tables and request.history % request.tokens_per_block != 0:
        shared.hierarchy.level_cells(GPU_LEVEL)[request.tables[0].pool_group].copier.check()  # the last block will be copied
    point = shared.timeline.record(request.stream) if request.status == ACTIVE else NULL_POINT
    snapshot = _copy_state(request)
    if request.status == ACTIVE:
        _mark_written(request, point)
    twin = Request(shared, request.scope, request_id, request.priority)
    size = request.tokens_per_block
    twin.committed = request.committed
    twin.scratch = request.scratch
    twin.set_history(request.history)
    twin.set_capacity(request.history)
    twin.path = list(request.path)
    twin.tail.write(request.tail.getvalue())
    twin.commit_allowed = request.commit_allowed
    twin.adopts = request.adopts
    twin.text_only = request.text_only
    twin.has_digests = request.has_digests
    twin.loads = request.loads.share(request_id) if request.loads is not None else None
    twin.borrowed_tail = request.history % size != 0
    if request.pending is not None:
        twin.pending = PendingStats(len(shared.life_cycles), shared.hierarchy.num_levels, request.pending.expected_prompt_length)
    if request.tip is not None:
        twin.tip = request.tip
        shared.tree.pin(request.tip)
    count = len(twin.tables)
    for number, table in enumerate(twin.tables):
        table.share(_shared_pages(request.tables[number], request.tables[request.last_beam * count + number], twin.num_blocks))
    publication.share_use(request, twin)
    twin.mark_counted()
    if snapshot is not None and twin.recurrent is not None:
        _await_source(request, twin)
        shared.hierarchy.hold(snapshot)
        twin.recurrent.page = snapshot
    return twin


def _shared_pages(main: BlockTable, source: BlockTable, blocks: int) -> list[Page | None]:
    """Hold a beam's pages of the first blocks, including stale ones held until their commit.

    Pages that the beam shares are in the table of beam 0.
    """
    pages: list[Page | None] = []
    for ordinal in range(blocks):
        page = source.pages[ordinal]
        if page is None:
            page = main.pages[ordinal]
        if page is not None:
            source.hierarchy.hold(page)
        pages.append(page)
    return pages


def _mark_written(request: Request, point: Point) -> None:
    """Record that the fork's stream must wait for all work queued on the request's stream so far."""
    hierarchy = request.shared.hierarchy
    for table in request.tables:
        for ordinal, page in enumerate(table.pages):
            if page is not None and (page.owner is None or ordinal >= len(request.path)):
                hierarchy.merge_ready(page, point)


def _await_source(request: Request, twin: Request) -> None:
    """Make the fork depend on the file transfers in flight that load the source of its recurrent state."""
    recurrent = request.recurrent_of(request.last_beam)
    if recurrent is not None and recurrent.page is not None and recurrent.page.transfers > 0:
        twin.await_page(recurrent.page)


def _copy_state(request: Request) -> Page | None:
    """Copy the live recurrent state to the warmest level that has a slot for it."""
    recurrent = request.recurrent_of(request.last_beam)
    if recurrent is None or recurrent.page is None:
        return None
    if recurrent.page.lost:
        request.lose(recurrent.page)
        request.require_bytes("fork()")
    copy = request.shared.hierarchy.try_copy(recurrent.page, recurrent.page.priority, request.stream)
    if copy is None:
        raise OutOfPagesError(
            "fork(): no slot on any level for a copy of the recurrent state; suspend or close another cache first"
        )
    return copy
