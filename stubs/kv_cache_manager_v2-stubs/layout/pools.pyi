from dataclasses import dataclass
from typing import NamedTuple

from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.ids import DataRole, LayerGroupId, LayerId, LifeCycleId, PoolGroupId, PoolId
from kv_cache_manager_v2.layout.life_cycle import LifeCycle

class BufferId(NamedTuple):
    layer_id: LayerId
    role: DataRole

@dataclass(frozen=True)
class PoolDesc:
    pool_index: PoolId
    base_address: int
    slot_bytes: int

@dataclass(frozen=True)
class CoalescedBuffer:
    single_buffer_size: int
    buffer_ids: tuple[BufferId, ...]

    @property
    def num_buffers(self) -> int: ...
    @property
    def size(self) -> int: ...

@dataclass(frozen=True)
class SlotDescVariant:
    layer_group_id: LayerGroupId
    coalesced_buffers: tuple[CoalescedBuffer, ...]

    @property
    def slot_size_list(self) -> tuple[int, ...]: ...

@dataclass(frozen=True)
class SlotDesc:
    variants: tuple[SlotDescVariant, ...]

    @property
    def slot_size_list(self) -> tuple[int, ...]: ...

@dataclass(frozen=True)
class PoolGroupDesc:
    pool_group_index: PoolGroupId
    num_slots: int
    slot_desc: SlotDesc
    pools: tuple[PoolDesc, ...]

class BufferPlace:
    life_cycle: LifeCycleId
    pool_group: PoolGroupId
    pool: PoolId
    offset: int
    size: int
    expansion: int
    scale: int
    position: int
    layer_util: int
    layer_first: int

    def __init__(self, life_cycle: LifeCycleId, pool_group: PoolGroupId, pool: PoolId) -> None: ...
    @property
    def stride(self) -> int: ...

class StorageLayout:
    tokens_per_block: int
    life_cycles: list[LifeCycle]
    ssm: LifeCycle | None
    max_rewind: int | None
    pool_group_of: list[PoolGroupId]
    members: list[list[LifeCycleId]]
    slot_sizes: list[list[int]]
    slot_descs: list[SlotDesc]
    index_span: list[int]
    layer_ids: list[LayerId]
    all_buffer_ids: list[BufferId]
    layers_of: list[list[LayerId]]

    def __init__(self, tokens_per_block: int, life_cycles: list[LifeCycle], max_rewind: int | None) -> None: ...
    @property
    def num_pool_groups(self) -> int: ...
    @property
    def num_life_cycles(self) -> int: ...
    def slot_bytes(self, pool_group: int) -> int: ...
    def frac_max(self, life_cycle: int) -> tuple[int, int]: ...
    def scratch_slots(self, life_cycle: int, num_blocks: int) -> int: ...
    def life_cycle_of_layer(self, layer: LayerId) -> LifeCycleId: ...
    def place(self, layer: LayerId, role: DataRole) -> BufferPlace: ...
    def max_slots(self, pool_group: int) -> int: ...
    def check_invariants(self) -> None: ...

def build_layout(config: KVCacheManagerConfig) -> StorageLayout: ...
