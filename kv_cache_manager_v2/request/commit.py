"""Commit: tokens become final, full blocks enter the reuse tree.

Rule: commit is publication order only. The bytes may still be in flight on the request's stream; whoever uses a published page
waits for its ready point. Nothing here needs a page that it might not get: an identical block that someone else committed
first is adopted in place, and a snapshot that finds no room is skipped.
"""

from __future__ import annotations

from librt.strings import write_i32_le
from mypy_extensions import i32

from kv_cache_manager_v2.errors import ConfigError, KVCacheError, LogicError
from kv_cache_manager_v2.ids import NULL_POINT, PRIORITY_DEFAULT, TOKEN_ID_LIMIT, Point
from kv_cache_manager_v2.request.beams import exchange_beams, settle_block
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.growth import advance_history
from kv_cache_manager_v2.request.request import ACTIVE, Request
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.tokens import TOKEN_BYTES, TokenSequence
from kv_cache_manager_v2.reuse.tree import BLOCK_EXISTS, BLOCK_NEW
from kv_cache_manager_v2.storage.page import Page


def check_commit(request: Request, count: int) -> None:
    """Raise unless `count` more tokens may be committed now; changes nothing."""
    if not request.commit_allowed:
        raise LogicError("Cannot commit tokens after stop_committing()")
    after = request.committed + count
    if after > request.capacity:
        raise ConfigError(
            f"committing {count} tokens after {request.committed} passes the capacity {request.capacity}: resize first"
        )
    if request.shared.commit_min_snapshot and request.history not in (request.committed, after):
        raise LogicError(
            f"with commit_min_snapshot the history must be {request.committed} or {after} when {count} tokens are committed; "
            f"it is {request.history}: a snapshot is good at one length only"
        )


def append_inside_block(request: Request, token: int) -> bool:
    """The decode step: one id that fills no block, moves no window and frees no scratch slot. False, nothing changed, if it is not
    that simple."""
    after = request.committed + 1
    if after % request.tokens_per_block == 0 or not takes_one(request, token):
        return False
    if after > request.history:
        if after >= request.next_stale or (request.scratch and request.holds_scratch()):
            return False
        request.history = after
    write_i32_le(request.tail, i32(token))
    request.committed = after
    return True


def takes_one(request: Request, token: int) -> bool:
    """Whether this id can be committed by `commit_one`: no beams, no snapshots, nothing in doubt, and no error to report."""
    return (
        request.status == ACTIVE
        and 0 <= token < TOKEN_ID_LIMIT
        and request.committed < request.capacity
        and request.width == 1
        and request.commit_allowed
        and request.loads is None
        and not request.lost
        and not request.shared.commit_min_snapshot
    )


def commit_one(request: Request, token: int, point: Point) -> None:
    """Does what `commit` does with a single id that it takes; `point` is the end of our work up to now. Lock held."""
    after = request.committed + 1
    history = max(request.history, after)
    ordinal = len(request.path)
    if after % request.tokens_per_block == 0:
        _end_block(request, token, ordinal, history, point)
    else:
        write_i32_le(request.tail, i32(token))
    request.committed = after
    if history > request.history:
        advance_history(request, history, point)
    _release_stale(request, ordinal, len(request.path))


def _end_block(request: Request, token: int, ordinal: int, history: int, point: Point) -> None:
    """The last block is full with this id."""
    tip = request.tip
    parent = _parent(request)
    tail = request.tail
    write_i32_le(tail, i32(token))
    data = tail.getvalue()
    tail.truncate(len(tail) - TOKEN_BYTES)  # until the block stands: the device may fail
    parent = _enter_block(request, parent, data, ordinal, history, point)
    tail.truncate(0)
    request.shared.tree.pin(parent)
    if tip is not None:
        request.shared.tree.unpin(tip)
    request.tip = parent


