"""Page tables: what a peer needs to know to read or write a request's pages, for disaggregated serving.

A table is built from public descriptors alone (`pool_group_descs`, the configuration). It holds only numbers and strings, so it can
be sent to another process. A request's blocks are identified by slot ids. The address of a byte is

    base_address of the pool + slot_bytes * slot id + offset of the buffer in the slot

The tables of two ranks are matched once, by `page_matching.match_page_tables`, and not for every request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, SupportsIndex

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2 import arguments
from kv_cache_manager_v2.arguments import Integers
from kv_cache_manager_v2.config import SsmLayerConfig
from kv_cache_manager_v2.disagg.plain_values import items_in, mapping_of, number_of, numbers_of, text_of
from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.ids import LayerGroupId, LayerId
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.layout.pools import PoolDesc, PoolGroupDesc, SlotDescVariant
from kv_cache_manager_v2.manager import KVCacheManager

FORMAT: Final = 1  # version of the format of `to_dict`

INDEXED: Final = "INDEXED"  # a view that lists its buffers
FLAT: Final = "FLAT"  # a view that lists none: its layers are contiguous, in the group's order, and equal in size

TOKENS_FIRST: Final = "NHD"  # order of a page's axes: tokens, heads, head dimension
HEADS_FIRST: Final = "HND"  # heads, tokens, head dimension


class BufferEntry(NamedTuple):
    """One buffer of one layer in the slots of a pool."""

    local_layer_id: int
    role: str
    offset: int  # bytes from the start of the slot, in its pool
    size: int  # bytes, with all repetitions
    repetitions: int  # how many of the buffer's own blocks make one block of the manager


class LocalLayer(NamedTuple):
    """A layer of this rank, and its id in the whole model."""

    local_id: int
    global_id: int  # unique over all ranks
    kv_heads: int  # on this rank; 0: unknown, so the layer's pages cannot be split between ranks


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class PhysicalPool:
    """The GPU memory of one pool."""

    base_address: int  # of slot 0
    slot_bytes: int
    num_slots: int

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * self.num_slots


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class PhysicalPoolGroup:
    """Pools that share their slot ids."""

    pools: tuple[PhysicalPool, ...]


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class PoolView:
    """How the buffers of a layer group divide the slots of one pool."""

    pool_idx: int  # in the pool group
    entries: tuple[BufferEntry, ...]  # by offset; empty if FLAT
    pool_role: frozenset[str]  # roles of its buffers; a peer's FLAT view is matched by them
    mapper_kind: str = INDEXED

    @property
    def layer_order(self) -> list[int]:
        """Local ids of the layers, ordered by their smallest offset; empty if FLAT."""
        first: dict[int, int] = {}
        for entry in self.entries:
            first[entry.local_layer_id] = min(entry.offset, first.get(entry.local_layer_id, entry.offset))
        return [layer for _offset, layer in sorted([(offset, layer) for layer, offset in first.items()])]


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class LayerGroup:
    """Layers that share their page indices."""

    pool_group_idx: int  # position in the table's pool groups
    recurrent: bool  # one live state per request instead of one page per block
    sliding_window_size: int | None  # tokens; None: full attention, or recurrent
    head_order: str  # TOKENS_FIRST or HEADS_FIRST
    local_layers: tuple[LocalLayer, ...]
    pool_views: tuple[PoolView, ...]

    @property
    def kv_head_num_per_rank(self) -> int:
        """KV heads of the group's first layer, on this rank."""
        return self.local_layers[0].kv_heads


class MemoryRegion(NamedTuple):
    """A memory range that a transfer library has to register."""

    name: str
    address: int
    nbytes: int


class SlotRegion(NamedTuple):
    """The memory of a slot in one pool."""

    address: int
    nbytes: int


