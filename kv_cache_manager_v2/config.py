"""The configuration of a manager: memory tiers, layers and their buffers, and parameters.

Each record is validated on construction. `validate()` does so again, after fields were assigned. Both raise `ConfigError` with the
field, its value and what is right. Sizes are in bytes, lengths in tokens.

The records are ordinary dataclasses: `dataclasses.replace`, `copy.deepcopy` and `pickle` work on them. This file is never compiled,
so that subclasses of users work on both builds.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kv_cache_manager_v2.arguments import (
    check_kind_field,
    check_list_field,
    check_real_field,
    check_whole_field,
    flag,
    given,
    instance,
    items_of,
    real,
    shown,
    text,
)
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.eviction.admission import DiskAdmission, check_admission, make_admission
from kv_cache_manager_v2.eviction.choose import check_policy
from kv_cache_manager_v2.eviction.policy import EvictionPolicy
from kv_cache_manager_v2.ids import CacheTier
from kv_cache_manager_v2.layer_config import AttentionLayerConfig as AttentionLayerConfig
from kv_cache_manager_v2.layer_config import BufferConfig as BufferConfig
from kv_cache_manager_v2.layer_config import LayerConfig as LayerConfig
from kv_cache_manager_v2.layer_config import SsmLayerConfig as SsmLayerConfig

MIB: Final = 1 << 20
GIB: Final = 1 << 30
GPU_GRAIN: Final = 2 * MIB  # smallest physical chunk of a GPU; larger quotas use larger chunks, to keep their number bounded
GPU_GRAIN_DOUBLINGS: Final = 4  # up to 32 MiB
HOST_GRAIN: Final = 4096  # a host page
DISK_GRAIN: Final = 2 * MIB

_FLAGS: Final = (
    "enable_partial_reuse",
    "allow_seq_rebasing",
    "commit_min_snapshot",
    "snapshot_at_block_ends",
    "snapshot_at_branches",
    "enable_stats",
    "commit_stats_on_close",
    "text_only",
    "strict_quota",
)


def tier_granularity(tier: CacheTier, quota: int) -> int:
    """Bytes of a grain of this much memory. GPU: 2 MiB below 2 GiB, doubling with the quota up to 32 MiB from 16 GiB on."""
    if tier == CacheTier.GPU_MEM:
        doublings = (quota // GIB).bit_length() - 1 if quota >= GIB else 0
        return GPU_GRAIN << min(doublings, GPU_GRAIN_DOUBLINGS)
    return HOST_GRAIN if tier == CacheTier.HOST_MEM else DISK_GRAIN


@dataclass
class CacheTierConfig(ABC):
    """One cache level: its kind of memory, and the bytes that all of its pools may use together."""

    quota: int  # bytes; rounded up to the tier's granularity (on the GPU 2 MiB or more) and to the minimum: see strict_quota

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        check_whole_field(self, "quota", 1, f" of {type(self).__name__}")

    def assert_valid(self) -> None:
        """`validate`, by the reference's name."""
        self.validate()

    @property
    @abstractmethod
    def tier(self) -> CacheTier:
        """The kind of memory, as statistics count it."""

    @property
    def keeps_copies(self) -> bool:
        """Whether a page that is loaded from here leaves a copy of its bytes, to which it can return. Not on level 0."""
        return False

    def make_admission(self) -> DiskAdmission | None:
        """What decides which cached pages come here from the level above, for one manager; None: all of them."""
        return None

    @property
    def exact_size(self) -> bool:
        """Whether the size must not be raised to its minimum."""
        return False

    def bytes_for(self, slot_bytes: Sequence[int]) -> int:
        """The bytes of the level, given the bytes of a slot of each pool group: the quota."""
        return self.quota

    def check_use(self, config: KVCacheManagerConfig) -> None:  # noqa: B027 (most tiers can be used in any configuration)
        """Raise ConfigError if the tier cannot be used in a configuration that is valid otherwise."""

    def granularity(self) -> int:
        """Bytes in which the level's memory grows and shrinks. The quota is rounded up to a multiple of it."""
        return tier_granularity(self.tier, self.quota)


@dataclass
class GpuCacheTierConfig(CacheTierConfig):
    """Device memory. Level 0 is always this tier."""

    @property
    def tier(self) -> CacheTier:
        return CacheTier.GPU_MEM


