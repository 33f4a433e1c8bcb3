"""Blocks that are published ahead: they are in the radix tree before the step that computes them is queued.

The publisher's history says what is computed: a step is queued before the history covers its tokens. An uncomputed block matches
as a whole, and nothing is copied from it. A request that matched it resumes on the publisher's stream only, so that its work runs
after the step. It counts on the publisher: if that ends first, the blocks leave the tree, and requests that matched them are lost.

A cached block may lack pages, such as those of a window. The publisher adds its own to it; the block is uncomputed then, but only
requests that use the added pages count on the publisher.
"""

from __future__ import annotations

import logging
from typing import Final

from kv_cache_manager_v2.errors import LogicError
from kv_cache_manager_v2.ids import Point, Stream
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.pending_loads import name_of
from kv_cache_manager_v2.request.request import CLOSED, Request
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.tokens import first_tokens
from kv_cache_manager_v2.storage.page import Page

_log: Final = logging.getLogger(__name__)


class Publication:
    """The uncomputed blocks of one request, and the requests that count on them."""

    def __init__(self, stream: Stream, first: int) -> None:
        self.stream = stream  # on which the step that computes them is queued
        self.first = first  # ordinal of the publisher's first uncomputed block
        self.blocks: list[Block] = []  # those that the publisher added to the tree, or to which it added pages, in path order
        self.used = False  # whether a request has ever counted on it
        self.users: list[Request] = []
        self.needs: list[int] = []  # by user: the blocks before this ordinal have to be computed

    def next_end(self, size: int) -> int:
        """The history, in tokens, that covers the first uncomputed block."""
        return (self.first + 1) * size

    def release_users(self, first: int) -> None:
        """Record that the blocks before ordinal `first` are computed. O(users)."""
        self.first = first
        users, needs = self.users, self.needs
        self.users = []
        self.needs = []
        for number, user in enumerate(users):
            if needs[number] <= first:
                user.counts_on.remove(self)
            else:
                self.users.append(user)
                self.needs.append(needs[number])


def begin_use(request: Request, blocks: list[Block]) -> None:
    """Let a request count on the uncomputed blocks of its match. O(blocks), and O(1) if nothing is published ahead."""
    publications = request.shared.publications
    if not publications:
        return
    for ordinal, block in enumerate(blocks):
        publication = publications.get(block)
        if publication is None or not _uses_uncomputed(request, block, ordinal):
            continue
        if publication not in request.counts_on:
            request.counts_on.append(publication)
            publication.used = True
            publication.users.append(request)
            publication.needs.append(0)
        publication.needs[publication.users.index(request)] = ordinal + 1


def _uses_uncomputed(request: Request, block: Block, ordinal: int) -> bool:
    """Whether a request holds an uncomputed page of an uncomputed block."""
    added = request.shared.tree.added_ahead.get(block, -1)
    if added < 0:
        return True
    return any(added & 1 << table.index and table.pages[ordinal] is not None for table in request.main_tables)


def share_use(request: Request, twin: Request) -> None:
    """Let a fork count on the same blocks."""
    for publication in request.counts_on:
        twin.counts_on.append(publication)
        publication.users.append(twin)
        publication.needs.append(publication.needs[publication.users.index(request)])


def end_use(request: Request) -> None:
    """End a request's use of uncomputed blocks."""
    for publication in request.counts_on:
        number = publication.users.index(request)
        del publication.users[number]
        del publication.needs[number]
    request.counts_on = []


def check_stream(request: Request, stream: Stream, call: str) -> None:
    """Raise LogicError unless work on this stream runs after the steps that compute the blocks that the request uses."""
    for publication in request.counts_on:
        if publication.stream != stream:
            raise LogicError(
                f"{call}: the cache matched blocks that stream {publication.stream} has not computed yet; use that stream instead "
                f"of {stream}, or wait until the history of the cache that published them covers them"
            )


def check_settled(request: Request, call: str) -> None:
    """Raise LogicError if tokens are committed that the history does not cover."""
    if request.committed > request.history:
        raise LogicError(
            f"{call}: {request.committed} tokens are committed, and the history is {request.history}: set history_length to what "
            "is computed, or resize to take the rest back"
        )


def add(request: Request, publication: Publication, block: Block, is_new: bool) -> None:
    """Add the pages that a block of the request's path lacks, all those of a new one, as uncomputed ones."""
    shared = request.shared
    if not is_new and (block.num_pending_loads > 0 or request.loads is not None or block in shared.publications):
        return
    pages = _missing_pages(request, block)
    if is_new or pages:
        shared.tree.install_ahead(block, pages, is_new)
        publication.blocks.append(block)
        shared.publications[block] = publication


