from enum import Enum, IntEnum
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
DataRole: TypeAlias = str

class CacheTier(IntEnum):
    GPU_MEM = 0
    HOST_MEM = 1
    DISK = 2

class PageStatus(IntEnum):
    LOCKED = 0
    HELD = 1
    DROPPABLE = 2

class PageIndexMode(Enum):
    SHARED = 0
    PER_LAYER = 1

GPU_LEVEL: Final = CacheLevel(0)
DEFAULT_BEAM_INDEX: Final = BeamIndex(0)
BAD_PAGE_INDEX: Final = -1
NULL_POINT: Final = Point(0)
NO_SLOT: Final = SlotId(-1)
PRIORITY_MIN: Final = 0
PRIORITY_MAX: Final = 100
PRIORITY_DEFAULT: Final = 35
TOKEN_ID_LIMIT: Final = 1 << 31
DIGEST_BYTES: Final = 32
UNSIGNED_64_LIMIT: Final = 1 << 64
INT32_MAX: Final = (1 << 31) - 1
