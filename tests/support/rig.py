"""A manager on an emulated device with an engine, and short ways to say what a request does.

A `Rig` owns all three. Leaving its `with` block checks every invariant, raises what the engine found, closes what is open, shuts
down, and closes the device, which raises if anything leaked.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Sequence
from types import TracebackType

from kv_cache_manager_v2 import (
    CacheLevel,
    CacheListener,
    Driver,
    EmulatedDriver,
    KVCache,
    KVCacheManager,
    KVCacheManagerConfig,
    LayerGroupId,
    LayerId,
    ReuseScope,
    Stream,
    Tokens,
)
from tests.support.engine import Engine, Token
from tests.support.inside import Counts, counts

GPU = CacheLevel(0)
HOST = CacheLevel(1)
DISK = CacheLevel(2)


def toks(beg: int, end: int) -> list[Token]:
    """Distinct tokens beg..end-1."""
    return list(range(beg, end))


def mixed(beg: int, end: int, every: int = 100) -> list[Token]:
    """As `toks`, every `every`-th one a multimodal digest."""
    return [n.to_bytes(4, "little") + bytes(28) if n % every == every - 1 else n for n in range(beg, end)]


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# --- the rig


class Rig:
    """A manager, its device, and an engine."""

    def __init__(
        self,
        config: KVCacheManagerConfig,
        schedule: str = "eager",
        seed: int = 0,
        engine: bool = True,
        clock: Callable[[], float] = time.monotonic,
        events: CacheListener | None = None,
        wrap: Callable[[EmulatedDriver], Driver] | None = None,
        transfer_timeout: float | None = None,
    ) -> None:
        """`wrap`: what the manager drives instead of the emulated device itself."""
        self.config = config
        self.driver = EmulatedDriver(schedule, seed, transfer_timeout)
        device = self.driver if wrap is None else wrap(self.driver)
        self.manager = KVCacheManager(config, events, driver=device, clock=clock)
        self.engine = Engine(self.manager, self.driver, config) if engine else None
        self.streams: list[Stream] = []
        self.stream: Stream = self.new_stream()
        self.tokens_per_block = config.tokens_per_block
        self._opened: list[KVCache] = []
        self._ids = 0

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.settle()
        for cache in self._opened:
            try:
                cache.close()
            except Exception:
                if kind is None:
                    raise
        if kind is None:
            self.settle()
            self.manager.shutdown()
            for stream in self.streams:
                self.driver.destroy_stream(stream)
            self.driver.close()

    def new_stream(self) -> Stream:
        """A stream of the engine's."""
        self.streams.append(self.driver.create_stream())
        return self.streams[-1]

    def settle(self) -> None:
        """All queued work done, nothing wrong seen, every structure consistent."""
        self.driver.synchronize()
        if self.engine is not None:
            self.engine.raise_errors()
        self.manager.check_invariants()

    # --- requests

    def create(
        self,
        tokens: Tokens | None = None,
        scope: ReuseScope | None = None,
        priority: Callable[[int, object], int] | None = None,
        id: int | None = None,
    ) -> KVCache:
        """A new cache, SUSPENDED. It is closed with the rig at the latest."""
        self._ids += 1
        cache = self.manager.create_kv_cache(scope, tokens, self._ids if id is None else id, priority)
        return self.own(cache)

    def open(
        self,
        tokens: Tokens | None = None,
        scope: ReuseScope | None = None,
        priority: Callable[[int, object], int] | None = None,
        id: int | None = None,
    ) -> KVCache:
        """A new cache, ACTIVE on the rig's stream."""
        cache = self.create(tokens, scope, priority, id)
        assert cache.resume(self.stream), f"no room to start: {cache.last_shortage}"
        return cache

    def own(self, cache: KVCache) -> KVCache:
        """Close a cache with the rig at the latest."""
        self._opened.append(cache)
        return cache

    def start(
        self,
        tokens: Sequence[Token] | None = None,
        scope: ReuseScope | None = None,
        priority: Callable[[int, object], int] | None = None,
        stream: Stream | None = None,
    ) -> Request:
        """A new request, resumed, standing at what it reused of `tokens`."""
        request = self.request(tokens, scope, priority, stream)
        assert request.resume(), f"no room to start: {request.cache.last_shortage}"
        return request

    def request(
        self,
        tokens: Sequence[Token] | None = None,
        scope: ReuseScope | None = None,
        priority: Callable[[int, object], int] | None = None,
        stream: Stream | None = None,
    ) -> Request:
        """A new request, SUSPENDED."""
        cache = self.create(tokens, scope, priority)
        reused = list(tokens[: cache.num_committed_tokens]) if tokens is not None else []
        return Request(self, cache, reused, self.stream if stream is None else stream)

    def seed(
        self,
        tokens: Sequence[Token],
        scope: ReuseScope | None = None,
        priority: Callable[[int, object], int] | None = None,
        chunk: int | None = None,
    ) -> None:
        """Have the tokens cached: write them from scratch, commit, close."""
        request = self.start(None, scope, priority)
        for beg in range(0, len(tokens), chunk or max(1, len(tokens))):
            assert request.advance(tokens[beg : beg + (chunk or len(tokens))]), request.cache.last_shortage
        request.close()

    def extend(self, tokens: Sequence[Token], scope: ReuseScope | None = None) -> int:
        """Have the tokens cached, reusing what there is of them; how many were reused."""
        request = self.start(tokens, scope)
        reused = len(request.tokens)
        if reused < len(tokens):
            assert request.advance(tokens[reused:]), request.cache.last_shortage
        request.check()
        request.close()
        return reused

    def probe(self, tokens: Sequence[Token], scope: ReuseScope | None = None) -> int:
        return self.manager.probe_reuse(scope, tokens)

    def reused(self, tokens: Sequence[Token], scope: ReuseScope | None = None) -> int:
        """What a new cache of these tokens reuses; probe must say the same."""
        cache = self.create(tokens, scope)
        count = cache.num_committed_tokens
        cache.close()
        assert count == self.probe(tokens, scope)
        return count

    def take(self, slots: int) -> Request:
        """Lock the slots of so many blocks for a new request that commits nothing."""
        request = self.start()
        assert request.cache.resize(slots * self.tokens_per_block), request.cache.last_shortage
        return request

    # --- questions

    def counts(self, level: int = 0, group: int = 0) -> Counts:
        return counts(self.manager, level, group)

    def group(self, layer: int) -> LayerGroupId:
        return self.manager.get_layer_group_id(LayerId(layer))

    def indices(self, cache: KVCache, layer: int = 0) -> list[int]:
        """The base page indices of the layer's group, one a block."""
        return list(self.manager_indices(cache, layer))[: cache.num_blocks]

    def manager_indices(self, cache: KVCache, layer: int = 0) -> Sequence[int]:
        live = cache.get_base_page_indices(self.group(layer))
        assert isinstance(live, array), type(live)
        return live

    def blocks_mapped(self, cache: KVCache, layer: int = 0) -> list[int]:
        """Block ordinals that have a page now."""
        return [block for block, index in enumerate(self.indices(cache, layer)) if index >= 0]


