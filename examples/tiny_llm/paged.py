"""The model's view of the manager's pages: where token t of a layer lies, and how to read and write it.

Rule: keys and values live in the manager's pages and nowhere else. A kernel would be given the layer's base address, stride and
page indices; numpy is given an array over the same memory (`pool_array`), indexed by the same page indices. The indices of a step
are copied when it is launched, since they change afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kv_cache_manager_v2 import (
    AttentionLayerConfig,
    BufferConfig,
    DataRole,
    KVCache,
    KVCacheManager,
    LayerGroupId,
    LayerId,
)
from kv_cache_manager_v2.extras.arrays import pool_array
from tiny_llm.model import FloatArray, KVView, ModelShape

KEY = DataRole("key")
VALUE = DataRole("value")
IndexArray = npt.NDArray[np.int32]


def layer_configs(shape: ModelShape, tokens_per_block: int) -> list[AttentionLayerConfig]:
    """What the manager must know of the model: one key and one value buffer a layer, and the windows."""
    nbytes = tokens_per_block * shape.kv_heads * shape.head_size * np.dtype(np.float32).itemsize
    return [
        AttentionLayerConfig(LayerId(layer), [BufferConfig(KEY, nbytes), BufferConfig(VALUE, nbytes)], window)
        for layer, window in enumerate(shape.windows)
    ]


class PagedMemory:
    """All layers' pages as arrays, indexed (page, token in block, head, element)."""

    def __init__(self, manager: KVCacheManager, shape: ModelShape) -> None:
        self.tokens_per_block = manager.tokens_per_block
        page_shape = (manager.tokens_per_block, shape.kv_heads, shape.head_size)
        layers = [LayerId(layer) for layer in range(shape.num_layers)]
        self.group_of: list[LayerGroupId] = [manager.get_layer_group_id(layer) for layer in layers]
        self.groups: list[LayerGroupId] = sorted(set(self.group_of))
        self.keys: list[FloatArray] = [pool_array(manager, layer, KEY, np.float32, page_shape) for layer in layers]
        self.values: list[FloatArray] = [pool_array(manager, layer, VALUE, np.float32, page_shape) for layer in layers]
        # all layers of a group count their pages alike, so one layer's converter serves the group
        self._convert = {
            group: manager.get_page_index_converter(layer, KEY) for layer, group in zip(layers, self.group_of, strict=True)
        }

    def view(self, buffers: Mapping[LayerGroupId, IndexArray], cache: KVCache) -> PagedView:
        """A running request's keys and values as of now. `buffers[group]` holds its base page indices."""
        num_blocks = cache.num_blocks
        indices = {group: np.asarray(self._convert[group](buffers[group][:num_blocks]), dtype=np.int32) for group in self.groups}
        return PagedView(self, [indices[group] for group in self.group_of])


class PagedView(KVView):
    """One sequence in pages. `indices[layer][block]` is the layer's page of a block; negative where it has none."""

    def __init__(self, memory: PagedMemory, indices: list[IndexArray]) -> None:
        self._memory = memory
        self._indices = indices

    def store(self, layer: int, beg: int, keys: FloatArray, values: FloatArray) -> None:
        size = self._memory.tokens_per_block
        positions = np.arange(beg, beg + len(keys))
        pages = self._indices[layer][positions // size]
        assert (pages >= 0).all(), f"layer {layer} has no page for some of the tokens [{beg}, {beg + len(keys)})"
        self._memory.keys[layer][pages, positions % size] = keys
        self._memory.values[layer][pages, positions % size] = values

    def load(self, layer: int, beg: int, end: int) -> tuple[FloatArray, FloatArray]:
        size = self._memory.tokens_per_block
        first, last = beg // size, -(-end // size)
        pages = self._indices[layer][first:last]
        assert (pages >= 0).all(), (
            f"layer {layer} needs tokens [{beg}, {end}), but the pages of blocks {first} to {last - 1} are {pages}"
        )
        window = slice(beg - first * size, end - first * size)
        return self._gather(self._memory.keys[layer], pages)[window], self._gather(self._memory.values[layer], pages)[window]

    def _gather(self, pool: FloatArray, pages: IndexArray) -> FloatArray:
        """Copies of the pages, one after the other: (tokens, heads, head_size)."""
        gathered: FloatArray = pool[pages]
        return gathered.reshape(-1, *gathered.shape[2:])
