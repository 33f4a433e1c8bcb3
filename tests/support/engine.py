"""A pretended inference engine: it writes recognisable bytes where the cache tells it to, and checks them whenever it reads.

Rule: it touches memory only in stream order (`Driver.launch`) and only through base address + stride x page index, as a kernel
would. So a page that was handed on too early, copied too late or mapped to the wrong slot shows as wrong bytes, and a missing wait
does so under some seed of the random schedule. Errors are collected; `raise_errors` (after a synchronize) raises them.

What is written: for each token of a layer's buffer the 16 bytes (token word, layer, buffer number, 0) over and over; the token word
is the id, or the first 4 bytes of a digest. A recurrent state has the fingerprint of all tokens so far as its word.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kv_cache_manager_v2 import (
    BAD_PAGE_INDEX,
    BeamIndex,
    BufferConfig,
    EmulatedDriver,
    KVCache,
    KVCacheManager,
    KVCacheManagerConfig,
    LayerGroupId,
    PageIndexMode,
    SsmLayerConfig,
)
from kv_cache_manager_v2.config import LayerConfig

if TYPE_CHECKING:
    from kv_cache_manager_v2.layout.page_index import PageIndexConverter

Token = int | bytes
Words = npt.NDArray[np.uint32]
Indices = npt.NDArray[np.int64]

FULL_WORDS = 32  # words of a token beyond which only the first and the last ones are written and checked


class EngineError(AssertionError):
    """The engine read other bytes than it had written, or was given an index that it must not be given."""


def base_indices(cache: KVCache, group: LayerGroupId, beam: int = 0) -> Indices:
    """The base page index of each block, as the engine reads it from its buffer or the cache's array."""
    live = cache.get_base_page_indices(group, BeamIndex(beam))
    return np.array(live, dtype=np.int64)[: cache.num_blocks]


def words_of(tokens: Sequence[Token]) -> Words:
    """The token words: ids, and the first 4 bytes of digests."""
    return np.array([int.from_bytes(t[:4], "little") if isinstance(t, bytes) else t for t in tokens], dtype=np.uint32)


