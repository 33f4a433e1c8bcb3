"""What can be asked of a manager: its memory, its layout, its settings.

Rule: nothing here changes a cache or moves a page.
"""

from collections.abc import Iterable
from typing import SupportsIndex

from kv_cache_manager_v2.config import CacheTierConfig, KVCacheManagerConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.disagg.aggregation import AggregatedPageDesc
from kv_cache_manager_v2.ids import DataRole, LayerGroupId, LayerId, PageIndexMode
from kv_cache_manager_v2.layout.page_index import PageIndexConverter
from kv_cache_manager_v2.layout.pools import BufferId, PoolGroupDesc
from kv_cache_manager_v2.layout.tuning import Tuner
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.statistics import MovementCounters
from kv_cache_manager_v2.storage.hierarchy import Hierarchy

class ManagerLayout:
    """The questions about memory and layout that `KVCacheManager` answers."""

    def __init__(self, config: KVCacheManagerConfig, driver: Driver, hierarchy: Hierarchy, shared: ManagerState) -> None: ...
    @property
    def shared(self) -> ManagerState:
        """Internal: the rooms behind this manager, for `introspection` and tests; no part of the interface."""

    @property
    def cache_tier_list(self) -> list[CacheTierConfig]:
        """The tiers, warm to cold; position = cache level."""

    @property
    def movement(self) -> MovementCounters:
        """Pages moved and dropped since construction."""

    @property
    def tuner(self) -> Tuner:
        """What was sampled, and the shares that it leads to."""

    def get_quota(self, cache_level: SupportsIndex) -> int:
        """Bytes of a level's quota: as configured or resized, in whole grains, raised to the minimum where that was more."""

    def clamp_max_seq_len_for_mem(self, batch_size: SupportsIndex, token_num_upper_bound: SupportsIndex) -> int:
        """Longest length, up to the bound, of one sequence beside batch_size - 1 sequences of one token; 0 if even those do
        not fit.

        Of one beam each: a further beam shares the full blocks before the length at which the request was widened, and has
        pages of its own behind it; count those as another sequence, of that many tokens.
        """

    @property
    def layer_ids(self) -> list[LayerId]: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def all_buffer_ids(self) -> list[BufferId]: ...
    @property
    def layer_grouping(self) -> list[list[LayerId]]:
        """Layers by layer group."""

    def get_layer_group_id(self, layer_id: SupportsIndex) -> LayerGroupId:
        """Layers with equal window and sinks share a group, and with it their page indices. Raises ConfigError for an unknown
        layer."""

    @property
    def pool_group_descs(self) -> list[PoolGroupDesc]:
        """What disaggregated serving needs: every pool's address and how its slots divide into buffers. Fixed until a resize."""

    def get_mem_pool_base_address(
        self, layer_id: SupportsIndex, data_role: DataRole, index_mode: PageIndexMode | SupportsIndex | None = None
    ) -> int:
        """Address that page index 0 of a buffer refers to. It never changes. None means SHARED."""

    def get_page_stride(self, layer_id: SupportsIndex, data_role: DataRole) -> int:
        """Bytes from one page index of a buffer to the next: the configured buffer size."""

    def get_page_index_upper_bound(self, layer_id: SupportsIndex, data_role: DataRole) -> int:
        """First page index (SHARED) past the end of the buffer's pool: the length of a tensor over its pages. Changes with a
        resize."""

    def get_page_index_scale(self, layer_id: SupportsIndex, data_role: DataRole) -> int:
        """Page indices from one slot to the next, in units of one buffer. Deprecated: use `get_page_index_converter`."""

    def get_page_index_converter(self, layer_id: SupportsIndex, data_role: DataRole) -> PageIndexConverter:
        """What turns base page indices into this buffer's page indices."""

    def get_aggregated_pages(self, buffer_ids: Iterable[BufferId]) -> list[AggregatedPageDesc]:
        """Contiguous runs of the buffers in a slot: the bytes of block j are at base + stride * aggregated_index[j], `size` long.

        In order of layer group, pool and offset, so that managers of equal layers pair up.
        """

    def supports_index_mode(self, mode: PageIndexMode | SupportsIndex) -> bool | None:
        """Whether every cache supports this mode always; None: ask the cache."""

    @property
    def init_config(self) -> KVCacheManagerConfig:
        """A copy of the configuration."""

    @property
    def driver(self) -> Driver:
        """The device that this manager runs on."""

    @property
    def tokens_per_block(self) -> int: ...
    @property
    def allow_seq_rebasing(self) -> bool:
        """Whether a commit may adopt an identical block that somebody else committed first: always."""

    @property
    def enable_partial_match(self) -> bool: ...
    @property
    def commit_min_snapshot(self) -> bool: ...
    @property
    def enable_swa_scratch_reuse(self) -> bool: ...
    @property
    def text_only(self) -> bool: ...
    @property
    def num_open_caches(self) -> int:
        """Caches created and not closed."""
