"""From slot ids to page indices to addresses, as an attention kernel counts them.

Rule: byte offsets are Python ints and never wrap; page indices are int32, and what does not fit is refused, not wrapped.

A kernel addresses a buffer as base + stride * index. With S buffers in the coalesced buffer, the buffer at position k, and e
repetitions of the buffer's own blocks in one block, slot b has the indices

    SHARED     (b * S) * e + i          base = pool base + offset of the buffer; all layers of a group use equal indices
    PER_LAYER  (b * S + k) * e + i      base = pool base

for i = 0 .. e-1, and a block without a page has e times BAD.

A *scratch* block has no slot: while one layer runs, it borrows parts of slots that serve several blocks. If the layer has u of the
S buffers, at positions k0 .. k0 + u - 1, the p-th block of the scratch range keeps the buffer at position k in part
t = p * u + (k - k0), counted through the scratch slots from each slot's part k0 on: slot t // S, part (t + k0) mod S. So no two
buffers of a layer ever meet, whatever u and S are, and q blocks need ceil(q * u / S) slots.
"""

from array import array
from collections.abc import Iterable
from typing import SupportsIndex

from kv_cache_manager_v2.arguments import (
    Integers,
)
from kv_cache_manager_v2.ids import PageIndexMode
from kv_cache_manager_v2.layout.arithmetic import HalfOpenRange
from kv_cache_manager_v2.layout.pools import BufferPlace, StorageLayout

class ScratchDesc:
    """The scratch blocks of one request in one layer group, and the slots that they share. Truthy iff there are any blocks."""

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
    scratch_enabled: bool

    def __init__(self, place: BufferPlace, scratch_enabled: bool = False) -> None: ...
    @property
    def scratch_pages_per_block(self) -> int:
        """Buffers of the layer in the coalesced buffer: parts of a slot that a scratch block takes."""

    def __reduce__(self) -> tuple[object, ...]: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __call__(
        self,
        base_indices: Iterable[SupportsIndex],
        index_mode: PageIndexMode | SupportsIndex | None = None,
        scratch: ScratchDesc | None = None,
        mode: PageIndexMode | SupportsIndex | None = None,
    ) -> array[int]:
        """Page indices as int32, `expansion` for each base index; any negative base index gives BAD. O(result).

        `base_indices[o]` belongs to block ordinal o. Raises ConfigError if the mode is missing or SHARED where scratch blocks may
        occur, if the scratch slots are too few for their blocks, or if an index does not fit int32.
        """

def page_index_upper_bound(layout: StorageLayout, place: BufferPlace, num_slots: int) -> int:
    """Exclusive bound of a buffer's SHARED page indices, counted from its own base address to the end of its pool.

    A tensor of this many pages over the buffer's base address stays inside the pool.
    """

def buffer_base(place: BufferPlace, pool_base: int, mode: PageIndexMode) -> int:
    """The address of page index 0 of a buffer."""

def resolve_mode(layout: StorageLayout, mode: PageIndexMode | None) -> PageIndexMode:
    """The mode that a caller means. Raises ConfigError if it is left out although scratch reuse is on."""
