"""Public descriptions of the GPU's pools, from which page tables for disaggregated serving are built.

Rule: the order depends on the configuration alone, never on addresses or hashes. So two managers with the same layers describe
their memory in the same order and can be paired item by item.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kv_cache_manager_v2.ids import LayerGroupId
from kv_cache_manager_v2.layout.pools import BufferId, PoolGroupDesc, StorageLayout

@dataclass(frozen=True)
class ExpandedBuffer:
    """A buffer in an aggregated page. `expansion` is how many of the buffer's own blocks make one block of the manager."""

    id: BufferId
    expansion: int

@dataclass(frozen=True)
class AggregatedPageDesc:
    """Contiguous buffers in the slots of one pool.

    The bytes of block ordinal o are the `size` bytes at base + stride * (aggregated page index of o in the layer group).
    """

    base: int
    size: int
    stride: int
    layer_group_id: LayerGroupId
    buffers: tuple[ExpandedBuffer, ...]

def aggregate(layout: StorageLayout, buffer_ids: Iterable[BufferId], base_addresses: list[list[int]]) -> list[AggregatedPageDesc]:
    """Merge buffers into contiguous runs, ordered by layer group, pool and offset. Duplicates are ignored.

    `base_addresses[pool group][pool]` are the pools' addresses. Raises ConfigError for an unknown buffer. O(n log n).
    """

def pool_group_descs(layout: StorageLayout, num_slots: list[int], base_addresses: list[list[int]]) -> list[PoolGroupDesc]:
    """Describe all pool groups of the GPU, given their slot counts and their pools' addresses."""