def commit(request: Request, tokens: TokenSequence, beams: list[int], is_end: bool) -> None:
    """Append tokens to the committed ones and publish every block that they fill. The caller has checked `check_commit`.

    `beams`: the beam of each block touched, from `choose_beams`; empty at width 1.
    With `is_end` no snapshot is copied: the live pages themselves go to the tree when committing stops.
    """
    size = request.tokens_per_block
    after = request.committed + tokens.num_tokens
    history = max(request.history, after)
    snapshots = request.shared.commit_min_snapshot and not is_end
    state_priority = PRIORITY_DEFAULT  # of the snapshot of the recurrent state; asked before anything changes
    if snapshots and request.recurrent is not None:
        state_priority = request.page_priority((after - 1) // size, request.recurrent.life_cycle)
    listener = request.shared.tree.listener
    if tokens.uuids is not None and listener is not None:
        for digest, uuid in tokens.uuids.items():
            listener.item_named(digest, uuid)
    first = len(request.path)
    full = after // size
    point = NULL_POINT
    if full > first or history >= request.next_stale or request.scratch:
        point = request.shared.timeline.record(request.stream)
    if full > first:
        _publish_blocks(request, tokens, full, history, point, beams)
    if request.width > 1:
        request.tail_beam = beams[-1]
        request.last_beam = beams[-1] if beams[-1] >= 0 else beams[-2]
    if tokens.digests:
        request.has_digests = True
    _append_tail(request, tokens, full * size)
    request.committed = after
    if history > request.history:
        advance_history(request, history, point)
    _release_stale(request, first, len(request.path))
    if snapshots:
        _snapshot(request, state_priority)


def _append_tail(request: Request, tokens: TokenSequence, beg: int) -> None:
    """Keep the tokens from position `beg` of the request on, those past its last full block, as the tail."""
    offset = beg - request.committed  # position of `beg` in `tokens`
    if offset <= 0:
        request.tail.write(tokens.data)
    else:
        request.tail.truncate(0)
        request.tail.write(tokens.slice_bytes(offset, tokens.num_tokens))


def _publish_blocks(request: Request, tokens: TokenSequence, full: int, history: int, point: Point, beams: list[int]) -> None:
    """Insert the blocks up to `full` below our tip, adopting identical ones."""
    size = request.tokens_per_block
    tree = request.shared.tree
    tip = request.tip
    parent = _parent(request)
    pending = request.tail.getvalue()
    first = len(request.path)
    try:
        for ordinal in range(first, full):
            beg = ordinal * size - request.committed
            data = tokens.slice_bytes(max(beg, 0), beg + size)
            if pending:
                data = pending + data
                pending = b""
            if beams:
                settle_block(request, ordinal, beams[ordinal - first], point)
            parent = _enter_block(request, parent, data, ordinal, history, point)
    except KVCacheError:  # the device refused a wait or a copy: nothing is committed, and the blocks that stand serve the next try
        del request.path[first:]
        raise
    tree.pin(parent)
    if tip is not None:
        tree.unpin(tip)
    request.tip = parent


def _enter_block(request: Request, parent: Block, data: bytes, ordinal: int, history: int, point: Point) -> Block:
    """The block of our next full one's tokens, with our pages or those of whoever committed it first; returns what the next is to
    be put under. Where what we build on has left the tree, ours stays private."""
    if not parent.attached:
        request.path.append(request.shared.tree.loose_block(ordinal, data))
        return parent
    block, outcome = request.shared.tree.insert(parent, data, request.tokens_per_block)
    if outcome == BLOCK_NEW and request.loads is not None:
        request.loads.add(request.shared.tree, block)
    _settle_block(request, block, ordinal, outcome, history, point)
    request.path.append(block)
    return block


def _settle_block(request: Request, block: Block, ordinal: int, outcome: int, history: int, point: Point) -> None:
    """Decide page by page whose bytes stand for a full block: ours, or those of whoever committed it first."""
    shared = request.shared
    size = request.tokens_per_block
    for table in request.main_tables:
        page = table.pages[ordinal]
        if page is None or page.lost or not _ours_to_give(page, block, size):
            continue
        beg, end = table.life_cycle.stale(history)
        stale = beg <= ordinal < end
        if stale and shared.commit_min_snapshot:
            continue  # given up when the history advances
        theirs = block.page(table.index)
        if outcome != BLOCK_EXISTS or theirs is None or theirs.coverage < size:
            if _may_have_ours(request, block):
                shared.hierarchy.merge_ready(page, point)
                shared.tree.install(block, page, size)
        elif not stale and block.unsettled == 0:
            _adopt(request, table, ordinal, page, theirs, point)


def _adopt(request: Request, table: BlockTable, ordinal: int, ours: Page, theirs: Page, point: Point) -> None:
    """Use the page of an identical block instead of ours; a colder one takes over our GPU slot."""
    shared = request.shared
    hierarchy = shared.hierarchy
    if theirs.level > 0:
        if ours.locks + ours.holds > 1 or request.loads is not None:
            return  # a fork shares it, or it builds on bytes that may yet prove wrong: it stays private
        ours.ready = shared.timeline.merge(ours.ready, point)
        hierarchy.take_over(theirs, ours)
    else:
        shared.timeline.wait(request.stream, theirs.ready)
        hierarchy.lock(theirs)
        theirs.priority = max(theirs.priority, ours.priority)
        hierarchy.unlock(ours, point)
        hierarchy.counters.adopted[table.index] += 1
        if theirs.transfers > 0:
            request.await_page(theirs)
        table.row.set(ordinal, theirs.slot)
    table.pages[ordinal] = theirs


def _release_stale(request: Request, first: int, last: int) -> None:
    """Let go of the stale pages of blocks first..last, which only waited for a commit."""
    for table in request.tables:
        beg, end = table.stale(request.history)
        for ordinal in range(max(beg, first), min(end, last)):
            page = table.pages[ordinal]
            if page is not None:
                table.pages[ordinal] = None
                request.shared.hierarchy.release(page)


def _snapshot(request: Request, state_priority: int) -> None:
    """Copy into the tree what a later request needs to start at exactly this length: the live partial block, and the SSM state."""
    shared = request.shared
    covered = request.tail_length()
    block = request.tip
    if not _parent(request).attached:
        return
    if request.tail_beam > 0:
        exchange_beams(request, request.tail_beam)
    if covered > 0:
        block = _insert_tail(request)
    assert block is not None, "something has been committed"
    try:
        _copy_live_pages(request, block, covered, state_priority)
    finally:
        if covered > 0:
            shared.tree.unpin(block)  # leaves the tree again if no page found room


def _copy_live_pages(request: Request, block: Block, covered: int, state_priority: int) -> None:
    """Give a block copies of the pages of the live partial block, `covered` tokens of which are committed, and of the SSM state."""
    if not _may_have_ours(request, block):
        return
    if covered > 0:
        for table in request.main_tables:
            page = table.pages[len(request.path)]
            if page is not None and _is_narrower(block.page(table.index), covered):
                _copy_page(request, block, page, covered, page.priority)
    recurrent = request.recurrent_states()[request.last_beam] if request.recurrent is not None else None
    if recurrent is not None and recurrent.page is not None:
        coverage = covered if covered > 0 else request.tokens_per_block
        narrower = _is_narrower(block.page(recurrent.index), coverage)
        if narrower and not _copy_page(request, block, recurrent.page, coverage, state_priority):
            recurrent.skipped += 1


def _is_narrower(page: Page | None, coverage: int) -> bool:
    """Whether a page of this coverage would be news to a block that has `page`."""
    return page is None or page.coverage < coverage


def _copy_page(request: Request, block: Block, source: Page, coverage: int, priority: int) -> bool:
    """Give a block a copy of our page: over the narrower one that it has, or in a slot of its own. False if there is no room."""
    hierarchy = request.shared.hierarchy
    tree = request.shared.tree
    old = block.page(source.life_cycle)
    if old is not None and old.plans == 0:
        try:
            if hierarchy.overwrite(old, source, request.stream):
                return tree.install(block, old, coverage)
        except KVCacheError:
            tree.drop_page(old)
            raise
    copy = hierarchy.try_copy(source, priority, request.stream)
    if copy is None:
        return False
    if not tree.install(block, copy, coverage):
        hierarchy.unlist(copy)
    return True


def _insert_tail(request: Request) -> Block:
    """The tree block of the committed part of the last block, or the longer one that covers it; pinned."""
    shared = request.shared
    block, outcome = shared.tree.insert(_parent(request), request.tail.getvalue(), request.tail_length())
    shared.tree.pin(block)
    if outcome == BLOCK_NEW and request.loads is not None:
        request.loads.add(shared.tree, block)
    return block


def _ours_to_give(page: Page, block: Block, coverage: int) -> bool:
    """Whether a block may still learn of a page: a fork may have published it before us, perhaps for fewer tokens."""
    return page.owner is None or (page.owner is block and page.coverage < coverage)


def _may_have_ours(request: Request, block: Block) -> bool:
    """Whether a block may get pages of ours: while file transfers carry bytes that these build on, only one that is hidden until
    they have settled, never a block that somebody else has published."""
    return request.loads is None or block.unsettled > 0


def _parent(request: Request) -> Block:
    """The tree block under which our next block goes."""
    tip = request.tip
    return tip if tip is not None else request.shared.tree.root(request.scope)


def stop_committing(request: Request, is_end: bool, point: Point) -> None:
    """Publish the committed part of the last block from the live page, then give up what only waited for a commit. Idempotent.

    With `is_end` the live SSM state becomes the snapshot of the committed length: the caller promises not to write any more.
    `point` is the end of our work up to now; NULL_POINT if the caller does not know it yet.
    """
    if not request.commit_allowed:
        return
    block = request.tip
    if request.status == ACTIVE and point == NULL_POINT and (is_end or request.tail_length() > 0):
        point = request.shared.timeline.record(request.stream)
    if request.tail_beam > 0:
        exchange_beams(request, request.tail_beam)
    if request.tail_length() > 0:
        block = _publish_tail(request, point) if not request.borrowed_tail and _parent(request).attached else None
    if is_end and block is not None and block.attached:
        _publish_state(request, block, point)
    if block is not None and block is not request.tip:
        request.shared.tree.unpin(block)
    request.commit_allowed = False
    _release_stale(request, len(request.path), request.num_blocks)


def _publish_tail(request: Request, point: Point) -> Block:
    """The tree gets the live page itself: its owner stays the only writer of what lies past the committed tokens.

    `point` is the end of our work up to now. Returns the block, pinned.
    """
    shared = request.shared
    covered = request.tail_length()
    block = _insert_tail(request)
    if not _may_have_ours(request, block):
        return block
    for table in request.main_tables:
        page = table.pages[len(request.path)]
        present = block.page(table.index)
        if page is None or page.lost or not _ours_to_give(page, block, covered):
            continue
        if present is not None and present.coverage >= covered:
            continue
        page.ready = shared.timeline.merge(page.ready, point)
        shared.tree.install(block, page, covered)
    return block


def _publish_state(request: Request, block: Block, point: Point) -> None:
    """The tree gets the live SSM state itself, as the snapshot at the end of the committed tokens."""
    if request.recurrent is None:
        return
    recurrent = request.recurrent_states()[request.last_beam]
    if recurrent.page is None or recurrent.borrowed or recurrent.page.lost:
        return
    shared = request.shared
    page = recurrent.page
    covered = request.tail_length()
    coverage = covered if covered > 0 else request.tokens_per_block
    if not _is_narrower(block.page(recurrent.index), coverage) or not _may_have_ours(request, block):
        return
    page.ready = shared.timeline.merge(page.ready, point)
    shared.tree.install(block, page, coverage)
