"""Ids, enums and constants that the whole package uses.

An id is a plain int at run time. Ids that the user chooses (layers, roles, streams) are plain for the type checker too. Ids that
the package chooses have types of their own, so that a life cycle cannot be used as a pool group. Compiled, a NewType costs nothing.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NewType, TypeAlias

LayerId: TypeAlias = int  # the model's own layer number, chosen by the user
LifeCycleId = NewType("LifeCycleId", int)  # position in the list of life cycles, in first-seen order of the layers
LayerGroupId = LifeCycleId  # the public name of a life cycle's id
PoolGroupId = NewType("PoolGroupId", int)  # position in the list of pool groups, in first-seen order of the life cycles
PoolId = NewType("PoolId", int)  # position of a pool in its pool group, ordered by falling slot size
SlotId = NewType("SlotId", int)  # number of a slot in its cell: the same in every pool of the group
CacheLevel = NewType("CacheLevel", int)  # position in the configured tier list, warm to cold; 0 is the GPU
BlockOrdinal = NewType("BlockOrdinal", int)  # position of a block in its sequence
BeamIndex = NewType("BeamIndex", int)
Stream: TypeAlias = int  # the driver's handle of a stream
Point = NewType("Point", int)  # a point in one stream's order; see device/timeline.py
CudaStream: TypeAlias = Stream
TokenId: TypeAlias = int
MemAddress: TypeAlias = int
Priority: TypeAlias = int
PoolIndex = PoolId
PoolGroupIndex = PoolGroupId
SlidingWindowSize: TypeAlias = int | None  # tokens; None: full attention
DataRole: TypeAlias = str  # what a buffer of a layer is for: "key", "value", "key_scale", ...


class CacheTier(IntEnum):
    """The kind of memory of a cache level."""

    GPU_MEM = 0
    HOST_MEM = 1
    DISK = 2


class PageStatus(IntEnum):
    """What may be done to a page. Computed from the page's counts of locks and holds."""

    LOCKED = 1  # on the GPU and not movable: a running request uses it
    HELD = 2  # may be moved, may not be dropped: a suspended request needs it
    DROPPABLE = 3  # may be moved or dropped: only the radix tree lists it


class PageIndexMode(IntEnum):
    """To which base address the page indices of a layer refer.

    SHARED: base address = pool base + offset of the buffer. All layers of a group use equal indices.
    PER_LAYER: base address = pool base. The index includes the layer's offset. Scratch blocks need this mode.
    """

    SHARED = 0
    PER_LAYER = 1


GPU_LEVEL: Final = CacheLevel(0)
CACHE_LEVEL1: Final = CacheLevel(1)  # the first level below the GPU
DEFAULT_BEAM_INDEX: Final = BeamIndex(0)
BAD_PAGE_INDEX: Final = -1  # the index of a block that has no page
NULL_POINT: Final = Point(0)  # earlier than all work on every stream: waiting for it does nothing
NO_SLOT: Final = SlotId(-1)

PRIORITY_MIN: Final = 0
PRIORITY_MAX: Final = 100
PRIORITY_DEFAULT: Final = 35  # lower is evicted earlier

TOKEN_ID_LIMIT: Final = 1 << 31  # token ids are below it, so that bit 31 of a packed word can mark a digest
DIGEST_BYTES: Final = 32  # length of a multimodal digest (SHA-256 or BLAKE3)
UNSIGNED_64_LIMIT: Final = 1 << 64  # LoRA ids and salts are unsigned 64-bit
INT32_MAX: Final = (1 << 31) - 1  # page indices are int32 on the device
