"""The model's view of the manager's pages: where token t of a layer lies, where a recurrent state lies, how to read and write both.

Rule: keys, values and states live in the manager's pages and nowhere else. A kernel would be given the layer's base address, stride
and page indices; numpy is given an array over the same memory (`pool_array`), indexed by the same page indices. The indices of a
step are copied when it is launched, since they change afterwards.

A further beam has pages of its own only from the block in which the beams part; before it its row says BAD, and beam 0's is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kv_cache_manager_v2 import (
    AttentionLayerConfig,
    BeamIndex,
    BufferConfig,
    DataRole,
    KVCache,
    KVCacheManager,
    LayerGroupId,
    LayerId,
    SsmLayerConfig,
)
from kv_cache_manager_v2.extras.arrays import pool_array
from tiny_llm.model import FloatArray, KVView, ModelShape

KEY = DataRole("key")
VALUE = DataRole("value")
STATE = DataRole("state")
IndexArray = npt.NDArray[np.int32]
IndexBuffers = Mapping[LayerGroupId, IndexArray]  # base page indices of one beam; the manager writes them


def layer_configs(shape: ModelShape, tokens_per_block: int) -> list[AttentionLayerConfig | SsmLayerConfig]:
    """What the manager must know of the model: the buffers of each layer, and the windows."""
    item = np.dtype(np.float32).itemsize
    nbytes = tokens_per_block * shape.kv_heads * shape.head_size * item
    configs: list[AttentionLayerConfig | SsmLayerConfig] = []
    for layer, window in enumerate(shape.windows):
        if layer in shape.recurrent:
            configs.append(SsmLayerConfig(LayerId(layer), [BufferConfig(STATE, int(np.prod(shape.state_shape)) * item)]))
        else:
            buffers = [BufferConfig(KEY, nbytes), BufferConfig(VALUE, nbytes)]
            configs.append(AttentionLayerConfig(LayerId(layer), buffers, window))
    return configs


class PagedMemory:
    """All layers' pages as arrays: (page, token in block, head, element), or of a recurrent layer (page, head, key, value)."""

    def __init__(self, manager: KVCacheManager, shape: ModelShape) -> None:
        self.tokens_per_block = manager.tokens_per_block
        page_shape = (manager.tokens_per_block, shape.kv_heads, shape.head_size)
        attention = [layer for layer in range(shape.num_layers) if layer not in shape.recurrent]
        self.group_of: dict[int, LayerGroupId] = {layer: manager.get_layer_group_id(LayerId(layer)) for layer in attention}
        self.groups: list[LayerGroupId] = sorted(set(self.group_of.values()))
        self.keys: dict[int, FloatArray] = {
            layer: pool_array(manager, LayerId(layer), KEY, np.float32, page_shape) for layer in attention
        }
        self.values: dict[int, FloatArray] = {
            layer: pool_array(manager, LayerId(layer), VALUE, np.float32, page_shape) for layer in attention
        }
        self.states: dict[int, FloatArray] = {
            layer: pool_array(manager, LayerId(layer), STATE, np.float32, shape.state_shape) for layer in sorted(shape.recurrent)
        }
        # all layers of a group count their pages alike, so one layer's converter serves the group
        self._convert = {group: manager.get_page_index_converter(LayerId(layer), KEY) for layer, group in self.group_of.items()}
        self._convert_state = {layer: manager.get_page_index_converter(LayerId(layer), STATE) for layer in self.states}
        self._state_group = {layer: manager.get_layer_group_id(LayerId(layer)) for layer in self.states}

    def view(self, buffers: Sequence[IndexBuffers], cache: KVCache, beam: int = 0) -> PagedView:
        """One beam of a running request as of now. `buffers[beam]` are its base page indices."""
        num_blocks = cache.num_blocks
        pages: dict[LayerGroupId, IndexArray] = {}
        for group in self.groups:
            row = buffers[beam][group][:num_blocks]
            if beam > 0:  # what it has no page for, it shares with beam 0
                row = np.where(row < 0, buffers[0][group][:num_blocks], row)
            pages[group] = np.asarray(self._convert[group](row), dtype=np.int32)
        states: dict[int, int] = {}
        for layer, group in self._state_group.items():
            slot = cache.get_ssm_block_base_index(group, BeamIndex(beam))
            (states[layer],) = self._convert_state[layer]([slot])
        return PagedView(self, {layer: pages[group] for layer, group in self.group_of.items()}, states)

    def reorder(self, beams: Sequence[PagedView], parents: Sequence[int], first_block: int) -> int:
        """Beam b continues from beam parents[b]: copy its blocks from `first_block` on, and its states. Returns pages."""
        moves = [(beams[parent], beams[beam]) for beam, parent in enumerate(parents) if parent != beam]
        copied = 0
        for layer in self.group_of:
            sources = np.concatenate([source.pages[layer][first_block:] for source, _target in moves])
            targets = np.concatenate([target.pages[layer][first_block:] for _source, target in moves])
            present = targets >= 0  # the others have fallen out of the window, for every beam
            for pool in (self.keys[layer], self.values[layer]):
                pool[targets[present]] = pool[sources[present]]  # all are read before any is written
            copied += 2 * int(present.sum())
        for layer, pool in self.states.items():
            pool[[target.states[layer] for _source, target in moves]] = pool[[source.states[layer] for source, _target in moves]]
            copied += len(moves)
        return copied


class PagedView(KVView):
    """One sequence in pages. `pages[layer][block]` is the layer's page of a block, negative where it has none."""

    def __init__(self, memory: PagedMemory, pages: dict[int, IndexArray], states: dict[int, int]) -> None:
        self._memory = memory
        self.pages = pages
        self.states = states  # by recurrent layer: the page of the state

    def store(self, layer: int, beg: int, keys: FloatArray, values: FloatArray) -> None:
        size = self._memory.tokens_per_block
        positions = np.arange(beg, beg + len(keys))
        pages = self.pages[layer][positions // size]
        assert (pages >= 0).all(), f"layer {layer} has no page for some of the tokens [{beg}, {beg + len(keys)})"
        self._memory.keys[layer][pages, positions % size] = keys
        self._memory.values[layer][pages, positions % size] = values

    def load(self, layer: int, beg: int, end: int) -> tuple[FloatArray, FloatArray]:
        size = self._memory.tokens_per_block
        first, last = beg // size, -(-end // size)
        pages = self.pages[layer][first:last]
        assert (pages >= 0).all(), (
            f"layer {layer} needs tokens [{beg}, {end}), but the pages of blocks {first} to {last - 1} are {pages}"
        )
        window = slice(beg - first * size, end - first * size)
        return self._gather(self._memory.keys[layer], pages)[window], self._gather(self._memory.values[layer], pages)[window]

    def store_state(self, layer: int, state: FloatArray) -> None:
        self._memory.states[layer][self.states[layer]] = state

    def load_state(self, layer: int) -> FloatArray:
        state: FloatArray = self._memory.states[layer][self.states[layer]].copy()
        return state

    def _gather(self, pool: FloatArray, pages: IndexArray) -> FloatArray:
        """Copies of the pages, one after the other: (tokens, heads, head_size)."""
        gathered: FloatArray = pool[pages]
        return gathered.reshape(-1, *gathered.shape[2:])
