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


def check_commit(state: Request, count: int) -> None:
    """Raise unless `count` more tokens may be committed now; changes nothing."""
    if not state.commit_allowed:
        raise LogicError("Cannot commit tokens after stop_committing()")
    after = state.committed + count
    if after > state.capacity:
        raise ConfigError(f"committing {count} tokens after {state.committed} passes the capacity {state.capacity}: resize first")
    if state.shared.commit_min_snapshot and state.history not in (state.committed, after):
        raise LogicError(
            f"with commit_min_snapshot the history length must be {state.committed} or {after} when {count} tokens are committed; "
            f"it is {state.history}: a snapshot is good at one length only"
        )


def append_inside_block(state: Request, token: int) -> bool:
    """The decode step: one id that fills no block, moves no window and frees no scratch slot. False, nothing changed, if it is not
    that simple."""
    after = state.committed + 1
    if after % state.tokens_per_block == 0 or not takes_one(state, token):
        return False
    if after > state.history:
        if after >= state.next_stale or (state.scratch and state.holds_scratch()):
            return False
        state.history = after
    write_i32_le(state.tail, i32(token))
    state.committed = after
    return True


def takes_one(state: Request, token: int) -> bool:
    """Whether this id can be committed by `commit_one`: no beams, no snapshots, nothing in doubt, and no error to report."""
    return (
        state.status == ACTIVE
        and 0 <= token < TOKEN_ID_LIMIT
        and state.committed < state.capacity
        and state.width == 1
        and state.commit_allowed
        and state.provision is None
        and not state.lost
        and not state.shared.commit_min_snapshot
    )


def commit_one(state: Request, token: int, point: Point) -> None:
    """Does what `commit` does with a single id that it takes; `point` is the end of our work up to now. Lock held."""
    after = state.committed + 1
    history = max(state.history, after)
    ordinal = len(state.path)
    if after % state.tokens_per_block == 0:
        _end_block(state, token, ordinal, history, point)
    else:
        write_i32_le(state.tail, i32(token))
    state.committed = after
    if history > state.history:
        advance_history(state, history, point)
    _release_stale(state, ordinal, len(state.path))


def _end_block(state: Request, token: int, ordinal: int, history: int, point: Point) -> None:
    """The last block is full with this id."""
    tip = state.tip
    parent = _parent(state)
    tail = state.tail
    write_i32_le(tail, i32(token))
    data = tail.getvalue()
    tail.truncate(len(tail) - TOKEN_BYTES)  # until the block stands: the device may fail
    parent = _enter_block(state, parent, data, ordinal, history, point)
    tail.truncate(0)
    state.shared.tree.pin(parent)
    if tip is not None:
        state.shared.tree.unpin(tip)
    state.tip = parent


