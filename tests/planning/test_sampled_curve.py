"""The curve of sampled blocks against the exact one, and its order of touches against a plain list."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from kv_cache_manager_v2.planning.hit_curve import HitCurve
from kv_cache_manager_v2.planning.lru_curve import LruCurve
from kv_cache_manager_v2.planning.prefix_tree import PrefixTree
from kv_cache_manager_v2.planning.sampled_curve import BUCKETS, HASH_BITS, KEY_BITS, MOST_BLOCKS, SampledCurve, SampledPath
from kv_cache_manager_v2.planning.sampled_stack import NEVER, SampledStack

SIZE = 16  # tokens of a block


def conversations(seed: int, count: int, shared: int = 1) -> list[list[int]]:
    """Prompts of block ids: conversations that go on at random, after the same `shared` blocks."""
    chooser = random.Random(seed)
    following = shared
    histories: list[list[int]] = []
    prompts: list[list[int]] = []
    for _number in range(count):
        recent = histories[-2000:]
        prompt = list(chooser.choice(recent)) if recent and chooser.random() < 0.6 else list(range(shared))
        for _block in range(chooser.randint(1, 8)):
            prompt.append(following)
            following += 1
        histories.append(prompt)
        prompts.append(prompt)
    return prompts


def exact(prompts: list[list[int]]) -> HitCurve:
    tree = PrefixTree(1)
    curve = LruCurve(len(prompts), SIZE, 1, 1)
    for prompt in prompts:
        curve.add(tree.path(prompt, len(prompt)), tree.size, len(prompt) * SIZE, True)
    return curve.curve()


def sampled(curve: SampledCurve, prompts: list[list[int]], stem: int = 0) -> None:
    """Look up and use the prompts. An id's hash is random, and its identity is the id."""
    chooser = random.Random(6)
    marks = [chooser.randrange(1, 1 << HASH_BITS) for _block in range(1 + max([max(prompt) for prompt in prompts]))]
    for prompt in prompts:
        path = SampledPath()
        path.stem, path.stem_key = stem, 1
        for ordinal, block in enumerate(prompt):
            mark = marks[block]
            if mark < curve.threshold:
                path.keys.append(mark << KEY_BITS | block + 2)
                path.ordinals.append(ordinal)
        curve.look_up(path, len(prompt) * SIZE)
        curve.touch(path)


def mean_error(curve: HitCurve, right: HitCurve) -> float:
    """Over 40 sizes that are spread evenly on a logarithmic scale of three powers of ten up to the ceiling."""
    sizes = [max(1, round(right.ceiling_size / 10 ** (step * 3 / 39))) for step in range(40)]
    return sum(abs(curve.ratio(size) - right.ratio(size)) for size in sizes) / len(sizes)


def test_at_rate_1_the_curve_is_exact_at_small_sizes_and_nearly_so_at_others() -> None:
    prompts = conversations(1, 200, 3)
    curve, right = SampledCurve(SIZE, 1.0, 1 << 20), exact(prompts)
    sampled(curve, prompts)
    found = curve.curve(0, 7)
    assert found.exact
    assert (found.total_tokens, found.ceiling, found.block_bytes) == (right.total_tokens, right.ceiling, 7)
    for size in range(256):
        assert found.hits(size) == right.hits(size), size
    assert mean_error(found, right) < 0.0005


@pytest.mark.parametrize("shared", [1, 40])
def test_a_tenth_of_the_blocks_gives_every_ratio_to_half_a_percent(shared: int) -> None:
    """Although all conversations begin with the same blocks."""
    prompts = conversations(2, 6000, shared)
    curve = SampledCurve(SIZE, 0.1, 1 << 20)
    sampled(curve, prompts, shared)
    assert not curve.curve().exact
    assert mean_error(curve.curve(), exact(prompts)) < 0.005


def test_a_full_sample_forgets_blocks_out_of_reach_before_its_rate_falls() -> None:
    prompts = conversations(3, 1500)
    near, far = SampledCurve(SIZE, 0.5, 800, 600), SampledCurve(SIZE, 0.5, 1 << 20, 600)
    for curve in (near, far):
        sampled(curve, prompts, 1)
    assert near.rate == 0.5
    assert far.rate < 0.2
    right = exact(prompts)
    for size in (50, 200, 800):
        assert abs(near.curve().ratio(size) - right.ratio(size)) < 0.02
        assert abs(far.curve().ratio(size) - right.ratio(size)) < 0.05


def test_the_sample_takes_a_megabyte_at_most() -> None:
    """An eighth of the blocks: an eighth of a megabyte, and the counts by distance."""
    chooser = random.Random(4)
    tracemalloc.start()
    curve = SampledCurve(SIZE, 1.0, 1 << 40, MOST_BLOCKS // 8)
    for _number in range(12):
        path = SampledPath()
        path.keys = [chooser.randrange(1, curve.threshold) << KEY_BITS | chooser.getrandbits(KEY_BITS) for _key in range(200)]
        path.ordinals = list(range(200))
        curve.look_up(path, 200 * SIZE)
        curve.touch(path)
    _now, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert curve.rate < 0.8, "the sample was full"
    counts = 2 * 8 * BUCKETS
    assert 8 * (most - counts) + counts < 1 << 20


def test_a_restart_forgets_counts_and_no_block() -> None:
    prompts = conversations(5, 100)
    curve = SampledCurve(SIZE, 1.0, 1 << 20)
    sampled(curve, prompts)
    curve.restart()
    assert (curve.curve().ceiling, curve.curve().total_tokens) == (0, 0)
    sampled(curve, prompts[-1:])
    assert curve.curve().ceiling == curve.curve().total_tokens == len(prompts[-1]) * SIZE


def test_the_curve_of_a_colder_tier_begins_where_the_warmer_ones_end() -> None:
    whole = HitCurve([0, 10, 20, 100], [0, 50, 80, 100], 200, False, 3)
    colder = whole.after(15)
    assert [colder.hits(size) for size in (0, 5, 85, 200)] == [0, 15, 35, 35]
    assert (colder.sizes[0], colder.block_bytes, colder.ratios[-1]) == (0, 3, 0.175)
    assert whole.after(100).ceiling == 0


@pytest.mark.parametrize("seed", range(3))
def test_the_stack_counts_what_a_plain_list_counts(seed: int) -> None:
    """Touches, and removals by key and by age."""
    chooser = random.Random(seed)
    stack = SampledStack(60)
    model: dict[int, int] = {}  # key -> number of its last touch, which the stack may renumber
    for number in range(600):
        base = chooser.randrange(8)
        keys = [1 + base * 10 + part for part in range(chooser.randint(0, 6))]
        stack.touch(keys)
        model.update(dict.fromkeys(keys, number))
        if number % 50 == 49:
            limit, count = chooser.choice([1 << 60, 61]), chooser.randint(0, 60)
            oldest = stack.oldest_within(count)
            kept = {key: touch for key, touch in model.items() if key < limit and stack.find(key) >= oldest}
            assert all(sum(other > touch for other in model.values()) <= count for key, touch in kept.items())
            stack.keep(limit, oldest)
            model = kept
        assert stack.num_blocks == len(model)
        for key in range(1, 90):
            touch = stack.find(key)
            assert (touch == NEVER) == (key not in model)
            if touch != NEVER:
                assert stack.touched_after(touch) == sum(other > model[key] for other in model.values())
