"""The order of eviction, against a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.ids import NULL_POINT, SlotId
from kv_cache_manager_v2.storage.eviction import EvictionQueue
from kv_cache_manager_v2.storage.page import Page


def page_of(priority: int, number: int = 0) -> Page:
    return Page(0, 0, 0, SlotId(number), priority, NULL_POINT)


def test_lowest_priority_first_then_oldest() -> None:
    queue = EvictionQueue()
    pages = [page_of(35), page_of(10), page_of(35), page_of(100), page_of(0)]
    for page in pages:
        queue.push(page)
    assert queue.pages() == [pages[4], pages[1], pages[0], pages[2], pages[3]]
    queue.check_invariants()
    queue.close()


def test_emptied_priority_is_passed_over() -> None:
    """The last page of the lowest priority leaves; the next victim is of the next priority."""
    queue = EvictionQueue()
    low, high = page_of(1), page_of(2)
    queue.push(low)
    queue.push(high)
    queue.remove(low)
    assert queue.first() is high
    queue.remove(high)
    assert queue.first() is None
    queue.push(low)
    assert queue.first() is low
    queue.close()


def test_replace_keeps_the_place() -> None:
    queue = EvictionQueue()
    pages = [page_of(35) for _ in range(3)]
    for page in pages:
        queue.push(page)
    new = page_of(35)
    queue.replace(pages[1], new)
    assert queue.pages() == [pages[0], new, pages[2]]
    assert not pages[1].queued
    queue.check_invariants()
    queue.close()


@given(st.lists(st.tuples(st.sampled_from(["push", "remove", "hold"]), st.integers(0, 100)), max_size=80))
def test_like_a_sorted_list(steps: list[tuple[str, int]]) -> None:
    queue = EvictionQueue()
    model: list[tuple[int, int, Page]] = []  # (priority, rank, page)
    rank = 0
    for what, number in steps:
        if what == "push":
            rank += 1
            page = page_of(number % 5)
            queue.push(page)
            model.append((page.priority, rank, page))
        elif model:
            page = model[number % len(model)][2]
            if what == "hold":
                queue.held += 1 if page.holds == 0 else 0
                page.holds += 1
            else:
                queue.remove(page)
                model = [entry for entry in model if entry[2] is not page]
        expected = [entry[2] for entry in sorted(model, key=lambda entry: entry[:2])]
        assert queue.pages() == expected
        assert len(queue) == len(model)
        queue.check_invariants()
    queue.close()
