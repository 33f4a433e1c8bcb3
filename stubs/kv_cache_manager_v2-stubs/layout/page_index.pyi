"""Page indices: how an attention kernel finds a block's buffer from its slot id.

Byte offsets are Python ints and cannot overflow. Page indices are int32; larger ones raise ConfigError.

A kernel addresses a buffer as base + stride * index. Let a coalesced buffer have S buffers, with this one at position k, and let
one block hold e of the buffer's own, smaller blocks. Slot b then has the indices

    SHARED     (b * S) * e + i          base = pool base + offset of the buffer; all layers of a group use equal indices
    PER_LAYER  (b * S + k) * e + i      base = pool base

for i = 0 to e - 1. A block without a page has BAD e times.

Scratch blocks share slots: a slot of S buffer positions holds buffers of several blocks, of one layer at a time. Let the layer
have u of the S buffers, from position k0 on. The buffer at position k of the p-th scratch block has number t = p * u + (k - k0).
It is in scratch slot t // S at position (t + k0) mod S. So no two buffers of a layer overlap, and q blocks need ceil(q * u / S)
slots.
"""

from array import array
from collections.abc import Iterable
from typing import SupportsIndex, TypeVar

from kv_cache_manager_v2.arguments import (
    IntBuffer,
    Integers,
)
from kv_cache_manager_v2.ids import PageIndexMode
from kv_cache_manager_v2.layout.arithmetic import HalfOpenRange
from kv_cache_manager_v2.layout.pools import BufferPlace, StorageLayout

_Out = TypeVar("_Out", bound=IntBuffer)

class ScratchDesc:
    """The scratch blocks of one request in one layer group, and the slots that they share. False if there are no blocks."""

    range: HalfOpenRange
    slot_ids: list[int]

    def __init__(self, range: HalfOpenRange, slot_ids: Integers) -> None: ...
    def __bool__(self) -> bool: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[object, ...]: ...

class PageIndexConverter:
    """Turns base page indices (slot ids by block ordinal) into the page indices of one buffer. Keeps no state."""

    scale: int
    layer_offset: int
    expansion: int
    layer_util: int
    layer_first: int
    has_scratch: bool
    scratch_enabled: bool

    def __init__(self, place: BufferPlace, scratch_enabled: bool = False) -> None: ...
    @property
    def scratch_pages_per_block(self) -> int:
        """Buffers of the layer in the coalesced buffer: positions of a scratch slot that one block takes.

        A kernel that computes scratch pages from it is right only if no scratch block crosses slots. Raises ConfigError if one
        could: convert by calling this object, or configure no scratch reuse.
        """

    def __reduce__(self) -> tuple[object, ...]: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __call__(
        self,
        base_indices: Iterable[SupportsIndex],
        index_mode: PageIndexMode | SupportsIndex | None = None,
        scratch: ScratchDesc | None = None,
        mode: PageIndexMode | SupportsIndex | None = None,
        out: _Out | None = None,
    ) -> array[int] | _Out:
        """Page indices as int32, `expansion` for each base index; BAD for a negative base index. O(result).

        `base_indices[o]` belongs to block ordinal o. Fills the first entries of `out`, if given, and returns it: int32 or int64
        memory (an array, a numpy array, a torch tensor in host memory), which may be that of `base_indices`. Raises ConfigError,
        with nothing written, if the mode is missing or SHARED although scratch blocks may occur, if `out` or the scratch slots are
        too few, or if an index does not fit int32.
        """

def scratch_part(converter: PageIndexConverter, number: int) -> int:
    """The number of the buffer's part in the scratch block of this number: t of the formula above."""

def check_mode(mode: PageIndexMode | None, with_scratch: bool, scratch_enabled: bool) -> None:
    """Raise ConfigError if blocks of these kinds cannot be addressed in this mode."""

def page_index_upper_bound(layout: StorageLayout, place: BufferPlace, num_slots: int) -> int:
    """The number of SHARED page indices from a buffer's base address to the end of its pool.

    A tensor of this many pages at the buffer's base address stays inside the pool.
    """

def buffer_base(place: BufferPlace, pool_base: int, mode: PageIndexMode) -> int:
    """The address of page index 0 of a buffer."""

def resolve_mode(layout: StorageLayout, mode: PageIndexMode | None) -> PageIndexMode:
    """The mode, SHARED by default. Raises ConfigError if it is missing and scratch reuse is on."""
