"""The audit of a manager: every invariant of every structure, and the counts that must agree between them.

Rule: an audit only reads. It is what decides whether a manager that an unexpected exception left may go on.
"""

from __future__ import annotations

from kv_cache_manager_v2.ids import BAD_PAGE_INDEX
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.request.request import ACTIVE, Request
from kv_cache_manager_v2.storage.page import Page


def check_everything(shared: ManagerState) -> None:
    """Assert every invariant of every structure, and that the pages' counters are what the open requests account for.
    O(everything)."""
    shared.timeline.check_invariants()
    shared.hierarchy.check_invariants()
    shared.tree.check_invariants()
    check_accounts(shared)


def check_accounts(shared: ManagerState) -> None:
    """Assert that each request is consistent in itself, and that the counters of all pages equal what requests account for."""
    locks: dict[int, int] = {}
    holds: dict[int, int] = {}
    pages: dict[int, Page] = {}
    for state in shared.open.values():
        _check_state(state)
        for lane in state.lanes:
            beg, end = lane.stale(state.history)
            for ordinal, page in enumerate(lane.pages):
                if page is None:
                    continue
                locked = state.status == ACTIVE and not beg <= ordinal < end
                book = locks if locked else holds
                key = id(page)
                book[key] = book.get(key, 0) + 1
                pages[key] = page
            for page in lane.scratch:
                locks[id(page)] = locks.get(id(page), 0) + 1
                pages[id(page)] = page
        for recurrence in state.recurrences():
            if recurrence.page is not None:
                book = locks if state.status == ACTIVE else holds
                key = id(recurrence.page)
                book[key] = book.get(key, 0) + 1
                pages[key] = recurrence.page
    _check_pins(shared)
    for page in pages.values():
        assert page.alive(), f"a request holds a page that is gone: {page.life_cycle=} {page.level=}"
    for page in shared.hierarchy.levels.all_pages():
        key = id(page)
        assert page.locks == locks.get(key, 0), (page.locks, locks.get(key, 0))
        assert page.holds == holds.get(key, 0), (page.holds, holds.get(key, 0))


def _check_pins(shared: ManagerState) -> None:
    """Assert that blocks are pinned by open requests only, each by those whose path ends there."""
    pins: dict[int, int] = {}
    for state in shared.open.values():
        if state.tip is not None:
            pins[id(state.tip)] = pins.get(id(state.tip), 0) + 1
    for block in [*shared.tree.all_blocks(), *shared.tree.roots()]:
        assert block.pins == pins.get(id(block), 0), (block.ordinal, block.pins, pins.get(id(block), 0))


def _check_state(state: Request) -> None:
    size = state.tokens_per_block
    assert state.committed <= state.history <= state.capacity
    assert state.num_blocks == -(-state.capacity // size)
    assert len(state.path) == state.committed // size
    assert (state.tip is None) == (not state.path), "the path ends where the full committed blocks end"
    assert state.tip is None or state.tip.pins > 0
    for lane in state.lanes:
        beg, end = lane.stale(state.history)
        assert len(lane.pages) == state.num_blocks == lane.row.length
        assert lane.life_cycle.next_stale_change(state.history) >= state.next_stale
        entries = lane.row.values()
        for ordinal, page in enumerate(lane.pages):
            live = page is not None and state.status == ACTIVE and not beg <= ordinal < end
            if live and page is not None:
                assert page.level == 0, page.level
                assert entries[ordinal] == page.slot
            else:
                assert entries[ordinal] == BAD_PAGE_INDEX
