"""Ids, enums and constants: the vocabulary of every room.

Rule: an id is a plain int at run time. What the user brings (layers, roles, streams) is plain for the type checker too; what
we hand out has a type of its own, so that a life cycle is never used as a pool group. Calling a NewType costs nothing once
compiled.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NewType, TypeAlias

LayerId: TypeAlias = int  # the model's own layer number, chosen by the user
LifeCycleId = NewType("LifeCycleId", int)  # position in the list of life cycles, first-seen order of the layers
LayerGroupId = LifeCycleId  # the public name of a life cycle's id
PoolGroupId = NewType("PoolGroupId", int)  # position in the list of pool groups, first-seen order of the life cycles
PoolId = NewType("PoolId", int)  # position of a pool inside its pool group, largest slot first
SlotId = NewType("SlotId", int)  # one id addresses the same slot in every pool of a group, on one level
CacheLevel = NewType("CacheLevel", int)  # position in the configured tier list, warm to cold; 0 is the GPU
BlockOrdinal = NewType("BlockOrdinal", int)  # position of a block in its sequence
BeamIndex = NewType("BeamIndex", int)
Stream: TypeAlias = int  # the driver's handle of a stream, as the engine passes it
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
    """Kind of memory behind a cache level."""

    GPU_MEM = 0
    HOST_MEM = 1
    DISK = 2


class PageStatus(IntEnum):
    """What may be done to a page; read off its two counters, never stored."""

    LOCKED = 1  # on the GPU and immovable: a running request uses it
    HELD = 2  # may move to a colder level, may not be dropped: a suspended request needs it
    DROPPABLE = 3  # may be moved or dropped: only the reuse tree knows it


class PageIndexMode(IntEnum):
    """How a layer's page index is counted from its base address.

    SHARED: base address = pool base + the buffer's offset; all layers of a group use equal indices.
    PER_LAYER: base address = pool base; the layer's offset is folded into the index. Scratch blocks need it.
    """

    SHARED = 0
    PER_LAYER = 1


GPU_LEVEL: Final = CacheLevel(0)
CACHE_LEVEL1: Final = CacheLevel(1)  # the first level below the GPU
DEFAULT_BEAM_INDEX: Final = BeamIndex(0)
BAD_PAGE_INDEX: Final = -1  # the index of a block that has no page
NULL_POINT: Final = Point(0)  # long past in every order: waiting for it is a no-op
NO_SLOT: Final = SlotId(-1)

PRIORITY_MIN: Final = 0
PRIORITY_MAX: Final = 100
PRIORITY_DEFAULT: Final = 35  # lower is evicted earlier

TOKEN_ID_LIMIT: Final = 1 << 31  # token ids are 0 <= id < 2**31, so that bit 31 of a packed word can mark a digest
DIGEST_BYTES: Final = 32  # a multimodal digest: SHA-256 or BLAKE3
UNSIGNED_64_LIMIT: Final = 1 << 64  # request ids, LoRA ids and salts are unsigned 64-bit
INT32_MAX: Final = (1 << 31) - 1  # page indices are int32 on the device
