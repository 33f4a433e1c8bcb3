"""Token slots: where each token of a step lies in a buffer that is seen as an array of tokens.

    token slot = page index * tokens_per_block + position in its block;    BAD for a token whose block has no page

A step with queries at positions begin .. end - 1 writes the slots of these positions. It reads them too, and before them, in each
layer group, what the window and the sinks of the query at `begin` hold.
"""

from __future__ import annotations

import sys
from array import array
from typing import Any, Final

from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from kv_cache_manager_v2.buffers import numpy_or_none
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, GPU_LEVEL, INT32_MAX, PageIndexMode
from kv_cache_manager_v2.layout.index_arrays import spread_indices
from kv_cache_manager_v2.layout.page_index import PageIndexConverter, check_mode, scratch_part
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.request import Request

_BIG_ENDIAN: Final = sys.byteorder == "big"
_WORTH_NUMPY: Final = 2048  # tokens from which whole passes of numpy cost less than a compiled loop over the tokens


class TokenSlotPlan:
    """Runs of positions, and the page index of each block that they touch. Plans read the tables, and change nothing."""

    def __init__(self, tokens_per_block: int, converter: PageIndexConverter | None, mode: PageIndexMode | None) -> None:
        self.total = 0  # tokens of all runs
        self._size = tokens_per_block
        self._converter = converter
        self._mode = mode
        self._scale = 1 if converter is None else converter.scale
        self._offset = converter.layer_offset if converter is not None and mode is PageIndexMode.PER_LAYER else 0
        self._num_runs = 0
        self._runs = BytesWriter()  # begin and end of each run, as 64-bit words: a list would box them
        self._pages = BytesWriter()  # page indices as 32-bit words, in the order of the runs

    def fits_int32(self, request: Request, pool_group: int) -> bool:
        """Whether every token slot that this pool group can have fits 32 bits."""
        return request.shared.hierarchy.total(GPU_LEVEL, pool_group) * self._scale * self._size <= INT32_MAX + 1

    def add(self, table: BlockTable, begin: int, end: int) -> None:
        """Add the positions begin .. end - 1 of a table. O(blocks). Raises ConfigError if scratch blocks need another mode."""
        if end <= begin:
            return
        size, scale, offset = self._size, self._scale, self._offset
        words = self._pages
        pages = table.pages
        stale_start, stale_end = table.stale_start, table.stale_end
        first = begin // size
        last = first if end - begin == 1 else (end - 1) // size
        for ordinal in range(first, last + 1):
            page = pages[ordinal]
            index = BAD_PAGE_INDEX
            if page is None:
                if table.scratch:
                    index = self._scratch_page(table, ordinal)
            elif not stale_start <= ordinal < stale_end:
                index = page.slot * scale + offset
            write_i32_le(words, i32(index))
        write_i64_le(self._runs, i64(begin))
        write_i64_le(self._runs, i64(end))
        self._num_runs += 1
        self.total += end - begin

    def _scratch_page(self, table: BlockTable, ordinal: int) -> int:
        """The page index of a block that may be a scratch block; else BAD."""
        start, end = table.scratch_span
        if not start <= ordinal < end:
            return BAD_PAGE_INDEX
        converter = self._converter
        if converter is None:
            raise ConfigError("scratch blocks have no base page index; pass the layer's converter")
        check_mode(self._mode, True, True)
        part = scratch_part(converter, ordinal - start)
        return table.scratch[part // self._scale].slot * self._scale + (part + converter.layer_first) % self._scale

    def write(self, target: memoryview[int]) -> None:
        """Write the token slots of all runs into the first `total` entries of int32 or int64 memory. O(tokens)."""
        if self.total >= _WORTH_NUMPY and self.total >= 8 * self._num_runs:
            numpy = numpy_or_none()
            if numpy is not None:
                self._write_arrays(numpy, target)
                return
        pages, runs = self._pages.getvalue(), self._runs.getvalue()
        size = self._size
        words = BytesWriter()
        wide = target.format == "q"
        block = 0
        for run in range(self._num_runs):
            begin: int = read_i64_le(runs, i64(16 * run))
            end: int = read_i64_le(runs, i64(16 * run + 8))
            start = begin - begin % size
            while start < end:
                page: int = read_i32_le(pages, i64(4 * block))
                first = page * size - start
                for position in range(max(begin, start), min(end, start + size)):
                    slot = first + position if page >= 0 else BAD_PAGE_INDEX
                    if wide:
                        write_i64_le(words, i64(slot))
                    else:
                        write_i32_le(words, i32(slot))
                block += 1
                start += size
        target[: self.total] = memoryview(native_array(words, "q" if wide else "i"))

    def _write_arrays(self, numpy: Any, target: memoryview[int]) -> None:
        """Write in whole passes: the slots of all blocks that the runs touch, and then those of the runs."""
        size = self._size
        filled = numpy.asarray(target)
        firsts = numpy.multiply(numpy.frombuffer(self._pages.getvalue(), "<i4"), size, dtype=filled.dtype)
        of_blocks = numpy.empty(len(firsts) * size, filled.dtype)
        spread_indices(numpy, firsts, of_blocks, size)
        runs = native_array(self._runs, "q")
        done = 0
        block = 0
        for run in range(self._num_runs):
            begin, end = runs[2 * run], runs[2 * run + 1]
            start = block * size + begin % size
            filled[done : done + end - begin] = of_blocks[start : start + end - begin]
            done += end - begin
            block += (end - 1) // size - begin // size + 1


def native_array(words: BytesWriter, kind: str) -> array[int]:
    """Little-endian words as an array."""
    entries = array("q" if kind == "q" else "i", words.getvalue())
    if _BIG_ENDIAN:
        entries.byteswap()
    return entries
