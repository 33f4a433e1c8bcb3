"""A device that refuses a wait while pages are being added: nothing was added, no slot is lost."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import KVCacheError
from tests.support.rig import Kind, Rig, small


@pytest.mark.parametrize("kinds", [("full",), ("full", (8, 0)), ("full", (8, 0), (12, 0), (16, 0))])
@pytest.mark.parametrize("history", [None, 0], ids=["quick", "long"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_growth_that_the_device_refuses_adds_nothing(kinds: tuple[Kind, ...], history: int | None, nth: int) -> None:
    """The free slots were used last on other, busy streams, one after the other, so that growing has to wait for each of these."""
    with Rig(small(8 * len(kinds), kinds=kinds), schedule="random", seed=1, engine=False) as rig:
        streams = [rig.driver.create_stream() for _number in range(4)]
        gates = [rig.driver.gate(stream) for stream in streams]
        others = [rig.manager.create_kv_cache() for _stream in streams]
        for other, stream in zip(others, streams, strict=True):
            assert other.resume(stream)
            assert other.resize(8)
        for other in others:
            other.close()
        cache = rig.create()
        assert cache.resume(rig.stream)
        free = rig.manager.get_storage_statistics()[0].free
        rig.driver.fail("wait_event", nth)
        with pytest.raises(KVCacheError, match="injected"):
            cache.resize(32, history)
        assert (cache.capacity, cache.num_blocks) == (0, 0)
        assert rig.manager.get_storage_statistics()[0].free == free
        rig.manager.check_invariants()
        assert cache.resize(32, history)
        rig.manager.check_invariants()
        cache.close()
        for gate in gates:
            gate.open()
        for stream in streams:
            rig.driver.destroy_stream(stream)
