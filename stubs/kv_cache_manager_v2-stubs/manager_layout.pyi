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
        """The configured tiers, warm to cold; the position is the cache level."""

    @property
    def movement(self) -> MovementCounters:
        """Counters of pages moved and dropped since the manager was made."""

    @property
    def tuner(self) -> Tuner:
        """What was sampled, and the shares that it leads to."""

    def get_quota(self, cache_level: SupportsIndex) -> int:
        """Bytes of a level: as configured or resized, in whole grains, raised to the minimum where the quota was below it."""

    def clamp_max_seq_len_for_mem(self, batch_size: SupportsIndex, token_num_upper_bound: SupportsIndex) -> int:
        """The longest sequence, in tokens up to the bound, that fits beside `batch_size - 1` sequences of one token; else 0.

        Counts one beam each. A further beam shares the full blocks from before it was added, and needs pages for the rest: count it
        as another sequence of that many tokens.
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
        """Ids of the layers of each layer group."""

    def get_layer_group_id(self, layer_id: SupportsIndex) -> LayerGroupId:
        """The group of a layer: layers of equal window and sinks share one, and with it their page indices.

        Raises UnknownBufferError for an unknown layer.
        """

    @property
    def pool_group_descs(self) -> list[PoolGroupDesc]:
        """The address of every pool and how its slots divide into buffers, for disaggregated serving. Fixed until a resize."""

    def get_mem_pool_base_address(
        self, layer_id: SupportsIndex, data_role: DataRole, index_mode: PageIndexMode | SupportsIndex | None = None
    ) -> int:
        """Address of page index 0 of a buffer; it never changes. None is SHARED, or an error with scratch reuse.

        Raises UnknownBufferError (a KeyError) for an unknown layer or role.
        """

    def get_page_stride(self, layer_id: SupportsIndex, data_role: DataRole) -> int:
        """Bytes from one page index of a buffer to the next: the configured size of the buffer."""

    def get_page_index_upper_bound(self, layer_id: SupportsIndex, data_role: DataRole) -> int:
        """Length of a tensor over the pages of a buffer: one more than its largest page index (SHARED). A resize changes it."""

    def get_page_index_scale(self, layer_id: SupportsIndex, data_role: DataRole) -> int:
        """Page indices per slot, in units of one buffer. Deprecated: use `get_page_index_converter`."""

    def get_page_index_converter(self, layer_id: SupportsIndex, data_role: DataRole) -> PageIndexConverter:
        """The function from base page indices to the page indices of this buffer."""

    def get_aggregated_pages(self, buffer_ids: Iterable[BufferId]) -> list[AggregatedPageDesc]:
        """Contiguous runs of some buffers in a slot: block j has `size` bytes at `base + stride * aggregated_index[j]`.

        Ordered by layer group, pool and offset, so that managers of equal layers pair up. Raises ConfigError for bad ids.
        """

    def supports_index_mode(self, mode: PageIndexMode | SupportsIndex) -> bool | None:
        """Whether every cache supports this mode at all times; None: it depends on the cache, ask it."""

    @property
    def init_config(self) -> KVCacheManagerConfig:
        """A copy of the configuration."""

    @property
    def driver(self) -> Driver:
        """The device of this manager."""

    @property
    def tokens_per_block(self) -> int:
        """Tokens in one block."""

    @property
    def allow_seq_rebasing(self) -> bool:
        """Whether a commit may adopt an identical block that another request committed first: always."""

    @property
    def enable_partial_match(self) -> bool:
        """Whether a match may end inside a block."""

    @property
    def commit_min_snapshot(self) -> bool:
        """Whether commits keep only what reuse at the committed count needs, by configuration."""

    @property
    def enable_swa_scratch_reuse(self) -> bool:
        """Whether long prefill steps may share scratch slots, by configuration."""

    @property
    def text_only(self) -> bool:
        """Whether no cache may commit digests."""

    @property
    def num_open_caches(self) -> int:
        """Caches created and not closed."""
