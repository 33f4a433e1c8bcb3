"""From a model's buffers to slots: buffers -> coalesced buffers -> pools -> pool groups.

Within a layer group (life cycle), buffers of equal size are contiguous and form a *coalesced buffer*. Each coalesced buffer has a
pool of its own, the largest first. Layer groups whose pools have equal slot sizes share a *pool group*. A *slot* is one id for all
pools of its group: slot i is the i-th element of each pool.

An example, as `explain.draw_layout` draws it. Layers 0 and 2 have full attention, layers 1 and 3 a window of 1024 tokens. For each
block each of them has 64 KiB of keys and of values, and 2 KiB of scales of both. Layer 4 is recurrent, with 256 KiB of state and 24
KiB of convolution inputs. A buffer's offset in bytes precedes its name. Layer groups 0 and 1 share the slots of pool group 0.

    pool group 0
      pool 0, 262144 bytes a slot
        layer group 0  | 0: 0 key | 65536: 0 value | 131072: 2 key | 196608: 2 value |
        layer group 1  | 0: 1 key | 65536: 1 value | 131072: 3 key | 196608: 3 value |
      pool 1, 8192 bytes a slot
        layer group 0  | 0: 0 key_scale | 2048: 0 value_scale | 4096: 2 key_scale | 6144: 2 value_scale |
        layer group 1  | 0: 1 key_scale | 2048: 1 value_scale | 4096: 3 key_scale | 6144: 3 value_scale |
    pool group 1
      pool 0, 262144 bytes a slot
        layer group 2  | 0: 4 state |
      pool 1, 24576 bytes a slot
        layer group 2  | 0: 4 conv |

Buffer (2, value) of a block in slot i has 65536 bytes at base of pool 0 + i * 262144 + 196608. A manager's `pool_group_descs` has
all this with addresses: each `PoolGroupDesc` has num_slots, its pools with base and slot bytes, and a `SlotDesc`. That has one
`SlotDescVariant` for each layer group, whose i-th `CoalescedBuffer` is in the i-th pool.

A buffer whose kernel uses smaller blocks (`tokens_per_block_override`) occurs `expansion` times in a slot; its size here includes
all of them.

A layer that is attention and recurrent at once (`AttentionLayerConfig.states`) has a part in each of two layer groups. Only this
file knows: elsewhere a buffer is named by layer and role, and its life cycle follows from that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.config import KVCacheManagerConfig, LayerConfig
from kv_cache_manager_v2.errors import UnknownBufferError
from kv_cache_manager_v2.ids import INT32_MAX, DataRole, LayerGroupId, LayerId, LifeCycleId, PoolGroupId, PoolId
from kv_cache_manager_v2.layout.arithmetic import ceil_div
from kv_cache_manager_v2.layout.life_cycle import LifeCycle, make_life_cycle


class BufferId(NamedTuple):
    """Identifies one buffer of the model. Equal to the tuple (layer, role)."""

    layer_id: LayerId
    role: DataRole


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class PoolDesc:
    """One pool of a pool group on the GPU."""

    pool_index: PoolId
    base_address: int
    slot_bytes: int


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class CoalescedBuffer:
    """Contiguous buffers of equal size in the slots of one pool."""

    single_buffer_size: int  # bytes of each buffer
    buffer_ids: tuple[BufferId, ...]  # in order of their offsets

    @property
    def num_buffers(self) -> int:
        return len(self.buffer_ids)

    @property
    def size(self) -> int:
        """Bytes of all its buffers: the slot size of the pool."""
        return self.single_buffer_size * len(self.buffer_ids)


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class SlotDescVariant:
    """How one layer group divides the slots of its pool group."""

    layer_group_id: LayerGroupId
    coalesced_buffers: tuple[CoalescedBuffer, ...]  # by pool

    @property
    def slot_size_list(self) -> tuple[int, ...]:
        """Bytes of a slot in each pool. Equal for all variants of a pool group."""
        return tuple([coalesced.size for coalesced in self.coalesced_buffers])


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class SlotDesc:
    """The contents of a slot of a pool group: one variant for each layer group that shares it."""

    variants: tuple[SlotDescVariant, ...]

    @property
    def slot_size_list(self) -> tuple[int, ...]:
        return self.variants[0].slot_size_list


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class PoolGroupDesc:
    """A pool group on the GPU: its number of slots, their contents, and the addresses of its pools."""

    pool_group_index: PoolGroupId
    num_slots: int
    slot_desc: SlotDesc
    pools: tuple[PoolDesc, ...]


class BufferPlace:
    """The position of a buffer in the slots of its layer group."""

    def __init__(self, life_cycle: LifeCycleId, pool_group: PoolGroupId, pool: PoolId) -> None:
        self.life_cycle = life_cycle
        self.pool_group = pool_group
        self.pool = pool
        self.offset = 0  # bytes from the start of the slot, in this pool
        self.size = 0  # bytes, with all its `expansion` smaller blocks
        self.expansion = 1  # the buffer's own, smaller blocks in one block
        self.scale = 1  # buffers in the coalesced buffer
        self.position = 0  # index among them: offset / size
        self.layer_util = 1  # how many of them belong to this buffer's layer; these are contiguous
        self.layer_first = 0  # position of the first of those
        self.has_scratch = False  # whether blocks of the layer can be scratch blocks

    @property
    def stride(self) -> int:
        """Bytes of one page of the buffer's own block length: the configured buffer size."""
        return self.size // self.expansion