class StateSection(NamedTuple):
    """One buffer of one recurrent layer."""

    global_layer_id: int
    role: str
    address: int  # of slot 0
    stride: int  # bytes from one slot to the next
    nbytes: int


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class KVCachePageTable:
    """The layout of a rank's pages on its GPU. Valid until the GPU level of the manager is resized."""

    tokens_per_block: int
    layer_groups: tuple[LayerGroup, ...]  # by layer group id
    pool_groups: tuple[PhysicalPoolGroup, ...]
    tensor_rank: int = 0  # index of this rank's part, of `tensor_size` equal parts of the heads
    tensor_size: int = 1

    # --- extraction

    def pool(self, layer_group: SupportsIndex, view: PoolView) -> PhysicalPool:
        """The pool that a view of a layer group divides. Raises ConfigError for a view of another layer group."""
        pools = self._pools(self._group(layer_group))
        number = arguments.instance(view, PoolView, "view").pool_idx
        if not 0 <= number < len(pools):
            raise ConfigError(
                f"view {view!r} is of pool {number}, but layer group {layer_group} has {len(pools)} pools; pass a view of the group"
            )
        return pools[number]

    def slot_regions(self, layer_group: SupportsIndex, slot_ids: Integers) -> list[SlotRegion]:
        """The memory of a request's slots, pool by pool. Negative ids (blocks outside the window) are left out.

        O(slots x pools). Raises ConfigError (a ValueError) for a slot beyond the end of the pools.
        """
        group = self._group(layer_group)
        pools = self._pools(group)
        valid = [slot for slot in _slots(slot_ids, "slot_ids") if slot >= 0]
        self.check_slots(layer_group, valid)
        return [
            SlotRegion(pools[view.pool_idx].base_address + pools[view.pool_idx].slot_bytes * slot, pools[view.pool_idx].slot_bytes)
            for view in group.pool_views
            for slot in valid
        ]

    def check_slots(self, layer_group: SupportsIndex, slot_ids: Integers) -> None:
        """Raise ConfigError if a slot is beyond the end of the layer group's pools."""
        slots = _slots(slot_ids, "slot_ids")
        for pool in self._pools(self._group(layer_group)):
            for slot in slots:
                if slot >= pool.num_slots:
                    raise ConfigError(
                        f"slot {slot} of layer group {layer_group} is out of range: its pools have {pool.num_slots} slots"
                    )

    def memory_regions(self) -> list[MemoryRegion]:
        """The memory ranges to register before transfers, each once: kv_cache_memory_pool0, ..."""
        regions: list[MemoryRegion] = []
        seen: set[tuple[int, int]] = set()
        for group in self.pool_groups:
            for pool in group.pools:
                key = (pool.base_address, pool.nbytes)
                if key not in seen:
                    seen.add(key)
                    regions.append(MemoryRegion(f"kv_cache_memory_pool{len(regions)}", pool.base_address, pool.nbytes))
        return regions

    def state_sections(self, layer_group: SupportsIndex) -> list[StateSection]:
        """The memory of each recurrent layer's state, buffer by buffer. Raises ConfigError for an attention layer group."""
        group = self._group(layer_group)
        if not group.recurrent:
            raise ConfigError(f"layer group {layer_group} is not recurrent; only recurrent layer groups have state sections")
        global_of = {layer.local_id: layer.global_id for layer in group.local_layers}
        sections: list[StateSection] = []
        for view in group.pool_views:
            pool = self.pool(layer_group, view)
            for entry in view.entries:
                address = pool.base_address + entry.offset
                sections.append(StateSection(global_of[entry.local_layer_id], entry.role, address, pool.slot_bytes, entry.size))
        return sections

    def request_slots(self, cache: KVCache, beam: SupportsIndex = 0) -> list[list[int]]:
        """The slots of one beam of an ACTIVE request, by layer group and block ordinal. A recurrent group has one slot.

        An absent page has a negative id. For beams other than 0, blocks shared with beam 0 are absent, so that each block is copied
        once. Raises LogicError for a request that is not ACTIVE, ConfigError for a beam that it does not have.
        """
        request = arguments.instance(cache, KVCache, "cache")
        if not request.is_active:
            raise LogicError(
                f"request_slots() needs an ACTIVE cache, since only that has slots on the GPU; resume {request!r} first"
            )
        slots: list[list[int]] = []
        for index, group in enumerate(self.layer_groups):
            if group.recurrent:
                slots.append([request.get_ssm_block_base_index(LayerGroupId(index), beam)])
            else:
                slots.append(list(request.get_aggregated_page_indices(LayerGroupId(index), beam)))
        return slots

    def _group(self, layer_group: object) -> LayerGroup:
        number = arguments.whole(layer_group, "layer_group")
        if not 0 <= number < len(self.layer_groups):
            raise ConfigError(f"layer_group {number} is out of range: the table has {len(self.layer_groups)} layer groups")
        return self.layer_groups[number]

    def _pools(self, group: LayerGroup) -> tuple[PhysicalPool, ...]:
        return self.pool_groups[group.pool_group_idx].pools

    # --- dictionaries

    def to_dict(self) -> dict[str, object]:
        """The table as plain lists, strings and ints, for JSON or msgpack. `from_dict` is the inverse."""
        return {
            "format": FORMAT,
            "tokens_per_block": self.tokens_per_block,
            "tensor_rank": self.tensor_rank,
            "tensor_size": self.tensor_size,
            "layer_groups": [_group_to_dict(group) for group in self.layer_groups],
            "pool_groups": [
                [[pool.base_address, pool.slot_bytes, pool.num_slots] for pool in group.pools] for group in self.pool_groups
            ],
        }

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> KVCachePageTable:
        """Rebuild a table from `to_dict`. Raises ConfigError for a dictionary of another format."""
        fields = arguments.mapping(data, "data", "what `to_dict` gives")
        try:
            if fields["format"] != FORMAT:
                raise ConfigError(f"page table of format {arguments.shown(fields['format'])}: this version reads format {FORMAT}")
            groups = [
                PhysicalPoolGroup(tuple([PhysicalPool(*numbers_of(pool, 3)) for pool in items_in(group)]))
                for group in items_in(fields["pool_groups"])
            ]
            return KVCachePageTable(
                number_of(fields["tokens_per_block"]),
                tuple([_group_from_dict(group) for group in items_in(fields["layer_groups"])]),
                tuple(groups),
                number_of(fields["tensor_rank"]),
                number_of(fields["tensor_size"]),
            )
        except KeyError as error:
            raise ConfigError(f"malformed page table: it has no field {error}") from error
        except (TypeError, IndexError) as error:
            raise ConfigError(f"malformed page table: {error}") from error


