"""Queries about a manager's memory, layout and settings. None of them changes a cache or moves a page."""

from collections.abc import Iterable
from typing import SupportsIndex

from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.disagg.aggregation import AggregatedPageDesc
from kv_cache_manager_v2.ids import CacheTier, DataRole, LayerGroupId, LayerId, PageIndexMode
from kv_cache_manager_v2.layout.page_index import PageIndexConverter
from kv_cache_manager_v2.layout.pools import BufferId, PoolGroupDesc
from kv_cache_manager_v2.layout.tuning import Tuner
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.statistics import MovementCounters
from kv_cache_manager_v2.storage.hierarchy import Hierarchy

class ManagerLayout:
    """The part of `KVCacheManager` that answers questions about memory, layout and settings."""

    def __init__(self, config: KVCacheManagerConfig, driver: Driver, hierarchy: Hierarchy, shared: ManagerState) -> None: ...
    @property
    def shared(self) -> ManagerState:
        """Internal state of the manager, for `introspection` and tests. Not part of the public interface."""

    @property
    def cache_tier_list(self) -> list[CacheTier]:
        """The kind of memory of each cache level. `init_config.cache_tiers` has the configured quotas."""

    @property
    def movement(self) -> MovementCounters:
        """Counters of pages moved, dropped and lost since construction."""

    @property
    def tuner(self) -> Tuner:
        """The sampled lengths of requests, and the target pool ratio that follows from them."""

    def get_quota(self, cache_level: SupportsIndex) -> int:
        """The quota of a level in bytes, after rounding up to the granularity and to the minimum."""

    def clamp_max_seq_len_for_mem(self, batch_size: SupportsIndex, token_num_upper_bound: SupportsIndex) -> int:
        """The longest sequence, in tokens up to the bound, that fits the GPU together with `batch_size - 1` one-token sequences.

        0 if there is none. Counts one beam per sequence. A further beam shares the full blocks from before it was added: count it
        as another sequence with the rest of the tokens.
        """

    @property
    def layer_ids(self) -> list[LayerId]:
        """Ids of all layers, in the order of the configuration."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""

    @property
    def all_buffer_ids(self) -> list[BufferId]:
        """(layer, role) of all buffers, in the order of the configuration."""

    @property
    def layer_grouping(self) -> list[list[LayerId]]:
        """Ids of the layers of each layer group. A layer with attention and a recurrent state is in two of them."""

    def get_layer_group_id(self, layer_id: SupportsIndex, data_role: DataRole | None = None) -> LayerGroupId:
        """The layer group of a layer. Layers with equal windows and sinks form one group, and have the same page indices.

        A layer with attention and a recurrent state is in two groups: that of the buffer `data_role`, by default of its attention.
        Raises UnknownBufferError for an unknown layer or role.
        """

    @property
    def pool_group_descs(self) -> list[PoolGroupDesc]:
        """The address of every pool, and how its slots are divided into buffers, for disaggregated serving. A resize changes it."""

    def get_mem_pool_base_address(
        self, layer_id: SupportsIndex, data_role: DataRole, index_mode: PageIndexMode | SupportsIndex | None = None
    ) -> int:
        """Address of page index 0 of a buffer. It never changes. The default mode is SHARED; with scratch reuse, pass a mode.

        Raises UnknownBufferError (a KeyError) for an unknown layer or role.
        """

    def get_page_stride(self, layer_id: SupportsIndex, data_role: DataRole) -> int:
        """Bytes from one page index of a buffer to the next: the configured size of the buffer."""

    def get_page_index_upper_bound(self, layer_id: SupportsIndex, data_role: DataRole) -> int:
        """One more than the largest page index of a buffer (SHARED): the length of a tensor over its pages. A resize changes it."""

    def get_page_index_scale(self, layer_id: SupportsIndex, data_role: DataRole) -> int:
        """Page indices per slot, in units of one buffer. Deprecated: use `get_page_index_converter`."""

    def get_page_index_converter(self, layer_id: SupportsIndex, data_role: DataRole) -> PageIndexConverter:
        """The converter of base page indices to page indices of this buffer.

        Raises UnknownBufferError (a KeyError) for an unknown layer or role.
        """

    def get_aggregated_pages(self, buffer_ids: Iterable[BufferId]) -> list[AggregatedPageDesc]:
        """Contiguous runs of the given buffers in a slot. Block j has `size` bytes at `base + stride * aggregated_index[j]`.

        Ordered by layer group, pool and offset, which is the same in managers with equal layers. Raises ConfigError for invalid
        ids.
        """

    def supports_index_mode(self, mode: PageIndexMode | SupportsIndex) -> bool | None:
        """Whether every cache always supports this mode. None if it depends on the cache: use `KVCache.supports_index_mode`."""

    @property
    def init_config(self) -> KVCacheManagerConfig:
        """A copy of the configuration."""

    @property
    def driver(self) -> Driver:
        """The device of this manager."""

    @property
    def tokens_per_block(self) -> int:
        """Tokens per block."""

    @property
    def allow_seq_rebasing(self) -> bool:
        """Whether commits may adopt pages of identical cached blocks, as configured. A cache has a setting of its own."""

    @property
    def enable_partial_match(self) -> bool:
        """Whether a match may end inside a block."""

    @property
    def commit_min_snapshot(self) -> bool:
        """Whether commits keep only pages that reuse at the committed length needs, as configured."""

    @property
    def enable_swa_scratch_reuse(self) -> bool:
        """Whether long prefill steps may use scratch slots, as configured."""

    @property
    def text_only(self) -> bool:
        """Whether no cache may commit digests."""

    @property
    def num_open_caches(self) -> int:
        """Number of caches that are not closed."""
