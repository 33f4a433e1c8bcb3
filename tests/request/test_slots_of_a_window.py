"""A step that needs the slots of pages that leave its own window, while the tree or other requests still use them."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import KVCacheError
from tests.support.models import small
from tests.support.rig import Request, Rig, toks


def _ready_to_slide(rig: Rig, committed: int, forked: bool) -> Request:
    """A lone request whose next step moves the window over its first blocks, which alone can make free what the step needs.

    `committed`: of the 8 tokens in those blocks; what is not committed yet stays held. `forked`: a suspended fork holds them too.
    """
    request = rig.start()
    assert request.cache.resize(8, 0)
    request.write(toks(0, 8))
    request.cache.commit(toks(0, committed))
    request.cache.history_length = 8
    if forked:
        rig.own(request.cache.fork())
    assert request.cache.resize(16, 8)
    request.write(toks(8, 16))
    return request


@pytest.mark.parametrize("call", ["wait_event", "record_event", "create_event", "query_event", "copy_batch"])
@pytest.mark.parametrize("host_slots", [4, 1, 0])
@pytest.mark.parametrize(("committed", "forked"), [(8, False), (8, True), (6, False), (2, False)])
def test_a_step_for_which_its_own_window_makes_room_happens_wholly_or_not_at_all(
    host_slots: int, committed: int, forked: bool, call: str
) -> None:
    """Pages that slide out of the window are moved or dropped for the step. Each call is refused in turn, until none is."""
    with Rig(small(4, kinds=[(8, 0)], host_slots=host_slots)) as rig:
        request = _ready_to_slide(rig, committed, forked)
        cache = request.cache
        done = None
        nth = 0
        while done is None:
            nth += 1
            rig.driver.fail(call, nth)
            before = rig.counts()
            try:
                done = cache.resize(20, 16)
            except KVCacheError:
                rig.driver.heal()
                assert (cache.capacity, cache.history_length, cache.num_blocks) == (16, 8, 4)
                rig.settle()
                assert rig.counts() == before
                request.check()
        rig.driver.heal()
        assert nth > 1 or host_slots == 0 or call not in ("record_event", "copy_batch")
        assert done == (host_slots > 0 or (committed >= 4 and not forked))
        if done:
            request.write(toks(16, 20))
            request.check()
            assert rig.blocks_mapped(cache) == [2, 3, 4]
        else:
            assert (cache.capacity, cache.history_length) == (16, 8)


def test_what_slides_out_of_a_window_for_a_step_stays_cached_on_a_colder_level() -> None:
    with Rig(small(4, kinds=[(8, 0)], host_slots=4)) as rig:
        request = _ready_to_slide(rig, 8, False)
        assert request.cache.resize(24, 16)
        assert rig.counts(1).free == 2
        request.write(toks(16, 24))
        request.check()
        request.close()
        again = rig.start(toks(0, 9))
        assert again.tokens == toks(0, 8)
        again.check()
