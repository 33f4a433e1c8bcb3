"""From a model's buffers to slots: buffers -> coalesced buffers -> pools -> pool groups.

Rule: what is always allocated together lies together. Within a layer group (life cycle), buffers of equal size are laid side by
side in one *coalesced buffer*; each coalesced buffer has a pool of its own, the largest first. Layer groups whose pools have equal
slot sizes share a *pool group*. A *slot* is one id, good in every pool of its group: slot i is the i-th piece of each pool.

A real one: layers 0 and 2 with full attention, 1 and 3 with a window of 1024 tokens, 64 KiB of keys and of values and 2 KiB of
scales of each in a block; layer 4 recurrent, with 256 KiB of state and 24 KiB of convolution inputs. Each buffer is preceded by its
offset in bytes. The slots of pool group 0 are interchangeable between layer groups 0 and 1. (`explain.draw_layout` draws this.)

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

The bytes of buffer (2, value) for a block in slot i are the 65536 at base of pool 0 + i * 262144 + 196608. `pool_group_descs` of a
manager say all this with addresses: `PoolGroupDesc` (num_slots; pools with base and slot bytes; a `SlotDesc` with one
`SlotDescVariant` for each layer group, whose i-th `CoalescedBuffer` lies in the i-th pool).

A buffer whose kernel uses smaller blocks (`tokens_per_block_override`) repeats `expansion` times in a slot; its size here is that
of all repetitions.
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
    """Names one buffer of the model; equal to the plain tuple (layer, role)."""

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
    """Buffers of equal size that lie side by side in a slot of one pool."""

    single_buffer_size: int  # bytes of each
    buffer_ids: tuple[BufferId, ...]  # in order of their offsets

    @property
    def num_buffers(self) -> int:
        return len(self.buffer_ids)

    @property
    def size(self) -> int:
        """Bytes of them all, which is the pool's slot size."""
        return self.single_buffer_size * len(self.buffer_ids)


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class SlotDescVariant:
    """How one layer group divides the slots of its pool group."""

    layer_group_id: LayerGroupId
    coalesced_buffers: tuple[CoalescedBuffer, ...]  # by pool

    @property
    def slot_size_list(self) -> tuple[int, ...]:
        """Slot bytes in each pool; equal for all variants of a pool group."""
        return tuple([coalesced.size for coalesced in self.coalesced_buffers])


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class SlotDesc:
    """What a slot of a pool group may hold: one variant for each layer group that shares it."""

    variants: tuple[SlotDescVariant, ...]

    @property
    def slot_size_list(self) -> tuple[int, ...]:
        return self.variants[0].slot_size_list


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class PoolGroupDesc:
    """A pool group on the GPU: how many slots, what they hold, and where its pools lie."""

    pool_group_index: PoolGroupId
    num_slots: int
    slot_desc: SlotDesc
    pools: tuple[PoolDesc, ...]


class BufferPlace:
    """Where a buffer lies in the slots of its layer group."""

    def __init__(self, life_cycle: LifeCycleId, pool_group: PoolGroupId, pool: PoolId) -> None:
        self.life_cycle = life_cycle
        self.pool_group = pool_group
        self.pool = pool
        self.offset = 0  # bytes from the start of the slot, in this pool
        self.size = 0  # bytes, all repetitions
        self.expansion = 1  # repetitions: the buffer's own, smaller blocks in one block
        self.scale = 1  # buffers in the coalesced buffer
        self.position = 0  # which of them this is: offset / size
        self.layer_util = 1  # how many of them belong to this buffer's layer; they lie side by side
        self.layer_first = 0  # position of the first of those

    @property
    def stride(self) -> int:
        """Bytes of one page of the buffer's own block length: the configured buffer size."""
        return self.size // self.expansion