@dataclass
class HostCacheTierConfig(CacheTierConfig):
    """Pinned host memory.

    A cached page that is loaded from here leaves a clean copy of its bytes, unless the tier is `exclusive`. When the page is
    evicted from the warmer tier again, it returns to that slot and no byte is copied. Copies take part in the order of eviction,
    and their slots count as free.
    """

    exclusive: bool = False  # each page is on one tier only: a loaded page frees its slot here

    def validate(self) -> None:
        super().validate()
        self.exclusive = flag(given(self, "exclusive"), "exclusive of HostCacheTierConfig")

    @property
    def keeps_copies(self) -> bool:
        return not self.exclusive

    @property
    def tier(self) -> CacheTier:
        return CacheTier.HOST_MEM


@dataclass
class DiskCacheTierConfig(CacheTierConfig):
    """Files in one directory. The files have no names, so none remains after the process has ended.

    A checksum of each page is computed when the page is written, kept in memory, and compared when it is read. If it differs, the
    page is lost: its cached block is dropped, and a request that needs it gets PageDataLostError. `checksum=None` turns this off.
    Loaded pages leave clean copies, as those of HostCacheTierConfig do. `admission` decides which cached pages are written here if
    their slots in memory are needed; the others are dropped. See `DiskAdmission` and docs/tiers.md.
    """

    path: str  # an existing directory
    checksum: str | None = "xxh3"  # "xxh3", or None ("none") for no checksums
    exclusive: bool = False  # each page is on one tier only: a loaded page frees its slot here
    admission: str | Callable[[], DiskAdmission] = "all"  # also "second_use" and "adaptive"; or what makes one, such as its class

    def validate(self) -> None:
        super().validate()
        path = given(self, "path")
        if not isinstance(path, (str, os.PathLike)):
            raise ConfigError(f"path of DiskCacheTierConfig is {path!r}; it must be the path of an existing directory")
        self.path = str(path)
        if not os.path.isdir(self.path):
            raise ConfigError(f"path of DiskCacheTierConfig is {self.path!r}; it must be an existing directory")
        checksum = given(self, "checksum")
        if checksum == "none":
            self.checksum = None
        elif checksum is not None and checksum != "xxh3":
            raise ConfigError(f'checksum of DiskCacheTierConfig is {shown(checksum)}; it must be "xxh3", or None for no checksums')
        self.exclusive = flag(given(self, "exclusive"), "exclusive of DiskCacheTierConfig")
        check_admission(given(self, "admission"))

    def make_admission(self) -> DiskAdmission | None:
        return make_admission(self.admission)

    @property
    def keeps_copies(self) -> bool:
        return not self.exclusive

    @property
    def tier(self) -> CacheTier:
        return CacheTier.DISK


@dataclass
class KVCacheDesc:
    """The shape of one request in a batch, in tokens."""

    capacity: int  # history and all input of the next step
    history_length: int  # positions that have no query in the next step

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        check_whole_field(self, "capacity", 0, " of KVCacheDesc")
        check_whole_field(self, "history_length", 0, " of KVCacheDesc")
        if self.history_length > self.capacity:
            raise ConfigError(
                f"KVCacheDesc.history_length is {self.history_length}; it must not exceed the capacity, {self.capacity}"
            )


@dataclass
class BatchDesc:
    """Requests that must fit the GPU together. They share their first `system_prompt_length` tokens."""

    kv_caches: Sequence[KVCacheDesc]
    system_prompt_length: int = 0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        check_whole_field(self, "system_prompt_length", 0, " of BatchDesc")
        check_list_field(self, "kv_caches", KVCacheDesc, " of BatchDesc")
        for desc in self.kv_caches:
            desc.validate()


@dataclass
class SwaScratchReuseConfig:
    """Blocks that leave the window within one prefill step share scratch slots instead of using slots of their own."""

    max_rewind_len: int = 0  # tokens at the end of a step that may be rejected (drafts); they never use scratch slots

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        check_whole_field(self, "max_rewind_len", 0, " of SwaScratchReuseConfig")


