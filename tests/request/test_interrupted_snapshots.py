"""Ctrl-C in the middle of a call that copies a recurrent state: no request reads a wrong state, and no slot is lost."""

from __future__ import annotations

import sys

import pytest

from kv_cache_manager_v2.build import COMPILED
from tests.manager.test_interrupts import Interrupter
from tests.support.models import hybrid
from tests.support.rig import GPU, Rig, toks


@pytest.mark.skipif(COMPILED, reason="compiled code handles signals only where it calls interpreted code")
@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupted_commit_leaves_no_snapshot_of_another_length(count: int) -> None:
    nth = 0
    reached = True
    while reached:
        nth += 1
        rig = Rig(hybrid(4, 8))
        request = rig.start()
        assert request.advance(toks(0, 2))
        assert request.cache.resize(2 + count, 2)
        request.write(toks(2, 2 + count))
        interrupter = Interrupter(nth)
        sys.setprofile(interrupter)
        try:
            request.cache.commit(toks(2, 2 + count))
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        reached = interrupter.count >= nth
        if rig.manager.poison_reason() is None:
            request.close()
            for length in (2, 2 + count):
                again = rig.start(toks(0, length))
                again.check()
                again.close()
        rig.manager.shutdown()


@pytest.mark.skipif(COMPILED, reason="compiled code handles signals only where it calls interpreted code")
@pytest.mark.parametrize("call", ["fork", "commit"])
def test_an_interrupted_copy_of_a_state_keeps_no_slot(call: str) -> None:
    nth = 0
    reached = True
    while reached:
        nth += 1
        rig = Rig(hybrid(4, 8))
        request = rig.start()
        assert request.cache.resize(3, 0)
        request.write(toks(0, 3))
        interrupter = Interrupter(nth)
        sys.setprofile(interrupter)
        try:
            if call == "fork":
                rig.own(request.cache.fork())
            else:
                request.cache.commit(toks(0, 3))
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        reached = interrupter.count >= nth
        if rig.manager.poison_reason() is None:
            for cache in rig._opened:
                cache.close()
            rig.driver.synchronize()
            rig.manager.clear_reusable_blocks()
            for row in rig.manager.get_storage_statistics(GPU):
                assert row.free == row.total, f"interrupted at place {nth}"
        rig.manager.shutdown()
