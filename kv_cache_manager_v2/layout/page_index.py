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

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, SupportsIndex, TypeVar

from kv_cache_manager_v2.arguments import (
    WORD_LIMIT,
    IntBuffer,
    Integers,
    at_least,
    each_of,
    instance,
    instance_or_none,
    page_index_mode_or_none,
    renamed,
    wholes,
)
from kv_cache_manager_v2.buffers import integers_in, numpy_or_none, require_length, writable_integers
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, INT32_MAX, LifeCycleId, PageIndexMode, PoolGroupId, PoolId
from kv_cache_manager_v2.layout.arithmetic import HalfOpenRange, ceil_div
from kv_cache_manager_v2.layout.index_arrays import WORTH_IT, scale_indices, spread_indices
from kv_cache_manager_v2.layout.pools import BufferPlace, StorageLayout

_Out = TypeVar("_Out", bound=IntBuffer)


class ScratchDesc:
    """The scratch blocks of one request in one layer group, and the slots that they share. False if there are no blocks."""

    def __init__(self, range: HalfOpenRange, slot_ids: Integers) -> None:
        self.range: HalfOpenRange = instance(range, HalfOpenRange, "range")  # block ordinals
        self.slot_ids: list[int] = wholes(slot_ids, "slot_ids", 0)

    def __bool__(self) -> bool:
        return bool(self.range)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ScratchDesc):
            return NotImplemented
        return self.range == other.range and self.slot_ids == other.slot_ids

    def __hash__(self) -> int:
        return hash((self.range, tuple(self.slot_ids)))

    def __reduce__(self) -> tuple[object, ...]:
        return ScratchDesc, (self.range, list(self.slot_ids))

    def __repr__(self) -> str:
        return f"ScratchDesc({self.range!r}, {self.slot_ids!r})"


