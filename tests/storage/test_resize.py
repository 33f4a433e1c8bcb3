"""Resizes of a level: eviction order, contents, and refusals that change nothing."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2.errors import KVCacheError
from kv_cache_manager_v2.ids import NULL_POINT
from kv_cache_manager_v2.layout.sizing import LevelSizing
from kv_cache_manager_v2.storage.page import Page
from kv_cache_manager_v2.storage.resize import MOST_ATTEMPTS, LevelResize, ResizeResult
from kv_cache_manager_v2.storage.resizing import LevelsResize
from tests.storage.conftest import NewRig
from tests.support.storage_rig import StorageRig, resize_level, resize_levels, settle_all, wait_between


def sizing_of(rig: StorageRig, level: int, slots: list[int]) -> LevelSizing:
    old = rig.hierarchy.sizings[level]
    sizing = LevelSizing(old.tier, old.asked, old.quota, old.granularity)
    sizing.slots = slots
    return sizing


def resize(rig: StorageRig, level: int, slots: list[int]) -> ResizeResult:
    result = resize_level(rig.hierarchy, level, sizing_of(rig, level, slots))
    rig.check()
    return result


@pytest.mark.parametrize(("tiers", "level"), [("gh", 0), ("gh", 1), ("gd", 1)])
def test_shrink_evicts_the_oldest_and_keeps_order_and_bytes(new_rig: NewRig, tiers: str, level: int) -> None:
    """Pages in removed slots move to free ones, and keep their age."""
    rig = new_rig([[8], [8]], tiers)
    pages = [rig.cached(i) for i in range(8)]
    if level == 1:
        pages = pages + [rig.cached(i) for i in range(8, 16)]
    residents = rig.order(level)
    for page in residents[1:3]:  # free slots among the low ones
        rig.hierarchy.unlist(page)
    kept = [residents[0], *residents[3:]]
    result = resize(rig, level, [4])
    assert result
    assert (result.evicted, rig.hierarchy.total(level, 0)) == (2, 4)
    assert rig.order(level) == kept[2:]
    assert all(page.slot < 4 for page in kept[2:])
    assert result.compacted == 4 if level == 0 else result.compacted >= 1
    for i, page in enumerate(pages):
        if page.alive():
            rig.expect(page, i)


def test_shrink_without_slots_above_moves_nothing(new_rig: NewRig) -> None:
    rig = new_rig([[8], [8]])
    page = rig.cached(1)
    result = resize(rig, 0, [3])
    assert result
    assert (result.evicted, result.compacted) == (0, 0)
    rig.expect(page, 1)


def test_held_pages_of_the_last_level_survive(new_rig: NewRig) -> None:
    rig = new_rig([[2], [6]])
    held = [rig.held(i) for i in range(3)]
    cached = [rig.cached(i) for i in range(3, 8)]
    for _ in range(2):
        rig.new()
    assert [page.level for page in held] == [1, 1, 1]
    rig.hierarchy.release(held.pop(0))
    result = resize(rig, 1, [2])
    assert result
    assert [page.alive() for page in held] == [True, True]
    assert sum(page.alive() for page in cached) == 0
    for i, page in enumerate(held, start=1):
        rig.expect(page, i)


def test_refused_when_held_pages_do_not_fit(new_rig: NewRig) -> None:
    rig = new_rig([[2], [4]])
    held = [rig.held(i) for i in range(6)]
    for level, slots, missing in ((1, 1, 3), (0, 1, 1)):
        before = rig.order(level)
        result = resize(rig, level, [slots])
        assert not result
        assert (result.pool_group, result.missing) == (0, missing)
        assert f"{missing} pages" in result.reason
        assert rig.order(level) == before
        assert rig.hierarchy.total(level, 0) == result.old_slots[0]
    for i, page in enumerate(held):
        rig.expect(page, i)


def test_refused_while_a_slot_to_be_cut_is_locked(new_rig: NewRig) -> None:
    rig = new_rig([[4], [4]])
    pages = [rig.new(i) for i in range(3)]
    result = resize(rig, 0, [2])
    assert not result
    assert "locked" in result.reason
    assert (result.missing, rig.hierarchy.total(0, 0)) == (1, 4)
    rig.expect(pages[2], 2)


def test_grow_one_group_with_what_the_other_gives(new_rig: NewRig) -> None:
    """Base addresses on the GPU stay where they are."""
    rig = new_rig([[6, 2], [6, 2]], slot_sizes=((96,), (64, 40)))
    bases = [rig.hierarchy.base_address(0, group, pool) for group, pool in ((0, 0), (1, 0), (1, 1))]
    first = [rig.cached(i) for i in range(6)]
    second = [rig.cached(i, life_cycle=1) for i in range(10, 12)]
    results = resize_levels(rig.hierarchy, [sizing_of(rig, level, [3, 9]) for level in (0, 1)])
    assert all(results)
    rig.check()
    assert [rig.hierarchy.total(level, group) for level in (0, 1) for group in (0, 1)] == [3, 9, 3, 9]
    assert bases == [rig.hierarchy.base_address(0, group, pool) for group, pool in ((0, 0), (1, 0), (1, 1))]
    assert [page.level for page in first] == [1, 1, 1, 0, 0, 0]
    more = [rig.cached(i, life_cycle=1) for i in range(12, 19)]
    for i, page in [*enumerate(first), *enumerate(second + more, start=10)]:
        rig.expect(page, i)


def test_to_zero_and_back(new_rig: NewRig) -> None:
    rig = new_rig([[2], [4]])
    pages = [rig.cached(i) for i in range(6)]
    assert resize(rig, 1, [0])
    assert [page.alive() for page in pages] == [False] * 4 + [True] * 2
    assert resize(rig, 1, [4])
    rig.new()
    assert pages[4].level == 1
    rig.expect(pages[4], 4)


@pytest.mark.parametrize(("call", "nth"), [("map_chunk", 1), ("set_access", 1), ("create_chunk", 1), ("copy_batch", 1)])
def test_device_failure_restores_every_size(new_rig: NewRig, call: str, nth: int) -> None:
    rig = new_rig([[60000, 2], [4, 4]], slot_sizes=((96,), (4096,)))
    low = rig.new(1)
    high: list[Page] = []
    for _ in range(3):
        high.append(rig.new())
    page = rig.cached(2)
    for locked in high:
        rig.hierarchy.unlock(locked, NULL_POINT)
    rig.driver.fail(call, nth)
    with pytest.raises(KVCacheError):
        resize_level(rig.hierarchy, 0, sizing_of(rig, 0, [2, 4000]))
    rig.check()
    assert [rig.hierarchy.total(0, group) for group in (0, 1)] == [60000, 2]
    rig.expect(low, 1)
    rig.expect(page, 2)
    assert resize(rig, 0, [2, 4000])
    rig.expect(page, 2)


def test_a_refused_resize_frees_what_another_group_has_grown_by(new_rig: NewRig) -> None:
    """The second of two groups that grow is refused its memory."""
    rig = new_rig([[8, 8, 16]], "g", ((1 << 20,), (1 << 19,), (1 << 18,)))
    before = rig.driver.mapped_bytes
    rig.driver.fail("map_chunk", 2)
    with pytest.raises(KVCacheError):
        resize_level(rig.hierarchy, 0, sizing_of(rig, 0, [4, 12, 24]))
    rig.check()
    assert rig.driver.mapped_bytes == before


def test_all_levels_or_none(new_rig: NewRig) -> None:
    """The GPU cannot give up its held pages, so the host level is not touched either."""
    rig = new_rig([[4], [4]])
    for i in range(8):
        rig.held(i)
    results = resize_levels(rig.hierarchy, [sizing_of(rig, 0, [2]), sizing_of(rig, 1, [5])])
    assert [bool(result) for result in results] == [False]
    assert (results[0].level, results[0].missing) == (0, 1)
    rig.check()
    assert [rig.hierarchy.total(level, 0) for level in (0, 1)] == [4, 4]


def test_refused_levels_keep_their_pages(new_rig: NewRig) -> None:
    """Two host pages would have had to go for a host level of 2; the GPU is then refused, so they stay, in their order."""
    rig = new_rig([[4], [4]])
    cached = [rig.cached(i) for i in range(4)]
    held = [rig.held(i) for i in range(4, 8)]
    order = rig.order(1)
    assert order == cached
    refused = resize_levels(rig.hierarchy, [sizing_of(rig, 0, [1]), sizing_of(rig, 1, [2])])
    assert not refused[-1]
    assert rig.order(1) == order
    assert all(page.alive() for page in cached + held)
    assert all(resize_levels(rig.hierarchy, [sizing_of(rig, 0, [2]), sizing_of(rig, 1, [2])]))
    assert [page.level for page in held] == [1, 1, 0, 0]
    for i, page in enumerate(held, start=4):
        rig.expect(page, i)


def test_work_in_flight_is_waited_for(new_rig: NewRig) -> None:
    """Under any interleaving the bytes of pages that are moved and memory that is cut are those that were written."""
    for seed in range(12):
        rig = new_rig([[6], [6]], schedule="random", seed=seed)
        pages = [rig.cached(i) for i in range(9)]
        assert resize_level(rig.hierarchy, 1, sizing_of(rig, 1, [3]))
        assert resize_level(rig.hierarchy, 0, sizing_of(rig, 0, [4]))
        assert resize_level(rig.hierarchy, 1, sizing_of(rig, 1, [40]))
        for i, page in enumerate(pages):
            if page.alive():
                rig.expect(page, i)


def test_memory_that_is_still_read_does_not_move(new_rig: NewRig) -> None:
    """A page has just left the host for the GPU when the host level grows, to another address perhaps: the copy is waited for."""
    for seed in range(20):
        rig = new_rig([[4], [4]], slot_sizes=((1000,),), schedule="random", seed=seed)
        pages = [rig.held(i) for i in range(4)]
        assert rig.hierarchy.acquire([4], []) is None
        assert rig.hierarchy.acquire([0], pages) is None
        assert resize_level(rig.hierarchy, 1, sizing_of(rig, 1, [8000]))
        for i, page in enumerate(pages):
            rig.expect(page, i)


def test_memory_that_is_still_written_does_not_move(new_rig: NewRig) -> None:
    for seed in range(20):
        rig = new_rig([[4], [4]], slot_sizes=((1000,),), schedule="random", seed=seed)
        pages = [rig.held(i) for i in range(4)]
        assert rig.hierarchy.acquire([4], []) is None
        assert resize_level(rig.hierarchy, 1, sizing_of(rig, 1, [8000]))
        for i, page in enumerate(pages):
            rig.expect(page, i)


def test_a_level_that_is_always_in_use_is_refused_in_the_end(new_rig: NewRig) -> None:
    """Work that never ends is waited for again and again by other calls' doing: a bound ends that, and nothing has changed."""
    rig = new_rig([[6], [6]])
    gate = rig.driver.gate(rig.stream)
    pages = [rig.cached(i) for i in range(6)]
    change = LevelResize(rig.hierarchy, 0, sizing_of(rig, 0, [3]))
    attempts = 1
    while not change.attempt():
        assert change.pending
        assert [page.level for page in pages] == [1, 1, 1, 0, 0, 0]
        rig.check()
        attempts += 1
    assert attempts == MOST_ATTEMPTS
    assert not change.result
    assert "other calls" in change.result.reason
    assert rig.hierarchy.total(0, 0) == 6
    gate.open()
    assert resize(rig, 0, [3])
    assert [page.level for page in pages] == [1, 1, 1, 0, 0, 0]
    for i, page in enumerate(pages):
        rig.expect(page, i)