class StorageLayout:
    """The arithmetic of a model's memory, fixed by its configuration. Lists by pool group unless said."""

    def __init__(self, tokens_per_block: int, life_cycles: list[LifeCycle], max_rewind: int | None) -> None:
        self.tokens_per_block = tokens_per_block
        self.life_cycles = life_cycles  # by LifeCycleId
        self.ssm: LifeCycle | None = None  # the one life cycle of all recurrent layers
        self.max_rewind = max_rewind  # SWA scratch reuse: tokens at a step's end that never lie in scratch; None: scratch is off
        self.pool_group_of: list[PoolGroupId] = []  # by life cycle
        self.members: list[list[LifeCycleId]] = []  # life cycles that share the pool group
        self.slot_sizes: list[list[int]] = []  # bytes of a slot in each pool, largest first
        self.slot_descs: list[SlotDesc] = []
        self.index_span: list[int] = []  # most page indices that one slot takes in any buffer's numbering
        self.layer_ids: list[LayerId] = []  # in the configuration's order
        self.all_buffer_ids: list[BufferId] = []  # in the configuration's order
        self.layers_of: list[list[LayerId]] = [[] for _lc in life_cycles]  # by life cycle
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

    def frac_max(self, life_cycle: int) -> tuple[int, int]:
        """Largest part of a pool's slot that one layer fills, as (numerator, denominator): what a scratch block takes of a slot."""
        return self._frac_max[life_cycle]

    def scratch_slots(self, life_cycle: int, num_blocks: int) -> int:
        """Slots that so many scratch blocks share, exactly."""
        numerator, denominator = self._frac_max[life_cycle]
        return ceil_div(num_blocks * numerator, denominator)

    def life_cycle_of_layer(self, layer: LayerId) -> LifeCycleId:
        """Raises UnknownBufferError for a layer that the configuration does not have."""
        life_cycle = self._life_cycle_of.get(layer)
        if life_cycle is None:
            raise UnknownBufferError(f"layer {layer} is not configured; the layers are {self.layer_ids}")
        return life_cycle

    def place(self, layer: LayerId, role: DataRole) -> BufferPlace:
        """Where a buffer lies. Raises UnknownBufferError for a layer or role that the configuration does not have."""
        found = self._places.get(BufferId(layer, role))
        if found is None:
            self.life_cycle_of_layer(layer)
            roles = [buffer.role for buffer in self.all_buffer_ids if buffer.layer_id == layer]
            raise UnknownBufferError(f"layer {layer} has no buffer of role {role!r}; its roles are {roles}")
        return found

    def max_slots(self, pool_group: int) -> int:
        """Most slots whose page indices fit int32 in every numbering of the group's buffers."""
        return (INT32_MAX + 1) // self.index_span[pool_group]

    def check_invariants(self) -> None:
        """Assert that every buffer lies inside its slot, exactly once, and that the groups agree with their variants."""
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
    """One life cycle's buffers of equal expanded size, while they are collected."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.buffers: list[BufferId] = []
        self.expansions: list[int] = []  # by buffer: equal sizes may come of unequal repetitions

    def total(self) -> int:
        return self.size * len(self.buffers)


def _make_life_cycles(config: KVCacheManagerConfig) -> tuple[list[LifeCycle], list[LifeCycleId]]:
    """Life cycles in first-seen order, and that of each layer."""
    ids: dict[tuple[object, ...], LifeCycleId] = {}
    life_cycles: list[LifeCycle] = []
    of_layer: list[LifeCycleId] = []
    for layer in config.layers:
        key = layer.group_key(config.tokens_per_block)
        if key not in ids:
            index = LifeCycleId(len(life_cycles))
            ids[key] = index
            life_cycles.append(make_life_cycle(index, config.tokens_per_block, layer))
        of_layer.append(ids[key])
    return life_cycles, of_layer


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
    """Lay out a model's memory. Raises ConfigError for an invalid configuration. O(buffers)."""
    config.validate()
    life_cycles, of_layer = _make_life_cycles(config)
    scratch = config.swa_scratch_reuse
    layout = StorageLayout(config.tokens_per_block, life_cycles, None if scratch is None else scratch.max_rewind_len)
    layers: list[list[LayerConfig]] = [[] for _lc in life_cycles]
    for layer, life_cycle in zip(config.layers, of_layer, strict=True):
        layers[life_cycle].append(layer)
        layout.layer_ids.append(layer.layer_id)
        layout.layers_of[life_cycle].append(layer.layer_id)
        layout._life_cycle_of[layer.layer_id] = life_cycle
        for buffer in layer.buffers:
            layout.all_buffer_ids.append(BufferId(layer.layer_id, buffer.role))
    groups: dict[tuple[int, ...], PoolGroupId] = {}
    variants: list[list[SlotDescVariant]] = []
    for cycle in life_cycles:
        if not cycle.is_attention:
            layout.ssm = cycle
        pools = _coalesce(layers[cycle.index], config.tokens_per_block)
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
    """Give each buffer of a life cycle its place, and describe the slot."""
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
            layout._places[buffer] = place
            layout.index_span[pool_group] = max(layout.index_span[pool_group], scale * place.expansion)
        described.append(CoalescedBuffer(coalescing.size, tuple(coalescing.buffers)))
    return SlotDescVariant(LayerGroupId(life_cycle), tuple(described))
