"""A fourth tier, a life cycle and a counter, added from outside as CONTRIBUTING.md says, serve requests with exact bytes."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2 import (
    BufferConfig,
    CacheLevel,
    ConfigError,
    DataRole,
    DiskCacheTierConfig,
    EmulatedDriver,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheEventManager,
    KVCacheManager,
    KVCacheManagerConfig,
    LayerId,
)
from kv_cache_manager_v2.config import CacheTierConfig, LayerConfig
from kv_cache_manager_v2.ids import CacheTier, LifeCycleId
from kv_cache_manager_v2.layout.life_cycle import NEVER
from tests.charter.toys import ChunkedLayerConfig, ChunkedLifeCycle, OnloadCounter, PlainCacheTierConfig
from tests.support.engine import Token
from tests.support.models import GRAIN, attention, model, slot_size, small
from tests.support.rig import Rig, toks

PLAIN = CacheLevel(2)
DISK = CacheLevel(3)
SCHEDULES = ["eager", "threads", *[f"random {seed}" for seed in range(4)]]


def schedule_of(text: str) -> tuple[str, int]:
    name, _space, seed = text.partition(" ")
    return name, int(seed or 0)


def chunked(layer: int, size: int, chunk: int) -> ChunkedLayerConfig:
    return ChunkedLayerConfig(LayerId(layer), [BufferConfig(DataRole("key"), size)], chunk)


def open_plain_files() -> int:
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum("plain-tier" in os.readlink(link) for link in links if os.path.islink(link))


def seed(rig: Rig, prompts: Sequence[Sequence[Token]], chunk: int | None = None) -> None:
    """Have the prompts cached, one after the other: no page waits for a file when the next one needs its slot."""
    for prompt in prompts:
        rig.seed(list(prompt), chunk=chunk)
        rig.driver.synchronize()


def reuse(rig: Rig, prompts: Sequence[Sequence[Token]]) -> None:
    """Each prompt is found whole, and its bytes are right."""
    for prompt in prompts:
        assert rig.extend([*prompt, 7]) == len(prompt)
        rig.driver.synchronize()


# --- a tier


def four_tiers(path: Path, layers: Sequence[LayerConfig] | None = None) -> KVCacheManagerConfig:
    """8 slots on each of the GPU, the host and the plain tier, and at least as many on disk."""
    size = slot_size(8, 4)
    tiers: list[CacheTierConfig] = [
        GpuCacheTierConfig(GRAIN),
        HostCacheTierConfig(8 * size, exclusive=True),  # all tiers together have just the slots for all pages
        PlainCacheTierConfig(8 * size),
        DiskCacheTierConfig(2 * GRAIN, str(path), exclusive=True),
    ]
    return model([attention(0, size)] if layers is None else layers, tokens_per_block=4, tiers=tiers, max_util=1.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pages_pass_through_a_tier_from_outside_with_their_bytes(tmp_path: Path, schedule: str) -> None:
    """Cached pages go from the GPU down through all four levels, and come back from each of them right."""
    with Rig(four_tiers(tmp_path), *schedule_of(schedule)) as rig:
        prompts = [toks(1000 * number, 1000 * number + 16) for number in range(7)]
        seed(rig, prompts)
        movement = rig.manager.movement
        for level in range(3):
            assert movement.pages_moved(level, level + 1) > 0
        reuse(rig, prompts[::-1])
        assert movement.pages_moved(PLAIN, 0) > 0
        assert movement.pages_moved(DISK, 0) > 0
        assert sum(movement.lost) == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_suspended_request_survives_in_a_tier_from_outside(tmp_path: Path, schedule: str) -> None:
    """Held pages move down to it, and resume brings them back."""
    with Rig(four_tiers(tmp_path), *schedule_of(schedule)) as rig:
        first = rig.start()
        assert first.advance(toks(0, 24), commit=False)
        first.suspend()
        rig.driver.synchronize()
        seed(rig, [toks(1000 * number, 1000 * number + 32) for number in range(1, 4)])
        assert rig.manager.movement.pages_moved(1, PLAIN) > 0
        assert first.resume()
        first.check()
        assert first.advance(toks(24, 28))
        first.check()


def test_a_tier_from_outside_is_resized_and_closed(tmp_path: Path) -> None:
    """It shrinks, grows, and leaves no memory when the manager is gone."""
    before = open_plain_files()
    with Rig(four_tiers(tmp_path)) as rig:
        assert open_plain_files() == before + 1
        prompts = [toks(1000 * number, 1000 * number + 16) for number in range(6)]
        seed(rig, prompts)
        config = rig.config.cache_tiers[PLAIN]
        assert config.granularity() == 1 << 16
        assert rig.manager.resize(PLAIN, config.quota // 2)
        assert rig.counts(PLAIN).total == 4
        rig.settle()
        assert rig.manager.resize(PLAIN, config.quota * 2)
        assert rig.counts(PLAIN).total == 16
        reuse(rig, prompts)
    assert open_plain_files() == before


def test_a_tier_without_a_maker_is_refused() -> None:
    """The message names the class and the remedy, and nothing is left."""

    class UnknownTierConfig(CacheTierConfig):
        @property
        def tier(self) -> CacheTier:
            return CacheTier.DISK

    config = small(8)
    config.cache_tiers = [*config.cache_tiers, UnknownTierConfig(GRAIN)]
    driver = EmulatedDriver()
    with pytest.raises(ConfigError, match=r"UnknownTierConfig.*register_tier"):
        KVCacheManager(config, driver=driver)
    driver.close()


# --- a life cycle


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 120))
def test_chunked_ranges_follow_their_definition(size: int, chunk: int, history: int) -> None:
    """A block is stale iff all of it lies before the chunk of the next query; the next change is the first one."""
    cycle = ChunkedLifeCycle(LifeCycleId(0), size, chunk, 0)
    start, end = cycle.stale(history)
    for block in range(history // size + 2):
        seen = [position for position in range(block * size, (block + 1) * size) if position >= history // chunk * chunk]
        assert (start <= block < end) == (not seen)
    change = cycle.next_stale_change(history)
    assert history < change < NEVER
    assert cycle.stale(change - 1) == (start, end)
    assert cycle.stale(change) != (start, end)
    assert -(-(history + 1) // size) - end <= cycle.structural_floor(0)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 60), st.integers(0, 60), st.integers(0, 20))
def test_chunked_scratch_starts_where_it_says(size: int, chunk: int, history: int, growth: int, rewind: int) -> None:
    """A capacity below `scratch_from` has no scratch blocks, one at it has."""
    cycle = ChunkedLifeCycle(LifeCycleId(0), size, chunk, 0)
    least = cycle.scratch_from(-(-history // size), rewind)
    start, end = cycle.scratch(history, history + growth, rewind)
    assert (end > start) == (history + growth >= least)
    start, end = cycle.scratch(history, max(history, least), rewind)
    assert end > start


def test_a_life_cycle_from_outside_is_copied_as_what_it_is() -> None:
    cycle = ChunkedLifeCycle(LifeCycleId(2), 4, 24, 0)
    for other in (copy.copy(cycle), copy.deepcopy(cycle), pickle.loads(pickle.dumps(cycle))):
        assert type(other) is ChunkedLifeCycle
        assert other.stale(100) == cycle.stale(100)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chunk", [8, 10, 3])
def test_chunked_layers_beside_full_attention(schedule: str, chunk: int) -> None:
    """Prefill, decode, reuse, suspension: each step has exactly the pages of its chunk, with the right bytes."""
    size = slot_size(64, 4)
    layers = [attention(0, size), chunked(1, size, chunk), attention(2, size, window=6), chunked(3, size, chunk)]
    config = model(layers, tokens_per_block=4, tiers=[GpuCacheTierConfig(3 * GRAIN), HostCacheTierConfig(4 * GRAIN)], max_util=1.0)
    prompt = toks(0, 42)
    with Rig(config, *schedule_of(schedule)) as rig:
        groups = rig.manager.layer_grouping
        assert [list(group) for group in groups] == [[0], [1, 3], [2]]
        rig.seed(prompt, chunk=9)
        request = rig.start([*prompt, 1, 2])
        assert len(request.tokens) == 42
        for token in range(100, 130):
            assert request.advance([token])
            history = len(request.tokens)
            first = (history - history % chunk) // 4
            assert rig.blocks_mapped(request.cache, 1) == list(range(first, request.cache.num_blocks))
            if token % 10 == 0:
                request.suspend()
                assert request.resume()
        request.check()
        request.close()
        for length in (41, 40, 39, 25, 13, 5):
            assert rig.extend(prompt[:length]) == length


def test_a_match_needs_the_pages_of_its_last_chunk_only() -> None:
    """At a chunk's end nothing of the chunked layers is needed; inside one all its blocks up to there."""
    size = slot_size(64, 4)
    config = model([attention(0, size), chunked(1, size, 16)], tokens_per_block=4, gpu=2 * GRAIN, max_util=1.0)
    prompt = toks(0, 40)
    with Rig(config) as rig:
        rig.seed(prompt)  # chunks of 16 tokens: 0..15, 16..31, and 32..39
        start = rig.start(prompt)
        assert rig.blocks_mapped(start.cache, 1) == [8, 9]
        start.close()
        for length, blocks in ((32, []), (31, [4, 5, 6, 7]), (16, []), (18, [4])):
            request = rig.start(prompt[:length])
            assert len(request.tokens) == length
            assert rig.blocks_mapped(request.cache, 1) == blocks
            request.check()
            request.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_chunked_layers_use_scratch_slots(schedule: str) -> None:
    """A prefill step over many chunks takes pages for its last chunk alone; the rest shares scratch slots."""
    size = slot_size(64, 4)
    layers = [attention(0, size), chunked(1, size, 16), chunked(2, size, 16)]
    config = model(layers, tokens_per_block=4, gpu=4 * GRAIN, max_util=1.0, scratch_rewind=0)
    with Rig(config, *schedule_of(schedule)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 72), commit=False)
        assert rig.blocks_mapped(request.cache, 1) == [16, 17]
        assert request.advance(toks(72, 73), commit=False)
        request.check()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_life_cycle_and_a_tier_from_outside_together(tmp_path: Path, schedule: str) -> None:
    size = slot_size(8, 4)
    config = four_tiers(tmp_path, [chunked(0, size, 8)])
    with Rig(config, *schedule_of(schedule)) as rig:
        prompts = [toks(1000 * number, 1000 * number + 20) for number in range(8)]
        seed(rig, prompts, 4)
        reuse(rig, prompts)
        assert rig.manager.movement.pages_moved(PLAIN, 0) > 0


