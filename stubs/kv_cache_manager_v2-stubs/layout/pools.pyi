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

from dataclasses import dataclass
from typing import NamedTuple

from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.ids import DataRole, LayerGroupId, LayerId, LifeCycleId, PoolGroupId, PoolId
from kv_cache_manager_v2.layout.life_cycle import LifeCycle

class BufferId(NamedTuple):
    """Names one buffer of the model; equal to the plain tuple (layer, role)."""

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
    """Buffers of equal size that lie side by side in a slot of one pool."""

    single_buffer_size: int
    buffer_ids: tuple[BufferId, ...]

    @property
    def num_buffers(self) -> int: ...
    @property
    def size(self) -> int:
        """Bytes of them all, which is the pool's slot size."""

@dataclass(frozen=True)
class SlotDescVariant:
    """How one layer group divides the slots of its pool group."""

    layer_group_id: LayerGroupId
    coalesced_buffers: tuple[CoalescedBuffer, ...]

    @property
    def slot_size_list(self) -> tuple[int, ...]:
        """Slot bytes in each pool; equal for all variants of a pool group."""

@dataclass(frozen=True)
class SlotDesc:
    """What a slot of a pool group may hold: one variant for each layer group that shares it."""

    variants: tuple[SlotDescVariant, ...]

    @property
    def slot_size_list(self) -> tuple[int, ...]: ...

@dataclass(frozen=True)
class PoolGroupDesc:
    """A pool group on the GPU: how many slots, what they hold, and where its pools lie."""

    pool_group_index: PoolGroupId
    num_slots: int
    slot_desc: SlotDesc
    pools: tuple[PoolDesc, ...]

class BufferPlace:
    """Where a buffer lies in the slots of its layer group."""

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
    def stride(self) -> int:
        """Bytes of one page of the buffer's own block length: the configured buffer size."""

class StorageLayout:
    """The arithmetic of a model's memory, fixed by its configuration. Lists by pool group unless said."""

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
    def slot_bytes(self, pool_group: int) -> int:
        """Bytes of one slot, all pools together."""

    def frac_max(self, life_cycle: int) -> tuple[int, int]:
        """Largest part of a pool's slot that one layer fills, as (numerator, denominator): what a scratch block takes of a slot."""

    def scratch_slots(self, life_cycle: int, num_blocks: int) -> int:
        """Slots that so many scratch blocks share, exactly."""

    def life_cycle_of_layer(self, layer: LayerId) -> LifeCycleId:
        """Raises UnknownBufferError for a layer that the configuration does not have."""

    def place(self, layer: LayerId, role: DataRole) -> BufferPlace:
        """Where a buffer lies. Raises UnknownBufferError for a layer or role that the configuration does not have."""

    def max_slots(self, pool_group: int) -> int:
        """Most slots whose page indices fit int32 in every numbering of the group's buffers."""

    def check_invariants(self) -> None:
        """Assert that every buffer lies inside its slot, exactly once, and that the groups agree with their variants."""

def build_layout(config: KVCacheManagerConfig) -> StorageLayout:
    """Lay out a model's memory. Raises ConfigError for an invalid configuration. O(buffers)."""
