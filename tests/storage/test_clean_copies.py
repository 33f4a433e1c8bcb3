"""Clean copies: a loaded page leaves its bytes on the colder level, and returns to them for nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kv_cache_manager_v2.storage.page import Page
from tests.storage.test_stateful import HierarchyMachine
from tests.support.models import small
from tests.support.rig import Rig, toks
from tests.support.storage_rig import FakeBlock, StorageRig, pattern, resize_level, settle_all


def evict_all(rig: StorageRig) -> None:
    """Evict every evictable page of the GPU."""
    assert rig.hierarchy.acquire([rig.hierarchy.total(0, 0)], []) is None


def make_free(rig: StorageRig, level: int, slots: int) -> None:
    """Evict from a level until it has free slots."""
    assert rig.hierarchy.planner.plan(level, [slots], [], [], False, True) is None
    rig.hierarchy.mover.execute(rig.hierarchy.planner.plans, level)


def use(rig: StorageRig, page: Page) -> None:
    """A request matches a cached page, reads it and ends."""
    rig.hierarchy.hold(page)
    assert rig.hierarchy.acquire([0], [page]) is None
    rig.hierarchy.lock_held(page)
    rig.timeline.wait(rig.stream, page.ready)
    rig.hierarchy.unlock(page, rig.timeline.record(rig.stream))


def loaded(rig: StorageRig, value: int = 1, owner: FakeBlock | None = None) -> Page:
    """A cached page that was evicted once and is on the GPU again."""
    page = rig.cached(value, owner=owner)
    evict_all(rig)
    settle_all(rig)
    use(rig, page)
    settle_all(rig)
    return page


def copies(rig: StorageRig, level: int = 1) -> int:
    return rig.hierarchy.cells[0][level].num_copies


@pytest.mark.parametrize(("tiers", "exclusive"), [("gh", False), ("gd", False), ("gh", True), ("gd", True)])
def test_a_page_is_written_once_unless_the_tier_is_exclusive(tiers: str, exclusive: bool) -> None:
    """However often a page comes and goes, its owner hears of each change of tier, and its bytes are right."""
    rig = StorageRig([[2], [3]], tiers, exclusive=exclusive)
    owner = FakeBlock()
    page = loaded(rig, 7, owner)
    for _time in range(3):
        assert rig.hierarchy.free(1, 0) == 3, "the slot of a copy counts as free"
        evict_all(rig)
        assert page.level == 1
        rig.check()
        rig.expect(page, 7)
        use(rig, page)
        settle_all(rig)
    assert (rig.counters.pages_moved(0, 1), rig.counters.pages_returned(1)) == ((4, 0) if exclusive else (1, 3))
    assert rig.counters.pages_moved(1, 0) == 4
    assert owner.moves == [(0, 1), (1, 0)] * 4
    rig.close()


def test_each_colder_level_keeps_a_copy() -> None:
    """A page that has been on all levels goes down without a byte copied, level by level."""
    rig = StorageRig([[1], [2], [4]], "ghd", exclusive=False)
    page, *_younger = [rig.cached(value) for value in range(4)]
    settle_all(rig)
    assert page.level == 2
    assert rig.hierarchy.prefetch([page], 1) is None
    settle_all(rig)
    use(rig, page)
    settle_all(rig)
    assert (copies(rig, 1), copies(rig, 2)) == (1, 1)
    evict_all(rig)
    assert page.level == 1
    make_free(rig, 1, 2)
    assert page.level == 2
    assert [rig.counters.pages_returned(level) for level in (1, 2)] == [1, 1]
    rig.check()
    rig.expect(page, 0)
    rig.close()


@pytest.mark.parametrize("copy_is_older", [True, False])
def test_a_copy_takes_part_in_the_order_of_eviction(copy_is_older: bool) -> None:
    rig = StorageRig([[2], [2]], exclusive=False)
    if copy_is_older:
        page = loaded(rig)
        rig.hierarchy.lock(page)
        other = rig.cached(2)
        rig.hierarchy.unlock(rig.new(), rig.timeline.record(rig.stream))  # `other` goes to the free slot
    else:
        other = rig.cached(2)
        page = loaded(rig)
        rig.hierarchy.lock(page)
    assert (other.level, copies(rig)) == (1, 1)
    last = rig.cached(3)
    rig.new()
    assert last.level == 1
    assert (other.alive(), copies(rig)) == ((True, 0) if copy_is_older else (False, 1))
    rig.check()
    rig.expect(page, 1)
    rig.expect(last, 3)
    rig.close()


def test_what_must_be_kept_gets_the_slots_of_copies() -> None:
    """A copy never makes a request wait: it is given up before there is a shortage."""
    rig = StorageRig([[2], [1]], exclusive=False)
    page = loaded(rig)
    held = rig.held(2)
    assert rig.hierarchy.acquire([1], [], [page]) is None
    assert held.level == 1
    assert copies(rig) == 0
    rig.check()
    rig.expect(page, 1)
    rig.expect(held, 2)
    rig.close()


@pytest.mark.parametrize("private", [True, False])
def test_a_page_that_a_request_may_write_to_leaves_no_copy(private: bool) -> None:
    rig = StorageRig([[1], [2]], exclusive=False)
    page = rig.held(1)
    if not private:
        growing = FakeBlock()
        growing.final = False
        rig.hierarchy.adopt(page, growing, 2)
    evict_all(rig)
    assert rig.hierarchy.acquire([0], [page]) is None
    rig.hierarchy.lock_held(page)
    assert copies(rig) == 0
    rig.stamp(page, 2)
    rig.hierarchy.hold_locked(page, rig.timeline.record(rig.stream))
    evict_all(rig)
    rig.expect(page, 2)
    rig.close()


def overwritten(rig: StorageRig, page: Page) -> None:
    source = rig.new(9)
    assert rig.hierarchy.overwrite(page, source, rig.stream)
    rig.expect(page, 9)


CHANGES: list[Callable[[StorageRig, Page], None]] = [
    lambda rig, page: rig.hierarchy.adopt(page, FakeBlock(), 3),
    lambda rig, page: rig.hierarchy.unlist(page),
    lambda rig, page: rig.hierarchy.drop(page),
    overwritten,
    lambda rig, page: rig.hierarchy.in_flight.lose(page),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_may_change_the_bytes_of_a_page_discards_its_copies(change: Callable[[StorageRig, Page], None]) -> None:
    rig = StorageRig([[2], [2]], exclusive=False)
    page = loaded(rig)
    assert copies(rig) == 1
    change(rig, page)
    assert copies(rig) == 0
    rig.check()
    settle_all(rig)
    rig.close()


def test_a_page_that_takes_over_a_gpu_slot_has_no_copies_left() -> None:
    rig = StorageRig([[2], [2], [2]], "ghd", exclusive=False)
    page = rig.cached(1)
    assert rig.hierarchy.prefetch([page], 0) is None
    evict_all(rig)
    make_free(rig, 1, 2)
    settle_all(rig)
    assert page.level == 2
    assert rig.hierarchy.prefetch([page], 1) is None
    settle_all(rig)
    assert copies(rig, 2) == 1
    rig.hierarchy.take_over(page, rig.new(1))
    assert copies(rig, 2) == 0
    rig.check()
    rig.close()


def test_the_slot_of_a_copy_is_overwritten_only_after_the_load_has_read_it() -> None:
    rig = StorageRig([[2], [1]], exclusive=False)
    page = rig.cached(1)
    evict_all(rig)
    other, last = rig.new(2), rig.new(3)
    gate = rig.driver.gate(rig.stream)
    rig.hierarchy.unlock(other, rig.timeline.record(rig.stream))  # its slot is free behind the gate
    rig.hierarchy.hold(page)
    assert rig.hierarchy.acquire([0], [page]) is None
    assert copies(rig) == 1
    rig.hierarchy.hold_locked(last, last.ready)
    assert rig.hierarchy.acquire([1], [], [page]) is None
    assert last.level == 1, "it has the slot from which the page is still to be read"
    gate.open()
    rig.expect(page, 1)
    rig.expect(last, 3)
    rig.close()


def test_work_on_a_page_that_returns_keeps_both_of_its_slots() -> None:
    """The load and the engine's read are queued; the page returns and is dropped; then others get its slots."""
    rig = StorageRig([[1], [1]], exclusive=False)
    page = rig.cached(1)
    evict_all(rig)
    other = rig.new(2)
    gate = rig.driver.gate(rig.stream)
    rig.hierarchy.unlock(other, rig.timeline.record(rig.stream))  # its slot is free behind the gate
    use(rig, page)
    seen: list[bytes] = []
    rig.driver.launch(rig.stream, lambda: seen.append(rig.driver.read_bytes(address, 96)))
    address = rig.hierarchy.slot_address(0, 0, 0, page.slot)
    page.ready = rig.timeline.record(rig.stream)
    last = rig.new()
    assert page.level == 1
    assert rig.counters.pages_returned(1) == 1
    assert not rig.timeline.done(last.ready), "the engine still reads the slot"
    rig.hierarchy.drop(page)
    rig.hierarchy.hold_locked(last, last.ready)
    assert rig.hierarchy.acquire([1], []) is None
    assert not rig.timeline.done(last.ready), "the slot is still to be read by the load"
    gate.open()
    rig.driver.synchronize()
    assert seen == [pattern(1, 0, 96)]
    rig.close()


