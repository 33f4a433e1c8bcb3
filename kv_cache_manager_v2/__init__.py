"""KV-cache management for LLM inference engines: paged, shared by prefix, tiered over GPU, host memory and disk.

The public face: names are re-exported here and nothing is decided here. Start with `KVCacheManager` and `KVCacheManagerConfig`.
"""

from __future__ import annotations

from kv_cache_manager_v2.backend import BACKEND  # before all others: it chooses the build of every other module

# isort: split

from kv_cache_manager_v2 import _introspection
from kv_cache_manager_v2.batch_calls import commit_ahead_batch, commit_batch, resize_batch
from kv_cache_manager_v2.batch_tables import PlainBatchTables
from kv_cache_manager_v2.build import BuildInfo, build_info
from kv_cache_manager_v2.cold_pages import IKvCacheColdPageCodec, create_default_kv_cache_cold_page_codec
from kv_cache_manager_v2.config import (
    BatchDesc,
    CacheTierConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
    SwaScratchReuseConfig,
)
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.diagnostics import NDEBUG, num_live_managers, poison_reason, take_poison
from kv_cache_manager_v2.disagg.aggregation import AggregatedPageDesc, ExpandedBuffer
from kv_cache_manager_v2.disagg.page_matching import TransferPlan, match_page_tables
from kv_cache_manager_v2.disagg.page_table import KVCachePageTable, page_table_of
from kv_cache_manager_v2.emulated.driver import EmulatedDriver
from kv_cache_manager_v2.errors import (
    AlreadyDroppedError,
    ConfigError,
    CorruptedError,
    CuError,
    DeviceUnavailableError,
    HostRegistrationError,
    KVCacheError,
    LogicError,
    OutOfMemoryError,
    OutOfPagesError,
    PageDataLostError,
    UnknownBufferError,
)
from kv_cache_manager_v2.events.hashes import v1_block_hash
from kv_cache_manager_v2.events.manager import KVCacheEventManager
from kv_cache_manager_v2.events.mirror import EventMirror
from kv_cache_manager_v2.events.records import (
    EventSnapshot,
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventDiff,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    UniqueToken,
    serialize_events,
)
from kv_cache_manager_v2.eviction.adaptive import AdaptivePolicy, HintsPolicy
from kv_cache_manager_v2.eviction.admission import AdaptiveAdmission, DiskAdmission, LeavingPage, SecondUse
from kv_cache_manager_v2.eviction.order import EvictionOrder
from kv_cache_manager_v2.eviction.policy import EvictionPolicy, RequestEnd
from kv_cache_manager_v2.external_pages import ExternalGpuTierConfig, Transfer
from kv_cache_manager_v2.ids import (
    BAD_PAGE_INDEX,
    CACHE_LEVEL1,
    DEFAULT_BEAM_INDEX,
    GPU_LEVEL,
    PRIORITY_DEFAULT,
    BeamIndex,
    BlockOrdinal,
    CacheLevel,
    CacheTier,
    CudaStream,
    DataRole,
    LayerGroupId,
    LayerId,
    LifeCycleId,
    MemAddress,
    PageIndexMode,
    PageStatus,
    PoolGroupId,
    PoolGroupIndex,
    PoolId,
    PoolIndex,
    Priority,
    SlidingWindowSize,
    SlotId,
    Stream,
    TokenId,
)
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.layer_config import AttentionLayerConfig, BufferConfig, SsmLayerConfig
from kv_cache_manager_v2.layout.arithmetic import HalfOpenRange, exact_div, typed_range
from kv_cache_manager_v2.layout.explain import SizingLevel, SizingRow, SizingTable, explain_sizing
from kv_cache_manager_v2.layout.life_cycle import AttnLifeCycle, LifeCycle
from kv_cache_manager_v2.layout.page_index import PageIndexConverter, ScratchDesc
from kv_cache_manager_v2.layout.pools import BufferId, CoalescedBuffer, PoolDesc, PoolGroupDesc, SlotDesc, SlotDescVariant
from kv_cache_manager_v2.listener import CacheListener
from kv_cache_manager_v2.make_room import MakeRoom
from kv_cache_manager_v2.manager import KVCacheManager
from kv_cache_manager_v2.manager_statistics import StatisticsReading
from kv_cache_manager_v2.planning.hit_curve import HitCurve
from kv_cache_manager_v2.renamed import find_old_paths
from kv_cache_manager_v2.request.planned_drop import PlannedDropHandle
from kv_cache_manager_v2.request.request import CacheStatus
from kv_cache_manager_v2.reuse.explain import MissCause, MissReport
from kv_cache_manager_v2.reuse.explain_hits import GroupHits, HitsReport
from kv_cache_manager_v2.reuse.keys import ReuseScope, sequence_to_blockchain_keys
from kv_cache_manager_v2.reuse.limits import MatchLimits
from kv_cache_manager_v2.reuse.tokens import MmItemContext, TokenIdExt, Tokens, gen_multimodal_cache_key_tokens
from kv_cache_manager_v2.reuse_match import ReuseMatch
from kv_cache_manager_v2.statistics import (
    ITERATION_FIELDS,
    KVCacheIterationStatsDelta,
    KVCacheStatsDelta,
    MovementCounters,
    PoolGroupPeakBlockStats,
    RequestTotals,
    ReusedBlocksByLevel,
    SsmSnapshotIterationStatsDelta,
    StorageStatistics,
)
from kv_cache_manager_v2.step import Step
from kv_cache_manager_v2.storage.planner import Shortage
from kv_cache_manager_v2.storage.resize import AdjustResult, ResizeResult
from kv_cache_manager_v2.suspension import SuspendCheapest, SuspendYoungest
from kv_cache_manager_v2.token_slots import TokenSlots, slots_to_read, slots_to_write

