"""File transfers in flight: confirmed, failed, timed out; and pages that change places while both tiers are full."""

from __future__ import annotations

from contextlib import suppress

import pytest

from kv_cache_manager_v2.errors import CuError, HostRegistrationError
from kv_cache_manager_v2.ids import NULL_POINT, CacheTier
from kv_cache_manager_v2.layout.sizing import LevelSizing
from tests.storage.conftest import NewRig
from tests.support.storage_rig import FakeBlock, StorageRig, resize_level, settle_all

SCHEDULES = [("eager", 0), *[("random", seed) for seed in range(8)]]


@pytest.mark.parametrize("tiers", ["gh", "gd", "ghd", "gdd", "ghh"])
@pytest.mark.parametrize(
    ("sizes", "schedule", "seed"),
    [
        *[(((96,),), *schedule) for schedule in SCHEDULES],
        *[(((96, 1),), *schedule) for schedule in SCHEDULES],
        *[((((3 << 19) + 5, 40),), *schedule) for schedule in SCHEDULES[:2]],
    ],
)
def test_bytes_survive_every_way_down_and_up(
    new_rig: NewRig, sizes: tuple[tuple[int, ...], ...], schedule: str, seed: int, tiers: str
) -> None:
    """Any slot size, one byte included; one larger than a staging region passes in parts."""
    slots = [[2]] * len(tiers)
    rig = new_rig(slots, tiers, sizes, schedule, seed)
    pages = [rig.held(i) for i in range(2 * len(tiers))]
    settle_all(rig)
    rig.check()
    for i, page in enumerate(pages):
        rig.expect(page, i)
    for at in range(0, len(pages), 2):
        batch = pages[at : at + 2]
        assert rig.hierarchy.acquire([0], batch) is None
        rig.check()
        assert [page.level for page in batch] == [0, 0]
        for page in batch:
            rig.hierarchy.lock_held(page)
        for i, page in enumerate(batch, start=at):
            rig.expect(page, i)
        for page in batch:
            rig.hierarchy.hold_locked(page, NULL_POINT)
    settle_all(rig)
    assert rig.hierarchy.transfers_in_flight == 0
    assert rig.counters.lost == [0]
    for i, page in enumerate(pages):
        rig.expect(page, i)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_full_tiers_exchange_more_pages_than_there_are_swap_slots(new_rig: NewRig, schedule: str, seed: int) -> None:
    count = 150
    rig = new_rig([[count], [count]], "gh", ((16,),), schedule, seed)
    pages = [rig.held(i) for i in range(2 * count)]
    assert rig.hierarchy.acquire([0], pages[:count]) is None
    assert [page.level for page in pages] == [0] * count + [1] * count
    assert rig.order(0) == pages[:count]
    for i, page in enumerate(pages):
        rig.expect(page, i)


def test_an_exchange_for_which_a_page_is_dropped_needs_no_swap_slot(new_rig: NewRig) -> None:
    rig = new_rig([[2], [2]], "gh")
    loaded, dropped, *moved = rig.held(0), rig.cached(1), rig.held(2), rig.held(3)
    cells = len(rig.hierarchy.all_cells())
    assert rig.hierarchy.acquire([1], [loaded]) is None
    assert [page.level for page in (loaded, *moved)] == [0, 1, 1]
    assert not dropped.alive()
    assert len(rig.hierarchy.all_cells()) == cells, "memory for swap slots was allocated"


@pytest.mark.parametrize("effect", ["error", "short"])
@pytest.mark.parametrize("tiers", ["gd", "ghd"])
def test_failed_read_loses_its_page_only(new_rig: NewRig, tiers: str, effect: str) -> None:
    rig = new_rig([[4]] * len(tiers), tiers)
    blocks = [FakeBlock(f"{i}") for i in range(3)]
    pages = [rig.cached(i, owner=blocks[i]) for i in range(3)]
    for page in pages:
        rig.hierarchy.hold(page)
    for _ in range(len(tiers) - 1):  # down to the disk
        for _ in range(4):
            rig.cached(9)
    target = len(tiers) - 2
    assert [page.level for page in pages] == [target + 1] * 3
    rig.hierarchy.settle()
    rig.driver.fail("read_file", 2, 1, effect)
    assert rig.hierarchy.prefetch(pages, target) is None
    settle_all(rig)
    assert [page.lost for page in pages] == [False, True, False]
    assert [len(block.gone) for block in blocks] == [0, 1, 0]
    assert rig.counters.lost == [1]
    rig.expect(pages[0], 0)
    rig.expect(pages[2], 2)
    assert pages[1].alive()
    free = rig.hierarchy.free(target, 0)
    rig.hierarchy.release(pages[1])
    assert not pages[1].alive()
    assert rig.hierarchy.free(target, 0) == free + 1


