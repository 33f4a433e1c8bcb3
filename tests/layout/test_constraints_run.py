"""A declared batch runs: with exactly the slots of its floors, all of its requests are resumed at once, in any order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2 import BatchDesc, GpuCacheTierConfig, KVCacheDesc, KVCacheManagerConfig
from kv_cache_manager_v2.config import LayerConfig
from kv_cache_manager_v2.layout.batches import batch_slots
from kv_cache_manager_v2.layout.pools import build_layout
from kv_cache_manager_v2.layout.sizing import exact_fraction, min_quota, min_slots, size_levels, structural_slots
from tests.support.engine import Token
from tests.support.models import GRAIN, Kind, attention, model, ssm
from tests.support.rig import Rig, toks

B = 4  # tokens a block
STEP = 512  # bytes by which slots differ, so that each kind has a pool group of its own

Shape = tuple[int, int]  # capacity, history


def exactly(
    kinds: list[Kind],
    shapes: list[Shape],
    prompt: int,
    max_util: float,
    *,
    apart: bool = True,
    partial: bool = True,
    backoff: int = 0,
) -> KVCacheManagerConfig:
    """A layer of each kind, a slot of which takes a grain: a GPU that has the floors of this batch, and not a slot more."""
    layers: list[LayerConfig] = []
    for number, kind in enumerate(kinds):
        size = GRAIN - STEP * number if apart else GRAIN
        if kind == "ssm":
            layers.append(ssm(number, size))
        elif isinstance(kind, tuple):
            layers.append(attention(number, size, window=kind[0], sink=kind[1]))
        else:
            layers.append(attention(number, size))
    batch = BatchDesc([KVCacheDesc(*shape) for shape in shapes], prompt)
    config = model(
        layers, tokens_per_block=B, constraints=[batch], max_util=max_util, partial=partial, backoff=backoff, min_snapshot=True
    )
    layout = build_layout(config)
    floors = min_slots(layout, config)
    config = replace(config, cache_tiers=[GpuCacheTierConfig(min_quota(layout.slot_sizes, floors, GRAIN))])
    assert size_levels(layout, config)[0].slots == floors
    return config


def tokens_of(number: int, shape: Shape, prompt: list[Token]) -> list[Token]:
    """What a request of this shape is asked for: the common prompt, and what is its own; its last token is to be computed."""
    tokens = [*prompt, *toks(1000 * (number + 1), 1000 * (number + 1) + max(1, shape[0] - len(prompt)))]
    return tokens[: max(0, shape[0] - 1)]


def run(config: KVCacheManagerConfig, order: list[int], grow_last: bool, again: bool) -> None:
    """Create all requests, resume them in this order, and bring each to its shape: at once, or when all are resumed. Then suspend
    each in turn, and resume it."""
    (batch,) = config.constraints
    shapes = [(desc.capacity, desc.history_length) for desc in batch.kv_caches]
    with Rig(config, engine=False) as rig:
        prompt = toks(0, batch.system_prompt_length)
        seed = rig.open()
        for beg in range(0, len(prompt), B):
            assert seed.resize(min(beg + B, len(prompt))), seed.last_shortage
            seed.commit(prompt[beg : beg + B])
        seed.close()
        caches = [rig.create(tokens_of(number, shape, prompt)) for number, shape in enumerate(shapes)]

        def grow(number: int) -> None:
            capacity, history = shapes[number]
            cache = caches[number]
            cache.stop_committing()
            assert cache.resize(capacity, max(history, cache.history_length)), cache.last_shortage

        for number in order:
            assert caches[number].resume(rig.stream), (number, caches[number].last_shortage)
            if not grow_last:
                grow(number)
        for number in order:
            if grow_last:
                grow(number)
        for number in order if again else []:
            caches[number].suspend()
            assert caches[number].resume(rig.stream), (number, caches[number].last_shortage)
            assert caches[number].resize(shapes[number][0]), caches[number].last_shortage
        for cache in caches:
            cache.close()


# a window of one token needs no page of a whole block, so that nothing is cached of a prompt that ends with one
KINDS = st.lists(st.one_of(st.just("full"), st.tuples(st.integers(2, 9), st.sampled_from([0, 3, 8]))), min_size=1, max_size=2)
SHAPES = st.lists(st.tuples(st.integers(0, 14), st.integers(0, 24)), min_size=1, max_size=4)


@given(KINDS, st.booleans(), SHAPES, st.integers(0, 14), st.sampled_from([1.0, 0.97, 0.6]), st.booleans(), st.data())
def test_a_constraint_runs_as_declared(
    kinds: list[Kind],
    recurrent: bool,
    lengths: list[tuple[int, int]],
    prompt: int,
    max_util: float,
    grow_last: bool,
    data: st.DataObject,
) -> None:
    """Whatever layers the model has, wherever the common prompt ends, whichever request comes last."""
    shapes = [(prompt + more, min(history, prompt + more)) for more, history in lengths if prompt + more > 0]
    if recurrent:
        kinds = [*kinds, "ssm"]
    config = exactly(
        kinds,
        shapes,
        prompt,
        max_util,
        apart=data.draw(st.booleans()),
        partial=recurrent or data.draw(st.booleans()),
        backoff=0 if recurrent else data.draw(st.sampled_from([0, 0, 1, 5])),
    )
    run(config, data.draw(st.permutations(range(len(shapes)))), grow_last, True)


@pytest.mark.parametrize("max_util", [1.0, 0.97])
@pytest.mark.parametrize("grow_last", [False, True])
@pytest.mark.parametrize("prompt", [7, 8])
def test_who_is_resumed_last_has_room_for_a_copy_of_the_state(prompt: int, grow_last: bool, max_util: float) -> None:
    """Three requests with recurrent state behind a common prompt: the snapshot that all of them copy takes one slot more."""
    config = exactly(["full", "ssm"], [(20, 19)] * 3, prompt, max_util)
    layout = build_layout(config)
    assert min_slots(layout, config)[1] == 4
    run(config, [0, 1, 2], grow_last, True)


def test_a_block_that_all_copy_takes_a_slot_more_only_where_it_must() -> None:
    """The prompt's last, partial block is there once more than it is copied; a request of several blocks has room for that."""
    for capacity, floor in ((8, 1 + 3 + 1), (9, 1 + 3 * 2), (20, 1 + 3 * 4)):
        config = exactly(["full"], [(capacity, 0)] * 3, 7, 1.0)
        assert min_slots(build_layout(config), config) == [floor]


@given(KINDS, st.booleans(), SHAPES, st.sampled_from([1.0, 0.97, 0.6]))
def test_without_a_common_prompt_the_floors_are_the_batch(
    kinds: list[Kind], recurrent: bool, lengths: list[tuple[int, int]], max_util: float
) -> None:
    """Nothing is copied then: only the headroom of the gate is added to what the batch takes, and what one request always needs."""
    shapes = [(capacity, min(history, capacity)) for capacity, history in lengths]
    config = exactly([*kinds, "ssm"] if recurrent else kinds, shapes, 0, max_util)
    layout = build_layout(config)
    least = structural_slots(layout)
    numerator, denominator = exact_fraction(max_util)
    batch = [-(-count * denominator // numerator) for count in batch_slots(layout, config.constraints[0])]
    assert min_slots(layout, config) == [max(pair) for pair in zip(least, batch, strict=True)]
