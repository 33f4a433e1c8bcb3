"""A device that refuses one of several copies or waits: what was queued before it damages no page, and the call can
be tried again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kv_cache_manager_v2 import KVCache, KVCacheError, LayerId
from kv_cache_manager_v2.ids import NULL_POINT
from kv_cache_manager_v2.request.audit import check_everything
from tests.storage.conftest import NewRig
from tests.support.models import Kind, small
from tests.support.rig import Rig, toks
from tests.support.storage_rig import FakeBlock

MARK = b"\xcc" * 16
KINDS: Sequence[Kind] = ("full", (64, 0))


def addresses(rig: Rig, cache: KVCache) -> list[int]:
    """Where the pages of a running request begin."""
    found: list[int] = []
    for number in range(len(KINDS)):
        base = rig.manager.get_mem_pool_base_address(LayerId(number), "key")
        stride = rig.manager.get_page_stride(LayerId(number), "key")
        found += [base + index * stride for index in rig.indices(cache, number)]
    return found


def write(rig: Rig, places: Sequence[int], data: bytes) -> Callable[[], None]:
    """A kernel."""

    def run() -> None:
        for place in places:
            rig.driver.write_bytes(place, data)

    return run


def check_late_copies(rig: Rig, refused: Callable[[], None], copies: int) -> None:
    """`refused` queues copies on a blocked stream, and the device refuses the last: the next request in
    their slots keeps what it writes there when the stream goes on."""
    gate = rig.driver.gate(rig.stream)
    rig.driver.fail("copy", copies)
    with pytest.raises(KVCacheError, match="injected"):
        refused()
    rig.manager.check_invariants()
    other = rig.create()
    stream = rig.new_stream()
    assert other.resume(stream)
    assert other.resize(rig.manager.get_storage_statistics()[0].free // len(KINDS) * 4)
    places = addresses(rig, other)
    rig.driver.launch(stream, write(rig, places, MARK))
    gate.open()
    rig.settle()
    assert [rig.driver.read_bytes(place, len(MARK)) for place in places] == [MARK] * len(places)
    other.close()


def test_a_first_resume_whose_second_copy_is_refused() -> None:
    """The partly matched block is copied once for each layer group."""
    with Rig(small(16, kinds=KINDS), engine=False) as rig:
        first = rig.open()
        assert first.resize(6)
        first.commit(toks(0, 6))
        first.stop_committing()
        first.close()
        cache = rig.create(toks(0, 7))
        assert cache.num_committed_tokens == 6
        check_late_copies(rig, lambda: resume(rig, cache), 2)
        resume(rig, cache)


def test_slots_stay_in_use_while_the_end_of_their_copies_is_unknown() -> None:
    """The device refuses a copy, and then to record or to wait. The next call frees the slots."""
    with Rig(small(16, kinds=KINDS), engine=False) as rig:
        rig.seed(toks(0, 6))
        cache = rig.create(toks(0, 7))
        free = rig.counts().free
        rig.driver.fail("copy", 2)
        rig.driver.fail("record_event", 2, None)  # the first one is before the copies
        rig.driver.fail("synchronize", times=None)
        with pytest.raises(KVCacheError, match="injected"):
            cache.resume(rig.stream)
        check_everything(rig.manager.shared)
        assert rig.counts().free < free
        rig.driver.heal()
        cache.close()
        assert rig.counts().free == free


def resume(rig: Rig, cache: KVCache) -> None:
    assert cache.resume(rig.stream)


@pytest.mark.parametrize("nth", [2, 3, 4])
def test_beams_of_which_a_later_copy_is_refused(nth: int) -> None:
    """Each further beam copies the block in which the history ends, once for each layer group."""
    with Rig(small(16, kinds=KINDS), engine=False) as rig:
        cache = rig.open()
        assert cache.resize(6, 6)
        check_late_copies(rig, lambda: setattr(cache, "beam_width", 3), nth)
        assert cache.beam_width == 1
        cache.beam_width = 3


def test_a_copy_refused_for_its_second_pool_leaves_its_slot_busy(new_rig: NewRig) -> None:
    """A snapshot takes the only free slot; half of it is queued when the device refuses the rest."""
    rig = new_rig([[2]], "g", ((96, 64),))
    assert rig.hierarchy.acquire([1], []) is None
    source = rig.hierarchy.new_page(0, 35)
    gate = rig.driver.gate(rig.stream)
    rig.driver.fail("copy", 2)
    with pytest.raises(KVCacheError, match="injected"):
        rig.hierarchy.try_copy(source, 35, rig.stream)
    page = rig.hierarchy.new_page(0, 35)
    assert not rig.timeline.done(page.ready)
    gate.open()
    rig.driver.synchronize()
    assert rig.timeline.done(page.ready)


def test_a_copy_that_may_not_wait_leaves_its_slot_to_the_user_before(new_rig: NewRig) -> None:
    """The slot's last user is still at work when the device refuses the wait for it."""
    rig = new_rig([[2]], "g")
    busy = rig.driver.create_stream()
    source, before = rig.hierarchy.new_page(0, 35), rig.hierarchy.new_page(0, 35)
    gate = rig.driver.gate(busy)
    rig.hierarchy.unlock(before, rig.timeline.record(busy))
    rig.driver.fail("wait_event")
    with pytest.raises(KVCacheError, match="injected"):
        rig.hierarchy.try_copy(source, 35, rig.stream)
    page = rig.hierarchy.new_page(0, 35)
    assert not rig.timeline.done(page.ready)
    gate.open()
    rig.driver.synchronize()
    rig.check()
    rig.driver.destroy_stream(busy)


def test_an_overwriting_copy_refused_for_its_second_pool_leaves_its_slot_busy(new_rig: NewRig) -> None:
    """The tree drops such a page; the next user of its slot waits for the half that was queued."""
    rig = new_rig([[2]], "g", ((96, 64),))
    source, page = rig.hierarchy.new_page(0, 35), rig.hierarchy.new_page(0, 35)
    rig.hierarchy.adopt(page, FakeBlock(), 1)
    rig.hierarchy.unlock(page, NULL_POINT)
    gate = rig.driver.gate(rig.stream)
    rig.driver.fail("copy", 2)
    with pytest.raises(KVCacheError, match="injected"):
        rig.hierarchy.overwrite(page, source, rig.stream)
    rig.hierarchy.drop(page)
    assert not rig.timeline.done(rig.hierarchy.new_page(0, 35).ready)
    gate.open()
    rig.driver.synchronize()