class PageIndexConverter:
    """Turns base page indices (slot ids by block ordinal) into the page indices of one buffer. Keeps no state."""

    def __init__(self, place: BufferPlace, scratch_enabled: bool = False) -> None:
        self.scale: int = place.scale  # buffers in the coalesced buffer
        self.layer_offset: int = place.position  # the buffer's position among them
        self.expansion: int = place.expansion  # page indices of each block
        self.layer_util: int = place.layer_util  # buffers of the layer in the coalesced buffer
        self.layer_first: int = place.layer_first  # position of the first of them
        self.has_scratch: bool = place.has_scratch  # whether blocks of the layer can be scratch blocks
        self.scratch_enabled = scratch_enabled  # if so, the caller must pass the mode, as the default would be wrong

    @property
    def scratch_pages_per_block(self) -> int:
        """Buffers of the layer in the coalesced buffer: positions of a scratch slot that one block takes.

        A kernel that computes scratch pages from it is right only if no scratch block crosses slots. Raises ConfigError if one
        could: convert by calling this object, or configure no scratch reuse.
        """
        if self.has_scratch and self.scale % self.layer_util != 0:
            raise ConfigError(
                f"scratch_pages_per_block: the layer's {self.layer_util} buffers do not divide a slot of {self.scale}, so that "
                "scratch blocks cross slots; convert by calling the converter, or configure swa_scratch_reuse=None"
            )
        return self.layer_util

    def __reduce__(self) -> tuple[object, ...]:
        offsets = (self.scale, self.layer_offset, self.expansion, self.layer_util, self.layer_first)
        return _converter, (*offsets, self.has_scratch, self.scratch_enabled)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PageIndexConverter):
            return NotImplemented
        return self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash(self.__reduce__()[1])

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
        wanted = page_index_mode_or_none(index_mode if mode is None else renamed("mode", "index_mode", mode), "index_mode")
        borrowed = instance_or_none(scratch, ScratchDesc, "scratch")
        if borrowed is not None and not borrowed:
            borrowed = None
        check_mode(wanted, borrowed is not None, self.scratch_enabled)
        offset = self.layer_offset if wanted is PageIndexMode.PER_LAYER else 0
        target = None if out is None else writable_integers(out, "out")
        source = integers_in(base_indices)
        if source is not None and len(source) >= WORTH_IT:
            numpy = numpy_or_none()
            if numpy is not None:
                result = self._convert_array(numpy, source, offset, borrowed, target)
                return result if out is None else out
        pages = self._convert_list(_as_list(base_indices), offset, borrowed)
        if target is None or out is None:
            return pages
        require_length(target, "out", len(pages))
        target[: len(pages)] = memoryview(pages if target.format == "i" else array("q", pages))
        return out

    def _convert_array(
        self, numpy: Any, source: memoryview[int], offset: int, scratch: ScratchDesc | None, target: memoryview[int] | None
    ) -> array[int]:
        """Convert in whole passes over the memory. Fills `target`, or the array that is returned."""
        expansion = self.expansion
        count = len(source) * expansion
        made = array("i")
        if target is None:
            made = array("i", [BAD_PAGE_INDEX]) * count
            target = memoryview(made)
        else:
            require_length(target, "out", count)
        filled = numpy.asarray(target[:count])
        pages = filled if expansion == 1 else numpy.empty(len(source), filled.dtype)
        beg, borrowed = (0, array("i")) if scratch is None else self._scratch_pages(len(source), scratch)
        scale_indices(numpy, numpy.asarray(source), pages, self.scale, offset, expansion)
        if borrowed:
            pages[beg : beg + len(borrowed)] = numpy.asarray(borrowed) * expansion
        if expansion > 1:
            spread_indices(numpy, pages, filled, expansion)
        return made

    def _convert_list(self, bases: list[int], offset: int, scratch: ScratchDesc | None) -> array[int]:
        """Convert index by index."""
        scale = self.scale
        pages = [base * scale + offset if base >= 0 else BAD_PAGE_INDEX for base in bases]
        if scratch is not None:
            beg, borrowed = self._scratch_pages(len(pages), scratch)
            pages[beg : beg + len(borrowed)] = borrowed
        if self.expansion > 1:
            pages = self._expand(pages)
        try:
            return array("i", pages)
        except OverflowError:
            raise ConfigError(f"page index {max(pages)} does not fit int32, whose largest value is {INT32_MAX}") from None

    def _scratch_pages(self, blocks: int, scratch: ScratchDesc) -> tuple[int, array[int]]:
        """The first scratch block, and the page indices of the scratch blocks below `blocks`, without expansion."""
        beg = scratch.range.beg
        end = min(scratch.range.end, blocks)
        scale, util, first = self.scale, self.layer_util, self.layer_first
        slots = scratch.slot_ids
        needed = ceil_div((end - beg) * util, scale) if end > beg else 0
        if len(slots) < needed:
            raise ConfigError(
                f"{end - beg} scratch blocks of {util} buffers each need {needed} slots of {scale} buffers, "
                f"but the descriptor has {len(slots)}; pass the one of the request's present lengths"
            )
        pages: list[int] = []
        for number in range(end - beg):
            part = scratch_part(self, number)
            pages.append(slots[part // scale] * scale + (part + first) % scale)
        try:
            return beg, array("i", pages)
        except OverflowError:
            raise ConfigError(f"page index {max(pages)} does not fit int32, whose largest value is {INT32_MAX}") from None

    def _expand(self, pages: list[int]) -> list[int]:
        """Replace each index by `expansion` consecutive ones, for the buffer's own, smaller blocks."""
        expansion = self.expansion
        expanded: list[int] = []
        repetitions = list(range(expansion))
        absent = [BAD_PAGE_INDEX] * expansion
        for page in pages:
            if page >= 0:
                first = page * expansion
                expanded += [first + repetition for repetition in repetitions]
            else:
                expanded += absent
        return expanded


def _converter(
    scale: int, layer_offset: int, expansion: int, layer_util: int, layer_first: int, has_scratch: bool, scratch_enabled: bool
) -> PageIndexConverter:
    """The converter with these attributes."""
    place = BufferPlace(LifeCycleId(0), PoolGroupId(0), PoolId(0))  # a converter does not use these ids
    place.scale = scale
    place.position = layer_offset
    place.expansion = expansion
    place.layer_util = layer_util
    place.layer_first = layer_first
    place.has_scratch = has_scratch
    return PageIndexConverter(place, scratch_enabled)


def scratch_part(converter: PageIndexConverter, number: int) -> int:
    """The number of the buffer's part in the scratch block of this number: t of the formula above."""
    return number * converter.layer_util + converter.layer_offset - converter.layer_first


def check_mode(mode: PageIndexMode | None, with_scratch: bool, scratch_enabled: bool) -> None:
    """Raise ConfigError if blocks of these kinds cannot be addressed in this mode."""
    if mode is None and (with_scratch or scratch_enabled):
        raise ConfigError("the page index mode is missing; with scratch reuse pass index_mode=PageIndexMode.PER_LAYER")
    if with_scratch and mode is not PageIndexMode.PER_LAYER:
        raise ConfigError(f"scratch blocks cannot be addressed in mode {mode}; pass index_mode=PageIndexMode.PER_LAYER")


def _as_list(indices: object) -> list[int]:
    """The indices as a list of ints. Buffers (array, memoryview, numpy), lists and tuples are converted in one call."""
    try:
        if isinstance(indices, (list, tuple, array)):
            return array("q", indices).tolist()
        if not isinstance(indices, (str, bytes, bytearray)):
            return array("q", memoryview(indices)).tolist()  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, NotImplementedError):  # not a buffer of integers: check each item
        pass
    return [at_least(item, "base_indices", -WORD_LIMIT) for item in each_of(indices, "base_indices", "integers")]


def page_index_upper_bound(layout: StorageLayout, place: BufferPlace, num_slots: int) -> int:
    """The number of SHARED page indices from a buffer's base address to the end of its pool.

    A tensor of this many pages at the buffer's base address stays inside the pool.
    """
    slot_bytes = layout.slot_sizes[place.pool_group][place.pool]
    return (slot_bytes // place.size * num_slots - place.position) * place.expansion


def buffer_base(place: BufferPlace, pool_base: int, mode: PageIndexMode) -> int:
    """The address of page index 0 of a buffer."""
    return pool_base + place.offset if mode is PageIndexMode.SHARED else pool_base


def resolve_mode(layout: StorageLayout, mode: PageIndexMode | None) -> PageIndexMode:
    """The mode, SHARED by default. Raises ConfigError if it is missing and scratch reuse is on."""
    if mode is not None:
        return mode
    if layout.max_rewind is not None:
        raise ConfigError(
            "the page index mode is missing; with scratch reuse pass PageIndexMode.PER_LAYER, or SHARED for no scratch"
        )
    return PageIndexMode.SHARED
