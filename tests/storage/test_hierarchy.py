"""The states of pages, and eviction, rule by rule."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2.errors import LogicError, OutOfPagesError
from kv_cache_manager_v2.ids import NULL_POINT, PageStatus
from kv_cache_manager_v2.storage.page import Page
from tests.storage.conftest import NewRig
from tests.support.storage_rig import FakeBlock


class TestOnePage:
    def test_private_page_is_freed_with_its_last_lock(self, new_rig: NewRig) -> None:
        """A page without owner, locks and holds is freed at once, and enters no list."""
        rig = new_rig([[2]], "g")
        page = rig.new()
        assert page.status() == PageStatus.LOCKED
        assert rig.counts(0) == (1, 0, 1)
        rig.hierarchy.unlock(page, NULL_POINT)
        assert not page.alive()
        assert rig.counts(0) == (2, 0, 0)

    def test_cached_page_is_queued_after_its_last_lock(self, new_rig: NewRig) -> None:
        rig = new_rig([[2]], "g")
        page = rig.cached()
        assert page.status() == PageStatus.DROPPABLE
        assert page.queued
        assert rig.counts(0) == (1, 1, 0)

    def test_lock_needs_the_gpu(self, new_rig: NewRig) -> None:
        rig = new_rig([[1], [1]])
        page = rig.held(1)
        rig.new(2)
        assert page.level == 1
        with pytest.raises(LogicError, match="level 1"):
            rig.hierarchy.lock_held(page)
        with pytest.raises(LogicError, match="level 1"):
            rig.hierarchy.lock(page)
        assert page.holds == 1

    def test_new_page_without_room_raises(self, new_rig: NewRig) -> None:
        rig = new_rig([[1]], "g")
        rig.new()
        with pytest.raises(OutOfPagesError):
            rig.hierarchy.new_page(0, 35)

    def test_unlisted_page_is_freed_after_its_last_hold(self, new_rig: NewRig) -> None:
        rig = new_rig([[3], [3]])
        cached, held = rig.cached(), rig.cached()
        rig.hierarchy.hold(held)
        rig.hierarchy.unlist(cached)
        rig.hierarchy.unlist(held)
        assert not cached.alive()
        assert held.alive()
        rig.hierarchy.release(held)
        assert not held.alive()
        assert rig.counts(0) == (3, 0, 0)

    def test_a_held_page_becomes_the_youngest_when_its_request_ends(self, new_rig: NewRig) -> None:
        rig = new_rig([[3], [3]])
        first, second = rig.cached(), rig.cached()
        rig.hierarchy.hold(first)
        rig.hierarchy.release_youngest(first)
        assert rig.order(0) == [second, first]

    def test_discard_counts_a_drop_and_ignores_what_is_gone_or_needed(self, new_rig: NewRig) -> None:
        rig = new_rig([[3], [3]])
        cached, locked = rig.cached(), rig.new()
        rig.hierarchy.drop(cached)
        rig.hierarchy.drop(cached)
        rig.hierarchy.drop(locked)
        assert not cached.alive()
        assert locked.alive()
        assert rig.counters.pages_dropped(0) == 1


class TestMakingRoom:
    def test_shortage_changes_nothing(self, new_rig: NewRig) -> None:
        """Held pages cannot be dropped: if they do not fit the colder level, the call is refused, and the eviction order is
        unchanged."""
        rig = new_rig([[4], [2]])
        pages = [rig.held(i) for i in range(4)]
        before = rig.order(0)
        shortage = rig.hierarchy.acquire([3], [])
        assert shortage is not None
        assert (shortage.pool_group, shortage.level, shortage.missing, shortage.permanent) == (0, 0, 1, False)
        assert rig.order(0) == before == pages
        assert rig.counts(0) == (0, 4, 0)
        assert rig.hierarchy.acquire([2], []) is None
        assert [page.level for page in pages] == [1, 1, 0, 0]

    def test_permanent_shortage(self, new_rig: NewRig) -> None:
        rig = new_rig([[4], [2]])
        shortage = rig.hierarchy.acquire([5], [])
        assert shortage is not None
        assert shortage.permanent
        assert shortage.missing == 1

    def test_droppable_page_goes_where_held_ones_have_no_room(self, new_rig: NewRig) -> None:
        """An older held page that no colder level can take is skipped: a droppable page is evicted instead."""
        rig = new_rig([[2], [1]])
        below = rig.held(0)
        held = rig.held(1)
        cached = rig.cached(2)
        assert rig.hierarchy.acquire([1], []) is None
        assert (below.level, held.level) == (1, 0)
        assert not cached.alive()
        rig.expect(held, 1)

    def test_a_page_to_keep_is_not_evicted(self, new_rig: NewRig) -> None:
        rig = new_rig([[2]], "g")
        old, young = rig.cached(), rig.cached()
        assert rig.hierarchy.acquire([1], [], [old]) is None
        assert old.alive()
        assert not young.alive()

    def test_owner_may_give_back_more_while_it_is_told(self, new_rig: NewRig) -> None:
        """Dropping the page of a block drops the pages of its descendants within the same call."""
        rig = new_rig([[2], [2]])
        parent = FakeBlock("parent")
        pages = [rig.cached(0, owner=parent), *[rig.cached(i) for i in range(1, 4)]]

        def prune(_page: Page) -> None:
            for page in pages[1:3]:
                rig.hierarchy.drop(page)
            rig.hierarchy.drop(pages[0])

        parent.on_gone = prune
        assert [page.level for page in pages] == [1, 1, 0, 0]
        assert rig.hierarchy.acquire([1], []) is None
        assert [page.alive() for page in pages] == [False, False, False, True]
        assert rig.hierarchy.free(0, 0) >= 1
        rig.expect(pages[3], 3)

    def test_prefetch_moves_up_refreshes_and_leaves_warmer_ones(self, new_rig: NewRig) -> None:
        rig = new_rig([[2], [3], [4]], "ghd")
        pages = [rig.held(i) for i in range(6)]
        assert [page.level for page in pages] == [2, 1, 1, 1, 0, 0]
        assert rig.hierarchy.prefetch([pages[0], pages[1], pages[5]], 1) is None
        assert pages[0].level == 1
        assert pages[5].level == 0
        assert rig.order(1)[-1] is pages[1]
        for i, page in enumerate(pages):
            rig.expect(page, i)
        with pytest.raises(LogicError):
            rig.hierarchy.prefetch(pages, 3)


class TestTakeOverAndCopies:
    def test_take_over(self, new_rig: NewRig) -> None:
        """The colder identical page gets the slot and the lock of the other one, and its own slot is freed."""
        rig = new_rig([[1], [1]])
        block = FakeBlock("cold")
        cold = rig.cached(7, owner=block)
        ours = rig.new(7)
        slot, ready = ours.slot, ours.ready
        rig.hierarchy.take_over(cold, ours)
        assert (cold.level, cold.slot, cold.ready, cold.locks, cold.queued) == (0, slot, ready, 1, False)
        assert not ours.alive()
        assert rig.counts(1) == (1, 0, 0)
        assert block.moves == [(0, 1), (1, 0)]
        rig.expect(cold, 7)
        rig.hierarchy.unlock(cold, NULL_POINT)
        assert cold.queued

    @pytest.mark.parametrize(("slots", "tiers"), [([[3]], "g"), ([[2], [1]], "gh"), ([[2], [1]], "gd"), ([[2], [0], [1]], "ghd")])
    def test_try_copy_takes_the_nearest_free_slot(self, new_rig: NewRig, slots: list[list[int]], tiers: str) -> None:
        rig = new_rig(slots, tiers)
        source = rig.new(5)
        if len(slots) > 1:
            rig.new()
        copy = rig.hierarchy.try_copy(source, 35, rig.stream)
        assert copy is not None
        assert copy.level == len(slots) - 1
        rig.hierarchy.adopt(copy, FakeBlock("copy"), 3)
        assert copy.queued
        rig.expect(copy, 5)
        rig.expect(source, 5)

    def test_try_copy_drops_the_oldest_cached_page_but_no_held_one(self, new_rig: NewRig) -> None:
        rig = new_rig([[3]], "g")
        live = rig.new(1)
        old, young = rig.cached(2), rig.cached(3)
        copy = rig.hierarchy.try_copy(live, 35, rig.stream)
        assert copy is not None
        assert (old.alive(), young.alive(), live.alive()) == (False, True, True)
        rig.expect(copy, 1)
        rig.hierarchy.hold(copy)
        rig.hierarchy.hold(young)
        assert rig.hierarchy.try_copy(live, 35, rig.stream) is None
        rig.hierarchy.release(copy)

    def test_copy_into(self, new_rig: NewRig) -> None:
        rig = new_rig([[2]], "g", slot_sizes=((96, 40),))
        source, destination = rig.new(1), rig.new(2)
        rig.hierarchy.copy_into(source, destination, rig.stream)
        rig.expect(destination, 1)
        assert rig.counters.moved[0][0][0] == 1
        rig.hierarchy.in_flight.lose(source)
        rig.hierarchy.copy_into(source, destination, rig.stream)
        assert destination.lost, "a copy has the bytes of its source"


@pytest.mark.parametrize(("slots", "mebibytes"), [(1, 4), (8, 8), (80, 64)])
def test_the_staging_ring_is_as_large_as_the_gpu_within_bounds(new_rig: NewRig, slots: int, mebibytes: int) -> None:
    rig = new_rig([[slots], [16]], "gd", ((1 << 20,),))
    assert rig.hierarchy.ring.largest == mebibytes << 20
