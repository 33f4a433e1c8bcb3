from dataclasses import dataclass
from typing import ClassVar, Final, TypeVar

_Delta = TypeVar("_Delta", bound="StatsDelta")

ITERATION_FIELDS: Final[tuple[str, ...]]

@dataclass
class StatsDelta:
    def add(self: _Delta, other: _Delta) -> None: ...
    def subtract(self: _Delta, other: _Delta) -> None: ...
    def clear(self) -> None: ...
    def copy(self: _Delta) -> _Delta: ...
    @property
    def empty(self) -> bool: ...

@dataclass
class KVCacheStatsDelta(StatsDelta):
    alloc_total_blocks: int = 0
    alloc_new_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0

@dataclass
class KVCacheIterationStatsDelta(StatsDelta):
    iter_alloc_total_blocks: int = 0
    iter_alloc_new_blocks: int = 0
    iter_reused_blocks: int = 0
    iter_missed_blocks: int = 0
    iter_full_reused_blocks: int = 0
    iter_partial_reused_blocks: int = 0
    iter_gen_alloc_blocks: int = 0
    iter_onboard_blocks: int = 0
    iter_onboard_bytes: int = 0
    iter_offload_blocks: int = 0
    iter_offload_bytes: int = 0
    iter_intra_device_copy_blocks: int = 0
    iter_intra_device_copy_bytes: int = 0
    iter_host_dropped_blocks: int = 0
    iter_host_dropped_bytes: int = 0
    iter_gpu_dropped_blocks: int = 0
    iter_disk_dropped_blocks: int = 0
    iter_lost_blocks: int = 0

    _field_names: ClassVar[tuple[str, ...]] = ...

    @property
    def iter_cache_hit_rate(self) -> float: ...

@dataclass
class SsmSnapshotIterationStatsDelta(StatsDelta):
    iter_snapshot_lookups: int = 0
    iter_snapshot_hits: int = 0
    iter_snapshot_misses: int = 0
    iter_reused_tokens: int = 0
    iter_unreused_tokens: int = 0
    iter_aligned_snapshot_hits: int = 0
    iter_unaligned_snapshot_hits: int = 0

    @property
    def iter_snapshot_hit_rate(self) -> float: ...
    def __getattr__(self, name: str) -> int | float: ...

@dataclass
class ReusedBlocksByLevel:
    full: list[int] = ...
    partial: list[int] = ...

    @property
    def empty(self) -> bool: ...
    def add(self, other: ReusedBlocksByLevel) -> None: ...

@dataclass(frozen=True)
class PoolGroupPeakBlockStats:
    available: int = 0
    unavailable: int = 0
    evictable: int = 0

@dataclass(frozen=True)
class StorageStatistics:
    slot_sizes: tuple[int, ...]
    total: int
    free: int
    evictable: int

    @property
    def available(self) -> int: ...
    @property
    def unavailable(self) -> int: ...

class MovementCounters:
    moved: list[list[list[int]]]
    dropped: list[list[int]]
    lost: list[int]
    adopted: list[int]
    taken_over: list[int]

    def __init__(self, num_life_cycles: int = 0, num_levels: int = 0) -> None: ...
    def __reduce__(self) -> tuple[object, ...]: ...
    def pages_moved(self, source: int, destination: int) -> int: ...
    def pages_dropped(self, level: int) -> int: ...
