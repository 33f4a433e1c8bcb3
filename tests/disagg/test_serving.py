"""Disaggregated serving: a prefill node's pages go to a decode node, buffer by buffer, page by page."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from kv_cache_manager_v2 import BufferId, GpuCacheTierConfig, HostCacheTierConfig, KVCache, LayerId
from tests.support.engine import Token
from tests.support.models import KEY, KIB, MIB, VALUE, attention, model
from tests.support.rig import Request, Rig, mixed, toks


def test_history_is_reserved_before_it_is_committed() -> None:
    """A prompt of 512: create matches nothing, resize(512, 512) reserves what its window still needs, then the commit succeeds."""
    config = model([attention(0, 4 * KIB), attention(1, 4 * KIB, window=128)], gpu=8 * MIB)
    with Rig(config) as rig:
        prompt = toks(0, 512)
        request = rig.start(prompt)
        cache = request.cache
        assert cache.num_committed_tokens == 0
        assert cache.resize(512, 512)
        assert rig.blocks_mapped(cache, 0) == list(range(16))
        assert rig.blocks_mapped(cache, 1) == list(range(12, 16))
        cache.commit(prompt)
        assert cache.num_committed_tokens == 512
        cache.close()
        assert rig.probe(prompt) == 512


def node(layers: list[int], seed: int) -> Rig:
    """One pipeline rank: even layers have a window of 64."""
    config = model(
        [attention(layer, 4 * KIB, 4 * KIB, window=64 if layer % 2 == 0 else None) for layer in layers],
        tiers=[GpuCacheTierConfig(4 * MIB), HostCacheTierConfig(4 * MIB)],
    )
    return Rig(config, "random", seed)


def ranks(count: int, seed: int) -> list[tuple[Rig, list[int]]]:
    split = [[0, 1, 2, 3]] if count == 1 else [[0, 1], [2, 3]]
    return [(node(layers, seed + rank), layers) for rank, layers in enumerate(split)]


@pytest.mark.parametrize("prefill_ranks", [1, 2])
@pytest.mark.parametrize("decode_ranks", [1, 2])
@pytest.mark.parametrize("early_close", [False, True])
def test_prefilled_pages_are_copied_to_the_decoder(prefill_ranks: int, decode_ranks: int, early_close: bool) -> None:
    """185 tokens over 1 or 2 pipeline ranks a side: buffers and sizes pair up, out-of-window pages are skipped equally on both
    sides, the prefill side may close before the copies have run, and the decoder sees the right bytes."""
    tokens: list[Token] = mixed(0, 185)
    filled: dict[int, Request] = {}  # by layer
    givers = ranks(prefill_ranks, 0)
    takers = ranks(decode_ranks, 10)
    for rig, layers in givers:
        request = rig.start(tokens)
        request.prefill(tokens, 64)
        filled.update(dict.fromkeys(layers, request))
        rig.driver.synchronize()  # two devices: their streams know nothing of each other
    started: list[Request] = []
    for rig, layers in takers:
        request = rig.start(tokens)
        started.append(request)
        assert request.cache.resize(185, 185)
        for layer in layers:
            for job in pair(filled[layer], request, layer):
                rig.driver.launch(request.cache.cuda_stream, job)
        request.tokens = list(tokens)
    if early_close:
        for request in filled.values():
            request.close()
    for request in started:
        request.check()
        request.cache.commit(tokens)
        assert request.advance(toks(7000, 7040))
        request.check()
    for rig, _ in takers + givers:
        rig.__exit__(None, None, None)


def pair(given: Request, taken: Request, layer: int) -> list[Callable[[], None]]:
    """The copies of one layer's buffers, as the aggregated pages of both sides pair up."""
    jobs: list[Callable[[], None]] = []
    for role in (KEY, VALUE):
        buffer = BufferId(LayerId(layer), role)
        (source,) = given.rig.manager.get_aggregated_pages([buffer])
        (target,) = taken.rig.manager.get_aggregated_pages([buffer])
        assert source.size == target.size == 4 * KIB
        from_slots, to_slots = slots(given.cache, source.layer_group_id), slots(taken.cache, target.layer_group_id)
        assert len(from_slots) == len(to_slots) == (6 if layer % 2 else 3)
        for a, b in zip(from_slots, to_slots, strict=True):
            jobs.append(copy_job(target.base + target.stride * b, source.base + source.stride * a, source.size))
    return jobs


def slots(cache: KVCache, group: int) -> list[int]:
    every = list(cache.get_aggregated_page_indices(group))
    valid = list(cache.get_aggregated_page_indices(group, valid_only=True))
    assert len(every) == cache.num_blocks
    assert valid == [slot for slot in every if slot >= 0]
    return valid


def copy_job(destination: int, source: int, nbytes: int) -> Callable[[], None]:
    def job() -> None:
        ctypes.memmove(destination, source, nbytes)

    return job


def test_a_whole_layer_group_is_one_run() -> None:
    """Buffers that lie side by side in a slot are given as one run; the order is that of the layout, whatever order they are
    asked in."""
    rig = node([0, 1, 2, 3], 0)
    manager = rig.manager
    runs = manager.get_aggregated_pages(manager.all_buffer_ids)
    again = manager.get_aggregated_pages(reversed(manager.all_buffer_ids))
    assert [(run.base, run.size, run.stride, run.layer_group_id) for run in runs] == [
        (run.base, run.size, run.stride, run.layer_group_id) for run in again
    ]
    assert [run.size for run in runs] == [16 * KIB, 16 * KIB]
    assert [run.stride for run in runs] == [16 * KIB, 16 * KIB]
    assert [run.layer_group_id for run in runs] == [0, 1]
    rig.__exit__(None, None, None)
