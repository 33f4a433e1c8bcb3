"""A device that refuses a wait while blocks are committed: nothing is committed, and the same commit can be tried again."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import KVCacheError
from tests.support.rig import Rig, small, toks


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_commit_that_the_device_refuses_commits_nothing(nth: int) -> None:
    """The blocks are another request's already, ready at different points of a stream that stands still: to adopt each of them the
    own stream has to wait once more."""
    with Rig(small(16), engine=False) as rig:
        busy = rig.new_stream()
        gate = rig.driver.gate(busy)
        other = rig.create()
        assert other.resume(busy)
        assert other.resize(12)
        for beg in (0, 4, 8):
            other.commit(toks(beg, beg + 4))
            rig.driver.launch(busy, lambda: None)
        cache = rig.create()
        assert cache.resume(rig.stream)
        assert cache.resize(16)
        cache.commit(toks(0, 2))
        rig.driver.fail("wait_event", nth)
        with pytest.raises(KVCacheError, match="injected"):
            cache.commit(toks(2, 13))
        assert (cache.num_committed_tokens, cache.committed_tokens) == (2, toks(0, 2))
        rig.manager.check_invariants()
        cache.commit(toks(2, 13))
        assert cache.committed_tokens == toks(0, 13)
        assert rig.indices(cache)[:3] == rig.indices(other)
        rig.manager.check_invariants()
        gate.open()