def test_loss_is_noticed_after_the_page_has_moved_on(new_rig: NewRig) -> None:
    """Disk to host fails, and the page moves on to the GPU before the failure is noticed: it is lost all the same."""
    rig = new_rig([[1], [1], [1]], "ghd")
    page = rig.held(1)
    rig.cached(2)
    rig.cached(3)
    rig.hierarchy.settle()
    assert page.level == 2
    rig.driver.fail("read_file")
    assert rig.hierarchy.prefetch([page], 1) is None
    assert page.transfers == 1
    assert rig.hierarchy.acquire([0], [page]) is None
    assert page.level == 0
    rig.check()
    settle_all(rig)
    assert page.lost
    rig.hierarchy.release(page)


def test_a_late_write_loses_its_page_only(new_rig: NewRig) -> None:
    """A write that timed out loses its page; its slot stays unusable until the write has really ended."""
    rig = new_rig([[2], [2]], "gd", transfer_timeout=20)
    block = FakeBlock("late")
    page = rig.cached(1, owner=block)
    gate = rig.driver.hang("write_file")
    assert rig.hierarchy.acquire([2], []) is None
    for _ in range(40):
        rig.hierarchy.settle()
    assert page.lost
    assert block.gone == [page]
    assert not page.alive()
    assert rig.counts(1) == (1, 0, 1)
    others = [rig.cached(value) for value in (5, 6, 7)]
    rig.check()
    settle_all(rig)
    gate.open()
    settle_all(rig)
    assert rig.hierarchy.transfers_in_flight == 0
    assert rig.counts(1) == (1, 1, 0)
    for value, other in zip((5, 6, 7), others, strict=True):
        rig.expect(other, value)


def test_late_read_keeps_its_staging_region(new_rig: NewRig) -> None:
    rig = new_rig([[2], [2]], "gd", transfer_timeout=20)
    page = rig.held(1)
    assert rig.hierarchy.acquire([2], []) is None
    settle_all(rig)
    gate = rig.driver.hang("read_file")
    assert rig.hierarchy.acquire([0], [page]) is None
    for _ in range(40):
        rig.hierarchy.settle()
    assert page.lost
    assert page.level == 0
    assert rig.hierarchy.transfers_in_flight == 1
    assert rig.hierarchy.ring.quarantined == 1
    rig.hierarchy.release(page)
    gate.open()
    settle_all(rig)
    assert rig.hierarchy.ring.quarantined == 0


def test_a_load_larger_than_the_ring_never_blocks_the_caller(new_rig: NewRig) -> None:
    """100 MB through the 64 MiB ring while the first read hangs: the call returns, and all is right once the read has ended."""
    rig = new_rig([[100], [100]], "gd", ((1_000_000,),))
    pages = [rig.held(i) for i in range(100)]
    assert rig.hierarchy.acquire([100], []) is None
    settle_all(rig)
    gate = rig.driver.hang("read_file")
    assert rig.hierarchy.acquire([0], pages) is None
    assert rig.hierarchy.transfers_in_flight == 100
    gate.open()
    settle_all(rig)
    for i in (0, 1, 63, 64, 99):
        rig.expect(pages[i], i)


def test_a_read_that_ends_late_spoils_what_was_staged_behind_it_and_says_so(new_rig: NewRig) -> None:
    """A read that timed out may still write to its part of the ring, through which a later page went: both are lost."""
    rig = new_rig([[100], [100]], "gd", ((1_000_000,),), transfer_timeout=20)
    pages = [rig.held(i) for i in range(100)]
    assert rig.hierarchy.acquire([100], []) is None
    settle_all(rig)
    gate = rig.driver.hang("read_file")
    assert rig.hierarchy.acquire([0], pages) is None
    for _ in range(60):
        rig.hierarchy.settle()
    gate.open()
    settle_all(rig)
    lost = [i for i, page in enumerate(pages) if page.lost]
    assert lost[0] == 0
    assert len(lost) == 2, "the page whose read hung, and the one that was handed its memory"
    for i, page in enumerate(pages):
        if not page.lost:
            rig.expect(page, i)