def _group_to_dict(group: LayerGroup) -> dict[str, object]:
    return {
        "pool_group_idx": group.pool_group_idx,
        "recurrent": group.recurrent,
        "sliding_window_size": group.sliding_window_size,
        "head_order": group.head_order,
        "local_layers": [list(layer) for layer in group.local_layers],
        "pool_views": [
            {
                "pool_idx": view.pool_idx,
                "entries": [list(entry) for entry in view.entries],
                "pool_role": sorted(view.pool_role),
                "mapper_kind": view.mapper_kind,
            }
            for view in group.pool_views
        ],
    }


def _group_from_dict(data: object) -> LayerGroup:
    fields = mapping_of(data)
    window = fields["sliding_window_size"]
    views: list[PoolView] = []
    for item in items_in(fields["pool_views"]):
        view = mapping_of(item)
        entries: list[BufferEntry] = []
        for entry in items_in(view["entries"]):
            layer, role, offset, size, repetitions = items_in(entry)
            entries.append(BufferEntry(number_of(layer), text_of(role), number_of(offset), number_of(size), number_of(repetitions)))
        roles = frozenset([text_of(role) for role in items_in(view["pool_role"])])
        views.append(PoolView(number_of(view["pool_idx"]), tuple(entries), roles, text_of(view["mapper_kind"])))
    return LayerGroup(
        number_of(fields["pool_group_idx"]),
        fields["recurrent"] is True,
        None if window is None else number_of(window),
        text_of(fields["head_order"]),
        tuple([LocalLayer(*numbers_of(layer, 3)) for layer in items_in(fields["local_layers"])]),
        tuple(views),
    )


