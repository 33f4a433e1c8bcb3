"""The quick form of a decode step leaves the request as its long form does, also after a shortage or with scratch slots."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import ConfigError, LogicError, commit_batch, resize_batch
from tests.support.models import GRAIN, MIB, attention, model, small
from tests.support.rig import Rig, toks


@pytest.mark.parametrize("form", ["quick", "with a history", "batch"])
def test_a_resize_that_is_done_has_no_shortage(form: str) -> None:
    """`last_shortage` is that of the latest resize: none, also where that one stays inside the block."""
    with Rig(small(4)) as rig:
        cache = rig.open()
        assert cache.resize(2)
        assert not cache.resize(20)
        assert cache.last_shortage is not None
        if form == "quick":
            assert cache.resize(3)
        elif form == "batch":
            assert resize_batch([cache], [3]) == 1
        else:
            assert cache.resize(3, 0)
        assert cache.last_shortage is None


@pytest.mark.parametrize("form", ["list", "tuple", "batch"])
def test_a_committed_token_gives_scratch_back(form: str) -> None:
    """A token that a long step has committed ends its block's turn in scratch, however it is committed: the range begins after the
    block in which the history ends, and the slot is free."""
    config = model([attention(layer, GRAIN // 64, window=32) for layer in range(2)], gpu=4 * MIB, scratch_rewind=0)
    with Rig(config) as rig:
        group = rig.group(0)
        cache = rig.open()
        assert cache.resize(320)
        before = rig.counts().free
        first = cache.get_scratch_desc(group)
        assert first is not None
        if form == "list":
            cache.commit([1])
        elif form == "batch":
            commit_batch([cache], [1])
        else:
            cache.commit((1,))
        after = cache.get_scratch_desc(group)
        assert after is not None
        assert (first.range.beg, after.range.beg) == (0, 1)
        assert after.range.end == first.range.end
        assert rig.counts().free == before + 1
        assert len(after.slot_ids) == len(first.slot_ids) - 1


@pytest.mark.parametrize("form", [list, tuple])
def test_a_commit_releases_a_page_that_was_held_until_it(form: type) -> None:
    """The history is computed before any token is committed: pages outside the window are held until their block is committed."""
    with Rig(small(8, kinds=[(4, 0)])) as rig:
        cache = rig.open()
        assert cache.resize(12)
        assert cache.resize(12, 12)
        for token in range(8):
            assert rig.counts().unavailable == 3 - token // 4
            cache.commit(form([token]))
        assert rig.counts().unavailable == 1


def test_an_empty_batch_is_done() -> None:
    assert resize_batch([], []) == 0
    commit_batch([], [])


def test_an_error_of_a_batch_says_whose_it_is() -> None:
    """Earlier requests are done; the one that failed and later ones are unchanged."""
    with Rig(small(16), engine=False) as rig:
        caches = [rig.manager.create_kv_cache(id=number) for number in (7, 8, 9)]
        for cache in caches:
            assert cache.resume(rig.stream)
        caches[1].suspend()
        with pytest.raises(LogicError, match=r"caches\[1\] \(id 8\): resize\(\) needs a cache that is ACTIVE"):
            resize_batch(caches, [4, 4, 4])
        assert [cache.capacity for cache in caches] == [4, 0, 0]
        assert caches[1].resume()
        assert resize_batch(caches, [4, 4, 4]) == 3
        with pytest.raises(ConfigError, match=r"caches\[2\] \(id 9\): committing 5 tokens"):
            commit_batch(caches, [1, [2], toks(0, 5)])
        assert [cache.num_committed_tokens for cache in caches] == [1, 1, 0]
        for cache in caches:
            cache.close()
