"""Page tables: what a peer must know to read or write a request's pages by itself, for disaggregated serving.

Rule: a table is built from the public descriptors alone (`pool_group_descs`, the configuration), holds numbers only, and means the
same in another process. Blocks of a request are named by slot ids; a byte's address is

    base_address of the pool + slot_bytes * slot id + offset of the buffer in the slot

Which bytes of one table belong to which of another is decided once (`page_matching.match_page_tables`), not for every request.
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
    """A layer of this rank, and which layer of the whole model it is."""

    local_id: int
    global_id: int
    kv_heads: int

@dataclass(frozen=True)
class PhysicalPool:
    """Memory of one pool on the GPU."""

    base_address: int
    slot_bytes: int
    num_slots: int

    @property
    def nbytes(self) -> int: ...

@dataclass(frozen=True)
class PhysicalPoolGroup:
    """Pools in which a slot id names the same slot."""

    pools: tuple[PhysicalPool, ...]

@dataclass(frozen=True)
class PoolView:
    """How a layer group divides the slots of one pool."""

    pool_idx: int
    entries: tuple[BufferEntry, ...]
    pool_role: frozenset[str]
    mapper_kind: str = INDEXED

    @property
    def layer_order(self) -> list[int]:
        """Local ids of the layers, by their smallest offset; empty if FLAT."""

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
        """Of its first layer."""

class MemoryRegion(NamedTuple):
    """Memory that a transfer library has to register."""

    name: str
    address: int
    nbytes: int

class SlotRegion(NamedTuple):
    """A slot in one pool."""

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
    """Everything about a rank's pages on its GPU. Valid until the manager's GPU level is resized."""

    tokens_per_block: int
    layer_groups: tuple[LayerGroup, ...]
    pool_groups: tuple[PhysicalPoolGroup, ...]
    tensor_rank: int = 0
    tensor_size: int = 1

    def pool(self, layer_group: SupportsIndex, view: PoolView) -> PhysicalPool:
        """The memory that a view of a layer group divides."""

    def slot_regions(self, layer_group: SupportsIndex, slot_ids: Integers) -> list[SlotRegion]:
        """The whole slots of a request's blocks, pool by pool; absent ones (negative ids: out of the window) are left out.

        Raises ConfigError (a ValueError) for a slot that the pools do not have. O(slots x pools).
        """

    def check_slots(self, layer_group: SupportsIndex, slot_ids: Integers) -> None:
        """Raise ConfigError if a slot is beyond the end of the layer group's pools."""

    def memory_regions(self) -> list[MemoryRegion]:
        """What to register before transfers, each range once: kv_cache_memory_pool0, ..."""

    def state_sections(self, layer_group: SupportsIndex) -> list[StateSection]:
        """Where the state of each recurrent layer lies, buffer by buffer. Raises ConfigError for a layer group of attention."""

    def request_slots(self, cache: KVCache, beam: SupportsIndex = 0) -> list[list[int]]:
        """The slots of an ACTIVE request, by layer group and block ordinal; absent pages are negative. Recurrent: one slot.

        Of one beam: the blocks that a further beam shares with beam 0 are absent, so that each block is moved once. Raises
        LogicError for a request that is not ACTIVE, ConfigError for a beam that it does not have.
        """

    def to_dict(self) -> dict[str, object]:
        """Plain lists, strings and ints, good for JSON or msgpack; `from_dict` undoes it."""

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> KVCachePageTable:
        """The table of a dictionary. Raises ConfigError for one that is not of this format."""

@dataclass(frozen=True)
class LayerInfo:
    """What the descriptors do not say about a layer."""

    global_id: int
    kv_heads: int = 0
    window: int | None = None
    recurrent: bool = False
    repetitions: Mapping[str, int] = ...

def build_page_table(
    descs: Sequence[PoolGroupDesc],
    tokens_per_block: SupportsIndex,
    layers: Mapping[LayerId, LayerInfo],
    tensor_rank: SupportsIndex = 0,
    tensor_size: SupportsIndex = 1,
    head_order: str = TOKENS_FIRST,
) -> KVCachePageTable:
    """The page table of a rank, from the descriptors of its pool groups.

    Raises ConfigError (a ValueError) for a layer without information, two layers with one global id, a layer group that no
    descriptor names, a tensor rank out of range, or an unknown order of heads.
    """

def page_table_of(
    manager: KVCacheManager,
    kv_heads: SupportsIndex | Mapping[LayerId, SupportsIndex] = 0,
    global_ids: Mapping[LayerId, SupportsIndex] | None = None,
    tensor_rank: SupportsIndex = 0,
    tensor_size: SupportsIndex = 1,
    head_order: str = TOKENS_FIRST,
) -> KVCachePageTable:
    """The page table of a manager. `kv_heads`: heads on this rank, of all attention layers or by layer; 0: unknown.

    `global_ids`: which layer of the whole model each one is; by default its own id. Raises as `build_page_table`.
    """

def virtual_layer_id(model_layer: SupportsIndex, attention_type: SupportsIndex, num_attention_types: SupportsIndex) -> int:
    """A global id for models in which one layer has several kinds of attention, each a layer of the manager.

    `num_attention_types` is the number of kinds that there can be, not of those in use, so that all ranks agree.
    """
