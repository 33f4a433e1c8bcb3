"""Queries about a manager's memory, layout and settings. None of them changes a cache or moves a page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex

from kv_cache_manager_v2.arguments import (
    at_least,
    each_of,
    page_index_mode,
    page_index_mode_or_none,
    renamed,
    shown,
    text,
    whole,
)
from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.disagg.aggregation import AggregatedPageDesc, aggregate, pool_group_descs
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import (
    GPU_LEVEL,
    CacheTier,
    DataRole,
    LayerGroupId,
    LayerId,
    PageIndexMode,
)
from kv_cache_manager_v2.layout.page_index import PageIndexConverter, buffer_base, page_index_upper_bound, resolve_mode
from kv_cache_manager_v2.layout.pools import BufferId, BufferPlace, PoolGroupDesc
from kv_cache_manager_v2.layout.sizing import clamp_max_seq_len
from kv_cache_manager_v2.layout.tuning import Tuner
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.statistics import (
    MovementCounters,
)
from kv_cache_manager_v2.storage.hierarchy import Hierarchy


class ManagerLayout:
    """The part of `KVCacheManager` that answers questions about memory, layout and settings."""

    def __init__(self, config: KVCacheManagerConfig, driver: Driver, hierarchy: Hierarchy, shared: ManagerState) -> None:
        self._config = config
        self._driver = driver
        self._hierarchy = hierarchy
        self._shared = shared
        self._layout = shared.layout

    @property
    def shared(self) -> ManagerState:
        """Internal state of the manager, for `introspection` and tests. Not part of the public interface."""
        return self._shared

    # --- memory

    @property
    def cache_tier_list(self) -> list[CacheTier]:
        """The kind of memory of each cache level. `init_config.cache_tiers` has the configured quotas."""
        return [tier_config.tier for tier_config in self._config.cache_tiers]

    @property
    def movement(self) -> MovementCounters:
        """Counters of pages moved, dropped and lost since construction."""
        return self._hierarchy.counters

    @property
    def tuner(self) -> Tuner:
        """The sampled lengths of requests, and the target pool ratio that follows from them."""
        return self._shared.tuner

    def get_quota(self, cache_level: SupportsIndex) -> int:
        """The quota of a level in bytes, after rounding up to the granularity and to the minimum."""
        return self._hierarchy.sizings[self._level(cache_level)].quota

    def clamp_max_seq_len_for_mem(self, batch_size: SupportsIndex, token_num_upper_bound: SupportsIndex) -> int:
        """The longest sequence, in tokens up to the bound, that fits the GPU together with `batch_size - 1` one-token sequences.

        0 if there is none. Counts one beam per sequence. A further beam shares the full blocks from before it was added: count it
        as another sequence with the rest of the tokens.
        """
        batch = at_least(batch_size, "batch_size", 1)
        upper = at_least(token_num_upper_bound, "token_num_upper_bound", 0)
        return clamp_max_seq_len(self._shared.layout, self._gpu_slots(), batch, upper, self._config.max_util_for_resume)

    # --- layout

    @property
    def layer_ids(self) -> list[LayerId]:
        """Ids of all layers, in the order of the configuration."""
        return list(self._layout.layer_ids)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self._layout.layer_ids)

    @property
    def all_buffer_ids(self) -> list[BufferId]:
        """(layer, role) of all buffers, in the order of the configuration."""
        return list(self._layout.all_buffer_ids)

    @property
    def layer_grouping(self) -> list[list[LayerId]]:
        """Ids of the layers of each layer group. A layer with attention and a recurrent state is in two of them."""
        return [list(layers) for layers in self._layout.layers_of]

    def get_layer_group_id(self, layer_id: SupportsIndex, data_role: DataRole | None = None) -> LayerGroupId:
        """The layer group of a layer. Layers with equal windows and sinks form one group, and have the same page indices.

        A layer with attention and a recurrent state is in two groups: that of the buffer `data_role`, by default of its attention.
        Raises UnknownBufferError for an unknown layer or role.
        """
        if data_role is not None:
            return LayerGroupId(self._place(layer_id, data_role).life_cycle)
        return LayerGroupId(self._layout.life_cycle_of_layer(whole(layer_id, "layer_id")))

    @property
    def pool_group_descs(self) -> list[PoolGroupDesc]:
        """The address of every pool, and how its slots are divided into buffers, for disaggregated serving. A resize changes it."""
        return pool_group_descs(self._layout, self._gpu_slots(), self._gpu_addresses())

    def get_mem_pool_base_address(
        self, layer_id: SupportsIndex, data_role: DataRole, index_mode: PageIndexMode | SupportsIndex | None = None
    ) -> int:
        """Address of page index 0 of a buffer. It never changes. The default mode is SHARED; with scratch reuse, pass a mode.

        Raises UnknownBufferError (a KeyError) for an unknown layer or role.
        """
        place = self._place(layer_id, data_role)
        mode = resolve_mode(self._layout, page_index_mode_or_none(index_mode, "index_mode"))
        return buffer_base(place, self._hierarchy.base_address(GPU_LEVEL, place.pool_group, place.pool), mode)

    def get_page_stride(self, layer_id: SupportsIndex, data_role: DataRole) -> int:
        """Bytes from one page index of a buffer to the next: the configured size of the buffer."""
        return self._place(layer_id, data_role).stride

    def get_page_index_upper_bound(self, layer_id: SupportsIndex, data_role: DataRole) -> int:
        """One more than the largest page index of a buffer (SHARED): the length of a tensor over its pages. A resize changes it."""
        place = self._place(layer_id, data_role)
        return page_index_upper_bound(self._layout, place, self._hierarchy.total(GPU_LEVEL, place.pool_group))

    def get_page_index_scale(self, layer_id: SupportsIndex, data_role: DataRole) -> int:
        """Page indices per slot, in units of one buffer. Deprecated: use `get_page_index_converter`."""
        return self._place(layer_id, data_role).scale

    def get_page_index_converter(self, layer_id: SupportsIndex, data_role: DataRole) -> PageIndexConverter:
        """The converter of base page indices to page indices of this buffer.

        Raises UnknownBufferError (a KeyError) for an unknown layer or role.
        """
        return PageIndexConverter(self._place(layer_id, data_role), self._config.enable_swa_scratch_reuse)

    def get_aggregated_pages(self, buffer_ids: Iterable[BufferId]) -> list[AggregatedPageDesc]:
        """Contiguous runs of the given buffers in a slot. Block j has `size` bytes at `base + stride * aggregated_index[j]`.

        Ordered by layer group, pool and offset, which is the same in managers with equal layers. Raises ConfigError for invalid
        ids.
        """
        wanted: list[BufferId] = []
        for item in each_of(buffer_ids, "buffer_ids", "BufferId"):
            if not isinstance(item, tuple) or len(item) != 2:
                raise ConfigError(f"buffer_ids has {shown(item)}; each item must be a BufferId")
            wanted.append(BufferId(whole(item[0], "layer_id in buffer_ids"), text(item[1], "role in buffer_ids")))
        return aggregate(self._layout, wanted, self._gpu_addresses())

    def supports_index_mode(self, mode: PageIndexMode | SupportsIndex) -> bool | None:
        """Whether every cache always supports this mode. None if it depends on the cache: use `KVCache.supports_index_mode`."""
        if page_index_mode(mode, "mode") is PageIndexMode.SHARED and self._config.enable_swa_scratch_reuse:
            return None
        return True

    # --- settings

    @property
    def init_config(self) -> KVCacheManagerConfig:
        """A copy of the configuration."""
        return self._config.copy()

    @property
    def driver(self) -> Driver:
        """The device of this manager."""
        return self._driver

    @property
    def tokens_per_block(self) -> int:
        """Tokens per block."""
        return self._shared.tokens_per_block

    @property
    def allow_seq_rebasing(self) -> bool:
        """Whether commits may adopt pages of identical cached blocks, as configured. A cache has a setting of its own."""
        return self._config.allow_seq_rebasing

    @property
    def enable_partial_match(self) -> bool:
        """Whether a match may end inside a block."""
        return self._config.enable_partial_reuse

    @property
    def commit_min_snapshot(self) -> bool:
        """Whether commits keep only pages that reuse at the committed length needs, as configured."""
        return self._config.commit_min_snapshot

    @property
    def enable_swa_scratch_reuse(self) -> bool:
        """Whether long prefill steps may use scratch slots, as configured."""
        return self._config.enable_swa_scratch_reuse

    @property
    def text_only(self) -> bool:
        """Whether no cache may commit digests."""
        return self._config.text_only

    @property
    def num_open_caches(self) -> int:
        """Number of caches that are not closed."""
        return len(self._shared.open)

    # --- internal

    def _level(self, cache_level: object, level: SupportsIndex | None = None) -> int:
        number = whole(cache_level if level is None else renamed("level", "cache_level", level), "cache_level")
        if not 0 <= number < self._hierarchy.num_levels:
            raise ConfigError(f"cache level {number} is out of range: this manager has levels 0..{self._hierarchy.num_levels - 1}")
        return number

    def _place(self, layer_id: object, data_role: object) -> BufferPlace:
        return self._layout.place(whole(layer_id, "layer_id"), text(data_role, "data_role"))

    def _gpu_slots(self) -> list[int]:
        return [self._hierarchy.total(GPU_LEVEL, group) for group in range(self._layout.num_pool_groups)]

    def _gpu_addresses(self) -> list[list[int]]:
        """Address of slot 0 of each pool, by pool group."""
        return [
            [self._hierarchy.base_address(GPU_LEVEL, group, pool) for pool in range(len(sizes))]
            for group, sizes in enumerate(self._layout.slot_sizes)
        ]
