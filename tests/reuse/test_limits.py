"""Limits on one match, at create and probe alike, and matches that are kept until the admission succeeds."""

from __future__ import annotations

import random

import pytest

from kv_cache_manager_v2 import BAD_PAGE_INDEX, ConfigError, LogicError, MatchLimits, ReuseScope
from tests.support.engine import Token
from tests.support.inside import drop, page_of, tree_blocks
from tests.support.models import Kind, hybrid, small
from tests.support.rig import Rig, toks


def limited(rig: Rig, tokens: list[Token], limits: MatchLimits) -> int:
    """What a cache created with these limits reuses; probe and `find_reuse` say the same."""
    cache = rig.own(rig.manager.create_kv_cache(None, tokens, limits=limits))
    count = cache.num_committed_tokens
    assert rig.manager.probe_reuse(None, tokens, limits=limits) == count
    assert rig.manager.find_reuse(None, tokens, limits).num_tokens == count
    assert (
        cache._get_num_reusable_tokens_before_pruning()
        == rig.manager.create_kv_cache(None, tokens)._get_num_reusable_tokens_before_pruning()
    )
    cache.close()
    return count


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kinds", [("full",), ("full", (6, 0)), ((5, 4),)])
def test_limited_matches_are_those_of_shorter_prompts(kinds: tuple[Kind, ...]) -> None:
    """At most n tokens: as a prompt of n tokens. Exactly n: if a prompt of n tokens is reusable. Whole blocks: the longest such."""
    draw = random.Random(11)
    with Rig(small(48, kinds=kinds), engine=False) as rig:
        for _ in range(12):
            cache = rig.start().cache
            tokens: list[Token] = [draw.randrange(2) for _ in range(draw.randrange(1, 14))]
            for beg in range(0, len(tokens), 3):
                assert cache.resize(len(tokens[: beg + 3]))
                cache.commit(tokens[beg : beg + 3])
            cache.close()
        for _ in range(12):
            prompt: list[Token] = [draw.randrange(2) for _ in range(14)]
            reusable = [rig.probe(prompt[:n]) for n in range(15)]
            for n in range(15):
                assert limited(rig, prompt, MatchLimits(max_tokens=n)) == reusable[n]
                assert limited(rig, prompt, MatchLimits(exact_tokens=n)) == (n if reusable[n] == n else 0)
            whole = max(n for n in range(0, 15, 4) if reusable[n] == n)
            assert limited(rig, prompt, MatchLimits(whole_blocks=True)) == whole


def test_a_recurrent_match_of_exactly_n_tokens_needs_a_snapshot_there() -> None:
    with Rig(hybrid(8, 16)) as rig:
        rig.seed(toks(0, 12), chunk=6)
        assert limited(rig, toks(0, 12), MatchLimits(max_tokens=11)) == 6
        assert limited(rig, toks(0, 12), MatchLimits(exact_tokens=6)) == 6
        assert limited(rig, toks(0, 12), MatchLimits(exact_tokens=8)) == 0
        assert limited(rig, toks(0, 12), MatchLimits(max_tokens=11, whole_blocks=True)) == 0


def test_nothing_published_after_a_mark_is_matched() -> None:
    """Neither blocks nor the longer block that has replaced one of them."""
    with Rig(small(16)) as rig:
        rig.seed(toks(0, 6))
        mark = rig.manager.num_published_blocks
        limits = MatchLimits(published_before=mark)
        assert limited(rig, toks(0, 12), limits) == 6
        rig.extend(toks(0, 12))
        assert rig.probe(toks(0, 12)) == 12
        assert limited(rig, toks(0, 12), limits) == 4
        assert limited(rig, toks(0, 12), MatchLimits(published_before=rig.manager.num_published_blocks)) == 12
        assert limited(rig, toks(0, 12), MatchLimits(published_before=0)) == 0


def test_only_computed_blocks() -> None:
    with Rig(small(16), engine=False) as rig:
        cache = rig.start().cache
        assert cache.resize(12)
        cache.commit(toks(0, 4))
        cache.commit_ahead(toks(4, 12))
        assert rig.probe(toks(0, 12)) == 12
        assert limited(rig, toks(0, 12), MatchLimits(computed_only=True)) == 4
        cache.history_length = 8
        assert limited(rig, toks(0, 12), MatchLimits(computed_only=True)) == 8


