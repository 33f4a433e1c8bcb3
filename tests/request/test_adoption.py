"""Without adoption a request keeps its own pages, and the blocks that it has computed stay reusable."""

from __future__ import annotations

import dataclasses

import pytest

from kv_cache_manager_v2 import KVCacheManagerConfig, LogicError
from tests.support.engine import Token
from tests.support.models import Kind, small
from tests.support.rig import Request, Rig, toks
from tests.support.tree_rig import Notes


def keeping(slots: int, *, kinds: tuple[Kind, ...] = ("full",), host_slots: int = 0) -> KVCacheManagerConfig:
    """A model whose requests do not adopt."""
    return dataclasses.replace(small(slots, kinds=kinds, host_slots=host_slots), allow_seq_rebasing=False)


def computed(rig: Rig, tokens: list[Token]) -> Request:
    """A request that has computed these tokens without reuse, and committed nothing."""
    request = rig.start()
    assert request.advance(tokens, commit=False), request.cache.last_shortage
    return request


@pytest.mark.parametrize("by_cache", [False, True])
def test_page_indices_change_at_a_commit_only_with_adoption(by_cache: bool) -> None:
    """The switch of the manager is the default of its caches; a fork has that of its source."""
    with Rig(small(16) if by_cache else keeping(16)) as rig:
        first, second = computed(rig, toks(0, 8)), computed(rig, toks(0, 8))
        assert rig.manager.allow_seq_rebasing is by_cache
        assert second.cache.allow_seq_rebasing is by_cache
        second.cache.allow_seq_rebasing = False
        before = rig.indices(second.cache)
        first.cache.commit(toks(0, 8))
        second.cache.commit(toks(0, 8))
        assert rig.indices(second.cache) == before
        assert not rig.own(second.cache.fork()).allow_seq_rebasing
        third = computed(rig, toks(0, 8))
        third.cache.allow_seq_rebasing = True
        third.cache.commit(toks(0, 8))
        assert rig.indices(third.cache) == rig.indices(first.cache)


def test_the_switch_of_a_closed_cache_cannot_be_changed() -> None:
    with Rig(small(16)) as rig:
        cache = rig.create()
        cache.close()
        with pytest.raises(LogicError, match="closed"):
            cache.allow_seq_rebasing = False


def test_a_colder_page_takes_over_the_slot_without_adoption() -> None:
    """The page index stays, and the tree has one page of the block instead of two."""
    with Rig(keeping(4, host_slots=8)) as rig:
        request = computed(rig, toks(0, 8))
        rig.seed(toks(0, 8))
        filler = rig.take(2)
        before = rig.indices(request.cache)
        request.cache.commit(toks(0, 8))
        assert rig.indices(request.cache) == before
        assert sum(rig.manager.movement.taken_over) == 2
        filler.close()


def test_a_dropped_page_is_replaced_by_a_duplicate() -> None:
    """The cached pages of another request are dropped while one with the same bytes is open: later commits still enter the tree."""
    with Rig(keeping(8)) as rig:
        first, second = computed(rig, toks(0, 8)), computed(rig, toks(0, 8))
        first.cache.commit(toks(0, 8))
        second.cache.commit(toks(0, 8))
        first.close()
        rig.take(6).close()  # drops the pages of the first one
        assert sum(map(sum, rig.manager.movement.dropped)) == 2
        assert rig.probe(toks(0, 8)) == 8
        assert second.advance(toks(8, 12))
        second.close()
        third = rig.start(toks(0, 12))
        assert third.tokens == toks(0, 12)
        third.check()


def test_a_duplicate_is_forgotten_with_its_request() -> None:
    with Rig(keeping(8)) as rig:
        first, second = computed(rig, toks(0, 8)), computed(rig, toks(0, 8))
        first.cache.commit(toks(0, 8))
        second.cache.commit(toks(0, 8))
        duplicates = rig.manager.shared.tree.duplicates
        assert len(duplicates) == 2
        second.close()
        assert not duplicates
        assert rig.counts().unavailable == 2


def test_a_duplicate_that_left_its_window_holds_no_other_tokens_of_the_block() -> None:
    """A page that leaves the window while slots are short is used again for other tokens: it replaces no page any more."""
    with Rig(keeping(5, kinds=((4, 0),))) as rig:
        first, second = computed(rig, toks(0, 4)), computed(rig, toks(0, 4))
        first.cache.commit(toks(0, 4))
        second.cache.commit(toks(0, 4))
        block = rig.manager.shared.tree.find_root(first.cache.reuse_scope)
        assert block is not None
        first.close()
        for end in range(8, 25, 4):
            assert second.advance(toks(end - 4, end)), second.cache.last_shortage
        second.close()
        for tag in range(100, 500, 100):
            rig.seed(toks(tag, tag + 8))
        for tokens in (toks(0, 24), toks(0, 8), toks(0, 4)):
            request = rig.start(tokens)
            request.check()
            request.close()


def test_a_duplicate_on_another_level_moves_the_cached_page() -> None:
    """The listener learns the new level of the block's page, and of no removal."""
    notes = Notes()
    with Rig(keeping(4, host_slots=1), events=notes) as rig:
        first, second = computed(rig, toks(0, 4)), computed(rig, toks(0, 4))
        first.cache.commit(toks(0, 4))
        second.cache.commit(toks(0, 4))
        first.close()
        rig.take(3).close()
        rig.seed(toks(100, 104))
        rig.take(3).close()
        told = [note for note in notes.take() if note[1] == toks(0, 4)]
        assert told == [("stored", toks(0, 4), 0, True), ("moved", toks(0, 4), 0, 0, 1), ("moved", toks(0, 4), 0, 1, 0)]
        assert rig.probe(toks(0, 4)) == 4
