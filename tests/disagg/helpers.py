"""Ranks of a small model that divide its layers and heads differently, and an engine whose bytes name layer, role, head, position.

Rule: the engine touches memory in stream order only, through its own rank's page table, so that a wrong range, a wrong head or a
page that was handed on too early shows as wrong bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_cache_manager_v2 import (
    AttentionLayerConfig,
    BufferConfig,
    DataRole,
    EmulatedDriver,
    GpuCacheTierConfig,
    KVCache,
    KVCacheManager,
    KVCacheManagerConfig,
    LayerId,
    SsmLayerConfig,
    Stream,
)
from kv_cache_manager_v2.config import LayerConfig
from kv_cache_manager_v2.disagg.page_table import HEADS_FIRST, KVCachePageTable, page_table_of

SIZE = 4  # tokens a block
HEADS = 4  # of the whole model
HEAD_BYTES = {"key": 512, "value": 512, "key_scale": 16}  # of one token
MIB = 1 << 20
Bytes = npt.NDArray[np.uint8]


@dataclass
class Split:
    """How ranks divide the model: layers by pipeline, heads by tensor."""

    pipeline: tuple[tuple[int, ...], ...]
    tensor: int
    head_order: str
    scales: bool = True
    override: int | None = None  # tokens in the blocks of the scales' own
    recurrent: int | None = None  # a layer that is recurrent
    both: int | None = None  # a layer that is attention and recurrent


def windowed(layer: int) -> int | None:
    """Odd layers have a window."""
    return 8 if layer % 2 else None


def layer_config(layer: int, split: Split) -> LayerConfig:
    states = [BufferConfig(DataRole("state"), 8192), BufferConfig(DataRole("conv"), 1024)]
    if layer == split.recurrent:
        return SsmLayerConfig(LayerId(layer), states)
    heads = HEADS // split.tensor
    buffers = [BufferConfig(DataRole(role), SIZE * heads * HEAD_BYTES[role]) for role in ("key", "value")]
    if split.scales:
        own = split.override or SIZE
        buffers.append(BufferConfig(DataRole("key_scale"), own * heads * HEAD_BYTES["key_scale"], split.override))
    return AttentionLayerConfig(LayerId(layer), buffers, windowed(layer), states=states if layer == split.both else ())


class Rank:
    """One rank: a manager, its page table, and a cache."""

    def __init__(self, driver: EmulatedDriver, split: Split, pipeline_rank: int, tensor_rank: int) -> None:
        self.driver = driver
        self.split = split
        self.layers = split.pipeline[pipeline_rank]
        self.tensor_rank = tensor_rank
        config = KVCacheManagerConfig(
            SIZE,
            [GpuCacheTierConfig(2 * MIB)],
            [layer_config(layer, split) for layer in self.layers],
            max_util_for_resume=1.0,
            commit_min_snapshot=split.recurrent in self.layers or split.both in self.layers,
        )
        self.manager = KVCacheManager(config, driver=driver)
        self.table: KVCachePageTable = page_table_of(
            self.manager, HEADS // split.tensor, None, tensor_rank, split.tensor, split.head_order
        )
        self.stream: Stream = driver.create_stream()
        self.errors: list[str] = []
        self.checked = 0  # buffers compared

    def start(self, length: int) -> KVCache:
        """A request with so many tokens of history, all blocks of its windows mapped."""
        cache = self.manager.create_kv_cache()
        assert cache.resume(self.stream)
        assert cache.resize(length, length)
        return cache

    def close(self) -> None:
        self.manager.shutdown()
        self.driver.destroy_stream(self.stream)

    # --- the engine

    def write(self, cache: KVCache, length: int, salt: int = 0) -> None:
        """Queue the writing of all mapped pages."""
        self.driver.launch(cache.cuda_stream, self._kernel(self.table.request_slots(cache), length, salt, True))

    def check(self, cache: KVCache, length: int, salt: int = 0) -> None:
        """Queue a comparison of all mapped pages."""
        self.driver.launch(cache.cuda_stream, self._kernel(self.table.request_slots(cache), length, salt, False))

    def _kernel(self, slots: Sequence[Sequence[int]], length: int, salt: int, write: bool) -> Callable[[], None]:
        def kernel() -> None:
            for index, group in enumerate(self.table.layer_groups):
                for view in group.pool_views:
                    pool = self.table.pool(index, view)
                    for entry in view.entries:
                        for ordinal, slot in enumerate(slots[index]):
                            if slot >= 0:
                                address = pool.base_address + pool.slot_bytes * slot + entry.offset
                                memory = np.ctypeslib.as_array((ctypes.c_uint8 * entry.size).from_address(address))
                                self._touch(memory, entry.local_layer_id, entry.role, ordinal, length, salt, write)

        return kernel

    def _touch(self, memory: Bytes, layer: int, role: str, ordinal: int, length: int, salt: int, write: bool) -> None:
        if role in ("state", "conv"):
            expected = pattern(layer, role, salt, 0, memory.size)
            page = memory
        else:
            heads = HEADS // self.split.tensor
            own = self.split.override if role == "key_scale" and self.split.override else SIZE
            first = self.tensor_rank * heads
            count = min(SIZE, length - ordinal * SIZE)
            page = memory.reshape(SIZE // own, heads, own, -1)  # repetition, head, token, byte
            if self.split.head_order != HEADS_FIRST:
                page = memory.reshape(SIZE // own, own, heads, -1).swapaxes(1, 2)
            page = page.swapaxes(1, 2).reshape(SIZE, heads, -1)[:count] if not write else page
            expected = np.stack(
                [
                    np.stack(
                        [pattern(layer, role, salt, 64 * (ordinal * SIZE + t) + first + h, HEAD_BYTES[role]) for h in range(heads)]
                    )
                    for t in range(count)
                ]
            )
            if write:
                for token in range(count):
                    page[token // own, :, token % own, :] = expected[token]
                return
        if write:
            memory[:] = expected
            return
        self.checked += 1
        if not np.array_equal(page, expected):
            self.errors.append(f"layer {layer} {role}, block {ordinal}, tensor rank {self.tensor_rank}")


def pattern(layer: int, role: str, salt: int, where: int, nbytes: int) -> Bytes:
    """Bytes that name layer, role, head and position."""
    seed = (layer * 1_000_003 + sum(role.encode()) * 7919 + salt * 15_485_863 + where * 104_729) % (1 << 31)
    return ((np.arange(nbytes, dtype=np.int64) * 31 + seed + (seed >> 8)) % 251).astype(np.uint8)


def ranks(driver: EmulatedDriver, split: Split) -> list[Rank]:
    return [Rank(driver, split, pipeline, tensor) for pipeline in range(len(split.pipeline)) for tensor in range(split.tensor)]