def test_slots_taken_while_a_resize_waits_are_evicted_again(new_rig: NewRig) -> None:
    """Another call uses a slot that was to be removed: its page moves too, with its bytes."""
    rig = new_rig([[6], [9]])
    gate = rig.driver.gate(rig.stream)
    pages = [rig.cached(i) for i in range(6)]
    change = LevelResize(rig.hierarchy, 0, sizing_of(rig, 0, [3]))
    assert not change.attempt()
    pages += [rig.cached(i) for i in range(6, 9)]
    gate.open()
    while not change.attempt():
        wait_between(rig.hierarchy, change.pending)
    rig.check()
    assert change.result
    assert change.result.evicted == 6
    assert [page.level for page in pages] == [1] * 6 + [0] * 3
    assert all(page.slot < 3 for page in pages[6:])
    for i, page in enumerate(pages):
        rig.expect(page, i)


def test_levels_that_are_done_keep_their_new_size_when_the_device_refuses_another(new_rig: NewRig) -> None:
    """Colder levels are resized first. Repeating the call resizes the rest."""
    rig = new_rig([[6], [6]], slot_sizes=((1 << 20,),))
    pages = [rig.cached(i) for i in range(8)]
    targets = [sizing_of(rig, 0, [9]), sizing_of(rig, 1, [4])]
    rig.driver.fail("create_chunk", 1, None)
    with pytest.raises(KVCacheError):
        resize_levels(rig.hierarchy, targets)
    rig.check()
    assert [rig.hierarchy.total(level, 0) for level in (0, 1)] == [6, 4]
    assert rig.hierarchy.sizings[1] is targets[1]
    rig.driver.heal()
    assert all(resize_levels(rig.hierarchy, targets))
    assert [rig.hierarchy.total(level, 0) for level in (0, 1)] == [9, 4]
    for i, page in enumerate(pages):
        if page.alive():
            rig.expect(page, i)


