"""Tiers: how a pool's memory is allocated, and how its bytes are transferred.

All differences between GPU, host and disk are properties and methods of a tier. A further tier is a subclass and a factory for its
configuration class (`register_tier`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.config import CacheTierConfig, DiskCacheTierConfig, GpuCacheTierConfig, HostCacheTierConfig
from kv_cache_manager_v2.device.arenas import Arena, ChunkPool, DeviceArena, DiskArena
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.host_arena import HostArena
from kv_cache_manager_v2.device.os_memory import available_bytes
from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.external_pages import ExternalGpuTierConfig, Transfer
from kv_cache_manager_v2.ids import CacheTier
from kv_cache_manager_v2.layout.arithmetic import round_up
from kv_cache_manager_v2.layout.sizing import LevelSizing
from kv_cache_manager_v2.storage.slot_copier import AddressCopier, SlotCopier, TransferCopier

# Address space reserved for a device pool, in multiples of the level's quota. It bounds how far a pool can grow, as base addresses
# never change. It takes no memory.
RESERVE_FACTOR: Final = 16
HOST_MARGIN_BYTES: Final = 1 << 30  # host memory that a best-effort resize leaves free, at least
HOST_MARGIN_SHARE: Final = 20  # ... or this fraction (1 / 20) of the available memory, if it is more


def spare_host_bytes(available: int) -> int:
    """The available memory that a host tier may use. The engine and other processes need the rest."""
    return max(0, available - max(HOST_MARGIN_BYTES, available // HOST_MARGIN_SHARE))


@mypyc_attr(allow_interpreted_subclasses=True)
class Tier(ABC):
    """The memory of one level. Its slots are memory for copies, or ranges of files."""

    def __init__(self, name: CacheTier, by_file: bool, takes_files: bool) -> None:
        self.name = name
        self.pool: ChunkPool | None = None  # chunks that the arenas share
        self.by_file = by_file  # slots are ranges of files, accessed by file transfers
        self.takes_files = takes_files  # file transfers access its memory without staging

    @abstractmethod
    def make_arena(self, slot_bytes: int) -> Arena:
        """A new arena without slots. It may reserve address space or open a file, but has no memory."""

    def make_copier(self, pool_group: int, arenas: list[Arena]) -> SlotCopier:
        """What copies the slots of a cell that are not in files. `arenas` are those of its pools; the list is filled later."""
        return SlotCopier()

    def spare_bytes(self, available: int | None) -> int:
        """Bytes by which a best-effort resize may grow the level; -1: no bound.

        `available`: bytes of host memory that are available; None: ask the system.
        """
        return -1

    def trim(self) -> None:
        """Free memory that arenas no longer use."""
        if self.pool is not None:
            self.pool.trim()

    def close(self) -> None:
        """Free the shared chunks, after the arenas are closed. Can be called again after an error."""
        if self.pool is not None:
            self.pool.close()


class DeviceTier(Tier):
    """Device memory: chunks that all pools of the level share, mapped into reserved address ranges."""

    def __init__(self, driver: Driver, sizing: LevelSizing) -> None:
        super().__init__(CacheTier.GPU_MEM, False, False)
        self._driver = driver
        self._chunks = ChunkPool(driver, sizing.granularity)
        self.pool = self._chunks
        self._reserve_bytes = round_up(sizing.quota * RESERVE_FACTOR, sizing.granularity)

    def make_arena(self, slot_bytes: int) -> Arena:
        return DeviceArena(self._driver, self._chunks, slot_bytes, self._reserve_bytes)

    def make_copier(self, pool_group: int, arenas: list[Arena]) -> SlotCopier:
        return AddressCopier(self._driver, arenas)


class ExternalArena(Arena):
    """Slots of a pool for which the manager has no memory."""

    def address(self, slot: int) -> int:
        """Always raises LogicError."""
        raise LogicError("the pages of this manager are in memory of the engine (ExternalGpuTierConfig): they have no address here")

    def _change(self, num_slots: int) -> None:
        pass

    def _usable(self) -> int:
        return self.num_slots

    def _free_all(self) -> None:
        pass


class ExternalTier(Tier):
    """Pages in memory of the engine."""

    def __init__(self, transfer: Transfer | None) -> None:
        super().__init__(CacheTier.GPU_MEM, False, False)
        self._transfer = transfer

    def make_arena(self, slot_bytes: int) -> Arena:
        return ExternalArena(slot_bytes)

    def make_copier(self, pool_group: int, arenas: list[Arena]) -> SlotCopier:
        return TransferCopier(self._transfer, pool_group)


class HostTier(Tier):
    """Host memory, registered with the device."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(CacheTier.HOST_MEM, False, True)
        self._driver = driver

    def make_arena(self, slot_bytes: int) -> Arena:
        return HostArena(self._driver, slot_bytes)

    def make_copier(self, pool_group: int, arenas: list[Arena]) -> SlotCopier:
        return AddressCopier(self._driver, arenas)

    def spare_bytes(self, available: int | None) -> int:
        there = available_bytes() if available is None else available
        return spare_host_bytes(there) if there >= 0 else -1


class DiskTier(Tier):
    """Files in a directory, with checksums of their slots unless the configuration turns them off."""

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


def _external(driver: Driver, sizing: LevelSizing, config: CacheTierConfig) -> Tier:
    assert isinstance(config, ExternalGpuTierConfig)
    return ExternalTier(config.transfer)


def _host(driver: Driver, sizing: LevelSizing, config: CacheTierConfig) -> Tier:
    return HostTier(driver)


def _disk(driver: Driver, sizing: LevelSizing, config: CacheTierConfig) -> Tier:
    assert isinstance(config, DiskCacheTierConfig)
    return DiskTier(driver, config)


_MAKERS: Final[dict[type, TierMaker]] = {
    GpuCacheTierConfig: _device,
    ExternalGpuTierConfig: _external,
    HostCacheTierConfig: _host,
    DiskCacheTierConfig: _disk,
}


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
