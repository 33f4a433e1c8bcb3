"""A pretended inference engine: it writes recognisable bytes where the cache tells it to, and checks them whenever it reads.

Rule: it touches memory only in stream order (`Driver.launch`) and only through base address + stride x page index, as a kernel
would. So a page that was handed on too early, copied too late or mapped to the wrong slot shows as wrong bytes, and a missing wait
does so under some seed of the random schedule. Errors are collected; `raise_errors` (after a synchronize) raises them.

What is written: for each token of a layer's buffer the 16 bytes (token word, layer, buffer number, beam) over and over; the
token word is the
id, or the first 4 bytes of a digest. A recurrent state is the fingerprint of all tokens so far, in place of the token word.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kv_cache_manager_v2 import (
    BAD_PAGE_INDEX,
    EmulatedDriver,
    KVCache,
    KVCacheManager,
    KVCacheManagerConfig,
    LayerGroupId,
    PageIndexMode,
    SsmLayerConfig,
)

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
    live = cache.get_base_page_indices(group, beam)
    return np.array(live, dtype=np.int64)[: cache.num_blocks]


def words_of(tokens: Sequence[Token]) -> Words:
    """The token words: ids, and the first 4 bytes of digests."""
    return np.array([int.from_bytes(t[:4], "little") if isinstance(t, bytes) else t for t in tokens], dtype=np.uint32)


class _Plane:
    """One buffer of one layer: where its pages lie, and how a token looks in it."""

    def __init__(self, manager: KVCacheManager, config: KVCacheManagerConfig, layer_number: int, number: int, mode: PageIndexMode):
        layer = config.layers[layer_number]
        buffer = layer.buffers[number]
        self.layer_id = layer.layer_id
        self.number = number
        self.role = buffer.role
        self.group: LayerGroupId = manager.get_layer_group_id(layer.layer_id)
        self.recurrent = isinstance(layer, SsmLayerConfig)
        self.mode = mode
        self.tokens_per_page = buffer.tokens_per_block_override or config.tokens_per_block
        self.size = buffer.size
        self.stride = manager.get_page_stride(layer.layer_id, buffer.role)
        if self.stride != buffer.size:
            raise EngineError(f"layer {layer.layer_id} {buffer.role}: stride {self.stride}, configured size {buffer.size}")
        self.converter: PageIndexConverter = manager.get_page_index_converter(layer.layer_id, buffer.role)
        self.window = layer.window_size
        self.sinks = (getattr(layer, "num_sink_tokens", None) or 0) if self.window is not None else 0
        self._first_visible: Callable[[int], int] | None = getattr(layer, "first_visible", None)
        self._shape = (0, 0)
        self._memory: Words | None = None
        self._manager = manager
        tokens = 1 if self.recurrent else self.tokens_per_page
        self.words = self.stride // tokens // 4
        if self.words <= 2 * FULL_WORDS:
            self.columns: Indices = np.arange(self.words)
        else:
            self.columns = np.concatenate([np.arange(FULL_WORDS), np.arange(self.words - FULL_WORDS, self.words)])

    def first_visible(self, position: int) -> int:
        """The first position, sinks aside, that the query at `position` sees."""
        if self._first_visible is not None:
            return self._first_visible(position)
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def memory(self) -> Words:
        """The pool as (page, token, word), through this buffer's base address."""
        manager = self._manager
        base = manager.get_mem_pool_base_address(self.layer_id, self.role, self.mode)
        pages = manager.get_page_index_upper_bound(self.layer_id, self.role)
        if self.mode is PageIndexMode.PER_LAYER:
            shared = manager.get_mem_pool_base_address(self.layer_id, self.role, PageIndexMode.SHARED)
            pages += (shared - base) // self.stride
        if self._memory is None or self._shape != (base, pages):
            self._shape = (base, pages)
            tokens = 1 if self.recurrent else self.tokens_per_page
            block = (ctypes.c_uint8 * (pages * self.stride)).from_address(base)
            self._memory = np.ndarray(
                (pages, tokens, self.words), np.uint32, memoryview(block), strides=(self.stride, self.stride // tokens, 4)
            )
        return self._memory

    def pattern(self, words: Words, writers: Words) -> Words:
        """What the columns of these tokens hold: (token, column). `writers`: the beam that wrote each."""
        result = np.empty((len(words), len(self.columns)), np.uint32)
        result[:] = np.array([0, self.layer_id, self.number, 0], np.uint32)[self.columns % 4]
        result[:, self.columns % 4 == 0] = words[:, None]
        result[:, self.columns % 4 == 3] = writers[:, None]
        return result

    def describe(self) -> str:
        return f"layer {self.layer_id} {self.role}"


class FakeEngine:
    """Runs steps of caches of one manager."""

    def __init__(
        self, manager: KVCacheManager, driver: EmulatedDriver, config: KVCacheManagerConfig, mode: PageIndexMode | None = None
    ) -> None:
        if mode is None:
            mode = PageIndexMode.PER_LAYER if config.enable_swa_scratch_reuse else PageIndexMode.SHARED
        self.driver = driver
        self.tokens_per_block = config.tokens_per_block
        self.planes = [
            _Plane(manager, config, layer, number, mode)
            for layer in range(len(config.layers))
            for number in range(len(config.layers[layer].buffers))
        ]
        self.layers = sorted({plane.layer_id for plane in self.planes})
        self.errors: list[str] = []
        self.tokens_checked = 0  # (token, buffer) pairs compared, so that a test can see that anything was
        self.tokens_written = 0

    def step(
        self,
        cache: KVCache,
        inputs: Sequence[Token],
        history: Sequence[Token],
        beam: int = 0,
        checked: Sequence[int] | None = None,
        writers: Sequence[int] | None = None,
    ) -> None:
        """Queue one forward pass on the cache's stream: layer by layer, check the history, then write the inputs behind it.

        No inputs: check only. `checked` limits the checks, not the writes, to some layers: for long sequences of many layers.
        `writers` names the beam that wrote each token of the history: by default this one. A recurrent state is its last one's.
        """
        old = words_of(history)
        new = words_of(inputs)
        by = np.full(len(old), beam, np.uint32) if writers is None else np.array(writers, np.uint32)
        tasks = []
        for plane in self.planes:
            if plane.recurrent:
                tasks.append((plane, self._state_page(cache, plane, beam)))
            else:
                tasks.append((plane, self._pages(cache, plane, len(old), len(new), beam)))
        name = f"cache {cache.id}"

        def kernel() -> None:
            layer = None
            group: list[tuple[_Plane, Indices]] = []
            for plane, pages in tasks:
                if plane.layer_id != layer:
                    self._run_layer(group, old, new, by, beam, name, checked)
                    group = []
                    layer = plane.layer_id
                group.append((plane, pages))
            self._run_layer(group, old, new, by, beam, name, checked)

        self.driver.launch(cache.cuda_stream, kernel)

    def check(self, cache: KVCache, history: Sequence[Token], beam: int = 0) -> None:
        """Queue a check of every mapped page."""
        self.step(cache, [], history, beam)

    def receive(self, cache: KVCache, inputs: Sequence[Token], history: int) -> None:
        """Queue the arrival of tokens from `history` on that another instance has computed, in the blocks that are mapped."""
        new = words_of(inputs)
        tasks = [(plane, self._pages(cache, plane, history + len(new), 0, 0)) for plane in self.planes if not plane.recurrent]

        def kernel() -> None:
            for plane, pages in tasks:
                mapped = [n for n in range(len(new)) if pages[(history + n) // plane.tokens_per_page] != BAD_PAGE_INDEX]
                for n in mapped:
                    self._write_tokens(plane, pages, history + n, new[n : n + 1], 0)

        self.driver.launch(cache.cuda_stream, kernel)

    def raise_errors(self) -> None:
        """Raise what the kernels that have run so far found. Synchronize first."""
        if self.errors:
            errors, self.errors = self.errors, []
            raise EngineError("\n".join(errors[:10]))

    # --- on the host, as an engine prepares a step

    def _pages(self, cache: KVCache, plane: _Plane, old: int, new: int, beam: int) -> Indices:
        """The page index of each of the buffer's own pages; complains about indices that break the window's rule."""
        base = base_indices(cache, plane.group, beam)
        if beam > 0:  # what is BAD for a further beam is shared with beam 0
            base = np.where(base == BAD_PAGE_INDEX, base_indices(cache, plane.group), base)
        if cache.history_length == old:
            self._check_window(cache, plane, base, old)
        scratch = cache.get_scratch_desc(plane.group) if plane.mode is PageIndexMode.PER_LAYER else None
        pages = np.array(plane.converter(base.tolist(), plane.mode, scratch), dtype=np.int64)
        first, last = old // plane.tokens_per_page, -(-(old + new) // plane.tokens_per_page)
        if new > 0:
            if old + new > cache.capacity:
                raise EngineError(f"{plane.describe()}: tokens up to {old + new} pass the capacity {cache.capacity}")
            if (pages[first:last] == BAD_PAGE_INDEX).any():
                raise EngineError(f"{plane.describe()}: no page for tokens {old}..{old + new}: {pages[first:last].tolist()}")
        return pages

    def _check_window(self, cache: KVCache, plane: _Plane, base: Indices, old: int) -> None:
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

    def _state_page(self, cache: KVCache, plane: _Plane, beam: int) -> Indices:
        slot = cache.get_ssm_block_base_index(plane.group, beam)
        if slot == BAD_PAGE_INDEX:
            raise EngineError(f"{plane.describe()}: no state slot")
        return np.array(plane.converter([slot], plane.mode), dtype=np.int64)

    # --- on the device, in stream order

    def _run_layer(
        self,
        group: list[tuple[_Plane, Indices]],
        old: Words,
        new: Words,
        writers: Words,
        beam: int,
        name: str,
        checked: Sequence[int] | None,
    ) -> None:
        for plane, pages in group:
            if checked is not None and plane.layer_id not in checked:
                continue
            if plane.recurrent:
                self._check_state(plane, pages, old, writers[-1:], name)
            else:
                self._check_tokens(plane, pages, 0, old, writers, name)
        if len(new) == 0:
            return
        for plane, pages in group:
            if plane.recurrent:
                self._write_state(plane, pages, np.concatenate([old, new]), beam)
            else:
                self._write_tokens(plane, pages, len(old), new, beam)
        for plane, pages in group:
            if not plane.recurrent and plane.mode is PageIndexMode.PER_LAYER:  # what shares slots must not share bytes in a layer
                self._check_tokens(plane, pages, len(old), new, np.full(len(new), beam, np.uint32), name)

    def _check_tokens(self, plane: _Plane, pages: Indices, first: int, tokens: Words, writers: Words, name: str) -> None:
        size = plane.tokens_per_page
        position = np.arange(first, first + len(tokens))
        page = pages[position // size]
        mapped = np.nonzero(page != BAD_PAGE_INDEX)[0]
        if len(mapped) == 0:
            return
        found = plane.memory()[page[mapped, None], (position[mapped] % size)[:, None], plane.columns]
        expected = plane.pattern(tokens[mapped], writers[mapped])
        self.tokens_checked += len(mapped)
        if not np.array_equal(found, expected):
            bad = np.nonzero((found != expected).any(axis=1))[0]
            at = int(bad[0])
            column = int(np.nonzero(found[at] != expected[at])[0][0])
            where = f"position {int(position[mapped[at]])} (page {int(page[mapped[at]])}), word {int(plane.columns[column])}"
            self.errors.append(
                f"{name}, {plane.describe()}: {len(bad)} of {len(mapped)} tokens wrong, the first at {where}: "
                f"{int(found[at, column])}, not {int(expected[at, column])}"
            )

    def _write_tokens(self, plane: _Plane, pages: Indices, first: int, new: Words, beam: int) -> None:
        size = plane.tokens_per_page
        position = np.arange(first, first + len(new))
        plane.memory()[pages[position // size][:, None], (position % size)[:, None], plane.columns] = plane.pattern(
            new, np.full(len(new), beam, np.uint32)
        )
        self.tokens_written += len(new)

    def _check_state(self, plane: _Plane, pages: Indices, old: Words, writer: Words, name: str) -> None:
        if len(old) == 0:
            return
        found = plane.memory()[int(pages[0]), 0, plane.columns]
        expected = plane.pattern(_fingerprint(old), writer)[0]
        self.tokens_checked += 1
        if not np.array_equal(found, expected):
            self.errors.append(f"{name}, {plane.describe()}: the state is not that of {len(old)} tokens")

    def _write_state(self, plane: _Plane, pages: Indices, tokens: Words, beam: int) -> None:
        plane.memory()[int(pages[0]), 0, plane.columns] = plane.pattern(_fingerprint(tokens), np.array([beam], np.uint32))[0]
        self.tokens_written += 1


def _fingerprint(tokens: Words) -> Words:
    return np.array([zlib.crc32(tokens.tobytes()) ^ len(tokens)], dtype=np.uint32)
