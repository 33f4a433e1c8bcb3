"""Page tables: what a peer needs to know to read or write a request's pages, for disaggregated serving.

A table is built from public descriptors alone (`pool_group_descs`, the configuration). It holds only numbers and strings, so it can
be sent to another process. A request's blocks are identified by slot ids. The address of a byte is

    base_address of the pool + slot_bytes * slot id + offset of the buffer in the slot

The tables of two ranks are matched once, by `page_matching.match_page_tables`, and not for every request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, SupportsIndex

from kv_cache_manager_v2.arguments import Integers
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
    """One buffer of one layer in the slots of a pool."""

    local_layer_id: int
    role: str
    offset: int
    size: int
    repetitions: int

class LocalLayer(NamedTuple):
    """A layer of this rank, and its id in the whole model."""

    local_id: int
    global_id: int
    kv_heads: int

@dataclass(frozen=True)
class PhysicalPool:
    """The GPU memory of one pool."""

    base_address: int
    slot_bytes: int
    num_slots: int

    @property
    def nbytes(self) -> int: ...

@dataclass(frozen=True)
class PhysicalPoolGroup:
    """Pools that share their slot ids."""

    pools: tuple[PhysicalPool, ...]

@dataclass(frozen=True)
class PoolView:
    """How the buffers of a layer group divide the slots of one pool."""

    pool_idx: int
    entries: tuple[BufferEntry, ...]
    pool_role: frozenset[str]
    mapper_kind: str = INDEXED

    @property
    def layer_order(self) -> list[int]:
        """Local ids of the layers, ordered by their smallest offset; empty if FLAT."""

@dataclass(frozen=True)
class LayerGroup:
    """Layers that share their page indices."""

    pool_group_idx: int
    recurrent: bool
    sliding_window_size: int | None
    head_order: str
    local_layers: tuple[LocalLayer, ...]
    pool_views: tuple[PoolView, ...]

    @property
    def kv_head_num_per_rank(self) -> int:
        """KV heads of the group's first layer, on this rank."""

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
    address: int
    stride: int
    nbytes: int

@dataclass(frozen=True)
class KVCachePageTable:
    """The layout of a rank's pages on its GPU. Valid until the GPU level of the manager is resized."""

    tokens_per_block: int
    layer_groups: tuple[LayerGroup, ...]
    pool_groups: tuple[PhysicalPoolGroup, ...]
    tensor_rank: int = 0
    tensor_size: int = 1

    def pool(self, layer_group: SupportsIndex, view: PoolView) -> PhysicalPool:
        """The pool that a view of a layer group divides. Raises ConfigError for a view of another layer group."""

    def slot_regions(self, layer_group: SupportsIndex, slot_ids: Integers) -> list[SlotRegion]:
        """The memory of a request's slots, pool by pool. Negative ids (blocks outside the window) are left out.

        O(slots x pools). Raises ConfigError (a ValueError) for a slot beyond the end of the pools.
        """

    def check_slots(self, layer_group: SupportsIndex, slot_ids: Integers) -> None:
        """Raise ConfigError if a slot is beyond the end of the layer group's pools."""

    def memory_regions(self) -> list[MemoryRegion]:
        """The memory ranges to register before transfers, each once: kv_cache_memory_pool0, ..."""

    def state_sections(self, layer_group: SupportsIndex) -> list[StateSection]:
        """The memory of each recurrent layer's state, buffer by buffer. Raises ConfigError for an attention layer group."""

    def request_slots(self, cache: KVCache, beam: SupportsIndex = 0) -> list[list[int]]:
        """The slots of one beam of an ACTIVE request, by layer group and block ordinal. A recurrent group has one slot.

        An absent page has a negative id. For beams other than 0, blocks shared with beam 0 are absent, so that each block is copied
        once. Raises LogicError for a request that is not ACTIVE, ConfigError for a beam that it does not have.
        """

    def to_dict(self) -> dict[str, object]:
        """The table as plain lists, strings and ints, for JSON or msgpack. `from_dict` is the inverse."""

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> KVCachePageTable:
        """Rebuild a table from `to_dict`. Raises ConfigError for a dictionary of another format."""

@dataclass(frozen=True)
class LayerInfo:
    """Facts about a layer that the descriptors do not contain."""

    global_id: int
    kv_heads: int = 0
    window: int | None = None
    recurrent: bool = False
    repetitions: Mapping[str, int] = ...
    states: Sequence[str] = ()

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

def virtual_layer_id(model_layer: SupportsIndex, attention_type: SupportsIndex, num_attention_types: SupportsIndex) -> int:
    """A global id for models in which one layer has several kinds of attention, each of which is a layer of the manager.

    `num_attention_types` is the number of possible kinds, not of those in use, so that all ranks agree.
    """
