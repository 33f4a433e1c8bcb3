"""Fork: a second request that goes on from where an open one stands, for parallel sampling and tree-of-thought engines.

Rule: copy on write. The fork holds the same pages; what it would write into (the block in which the history ends) is copied on
its first resume, and blocks past the history are its own. Only recurrent state is copied at once, since its owner overwrites it.
"""

from __future__ import annotations

from kv_cache_manager_v2.errors import OutOfPagesError
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.page_index_row import bad_run
from kv_cache_manager_v2.request.request import ACTIVE, Request
from kv_cache_manager_v2.sequence.statistics import PendingStats
from kv_cache_manager_v2.storage.page import Page


def fork(state: Request, request_id: int | None) -> Request:
    """A SUSPENDED request with the same committed tokens and history, its capacity cut to the history.

    Raises OutOfPagesError, with nothing changed, if recurrent state has to be copied and there is no slot for it.
    """
    shared = state.shared
    twin = Request(shared, state.scope, request_id, state.priority)
    if state.status == ACTIVE:
        _mark_written(state)
    snapshot = _copy_state(state)
    size = state.tokens_per_block
    beam = state.last_beam
    twin.committed = state.committed
    twin.set_history(state.history)
    twin.set_capacity(state.history)
    twin.path = list(state.path)
    twin.tail.write(state.tail.getvalue())
    twin.commit_allowed = state.commit_allowed
    twin.text_only = state.text_only
    twin.has_digests = state.has_digests
    twin.scratch = state.scratch
    twin.provision = state.provision.share() if state.provision is not None else None
    if snapshot is not None:
        _await_source(state, twin)
    twin.borrowed_tail = state.history % size != 0
    if state.pending is not None:
        twin.pending = PendingStats(len(shared.life_cycles), shared.hierarchy.num_levels, state.pending.expected_prompt_length)
    if state.tip is not None:
        twin.tip = state.tip
        shared.tree.pin(state.tip)
    for number, lane in enumerate(twin.lanes):
        _share_pages(state, state.lanes[number], state.lanes[beam * len(twin.lanes) + number], lane, twin.num_blocks)
    twin.settle_counts()
    if snapshot is not None and twin.recurrence is not None:
        shared.hierarchy.hold(snapshot)
        twin.recurrence.page = snapshot
    return twin


def _share_pages(state: Request, main: BlockTable, source: BlockTable, lane: BlockTable, blocks: int) -> None:
    """Hold a beam's pages of the first blocks, those that wait for a late commit too; what it shares is in beam 0's lane."""
    for ordinal in range(blocks):
        page = source.pages[ordinal]
        if page is None:
            page = main.pages[ordinal]
        if page is not None:
            state.shared.hierarchy.hold(page)
        lane.pages.append(page)
    lane.row.fill(bad_run(blocks))


def _mark_written(state: Request) -> None:
    """What our stream has queued so far is what the fork's stream must wait for."""
    shared = state.shared
    point = shared.timeline.record(state.stream)
    for lane in state.lanes:
        for ordinal, page in enumerate(lane.pages):
            if page is not None and (page.owner is None or ordinal >= len(state.path)):
                shared.hierarchy.merge_ready(page, point)


def _await_source(state: Request, twin: Request) -> None:
    """The copy of the recurrent state is right only if the transfers that still carry its source end well."""
    source = state.recurrences()[state.last_beam].page
    if source is not None and source.transfers > 0:
        twin.await_page(source)


def _copy_state(state: Request) -> Page | None:
    """A copy of the live recurrent state, on whatever level has room for it."""
    if state.recurrence is None:
        return None
    recurrence = state.recurrences()[state.last_beam]
    if recurrence.page is None:
        return None
    if recurrence.page.lost:
        state.await_page(recurrence.page)
        state.require(state.status, "fork()")
    copy = state.shared.hierarchy.try_copy(recurrence.page, recurrence.page.priority, state.stream)
    if copy is None:
        raise OutOfPagesError(
            "fork(): no slot on any level for a copy of the recurrent state; suspend or close another cache first"
        )
    return copy