class StorageLayout:
    """The division of a model's memory, fixed by its configuration. Lists are by pool group unless the comment says otherwise."""

    def __init__(self, tokens_per_block: int, life_cycles: list[LifeCycle], max_rewind: int | None) -> None:
        self.tokens_per_block = tokens_per_block
        self.life_cycles = life_cycles  # by LifeCycleId
        self.ssm: LifeCycle | None = None  # the one life cycle of all recurrent layers
        self.max_rewind = max_rewind  # tokens at a step's end that are never scratch; None: no scratch reuse
        self.pool_group_of: list[PoolGroupId] = []  # by life cycle
        self.members: list[list[LifeCycleId]] = []  # life cycles that share the pool group
        self.slot_sizes: list[list[int]] = []  # bytes of a slot in each pool, largest first
        self.slot_descs: list[SlotDesc] = []
        self.index_span: list[int] = []  # the most page indices of one slot, over all buffers
        self.layer_ids: list[LayerId] = []  # in the configuration's order
        self.all_buffer_ids: list[BufferId] = []  # in the configuration's order
        self.layers_of: list[list[LayerId]] = [[] for _lc in life_cycles]  # by life cycle; a layer may be in two of them
        self.sink_tokens: list[int] = [0] * len(life_cycles)  # by life cycle: first tokens that queries of its layers always see
        self._frac_max: list[tuple[int, int]] = []  # by life cycle
        self._life_cycle_of: dict[LayerId, LifeCycleId] = {}
        self._places: dict[BufferId, BufferPlace] = {}

    @property
    def num_pool_groups(self) -> int:
        return len(self.slot_sizes)

    @property
    def num_life_cycles(self) -> int:
        return len(self.life_cycles)

    def slot_bytes(self, pool_group: int) -> int:
        """Bytes of one slot, all pools together."""
        return sum(self.slot_sizes[pool_group])

    def block_bytes(self) -> int:
        """Bytes of a block in all attention life cycles; without attention, of a state."""
        groups = [self.pool_group_of[cycle.index] for cycle in self.life_cycles if cycle.is_attention]
        return sum([self.slot_bytes(group) for group in groups or self.pool_group_of])

    def blocks_in(self, slots: list[int]) -> int:
        """How many blocks take as much memory as these numbers of slots, by pool group."""
        return sum([count * self.slot_bytes(group) for group, count in enumerate(slots)]) // self.block_bytes()

    def frac_max(self, life_cycle: int) -> tuple[int, int]:
        """The largest fraction of a slot that one layer uses, as (numerator, denominator): the part that a scratch block takes."""
        return self._frac_max[life_cycle]

    def scratch_slots(self, life_cycle: int, num_blocks: int) -> int:
        """The number of slots that this many scratch blocks share."""
        numerator, denominator = self._frac_max[life_cycle]
        return ceil_div(num_blocks * numerator, denominator)

    def life_cycle_of_layer(self, layer: LayerId) -> LifeCycleId:
        """The life cycle of a layer, of its attention if it has two. Raises UnknownBufferError for an unknown layer."""
        life_cycle = self._life_cycle_of.get(layer)
        if life_cycle is None:
            raise UnknownBufferError(f"layer {layer} is not configured; the layers are {self.layer_ids}")
        return life_cycle

    def place(self, layer: LayerId, role: DataRole) -> BufferPlace:
        """The position of a buffer. Raises UnknownBufferError for a layer or role that is not configured."""
        found = self._places.get(BufferId(layer, role))
        if found is None:
            self.life_cycle_of_layer(layer)
            roles = [buffer.role for buffer in self.all_buffer_ids if buffer.layer_id == layer]
            raise UnknownBufferError(f"layer {layer} has no buffer of role {role!r}; its roles are {roles}")
        return found

    def max_slots(self, pool_group: int) -> int:
        """The most slots with which all page indices of the group's buffers fit int32."""
        return (INT32_MAX + 1) // self.index_span[pool_group]

    def check_invariants(self) -> None:
        """Assert that every buffer is in its slot exactly once, and that pool groups and variants agree."""
        assert sorted([lc for group in self.members for lc in group]) == list(range(len(self.life_cycles)))
        for life_cycle, group_of_it in enumerate(self.pool_group_of):
            assert life_cycle in self.members[group_of_it]
        for pool_group, desc in enumerate(self.slot_descs):
            sizes = self.slot_sizes[pool_group]
            assert sizes == sorted(sizes, reverse=True)
            assert len(desc.variants) == len(self.members[pool_group])
            for variant in desc.variants:
                assert list(variant.slot_size_list) == sizes
                for pool, coalesced in enumerate(variant.coalesced_buffers):
                    for position, buffer in enumerate(coalesced.buffer_ids):
                        place = self._places[buffer]
                        assert (place.pool_group, place.pool, place.position) == (pool_group, pool, position)
                        assert (place.offset, place.size) == (position * place.size, coalesced.single_buffer_size)
                        assert place.layer_first <= position < place.layer_first + place.layer_util
                        assert (place.scale, place.stride * place.expansion) == (coalesced.num_buffers, place.size)
        assert len(self._places) == len(self.all_buffer_ids)


