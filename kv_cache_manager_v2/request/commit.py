"""Commit: tokens become final, and full blocks enter the radix tree.

A commit does not wait for the bytes: the request's stream may still compute them. A request that reuses a committed page waits for
the page's ready point. A commit cannot fail for lack of pages: pages of an identical cached block are adopted in place of the
request's own, and a snapshot for which there is no slot is skipped.
"""

from __future__ import annotations

from librt.strings import write_i32_le
from mypy_extensions import i32

from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.ids import NULL_POINT, Point
from kv_cache_manager_v2.request import publication
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.growth import advance_history
from kv_cache_manager_v2.request.publication import Publication
from kv_cache_manager_v2.request.request import ACTIVE, Request
from kv_cache_manager_v2.request.snapshot import existing_parent, insert_tail, make_snapshot, may_publish, note_origin, parent_of
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.tokens import TOKEN_BYTES, TokenSequence
from kv_cache_manager_v2.reuse.tree import BLOCK_EXISTS, BLOCK_NEW
from kv_cache_manager_v2.storage.page import MOST_USES, Page


def check_commit(request: Request, count: int) -> None:
    """Raise unless `count` more tokens may be committed now. Changes nothing."""
    if not request.commit_allowed:
        raise LogicError("Cannot commit tokens after stop_committing()")
    after = request.committed + count
    if after > request.capacity:
        raise ConfigError(
            f"committing {count} tokens after {request.committed} exceeds the capacity {request.capacity}; resize first"
        )
    if request.shared.commit_min_snapshot and request.history > after:
        raise LogicError(
            f"with commit_min_snapshot the history must not exceed {after} when {count} tokens are committed; it is "
            f"{request.history}. A snapshot is valid at one length only; commit up to the history"
        )


def commit_one(request: Request, token: int, point: Point) -> None:
    """Commit a single id for which `Request.takes_one` is true. `point` is the end of the request's work. The lock is held."""
    after = request.committed + 1
    history = max(request.history, after)
    if request.published is not None:
        publication.set_computed(request, history, point)
    ordinal = len(request.path)
    tail = request.tail
    word = i32(token)
    if after % request.tokens_per_block == 0:
        existing = existing_parent(request)
        if existing is not None and existing.children is not None and existing.attached and request.adopts:
            found = request.shared.tree.find(existing, tail.getvalue() + token.to_bytes(TOKEN_BYTES, "little"))
            if found is not None:
                _wait_for_pages(request, found, NULL_POINT)
        stale = _stale_ranges(request, history)
        parent = parent_of(request)
        write_i32_le(tail, word)
        _set_tip(request, _install_block(request, parent, tail.getvalue(), stale, point))
        tail.truncate(0)
    else:
        write_i32_le(tail, word)
    request.committed = after
    if history > request.history:
        advance_history(request, history, point)
    if len(request.path) > ordinal:
        _release_stale(request, ordinal)


def commit(request: Request, tokens: TokenSequence, beams: list[int], is_end: bool) -> None:
    """Commit tokens, and add every block that they fill to the tree. The caller has called `check_commit`.

    `beams` is the result of `choose_beams`; empty at width 1. With `is_end` no snapshot is copied: the live pages themselves enter
    the tree, and committing stops. O(tokens + blocks x layer groups).
    """
    size = request.tokens_per_block
    after = request.committed + tokens.num_tokens
    history = max(request.history, after)
    snapshot = None if is_end else make_snapshot(request, after, _last_beam(request, beams))
    first = len(request.path)
    full = after // size
    rest = _rest(request, tokens, full)
    point = NULL_POINT
    if full > first or history >= request.next_stale or request.scratch or is_end:
        point = request.shared.timeline.record(request.stream)
    end = existing_parent(request)
    if full > first and end is not None and end.attached:
        end = _wait_for_existing(request, end, tokens, full)
    if snapshot is not None:
        with snapshot:
            snapshot.copy(end, request.tail.getvalue() + rest if full == first else rest)
    if request.published is not None:
        publication.set_computed(request, history, point)
    _tell_names(request, tokens)
    if full > first:
        _install_blocks(request, tokens, full, history, point, beams)
    if request.width > 1:
        request.tail_beam = beams[-1]
        request.last_beam = _last_beam(request, beams)
    if tokens.digests:
        request.has_digests = True
    if full > first:
        request.tail.truncate(0)
    request.tail.write(rest)
    request.committed = after
    if history > request.history:
        advance_history(request, history, point)
    _release_stale(request, first)
    if snapshot is not None:
        snapshot.install()
    if is_end:
        stop_committing(request, True, point)


