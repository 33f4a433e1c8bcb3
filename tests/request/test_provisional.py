"""Blocks committed while a load is in flight are hidden until it settles, and never replace what others have computed."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import KVCache, PageDataLostError
from tests.support.engine import Token
from tests.support.models import small
from tests.support.rig import Rig, toks


def on_disk(rig: Rig, tokens: list[Token]) -> KVCache:
    """A request for these cached tokens, whose pages are all on disk."""
    cache = rig.create(tokens)
    assert cache.num_committed_tokens == len(tokens)
    assert cache.cached_tokens_by_level == [0, 0, len(tokens)]
    return cache


def time_out(cache: KVCache) -> None:
    """Query until the load times out: the emulated device counts calls, not seconds."""
    for _ in range(1100):
        assert not cache.is_loaded


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_committed_on_a_load_is_matched_once_it_has_ended_well(fails: bool, tmp_path: object) -> None:
    """Until then it cannot match; if the load fails it leaves the tree, and the request can only be closed."""
    with Rig(small(4, host_slots=4, disk=(str(tmp_path), 8)), engine=False) as rig:
        rig.seed(toks(0, 8), chunk=4)
        rig.seed(toks(100, 116), chunk=4)
        rig.seed(toks(200, 216), chunk=4)
        cache = on_disk(rig, toks(0, 8))
        hanging = rig.driver.hang("read_file")
        assert cache.resume(rig.stream)
        assert cache.resize(12)
        cache.commit(toks(8, 12))
        assert rig.probe(toks(0, 12)) <= 8, "the new block is hidden"
        if fails:
            time_out(cache)
        hanging.open()
        rig.driver.synchronize()
        if fails:
            with pytest.raises(PageDataLostError):
                cache.resize(16)
        else:
            assert cache.resize(16)
            assert rig.probe(toks(0, 12)) == 12
        cache.close()
        assert rig.probe(toks(0, 12)) == (0 if fails else 12), "the first block could not be read"


def test_a_block_that_another_request_computed_survives_a_failed_load(tmp_path: object) -> None:
    """Windows of 8: blocks 2 and 3 stay on the GPU, 0 and 1 are read from disk by a request that commits block 2 again. The
    read fails: blocks 2 and 3 were another request's and remain, visible all the time."""
    config = small(8, kinds=((8, 0),), host_slots=8, disk=(str(tmp_path), 16))
    with Rig(config, engine=False) as rig:
        rig.seed(toks(0, 16), None, lambda ordinal, life_cycle: 90 if ordinal >= 2 else 10, 4)
        for tag in (100, 200, 300, 400):
            rig.seed(toks(tag, tag + 16), chunk=4)
        cache = on_disk(rig, toks(0, 8))
        hanging = rig.driver.hang("read_file", nth=2)  # of block 1: block 0 is out of the window by then
        assert cache.resume(rig.stream)
        assert cache.resize(12)
        cache.commit(toks(8, 12))
        assert rig.probe(toks(0, 16)) == 16
        time_out(cache)
        hanging.open()
        rig.driver.synchronize()
        with pytest.raises(PageDataLostError):
            cache.resize(16)
        cache.close()
        assert rig.probe(toks(0, 16)) == 16


@pytest.mark.parametrize("hangs", [False, True])
def test_uncertain_bytes_never_replace_good_ones(hangs: bool, tmp_path: object) -> None:
    """Windows of 8, all four blocks on disk. A request that reads blocks 0 and 1 commits block 2 again: its GPU page is taken
    over by the cold block, unless the load under it may yet fail."""
    config = small(8, kinds=((8, 0),), host_slots=8, disk=(str(tmp_path), 16))
    with Rig(config, engine=False) as rig:
        rig.seed(toks(0, 16), chunk=4)
        for tag in (100, 200, 300, 400):
            rig.seed(toks(tag, tag + 16), chunk=4)
        cache = on_disk(rig, toks(0, 8))
        hanging = rig.driver.hang("read_file", nth=2) if hangs else None
        assert cache.resume(rig.stream)
        assert cache.resize(12)
        cache.commit(toks(8, 12))
        assert sum(rig.manager.movement.taken_over) == (0 if hangs else 1)
        if hanging is not None:
            time_out(cache)
            hanging.open()
            rig.driver.synchronize()
        cache.close()
        assert rig.probe(toks(0, 16)) == 16
