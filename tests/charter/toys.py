"""A tier, a life cycle and a counter that the package does not have, made as CONTRIBUTING.md says.

Rule: nothing here reaches into a private name, and no file of the package knows of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import SupportsIndex

from kv_cache_manager_v2.config import CacheTierConfig, LayerConfig
from kv_cache_manager_v2.device.arenas import Arena
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import CacheTier, LifeCycleId
from kv_cache_manager_v2.layout.life_cycle import AttentionLifeCycle, LifeCycle, register_life_cycle
from kv_cache_manager_v2.layout.sizing import LevelSizing
from kv_cache_manager_v2.listener import CachedBlock, CacheListener
from kv_cache_manager_v2.storage.tiers import Tier, register_tier

# --- a tier: plain host memory, which is not registered with the device


@dataclass
class PlainCacheTierConfig(CacheTierConfig):
    """Host memory that the device cannot reach: bytes come and go as those of a file do."""

    @property
    def tier(self) -> CacheTier:
        return CacheTier.HOST_MEM

    def granularity(self) -> int:
        return 1 << 16


class PlainArena(Arena):
    """Slots in a memory file."""

    def __init__(self, slot_bytes: int) -> None:
        super().__init__(slot_bytes)
        self.fd = os.memfd_create("plain-tier", os.MFD_CLOEXEC)

    def address(self, slot: int) -> int:
        return slot * self.slot_bytes

    def _change(self, num_slots: int) -> None:
        os.ftruncate(self.fd, num_slots * self.slot_bytes)

    def _usable(self) -> int:
        return os.fstat(self.fd).st_size // self.slot_bytes

    def _free_all(self) -> None:
        fd = self.fd
        self.fd = -1
        if fd >= 0:
            os.close(fd)


class PlainTier(Tier):
    """Makes the arenas of a level of plain host memory."""

    def __init__(self) -> None:
        super().__init__(CacheTier.HOST_MEM, by_file=True, takes_files=False)

    def make_arena(self, slot_bytes: int) -> Arena:
        return PlainArena(slot_bytes)


def make_plain_tier(driver: Driver, sizing: LevelSizing, config: CacheTierConfig) -> Tier:
    return PlainTier()


# --- a life cycle: chunked attention


@dataclass
class ChunkedLayerConfig(LayerConfig):
    """A layer whose queries see the tokens of their own chunk, up to themselves."""

    chunk: int = 1  # tokens

    def validate(self) -> None:
        super().validate()
        if self.chunk < 1:
            raise ConfigError(f"chunk of layer {self.layer_id} is {self.chunk}; it must be at least 1")

    @property
    def window_size(self) -> int | None:
        return self.chunk

    def group_key(self, tokens_per_block: SupportsIndex) -> tuple[object, ...]:
        return "chunked", self.chunk

    def first_visible(self, position: int) -> int:
        """The first position that the query at `position` sees."""
        return position - position % self.chunk


class ChunkedLifeCycle(AttentionLifeCycle):
    """Blocks that lie wholly before the chunk of the next query are stale. The window is the chunk."""

    def stale(self, history: int) -> tuple[int, int]:
        chunk = self.window_size
        assert chunk is not None
        return 0, history // chunk * chunk // self.tokens_per_block

    def stale_from(self, ordinal: int) -> int:
        chunk = self.window_size
        assert chunk is not None
        return -(-(ordinal + 1) * self.tokens_per_block // chunk) * chunk


def make_chunked(index: LifeCycleId, tokens_per_block: int, layer: LayerConfig) -> LifeCycle:
    return ChunkedLifeCycle(index, tokens_per_block, layer.window_size, 0)


# --- a counter: cached pages that came back to the GPU


class OnloadCounter(CacheListener):
    """Counts cached pages that moved to the GPU, by the level that they came from. Passes on all that it is told."""

    def __init__(self, num_levels: int, next_listener: CacheListener | None = None) -> None:
        self.onloaded = [0] * num_levels  # pages, by level; never falls
        self._next = next_listener

    def attached(self, block_key_hash: str) -> None:
        if self._next is not None:
            self._next.attached(block_key_hash)

    def page_stored(self, block: CachedBlock, life_cycle: int, level: int, priority: int, covers_block: bool) -> None:
        if self._next is not None:
            self._next.page_stored(block, life_cycle, level, priority, covers_block)

    def page_removed(self, block: CachedBlock, life_cycle: int) -> None:
        if self._next is not None:
            self._next.page_removed(block, life_cycle)

    def block_removed(self, block: CachedBlock) -> None:
        if self._next is not None:
            self._next.block_removed(block)

    def page_moved(self, block: CachedBlock, life_cycle: int, source: int, destination: int) -> None:
        if destination == 0:
            self.onloaded[source] += 1
        if self._next is not None:
            self._next.page_moved(block, life_cycle, source, destination)

    def item_named(self, digest: bytes, uuid: str) -> None:
        if self._next is not None:
            self._next.item_named(digest, uuid)


register_tier(PlainCacheTierConfig, make_plain_tier)
register_life_cycle(ChunkedLayerConfig, make_chunked)