def check_ahead(request: Request, count: int) -> None:
    """Raise unless `count` more tokens may be committed ahead now. Changes nothing."""
    if request.width > 1:  # a commit keeps the pages of one beam, and taking it back could not restore those of the others
        raise LogicError(
            f"commit_ahead() at beam width {request.width}: the beam of a token is known once it is computed; use commit()"
        )
    check_commit(request, count)


def commit_ahead(request: Request, tokens: TokenSequence) -> None:
    """Commit tokens that are not computed yet, and add every block that they fill to the tree. The history stays.

    The caller has called `check_ahead`. Adopts nothing. O(tokens + blocks x layer groups).
    """
    size = request.tokens_per_block
    first = len(request.path)
    after = request.committed + tokens.num_tokens
    full = after // size
    rest = _rest(request, tokens, full)
    published = request.published
    if published is None or request.committed <= request.history:  # all of an earlier one is computed, on another stream perhaps
        published = publication.Publication(request.stream, first)
    point = NULL_POINT
    if full > first and request.history >= published.next_end(size):
        point = request.shared.timeline.record(request.stream)
    _tell_names(request, tokens)
    request.published = published
    if full > first:
        parent = parent_of(request)
        for ordinal in range(first, full):
            parent = _install_ahead(request, published, parent, _block_data(request, tokens, ordinal))
        _set_tip(request, parent)
    if tokens.digests:
        request.has_digests = True
    if full > first:
        request.tail.truncate(0)
    request.tail.write(rest)
    request.committed = after
    publication.set_computed(request, request.history, point)
    request.next_stale = min(request.next_stale, request.next_computed())
    request.set_capacity(request.capacity)


def _install_ahead(request: Request, published: Publication, parent: Block, data: bytes) -> Block:
    """As `_install_block`, for a block that is not computed yet."""
    tree = request.shared.tree
    if not parent.attached:
        request.path.append(tree.detached_block(len(request.path), data))
        return parent
    block, outcome = tree.insert(parent, data, request.tokens_per_block)
    if outcome == BLOCK_NEW and request.loads is not None:
        request.loads.add(tree, block)
    publication.add(request, published, block, outcome == BLOCK_NEW)
    request.path.append(block)
    return block


def _last_beam(request: Request, beams: list[int]) -> int:
    """The beam of the last token."""
    if request.width == 1:
        return request.last_beam
    return beams[-1] if beams[-1] >= 0 else beams[-2]


def _tell_names(request: Request, tokens: TokenSequence) -> None:
    listener = request.shared.tree.listener
    if tokens.uuids is not None and listener is not None:
        for digest, uuid in tokens.uuids.items():
            listener.item_named(digest, uuid)


def _block_data(request: Request, tokens: TokenSequence, ordinal: int) -> bytes:
    """The packed tokens of a block that becomes full. The first one begins with the committed tail."""
    size = request.tokens_per_block
    start = ordinal * size - request.committed
    if start >= 0:
        return tokens.slice_bytes(start, start + size)
    return request.tail.getvalue() + tokens.slice_bytes(0, start + size)


def _rest(request: Request, tokens: TokenSequence, full: int) -> bytes:
    """The packed new tokens that follow the first `full` blocks."""
    return tokens.slice_bytes(max(full * request.tokens_per_block - request.committed, 0), tokens.num_tokens)


def _wait_for_existing(request: Request, parent: Block, tokens: TokenSequence, full: int) -> Block | None:
    """Make the stream wait for GPU pages of identical cached blocks, which the request may adopt.

    Returns the cached block of the last tokens; None if it is not cached. Changes nothing else.
    """
    node = parent
    waited = NULL_POINT
    for ordinal in range(len(request.path), full):
        if node.children is None:
            return None
        existing = request.shared.tree.find(node, _block_data(request, tokens, ordinal))
        if existing is None:
            return None
        node = existing
        if request.adopts:
            waited = _wait_for_pages(request, node, waited)
    return node