def test_late_read_into_a_host_slot_keeps_the_slot(new_rig: NewRig) -> None:
    """The page that was being read is lost; its slot is freed only after the read has ended."""
    rig = new_rig([[1], [1], [1]], "ghd", transfer_timeout=20)
    page = rig.held(1)
    rig.cached(2)
    warm = rig.cached(3)
    settle_all(rig)
    gate = rig.driver.hang("read_file")
    assert rig.hierarchy.prefetch([page], 1) is None
    assert page.level == 1
    rig.hierarchy.release(page)
    assert rig.counts(1) == (0, 0, 1)
    rig.check()
    shortage = rig.hierarchy.acquire([1], [warm])
    assert shortage is not None
    gate.open()
    settle_all(rig)
    assert rig.counts(1) == (1, 0, 0)


def test_busy_pages_are_waited_for_rather_than_refused(new_rig: NewRig) -> None:
    rig = new_rig([[1], [1]], "gd", schedule="random", seed=3)
    for value in range(6):
        page = rig.cached(value)
    rig.expect(page, 5)


def test_copies_of_unconfirmed_bytes_are_lost_with_them(new_rig: NewRig) -> None:
    """A page is copied while its read from disk is in flight; the read fails: both are lost, and no copy is made of either."""
    rig = new_rig([[4], [4]], "gd")
    page = rig.held(1)
    assert rig.hierarchy.acquire([4], []) is None
    settle_all(rig)
    rig.driver.fail("read_file")
    assert rig.hierarchy.acquire([1], [page]) is None
    private = rig.new()
    rig.hierarchy.copy_into(page, private, rig.stream)
    block = FakeBlock("snapshot")
    snapshot = rig.hierarchy.try_copy(private, 35, rig.stream)
    assert snapshot is not None
    rig.pages.append(snapshot)
    rig.hierarchy.adopt(snapshot, block, 4)
    assert [one.transfers for one in (page, private, snapshot)] == [1, 1, 1]
    rig.check()
    settle_all(rig)
    assert [one.lost for one in (page, private, snapshot)] == [True, True, True]
    assert block.gone == [snapshot]
    assert not snapshot.alive()
    assert rig.counters.lost == [3]
    assert rig.hierarchy.try_copy(page, 35, rig.stream) is None
    assert rig.hierarchy.transfers_in_flight == 0


def test_copies_of_confirmed_loads_are_confirmed_with_them(new_rig: NewRig) -> None:
    rig = new_rig([[4], [4]], "gd")
    page = rig.held(1)
    assert rig.hierarchy.acquire([4], []) is None
    settle_all(rig)
    assert rig.hierarchy.acquire([1], [page]) is None
    private = rig.new()
    rig.timeline.wait(rig.stream, page.ready)
    rig.hierarchy.copy_into(page, private, rig.stream)
    assert private.transfers == 1
    settle_all(rig)
    assert (private.transfers, private.lost) == (0, False)
    rig.expect(private, 1)


def test_exchange_beside_a_load_whose_slot_is_kept(new_rig: NewRig) -> None:
    """A page on disk whose write is still unconfirmed leaves no free slot behind when it is loaded; the exchange knows that."""
    rig = new_rig([[3], [2]], "gd")
    first, second = rig.held(1), rig.held(2)
    rig.new(3)
    assert rig.hierarchy.acquire([1], []) is None
    settle_all(rig)
    third = rig.held(4)
    cached = rig.cached(5)
    assert (first.level, second.level, second.transfers) == (1, 1, 1)
    assert rig.hierarchy.acquire([0], [second, first]) is None
    assert (first.level, second.level, third.level) == (0, 0, 1)
    assert not cached.alive()
    settle_all(rig)
    for value, page in ((1, first), (2, second), (4, third)):
        rig.expect(page, value)


