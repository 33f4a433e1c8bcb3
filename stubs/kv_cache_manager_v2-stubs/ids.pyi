"""Ids, enums and constants: the vocabulary of every room.

Rule: an id is a plain int at run time. What the user brings (layers, roles, streams) is plain for the type checker too; what
we hand out has a type of its own, so that a life cycle is never used as a pool group. Calling a NewType costs nothing once
compiled.
"""

from enum import IntEnum
from typing import Final, NewType, TypeAlias

LayerId: TypeAlias = int
LifeCycleId = NewType("LifeCycleId", int)
LayerGroupId = LifeCycleId
PoolGroupId = NewType("PoolGroupId", int)
PoolId = NewType("PoolId", int)
SlotId = NewType("SlotId", int)
CacheLevel = NewType("CacheLevel", int)
BlockOrdinal = NewType("BlockOrdinal", int)
BeamIndex = NewType("BeamIndex", int)
Stream: TypeAlias = int
Point = NewType("Point", int)
CudaStream: TypeAlias = Stream
TokenId: TypeAlias = int
MemAddress: TypeAlias = int
Priority: TypeAlias = int
PoolIndex = PoolId
PoolGroupIndex = PoolGroupId
SlidingWindowSize: TypeAlias = int | None
DataRole: TypeAlias = str

class CacheTier(IntEnum):
    """Kind of memory behind a cache level."""

    GPU_MEM = 0
    HOST_MEM = 1
    DISK = 2

class PageStatus(IntEnum):
    """What may be done to a page; read off its two counters, never stored."""

    LOCKED = 1
    HELD = 2
    DROPPABLE = 3

class PageIndexMode(IntEnum):
    """How a layer's page index is counted from its base address.

    SHARED: base address = pool base + the buffer's offset; all layers of a group use equal indices.
    PER_LAYER: base address = pool base; the layer's offset is folded into the index. Scratch blocks need it.
    """

    SHARED = 0
    PER_LAYER = 1

GPU_LEVEL: Final[CacheLevel]
CACHE_LEVEL1: Final[CacheLevel]
DEFAULT_BEAM_INDEX: Final[BeamIndex]
BAD_PAGE_INDEX: Final = -1
NULL_POINT: Final[Point]
NO_SLOT: Final[SlotId]
PRIORITY_MIN: Final = 0
PRIORITY_MAX: Final = 100
PRIORITY_DEFAULT: Final = 35
TOKEN_ID_LIMIT: Final[int]
DIGEST_BYTES: Final = 32
UNSIGNED_64_LIMIT: Final[int]
INT32_MAX: Final[int]
