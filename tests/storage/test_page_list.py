"""Lists of pages against plain lists: the pinned ones, and the order of eviction."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.eviction.order import EvictionOrder
from kv_cache_manager_v2.ids import NULL_POINT, SlotId
from kv_cache_manager_v2.storage.page import Page
from kv_cache_manager_v2.storage.page_list import INDEX_SPACING, NEAR, PageList, PageQueue
from tests.support.storage_rig import make_cell

CELL = make_cell()


def page_of(age: int, priority: int = 35) -> Page:
    page = Page(0, CELL, SlotId(age), priority, NULL_POINT)
    page.age = age
    return page


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100)), max_size=60))
def test_a_list_keeps_the_order_of_joining(steps: list[tuple[bool, int]]) -> None:
    pages = PageList()
    model: list[Page] = []
    for joins, number in steps:
        if joins:
            model.append(page_of(number))
            pages.append(model[-1])
        elif model:
            pages.remove(model.pop(number % len(model)))
        assert pages.pages() == model
        pages.check_invariants(False)
    pages.close()
    assert pages.pages() == []


def test_the_end_cuts_all_links() -> None:
    """Pages are not seen by the collector: what still pointed at each other would never be freed."""
    pages = PageList()
    members = [page_of(number) for number in range(3)]
    for page in members:
        pages.append(page)
    pages.close()
    assert [(page.before, page.after) for page in members] == [(None, None)] * 3
    pages.check_invariants(False)


def test_a_page_in_no_list_cannot_leave_one() -> None:
    with pytest.raises(AssertionError, match="in no list"):
        PageList().remove(page_of(1))


def test_lowest_priority_first_then_oldest() -> None:
    queue = PageQueue(EvictionOrder())
    pages = [page_of(1, 35), page_of(2, 10), page_of(3, 35), page_of(4, 100), page_of(5, 0)]
    for page in pages:
        queue.push(page)
    assert queue.pages() == [pages[4], pages[1], pages[0], pages[2], pages[3]]
    queue.check_invariants()
    queue.close()


def test_emptied_priority_is_passed_over() -> None:
    """The last page of the lowest priority leaves; the next one to be evicted is of the next priority."""
    queue = PageQueue(EvictionOrder())
    low, high = page_of(1, 1), page_of(2, 2)
    queue.push(low)
    queue.push(high)
    queue.remove(low)
    assert queue.first() is high
    queue.remove(high)
    assert queue.first() is None
    queue.push(low)
    assert queue.first() is low
    queue.close()


STEPS = st.lists(st.tuples(st.sampled_from(["push", "insert", "remove"]), st.integers(0, 1000)), max_size=120)


@given(STEPS, st.sampled_from([[0], [0, 50, 80], [0, 0, 0, 400]]))
def test_a_queue_is_like_a_sorted_list(steps: list[tuple[str, int]], credits: list[int]) -> None:
    """Pages join as the youngest of their class, or by the age that they have; they leave from any place."""
    order = EvictionOrder(credits)
    order.uniform = False  # pages of other classes than the usual one come
    queue = PageQueue(order)
    model: dict[tuple[int, int, int], Page] = {}
    clock = 0
    for what, number in steps:
        if what == "remove":
            if model:
                queue.remove(model.pop(sorted(model)[number % len(model)]))
        else:
            age = clock + 10 if what == "push" else number % (clock + 1) + 1
            page = page_of(age, number % 3)
            page.worth = number // 3 % len(credits)
            key = (page.priority, age + credits[page.worth], page.worth)
            if key in model:
                continue
            clock = max(clock, age)
            if what == "push":
                queue.push(page)
            else:
                queue.insert(page)
            model[key] = page
        assert eviction_order(queue) == [model[key] for key in sorted(model)]
        assert queue.length == len(model)
        queue.check_invariants()
    queue.close()


def eviction_order(queue: PageQueue) -> list[Page]:
    """The pages, one after the other."""
    found: list[Page] = []
    fronts: list[Page] = []
    page = queue.first()
    while page is not None:
        found.append(page)
        page = queue.next(page, fronts)
    return found


def test_a_place_far_from_both_ends_is_found_in_few_steps() -> None:
    """Pages that join in the middle of a long list walk from the next entry of the index, and entries are never far apart."""
    queue = PageQueue(EvictionOrder())
    pages = [page_of(2 * number) for number in range(1, 20_001)]
    for page in pages:
        queue.push(page)
    order = list(range(1, 20_000, 97))
    middle_out = [order[(i * 61) % len(order)] for i in range(len(order))]
    for number in middle_out:
        queue.insert(page_of(2 * number + 1))
    queue.check_invariants()
    indexed = [at for at, page in enumerate(queue.pages()) if page.indexed]
    gaps = [b - a for a, b in pairwise(indexed)]
    assert max(gaps) <= 2 * INDEX_SPACING
    assert len(indexed) <= len(queue.pages()) // (INDEX_SPACING // 4)
    queue.close()


def test_a_long_way_without_an_index_is_walked_once() -> None:
    """All entries of the index left with their pages; the first page that joins in the middle makes new ones on its way."""
    queue = PageQueue(EvictionOrder())
    pages = [page_of(2 * number) for number in range(1, 40 * INDEX_SPACING)]
    for page in pages:
        queue.push(page)
    for page in pages:
        if page.indexed:
            queue.remove(page)
    queue.insert(page_of(2 * 35 * INDEX_SPACING + 1))
    queue.check_invariants()
    assert sum(page.indexed for page in pages) >= 30


def test_neighbours_join_without_the_index() -> None:
    """Pages of one request have neighbouring ages: in either direction the next place is beside the last one."""
    queue = PageQueue(EvictionOrder())
    for number in range(1, 10):
        queue.push(page_of(1000 * number + 1))
    queue.insert(page_of(4500))
    for step in range(1, NEAR):
        queue.insert(page_of(4500 - step))
        queue.insert(page_of(4500 + step))
    assert [page.age for page in queue.pages()] == sorted(page.age for page in queue.pages())
    assert not any(page.indexed for page in queue.pages())
    queue.check_invariants()