def _wait_for_pages(request: Request, block: Block, waited: Point) -> Point:
    """Make the stream wait for the pages of a cached block on the GPU. `waited` is the latest point that it waits for."""
    page = block.first
    while page is not None:
        if page.level == 0 and block.num_pending_loads == 0 and page.ready != waited:
            waited = page.ready
            request.shared.timeline.wait(request.stream, waited)
        page = page.next_in_block
    return waited


def _install_blocks(request: Request, tokens: TokenSequence, full: int, history: int, point: Point, beams: list[int]) -> None:
    """Add the blocks before ordinal `full` to the tree after the tip, with the request's pages or cached ones.

    If the path has left the tree, further blocks stay outside the tree too.
    """
    stale = _stale_ranges(request, history)
    parent = parent_of(request)
    first = len(request.path)
    for ordinal in range(first, full):
        if beams:
            request.keep_beam(ordinal, beams[ordinal - first], point)
        parent = _install_block(request, parent, _block_data(request, tokens, ordinal), stale, point)
    _set_tip(request, parent)


def _stale_ranges(request: Request, history: int) -> list[tuple[int, int]] | None:
    """The stale range of each table of beam 0 at this history; None if no block to commit is stale then."""
    needed = history >= request.next_stale
    for table in request.main_tables:
        needed = needed or table.stale_end > max(table.stale_start, len(request.path))
    return [table.life_cycle.stale(history) for table in request.main_tables] if needed else None


def _install_block(request: Request, parent: Block, data: bytes, stale: list[tuple[int, int]] | None, point: Point) -> Block:
    """Add the request's next full block after `parent`. Returns the parent of the block after it.

    `stale` is the result of `_stale_ranges` at the new history.
    """
    tree = request.shared.tree
    ordinal = len(request.path)
    if not parent.attached:
        request.path.append(tree.detached_block(ordinal, data))
        return parent
    block, outcome = tree.insert(parent, data, request.tokens_per_block)
    if outcome == BLOCK_NEW and request.loads is not None:
        request.loads.add(tree, block)
    _install_pages(request, block, ordinal, outcome, stale, point)
    request.path.append(block)
    return block


def _set_tip(request: Request, block: Block) -> None:
    tree = request.shared.tree
    before = request.tip
    tree.pin(block)
    if before is not None:
        tree.unpin(before)
    request.tip = block


def _install_pages(
    request: Request, block: Block, ordinal: int, outcome: int, stale_ranges: list[tuple[int, int]] | None, point: Point
) -> None:
    """Decide for each page of a full block whether the request's or the cached one is kept. O(layer groups)."""
    shared = request.shared
    size = request.tokens_per_block
    given: Page | None = None  # the first page for the block ...
    more: list[Page] | None = None  # ... and all of them if there are several: a list for one takes a tenth of the commit's time
    theirs = block.first  # pages are listed by life cycle, as tables are
    for number, table in enumerate(request.main_tables):
        while theirs is not None and theirs.life_cycle < table.index:
            theirs = theirs.next_in_block
        present = theirs if theirs is not None and theirs.life_cycle == table.index else None
        page = table.pages[ordinal]
        if page is None or page.lost or not may_be_given(page, block, size):
            continue
        stale = False
        if stale_ranges is not None:
            start, end = stale_ranges[number]
            stale = start <= ordinal < end
        if stale and shared.commit_min_snapshot:
            continue  # released when the history advances
        if outcome != BLOCK_EXISTS or present is None or present.coverage < size:
            if may_publish(request, block):
                shared.hierarchy.merge_ready(page, point)
                note_origin(request, page)
                if given is None:
                    given = page
                elif more is None:
                    more = [given, page]
                else:
                    more.append(page)
        elif not stale and block.num_pending_loads == 0:
            _adopt(request, table, block, page, present, point)
    if more is not None:
        shared.tree.install_all(block, more, size)
    elif given is not None:
        shared.tree.install(block, given, size)


