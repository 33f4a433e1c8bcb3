"""What differs between the tiers: how a pool's memory is made, and how bytes get in and out.

The question "is this the GPU, the host, a disk" is a property or a method of a tier, asked nowhere else but where statistics name
the tiers. Another tier is a subclass, and a maker for the configurations that have it (`register_tier`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.config import CacheTierConfig, DiskCacheTierConfig, GpuCacheTierConfig, HostCacheTierConfig
from kv_cache_manager_v2.device.arenas import Arena, ChunkPool, DeviceArena, DiskArena, HostArena
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.os_memory import available_bytes
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import CacheTier
from kv_cache_manager_v2.layout.arithmetic import round_up
from kv_cache_manager_v2.layout.sizing import LevelSizing

# Address space reserved for a device pool, in multiples of the level's quota: base addresses never move, so this bounds how far a
# pool can grow, by rebalancing within the quota or by a larger quota. Reserving costs no memory.
RESERVE_FACTOR: Final = 16
HOST_MARGIN_BYTES: Final = 1 << 30  # of host memory that best efforts leave free, at the least
HOST_MARGIN_SHARE: Final = 20  # one part in so many of what is available, where that is more


def spare_host_bytes(available: int) -> int:
    """How much of the available memory a host tier may take at most: the engine and other processes need the rest."""
    return max(0, available - max(HOST_MARGIN_BYTES, available // HOST_MARGIN_SHARE))


@mypyc_attr(allow_interpreted_subclasses=True)
class Tier(ABC):
    """One level's kind of memory. Its slots are memory that copies reach, or ranges of files."""

    def __init__(self, name: CacheTier, by_file: bool, takes_files: bool) -> None:
        self.name = name
        self.pool: ChunkPool | None = None  # memory that the arenas share
        self.by_file = by_file  # slots are ranges of files: bytes go in and out by file transfers
        self.takes_files = takes_files  # file transfers read and write its memory directly, without staging

    @abstractmethod
    def make_arena(self, slot_bytes: int) -> Arena:
        """An arena of this kind without slots. Takes no memory; address space and a file, perhaps."""

    def spare_bytes(self, available: int | None) -> int:
        """Bytes by which best efforts may grow the level; -1: as many as the device gives.

        `available`: bytes of host memory that the system could give; None: ask it.
        """
        return -1

    def trim(self) -> None:
        """Free memory that arenas no longer use."""
        if self.pool is not None:
            self.pool.trim()

    def close(self) -> None:
        """Free what the arenas share; they are closed. Can be tried again after an error."""
        if self.pool is not None:
            self.pool.close()


class DeviceTier(Tier):
    """Device memory: chunks that all pools of the level share, mapped into ranges reserved once."""

    def __init__(self, driver: Driver, sizing: LevelSizing) -> None:
        super().__init__(CacheTier.GPU_MEM, False, False)
        self._driver = driver
        self._chunks = ChunkPool(driver, sizing.granularity)
        self.pool = self._chunks
        self._reserve_bytes = round_up(sizing.quota * RESERVE_FACTOR, sizing.granularity)

    def make_arena(self, slot_bytes: int) -> Arena:
        return DeviceArena(self._driver, self._chunks, slot_bytes, self._reserve_bytes)


class HostTier(Tier):
    """Host memory, registered with the device."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(CacheTier.HOST_MEM, False, True)
        self._driver = driver

    def make_arena(self, slot_bytes: int) -> Arena:
        return HostArena(self._driver, slot_bytes)

    def spare_bytes(self, available: int | None) -> int:
        there = available_bytes() if available is None else available
        return spare_host_bytes(there) if there >= 0 else -1


class DiskTier(Tier):
    """Files in a directory, with a checksum of what lies in each slot unless the configuration says otherwise."""

    def __init__(self, driver: Driver, config: DiskCacheTierConfig) -> None:
        super().__init__(CacheTier.DISK, True, False)
        self._driver = driver
        self._path = config.path
        self._checksum = config.checksum

    def make_arena(self, slot_bytes: int) -> Arena:
        arena = DiskArena(slot_bytes, self._path)
        if self._checksum is not None:
            try:
                arena.protect(self._driver)
            except BaseException:
                arena.close()
                raise
        return arena


# --- which configurations have which tier

TierMaker = Callable[[Driver, LevelSizing, CacheTierConfig], Tier]


def _device(driver: Driver, sizing: LevelSizing, config: CacheTierConfig) -> Tier:
    return DeviceTier(driver, sizing)


def _host(driver: Driver, sizing: LevelSizing, config: CacheTierConfig) -> Tier:
    return HostTier(driver)


def _disk(driver: Driver, sizing: LevelSizing, config: CacheTierConfig) -> Tier:
    assert isinstance(config, DiskCacheTierConfig)
    return DiskTier(driver, config)


_MAKERS: Final[dict[type, TierMaker]] = {GpuCacheTierConfig: _device, HostCacheTierConfig: _host, DiskCacheTierConfig: _disk}


def register_tier(config_class: type[CacheTierConfig], maker: TierMaker) -> None:
    """Let `maker(driver, sizing, config)` make the tier of levels configured by a class and its subclasses."""
    _MAKERS[config_class] = maker


def make_tier(driver: Driver, sizing: LevelSizing, config: CacheTierConfig) -> Tier:
    """The tier of a level as configured. Raises ConfigError for a class that has none."""
    for base in type(config).__mro__:
        maker = _MAKERS.get(base)
        if maker is not None:
            return maker(driver, sizing, config)
    raise ConfigError(f"cache_tiers has a {type(config).__name__}, for which there is no tier: call register_tier first")