def test_a_layer_without_a_life_cycle_is_refused() -> None:
    """The message names the layer, its class and the remedy."""

    class UnknownLayerConfig(LayerConfig):
        @property
        def window_size(self) -> int | None:
            return None

        def group_key(self, tokens_per_block: object) -> tuple[object, ...]:
            return ("unknown",)

    layer = UnknownLayerConfig(LayerId(5), [BufferConfig(DataRole("key"), 4096)])
    with pytest.raises(ConfigError, match=r"layer 5 is a UnknownLayerConfig.*register_life_cycle"):
        KVCacheManager(model([layer]), driver=EmulatedDriver())


# --- a statistic


@pytest.mark.parametrize("with_events", [False, True])
def test_a_counter_from_outside_equals_the_recount(tmp_path: Path, with_events: bool) -> None:
    """A reader's difference is what moved meanwhile, and the listener that it passes everything on to misses nothing."""
    events = KVCacheEventManager(1000) if with_events else None
    counter = OnloadCounter(4, events)
    with Rig(four_tiers(tmp_path), events=counter) as rig:
        prompts = [toks(1000 * number, 1000 * number + 16) for number in range(7)]
        seed(rig, prompts)
        movement = rig.manager.movement
        before = list(counter.onloaded)
        moved = [movement.pages_moved(level, 0) for level in range(4)]
        reuse(rig, prompts[:3])
        assert sum(counter.onloaded) > sum(before)
        for level in range(1, 4):
            assert counter.onloaded[level] - before[level] == movement.pages_moved(level, 0) - moved[level]
        if events is not None:
            events.flush_iteration_events()
            assert len(events.get_latest_events(0)) > 0