def _adopt(request: Request, table: BlockTable, block: Block, ours: Page, theirs: Page, point: Point) -> None:
    """Use the page of an identical block in place of the request's. A colder page takes over the GPU slot of the request's page.

    The stream already waits for the bytes of a page on the GPU. Without adoption such a page is not used, and the request's own
    becomes a duplicate of it; nor is one that is not computed yet.
    """
    hierarchy = request.shared.hierarchy
    if theirs.level > 0:
        if ours.locks + ours.holds > 1 or request.loads is not None:
            return  # not replaced: a fork shares it, or its bytes depend on a load in flight
        hierarchy.merge_ready(ours, point)
        hierarchy.take_over(theirs, ours)
    elif not request.adopts or block.uncomputed:
        if request.loads is None:
            hierarchy.merge_ready(ours, point)
            request.shared.tree.add_duplicate(block, ours)
        return
    else:
        hierarchy.lock(theirs)
        theirs.priority = max(theirs.priority, ours.priority)
        if theirs.uses < MOST_USES:
            theirs.uses += 1
        hierarchy.unlock(ours, point)
        hierarchy.counters.adopted[table.index] += 1
        if theirs.transfers > 0:
            request.await_page(theirs)
    table.replace(block.ordinal, theirs)


def _release_stale(request: Request, first: int) -> None:
    """Release the stale pages of committed blocks from `first` on, which were held until this commit."""
    last = len(request.path)
    for table in request.tables:
        if table.stale_end > first:
            table.release_stale(first, last)


def may_be_given(page: Page, block: Block, coverage: int) -> bool:
    """Whether a page may be added to a block. A fork may have added the same page before, perhaps for fewer tokens."""
    return page.owner is None or (page.owner is block and page.coverage < coverage)


def stop_committing(request: Request, is_end: bool, point: Point) -> None:
    """Add the committed part of the last block to the tree, then release pages that were held until a commit. Idempotent.

    With `is_end` the live recurrent state becomes the snapshot of the committed length; the caller must not write to it any more.
    `point` is the end of the request's work, or NULL_POINT if it is not recorded yet.
    """
    if not request.commit_allowed:
        return
    if request.status == ACTIVE and point == NULL_POINT and (is_end or request.tail_length() > 0):
        point = request.shared.timeline.record(request.stream)
    if request.tail_beam > 0:
        request.exchange_beams(request.tail_beam)
    block = request.tip
    if request.tail_length() > 0:
        block = _publish_tail(request, point) if not request.borrowed_tail and parent_of(request).attached else None
    if is_end and block is not None and block.attached:
        _publish_state(request, block, point)
    if block is not None and block is not request.tip:
        request.shared.tree.unpin(block)
    request.commit_allowed = False
    for table in request.tables:
        table.release_stale(len(request.path), request.num_blocks)


def _publish_tail(request: Request, point: Point) -> Block:
    """Add the live page of the partial last block to the tree. Only this request writes past its committed tokens.

    Returns the block, pinned.
    """
    shared = request.shared
    covered = request.tail_length()
    block = insert_tail(request)
    if not may_publish(request, block):
        return block
    for table in request.main_tables:
        page = table.pages[len(request.path)]
        present = block.page(table.index)
        if page is None or page.lost or not may_be_given(page, block, covered):
            continue
        if present is not None and present.coverage >= covered:
            continue
        shared.hierarchy.merge_ready(page, point)
        note_origin(request, page)
        shared.tree.install(block, page, covered)
    return block


def _publish_state(request: Request, block: Block, point: Point) -> None:
    """Add the live recurrent state to the tree, as the snapshot at the end of the committed tokens."""
    recurrent = request.recurrent_of(request.last_beam)
    if recurrent is None or recurrent.page is None or recurrent.borrowed or recurrent.page.lost:
        return
    page = recurrent.page
    covered = request.tail_length()
    coverage = covered if covered > 0 else request.tokens_per_block
    present = block.page(recurrent.index)
    if (present is not None and present.coverage >= coverage) or not may_publish(request, block):
        return
    request.shared.hierarchy.merge_ready(page, point)
    request.shared.tree.install(block, page, coverage)