class _Coalescing:
    """Collects buffers of equal total size of one life cycle."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.buffers: list[BufferId] = []
        self.expansions: list[int] = []  # by buffer; they may differ although the sizes are equal

    def total(self) -> int:
        return self.size * len(self.buffers)


def _make_life_cycles(tokens_per_block: int, parts: list[LayerConfig]) -> tuple[list[LifeCycle], list[LifeCycleId]]:
    """Life cycles in first-seen order, and that of each part of a layer."""
    ids: dict[tuple[object, ...], LifeCycleId] = {}
    life_cycles: list[LifeCycle] = []
    of_part: list[LifeCycleId] = []
    for part in parts:
        key = part.group_key(tokens_per_block)
        if key not in ids:
            index = LifeCycleId(len(life_cycles))
            ids[key] = index
            life_cycles.append(make_life_cycle(index, tokens_per_block, part))
        of_part.append(ids[key])
    return life_cycles, of_part


def _coalesce(layers: list[LayerConfig], tokens_per_block: int) -> list[_Coalescing]:
    """The coalesced buffers of one life cycle's layers, largest first; equal totals keep the order of their first buffers."""
    by_size: dict[int, _Coalescing] = {}
    for layer in layers:
        for buffer in layer.buffers:
            expansion = buffer.expansion(tokens_per_block)
            size = buffer.size * expansion
            if size not in by_size:
                by_size[size] = _Coalescing(size)
            by_size[size].buffers.append(BufferId(layer.layer_id, buffer.role))
            by_size[size].expansions.append(expansion)
    return sorted(by_size.values(), key=_Coalescing.total, reverse=True)