def test_wrong_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        MatchLimits(max_tokens=3, exact_tokens=3)
    with pytest.raises(ConfigError, match="max_tokens"):
        MatchLimits(max_tokens=-1)
    with pytest.raises(ConfigError, match="whole_blocks"):
        MatchLimits(whole_blocks=1)  # type: ignore[arg-type]


# --- matches that are kept


def test_an_admission_that_is_tried_again_searches_once() -> None:
    """The engine asks, has no room, and tries again later: the match is as good as before while the tree is the same."""
    with Rig(small(8)) as rig:
        rig.seed(toks(0, 8))
        busy = rig.take(6)
        found = rig.manager.find_reuse(None, toks(0, 10), MatchLimits(max_tokens=7))
        before = rig.manager.shared.tree.num_searches
        for _ in range(3):
            cache = rig.own(rig.manager.create_kv_cache(reuse_match=found))
            assert cache.num_committed_tokens == found.num_tokens == 7
            assert not cache.resume(rig.stream)
            cache.close()
        assert rig.manager.shared.tree.num_searches == before
        busy.close()
        cache = rig.own(rig.manager.create_kv_cache(reuse_match=found))
        assert cache.resume(rig.stream)
        assert cache.committed_tokens == toks(0, 7)


def test_a_match_is_searched_again_once_the_tree_has_changed() -> None:
    """More is cached, or less: the cache has what there is now."""
    with Rig(small(8)) as rig:
        rig.seed(toks(0, 4))
        found = rig.manager.find_reuse(ReuseScope(), toks(0, 10))
        assert (found.num_tokens, found.is_current) == (4, True)
        rig.extend(toks(0, 8))
        assert not found.is_current
        with pytest.raises(LogicError, match="find it again"):
            found.get_gpu_page_indices(0)
        assert "out of date" in repr(found)
        assert rig.own(rig.manager.create_kv_cache(reuse_match=found)).num_committed_tokens == 8
        assert (found.num_tokens, found.is_current) == (8, True)
        drop(rig.manager, page_of(tree_blocks(rig.manager, toks(0, 8))[1], 0))
        assert rig.own(rig.manager.create_kv_cache(reuse_match=found)).num_committed_tokens == 4


def test_page_indices_of_a_match_are_known_before_anything_is_taken() -> None:
    """And of a SUSPENDED cache: those that it has after its resume. Blocks out of the window and pages on the host have none."""
    with Rig(small(16, kinds=("full", (4, 0)), host_slots=16)) as rig:
        rig.seed(toks(0, 16), chunk=4)
        found = rig.manager.find_reuse(None, toks(0, 16))
        cache = rig.create(toks(0, 16))
        for layer in (0, 1):
            known = found.get_gpu_page_indices(layer)
            assert cache.get_gpu_page_indices(layer) == known
            assert known[0] == BAD_PAGE_INDEX if layer else known[0] != BAD_PAGE_INDEX
        before = [cache.get_gpu_page_indices(layer) for layer in (0, 1)]
        assert cache.resume(rig.stream)
        assert [rig.indices(cache, layer) for layer in (0, 1)] == before
        assert [cache.get_gpu_page_indices(layer) for layer in (0, 1)] == before
        cache.suspend()
        rig.take(8).close()
        assert set(cache.get_gpu_page_indices(0)) == {BAD_PAGE_INDEX}
        for bad in (-1, 2):
            with pytest.raises(ConfigError, match="layer group"):
                rig.manager.find_reuse(None, []).get_gpu_page_indices(bad)


def test_a_match_stands_for_scope_tokens_and_limits() -> None:
    with Rig(small(8), engine=False) as rig, Rig(small(8), engine=False) as other:
        found = rig.manager.find_reuse(None, toks(0, 4))
        with pytest.raises(ConfigError, match="omit them"):
            rig.manager.create_kv_cache(None, toks(0, 4), reuse_match=found)
        with pytest.raises(ConfigError, match="another manager"):
            other.manager.create_kv_cache(reuse_match=found)