def commit(state: Request, tokens: TokenSequence, beams: list[int], is_end: bool) -> None:
    """Append tokens to the committed ones and publish every block that they fill. The caller has checked `check_commit`.

    `beams`: the beam of each block touched, from `choose_beams`; empty at width 1.
    With `is_end` no snapshot is copied: the live pages themselves go to the tree when committing stops.
    """
    size = state.tokens_per_block
    after = state.committed + tokens.num_tokens
    history = max(state.history, after)
    snapshots = state.shared.commit_min_snapshot and not is_end
    state_priority = PRIORITY_DEFAULT  # of the snapshot of the recurrent state; asked before anything changes
    if snapshots and state.recurrence is not None:
        state_priority = state.page_priority((after - 1) // size, state.recurrence.life_cycle)
    listener = state.shared.tree.listener
    if tokens.uuids is not None and listener is not None:
        for digest, uuid in tokens.uuids.items():
            listener.item_named(digest, uuid)
    first = len(state.path)
    full = after // size
    point = NULL_POINT
    if full > first or history >= state.next_stale or state.scratch:
        point = state.shared.timeline.record(state.stream)
    if full > first:
        _publish_blocks(state, tokens, full, history, point, beams)
    if state.width > 1:
        state.tail_beam = beams[-1]
        state.last_beam = beams[-1] if beams[-1] >= 0 else beams[-2]
    if tokens.digests:
        state.has_digests = True
    _append_tail(state, tokens, full * size)
    state.committed = after
    if history > state.history:
        advance_history(state, history, point)
    _release_stale(state, first, len(state.path))
    if snapshots:
        _snapshot(state, state_priority)


def _append_tail(state: Request, tokens: TokenSequence, beg: int) -> None:
    """Keep the tokens from position `beg` of the request on, those past its last full block, as the tail."""
    offset = beg - state.committed  # position of `beg` in `tokens`
    if offset <= 0:
        state.tail.write(tokens.data)
    else:
        state.tail.truncate(0)
        state.tail.write(tokens.slice_bytes(offset, tokens.num_tokens))


def _publish_blocks(state: Request, tokens: TokenSequence, full: int, history: int, point: Point, beams: list[int]) -> None:
    """Insert the blocks up to `full` below our tip, adopting identical ones."""
    size = state.tokens_per_block
    tree = state.shared.tree
    tip = state.tip
    parent = _parent(state)
    pending = state.tail.getvalue()
    first = len(state.path)
    try:
        for ordinal in range(first, full):
            beg = ordinal * size - state.committed
            data = tokens.slice_bytes(max(beg, 0), beg + size)
            if pending:
                data = pending + data
                pending = b""
            if beams:
                settle_block(state, ordinal, beams[ordinal - first], point)
            parent = _enter_block(state, parent, data, ordinal, history, point)
    except KVCacheError:  # the device refused a wait or a copy: nothing is committed, and the blocks that stand serve the next try
        del state.path[first:]
        raise
    tree.pin(parent)
    if tip is not None:
        tree.unpin(tip)
    state.tip = parent


def _enter_block(state: Request, parent: Block, data: bytes, ordinal: int, history: int, point: Point) -> Block:
    """The block of our next full one's tokens, with our pages or those of whoever committed it first; returns what the next is to
    be put under. Where what we build on has left the tree, ours stays private."""
    if not parent.attached:
        state.path.append(state.shared.tree.loose_block(ordinal, data))
        return parent
    block, outcome = state.shared.tree.insert(parent, data, state.tokens_per_block)
    if outcome == BLOCK_NEW and state.provision is not None:
        state.provision.add(state.shared.tree, block)
    _settle_block(state, block, ordinal, outcome, history, point)
    state.path.append(block)
    return block


def _settle_block(state: Request, block: Block, ordinal: int, outcome: int, history: int, point: Point) -> None:
    """Decide page by page whose bytes stand for a full block: ours, or those of whoever committed it first."""
    shared = state.shared
    size = state.tokens_per_block
    for lane in state.main_lanes:
        page = lane.pages[ordinal]
        if page is None or page.lost or not _ours_to_give(page, block, size):
            continue
        beg, end = lane.life_cycle.stale(history)
        stale = beg <= ordinal < end
        if stale and shared.commit_min_snapshot:
            continue  # given up when the history advances
        theirs = block.page(lane.index)
        if outcome != BLOCK_EXISTS or theirs is None or theirs.coverage < size:
            if _may_have_ours(state, block):
                shared.hierarchy.merge_ready(page, point)
                shared.tree.install(block, page, size)
        elif not stale and block.unsettled == 0:
            _adopt(state, lane, ordinal, page, theirs, point)


def _adopt(state: Request, lane: BlockTable, ordinal: int, ours: Page, theirs: Page, point: Point) -> None:
    """Use the page of an identical block instead of ours; a colder one takes over our GPU slot."""
    shared = state.shared
    hierarchy = shared.hierarchy
    if theirs.level > 0:
        if ours.locks + ours.holds > 1 or state.provision is not None:
            return  # a fork shares it, or it builds on bytes that may yet prove wrong: it stays private
        ours.ready = shared.timeline.merge(ours.ready, point)
        hierarchy.take_over(theirs, ours)
    else:
        shared.timeline.wait(state.stream, theirs.ready)
        hierarchy.lock(theirs)
        theirs.priority = max(theirs.priority, ours.priority)
        hierarchy.unlock(ours, point)
        hierarchy.counters.adopted[lane.index] += 1
        if theirs.transfers > 0:
            state.await_page(theirs)
        lane.row.set(ordinal, theirs.slot)
    lane.pages[ordinal] = theirs


def _release_stale(state: Request, first: int, last: int) -> None:
    """Let go of the stale pages of blocks first..last, which only waited for a commit."""
    for lane in state.lanes:
        beg, end = lane.stale(state.history)
        for ordinal in range(max(beg, first), min(end, last)):
            page = lane.pages[ordinal]
            if page is not None:
                lane.pages[ordinal] = None
                state.shared.hierarchy.release(page)


def _snapshot(state: Request, state_priority: int) -> None:
    """Copy into the tree what a later request needs to start at exactly this length: the live partial block, and the SSM state."""
    shared = state.shared
    covered = state.tail_length()
    block = state.tip
    if not _parent(state).attached:
        return
    if state.tail_beam > 0:
        exchange_beams(state, state.tail_beam)
    if covered > 0:
        block = _insert_tail(state)
    assert block is not None, "something has been committed"
    try:
        _copy_live_pages(state, block, covered, state_priority)
    finally:
        if covered > 0:
            shared.tree.unpin(block)  # leaves the tree again if no page found room


def _copy_live_pages(state: Request, block: Block, covered: int, state_priority: int) -> None:
    """Give a block copies of the pages of the live partial block, `covered` tokens of which are committed, and of the SSM state."""
    if not _may_have_ours(state, block):
        return
    if covered > 0:
        for lane in state.main_lanes:
            page = lane.pages[len(state.path)]
            if page is not None and _is_narrower(block.page(lane.index), covered):
                _copy_page(state, block, page, covered, page.priority)
    recurrence = state.recurrences()[state.last_beam] if state.recurrence is not None else None
    if recurrence is not None and recurrence.page is not None:
        coverage = covered if covered > 0 else state.tokens_per_block
        narrower = _is_narrower(block.page(recurrence.index), coverage)
        if narrower and not _copy_page(state, block, recurrence.page, coverage, state_priority):
            recurrence.skipped += 1


def _is_narrower(page: Page | None, coverage: int) -> bool:
    """Whether a page of this coverage would be news to a block that has `page`."""
    return page is None or page.coverage < coverage


def _copy_page(state: Request, block: Block, source: Page, coverage: int, priority: int) -> bool:
    """Give a block a copy of our page: over the narrower one that it has, or in a slot of its own. False if there is no room."""
    hierarchy = state.shared.hierarchy
    tree = state.shared.tree
    old = block.page(source.life_cycle)
    if old is not None and old.plans == 0:
        try:
            if hierarchy.overwrite(old, source, state.stream):
                return tree.install(block, old, coverage)
        except KVCacheError:
            tree.drop_page(old)
            raise
    copy = hierarchy.try_copy(source, priority, state.stream)
    if copy is None:
        return False
    if not tree.install(block, copy, coverage):
        hierarchy.orphan(copy)
    return True


def _insert_tail(state: Request) -> Block:
    """The tree block of the committed part of the last block, or the longer one that covers it; pinned."""
    shared = state.shared
    block, outcome = shared.tree.insert(_parent(state), state.tail.getvalue(), state.tail_length())
    shared.tree.pin(block)
    if outcome == BLOCK_NEW and state.provision is not None:
        state.provision.add(shared.tree, block)
    return block


def _ours_to_give(page: Page, block: Block, coverage: int) -> bool:
    """Whether a block may still learn of a page: a fork may have published it before us, perhaps for fewer tokens."""
    return page.owner is None or (page.owner is block and page.coverage < coverage)


def _may_have_ours(state: Request, block: Block) -> bool:
    """Whether a block may get pages of ours: while file transfers carry bytes that these build on, only one that is hidden until
    they have settled, never a block that somebody else has published."""
    return state.provision is None or block.unsettled > 0


def _parent(state: Request) -> Block:
    """The tree block under which our next block goes."""
    tip = state.tip
    return tip if tip is not None else state.shared.tree.root(state.scope)


def stop_committing(state: Request, is_end: bool, point: Point) -> None:
    """Publish the committed part of the last block from the live page, then give up what only waited for a commit. Idempotent.

    With `is_end` the live SSM state becomes the snapshot of the committed length: the caller promises not to write any more.
    `point` is the end of our work up to now; NULL_POINT if the caller does not know it yet.
    """
    if not state.commit_allowed:
        return
    block = state.tip
    if state.status == ACTIVE and point == NULL_POINT and (is_end or state.tail_length() > 0):
        point = state.shared.timeline.record(state.stream)
    if state.tail_beam > 0:
        exchange_beams(state, state.tail_beam)
    if state.tail_length() > 0:
        block = _publish_tail(state, point) if not state.borrowed_tail and _parent(state).attached else None
    if is_end and block is not None and block.attached:
        _publish_state(state, block, point)
    if block is not None and block is not state.tip:
        state.shared.tree.unpin(block)
    state.commit_allowed = False
    _release_stale(state, len(state.path), state.num_blocks)


def _publish_tail(state: Request, point: Point) -> Block:
    """The tree gets the live page itself: its owner stays the only writer of what lies past the committed tokens.

    `point` is the end of our work up to now. Returns the block, pinned.
    """
    shared = state.shared
    covered = state.tail_length()
    block = _insert_tail(state)
    if not _may_have_ours(state, block):
        return block
    for lane in state.main_lanes:
        page = lane.pages[len(state.path)]
        present = block.page(lane.index)
        if page is None or page.lost or not _ours_to_give(page, block, covered):
            continue
        if present is not None and present.coverage >= covered:
            continue
        page.ready = shared.timeline.merge(page.ready, point)
        shared.tree.install(block, page, covered)
    return block


def _publish_state(state: Request, block: Block, point: Point) -> None:
    """The tree gets the live SSM state itself, as the snapshot at the end of the committed tokens."""
    if state.recurrence is None:
        return
    recurrence = state.recurrences()[state.last_beam]
    if recurrence.page is None or recurrence.borrowed or recurrence.page.lost:
        return
    shared = state.shared
    page = recurrence.page
    covered = state.tail_length()
    coverage = covered if covered > 0 else state.tokens_per_block
    if not _is_narrower(block.page(recurrence.index), coverage) or not _may_have_ours(state, block):
        return
    page.ready = shared.timeline.merge(page.ready, point)
    shared.tree.install(block, page, coverage)