def _missing_pages(request: Request, block: Block) -> list[Page]:
    """The request's own pages for a block that has none in their life cycle, or one for fewer tokens."""
    pages = []
    for table in request.main_tables:
        page = table.pages[block.ordinal]
        if page is not None and page.owner is None and not page.lost:
            present = block.page(table.index)
            if present is None or present.coverage < block.num_tokens:
                pages.append(page)
    return pages


def computes(request: Request, history: int) -> bool:
    """Whether this history covers the first uncomputed block, so that it counts as computed."""
    publication = request.published
    return publication is not None and history >= publication.next_end(request.tokens_per_block)


def set_computed(request: Request, history: int, point: Point) -> None:
    """Record that all tokens of a history are computed at `point`. Called before pages leave windows.

    O(blocks computed x layer groups).
    """
    publication = request.published
    if publication is None:
        return
    shared = request.shared
    end = min(history // request.tokens_per_block, len(request.path))
    for ordinal in range(publication.first, end):
        block = request.path[ordinal]
        own = shared.publications.get(block) is publication
        for table in request.main_tables:
            _set_page_computed(request, table, block, history, point)
        if own:
            del shared.publications[block]
            shared.tree.set_computed(block)
    publication.blocks = [block for block in publication.blocks if block in shared.publications]
    publication.release_users(max(publication.first, end))
    if history >= request.committed:
        request.published = None


def _set_page_computed(request: Request, table: BlockTable, block: Block, history: int, point: Point) -> None:
    """Record that a page of an uncomputed block is computed. A page that the block does not list is installed, or a duplicate."""
    page = table.pages[block.ordinal]
    if page is None:
        return
    shared = request.shared
    shared.hierarchy.merge_ready(page, point)
    start, stale_end = table.life_cycle.stale(history)
    if page.owner is not None or page.lost or request.loads is not None or start <= block.ordinal < stale_end:
        return  # a page that leaves its window may be in use for another block already
    if not shared.tree.install(block, page, block.num_tokens):
        shared.tree.add_duplicate(block, page)


def take_back(request: Request) -> None:
    """Take back committed tokens after the history: their blocks leave the tree, and requests that matched them are lost.

    The number of committed tokens becomes the history. Idempotent. O(blocks taken back).
    """
    if request.committed <= request.history:
        return
    shared = request.shared
    tree = shared.tree
    size = request.tokens_per_block
    publication = request.published
    request.published = None
    keep = min(request.history // size, len(request.path))
    rest = request.history - keep * size
    tail = request.path[keep].tokens if keep < len(request.path) else request.tail.getvalue()
    if publication is not None:
        for user in publication.users:
            _lose(user, request)
            user.counts_on.remove(publication)
        for block in publication.blocks:
            del shared.publications[block]
            _take_back_block(request, block, publication.used)
        for table in request.main_tables:
            for ordinal in range(keep, len(request.path)):
                page = table.pages[ordinal]
                if page is not None and page.owner is None:
                    page.coverage = 0  # no part of a block any more
    before = request.tip
    del request.path[keep:]
    if before is not None:
        request.tip = request.path[keep - 1] if keep > 0 else None
        if request.tip is not None:
            tree.pin(request.tip)
        tree.unpin(before)
    request.tail.truncate(0)
    request.tail.write(first_tokens(tail, rest))
    request.committed = request.history


def _take_back_block(request: Request, block: Block, used: bool) -> None:
    """Remove an uncomputed block, or only its pages that were added ahead.

    If other requests have used such pages, what they have committed after the block goes with it.
    """
    tree = request.shared.tree
    added = tree.added_ahead.get(block, -1)
    if added < 0 or used:
        if block.attached:
            tree.remove(block)
        return
    for table in request.main_tables:
        page = table.pages[block.ordinal]
        if page is not None and page.owner is block and added & 1 << table.index:
            tree.drop_page(page)
    tree.set_computed(block)


def _lose(user: Request, publisher: Request) -> None:
    """A request has matched blocks that will not be computed."""
    if user.lost or user.status == CLOSED:
        return
    user.lost = f"blocks that it matched were published ahead by {name_of(publisher.request_id)}, which took them back"
    _log.error("%s: %s; what it has computed since is wrong", name_of(user.request_id), user.lost)
