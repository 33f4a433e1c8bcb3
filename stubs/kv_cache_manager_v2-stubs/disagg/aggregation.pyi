from collections.abc import Iterable
from dataclasses import dataclass

from kv_cache_manager_v2.ids import LayerGroupId
from kv_cache_manager_v2.layout.pools import BufferId, PoolGroupDesc, StorageLayout

@dataclass(frozen=True)
class ExpandedBuffer:
    id: BufferId
    expansion: int

@dataclass(frozen=True)
class AggregatedPageDesc:
    base: int
    size: int
    stride: int
    layer_group_id: LayerGroupId
    buffers: tuple[ExpandedBuffer, ...]

def aggregate(
    layout: StorageLayout, buffer_ids: Iterable[BufferId], base_addresses: list[list[int]]
) -> list[AggregatedPageDesc]: ...
def pool_group_descs(layout: StorageLayout, num_slots: list[int], base_addresses: list[list[int]]) -> list[PoolGroupDesc]: ...
