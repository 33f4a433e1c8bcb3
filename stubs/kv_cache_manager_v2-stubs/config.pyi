"""The configuration of a manager: memory tiers, layers and their buffers, and parameters.

Each record is validated on construction. `validate()` does so again, after fields were assigned. Both raise `ConfigError` with the
field, its value and what is right. Sizes are in bytes, lengths in tokens.

The records are ordinary dataclasses: `dataclasses.replace`, `copy.deepcopy` and `pickle` work on them. This file is never compiled,
so that subclasses of users work on both builds.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kv_cache_manager_v2.eviction.admission import DiskAdmission
from kv_cache_manager_v2.eviction.policy import EvictionPolicy
from kv_cache_manager_v2.ids import CacheTier
from kv_cache_manager_v2.layer_config import AttentionLayerConfig as AttentionLayerConfig
from kv_cache_manager_v2.layer_config import BufferConfig as BufferConfig
from kv_cache_manager_v2.layer_config import LayerConfig as LayerConfig
from kv_cache_manager_v2.layer_config import SsmLayerConfig as SsmLayerConfig

MIB: Final[int]
GIB: Final[int]
GPU_GRAIN: Final[int]
GPU_GRAIN_DOUBLINGS: Final = 4
HOST_GRAIN: Final = 4096
DISK_GRAIN: Final[int]

def tier_granularity(tier: CacheTier, quota: int) -> int:
    """Bytes of a grain of this much memory. GPU: 2 MiB below 2 GiB, doubling with the quota up to 32 MiB from 16 GiB on."""

@dataclass
class CacheTierConfig(ABC):
    """One cache level: its kind of memory, and the bytes that all of its pools may use together."""

    quota: int

    def validate(self) -> None: ...
    def assert_valid(self) -> None:
        """`validate`, by the reference's name."""

    @property
    @abstractmethod
    def tier(self) -> CacheTier:
        """The kind of memory, as statistics count it."""

    @property
    def keeps_copies(self) -> bool:
        """Whether a page that is loaded from here leaves a copy of its bytes, to which it can return. Not on level 0."""

    def make_admission(self) -> DiskAdmission | None:
        """What decides which cached pages come here from the level above, for one manager; None: all of them."""

    @property
    def exact_size(self) -> bool:
        """Whether the size must not be raised to its minimum."""

    def bytes_for(self, slot_bytes: Sequence[int]) -> int:
        """The bytes of the level, given the bytes of a slot of each pool group: the quota."""

    def check_use(self, config: KVCacheManagerConfig) -> None:
        """Raise ConfigError if the tier cannot be used in a configuration that is valid otherwise."""

    def granularity(self) -> int:
        """Bytes in which the level's memory grows and shrinks. The quota is rounded up to a multiple of it."""

@dataclass
class GpuCacheTierConfig(CacheTierConfig):
    """Device memory. Level 0 is always this tier."""

    @property
    def tier(self) -> CacheTier: ...

@dataclass
class HostCacheTierConfig(CacheTierConfig):
    """Pinned host memory.

    A cached page that is loaded from here leaves a clean copy of its bytes, unless the tier is `exclusive`. When the page is
    evicted from the warmer tier again, it returns to that slot and no byte is copied. Copies take part in the order of eviction,
    and their slots count as free.
    """

    exclusive: bool = False

    def validate(self) -> None: ...
    @property
    def keeps_copies(self) -> bool: ...
    @property
    def tier(self) -> CacheTier: ...

@dataclass
class DiskCacheTierConfig(CacheTierConfig):
    """Files in one directory. The files have no names, so none remains after the process has ended.

    A checksum of each page is computed when the page is written, kept in memory, and compared when it is read. If it differs, the
    page is lost: its cached block is dropped, and a request that needs it gets PageDataLostError. `checksum=None` turns this off.
    Loaded pages leave clean copies, as those of HostCacheTierConfig do. `admission` decides which cached pages are written here if
    their slots in memory are needed; the others are dropped. See `DiskAdmission` and docs/tiers.md.
    """

    path: str
    checksum: str | None = "xxh3"
    exclusive: bool = False
    admission: str | Callable[[], DiskAdmission] = "all"

    def validate(self) -> None: ...
    def make_admission(self) -> DiskAdmission | None: ...
    @property
    def keeps_copies(self) -> bool: ...
    @property
    def tier(self) -> CacheTier: ...

@dataclass
class KVCacheDesc:
    """The shape of one request in a batch, in tokens."""

    capacity: int
    history_length: int

    def validate(self) -> None: ...

@dataclass
class BatchDesc:
    """Requests that must fit the GPU together. They share their first `system_prompt_length` tokens."""

    kv_caches: Sequence[KVCacheDesc]
    system_prompt_length: int = 0

    def validate(self) -> None: ...

@dataclass
class SwaScratchReuseConfig:
    """Blocks that leave the window within one prefill step share scratch slots instead of using slots of their own."""

    max_rewind_len: int = 0

    def validate(self) -> None: ...

@dataclass
class KVCacheManagerConfig:
    """The complete configuration of a manager. The manager keeps a deep copy."""

    tokens_per_block: int
    cache_tiers: Sequence[CacheTierConfig]
    layers: Sequence[LayerConfig]
    max_util_for_resume: float = 0.97
    enable_partial_reuse: bool = True
    reuse_match_backoff: int = 0
    constraints: Sequence[BatchDesc] = ()
    typical_step: BatchDesc | None = None
    initial_pool_ratio: Sequence[float] | None = None
    swa_scratch_reuse: SwaScratchReuseConfig | None = None
    commit_min_snapshot: bool = False
    enable_stats: bool = True
    text_only: bool = False
    rebalance_min_sampled_kv_caches: int = 2000
    rebalance_cooldown_secs: float = 120.0
    rebalance_target_ratio_update_interval: int = 100
    rebalance_ratio_threshold: float = 1.25
    rebalance_moving_average_decay: float = 0.9999
    block_key_hash: str = "blake3"
    strict_quota: bool = False
    miss_history: int = 0
    allow_seq_rebasing: bool = True
    commit_stats_on_close: bool = False
    hit_curve_rate: float = 0.0
    snapshot_at_block_ends: bool = False
    snapshot_at_branches: bool = False
    eviction_policy: str | Callable[[], EvictionPolicy] = "hints"

    @property
    def enable_swa_scratch_reuse(self) -> bool: ...
    def copy(self) -> KVCacheManagerConfig:
        """A deep copy, which shares nothing with this configuration."""

    def without_tier(self, tier: CacheTier) -> KVCacheManagerConfig:
        """A copy without one tier. Raises ConfigError for the GPU tier, which every cache needs."""

    def validate(self) -> None:
        """Validate all fields, including those assigned after construction. Raises ConfigError."""
