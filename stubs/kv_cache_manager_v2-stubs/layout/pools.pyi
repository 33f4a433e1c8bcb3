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

from dataclasses import dataclass
from typing import NamedTuple

from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.ids import DataRole, LayerGroupId, LayerId, LifeCycleId, PoolGroupId, PoolId
from kv_cache_manager_v2.layout.life_cycle import LifeCycle

class BufferId(NamedTuple):
    """Identifies one buffer of the model. Equal to the tuple (layer, role)."""

    layer_id: LayerId
    role: DataRole

@dataclass(frozen=True)
class PoolDesc:
    """One pool of a pool group on the GPU."""

    pool_index: PoolId
    base_address: int
    slot_bytes: int

@dataclass(frozen=True)
class CoalescedBuffer:
    """Contiguous buffers of equal size in the slots of one pool."""

    single_buffer_size: int
    buffer_ids: tuple[BufferId, ...]

    @property
    def num_buffers(self) -> int: ...
    @property
    def size(self) -> int:
        """Bytes of all its buffers: the slot size of the pool."""

@dataclass(frozen=True)
class SlotDescVariant:
    """How one layer group divides the slots of its pool group."""

    layer_group_id: LayerGroupId
    coalesced_buffers: tuple[CoalescedBuffer, ...]

    @property
    def slot_size_list(self) -> tuple[int, ...]:
        """Bytes of a slot in each pool. Equal for all variants of a pool group."""

@dataclass(frozen=True)
class SlotDesc:
    """The contents of a slot of a pool group: one variant for each layer group that shares it."""

    variants: tuple[SlotDescVariant, ...]

    @property
    def slot_size_list(self) -> tuple[int, ...]: ...

@dataclass(frozen=True)
class PoolGroupDesc:
    """A pool group on the GPU: its number of slots, their contents, and the addresses of its pools."""

    pool_group_index: PoolGroupId
    num_slots: int
    slot_desc: SlotDesc
    pools: tuple[PoolDesc, ...]

class BufferPlace:
    """The position of a buffer in the slots of its layer group."""

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
    has_scratch: bool

    def __init__(self, life_cycle: LifeCycleId, pool_group: PoolGroupId, pool: PoolId) -> None: ...
    @property
    def stride(self) -> int:
        """Bytes of one page of the buffer's own block length: the configured buffer size."""

class StorageLayout:
    """The division of a model's memory, fixed by its configuration. Lists are by pool group unless the comment says otherwise."""

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
    sink_tokens: list[int]

    def __init__(self, tokens_per_block: int, life_cycles: list[LifeCycle], max_rewind: int | None) -> None: ...
    @property
    def num_pool_groups(self) -> int: ...
    @property
    def num_life_cycles(self) -> int: ...
    def slot_bytes(self, pool_group: int) -> int:
        """Bytes of one slot, all pools together."""

    def block_bytes(self) -> int:
        """Bytes of a block in all attention life cycles; without attention, of a state."""

    def blocks_in(self, slots: list[int]) -> int:
        """How many blocks take as much memory as these numbers of slots, by pool group."""

    def frac_max(self, life_cycle: int) -> tuple[int, int]:
        """The largest fraction of a slot that one layer uses, as (numerator, denominator): the part that a scratch block takes."""

    def scratch_slots(self, life_cycle: int, num_blocks: int) -> int:
        """The number of slots that this many scratch blocks share."""

    def life_cycle_of_layer(self, layer: LayerId) -> LifeCycleId:
        """The life cycle of a layer, of its attention if it has two. Raises UnknownBufferError for an unknown layer."""

    def place(self, layer: LayerId, role: DataRole) -> BufferPlace:
        """The position of a buffer. Raises UnknownBufferError for a layer or role that is not configured."""

    def max_slots(self, pool_group: int) -> int:
        """The most slots with which all page indices of the group's buffers fit int32."""

    def check_invariants(self) -> None:
        """Assert that every buffer is in its slot exactly once, and that pool groups and variants agree."""

def build_layout(config: KVCacheManagerConfig) -> StorageLayout:
    """Compute the division of a model's memory. O(buffers). Raises ConfigError for an invalid configuration."""
