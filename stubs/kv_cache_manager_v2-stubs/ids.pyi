"""Ids, enums and constants that the whole package uses.

An id is a plain int at run time. Ids that the user chooses (layers, roles, streams) are plain for the type checker too. Ids that
the package chooses have types of their own, so that a life cycle cannot be used as a pool group. Compiled, a NewType costs nothing.
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
    """The kind of memory of a cache level."""

    GPU_MEM = 0
    HOST_MEM = 1
    DISK = 2

class PageStatus(IntEnum):
    """What may be done to a page. Computed from the page's counts of locks and holds."""

    LOCKED = 1
    HELD = 2
    DROPPABLE = 3

class PageIndexMode(IntEnum):
    """To which base address the page indices of a layer refer.

    SHARED: base address = pool base + offset of the buffer. All layers of a group use equal indices.
    PER_LAYER: base address = pool base. The index includes the layer's offset. Scratch blocks need this mode.
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