@pytest.mark.parametrize("tiers", ["gh", "gd"])
def test_what_is_pushed_down_is_what_its_last_writer_wrote(new_rig: NewRig, tiers: str) -> None:
    """The copy stands behind the engine's work on the page, however late that runs."""
    rig = new_rig([[1], [1]], tiers)
    page = rig.new()
    gate = rig.driver.gate(rig.stream)
    rig.stamp(page, 7)
    rig.hierarchy.hold_locked(page, page.ready)
    assert rig.hierarchy.acquire([1], []) is None
    assert page.level == 1
    assert not rig.timeline.done(page.ready)
    gate.open()
    rig.expect(page, 7)


def test_slot_of_a_source_is_not_overwritten_before_it_was_read(new_rig: NewRig) -> None:
    """Host to GPU behind a gate; meanwhile the host slot is given to another page, whose bytes arrive after the first were read."""
    rig = new_rig([[2], [1]])
    first = rig.held(1)
    second = rig.held(2)
    busy = rig.new()
    assert (first.level, second.level) == (1, 0)
    gate = rig.driver.gate(rig.stream)
    rig.stamp(busy, 3)
    rig.hierarchy.unlock(busy, busy.ready)
    assert rig.hierarchy.acquire([0], [first]) is None
    rig.hierarchy.lock_held(first)
    assert rig.hierarchy.acquire([1], []) is None
    assert second.level == 1
    gate.open()
    rig.expect(first, 1)
    rig.expect(second, 2)


@pytest.mark.parametrize("tiers", ["gh", "gd"])
def test_a_page_in_a_swap_slot_waits_there_until_the_device_goes_on(new_rig: NewRig, tiers: str) -> None:
    """The device refuses every copy from the moment that a page is in a swap slot. It counts for the level that it goes to, keeps
    its bytes and its owner, and goes on when there is something to settle and the device does not refuse any more."""
    rig = new_rig([[1], [1]], tiers)
    blocks = [FakeBlock(f"{i}") for i in range(2)]
    pages = [rig.cached(i, owner=blocks[i]) for i in range(2)]
    for page in pages:
        rig.hierarchy.hold(page)
    settle_all(rig)
    assert [page.level for page in pages] == [1, 0]
    rig.driver.fail("copy_batch", 2, None)
    if tiers == "gd":
        rig.driver.fail("read_file", 1, None)
    with suppress(CuError):
        rig.hierarchy.acquire([0], pages[:1])
    rig.check()
    assert [page.level for page in pages] == [1, 1]
    assert rig.hierarchy.free(1, 0) == 0
    assert rig.hierarchy.transfers_in_flight > 0
    rig.hierarchy.settle()
    rig.check()
    rig.driver.heal()
    rig.hierarchy.settle()
    assert rig.hierarchy.acquire([0], pages[1:]) is None, "it can be loaded from where it is"
    settle_all(rig)
    rig.check()
    assert [page.level for page in pages] == [1, 0]
    assert rig.hierarchy.transfers_in_flight == 0
    assert [len(block.gone) for block in blocks] == [0, 0]
    assert rig.counters.lost == [0]
    for i, page in enumerate(pages):
        rig.expect(page, i)


def test_a_page_in_a_swap_slot_moves_on_when_a_slot_is_free(new_rig: NewRig) -> None:
    rig = new_rig([[1], [1]], "gh")
    pages = [rig.held(i) for i in range(2)]
    rig.driver.fail("copy_batch", 2, None)
    with suppress(CuError):
        rig.hierarchy.acquire([0], pages[:1])
    rig.driver.heal()
    assert rig.hierarchy.mover.swapped == 1
    shortage = rig.hierarchy.prefetch([], 1)
    assert shortage is None
    rig.hierarchy.release(pages[0])
    assert not pages[0].alive()
    rig.hierarchy.settle()
    rig.check()
    assert rig.hierarchy.mover.swapped == 0
    assert (pages[1].level, rig.counts(1), rig.counts(0)) == (1, (0, 0, 1), (1, 0, 0))
    rig.expect(pages[1], 1)


