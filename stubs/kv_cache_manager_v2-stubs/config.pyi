from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kv_cache_manager_v2.ids import CacheTier, DataRole, LayerId

@dataclass
class CacheTierConfig(ABC):
    quota: int

    def validate(self) -> None: ...
    @property
    @abstractmethod
    def tier(self) -> CacheTier: ...

@dataclass
class GpuCacheTierConfig(CacheTierConfig):
    @property
    def tier(self) -> CacheTier: ...

@dataclass
class HostCacheTierConfig(CacheTierConfig):
    @property
    def tier(self) -> CacheTier: ...

@dataclass
class DiskCacheTierConfig(CacheTierConfig):
    path: str

    def validate(self) -> None: ...
    @property
    def tier(self) -> CacheTier: ...

@dataclass
class BufferConfig:
    role: DataRole
    size: int
    tokens_per_block_override: int | None = None

    def validate(self) -> None: ...
    def expansion(self, tokens_per_block: int) -> int: ...

@dataclass
class LayerConfig(ABC):
    layer_id: LayerId
    buffers: Sequence[BufferConfig]

    def validate(self) -> None: ...
    @property
    @abstractmethod
    def window_size(self) -> int | None: ...
    @abstractmethod
    def group_key(self, tokens_per_block: int) -> tuple[bool, int, int]: ...

@dataclass
class AttentionLayerConfig(LayerConfig):
    sliding_window_size: int | None = None
    num_sink_tokens: int | None = None

    def validate(self) -> None: ...
    @property
    def window_size(self) -> int | None: ...
    def group_key(self, tokens_per_block: int) -> tuple[bool, int, int]: ...

@dataclass
class SsmLayerConfig(LayerConfig):
    def validate(self) -> None: ...
    @property
    def window_size(self) -> int | None: ...
    def group_key(self, tokens_per_block: int) -> tuple[bool, int, int]: ...

@dataclass
class KVCacheDesc:
    capacity: int
    history_length: int

    def validate(self) -> None: ...

@dataclass
class BatchDesc:
    kv_caches: Sequence[KVCacheDesc]
    system_prompt_length: int = 0

    def validate(self) -> None: ...

@dataclass
class SwaScratchReuseConfig:
    max_rewind_len: int = 0

    def validate(self) -> None: ...

@dataclass
class KVCacheManagerConfig:
    tokens_per_block: int
    cache_tiers: Sequence[CacheTierConfig]
    layers: Sequence[LayerConfig]
    max_util_for_resume: float = 0.97
    enable_partial_reuse: bool = True
    reuse_match_backoff: int = 0
    constraints: Sequence[BatchDesc] = ...
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
    commit_stats_on_close: bool = False

    @property
    def enable_swa_scratch_reuse(self) -> bool: ...
    def copy(self) -> KVCacheManagerConfig: ...
    def without_tier(self, tier: CacheTier) -> KVCacheManagerConfig: ...
    def validate(self) -> None: ...
