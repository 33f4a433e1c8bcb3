"""Fork: a second request that goes on from where an open one stands, for parallel sampling and tree-of-thought engines.

Rule: copy on write. The fork holds the same pages; what it would write into (the block in which the history ends) is copied on
its first resume, and blocks past the history are its own. Only recurrent state is copied at once, since its owner overwrites it.
"""

from __future__ import annotations

from kv_cache_manager_v2.errors import OutOfPagesError
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.page_index_row import bad_run
from kv_cache_manager_v2.request.request import ACTIVE, Request
from kv_cache_manager_v2.request.statistics_ledger import PendingStats
from kv_cache_manager_v2.storage.page import Page


def fork(request: Request, request_id: int | None) -> Request:
    """A SUSPENDED request with the same committed tokens and history, its capacity cut to the history.

    Raises OutOfPagesError, with nothing changed, if recurrent state has to be copied and there is no slot for it.
    """
    shared = request.shared
    twin = Request(shared, request.scope, request_id, request.priority)
    if request.status == ACTIVE:
        _mark_written(request)
    snapshot = _copy_state(request)
    size = request.tokens_per_block
    beam = request.last_beam
    twin.committed = request.committed
    twin.set_history(request.history)
    twin.set_capacity(request.history)
    twin.path = list(request.path)
    twin.tail.write(request.tail.getvalue())
    twin.commit_allowed = request.commit_allowed
    twin.text_only = request.text_only
    twin.has_digests = request.has_digests
    twin.scratch = request.scratch
    twin.loads = request.loads.share() if request.loads is not None else None
    if snapshot is not None:
        _await_source(request, twin)
    twin.borrowed_tail = request.history % size != 0
    if request.pending is not None:
        twin.pending = PendingStats(len(shared.life_cycles), shared.hierarchy.num_levels, request.pending.expected_prompt_length)
    if request.tip is not None:
        twin.tip = request.tip
        shared.tree.pin(request.tip)
    for number, table in enumerate(twin.tables):
        _share_pages(request, request.tables[number], request.tables[beam * len(twin.tables) + number], table, twin.num_blocks)
    twin.settle_counts()
    if snapshot is not None and twin.recurrent is not None:
        shared.hierarchy.hold(snapshot)
        twin.recurrent.page = snapshot
    return twin


def _share_pages(request: Request, main: BlockTable, source: BlockTable, table: BlockTable, blocks: int) -> None:
    """Hold a beam's pages of the first blocks, those that wait for a late commit too; what it shares is in beam 0's table."""
    for ordinal in range(blocks):
        page = source.pages[ordinal]
        if page is None:
            page = main.pages[ordinal]
        if page is not None:
            request.shared.hierarchy.hold(page)
        table.pages.append(page)
    table.row.fill(bad_run(blocks))


def _mark_written(request: Request) -> None:
    """What our stream has queued so far is what the fork's stream must wait for."""
    shared = request.shared
    point = shared.timeline.record(request.stream)
    for table in request.tables:
        for ordinal, page in enumerate(table.pages):
            if page is not None and (page.owner is None or ordinal >= len(request.path)):
                shared.hierarchy.merge_ready(page, point)


def _await_source(request: Request, twin: Request) -> None:
    """The copy of the recurrent state is right only if the transfers that still carry its source end well."""
    source = request.recurrent_states()[request.last_beam].page
    if source is not None and source.transfers > 0:
        twin.await_page(source)


def _copy_state(request: Request) -> Page | None:
    """A copy of the live recurrent state, on whatever level has room for it."""
    if request.recurrent is None:
        return None
    recurrent = request.recurrent_states()[request.last_beam]
    if recurrent.page is None:
        return None
    if recurrent.page.lost:
        request.await_page(recurrent.page)
        request.require(request.status, "fork()")
    copy = request.shared.hierarchy.try_copy(recurrent.page, recurrent.page.priority, request.stream)
    if copy is None:
        raise OutOfPagesError(
            "fork(): no slot on any level for a copy of the recurrent state; suspend or close another cache first"
        )
    return copy