# --- building


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class LayerInfo:
    """Facts about a layer that the descriptors do not contain."""

    global_id: int  # id of the layer in the whole model
    kv_heads: int = 0  # on this rank; 0: unknown, its pages cannot be split between ranks
    window: int | None = None  # tokens
    recurrent: bool = False
    repetitions: Mapping[str, int] = field(
        default_factory=dict
    )  # by role, for buffers that have blocks of their own; 1 for all others
    states: Sequence[str] = ()  # roles of the recurrent state of a layer that has attention too

    def __post_init__(self) -> None:
        arguments.flag(arguments.given(self, "recurrent"), "recurrent")
        object.__setattr__(self, "global_id", arguments.at_least(arguments.given(self, "global_id"), "global_id", 0))
        object.__setattr__(self, "kv_heads", arguments.at_least(arguments.given(self, "kv_heads"), "kv_heads", 0))
        object.__setattr__(self, "window", arguments.at_least_or_none(arguments.given(self, "window"), "window", 1))
        repetitions: dict[str, int] = {}
        for role, count in arguments.mapping(arguments.given(self, "repetitions"), "repetitions", "roles to numbers").items():
            repetitions[arguments.text(role, "a role of repetitions")] = arguments.at_least(count, "repetitions", 1)
        object.__setattr__(self, "repetitions", repetitions)
        states = arguments.items_of(arguments.given(self, "states"), "states", "roles")
        object.__setattr__(self, "states", tuple([arguments.text(role, "a role of states") for role in states]))


def build_page_table(
    descs: Sequence[PoolGroupDesc],
    tokens_per_block: SupportsIndex,
    layers: Mapping[LayerId, LayerInfo],
    tensor_rank: SupportsIndex = 0,
    tensor_size: SupportsIndex = 1,
    head_order: str = TOKENS_FIRST,
) -> KVCachePageTable:
    """Build the page table of a rank from the descriptors of its pool groups.

    Raises ConfigError (a ValueError) for a layer that `layers` lacks, two layers with one global id, a layer group without a
    descriptor, a tensor rank out of range, or an unknown head order.
    """
    given = arguments.instances(descs, PoolGroupDesc, "descs")
    block_length = arguments.at_least(tokens_per_block, "tokens_per_block", 1)
    rank, size = arguments.at_least(tensor_rank, "tensor_rank", 0), arguments.at_least(tensor_size, "tensor_size", 1)
    if rank >= size:
        raise ConfigError(f"tensor_rank is {rank}; it must be below tensor_size, {size}")
    order = arguments.text(head_order, "head_order")
    if order not in (TOKENS_FIRST, HEADS_FIRST):
        raise ConfigError(f"head_order is {order!r}; it must be {TOKENS_FIRST!r} or {HEADS_FIRST!r}")
    infos: dict[LayerId, LayerInfo] = {}
    for layer_id, info in arguments.mapping(layers, "layers", "layer ids to LayerInfo").items():
        infos[arguments.whole(layer_id, "a layer id of layers")] = arguments.instance(info, LayerInfo, f"layers[{layer_id!r}]")
    by_id: dict[int, LayerGroup] = {}
    for position, desc in enumerate(given):
        for variant in desc.slot_desc.variants:
            by_id[variant.layer_group_id] = _build_group(position, desc.pools, variant, infos, order)
    missing = [index for index in range(len(by_id)) if index not in by_id]
    if len(by_id) == 0 or missing:
        raise ConfigError(f"no descriptor names layer group {missing[0] if missing else 0}; they name {sorted(by_id)}")
    groups = tuple([by_id[index] for index in range(len(by_id))])
    owner: dict[int, int] = {}
    for group in groups:
        for layer in group.local_layers:
            if owner.setdefault(layer.global_id, layer.local_id) != layer.local_id:
                raise ConfigError(
                    f"layers {owner[layer.global_id]} and {layer.local_id} both have the global id {layer.global_id}; "
                    "global ids must be unique"
                )
    pools = [
        PhysicalPoolGroup(tuple([PhysicalPool(pool.base_address, pool.slot_bytes, desc.num_slots) for pool in desc.pools]))
        for desc in given
    ]
    return KVCachePageTable(block_length, groups, tuple(pools), rank, size)


