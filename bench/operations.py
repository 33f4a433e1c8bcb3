"""The operations that are timed: what an engine does for a request, and for each step.

Sizes: prompts of 8,192 tokens, blocks of 32, one group of layers with full attention (and a second one with a window of 1,024 where
the title says so), 256 bytes a token, so that bookkeeping and not copying is what is timed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from timing import Timing, measure

from kv_cache_manager_v2 import (
    GPU_LEVEL,
    AttentionLayerConfig,
    BufferConfig,
    DataRole,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCache,
    KVCacheManager,
    KVCacheManagerConfig,
    LayerId,
    Stream,
    commit_batch,
    resize_batch,
)
from kv_cache_manager_v2.device.driver import Driver

BLOCK: Final = 32
BYTES_PER_TOKEN: Final = 256
SLOT: Final = BLOCK * BYTES_PER_TOKEN
WINDOW: Final = 1024


@dataclass
class Setting:
    """The device, and how much of everything."""

    driver: Driver
    quick: bool

    @property
    def runs(self) -> int:
        return 3 if self.quick else 21

    @property
    def prompt_tokens(self) -> int:
        return 1024 if self.quick else 8192

    @property
    def requests(self) -> int:
        return 50 if self.quick else 1000


def make_manager(setting: Setting, gpu_blocks: int, host_blocks: int = 0, window: bool = False) -> KVCacheManager:
    """`gpu_blocks` blocks on the GPU, at least, of each group of layers."""
    layers = [AttentionLayerConfig(LayerId(0), [BufferConfig(DataRole("kv"), SLOT)])]
    if window:
        layers.append(AttentionLayerConfig(LayerId(1), [BufferConfig(DataRole("kv"), SLOT)], WINDOW))
    tiers: list[GpuCacheTierConfig | HostCacheTierConfig] = [GpuCacheTierConfig(gpu_blocks * SLOT * len(layers))]
    if host_blocks:
        tiers.append(HostCacheTierConfig(host_blocks * SLOT * len(layers)))
    return KVCacheManager(KVCacheManagerConfig(BLOCK, tiers, layers, max_util_for_resume=1.0), driver=setting.driver)


def tokens(count: int, first: int = 0) -> array[int]:
    """A prompt as engines hold it: an int32 buffer. Two prompts with different `first` share no block."""
    return array("i", [(first * 7919 + position) & 0x7FFFFFFF for position in range(count)])


def serve(manager: KVCacheManager, stream: Stream, prompt: array[int]) -> KVCache:
    """A request whose prompt is computed and committed."""
    cache = manager.create_kv_cache(None, prompt)
    assert cache.resume(stream)
    assert cache.resize(len(prompt))
    cache.commit(prompt[cache.num_committed_tokens :])
    return cache


def probe_cached(setting: Setting) -> Timing:
    """Only the match: pack the prompt and find it."""
    with make_manager(setting, 2 * setting.prompt_tokens // BLOCK) as manager:
        stream = setting.driver.create_stream()
        prompt = tokens(setting.prompt_tokens)
        serve(manager, stream, prompt).close()

        def work() -> int:
            for _run in range(20):
                assert manager.probe_reuse(None, prompt) == len(prompt)
            return 20

        return measure("prompt", setting.runs, work)


def admit_cached(setting: Setting) -> Timing:
    """Create, resume and close a request whose whole prompt is on the GPU."""
    with make_manager(setting, 2 * setting.prompt_tokens // BLOCK) as manager:
        stream = setting.driver.create_stream()
        prompt = tokens(setting.prompt_tokens)
        serve(manager, stream, prompt).close()

        def work() -> int:
            for _run in range(10):
                cache = manager.create_kv_cache(None, prompt)
                assert cache.resume(stream)
                cache.close()
            return 10

        return measure("request", setting.runs, work)


def commit_cold(setting: Setting) -> Timing:
    """Commit a whole prompt that nobody has seen, in one call."""
    with make_manager(setting, 2 * setting.prompt_tokens // BLOCK) as manager:
        stream = setting.driver.create_stream()
        open_caches: list[KVCache] = []
        serial = [0]

        def before() -> None:
            serial[0] += 1
            cache = manager.create_kv_cache()
            assert cache.resume(stream)
            assert cache.resize(setting.prompt_tokens)
            open_caches.append(cache)

        def work() -> int:
            open_caches[-1].commit(tokens_of[serial[0]])
            return 1

        tokens_of = [tokens(setting.prompt_tokens, first) for first in range(setting.runs + 2)]
        return measure("prompt", setting.runs, work, before=before, after=lambda: open_caches.pop().close())


def close_request(setting: Setting) -> Timing:
    """Close a request with a committed prompt: its pages stay cached, its tail first to go."""
    with make_manager(setting, 2 * setting.prompt_tokens // BLOCK) as manager:
        stream = setting.driver.create_stream()
        prompt = tokens(setting.prompt_tokens)
        open_caches: list[KVCache] = []

        def work() -> int:
            open_caches.pop().close()
            return 1

        return measure("request", setting.runs, work, before=lambda: open_caches.append(serve(manager, stream, prompt)))


def grow_over_cached(setting: Setting) -> Timing:
    """Grow a request on a GPU that is full of cached pages, with no colder tier: each page drops the oldest one."""
    blocks = setting.prompt_tokens // BLOCK
    with make_manager(setting, 8 * blocks) as manager:
        stream = setting.driver.create_stream()
        fresh = iter(range(10_000))
        open_caches: list[KVCache] = []

        def fill() -> None:
            serve(manager, stream, tokens(setting.prompt_tokens, next(fresh))).close()

        def before() -> None:
            cache = manager.create_kv_cache()
            assert cache.resume(stream)
            open_caches.append(cache)

        def work() -> int:
            dropped = manager.movement.pages_dropped(0)
            assert open_caches[-1].resize(setting.prompt_tokens)
            assert manager.movement.pages_dropped(0) == dropped + blocks
            return blocks

        def after() -> None:
            open_caches.pop().close()
            fill()

        while manager.movement.pages_dropped(0) == 0:
            fill()
        return measure("page", setting.runs, work, before=before, after=after)


def decode(setting: Setting, *, window: bool, batched: bool) -> Timing:
    """One step of all requests: one more token of capacity, and the token of the step before committed."""
    start = 4 * BLOCK if not window else WINDOW + 4 * BLOCK
    steps = BLOCK  # one step in 32 needs a block: a run is one block long, so that each pays its share
    capacity = setting.requests * (start // BLOCK + setting.runs + 4)
    with make_manager(setting, capacity, window=window) as manager:
        stream = setting.driver.create_stream()
        caches = [serve(manager, stream, tokens(start, first)) for first in range(setting.requests)]
        lengths = [start]

        def one_by_one() -> int:
            for _step in range(steps):
                lengths[0] += 1
                for index, cache in enumerate(caches):
                    assert cache.resize(lengths[0])
                    cache.commit([index])
            return steps

        def in_batches() -> int:
            drawn = list(range(len(caches)))
            for _step in range(steps):
                lengths[0] += 1
                assert resize_batch(caches, [lengths[0]] * len(caches)) == len(caches)
                commit_batch(caches, drawn)
            return steps

        timing = measure("step", setting.runs, in_batches if batched else one_by_one)
        for cache in caches:
            cache.close()
        return timing


def swap(setting: Setting) -> Timing:
    """Two requests that do not fit the GPU together take turns: pages go to the host, and others come back."""
    with make_manager(setting, setting.prompt_tokens // BLOCK, host_blocks=1024) as manager:
        stream = setting.driver.create_stream()
        share = manager.get_quota(GPU_LEVEL) // SLOT * 3 // 4  # of the GPU's slots, for each of the two
        caches = [manager.create_kv_cache() for _which in range(2)]
        for cache in caches:
            assert cache.resume(stream)
            assert cache.resize(share * BLOCK)
            cache.suspend()

        def moved() -> int:
            return manager.movement.pages_moved(0, 1) + manager.movement.pages_moved(1, 0)

        def work() -> int:
            start = moved()
            for cache in caches:
                assert cache.resume(stream)
                cache.suspend()
            return moved() - start

        timing = measure("page moved", setting.runs, work)
        for cache in caches:
            cache.close()
        return timing


OPERATIONS: Final[dict[str, Callable[[Setting], Timing]]] = {
    "probe a cached prompt": probe_cached,
    "create, resume, close with a cached prompt": admit_cached,
    "commit an unknown prompt": commit_cold,
    "close a request": close_request,
    "grow over cached pages": grow_over_cached,
    "decode step, calls": lambda setting: decode(setting, window=False, batched=False),
    "decode step, batch": lambda setting: decode(setting, window=False, batched=True),
    "decode step with a window group, batch": lambda setting: decode(setting, window=True, batched=True),
    "suspend one, resume the other": swap,
}
