"""A cell has each of its pages in the right list, and counts its slots."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2.errors import CorruptedError
from kv_cache_manager_v2.ids import NULL_POINT
from kv_cache_manager_v2.storage.page import DROPPABLE, HELD, JUST_HELD, Page
from tests.storage.conftest import NewRig
from tests.support.storage_rig import StorageRig


def test_a_page_is_listed_once() -> None:
    rig = StorageRig([[2], [2]])
    page = rig.held()
    with pytest.raises(AssertionError, match="while it was in one"):
        page.cell.enter(page)
    page.cell.leave(page)
    with pytest.raises(AssertionError, match="in no list"):
        page.cell.leave(page)
    rig.close()


def test_every_page_with_a_slot_is_listed_in_its_cell(new_rig: NewRig) -> None:
    """Locked, held, cached: on each level the lists name the pages whose slots are taken, and no other."""
    rig = new_rig([[3], [3]])
    pages = [rig.cached(), rig.held(), rig.held(), rig.cached(), rig.held(), rig.new()]
    for cell in rig.hierarchy.cells[0]:
        here = [page for page in pages if page.alive() and page.cell is cell]
        assert {id(page) for page in cell.pages()} == {id(page) for page in here}
        assert len(here) == cell.allocator.num_taken() == 3
        assert [page for page in here if not page.queued] == cell.pinned.pages()


def test_a_page_that_was_just_held_can_move_to_the_held_list(new_rig: NewRig) -> None:
    rig = new_rig([[2], [2]])
    page = rig.cached()
    cell = page.cell
    rig.hierarchy.hold(page)
    assert (page.list, cell.num_held, cell.num_droppable) == (JUST_HELD, 1, 0)
    cell.move_to_held(page)
    assert (page.list, cell.num_held, cell.num_droppable) == (HELD, 1, 0)
    rig.hierarchy.release(page)
    assert (page.list, cell.num_held, cell.num_droppable) == (DROPPABLE, 0, 1)


def test_a_slot_without_a_page_is_found() -> None:
    """A slot that was allocated and has no page, a page whose slot is free, two pages of one slot: the check says so."""
    rig = StorageRig([[4], [4]])
    cell = rig.hierarchy.gpu[0]
    page = rig.held()
    slot, _ready = cell.allocator.allocate()
    with pytest.raises(CorruptedError, match="no page has it"):
        cell.check_invariants()
    cell.allocator.release(slot, NULL_POINT)
    cell.check_invariants()
    other = Page(0, cell, page.slot, 35, NULL_POINT)
    other.locks = 1
    cell.enter(other)
    with pytest.raises(AssertionError, match="two pages"):
        cell.check_invariants()
    cell.leave(other)
    cell.allocator.release(page.slot, NULL_POINT)
    with pytest.raises(AssertionError, match="is free"):
        cell.check_invariants()
    rig.close()


def test_what_changes_from_droppable_to_held_and_back_keeps_its_place(new_rig: NewRig) -> None:
    """In the middle of a long order, too, and with pages on both sides that are held already."""
    rig = new_rig([[300], [300]])
    pages = [rig.cached() for _ in range(300)]
    order = rig.order(0)
    assert order == pages
    for page in pages[::3] + pages[100:140]:
        rig.hierarchy.hold(page)
    assert rig.order(0) == order
    rig.check()
    for page in reversed(pages[100:140]):
        rig.hierarchy.release(page)
    assert rig.order(0) == order