class Request:
    """A cache, and the tokens that the engine has written to it."""

    def __init__(self, rig: Rig, cache: KVCache, tokens: list[Token], stream: Stream) -> None:
        self.rig = rig
        self.cache = cache
        self.tokens = tokens  # what lies in the pages, from position 0
        self.stream = stream
        self.buffers: list[array[int]] | None = None  # the engine's own index buffers, by layer group

    def use_buffers(self, length: int) -> None:
        """Use the engine's own page-index buffers from now on, re-attached after each resume."""
        groups = len(self.rig.manager.layer_grouping)
        self.buffers = [array("i", [123]) * length for _ in range(groups)]
        if self.cache.is_active:
            self._attach()

    def _attach(self) -> None:
        if self.buffers is not None:
            for group, buffer in enumerate(self.buffers):
                self.cache.set_base_page_index_buf(0, LayerGroupId(group), buffer)

    def resume(self, stream: Stream | None = None) -> bool:
        if stream is not None:
            self.stream = stream
        if not self.cache.resume(self.stream):
            return False
        self._attach()
        return True

    def suspend(self) -> None:
        self.cache.suspend()

    def advance(self, tokens: Sequence[Token], commit: bool = True, is_end: bool = False) -> bool:
        """One step: grow by the tokens, write them, commit them (else only advance the history). False: no pages."""
        cache = self.cache
        before = len(self.tokens)
        if not cache.resize(before + len(tokens), before):
            return False
        self.write(tokens)
        if commit:
            cache.commit(list(tokens), None, is_end)
        else:
            cache.history_length = len(self.tokens)
        return True

    def write(self, tokens: Sequence[Token]) -> None:
        """Let the engine, if the rig has one, check the history and write these tokens behind it."""
        if self.rig.engine is not None:
            self.rig.engine.step(self.cache, tokens, self.tokens)
        self.tokens += tokens

    def prefill(self, tokens: Sequence[Token], chunk: int) -> None:
        """The tokens not written yet, in chunks."""
        while len(self.tokens) < len(tokens):
            assert self.advance(tokens[len(self.tokens) : len(self.tokens) + chunk]), self.cache.last_shortage

    def check(self) -> None:
        """All mapped pages hold what was written."""
        assert self.rig.engine is not None
        self.rig.engine.check(self.cache, self.tokens)
        self.rig.driver.synchronize()
        self.rig.engine.raise_errors()

    def close(self) -> None:
        self.cache.close()


def shuffled(items: Sequence[int], seed: int) -> list[int]:
    result = list(items)
    random.Random(seed).shuffle(result)
    return result
