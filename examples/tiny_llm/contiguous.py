"""Keys and values in private contiguous arrays: what a program without any cache manager does.

Rule: nothing of kv_cache_manager_v2 is imported here; this is what the served run is compared with.
"""

from __future__ import annotations

import numpy as np

from tiny_llm.model import FloatArray, KVView, ModelShape


class ContiguousView(KVView):
    """One sequence's keys and values, one array a layer each."""

    def __init__(self, shape: ModelShape, capacity: int) -> None:
        size = (shape.num_layers, capacity, shape.kv_heads, shape.head_size)
        self._keys = np.zeros(size, dtype=np.float32)
        self._values = np.zeros(size, dtype=np.float32)

    def store(self, layer: int, beg: int, keys: FloatArray, values: FloatArray) -> None:
        self._keys[layer, beg : beg + len(keys)] = keys
        self._values[layer, beg : beg + len(values)] = values

    def load(self, layer: int, beg: int, end: int) -> tuple[FloatArray, FloatArray]:
        return self._keys[layer, beg:end].copy(), self._values[layer, beg:end].copy()
