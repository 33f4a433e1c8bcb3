"""Snapshots: copies of the pages that a later request needs to start at exactly the committed length.

With recurrent layers, the live state and the partial last block keep changing, so the tree gets copies. They are queued before the
commit changes anything, and installed after it. A snapshot for which there is no slot is skipped and counted.
"""

from __future__ import annotations

from types import TracebackType

from kv_cache_manager_v2.ids import PRIORITY_DEFAULT
from kv_cache_manager_v2.request.request import Request
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.tree import BLOCK_NEW
from kv_cache_manager_v2.storage.page import MAX_REUSED_CLASS, Page


class Snapshot:
    """The copies of one commit. As a context manager it spans the device phase: an exception drops them."""

    def __init__(self, request: Request, full: int, committed: int, beam: int, priority: int) -> None:
        self.request = request
        self.full = full  # ordinal of the first block that the committed tokens do not fill
        self.covered = committed - full * request.tokens_per_block  # committed tokens in that block
        self.beam = beam  # beam of the last committed token
        self.priority = priority  # priority of the snapshot of the recurrent state
        self.pages: list[Page] = []
        self.coverages: list[int] = []
        self.void: list[Page] = []  # cached snapshots whose bytes have been overwritten by a state of another length

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._drop()

    def copy(self, end: Block | None, tail: bytes) -> None:
        """Queue the copies.

        `end` is the cached block of the last full block's tokens; None if it is not cached. `tail` are the packed tokens after it.
        """
        request = self.request
        tip = request.tip
        if tip is not None and not tip.attached:
            return
        target = end
        if self.covered > 0 and end is not None:
            target = request.shared.tree.find_related(end, tail) if end.attached else None
        if target is not None and target.ordinal >= 0 and not may_publish(request, target):
            return
        if self.covered > 0:
            self._copy_partial_block(target)
        recurrent = request.recurrent_of(self.beam)
        if recurrent is not None and recurrent.page is not None:
            coverage = self.covered if self.covered > 0 else request.tokens_per_block
            if not self._copy_page(target, recurrent.page, coverage, self.priority, True):
                recurrent.skipped += 1

    def _copy_partial_block(self, target: Block | None) -> None:
        request = self.request
        count = len(request.main_tables)
        for number, table in enumerate(request.main_tables):
            page = request.tables[self.beam * count + number].pages[self.full]
            if page is None:
                page = table.pages[self.full]
            if page is not None:
                self._copy_page(target, page, self.covered, page.priority, False)

    def _copy_page(self, target: Block | None, source: Page, coverage: int, priority: int, is_state: bool) -> bool:
        """Copy a page over the block's present page with less coverage, or into a new slot. False if there is no slot."""
        request = self.request
        hierarchy = request.shared.hierarchy
        old = target.page(source.life_cycle) if target is not None else None
        if old is not None and old.coverage >= coverage:
            return True
        if old is not None and old.plans == 0:
            before = int(old.coverage)
            if is_state:
                old.coverage = 0  # its bytes become those of another length: an interrupted commit must not leave it listed
            self.void.append(old)
            if hierarchy.overwrite(old, source, request.stream):
                if not is_state:
                    self.void.pop()  # the bytes that it had are the same
                self._add(old, coverage)
                return True
            self.void.pop()
            old.coverage = before
        copy = hierarchy.try_copy(source, priority, request.stream)
        if copy is None:
            return False
        self._add(copy, coverage)
        return True

    def _add(self, page: Page, coverage: int) -> None:
        note_origin(self.request, page)
        self.pages.append(page)
        self.coverages.append(coverage)

    def install(self) -> None:
        """Add the copies to the block in which the committed tokens end. The beam of the last token becomes beam 0."""
        request = self.request
        if request.tail_beam > 0 and parent_of(request).attached:
            request.exchange_beams(request.tail_beam)
        if not self.pages:
            return
        if not parent_of(request).attached:
            self._drop()  # making free slots for the copies dropped a page without which the path cannot match
            return
        tree = request.shared.tree
        block = insert_tail(request) if self.covered > 0 else request.tip
        assert block is not None, "a snapshot without committed tokens"
        for number, page in enumerate(self.pages):
            if not page.alive():
                continue  # evicted again, or lost
            if page.owner is None:
                if not tree.install(block, page, self.coverages[number]):
                    request.shared.hierarchy.unlist(page)
            elif page.owner is block:
                tree.install(block, page, self.coverages[number])
            elif page in self.void:
                tree.drop_page(page)
        if self.covered > 0:
            tree.unpin(block)

    def _drop(self) -> None:
        shared = self.request.shared
        for page in self.pages:
            if page.owner is None and page.alive():
                shared.hierarchy.unlist(page)
        for page in self.void:
            shared.tree.drop_page(page)


def snapshot_at(request: Request, history: int) -> Snapshot | None:
    """The snapshot that is due when the history reaches the end of the tokens committed ahead; None if there is none.

    Calls the priority callback.
    """
    if request.published is None or history != request.committed:
        return None
    return make_snapshot(request, history, request.last_beam)


def make_snapshot(request: Request, committed: int, beam: int) -> Snapshot | None:
    """The snapshot of a commit up to this length; None if it makes none. Calls the priority callback."""
    if not request.shared.commit_min_snapshot or not request.makes_snapshot(committed):
        return None
    size = request.tokens_per_block
    priority = PRIORITY_DEFAULT  # of the snapshot of the recurrent state
    if request.recurrent is not None:
        priority = request.page_priority((committed - 1) // size, request.recurrent.life_cycle)
    return Snapshot(request, committed // size, committed, beam, priority)


def note_origin(request: Request, page: Page) -> None:
    """Record in a page that the request computed how much it had found in the cache. Only an admission reads it."""
    if request.shared.hierarchy.counts_uses:
        blocks = sum(request.cached_tokens_by_level) // request.tokens_per_block
        page.reused_class = min(blocks.bit_length(), MAX_REUSED_CLASS)


def may_publish(request: Request, block: Block) -> bool:
    """Whether pages of the request may be added to a block.

    While the request depends on file transfers in flight, only a block that is hidden until then may get them.
    """
    return request.loads is None or block.num_pending_loads > 0


def parent_of(request: Request) -> Block:
    """The tree block that is the parent of the request's next block."""
    tip = request.tip
    return tip if tip is not None else request.shared.tree.root(request.scope)


def existing_parent(request: Request) -> Block | None:
    """As `parent_of`, but None instead of making a root."""
    tip = request.tip
    return tip if tip is not None else request.shared.tree.find_root(request.scope)


def insert_tail(request: Request) -> Block:
    """Add the committed part of the last block to the tree. Returns its block, or the longer one that covers it, pinned."""
    shared = request.shared
    block, outcome = shared.tree.insert(parent_of(request), request.tail.getvalue(), request.tail_length())
    shared.tree.pin(block)
    if outcome == BLOCK_NEW and request.loads is not None:
        request.loads.add(shared.tree, block)
    return block