def test_a_slot_of_a_refused_batch_still_waits_for_its_last_user(new_rig: NewRig) -> None:
    """The device refuses to let the copy stream wait for the last user of the slot, which is not done yet: the next user of
    the slot waits for it."""
    rig = new_rig([[1], [2]], "gh")
    below = rig.held(2)
    page = rig.new()
    assert below.level == 1
    gate = rig.driver.gate(rig.stream)
    rig.stamp(page, 1)
    rig.hierarchy.hold_locked(page, page.ready)
    rig.driver.fail("wait_event", 2)
    with pytest.raises(CuError):
        rig.hierarchy.acquire([0], [below])
    rig.check()
    assert (page.level, below.level) == (1, 1)
    assert rig.hierarchy.acquire([0], [below]) is None
    assert below.level == 0
    gate.open()
    rig.expect(page, 1)
    rig.expect(below, 2)


def shrink_refused(rig: StorageRig, times: int | None) -> None:
    """The host level is to shrink from 64 to 32 slots, and the device refuses to register memory again so often."""
    sizing = LevelSizing(CacheTier.HOST_MEM, 64 << 20, 64 << 20, 4096)
    sizing.slots = [32]
    rig.driver.fail("host_register", 1, times)
    with pytest.raises(HostRegistrationError):
        resize_level(rig.hierarchy, 1, sizing)
    rig.check()


@pytest.mark.parametrize("times", [1, 2])
def test_host_memory_that_is_registered_again_at_a_later_try_has_its_bytes(new_rig: NewRig, times: int) -> None:
    """The device refuses a shrink, and then the first attempt to restore the old size."""
    rig = new_rig([[1], [64]], "gh", ((4096,),))
    page = rig.held(1)
    other = rig.held(2)
    assert (page.level, other.level) == (1, 0)
    shrink_refused(rig, times)
    assert rig.hierarchy.total(1, 0) == 64
    assert (page.lost, other.lost) == (False, False)
    rig.expect(page, 1)
    rig.expect(other, 2)


def test_a_host_level_whose_memory_cannot_be_had_again_shrinks_and_its_pages_are_lost(new_rig: NewRig) -> None:
    """The level has as many slots as have memory and says so; a lost page stays with its holder, and its slot vanishes with it.
    The level can grow again."""
    rig = new_rig([[2], [64]], "gh", ((4096,),))
    block = FakeBlock("cached")
    held = rig.held(1)
    rig.cached(2, owner=block)
    others = [rig.held(3), rig.held(4)]
    assert (held.level, rig.counts(1)) == (1, (62, 1, 1))
    shrink_refused(rig, None)
    assert (rig.hierarchy.total(1, 0), rig.hierarchy.sizings[1].slots) == (0, [0])
    assert held.lost
    assert rig.hierarchy.transfers_in_flight > 0
    rig.hierarchy.settle()
    rig.check()
    assert rig.counters.lost == [2]
    assert len(block.gone) == 1
    assert held.alive()
    assert rig.hierarchy.acquire([0], [held]) is None, "a page without memory is not loaded"
    rig.driver.heal()
    sizing = LevelSizing(CacheTier.HOST_MEM, 64 << 20, 64 << 20, 4096)
    sizing.slots = [64]
    assert resize_level(rig.hierarchy, 1, sizing)
    rig.check()
    rig.new(5)
    rig.hierarchy.release(held)
    rig.check()
    for i, page in enumerate(others, start=3):
        rig.expect(page, i)
    assert rig.counts(1) == (63, 0, 1)


def test_a_shortage_says_that_transfers_in_flight_keep_slots(new_rig: NewRig) -> None:
    """What is being read or written cannot be evicted yet; the same call succeeds once the transfer has ended."""
    rig = new_rig([[1], [1], [1]], "ghd", schedule="random")
    page = rig.held(1)
    rig.cached(2)
    warm = rig.held(3)
    settle_all(rig)
    gate = rig.driver.hang("read_file")
    assert rig.hierarchy.prefetch([page], 1) is None
    shortage = rig.hierarchy.acquire([1], [])
    assert shortage is not None
    assert not shortage.permanent
    assert shortage.in_transfer > 0
    assert "try again when they have ended" in repr(shortage)
    gate.open()
    settle_all(rig)
    shortage = rig.hierarchy.acquire([1], [])
    assert shortage is None or shortage.in_transfer == 0
    assert warm.alive()
