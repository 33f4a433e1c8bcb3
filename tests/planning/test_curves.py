"""Hit curves against plain lists and exhaustive search, at every size."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import combinations

import pytest

from kv_cache_manager_v2.planning.best_possible import BestCache, NextUses
from kv_cache_manager_v2.planning.hit_curve import HitCurve
from kv_cache_manager_v2.planning.lru_curve import LruCurve
from kv_cache_manager_v2.planning.page_cache import LayerMix, PageCache
from kv_cache_manager_v2.planning.prefix_tree import PrefixTree
from tests.cli.helpers import Prompt, infinite_cache_hits, lru_cache_hits, make_prompts

ID = 32  # tokens of an id
LONGEST = 12  # ids of a prompt


def curve_of(prompts: Sequence[Prompt], tokens_per_block: int, uncounted: int = 0) -> HitCurve:
    """The curve, with an id as a unit where it is whole blocks, else the units that a block is made of."""
    whole = ID % tokens_per_block == 0
    tree = PrefixTree(1 if whole else 2)
    per_id, per_block = (ID // tokens_per_block, 1) if whole else (1, tokens_per_block * 2 // ID)
    unit_tokens = ID if whole else ID // 2
    curve = LruCurve(len(prompts), tokens_per_block, per_id, per_block)
    for number, prompt in enumerate(prompts):
        path = tree.path(list(prompt.ids), -(-prompt.length // unit_tokens))
        curve.add(path, tree.size, prompt.length, number >= uncounted)
    return curve.curve()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("tokens_per_block", "step"), [(8, 29), (32, 1)])
def test_each_size_finds_what_an_lru_list_of_so_many_blocks_finds(seed: int, tokens_per_block: int, step: int) -> None:
    prompts = make_prompts(seed, 60, ID, whole_blocks=True)
    curve = curve_of(prompts, tokens_per_block, 20)
    least = LONGEST * ID // tokens_per_block
    assert curve.total_tokens == sum(prompt.length for prompt in prompts[20:])
    for size in [*range(least, curve.ceiling_size, step), curve.ceiling_size]:
        assert curve.hits(size) == sum(lru_cache_hits(prompts, ID, tokens_per_block, size)[20:]), size


@pytest.mark.parametrize("tokens_per_block", [8, 16, 32, 48, 64])
def test_the_ceiling_is_what_an_infinite_cache_finds(tokens_per_block: int) -> None:
    """Beginnings of blocks included, for blocks longer than an id, and shorter by no whole number."""
    prompts = make_prompts(5, 60, ID)
    curve = curve_of(prompts, tokens_per_block)
    assert curve.ceiling == sum(infinite_cache_hits(prompts, ID))
    assert curve.hits(curve.ceiling_size) == curve.hits(1 << 60) == curve.ceiling
    assert curve.hits(curve.ceiling_size - 1) < curve.ceiling


def test_the_size_for_hits_is_the_smallest_that_has_them() -> None:
    curve = curve_of(make_prompts(6, 60, ID), 8)
    for hits in range(0, curve.ceiling + 1, 7):
        size = curve.size_for(hits)
        assert size is not None
        assert curve.hits(size) >= hits
        assert size == 0 or curve.hits(size - 1) < hits
    assert curve.size_for(curve.ceiling + 1) is None


def test_the_knee_is_where_hits_run_ahead_of_memory_by_most() -> None:
    curve = HitCurve([0, 10, 20, 100], [0, 50, 80, 100], 200, True)
    assert curve.knee() == 20
    assert (curve.ratio(20), curve.ratio(60), curve.size_for(81)) == (0.4, 0.45, 24)
    assert HitCurve([0, 10], [0, 50], 200, True).knee() == 10


def test_an_empty_curve_finds_nothing() -> None:
    curve = curve_of([Prompt(40, (1, 2), 0), Prompt(40, (3, 4), 0)], 32)
    assert (curve.ceiling, curve.ceiling_size, curve.knee(), curve.ratio(5)) == (0, 0, 0, 0.0)


def test_equal_ids_after_different_prefixes_are_different_blocks() -> None:
    tree = PrefixTree(2)
    first, second, third = tree.path([1, 7], 4), tree.path([2, 7], 4), tree.path([2, 7, 1], 5)
    assert not set(first) & set(second)
    assert third[:4] == second
    assert len(third) == 5
    assert tree.path([1, 7], 4) == first


def most_hits(paths: Sequence[Sequence[int]], size: int) -> int:
    """Exhaustive: before each request, keep any blocks that leave room for it, none without those before it."""
    parent = {prefix: before for path in paths for before, prefix in zip([None, *path[:-1]], path, strict=True)}

    @cache
    def best(request: int, cached: frozenset[int]) -> int:
        if request == len(paths):
            return 0
        path = paths[request]
        found = next((at for at, prefix in enumerate(path) if prefix not in cached), len(path))
        others = sorted(cached - set(path))
        options = (
            frozenset(kept).union(path)
            for kept in combinations(others, min(len(others), size - len(path)))
            if all(parent[prefix] is None or parent[prefix] in kept or parent[prefix] in path for prefix in kept)
        )
        return found + max(best(request + 1, option) for option in options)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(40))
def test_the_best_order_finds_as_much_as_exhaustive_search(seed: int) -> None:
    chooser = random.Random(seed)
    tree = PrefixTree(1)
    paths = [tree.path([chooser.randrange(2) for _block in range(chooser.randint(1, 3))], 3) for _request in range(8)]
    uses = NextUses(paths, tree.size)
    for size in (3, 4, 5):
        cached = BestCache(uses, size)
        assert sum(cached.run(request) for request in range(8)) == most_hits(paths, size)


def test_a_request_longer_than_the_cache_keeps_its_first_blocks_in_the_best_order() -> None:
    cached = BestCache(NextUses([[0, 1, 2, 3], [0, 1, 2, 3]], 4), 3)
    assert [cached.run(0), cached.run(1)] == [0, 3]


@pytest.mark.parametrize("tokens_per_block", [16, 32])
def test_the_simulation_of_full_attention_is_on_the_exact_curve(tokens_per_block: int) -> None:
    prompts = make_prompts(8, 80, ID, whole_blocks=True)
    curve = curve_of(prompts, tokens_per_block)
    tree = PrefixTree(ID // tokens_per_block)
    paths = [tree.path(list(prompt.ids), prompt.length // tokens_per_block) for prompt in prompts]
    for size in range(LONGEST * ID // tokens_per_block, curve.ceiling_size, 5):
        simulated = PageCache(LayerMix(True, None, 0, None), tree.size, tokens_per_block, 1, size)
        hits = [simulated.run(path, prompt.length) for path, prompt in zip(paths, prompts, strict=True)]
        assert sum(hits) == curve.hits(size)


def test_the_simulation_skips_what_does_not_fit() -> None:
    simulated = PageCache(LayerMix(True, None, 0, None), 5, 1, 1, 3)
    assert [simulated.run([0, 1], 2), simulated.run([0, 1, 2, 3, 4], 5), simulated.run([0, 1], 2)] == [0, -1, 2]