def test_the_slot_of_a_page_that_returned_is_overwritten_only_after_the_load_has_read_it() -> None:
    """The load is queued; the page returns and is dropped; a page whose bytes are ready gets the slot, and waits for the load."""
    rig = StorageRig([[2], [1]], exclusive=False)
    page = rig.cached(1)
    evict_all(rig)
    other, ready = rig.new(2), rig.new(3)
    assert rig.timeline.done(ready.ready)
    gate = rig.driver.gate(rig.stream)
    rig.hierarchy.unlock(other, rig.timeline.record(rig.stream))  # its slot is free behind the gate
    use(rig, page)
    assert rig.hierarchy.acquire([1], []) is None
    assert (page.level, rig.counters.pages_returned(1)) == (1, 1)
    rig.hierarchy.drop(page)
    rig.hierarchy.hold_locked(ready, ready.ready)
    assert rig.hierarchy.acquire([2], []) is None
    assert ready.level == 1
    assert not rig.timeline.done(ready.ready), "the slot is still to be read by the load"
    gate.open()
    rig.expect(ready, 3)
    rig.close()


def test_a_page_that_is_loaded_leaves_no_copy_if_a_held_page_needs_the_slot() -> None:
    rig = StorageRig([[1], [1]], exclusive=False)
    page = rig.cached(1)
    evict_all(rig)
    held = rig.held(2)
    rig.hierarchy.hold(page)
    assert rig.hierarchy.acquire([0], [page]) is None
    assert (page.level, held.level, copies(rig)) == (0, 1, 0)
    rig.check()
    rig.expect(page, 1)
    rig.expect(held, 2)
    rig.close()