class Plane:
    """One buffer of one layer: where its pages lie, and how a token looks in it."""

    def __init__(
        self,
        manager: KVCacheManager,
        config: KVCacheManagerConfig,
        layer: LayerConfig,
        buffer: BufferConfig,
        number: int,
        mode: PageIndexMode,
    ):
        """`layer` is a part of a layer, and `number` the position of the buffer among those of the whole layer."""
        self.layer_id = layer.layer_id
        self.number = number
        self.role = buffer.role
        self.group: LayerGroupId = manager.get_layer_group_id(layer.layer_id, buffer.role)
        self.recurrent = isinstance(layer, SsmLayerConfig)
        self.mode = mode
        self.tokens_per_page = 1 if self.recurrent else buffer.tokens_per_block_override or config.tokens_per_block
        self.stride = manager.get_page_stride(layer.layer_id, buffer.role)
        if self.stride != buffer.size:
            raise EngineError(f"layer {layer.layer_id} {buffer.role}: stride {self.stride}, configured size {buffer.size}")
        self.converter: PageIndexConverter = manager.get_page_index_converter(layer.layer_id, buffer.role)
        self.window = layer.window_size
        self.sinks = (getattr(layer, "num_sink_tokens", None) or 0) if self.window is not None else 0
        self._first_visible: Callable[[int], int] | None = getattr(layer, "first_visible", None)
        self._manager = manager
        self.words = self.stride // self.tokens_per_page // 4
        if self.words <= 2 * FULL_WORDS:
            self.columns: Indices = np.arange(self.words)
        else:
            self.columns = np.concatenate([np.arange(FULL_WORDS), np.arange(self.words - FULL_WORDS, self.words)])
        self._blank: Words = np.array([0, self.layer_id, self.number, 0], np.uint32)[self.columns % 4]
        self._marked = self.columns % 4 == 0
        self.memory: Words = np.empty((0, 0, 0), np.uint32)
        self.map()

    def first_visible(self, position: int) -> int:
        """The first position, sinks aside, that the query at `position` sees."""
        if self._first_visible is not None:
            return self._first_visible(position)
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def map(self) -> None:
        """Look at the pool as (page, token, word), through this buffer's base address; again after each change of its size."""
        manager = self._manager
        base = manager.get_mem_pool_base_address(self.layer_id, self.role, self.mode)
        pages = manager.get_page_index_upper_bound(self.layer_id, self.role)
        if self.mode is PageIndexMode.PER_LAYER:
            shared = manager.get_mem_pool_base_address(self.layer_id, self.role, PageIndexMode.SHARED)
            pages += (shared - base) // self.stride
        block = (ctypes.c_uint8 * (pages * self.stride)).from_address(base)
        self.memory = self.pages_in(memoryview(block))

    def read(self, pages: Indices, positions: Indices) -> Words:
        """What is written for tokens at these positions of these pages: (token, column)."""
        if self.words == len(self.columns):
            return self.memory[pages, positions]
        ends = (self.memory[:, :, :FULL_WORDS][pages, positions], self.memory[:, :, -FULL_WORDS:][pages, positions])
        return np.concatenate(ends, axis=1)

    def write(self, pages: Indices, positions: Indices, words: Words) -> None:
        rows = self.pattern(words)
        if self.words == len(self.columns):
            self.memory[pages, positions] = rows
        else:
            self.memory[:, :, :FULL_WORDS][pages, positions] = rows[:, :FULL_WORDS]
            self.memory[:, :, -FULL_WORDS:][pages, positions] = rows[:, FULL_WORDS:]

    def pages_in(self, data: memoryview | bytes) -> Words:
        """Pages that lie one after the other, as (page, token, word)."""
        tokens = self.tokens_per_page
        shape = (len(data) // self.stride, tokens, self.words)
        return np.ndarray(shape, np.uint32, data, strides=(self.stride, self.stride // tokens, 4))

    def parts(self) -> tuple[int, list[int]]:
        """The pool, and where in a slot each of the buffer's pages begins, in bytes."""
        base = self._manager.get_mem_pool_base_address(self.layer_id, self.role, self.mode)
        for desc in self._manager.pool_group_descs:
            for pool in desc.pools:
                if 0 <= base - pool.base_address < pool.slot_bytes * desc.num_slots:
                    indices = self.converter([0], self.mode)
                    return pool.pool_index, [base + self.stride * index - pool.base_address for index in indices]
        raise EngineError(f"{self.describe()} is in no pool")

    def pattern(self, words: Words) -> Words:
        """What the columns of these tokens hold: (token, column)."""
        result = np.empty((len(words), len(self.columns)), np.uint32)
        result[:] = self._blank
        result[:, self._marked] = words[:, None]
        return result

    def describe(self) -> str:
        return f"layer {self.layer_id} {self.role}"


class Engine:
    """Runs steps of caches of one manager."""

    def __init__(
        self, manager: KVCacheManager, driver: EmulatedDriver, config: KVCacheManagerConfig, mode: PageIndexMode | None = None
    ) -> None:
        if mode is None:
            mode = PageIndexMode.PER_LAYER if config.enable_swa_scratch_reuse else PageIndexMode.SHARED
        self.manager = manager
        self.driver = driver
        self.tokens_per_block = config.tokens_per_block
        self._slots = self._num_slots()
        self.planes = [
            Plane(manager, config, part, buffer, number, mode)
            for layer in config.layers
            for number, (part, buffer) in enumerate([(part, buffer) for part in layer.parts() for buffer in part.buffers])
        ]
        self.errors: list[tuple[Hashable, str]] = []  # (id of the cache, what was wrong)
        self.tokens_checked = 0  # (token, buffer) pairs compared, so that a test can see that anything was
        self.tokens_written = 0

    def step(
        self,
        cache: KVCache,
        inputs: Sequence[Token],
        history: Sequence[Token],
        beam: int = 0,
        checked: Sequence[int] | None = None,
        state: Sequence[Token] | None = None,
    ) -> None:
        """Queue one forward pass on the cache's stream: layer by layer, check the history, then write the inputs behind it.

        No inputs: check only. `checked` limits the checks of the history, not the writes, to some layers. `state`: the tokens that
        the recurrent state was computed from, if they are not the history.
        """
        old, new = words_of(history), words_of(inputs)
        if self._slots != self._num_slots():
            self._slots = self._num_slots()
            for plane in self.planes:
                plane.map()
        layers: dict[int, list[tuple[Plane, Indices]]] = {}
        for plane in self.planes:
            pages = self._state_page(cache, plane, beam) if plane.recurrent else self._pages(cache, plane, len(old), len(new), beam)
            layers.setdefault(plane.layer_id, []).append((plane, pages))
        number = cache.id
        known = old if state is None else words_of(state)

        def kernel() -> None:
            for layer, planes in layers.items():
                if checked is None or layer in checked:
                    self._check(planes, old, known, 0, number)
                if len(new):
                    self._write(planes, old, new, number)

        self.driver.launch(cache.cuda_stream, kernel)

    def check(self, cache: KVCache, history: Sequence[Token], beam: int = 0, state: Sequence[Token] | None = None) -> None:
        """Queue a check of every mapped page."""
        self.step(cache, [], history, beam, state=state)

    def receive(self, cache: KVCache, inputs: Sequence[Token], history: int) -> None:
        """Queue the arrival of tokens from `history` on that another instance has computed, in the blocks that are mapped."""
        new = words_of(inputs)
        tasks = [(plane, self._pages(cache, plane, history + len(new), 0, 0)) for plane in self.planes if not plane.recurrent]

        def kernel() -> None:
            for plane, pages in tasks:
                mapped = [n for n in range(len(new)) if pages[(history + n) // plane.tokens_per_page] != BAD_PAGE_INDEX]
                for n in mapped:
                    self._write_tokens(plane, pages, history + n, new[n : n + 1])

        self.driver.launch(cache.cuda_stream, kernel)

    def raise_errors(self) -> None:
        """Raise what the kernels that have run so far found. Synchronize first."""
        if self.errors:
            errors, self.errors = self.errors, []
            raise EngineError("\n".join(f"cache {number}, {text}" for number, text in errors[:10]))

    # --- on the host, as an engine prepares a step

    def _num_slots(self) -> list[int]:
        return [desc.num_slots for desc in self.manager.pool_group_descs]

    def _pages(self, cache: KVCache, plane: Plane, old: int, new: int, beam: int) -> Indices:
        """The page index of each of the buffer's own pages; complains about indices that break the window's rule."""
        base = base_indices(cache, plane.group, beam)
        if beam > 0:  # what is BAD for a further beam is shared with beam 0
            base = np.where(base == BAD_PAGE_INDEX, base_indices(cache, plane.group), base)
        if cache.history_length == old:
            self._check_window(cache, plane, base, old)
        in_scratch = new > 0 and plane.mode is PageIndexMode.PER_LAYER  # what lies there is good within its step only
        scratch = cache.get_scratch_desc(plane.group, BeamIndex(beam)) if in_scratch else None
        pages = np.array(plane.converter(base.tolist(), plane.mode, scratch), dtype=np.int64)
        first, last = old // plane.tokens_per_page, -(-(old + new) // plane.tokens_per_page)
        if new > 0:
            if old + new > cache.capacity:
                raise EngineError(f"{plane.describe()}: tokens up to {old + new} pass the capacity {cache.capacity}")
            if (pages[first:last] == BAD_PAGE_INDEX).any():
                raise EngineError(f"{plane.describe()}: no page for tokens {old}..{old + new}: {pages[first:last].tolist()}")
        return pages

    def _check_window(self, cache: KVCache, plane: Plane, base: Indices, old: int) -> None:
        """With `old` tokens of history: exactly the blocks that a query can see are mapped."""
        size = self.tokens_per_block
        start = plane.first_visible(old)
        for block, index in enumerate(base.tolist()):
            beg, end = block * size, (block + 1) * size
            visible = beg < plane.sinks or (end > start and beg < cache.capacity)
            needed = beg < old and (beg < plane.sinks or end > start)
            if index != BAD_PAGE_INDEX and not visible:
                raise EngineError(f"{plane.describe()}: block {block} is mapped to {index}, but out of the window at {old} tokens")
            if index == BAD_PAGE_INDEX and needed:
                raise EngineError(f"{plane.describe()}: block {block} has no page, but is needed at {old} tokens of history")

    def _state_page(self, cache: KVCache, plane: Plane, beam: int) -> Indices:
        slot = cache.get_ssm_block_base_index(plane.group, BeamIndex(beam))
        if slot == BAD_PAGE_INDEX:
            raise EngineError(f"{plane.describe()}: no state slot")
        return np.array(plane.converter([slot], plane.mode), dtype=np.int64)

    # --- on the device, in stream order

    def _check(self, planes: list[tuple[Plane, Indices]], tokens: Words, state: Words, first: int, number: Hashable) -> None:
        """All tokens from position `first` on, and that a recurrent state is the one after the tokens `state`."""
        for plane, pages in planes:
            if not plane.recurrent:
                self._check_tokens(plane, pages, first, tokens[first:], number)
            elif len(state):
                self.tokens_checked += 1
                if not np.array_equal(plane.read(pages, np.zeros(1, np.int64)), plane.pattern(fingerprint(state))):
                    self.errors.append((number, f"{plane.describe()}: the state is not that of {len(state)} tokens"))

    def _write(self, planes: list[tuple[Plane, Indices]], old: Words, new: Words, number: Hashable) -> None:
        """One layer. What shares slots must not share bytes within it."""
        tokens = np.concatenate([old, new])
        for plane, pages in planes:
            if plane.recurrent:
                plane.write(pages, np.zeros(1, np.int64), fingerprint(tokens))
                self.tokens_written += 1
            else:
                self._write_tokens(plane, pages, len(old), new)
        if planes[0][0].mode is PageIndexMode.PER_LAYER:
            self._check(planes, tokens, tokens, len(old), number)

    def _check_tokens(self, plane: Plane, pages: Indices, first: int, tokens: Words, number: Hashable) -> None:
        size = plane.tokens_per_page
        position = np.arange(first, first + len(tokens))
        page = pages[position // size]
        mapped = np.nonzero(page != BAD_PAGE_INDEX)[0]
        if len(mapped) == 0:
            return
        found = plane.read(page[mapped], position[mapped] % size)
        expected = plane.pattern(tokens[mapped])
        self.tokens_checked += len(mapped)
        if not np.array_equal(found, expected):
            bad = np.nonzero((found != expected).any(axis=1))[0]
            at = int(bad[0])
            column = int(np.nonzero(found[at] != expected[at])[0][0])
            where = f"position {int(position[mapped[at]])} (page {int(page[mapped[at]])}), word {int(plane.columns[column])}"
            text = (
                f"{len(bad)} of {len(mapped)} tokens wrong, the first at {where}: {found[at, column]}, not {expected[at, column]}"
            )
            self.errors.append((number, f"{plane.describe()}: {text}"))

    def _write_tokens(self, plane: Plane, pages: Indices, first: int, new: Words) -> None:
        size = plane.tokens_per_page
        position = np.arange(first, first + len(new))
        plane.write(pages[position // size], position % size, new)
        self.tokens_written += len(new)


def fingerprint(tokens: Words) -> Words:
    """The word of a recurrent state after these tokens."""
    return np.array([zlib.crc32(tokens.tobytes()) ^ len(tokens)], dtype=np.uint32)