def _build_group(
    position: int, pools: Sequence[PoolDesc], variant: SlotDescVariant, layers: Mapping[LayerId, LayerInfo], head_order: str
) -> LayerGroup:
    local: dict[LayerId, LayerInfo] = {}
    recurrent = False
    views: list[PoolView] = []
    for pool, coalesced in zip(pools, variant.coalesced_buffers, strict=True):
        entries: list[BufferEntry] = []
        offset = 0
        for layer, role in coalesced.buffer_ids:
            info = layers.get(layer)
            if info is None:
                raise ConfigError(f"`layers` has no entry for layer {layer}; it has {sorted(layers)}")
            local[layer] = info
            recurrent = info.recurrent or role in info.states
            size = coalesced.single_buffer_size
            entries.append(BufferEntry(layer, role, offset, size, info.repetitions.get(role, 1)))
            offset += size
        views.append(PoolView(pool.pool_index, tuple(entries), frozenset([entry.role for entry in entries])))
    first = local[min(local)]
    return LayerGroup(
        position,
        recurrent,
        None if recurrent else first.window,
        head_order,
        tuple([_local_layer(layer, local[layer], recurrent) for layer in sorted(local)]),
        tuple(views),
    )


def _local_layer(layer: LayerId, info: LayerInfo, recurrent: bool) -> LocalLayer:
    """The layer as a group has it. Heads of attention say nothing about the state of the same layer."""
    return LocalLayer(layer, info.global_id, 0 if recurrent and not info.recurrent else info.kv_heads)


def page_table_of(
    manager: KVCacheManager,
    kv_heads: SupportsIndex | Mapping[LayerId, SupportsIndex] = 0,
    global_ids: Mapping[LayerId, SupportsIndex] | None = None,
    tensor_rank: SupportsIndex = 0,
    tensor_size: SupportsIndex = 1,
    head_order: str = TOKENS_FIRST,
) -> KVCachePageTable:
    """Build the page table of a manager.

    `kv_heads` is the number of KV heads on this rank, one for all attention layers or by layer; 0 means unknown. `global_ids` gives
    the id of each layer in the whole model; by default that is its own id. Raises the errors of `build_page_table`.
    """
    owner = arguments.instance(manager, KVCacheManager, "manager")
    by_layer = _by_layer(kv_heads, "kv_heads") if isinstance(kv_heads, Mapping) else None
    heads_of_all = arguments.at_least(kv_heads, "kv_heads", 0) if by_layer is None else 0
    global_of = None if global_ids is None else _by_layer(global_ids, "global_ids")
    config = owner.init_config
    layers: dict[LayerId, LayerInfo] = {}
    for layer in config.layers:
        recurrent = isinstance(layer, SsmLayerConfig)
        heads = heads_of_all if by_layer is None else by_layer.get(layer.layer_id, 0)
        number = layer.layer_id if global_of is None else global_of.get(layer.layer_id)
        if number is None:
            raise ConfigError(f"global_ids has no entry for layer {layer.layer_id}; it needs one for every layer")
        repetitions = {str(buffer.role): buffer.expansion(config.tokens_per_block) for buffer in layer.buffers}
        states = [str(buffer.role) for part in layer.parts()[1:] for buffer in part.buffers]
        layers[layer.layer_id] = LayerInfo(number, 0 if recurrent else heads, layer.window_size, recurrent, repetitions, states)
    return build_page_table(owner.pool_group_descs, config.tokens_per_block, layers, tensor_rank, tensor_size, head_order)


def _by_layer(values: object, name: str) -> dict[int, int]:
    """Validate a mapping of layers to non-negative integers. Raises ConfigError."""
    found: dict[int, int] = {}
    for layer_id, value in arguments.mapping(values, name, "layer ids to numbers").items():
        found[arguments.whole(layer_id, f"a layer id of {name}")] = arguments.at_least(value, f"{name}[{layer_id!r}]", 0)
    return found


def _slots(values: object, name: str) -> list[int]:
    """Validate slot ids; negative ids are blocks without a slot. Raises ConfigError."""
    return [arguments.whole(item, name) for item in arguments.items_of(values, name, "slot ids")]


def virtual_layer_id(model_layer: SupportsIndex, attention_type: SupportsIndex, num_attention_types: SupportsIndex) -> int:
    """A global id for models in which one layer has several kinds of attention, each of which is a layer of the manager.

    `num_attention_types` is the number of possible kinds, not of those in use, so that all ranks agree.
    """
    kind, count = (
        arguments.at_least(attention_type, "attention_type", 0),
        arguments.at_least(num_attention_types, "num_attention_types", 1),
    )
    if kind >= count:
        raise ConfigError(f"attention_type {kind} is out of range: there are {count}")
    return arguments.at_least(model_layer, "model_layer", 0) * count + kind
