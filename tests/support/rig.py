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
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    CacheLevel,
    CacheListener,
    CacheTierConfig,
    DataRole,
    DiskCacheTierConfig,
    EmulatedDriver,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCache,
    KVCacheDesc,
    KVCacheManager,
    KVCacheManagerConfig,
    LayerGroupId,
    LayerId,
    ReuseScope,
    SsmLayerConfig,
    Stream,
    SwaScratchReuseConfig,
    Tokens,
)
from kv_cache_manager_v2.config import LayerConfig
from tests.support.engine import FakeEngine, Token
from tests.support.inside import Counts, counts

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
GRAIN = 2 * MIB  # of the GPU's quota, while that is below 2 GiB

KEY = DataRole("key")
VALUE = DataRole("value")

GPU = CacheLevel(0)
HOST = CacheLevel(1)
DISK = CacheLevel(2)


def toks(beg: int, end: int) -> list[Token]:
    """Distinct tokens beg..end-1."""
    return list(range(beg, end))


def mixed(beg: int, end: int, every: int = 100) -> list[Token]:
    """As `toks`, every `every`-th one a multimodal digest."""
    return [n.to_bytes(4, "little") + bytes(28) if n % every == every - 1 else n for n in range(beg, end)]


# --- models


def attention(
    layer: int, *sizes: int, window: int | None = None, sink: int | None = None, override: int | None = None
) -> AttentionLayerConfig:
    return AttentionLayerConfig(LayerId(layer), _buffers(sizes, override), window, sink)


def ssm(layer: int, *sizes: int) -> SsmLayerConfig:
    return SsmLayerConfig(LayerId(layer), _buffers(sizes, None))


def _buffers(sizes: Sequence[int], override: int | None) -> list[BufferConfig]:
    names = ["key", "value", "key_scale", "value_scale"]
    return [BufferConfig(DataRole(name), size, override) for name, size in zip(names, sizes, strict=False)]


Kind = str | tuple[int, int]  # "full", "ssm", (window, sink tokens)


def layers_of(kinds: Sequence[Kind], size: int) -> list[LayerConfig]:
    """One layer of one buffer of `size` bytes for each kind: "full", "ssm" or (window, sink)."""
    result: list[LayerConfig] = []
    for number, kind in enumerate(kinds):
        if kind == "ssm":
            result.append(ssm(number, size))
        elif kind == "full":
            result.append(attention(number, size))
        else:
            assert isinstance(kind, tuple)
            result.append(attention(number, size, window=kind[0], sink=kind[1]))
    return result


def slot_size(gpu_slots: int, tokens_per_block: int) -> int:
    """Bytes of a slot of which exactly `gpu_slots` fit one grain of GPU memory (or of `gpu_slots` grains, beyond 64)."""
    step = 16 * tokens_per_block
    size = GRAIN // gpu_slots // step * step
    assert size > 0
    assert GRAIN // size == gpu_slots, (gpu_slots, size)
    return size


def small(
    gpu_slots: int,
    *,
    kinds: Sequence[Kind] = ("full",),
    tokens_per_block: int = 4,
    host_slots: int = 0,
    disk: tuple[str, int] | None = None,
    max_util: float = 1.0,
    partial: bool = True,
    backoff: int = 0,
    min_snapshot: bool | None = None,
    scratch_rewind: int | None = None,
) -> KVCacheManagerConfig:
    """A model whose layers of one kind each share one pool group of exactly so many slots a tier.

    `disk` is (directory, slots): a grain of the disk tier holds as many slots as one of the GPU, so the slots are a multiple.
    """
    size = slot_size(gpu_slots, tokens_per_block)
    tiers: list[CacheTierConfig] = [GpuCacheTierConfig(GRAIN)]
    if host_slots > 0:
        tiers.append(HostCacheTierConfig(host_slots * size))
    if disk is not None:
        assert disk[1] % gpu_slots == 0, "whole grains only"
        tiers.append(DiskCacheTierConfig(disk[1] // gpu_slots * GRAIN, disk[0]))
    return model(
        layers_of(kinds, size),
        tokens_per_block=tokens_per_block,
        tiers=tiers,
        max_util=max_util,
        partial=partial,
        backoff=backoff,
        min_snapshot=min_snapshot,
        scratch_rewind=scratch_rewind,
    )


def hybrid(
    states: int,
    blocks: int,
    *,
    tokens_per_block: int = 4,
    kinds: Sequence[Kind] = ("full",),
    host_slots: int = 0,
    partial: bool = True,
    backoff: int = 0,
) -> KVCacheManagerConfig:
    """Attention layers of one pool group of so many blocks, and a recurrent layer of so many states: a grain of GPU memory each.

    The host, if any, has at least `host_slots` slots of each.
    """
    assert states != blocks, "equal slots would share a pool group"
    sizes = slot_size(blocks, tokens_per_block), slot_size(states, tokens_per_block)
    layers = [*layers_of(kinds, sizes[0]), ssm(len(kinds), sizes[1])]
    tiers: list[CacheTierConfig] = [GpuCacheTierConfig(2 * GRAIN)]
    if host_slots > 0:
        tiers.append(HostCacheTierConfig(2 * host_slots * max(sizes)))
    groups = len(set(kinds))
    return model(
        layers,
        tokens_per_block=tokens_per_block,
        tiers=tiers,
        max_util=1.0,
        partial=partial,
        backoff=backoff,
        ratio=[0.5 / groups] * groups + [0.5],
    )


def model(
    layers: Sequence[LayerConfig],
    *,
    tokens_per_block: int = 32,
    gpu: int = 64 * MIB,
    tiers: Sequence[CacheTierConfig] | None = None,
    max_util: float = 0.97,
    partial: bool = True,
    backoff: int = 0,
    min_snapshot: bool | None = None,
    constraints: Sequence[BatchDesc] = (),
    typical_step: BatchDesc | None = None,
    ratio: Sequence[float] | None = None,
    scratch_rewind: int | None = None,
    text_only: bool = False,
    strict_quota: bool = False,
) -> KVCacheManagerConfig:
    if min_snapshot is None:
        min_snapshot = any(isinstance(layer, SsmLayerConfig) for layer in layers)
    return KVCacheManagerConfig(
        tokens_per_block,
        [GpuCacheTierConfig(gpu)] if tiers is None else list(tiers),
        list(layers),
        max_util_for_resume=max_util,
        enable_partial_reuse=partial,
        reuse_match_backoff=backoff,
        constraints=list(constraints),
        typical_step=typical_step,
        initial_pool_ratio=ratio,
        swa_scratch_reuse=None if scratch_rewind is None else SwaScratchReuseConfig(scratch_rewind),
        commit_min_snapshot=min_snapshot,
        text_only=text_only,
        strict_quota=strict_quota,
    )


def batch(count: int, capacity: int, history: int = 0, system_prompt: int = 0) -> BatchDesc:
    return BatchDesc([KVCacheDesc(capacity, history) for _ in range(count)], system_prompt)


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
    ) -> None:
        self.config = config
        self.driver = EmulatedDriver(schedule, seed)
        self.manager = KVCacheManager(config, events, driver=self.driver, clock=clock)
        self.engine = FakeEngine(self.manager, self.driver, config) if engine else None
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

    def take(self, slots: int, tag: int = 1 << 20) -> Request:
        """Lock so many blocks' worth of slots with tokens of nobody else, uncommitted."""
        request = self.start()
        assert request.cache.resize(slots * self.tokens_per_block), request.cache.last_shortage
        del tag
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
        """Let the engine check the history and write these tokens behind it."""
        assert self.rig.engine is not None
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
