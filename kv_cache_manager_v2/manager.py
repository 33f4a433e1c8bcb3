"""The manager: wires the rooms of one engine's KV cache together and owns the open requests.

Rule: it decides nothing itself. Memory is split by `layout/sizing`, moved by `storage/`, found again by `reuse/`; a request's
life is in `sequence/`. Every call that leaves a request's own state first closes the caches whose handles were dropped, and
settles file transfers that ended.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kv_cache_manager_v2.config import CacheTierConfig, KVCacheManagerConfig
from kv_cache_manager_v2.counters import MovementCounters
from kv_cache_manager_v2.device.default import default_driver
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.ids import (
    GPU_LEVEL,
    UNSIGNED_64_LIMIT,
    CacheLevel,
    DataRole,
    LayerGroupId,
    LayerId,
    PageIndexMode,
)
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.layout.aggregation import AggregatedPageDesc, aggregate, pool_group_descs
from kv_cache_manager_v2.layout.page_index import PageIndexConverter, buffer_base, page_index_upper_bound, resolve_mode
from kv_cache_manager_v2.layout.pools import BufferId, PoolGroupDesc, build_layout
from kv_cache_manager_v2.layout.sizing import clamp_max_seq_len, size_levels
from kv_cache_manager_v2.layout.tuning import Tuner
from kv_cache_manager_v2.reuse.keys import ReuseScope, make_block_keys
from kv_cache_manager_v2.reuse.matching import Match, first_new_block_key, match, match_keys
from kv_cache_manager_v2.reuse.tokens import TokenSequence, pack
from kv_cache_manager_v2.reuse.tree import RadixTree
from kv_cache_manager_v2.sequence import residency
from kv_cache_manager_v2.sequence.state import ACTIVE, PriorityCallback, SequenceState, Shared
from kv_cache_manager_v2.sequence.upkeep import audit, check_everything, tidy
from kv_cache_manager_v2.storage.hierarchy import Hierarchy
from kv_cache_manager_v2.storage.resizing import AdjustResult, ResizeResult, resize_levels, resize_quota

DEBUG_VARIABLES: Final = ("KVCM_DEBUG", "TLLM_DEBUG_MODE")  # any of them set to 1: check every structure after every public call


class KVCacheManager:
    """The KV cache of one engine: pages of GPU memory, shared by prefix, with host memory and disk behind them.

    `driver` is the device; by default CUDA, or the emulated device if KVCM_DEVICE=emulated. Raises ConfigError for a
    configuration that can never work, DeviceUnavailableError without a device, OutOfMemoryError or HostRegistrationError if a
    tier cannot be had; nothing is left behind then. Close every cache, then `shutdown()`.
    """

    def __init__(
        self,
        config: KVCacheManagerConfig,
        *,
        driver: Driver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._down = True  # until all of it stands, a finaliser has nothing to do
        self._config = config.copy()
        layout = build_layout(self._config)
        sizings = size_levels(layout, self._config)
        self._driver = driver if driver is not None else default_driver()
        self._owns_driver = driver is None
        self._timeline = Timeline(self._driver)
        self._movement = MovementCounters(len(layout.life_cycles), len(sizings))
        self._hierarchy = Hierarchy(self._driver, self._timeline, layout, sizings, self._config.cache_tiers, self._movement)
        self._keys = make_block_keys(self._config.block_key_hash)
        self._tree = RadixTree(layout.life_cycles, layout.tokens_per_block, self._hierarchy, None, self._keys)
        self._tuner = Tuner(layout, self._config, sizings, clock)
        self._shared = Shared(
            layout,
            self._driver,
            self._timeline,
            self._hierarchy,
            self._tree,
            self._tuner,
            self._config.max_util_for_resume,
            self._config.enable_partial_reuse,
            self._config.reuse_match_backoff,
            self._config.commit_min_snapshot,
            any(os.environ.get(name) == "1" for name in DEBUG_VARIABLES),
        )
        self._down = False

    def __enter__(self) -> KVCacheManager:
        return self

    def __exit__(self, *details: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        if not self._down:
            self._shutdown_late()

    # --- requests

    def create_kv_cache(
        self,
        reuse_scope: ReuseScope | None = None,
        input_tokens: object = None,
        id: int | None = None,
        custom_priority_callback: PriorityCallback | None = None,
        expected_prompt_length: int | None = None,
        text_only: bool | None = None,
        enable_request_stats: bool = False,
    ) -> KVCache:
        """A cache for a new request, SUSPENDED, that already holds the longest reusable prefix of `input_tokens`.

        Takes no GPU memory. `input_tokens`: see `KVCache.commit`; None skips the match. Leave out the last prompt token if its
        output has to be computed. `id` is any unsigned 64-bit number. The callback gives the priority (0..100, lower is
        evicted earlier) of the page of (block ordinal, life cycle). Raises ConfigError for bad tokens, an id or a scope out of
        range.
        """
        del expected_prompt_length, enable_request_stats
        if id is not None and not 0 <= id < UNSIGNED_64_LIMIT:
            raise ConfigError(f"id {id} is out of range: it must be in 0..2**64-1, or None")
        plain = self._text_only(text_only)
        scope = reuse_scope if reuse_scope is not None else ReuseScope()
        tokens = pack(input_tokens, plain) if input_tokens is not None else None
        shared = self._shared
        with shared.lock:
            self._require_up("create_kv_cache()")
            tidy(self._shared)
            state = SequenceState(shared, scope, id, custom_priority_callback)
            if tokens is not None:
                residency.take_up(state, self._match(scope, tokens), tokens)
            shared.enter(state)
            audit(self._shared)
        return KVCache(self, state)

    def probe_reuse(self, reuse_scope: ReuseScope | None, tokens: object) -> int:
        """How many leading tokens a cache created now would reuse. Changes nothing; advice only, since others may evict
        meanwhile."""
        scope = reuse_scope if reuse_scope is not None else ReuseScope()
        packed = pack(tokens, self._config.text_only)
        with self._shared.lock:
            self._require_up("probe_reuse()")
            return self._match(scope, packed).num_tokens

    def probe_first_new_block_key(self, reuse_scope: ReuseScope | None, tokens: object) -> bytes | None:
        """The key of the first full block of this prompt that is not reusable: what a request created now would add first.

        None if the rest of the prompt fills no block. Two prompts with the same key are about to compute the same block.
        """
        scope = reuse_scope if reuse_scope is not None else ReuseScope()
        packed = pack(tokens, self._config.text_only)
        with self._shared.lock:
            self._require_up("probe_first_new_block_key()")
            return first_new_block_key(self._tree, scope, packed, self._match(scope, packed))

    def probe_reuse_by_keys(self, reuse_scope: ReuseScope | None, block_keys: Sequence[bytes]) -> int:
        """As `probe_reuse`, for a prompt known by the chained keys of its blocks (without the root's); matches whole blocks only.

        The first call computes the keys of all cached blocks; from then on they are kept.
        """
        scope = reuse_scope if reuse_scope is not None else ReuseScope()
        with self._shared.lock:
            self._require_up("probe_reuse_by_keys()")
            return match_keys(self._tree, scope, list(block_keys), self._config.reuse_match_backoff).num_tokens

    def clear_reusable_blocks(self) -> None:
        """Forget every cached block. Raises LogicError, nothing changed, while a cache is open."""
        with self._shared.lock:
            tidy(self._shared)
            self._require_none_open("clear_reusable_blocks()")
            self._tree.clear()
            audit(self._shared)

    def shutdown(self) -> None:
        """Give all memory back. Raises LogicError, nothing changed, while a cache is open. Idempotent."""
        with self._shared.lock:
            if self._down:
                return
            tidy(self._shared)
            self._require_none_open("shutdown()")
            self._tear_down()

    # --- memory

    @property
    def cache_tier_list(self) -> list[CacheTierConfig]:
        """The tiers, warm to cold; position = cache level."""
        return list(self._config.cache_tiers)

    def get_quota(self, cache_level: CacheLevel) -> int:
        """Bytes of a level's quota: as configured or resized, in whole grains, raised to the minimum where that was more."""
        return self._hierarchy.sizings[self._level(cache_level)].quota

    def clamp_max_seq_len_for_mem(self, batch_size: int, token_num_upper_bound: int) -> int:
        """Longest length, up to the bound, of one sequence beside batch_size - 1 sequences of one token; 0 if even those do
        not fit."""
        return clamp_max_seq_len(
            self._shared.layout, self._gpu_slots(), batch_size, token_num_upper_bound, self._config.max_util_for_resume
        )

    def resize(self, cache_level: CacheLevel, quota: int, best_efforts: bool = False) -> ResizeResult:
        """Give a level another quota, in bytes; every cache must be suspended. All or nothing: the result is true, or says why not.

        Pages that no longer fit move down or are dropped, in eviction order; those of suspended caches survive. `best_efforts`: the
        largest feasible quota not above the asked one instead of a refusal. Raises LogicError while a cache is ACTIVE, ConfigError
        for a level that there is not.
        """
        level = self._level(cache_level)
        with self._shared.lock:
            self._require_up("resize()")
            tidy(self._shared)
            self._require_all_suspended("resize()")
            current = self._hierarchy.sizings[level]
            weights = self._tuner.target_weights(CacheLevel(level))
            result = resize_quota(self._hierarchy, level, quota, weights, best_efforts)
            if result.ok and self._hierarchy.sizings[level] is not current:
                self._tuner.set_sizing(CacheLevel(level), self._hierarchy.sizings[level])
            audit(self._shared)
        return result

    @property
    def need_adjustment(self) -> bool:
        """Whether enough requests were sampled, the cooldown is over and the pools no longer have the shares that the lengths
        ask for.

        Then suspend every cache and call `adjust()`. Equal histories give equal answers, so ranks agree.
        """
        return self._tuner.need_adjustment()

    def adjust(self) -> AdjustResult:
        """Divide each level anew between the pool groups, by the sampled lengths; every cache must be suspended.

        All levels or none: the result is true, or says why not. Restarts the cooldown. Raises LogicError while a cache is ACTIVE.
        """
        with self._shared.lock:
            self._require_up("adjust()")
            tidy(self._shared)
            self._require_all_suspended("adjust()")
            levels = [CacheLevel(level) for level in range(self._hierarchy.num_levels)]
            targets = [
                self._tuner.target_sizing(level) if self._tuner.mismatched(level) else self._hierarchy.sizings[level]
                for level in levels
            ]
            result = AdjustResult(resize_levels(self._hierarchy, targets))
            if result.ok:
                for level in levels:
                    self._tuner.set_sizing(level, self._hierarchy.sizings[level])
            self._tuner.adjusted()
            audit(self._shared)
        return result

    @property
    def tuner(self) -> Tuner:
        """What was sampled, and the shares that it leads to."""
        return self._tuner

    @property
    def movement(self) -> MovementCounters:
        """Pages moved and dropped since construction."""
        return self._movement

    # --- layout

    @property
    def layer_ids(self) -> list[LayerId]:
        return list(self._shared.layout.layer_ids)

    @property
    def num_layers(self) -> int:
        return len(self._shared.layout.layer_ids)

    @property
    def all_buffer_ids(self) -> list[BufferId]:
        return list(self._shared.layout.all_buffer_ids)

    @property
    def layer_grouping(self) -> list[list[LayerId]]:
        """Layers by layer group."""
        return [list(layers) for layers in self._shared.layout.layers_of]

    def get_layer_group_id(self, layer_id: LayerId) -> LayerGroupId:
        """Layers with equal window and sinks share a group, and with it their page indices. Raises ConfigError for an unknown
        layer."""
        return LayerGroupId(self._shared.layout.life_cycle_of_layer(layer_id))

    @property
    def pool_group_descs(self) -> list[PoolGroupDesc]:
        """What disaggregated serving needs: every pool's address and how its slots divide into buffers. Fixed until a resize."""
        return pool_group_descs(self._shared.layout, self._gpu_slots(), self._gpu_addresses())

    def get_mem_pool_base_address(self, layer_id: LayerId, data_role: DataRole, index_mode: PageIndexMode | None = None) -> int:
        """Address that page index 0 of a buffer refers to. It never changes. None means SHARED."""
        layout = self._shared.layout
        place = layout.place(layer_id, data_role)
        pool_base = self._hierarchy.base_address(GPU_LEVEL, place.pool_group, place.pool)
        return buffer_base(place, pool_base, resolve_mode(layout, index_mode))

    def get_page_stride(self, layer_id: LayerId, data_role: DataRole) -> int:
        """Bytes from one page index of a buffer to the next: the configured buffer size."""
        return self._shared.layout.place(layer_id, data_role).stride

    def get_page_index_upper_bound(self, layer_id: LayerId, data_role: DataRole) -> int:
        """First page index (SHARED) past the end of the buffer's pool: the length of a tensor over its pages. Changes with a
        resize."""
        place = self._shared.layout.place(layer_id, data_role)
        return page_index_upper_bound(self._shared.layout, place, self._hierarchy.total(GPU_LEVEL, place.pool_group))

    def get_page_index_scale(self, layer_id: LayerId, data_role: DataRole) -> int:
        """Page indices from one slot to the next, in units of one buffer. Deprecated: use `get_page_index_converter`."""
        return self._shared.layout.place(layer_id, data_role).scale

    def get_page_index_converter(self, layer_id: LayerId, data_role: DataRole) -> PageIndexConverter:
        """What turns base page indices into this buffer's page indices."""
        return PageIndexConverter(self._shared.layout.place(layer_id, data_role), self._config.enable_swa_scratch_reuse)

    def get_aggregated_pages(self, buffer_ids: Iterable[BufferId]) -> list[AggregatedPageDesc]:
        """Contiguous runs of the buffers in a slot: the bytes of block j are at base + stride * aggregated_index[j], `size` long.

        In order of layer group, pool and offset, so that managers of equal layers pair up.
        """
        return aggregate(self._shared.layout, buffer_ids, self._gpu_addresses())

    def supports_index_mode(self, mode: PageIndexMode) -> bool | None:
        """Whether every cache supports this mode always; None: ask the cache."""
        if mode is PageIndexMode.SHARED and self._config.enable_swa_scratch_reuse:
            return None
        return True

    # --- settings

    @property
    def init_config(self) -> KVCacheManagerConfig:
        """A copy of the configuration."""
        return self._config.copy()

    @property
    def driver(self) -> Driver:
        """The device that this manager runs on."""
        return self._driver

    @property
    def tokens_per_block(self) -> int:
        return self._shared.tokens_per_block

    @property
    def allow_seq_rebasing(self) -> bool:
        """Whether a commit may adopt an identical block that somebody else committed first: always."""
        return True

    @property
    def enable_partial_match(self) -> bool:
        return self._config.enable_partial_reuse

    @property
    def commit_min_snapshot(self) -> bool:
        return self._config.commit_min_snapshot

    @property
    def enable_swa_scratch_reuse(self) -> bool:
        return self._config.enable_swa_scratch_reuse

    @property
    def text_only(self) -> bool:
        return self._config.text_only

    @property
    def num_open_caches(self) -> int:
        """Caches created and not closed."""
        return len(self._shared.open)

    # --- inside

    def check_invariants(self) -> None:
        """Assert every invariant of every structure. O(everything)."""
        with self._shared.lock:
            check_everything(self._shared)

    def _match(self, scope: ReuseScope, tokens: TokenSequence) -> Match:
        return match(self._tree, scope, tokens, self._config.enable_partial_reuse, self._config.reuse_match_backoff)

    def _text_only(self, wanted: bool | None) -> bool:
        if wanted is None:
            return self._config.text_only
        if self._config.text_only and not wanted:
            raise ConfigError("text_only=False: the manager was configured text_only=True, which no cache may relax")
        return wanted

    def _level(self, level: int) -> int:
        if not 0 <= level < self._hierarchy.num_levels:
            raise ConfigError(f"cache level {level} is out of range: this manager has levels 0..{self._hierarchy.num_levels - 1}")
        return level

    def _gpu_slots(self) -> list[int]:
        return [self._hierarchy.total(GPU_LEVEL, group) for group in range(self._shared.layout.num_pool_groups)]

    def _gpu_addresses(self) -> list[list[int]]:
        """Address of slot 0 of each pool, by pool group."""
        return [
            [self._hierarchy.base_address(GPU_LEVEL, group, pool) for pool in range(len(sizes))]
            for group, sizes in enumerate(self._shared.layout.slot_sizes)
        ]

    def _require_up(self, call: str) -> None:
        if self._down:
            raise LogicError(f"{call}: the manager has been shut down")

    def _require_all_suspended(self, call: str) -> None:
        count = 0
        for state in self._shared.open.values():
            if state.status == ACTIVE:
                count += 1
        if count > 0:
            raise LogicError(f"{call}: {count} KV cache(s) are ACTIVE; suspend them first")

    def _require_none_open(self, call: str) -> None:
        count = len(self._shared.open)
        if count > 0:
            raise LogicError(f"{call}: {count} KV cache(s) still open; close them first")

    def _tear_down(self) -> None:
        self._down = True
        self._tree.clear()
        self._hierarchy.close()
        self._timeline.close()
        if self._owns_driver:
            self._driver.close()

    def _shutdown_late(self) -> None:
        """The manager was dropped without shutdown: close what is open, then give everything back."""
        warnings.warn("a KVCacheManager was dropped without shutdown(); shut down now", ResourceWarning, stacklevel=2)
        for state in list(self._shared.open.values()):
            residency.close(state)
        self._tear_down()
