"""Keys, values and states in private contiguous arrays: what a program without any cache manager does.

Rule: nothing of kv_cache_manager_v2 is imported here; this is what the served run is compared with.
"""

from __future__ import annotations

from copy import deepcopy

import numpy as np

from tiny_llm.model import FloatArray, KVView, ModelShape


class ContiguousView(KVView):
    """One sequence's keys and values, one array a layer each, and its states as they are now."""

    def __init__(self, shape: ModelShape, capacity: int) -> None:
        size = (shape.num_layers, capacity, shape.kv_heads, shape.head_size)
        self._keys = np.zeros(size, dtype=np.float32)
        self._values = np.zeros(size, dtype=np.float32)
        self._states: dict[int, FloatArray] = {}  # by recurrent layer

    def copy(self) -> ContiguousView:
        """Another sequence that begins alike."""
        return deepcopy(self)

    def store(self, layer: int, beg: int, keys: FloatArray, values: FloatArray) -> None:
        self._keys[layer, beg : beg + len(keys)] = keys
        self._values[layer, beg : beg + len(values)] = values

    def load(self, layer: int, beg: int, end: int) -> tuple[FloatArray, FloatArray]:
        return self._keys[layer, beg:end].copy(), self._values[layer, beg:end].copy()

    def store_state(self, layer: int, state: FloatArray) -> None:
        self._states[layer] = state.copy()

    def load_state(self, layer: int) -> FloatArray:
        return self._states[layer].copy()
