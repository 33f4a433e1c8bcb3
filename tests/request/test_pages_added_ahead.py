"""Pages that a cached block lacks, added to it by a commit ahead: who matches them, and what remains if they are taken back."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import LogicError, MatchLimits
from tests.request.test_commit_ahead import FULL_AND_WINDOW, queue, scheduled
from tests.support.engine import Token
from tests.support.models import small
from tests.support.rig import Rig, toks
from tests.support.tree_rig import Notes


def seed_without(rig: Rig, tokens: list[Token], ordinals: list[int]) -> None:
    """Leave a prompt cached, without the window's pages of some blocks."""
    request = rig.start()
    pages: list[int] = []
    for end in range(4, len(tokens) + 1, 4):
        assert request.advance(tokens[end - 4 : end])
        pages.append(rig.indices(request.cache, 1)[-1])
    request.close()
    assert rig.manager.drop_cached_pages(rig.group(1), [pages[ordinal] for ordinal in ordinals]) == len(ordinals)


@pytest.mark.parametrize("schedule", ["eager", "threads", "random"])
def test_pages_that_a_cached_block_lacks_are_published_ahead(schedule: str) -> None:
    """A request that computes them again shares them within the step. The listener hears of them alone, once computed."""
    notes = Notes()
    with Rig(small(32, kinds=FULL_AND_WINDOW), schedule, 5, events=notes) as rig:
        seed_without(rig, toks(0, 16), [0, 1, 2, 3])
        assert rig.probe(toks(0, 17)) == 0
        notes.take()
        first = scheduled(rig, toks(0, 16))
        assert (rig.probe(toks(0, 17)), rig.probe(toks(0, 7))) == (16, 4), "nothing is copied from an uncomputed page"
        assert rig.manager.probe_reuse(None, toks(0, 17), limits=MatchLimits(computed_only=True)) == 0
        second = rig.request(toks(0, 17))
        with pytest.raises(LogicError, match="not computed"):
            second.cache.resume(rig.new_stream())
        assert second.resume()
        assert rig.indices(second.cache, 1)[3] == rig.indices(first.cache, 1)[3]
        rig.manager.check_invariants()
        queue(first, toks(0, 16))
        assert second.advance(toks(16, 18))
        assert notes.take() == []
        first.cache.history_length = 16
        assert notes.take() == [("stored", toks(at, at + 4), 1, True) for at in range(0, 16, 4)]
        first.close()
        second.close()
        third = rig.start(toks(0, 18))
        assert third.tokens == toks(0, 18)
        third.check()


def test_only_requests_that_use_pages_added_ahead_count_on_the_publisher() -> None:
    """The others use any stream, and stay when the pages are taken back; the block keeps the pages that it had."""
    notes = Notes()
    with Rig(small(32, kinds=FULL_AND_WINDOW), events=notes) as rig:
        seed_without(rig, toks(0, 16), [1])
        first = scheduled(rig, toks(0, 16))
        assert rig.manager.probe_reuse(None, toks(0, 17), limits=MatchLimits(computed_only=True)) == 16
        assert rig.manager.probe_reuse(None, toks(0, 8), limits=MatchLimits(computed_only=True)) == 4
        other = rig.request(toks(0, 17))
        assert other.resume(rig.new_stream())
        assert rig.probe(toks(0, 8)) == 8
        notes.take()
        first.close()
        assert (rig.probe(toks(0, 8)), rig.probe(toks(0, 17))) == (4, 16)
        assert notes.take() == []
        assert other.advance(toks(16, 20))
        other.check()


def test_what_was_computed_on_pages_that_are_taken_back_goes_with_them() -> None:
    """Also if the request that has committed it is closed."""
    with Rig(small(32, kinds=FULL_AND_WINDOW)) as rig:
        seed_without(rig, toks(0, 16), [3])
        first = scheduled(rig, toks(0, 16))
        second = rig.start(toks(0, 17))
        assert len(second.tokens) == 16
        assert second.cache.resize(20)
        second.cache.commit(toks(16, 20))
        second.close()
        assert rig.probe(toks(0, 21)) == 20
        first.close()
        assert rig.probe(toks(0, 21)) == 12
