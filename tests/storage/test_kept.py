"""Pages that nobody may evict: each is found, once, wherever it joined and whoever left before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.errors import CorruptedError
from kv_cache_manager_v2.ids import NULL_POINT, SlotId
from kv_cache_manager_v2.storage.kept import KeptPages, remove_kept
from kv_cache_manager_v2.storage.page import Page
from tests.storage.helpers import Rig


def page_of(number: int) -> Page:
    return Page(0, 0, 0, SlotId(number), 35, NULL_POINT)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100)), max_size=60))
def test_like_a_list(steps: list[tuple[bool, int]]) -> None:
    """Against a plain list: the same pages in the order of joining."""
    kept = KeptPages()
    model: list[Page] = []
    for joins, number in steps:
        if joins:
            model.append(page_of(number))
            kept.add(model[-1])
        elif model:
            remove_kept(model.pop(number % len(model)))
        assert kept.pages() == model
        kept.check_invariants()
    kept.close()
    assert kept.pages() == []


def test_a_page_is_listed_once() -> None:
    rig = Rig([[2], [2]])
    page = rig.held()
    with pytest.raises(AssertionError, match="while it stood in one"):
        rig.hierarchy.levels.enter(page)
    rig.hierarchy.levels.leave(page)
    with pytest.raises(AssertionError, match="in no list"):
        remove_kept(page)
    rig.close()


def test_the_end_cuts_all_links() -> None:
    """Pages are not seen by the collector: what still pointed at each other would never be freed."""
    kept = KeptPages()
    pages = [page_of(number) for number in range(3)]
    for page in pages:
        kept.add(page)
    kept.close()
    assert [(page.before, page.after) for page in pages] == [(None, None)] * 3
    kept.check_invariants()


def test_every_page_with_a_slot_is_listed_on_its_level() -> None:
    """Locked, held, cached: on each level the lists name the pages whose slots are taken, and no other."""
    rig = Rig([[3], [3]])
    pages = [rig.cached(), rig.held(), rig.held(), rig.cached(), rig.held(), rig.new()]
    levels = rig.hierarchy.levels
    for level in (0, 1):
        here = [page for page in pages if page.alive() and page.level == level]
        assert {id(page) for page in levels.pages(level)} == {id(page) for page in here}
        assert len(here) == levels.allocators[level].num_taken() == 3
    assert [page.queued for page in levels.kept[1].pages()] == [False] * len(levels.kept[1].pages())
    rig.check()
    rig.close()


def test_a_slot_without_a_page_is_found() -> None:
    """A slot that was allocated and forgotten, a page whose slot is free, two pages of one slot: the check says so."""
    rig = Rig([[4], [4]])
    levels = rig.hierarchy.levels
    page = rig.held()
    slot, _ready = levels.allocators[0].allocate()
    with pytest.raises(CorruptedError, match="no page has it"):
        levels.check_invariants()
    levels.allocators[0].release(slot, NULL_POINT)
    levels.check_invariants()
    other = Page(0, 0, 0, page.slot, 35, NULL_POINT)
    other.locks = 1
    levels.enter(other)
    with pytest.raises(AssertionError, match="two pages"):
        levels.check_invariants()
    levels.leave(other)
    levels.allocators[0].release(page.slot, NULL_POINT)
    with pytest.raises(AssertionError, match="is free"):
        levels.check_invariants()
    rig.close()