@dataclass
class KVCacheManagerConfig:
    """The complete configuration of a manager. The manager keeps a deep copy."""

    tokens_per_block: int
    cache_tiers: Sequence[CacheTierConfig]  # warm to cold; the first is the GPU
    layers: Sequence[LayerConfig]
    max_util_for_resume: float = 0.97  # resume() refuses a request while a larger share of a GPU pool group is unavailable
    enable_partial_reuse: bool = True  # a match may end inside a block
    reuse_match_backoff: int = 0  # tokens at the end of a match that are left unused
    constraints: Sequence[BatchDesc] = ()  # batches that must always fit the GPU
    typical_step: BatchDesc | None = None  # the batch that decides the initial proportions of the pool groups
    initial_pool_ratio: Sequence[float] | None = None  # one weight per layer group, in first-seen order of the layers
    swa_scratch_reuse: SwaScratchReuseConfig | None = None
    commit_min_snapshot: bool = False  # commit only pages that reuse at the committed length needs; required by SSM layers
    enable_stats: bool = True
    text_only: bool = False  # the caller promises that no token is a digest
    rebalance_min_sampled_kv_caches: int = 2000  # closed requests before the first adjustment of the pool ratio
    rebalance_cooldown_secs: float = 120.0  # seconds between two adjustments
    rebalance_target_ratio_update_interval: int = 100  # closed requests between two computations of the target ratio
    rebalance_ratio_threshold: float = 1.25  # target / current share above which an adjustment is due
    rebalance_moving_average_decay: float = 0.9999  # weight of earlier requests in the moving averages of lengths
    block_key_hash: str = "blake3"  # hash function of the block keys: "blake3" or "sha256"
    strict_quota: bool = False  # raise ConfigError for a quota below its minimum, instead of raising the quota with a warning
    miss_history: int = 0  # latest drops to record for `explain_miss`; each costs the computation of a block key
    allow_seq_rebasing: bool = True  # a commit may exchange a request's page for that of an identical cached block
    commit_stats_on_close: bool = False  # close() commits the request's counts; if False, counts not committed before are lost
    hit_curve_rate: float = 0.0  # share of the blocks that `hit_curve` samples, such as 0.1; 0: there is no curve
    snapshot_at_block_ends: bool = False  # with commit_min_snapshot: a commit that ends inside a block makes no snapshot
    snapshot_at_branches: bool = False  # with commit_min_snapshot: `prefill_end` stops where a prompt leaves the cached ones, too
    eviction_policy: str | Callable[[], EvictionPolicy] = "hints"  # or "lru", "adaptive", or what makes a policy, such as its class

    def __post_init__(self) -> None:
        self.validate()

    @property
    def enable_swa_scratch_reuse(self) -> bool:
        return self.swa_scratch_reuse is not None

    def copy(self) -> KVCacheManagerConfig:
        """A deep copy, which shares nothing with this configuration."""
        return copy.deepcopy(self)

    def without_tier(self, tier: CacheTier) -> KVCacheManagerConfig:
        """A copy without one tier. Raises ConfigError for the GPU tier, which every cache needs."""
        left_out = instance(tier, CacheTier, "tier")
        if left_out == CacheTier.GPU_MEM:
            raise ConfigError("the GPU_MEM tier cannot be omitted: requests use pages on the GPU only")
        return dataclasses.replace(self.copy(), cache_tiers=[t for t in self.cache_tiers if t.tier != left_out]).copy()

    def validate(self) -> None:
        """Validate all fields, including those assigned after construction. Raises ConfigError."""
        check_whole_field(self, "tokens_per_block", 1)
        self._validate_tiers()
        self._validate_layers()
        if not 0.0 < check_real_field(self, "max_util_for_resume") <= 1.0:
            raise ConfigError(f"max_util_for_resume must be in (0, 1], but is {self.max_util_for_resume}")
        if not 0.0 <= check_real_field(self, "hit_curve_rate") <= 1.0:
            raise ConfigError(f"hit_curve_rate is {self.hit_curve_rate}; it must be from 0 (no curve) to 1 (every block)")
        check_whole_field(self, "reuse_match_backoff", 0)
        check_whole_field(self, "miss_history", 0)
        for field in _FLAGS:
            flag(given(self, field), field)
        for field in ("snapshot_at_block_ends", "snapshot_at_branches"):
            if given(self, field) and not self.commit_min_snapshot:
                raise ConfigError(
                    f"{field} is True, but commit_min_snapshot is False, and commits make no snapshots; "
                    f"set commit_min_snapshot=True, or leave {field} out"
                )
        check_list_field(self, "constraints", BatchDesc)
        check_kind_field(self, "typical_step", BatchDesc)
        check_kind_field(self, "swa_scratch_reuse", SwaScratchReuseConfig)
        for batch in self.constraints:
            batch.validate()
        if self.typical_step is not None:
            self.typical_step.validate()
        if self.swa_scratch_reuse is not None:
            self.swa_scratch_reuse.validate()
        self._validate_ratio()
        self._validate_rebalance()
        if text(given(self, "block_key_hash"), "block_key_hash") not in ("blake3", "sha256"):
            raise ConfigError(f'block_key_hash is {self.block_key_hash!r}; it must be "blake3" or "sha256"')
        check_policy(given(self, "eviction_policy"))
        for tier_config in self.cache_tiers:
            tier_config.check_use(self)

    def _validate_tiers(self) -> None:
        check_list_field(self, "cache_tiers", CacheTierConfig)
        if len(self.cache_tiers) == 0 or self.cache_tiers[0].tier != CacheTier.GPU_MEM:
            first = self.cache_tiers[0].tier.name if self.cache_tiers else "nothing"
            raise ConfigError(f"cache_tiers begins with {first}; it must begin with a GpuCacheTierConfig")
        warmest = CacheTier.GPU_MEM
        for tier_config in self.cache_tiers:
            tier_config.validate()
            if tier_config.tier < warmest:
                raise ConfigError(
                    f"cache_tiers has {tier_config.tier.name} after {warmest.name}; "
                    "list the tiers from warm to cold: GPU, host, disk"
                )
            warmest = tier_config.tier

    def _validate_layers(self) -> None:
        check_list_field(self, "layers", LayerConfig)
        if len(self.layers) == 0:
            raise ConfigError("layers is empty; it must have at least one layer")
        seen: set[int] = set()
        for layer in self.layers:
            layer.validate()
            if layer.layer_id in seen:
                raise ConfigError(f"layer_id {layer.layer_id} is used twice; layer ids must be unique")
            seen.add(layer.layer_id)
            for buffer in layer.buffers:
                buffer.expansion(self.tokens_per_block)  # refuses an override that does not divide
            if isinstance(layer.parts()[-1], SsmLayerConfig) and not self.commit_min_snapshot:
                raise ConfigError(
                    f"commit_min_snapshot is False, but layer {layer.layer_id} is an SSM layer; set commit_min_snapshot=True: "
                    "a recurrent state can be reused only at positions where a commit made a snapshot"
                )

    def _validate_ratio(self) -> None:
        value = given(self, "initial_pool_ratio")
        if value is None:
            return
        ratio = items_of(value, "initial_pool_ratio", "one weight for each layer group")
        num_groups = len({part.group_key(self.tokens_per_block) for layer in self.layers for part in layer.parts()})
        if len(ratio) != num_groups:
            raise ConfigError(
                f"initial_pool_ratio length is {len(ratio)}; it must be {num_groups}, "
                "one weight for each layer group in first-seen order"
            )
        weights = [real(weight, "initial_pool_ratio value") for weight in ratio]
        if not all(0.0 < weight < math.inf for weight in weights):
            raise ConfigError(f"initial_pool_ratio values must be positive, but are {weights}")
        if abs(sum(weights) - 1.0) > 1e-6:
            raise ConfigError(f"initial_pool_ratio values must sum to 1.0, but {weights} sum to {sum(weights)}")

    def _validate_rebalance(self) -> None:
        check_whole_field(self, "rebalance_min_sampled_kv_caches", 0)
        check_whole_field(self, "rebalance_target_ratio_update_interval", 1)
        cooldown = check_real_field(self, "rebalance_cooldown_secs")
        if not 0.0 <= cooldown < math.inf:
            raise ConfigError(f"rebalance_cooldown_secs is {cooldown}; it must be finite and at least 0")
        threshold = check_real_field(self, "rebalance_ratio_threshold")
        if not 1.0 < threshold < math.inf:
            raise ConfigError(f"rebalance_ratio_threshold is {threshold}; it must be finite and above 1")
        decay = check_real_field(self, "rebalance_moving_average_decay")
        if not 0.0 < decay < 1.0:
            raise ConfigError(f"rebalance_moving_average_decay is {decay}; it must be between 0 and 1, exclusive")
