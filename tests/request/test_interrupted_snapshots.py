"""Ctrl-C in the middle of a call that copies a recurrent state: no request reads a wrong state, and no slot is lost."""

from __future__ import annotations

from functools import partial

import pytest

from kv_cache_manager_v2 import KVCache
from tests.manager.test_interrupts import DEVICE
from tests.support.interrupts import interpreted, interruptions
from tests.support.models import hybrid
from tests.support.rig import GPU, Rig, toks


@interpreted
@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupted_commit_leaves_no_snapshot_of_another_length(count: int) -> None:
    for interrupter in interruptions(spared=DEVICE):
        rig = Rig(hybrid(4, 8))
        request = rig.start()
        assert request.advance(toks(0, 2))
        assert request.cache.resize(2 + count, 2)
        request.write(toks(2, 2 + count))
        interrupter.run(partial(request.cache.commit, toks(2, 2 + count)))
        if rig.manager.poison_reason() is None:
            request.close()
            for length in (2, 2 + count):
                again = rig.start(toks(0, length))
                again.check()
                again.close()
        rig.manager.shutdown()


def _copy(rig: Rig, cache: KVCache, call: str) -> None:
    if call == "fork":
        rig.own(cache.fork())
    else:
        cache.commit(toks(0, 3))


@interpreted
@pytest.mark.parametrize("call", ["fork", "commit"])
def test_an_interrupted_copy_of_a_state_keeps_no_slot(call: str) -> None:
    for interrupter in interruptions(spared=DEVICE):
        rig = Rig(hybrid(4, 8))
        request = rig.start()
        assert request.cache.resize(3, 0)
        request.write(toks(0, 3))
        interrupter.run(partial(_copy, rig, request.cache, call))
        if rig.manager.poison_reason() is None:
            for cache in rig._opened:
                cache.close()
            rig.driver.synchronize()
            rig.manager.clear_reusable_blocks()
            for row in rig.manager.get_storage_statistics(GPU):
                assert row.free == row.total, f"interrupted at {interrupter.where}"
        rig.manager.shutdown()
