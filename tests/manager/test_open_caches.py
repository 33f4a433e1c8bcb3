"""The manager refuses to clear its cache or to shut down while a request is open."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import LogicError
from tests.support.models import small
from tests.support.rig import Rig, toks


@pytest.mark.parametrize("active", [False, True])
def test_clear_and_shutdown_wait_for_open_caches(active: bool) -> None:
    """Both raise with the call's name and the number of open caches, and change nothing; closed objects do not count, referenced
    or not."""
    with Rig(small(8, tokens_per_block=32)) as rig:
        manager = rig.manager
        rig.seed(toks(0, 64))
        caches = [rig.create(toks(0, 64)) for _ in range(3)]
        if active:
            for cache in caches:
                assert cache.resume(rig.stream)
        for call, act in (("clear_reusable_blocks()", manager.clear_reusable_blocks), ("shutdown()", manager.shutdown)):
            with pytest.raises(LogicError) as refused:
                act()
            assert isinstance(refused.value, RuntimeError)
            assert call in str(refused.value)
            assert "3 KV cache(s) still open" in str(refused.value)
            assert rig.probe(toks(0, 64)) == 64
        caches[0].close()
        with pytest.raises(LogicError, match=r"2 KV cache\(s\) still open"):
            manager.clear_reusable_blocks()
        late = rig.open(toks(0, 64))
        late.close()
        for cache in caches:
            cache.close()
            cache.close()
        manager.clear_reusable_blocks()
        assert rig.probe(toks(0, 64)) == 0
        assert rig.counts().free == 8
        assert rig.reused(toks(0, 64)) == 0


def test_a_refused_shutdown_names_the_requests_that_are_open() -> None:
    """The ids that the engine gave, the first eight of them; a cache without an id is only counted."""
    with Rig(small(8)) as rig:
        caches = [rig.create(id=number) for number in (7, 9)]
        caches.append(rig.manager.create_kv_cache())
        with pytest.raises(LogicError, match=r"3 KV cache\(s\) still open \(ids 7, 9\); close them first"):
            rig.manager.shutdown()
        caches += [rig.create(id=number) for number in range(20, 28)]
        with pytest.raises(LogicError, match=r"11 KV cache\(s\) still open \(ids 7, 9, 20, 21, 22, 23, 24, 25, \.\.\.\)"):
            rig.manager.shutdown()
        for cache in caches:
            cache.close()
