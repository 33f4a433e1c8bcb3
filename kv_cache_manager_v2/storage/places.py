"""The memory behind the levels: an arena for each pool of each pool group on each level.

Rule: memory is made here and nowhere else, all of it or none: a level that cannot be built gives back what the others took.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kv_cache_manager_v2.config import CacheTierConfig, DiskCacheTierConfig
from kv_cache_manager_v2.device.arenas import Arena, ChunkPool, DeviceArena, DiskArena, HostArena
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.ids import CacheTier
from kv_cache_manager_v2.layout.arithmetic import round_up
from kv_cache_manager_v2.layout.pools import StorageLayout
from kv_cache_manager_v2.layout.sizing import LevelSizing

# Address space reserved for a device pool, in multiples of the level's quota: base addresses never move, so this bounds how far a
# pool can grow, by rebalancing within the quota or by a larger quota. Reserving costs no memory.
RESERVE_FACTOR: Final = 16


class Place:
    """The memory of one pool group on one level: an arena per pool, all with the same number of slots."""

    def __init__(self, tier: CacheTier, arenas: list[Arena]) -> None:
        self.tier = tier
        self.arenas = arenas  # by pool
        self.fds: list[int] = []  # by pool: the file behind each arena, on disk
        for arena in arenas:
            if isinstance(arena, DiskArena):
                self.fds.append(arena.fd)

    def resize(self, num_slots: int) -> None:
        """Give every pool so many slots, or leave all as they were and raise."""
        done: list[Arena] = []
        before = [arena.num_slots for arena in self.arenas]
        try:
            for arena in self.arenas:
                done.append(arena)
                arena.resize(num_slots)
        except BaseException:
            for index in range(len(done) - 1):
                done[index].resize(before[index])
            raise

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()


class Places:
    """All memory of a hierarchy. `by_cell` is flat: level * num_groups + group, then a row of parking areas, empty until needed."""

    def __init__(
        self, driver: Driver, layout: StorageLayout, sizings: Sequence[LevelSizing], tier_configs: Sequence[CacheTierConfig]
    ) -> None:
        self.by_cell: list[Place] = []
        self._chunk_pools: list[ChunkPool] = []
        try:
            for level in range(len(sizings)):
                self._build_level(driver, layout, sizings[level], tier_configs[level])
            for sizes in layout.slot_sizes:
                parking: list[Arena] = [HostArena(driver, slot_bytes) for slot_bytes in sizes]
                self.by_cell.append(Place(CacheTier.HOST_MEM, parking))
        except BaseException:
            self.close()
            raise

    def _build_level(self, driver: Driver, layout: StorageLayout, sizing: LevelSizing, config: CacheTierConfig) -> None:
        if sizing.tier == CacheTier.GPU_MEM:
            self._chunk_pools.append(ChunkPool(driver, sizing.granularity))
        reserve_bytes = round_up(sizing.quota * RESERVE_FACTOR, sizing.granularity)
        for group in range(layout.num_pool_groups):
            arenas: list[Arena] = []
            try:
                for slot_bytes in layout.slot_sizes[group]:
                    if sizing.tier == CacheTier.GPU_MEM:
                        arenas.append(DeviceArena(driver, self._chunk_pools[-1], slot_bytes, reserve_bytes))
                    elif sizing.tier == CacheTier.HOST_MEM:
                        arenas.append(HostArena(driver, slot_bytes))
                    else:
                        assert isinstance(config, DiskCacheTierConfig)
                        arenas.append(DiskArena(slot_bytes, config.path))
            except BaseException:
                for arena in arenas:
                    arena.close()
                raise
            place = Place(sizing.tier, arenas)
            self.by_cell.append(place)
            place.resize(sizing.slots[group])

    def trim(self) -> None:
        """Give back device memory that no arena uses since it was shrunk."""
        for pool in self._chunk_pools:
            pool.trim()

    def close(self, spared: Sequence[int] = ()) -> None:
        """Give everything back; nothing may be in flight, but in the spared cells, which keep their memory. Idempotent."""
        for cell in range(len(self.by_cell)):
            if cell not in spared:
                self.by_cell[cell].close()
        for pool in self._chunk_pools:
            pool.close()
        self.by_cell = []
        self._chunk_pools = []