_KVCache = KVCache  # the reference's name
KvCacheStatus = CacheStatus  # likewise
_cpp_introspection = _introspection  # not None: tokens are taken as int32 buffers
_KV_CACHE_ITERATION_STATS_DELTA_FIELDS = ITERATION_FIELDS  # likewise

find_old_paths()

__all__ = [
    # the manager and its requests
    "KVCacheManager",
    "KVCache",
    "_KVCache",
    "CacheStatus",
    "KvCacheStatus",
    "ReuseMatch",
    "ReuseScope",
    "Shortage",
    "ResizeResult",
    "AdjustResult",
    "PlannedDropHandle",
    "resize_batch",
    "commit_ahead_batch",
    "commit_batch",
    "Step",
    "MakeRoom",
    "AdaptiveAdmission",
    "DiskAdmission",
    "LeavingPage",
    "SecondUse",
    "EvictionOrder",
    "EvictionPolicy",
    "RequestEnd",
    "AdaptivePolicy",
    "HintsPolicy",
    "SuspendCheapest",
    "SuspendYoungest",
    "PlainBatchTables",
    "TokenSlots",
    "slots_to_read",
    "slots_to_write",
    "num_live_managers",
    "poison_reason",
    "take_poison",
    "BACKEND",
    "NDEBUG",
    # configuration
    "KVCacheManagerConfig",
    "GpuCacheTierConfig",
    "ExternalGpuTierConfig",
    "HostCacheTierConfig",
    "Transfer",
    "DiskCacheTierConfig",
    "CacheTierConfig",
    "AttentionLayerConfig",
    "SsmLayerConfig",
    "BufferConfig",
    "KVCacheDesc",
    "BatchDesc",
    "SwaScratchReuseConfig",
    "IKvCacheColdPageCodec",
    "create_default_kv_cache_cold_page_codec",
    # devices
    "Driver",
    "EmulatedDriver",
    "BuildInfo",
    "build_info",
    # layout
    "AggregatedPageDesc",
    "AttnLifeCycle",
    "BufferId",
    "CoalescedBuffer",
    "ExpandedBuffer",
    "HalfOpenRange",
    "LifeCycle",
    "PageIndexConverter",
    "PoolDesc",
    "PoolGroupDesc",
    "ScratchDesc",
    "SlotDesc",
    "SlotDescVariant",
    "SizingLevel",
    "SizingRow",
    "SizingTable",
    "exact_div",
    "explain_sizing",
    "typed_range",
    # page tables
    "KVCachePageTable",
    "TransferPlan",
    "match_page_tables",
    "page_table_of",
    # tokens and keys
    "MmItemContext",
    "TokenIdExt",
    "Tokens",
    "gen_multimodal_cache_key_tokens",
    "sequence_to_blockchain_keys",
    # statistics
    "KVCacheIterationStatsDelta",
    "KVCacheStatsDelta",
    "MovementCounters",
    "PoolGroupPeakBlockStats",
    "ReusedBlocksByLevel",
    "SsmSnapshotIterationStatsDelta",
    "StorageStatistics",
    "StatisticsReading",
    "RequestTotals",
    "HitCurve",
    # why a prompt was not reused further
    "MissCause",
    "MatchLimits",
    "MissReport",
    "GroupHits",
    "HitsReport",
    # events
    "CacheListener",
    "EventMirror",
    "EventSnapshot",
    "KVCacheCreatedData",
    "KVCacheEvent",
    "KVCacheEventDiff",
    "KVCacheEventManager",
    "KVCacheRemovedData",
    "KVCacheStoredBlockData",
    "KVCacheStoredData",
    "KVCacheUpdatedData",
    "UniqueToken",
    "serialize_events",
    "v1_block_hash",
    # ids, enums, constants
    "BAD_PAGE_INDEX",
    "DEFAULT_BEAM_INDEX",
    "GPU_LEVEL",
    "PRIORITY_DEFAULT",
    "BeamIndex",
    "BlockOrdinal",
    "CacheLevel",
    "CacheTier",
    "DataRole",
    "LayerGroupId",
    "LayerId",
    "LifeCycleId",
    "PageIndexMode",
    "PageStatus",
    "PoolGroupId",
    "PoolId",
    "CACHE_LEVEL1",
    "CudaStream",
    "TokenId",
    "MemAddress",
    "Priority",
    "PoolIndex",
    "PoolGroupIndex",
    "SlidingWindowSize",
    "SlotId",
    "Stream",
    # errors
    "AlreadyDroppedError",
    "ConfigError",
    "CorruptedError",
    "CuError",
    "DeviceUnavailableError",
    "HostRegistrationError",
    "KVCacheError",
    "LogicError",
    "OutOfMemoryError",
    "OutOfPagesError",
    "PageDataLostError",
    "UnknownBufferError",
]
