from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kv_cache_manager_v2.ids import LayerId
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.layout.pools import PoolGroupDesc
from kv_cache_manager_v2.manager import KVCacheManager

FORMAT: Final = 1
INDEXED: Final = "INDEXED"
FLAT: Final = "FLAT"
TOKENS_FIRST: Final = "NHD"
HEADS_FIRST: Final = "HND"

class BufferEntry(NamedTuple):
    local_layer_id: int
    role: str
    offset: int
    size: int
    repetitions: int

class LocalLayer(NamedTuple):
    local_id: int
    global_id: int
    kv_heads: int

@dataclass(frozen=True)
class PhysicalPool:
    base_address: int
    slot_bytes: int
    num_slots: int
    @property
    def nbytes(self) -> int: ...

@dataclass(frozen=True)
class PhysicalPoolGroup:
    pools: tuple[PhysicalPool, ...]

@dataclass(frozen=True)
class PoolView:
    pool_idx: int
    entries: tuple[BufferEntry, ...]
    pool_role: frozenset[str]
    mapper_kind: str = ...
    @property
    def layer_order(self) -> list[int]: ...

@dataclass(frozen=True)
class LayerGroup:
    pool_group_idx: int
    recurrent: bool
    sliding_window_size: int | None
    head_order: str
    local_layers: tuple[LocalLayer, ...]
    pool_views: tuple[PoolView, ...]
    @property
    def kv_head_num_per_rank(self) -> int: ...

class MemoryRegion(NamedTuple):
    name: str
    address: int
    nbytes: int

class SlotRegion(NamedTuple):
    address: int
    nbytes: int

class StateSection(NamedTuple):
    global_layer_id: int
    role: str
    address: int
    stride: int
    nbytes: int

@dataclass(frozen=True)
class KVCachePageTable:
    tokens_per_block: int
    layer_groups: tuple[LayerGroup, ...]
    pool_groups: tuple[PhysicalPoolGroup, ...]
    tensor_rank: int = ...
    tensor_size: int = ...
    def pool(self, layer_group: int, view: PoolView) -> PhysicalPool: ...
    def slot_regions(self, layer_group: int, slot_ids: Sequence[int]) -> list[SlotRegion]: ...
    def check_slots(self, layer_group: int, slot_ids: Sequence[int]) -> None: ...
    def memory_regions(self) -> list[MemoryRegion]: ...
    def state_sections(self, layer_group: int) -> list[StateSection]: ...
    def request_slots(self, cache: KVCache, beam: int = 0) -> list[list[int]]: ...
    def to_dict(self) -> dict[str, object]: ...
    @staticmethod
    def from_dict(data: Mapping[str, object]) -> KVCachePageTable: ...

@dataclass(frozen=True)
class LayerInfo:
    global_id: int
    kv_heads: int = ...
    window: int | None = ...
    recurrent: bool = ...
    repetitions: Mapping[str, int] = field(default_factory=dict)

def build_page_table(
    descs: Sequence[PoolGroupDesc],
    tokens_per_block: int,
    layers: Mapping[LayerId, LayerInfo],
    tensor_rank: int = 0,
    tensor_size: int = 1,
    head_order: str = "NHD",
) -> KVCachePageTable: ...
def page_table_of(
    manager: KVCacheManager,
    kv_heads: int | Mapping[LayerId, int] = 0,
    global_ids: Mapping[LayerId, int] | None = None,
    tensor_rank: int = 0,
    tensor_size: int = 1,
    head_order: str = "NHD",
) -> KVCachePageTable: ...
def virtual_layer_id(model_layer: int, attention_type: int, num_attention_types: int) -> int: ...