def test_the_tail_to_which_a_request_still_writes_leaves_no_copy() -> None:
    """Its committed part is cached; the request goes on to write past it, between two times on the host."""
    with Rig(small(4, host_slots=8)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 6))
        request.cache.stop_committing()
        for token in (6, 7):
            request.suspend()
            rig.take(4).close()
            assert rig.manager.movement.pages_moved(0, 1) > 0
            assert request.resume()
            request.check()
            assert request.advance([token], commit=False)
        request.suspend()
        rig.take(4).close()
        assert request.resume()
        request.check()


def test_a_level_that_shrinks_discards_its_copies_first() -> None:
    rig = StorageRig([[2], [3]], exclusive=False)
    cached = rig.cached(2)
    evict_all(rig)
    page = loaded(rig)
    assert copies(rig) == 1
    sizing = rig.hierarchy.sizings[1].with_slots(rig.layout, [1])
    result = resize_level(rig.hierarchy, 1, sizing)
    assert result
    assert (result.evicted, copies(rig)) == (0, 0)
    assert cached.alive()
    rig.check()
    rig.expect(page, 1)
    rig.close()


def walk(seed: int) -> int:
    """Random calls, most of which make or use copies. Returns how many pages returned to one."""
    draw = random.Random(seed)
    machine = HierarchyMachine()
    counts = [draw.choice((2, 3, 3, 4)) for _count in range(6)]
    machine.start(draw.choice(("gh", "gd", "ghd")), draw.choice(("eager", "random")), seed, counts, 1, True)
    for _step in range(60):
        number, other = draw.randrange(1 << 20), draw.randrange(1 << 20)
        call = draw.choice(("use", "use", "use", "new", "load", "rewrite", "adopt", "unlock", "release", "overwrite", "prefetch"))
        if call == "use":
            machine.use_again(number, 3)
        elif call == "new":
            machine.new_cached(number, 35, 2)
        elif call == "load":
            machine.load(number, [draw.randint(0, 2), 0])
        elif call == "overwrite":
            machine.overwrite(number, other)
        elif call == "prefetch":
            machine.prefetch(number, other)
        else:
            {"rewrite": machine.rewrite, "adopt": machine.adopt, "unlock": machine.unlock, "release": machine.release}[call](number)
        machine.agrees()
    returned = sum(map(sum, machine.rig_().counters.returned))
    machine.teardown()
    return returned


def test_random_calls_never_return_a_page_to_other_bytes() -> None:
    """The machine of test_stateful.py compares all bytes with its model."""
    assert sum(walk(seed) for seed in range(8)) > 20