def test_a_level_that_another_call_resizes_meanwhile_is_left_to_it(new_rig: NewRig) -> None:
    """Resizing all levels is refused then; levels that are done keep their new sizes."""
    rig = new_rig([[6], [6]])
    gate = rig.driver.gate(rig.stream)
    for i in range(6):
        rig.cached(i)
    change = LevelsResize(rig.hierarchy, [sizing_of(rig, 0, [3]), sizing_of(rig, 1, [8])])
    assert change.attempt() is None  # the GPU's pages are not written yet
    gate.open()
    assert resize(rig, 0, [5])
    results = change.attempt()
    assert results is not None
    assert [result.ok for result in results] == [True, False]
    assert "another call" in results[-1].reason
    assert (results[-1].pool_group, results[-1].missing) == (-1, 0), "no pages are missing"
    rig.check()
    assert [rig.hierarchy.total(level, 0) for level in (0, 1)] == [5, 8]


def test_a_shrink_leaves_pages_alone_that_lost_their_memory() -> None:
    """A failed resize takes the memory of held pages. The level grows to some of their slots, and shrinks again."""
    rig = StorageRig([[4], [4]])
    held = [rig.held(value) for value in range(4)]
    assert rig.hierarchy.acquire([4], []) is None
    assert {page.level for page in held} == {1}
    settle_all(rig)
    rig.driver.fail("host_register", 1, None)
    with pytest.raises(KVCacheError):
        resize_level(rig.hierarchy, 1, rig.hierarchy.sizings[1].with_slots(rig.layout, [200]))
    rig.driver.heal()
    assert all(page.lost for page in held)
    rig.hierarchy.release(held[0])
    rig.hierarchy.release(held[2])
    for slots in (3, 1):
        assert resize_level(rig.hierarchy, 1, rig.hierarchy.sizings[1].with_slots(rig.layout, [slots]))
        settle_all(rig)
        rig.check()
    rig.close()
