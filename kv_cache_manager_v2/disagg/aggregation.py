"""Public descriptions of the GPU's pools, from which page tables for disaggregated serving are built.

Rule: the order depends on the configuration alone, never on addresses or hashes. So two managers with the same layers describe
their memory in the same order and can be paired item by item.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.ids import LayerGroupId, PoolGroupId, PoolId
from kv_cache_manager_v2.layout.pools import BufferId, BufferPlace, PoolDesc, PoolGroupDesc, StorageLayout


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class ExpandedBuffer:
    """A buffer in an aggregated page. `expansion` is how many of the buffer's own blocks make one block of the manager."""

    id: BufferId
    expansion: int


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class AggregatedPageDesc:
    """Contiguous buffers in the slots of one pool.

    The bytes of block ordinal o are the `size` bytes at base + stride * (aggregated page index of o in the layer group).
    """

    base: int  # address
    size: int  # bytes
    stride: int  # bytes from one slot to the next
    layer_group_id: LayerGroupId
    buffers: tuple[ExpandedBuffer, ...]  # in order of their offsets


class _Located:
    """A requested buffer and its place in the pools."""

    def __init__(self, buffer: BufferId, place: BufferPlace) -> None:
        self.buffer = buffer
        self.place = place

    def key(self) -> tuple[int, int, int]:
        return self.place.life_cycle, self.place.pool, self.place.offset


def aggregate(layout: StorageLayout, buffer_ids: Iterable[BufferId], base_addresses: list[list[int]]) -> list[AggregatedPageDesc]:
    """Merge buffers into contiguous runs, ordered by layer group, pool and offset. Duplicates are ignored.

    `base_addresses[pool group][pool]` are the pools' addresses. Raises ConfigError for an unknown buffer. O(n log n).
    """
    wanted: dict[BufferId, _Located] = {}
    for layer, role in buffer_ids:
        buffer = BufferId(layer, role)
        wanted[buffer] = _Located(buffer, layout.place(layer, role))
    runs: list[list[_Located]] = []
    for located in sorted(wanted.values(), key=_Located.key):
        if len(runs) > 0 and _continues(runs[-1][-1].place, located.place):
            runs[-1].append(located)
        else:
            runs.append([located])
    return [_describe_run(layout, run, base_addresses) for run in runs]


def _continues(before: BufferPlace, place: BufferPlace) -> bool:
    """Whether the second buffer begins at the end of the first."""
    same_pool = before.life_cycle == place.life_cycle and before.pool == place.pool
    return same_pool and before.offset + before.size == place.offset


def _describe_run(layout: StorageLayout, run: list[_Located], base_addresses: list[list[int]]) -> AggregatedPageDesc:
    first, last = run[0].place, run[-1].place
    return AggregatedPageDesc(
        base_addresses[first.pool_group][first.pool] + first.offset,
        last.offset + last.size - first.offset,
        layout.slot_sizes[first.pool_group][first.pool],
        LayerGroupId(first.life_cycle),
        tuple([ExpandedBuffer(located.buffer, located.place.expansion) for located in run]),
    )


def pool_group_descs(layout: StorageLayout, num_slots: list[int], base_addresses: list[list[int]]) -> list[PoolGroupDesc]:
    """Describe all pool groups of the GPU, given their slot counts and their pools' addresses."""
    descs: list[PoolGroupDesc] = []
    for group, slot_desc in enumerate(layout.slot_descs):
        pools = [
            PoolDesc(PoolId(pool), base_addresses[group][pool], slot_bytes)
            for pool, slot_bytes in enumerate(layout.slot_sizes[group])
        ]
        descs.append(PoolGroupDesc(PoolGroupId(group), num_slots[group], slot_desc, tuple(pools)))
    return descs
