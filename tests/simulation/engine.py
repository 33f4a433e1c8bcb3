"""The simulated engine: it reads and writes keys and values as kernels would, in stream order, through addresses and page indices.

Rule: nothing here knows slots or levels. Addresses come from base addresses, strides and converters of the public face; each token
of a buffer has one word, spread over the whole page, that holds the chain value of its prefix, mixed with the buffer's own salt.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from kv_cache_manager_v2 import KVCache, KVCacheManager
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, BeamIndex, LayerGroupId, PageIndexMode
from kv_cache_manager_v2.layout.page_index import PageIndexConverter
from tests.simulation.model import Request

WORD = 8
PER_LAYER = PageIndexMode.PER_LAYER

Piece = tuple[memoryview, int, int, int, list[int], str]  # memory, first word, end, step, values, where


class Buffer:
    """One buffer of one layer."""

    def __init__(
        self, number: int, group: int, layer: int, pool: int, memory: int, first: int, stride: int, converter: PageIndexConverter
    ) -> None:
        self.group = group
        self.layer = layer
        self.pool = pool  # in its pool group
        self.memory = memory  # which pool's memory
        self.first = first  # word of page index 0 in the pool
        self.stride = stride  # words from one page index to the next
        self.converter = converter
        self.salt = hash((104729, number)) & (1 << 60) - 1
        self.repeats = converter.expansion
        self.offset = first + stride * converter.expansion * converter.layer_offset  # words from the start of the slot
        self.words = stride * self.repeats  # of one block

    def step(self, size: int) -> int:
        """Words from one token to the next: the last one lies at the end of the page."""
        return (self.words - 1) // (size - 1) if size > 1 else self.words


class Engine:
    """The kernels of a model with the manager's layers."""

    def __init__(self, manager: KVCacheManager, size: int) -> None:
        self.manager = manager
        self.size = size
        self.errors: list[tuple[Request, str]] = []  # bytes that were not what they should be
        self.memory: list[memoryview] = []
        self.buffers: list[Buffer] = []
        pools = [(pool, desc.num_slots) for desc in manager.pool_group_descs for pool in desc.pools]
        self.remap()
        for number, (layer, role) in enumerate(manager.all_buffer_ids):
            base = manager.get_mem_pool_base_address(layer, role, PER_LAYER)
            index = next(i for i, (pool, n) in enumerate(pools) if 0 <= base - pool.base_address < pool.slot_bytes * n)
            pool = pools[index][0]
            offset = base - pool.base_address
            stride = manager.get_page_stride(layer, role)
            assert offset % WORD == 0
            assert stride % WORD == 0
            group = manager.get_layer_group_id(layer)
            converter = manager.get_page_index_converter(layer, role)
            self.buffers.append(Buffer(number, group, layer, pool.pool_index, index, offset // WORD, stride // WORD, converter))

    def remap(self) -> None:
        """Look at all memory of the GPU; after a resize there is more of it, or less."""
        self.memory = []
        for desc in self.manager.pool_group_descs:
            for pool in desc.pools:
                array = (ctypes.c_int64 * (pool.slot_bytes * desc.num_slots // WORD)).from_address(pool.base_address)
                self.memory.append(memoryview(array).cast("B").cast("q"))

    # --- what a step does, as kernels

    def check(self, request: Request, cache: KVCache) -> Callable[[], None]:
        """A kernel that reads everything that the request has computed."""
        pieces: list[Piece] = []
        for buffer in self.buffers:
            pieces.extend(self._pieces(request, cache, buffer, 0, request.computed, False))

        def run() -> None:
            self._read(request, pieces)

        return run

    def step(self, request: Request, cache: KVCache, beg: int) -> Callable[[], None]:
        """A kernel that, layer after layer, writes the positions from `beg` on and the recurrent state, and reads them back: within
        a layer, blocks in scratch are as good as any other."""
        layers: dict[int, list[Piece]] = {}
        for buffer in self.buffers:
            layers.setdefault(buffer.layer, []).extend(self._pieces(request, cache, buffer, beg, request.computed, True))

        def run() -> None:
            for writes in layers.values():
                for memory, first, stop, step, values, _where in writes:
                    for place, value in zip(range(first, stop, step), values, strict=True):
                        memory[place] = value
                self._read(request, writes)

        return run

    def _read(self, request: Request, pieces: list[Piece]) -> None:
        for memory, first, stop, step, values, where in pieces:
            found = memory[first:stop:step].tolist()
            if found != values:
                self.errors.append((request, f"{where}: {found} instead of {values}"))

    def _pieces(self, request: Request, cache: KVCache, buffer: Buffer, beg: int, end: int, borrow: bool) -> list[Piece]:
        """The words of positions beg..end-1 in a buffer, block by block, as far as the blocks have pages, or with `borrow` lie in
        scratch: what lies there is good within a step only."""
        kind = request.kinds[buffer.group]
        group = LayerGroupId(buffer.group)
        memory = self.memory[buffer.memory]
        pieces: list[Piece] = []
        size = self.size
        step = buffer.step(size)
        for number, beam in enumerate(request.beams):
            if kind.recurrent:
                if beam.state is not None:
                    slot = cache.get_ssm_block_base_index(group, BeamIndex(number))
                    page = buffer.converter([slot], PER_LAYER)[0]
                    first = buffer.first + buffer.stride * page
                    where = f"state of layer {buffer.layer}, beam {number}"
                    value = beam.state ^ buffer.salt
                    pieces.append((memory, first, first + buffer.words, buffer.words - 1, [value, value], where))
                continue
            if end <= beg:
                continue
            base = list(cache.get_aggregated_page_indices(group, BeamIndex(number)))
            scratch = cache.get_scratch_desc(group, BeamIndex(number)) if borrow else None
            pages = buffer.converter(base, PER_LAYER, scratch)
            values = [stamp ^ buffer.salt for stamp in beam.stamps[:end]]
            for block in range(beg // size, -(-end // size)):
                page = pages[block * buffer.repeats]
                if page == BAD_PAGE_INDEX:
                    continue
                low, high = max(beg, block * size), min(end, (block + 1) * size)
                first = buffer.first + buffer.stride * page + (low - block * size) * step
                where = f"layer {buffer.layer}, beam {number}, block {block}"
                pieces.append((memory, first, first + (high - low - 1) * step + 1, step, values[low:high], where))
        return pieces
