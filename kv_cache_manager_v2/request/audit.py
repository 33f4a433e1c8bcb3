"""The audit of a manager: every invariant of every structure, and the counts that must agree between them.

An audit changes nothing. After an unexpected exception it decides whether the manager can still be used.
"""

from __future__ import annotations

from kv_cache_manager_v2.ids import BAD_PAGE_INDEX
from kv_cache_manager_v2.request.batch_rows import BatchRows
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.request.publication import Publication
from kv_cache_manager_v2.request.request import ACTIVE, Request
from kv_cache_manager_v2.reuse.tokens import count_tokens
from kv_cache_manager_v2.storage.page import Page


def check_everything(shared: ManagerState) -> None:
    """Assert every invariant of every structure, and that the counts of all pages equal their use by open requests.

    O(pages + blocks + requests).
    """
    shared.timeline.check_invariants()
    shared.hierarchy.check_invariants()
    shared.tree.check_invariants()
    check_accounts(shared)


def check_accounts(shared: ManagerState) -> None:
    """Assert that each request is consistent, and that the locks and holds of all pages equal their use by open requests."""
    locks: dict[int, int] = {}
    holds: dict[int, int] = {}
    pages: dict[int, Page] = {}
    active = sum([1 for request in shared.open.values() if request.status == ACTIVE])
    assert shared.num_active == active, (shared.num_active, active)
    checked: list[BatchRows] = []
    for request in shared.open.values():
        _check_state(request)
        rows = request.batch_rows
        if rows is not None and rows not in checked:
            rows.check_invariants()
            checked.append(rows)
        for table in request.tables:
            for ordinal, page in enumerate(table.pages):
                if page is None:
                    continue
                locked = request.status == ACTIVE and table.is_live(ordinal)
                book = locks if locked else holds
                key = id(page)
                book[key] = book.get(key, 0) + 1
                pages[key] = page
            for page in table.scratch:
                locks[id(page)] = locks.get(id(page), 0) + 1
                pages[id(page)] = page
        for recurrent in request.recurrent_states():
            if recurrent.page is not None:
                book = locks if request.status == ACTIVE else holds
                key = id(recurrent.page)
                book[key] = book.get(key, 0) + 1
                pages[key] = recurrent.page
    for reservation in shared.unreleased:
        for page in reservation.pages:
            locks[id(page)] = locks.get(id(page), 0) + 1
    _check_pins(shared)
    _check_publications(shared)
    for page in pages.values():
        assert page.alive(), f"a request uses a page that has been dropped: {page.life_cycle=} {page.level=}"
    for page in shared.hierarchy.all_pages():
        key = id(page)
        assert page.locks == locks.get(key, 0), (page.locks, locks.get(key, 0))
        assert page.holds == holds.get(key, 0), (page.holds, holds.get(key, 0))
        assert page.locks > 0 or page.holds > 0 or page.owner is not None, "a page without lock, hold and owner has a slot"


def _check_pins(shared: ManagerState) -> None:
    """Assert that the pins of each block equal the number of open requests whose path ends there."""
    pins: dict[int, int] = {}
    for request in shared.open.values():
        if request.tip is not None:
            pins[id(request.tip)] = pins.get(id(request.tip), 0) + 1
    for block in [*shared.tree.all_blocks(), *shared.tree.roots()]:
        assert block.pins == pins.get(id(block), 0), (block.ordinal, block.pins, pins.get(id(block), 0))


def _check_publications(shared: ManagerState) -> None:
    """Assert that each uncomputed block belongs to one open request, after whose history it lies, and that users are registered."""
    expected: dict[int, Publication] = {}
    for request in shared.open.values():
        publication = request.published
        if publication is not None:
            assert publication.first >= request.history // request.tokens_per_block or not publication.blocks
            assert request.committed <= request.history or publication.stream == request.stream
            for block in publication.blocks:
                expected[id(block)] = publication
        for used in request.counts_on:
            assert request in used.users, "a request counts on a publication that does not know it"
    assert {id(block) for block in shared.publications} == set(expected)
    assert {id(block) for block in shared.tree.added_ahead} <= set(expected)
    for block in shared.tree.all_blocks():
        assert block.uncomputed == (id(block) in expected), "a block is uncomputed, and no open request computes it"


def _check_state(request: Request) -> None:
    size = request.tokens_per_block
    assert request.history <= request.capacity
    assert request.committed <= (request.history if request.published is None else request.capacity)
    assert request.num_blocks == -(-request.capacity // size)
    assert len(request.path) == request.committed // size
    assert count_tokens(request.tail.getvalue()) == request.committed % size, "the tail differs from the committed tokens"
    assert (request.tip is None) == (not request.path), "the path and its last block `tip` disagree"
    assert request.tip is None or request.tip.pins > 0
    for table in request.tables:
        start, end = table.life_cycle.stale(request.history)
        assert end == start or (start, end) == (table.stale_start, table.stale_end), "the cached stale range is out of date"
        assert end > start or table.stale_end == table.stale_start
        assert len(table.pages) == request.num_blocks == table.row.length
        assert table.row.table is None or request.batch_rows is not None
        assert table.life_cycle.next_stale_change(request.history) >= request.next_stale
        entries = table.row.values()
        for ordinal, page in enumerate(table.pages):
            assert page is not None or not table.is_live(ordinal) or request.has_gaps(), "a live block has no page"
            live = page is not None and request.status == ACTIVE and table.is_live(ordinal)
            if live and page is not None:
                assert page.level == 0, page.level
                assert entries[ordinal] == page.slot
            else:
                assert entries[ordinal] == BAD_PAGE_INDEX