def _largest_fraction(pools: list[_Coalescing]) -> tuple[int, int]:
    """Largest (buffers of one layer, buffers in the pool), compared as exact fractions."""
    best = (0, 1)
    for coalescing in pools:
        scale = len(coalescing.buffers)
        for util in _utilisation(coalescing).values():
            if util * best[1] > best[0] * scale:
                best = (util, scale)
    return best


def _utilisation(coalescing: _Coalescing) -> dict[LayerId, int]:
    """How many buffers of the coalesced buffer each layer has."""
    counts: dict[LayerId, int] = {}
    for buffer in coalescing.buffers:
        counts[buffer.layer_id] = counts.get(buffer.layer_id, 0) + 1
    return counts


def build_layout(config: KVCacheManagerConfig) -> StorageLayout:
    """Compute the division of a model's memory. O(buffers). Raises ConfigError for an invalid configuration."""
    config.validate()
    parts = [part for layer in config.layers for part in layer.parts()]
    life_cycles, of_part = _make_life_cycles(config.tokens_per_block, parts)
    scratch = config.swa_scratch_reuse
    layout = StorageLayout(config.tokens_per_block, life_cycles, None if scratch is None else scratch.max_rewind_len)
    parts_of: list[list[LayerConfig]] = [[] for _lc in life_cycles]
    for part, life_cycle in zip(parts, of_part, strict=True):
        parts_of[life_cycle].append(part)
        if part.layer_id not in layout._life_cycle_of:
            layout.layer_ids.append(part.layer_id)
            layout._life_cycle_of[part.layer_id] = life_cycle
        layout.layers_of[life_cycle].append(part.layer_id)
        layout.sink_tokens[life_cycle] = max(layout.sink_tokens[life_cycle], part.sink_size)
        for buffer in part.buffers:
            layout.all_buffer_ids.append(BufferId(part.layer_id, buffer.role))
    groups: dict[tuple[int, ...], PoolGroupId] = {}
    variants: list[list[SlotDescVariant]] = []
    for cycle in life_cycles:
        if not cycle.is_attention:
            layout.ssm = cycle
        pools = _coalesce(parts_of[cycle.index], config.tokens_per_block)
        sizes = tuple([coalescing.total() for coalescing in pools])
        if sizes not in groups:
            groups[sizes] = PoolGroupId(len(groups))
            layout.slot_sizes.append(list(sizes))
            layout.members.append([])
            layout.index_span.append(1)
            variants.append([])
        pool_group = groups[sizes]
        layout.pool_group_of.append(pool_group)
        layout.members[pool_group].append(cycle.index)
        layout._frac_max.append(_largest_fraction(pools))
        variants[pool_group].append(_place_variant(layout, cycle.index, pool_group, pools))
    layout.slot_descs = [SlotDesc(tuple(of_group)) for of_group in variants]
    layout.check_invariants()
    return layout


def _place_variant(
    layout: StorageLayout, life_cycle: LifeCycleId, pool_group: PoolGroupId, pools: list[_Coalescing]
) -> SlotDescVariant:
    """Set the position of each buffer of a life cycle; returns the description of its slots."""
    described: list[CoalescedBuffer] = []
    for pool, coalescing in enumerate(pools):
        scale = len(coalescing.buffers)
        utilisation = _utilisation(coalescing)
        first_of: dict[LayerId, int] = {}
        for position, buffer in enumerate(coalescing.buffers):
            place = BufferPlace(life_cycle, pool_group, PoolId(pool))
            place.size = coalescing.size
            place.expansion = coalescing.expansions[position]
            place.scale = scale
            place.position = position
            place.offset = position * coalescing.size
            place.layer_util = utilisation[buffer.layer_id]
            place.layer_first = first_of.setdefault(buffer.layer_id, position)
            place.has_scratch = layout.max_rewind is not None and layout.life_cycles[life_cycle].window_size is not None
            layout._places[buffer] = place
            layout.index_span[pool_group] = max(layout.index_span[pool_group], scale * place.expansion)
        described.append(CoalescedBuffer(coalescing.size, tuple(coalescing.buffers)))
    return SlotDescVariant(LayerGroupId(life_cycle), tuple(described))
