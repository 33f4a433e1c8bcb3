"""What can be asked of a manager: its memory, its layout, its settings.

Rule: nothing here changes a cache or moves a page.
"""

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
from kv_cache_manager_v2.config import CacheTierConfig, KVCacheManagerConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.disagg.aggregation import AggregatedPageDesc, aggregate, pool_group_descs
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import (
    GPU_LEVEL,
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
    """The questions about memory and layout that `KVCacheManager` answers."""

    def __init__(self, config: KVCacheManagerConfig, driver: Driver, hierarchy: Hierarchy, shared: ManagerState) -> None:
        self._config = config
        self._driver = driver
        self._hierarchy = hierarchy
        self._shared = shared
        self._layout = shared.layout

    @property
    def shared(self) -> ManagerState:
        """Internal: the rooms behind this manager, for `introspection` and tests; no part of the interface."""
        return self._shared

    # --- memory

    @property
    def cache_tier_list(self) -> list[CacheTierConfig]:
        """The configured tiers, warm to cold; the position is the cache level."""
        return list(self._config.cache_tiers)

    @property
    def movement(self) -> MovementCounters:
        """Counters of pages moved and dropped since the manager was made."""
        return self._hierarchy.counters

    @property
    def tuner(self) -> Tuner:
        """What was sampled, and the shares that it leads to."""
        return self._shared.tuner

    def get_quota(self, cache_level: SupportsIndex) -> int:
        """Bytes of a level: as configured or resized, in whole grains, raised to the minimum where the quota was below it."""
        return self._hierarchy.sizings[self._level(cache_level)].quota

    def clamp_max_seq_len_for_mem(self, batch_size: SupportsIndex, token_num_upper_bound: SupportsIndex) -> int:
        """The longest sequence, in tokens up to the bound, that fits beside `batch_size - 1` sequences of one token; else 0.

        Counts one beam each. A further beam shares the full blocks from before it was added, and needs pages for the rest: count it
        as another sequence of that many tokens.
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
        """Ids of the layers of each layer group."""
        return [list(layers) for layers in self._layout.layers_of]

    def get_layer_group_id(self, layer_id: SupportsIndex) -> LayerGroupId:
        """The group of a layer: layers of equal window and sinks share one, and with it their page indices.

        Raises UnknownBufferError for an unknown layer.
        """
        return LayerGroupId(self._layout.life_cycle_of_layer(whole(layer_id, "layer_id")))

    @property
    def pool_group_descs(self) -> list[PoolGroupDesc]:
        """The address of every pool and how its slots divide into buffers, for disaggregated serving. Fixed until a resize."""
        return pool_group_descs(self._layout, self._gpu_slots(), self._gpu_addresses())

    def get_mem_pool_base_address(
        self, layer_id: SupportsIndex, data_role: DataRole, index_mode: PageIndexMode | SupportsIndex | None = None
    ) -> int:
        """Address of page index 0 of a buffer; it never changes. None is SHARED, or an error with scratch reuse.

        Raises UnknownBufferError (a KeyError) for an unknown layer or role.
        """
        place = self._place(layer_id, data_role)
        mode = resolve_mode(self._layout, page_index_mode_or_none(index_mode, "index_mode"))
        return buffer_base(place, self._hierarchy.base_address(GPU_LEVEL, place.pool_group, place.pool), mode)

    def get_page_stride(self, layer_id: SupportsIndex, data_role: DataRole) -> int:
        """Bytes from one page index of a buffer to the next: the configured size of the buffer."""
        return self._place(layer_id, data_role).stride

    def get_page_index_upper_bound(self, layer_id: SupportsIndex, data_role: DataRole) -> int:
        """Length of a tensor over the pages of a buffer: one more than its largest page index (SHARED). A resize changes it."""
        place = self._place(layer_id, data_role)
        return page_index_upper_bound(self._layout, place, self._hierarchy.total(GPU_LEVEL, place.pool_group))

    def get_page_index_scale(self, layer_id: SupportsIndex, data_role: DataRole) -> int:
        """Page indices per slot, in units of one buffer. Deprecated: use `get_page_index_converter`."""
        return self._place(layer_id, data_role).scale

    def get_page_index_converter(self, layer_id: SupportsIndex, data_role: DataRole) -> PageIndexConverter:
        """The function from base page indices to the page indices of this buffer."""
        return PageIndexConverter(self._place(layer_id, data_role), self._config.enable_swa_scratch_reuse)

    def get_aggregated_pages(self, buffer_ids: Iterable[BufferId]) -> list[AggregatedPageDesc]:
        """Contiguous runs of some buffers in a slot: block j has `size` bytes at `base + stride * aggregated_index[j]`.

        Ordered by layer group, pool and offset, so that managers of equal layers pair up. Raises ConfigError for bad ids.
        """
        wanted: list[BufferId] = []
        for item in each_of(buffer_ids, "buffer_ids", "BufferId"):
            if not isinstance(item, tuple) or len(item) != 2:
                raise ConfigError(f"buffer_ids has {shown(item)}; each item must be a BufferId")
            wanted.append(BufferId(whole(item[0], "layer_id in buffer_ids"), text(item[1], "role in buffer_ids")))
        return aggregate(self._layout, wanted, self._gpu_addresses())

    def supports_index_mode(self, mode: PageIndexMode | SupportsIndex) -> bool | None:
        """Whether every cache supports this mode at all times; None: it depends on the cache, ask it."""
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
        """Tokens in one block."""
        return self._shared.tokens_per_block

    @property
    def allow_seq_rebasing(self) -> bool:
        """Whether a commit may adopt an identical block that another request committed first: always."""
        return True

    @property
    def enable_partial_match(self) -> bool:
        """Whether a match may end inside a block."""
        return self._config.enable_partial_reuse

    @property
    def commit_min_snapshot(self) -> bool:
        """Whether commits keep only what reuse at the committed count needs, by configuration."""
        return self._config.commit_min_snapshot

    @property
    def enable_swa_scratch_reuse(self) -> bool:
        """Whether long prefill steps may share scratch slots, by configuration."""
        return self._config.enable_swa_scratch_reuse

    @property
    def text_only(self) -> bool:
        """Whether no cache may commit digests."""
        return self._config.text_only

    @property
    def num_open_caches(self) -> int:
        """Caches created and not closed."""
        return len(self._shared.open)

    # --- inside

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
