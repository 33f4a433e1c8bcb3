"""Copies of slots that are not in files: within a cell, and between a cell and memory. A tier chooses the copier of its cells."""

from __future__ import annotations

from kv_cache_manager_v2.device.arenas import Arena
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.errors import LogicError
from kv_cache_manager_v2.external_pages import Transfer
from kv_cache_manager_v2.ids import SlotId, Stream


class SlotCopier:
    """Queues copies of the slots of one cell. This class is that of slots in files, which only file transfers move."""

    def addresses(self, pool: int, slots: list[SlotId]) -> list[int] | None:
        """Where slots begin in memory; None if they have no addresses, so that only this copier can copy them."""
        return None

    def check(self) -> None:
        """Raise LogicError if no slot of the cell can ever be copied within it."""

    def copy_slots(self, stream: Stream, sources: list[SlotId], destinations: list[SlotId]) -> None:
        """Copy whole slots, in every pool, from sources[i] to destinations[i]."""
        raise LogicError("slots in files are moved by file transfers")

    def copy_slot(self, stream: Stream, source: SlotId, destination: SlotId) -> None:
        """Copy one whole slot."""
        self.copy_slots(stream, [source], [destination])

    def to_memory(self, stream: Stream, pool: int, slots: list[SlotId], offset: int, nbytes: int, memory: list[int]) -> None:
        """Copy bytes offset .. offset + nbytes - 1 of each slot in one pool to the address memory[i]."""
        raise LogicError("slots in files are moved by file transfers")

    def from_memory(self, stream: Stream, pool: int, slots: list[SlotId], offset: int, nbytes: int, memory: list[int]) -> None:
        """As `to_memory`, in the other direction."""
        raise LogicError("slots in files are moved by file transfers")


class AddressCopier(SlotCopier):
    """Slots that the device copies by their addresses."""

    def __init__(self, driver: Driver, arenas: list[Arena]) -> None:
        self._driver = driver
        self._arenas = arenas  # by pool

    def addresses(self, pool: int, slots: list[SlotId]) -> list[int] | None:
        return self._addresses(pool, slots, 0)

    def _addresses(self, pool: int, slots: list[SlotId], offset: int) -> list[int]:
        arena = self._arenas[pool]
        return [arena.address(slot) + offset for slot in slots]

    def copy_slots(self, stream: Stream, sources: list[SlotId], destinations: list[SlotId]) -> None:
        for pool, arena in enumerate(self._arenas):
            targets = self._addresses(pool, destinations, 0)
            self._driver.copy_batch(stream, targets, self._addresses(pool, sources, 0), arena.slot_bytes)

    def copy_slot(self, stream: Stream, source: SlotId, destination: SlotId) -> None:
        for arena in self._arenas:
            self._driver.copy(stream, arena.address(destination), arena.address(source), arena.slot_bytes)

    def to_memory(self, stream: Stream, pool: int, slots: list[SlotId], offset: int, nbytes: int, memory: list[int]) -> None:
        self._driver.copy_batch(stream, memory, self._addresses(pool, slots, offset), nbytes)

    def from_memory(self, stream: Stream, pool: int, slots: list[SlotId], offset: int, nbytes: int, memory: list[int]) -> None:
        self._driver.copy_batch(stream, self._addresses(pool, slots, offset), memory, nbytes)


class TransferCopier(SlotCopier):
    """Slots in memory of the engine. Without a transfer every copy raises LogicError, before anything changes."""

    def __init__(self, transfer: Transfer | None, pool_group: int) -> None:
        self._given = transfer
        self._pool_group = pool_group

    def check(self) -> None:
        self._transfer()

    def _transfer(self) -> Transfer:
        if self._given is None:
            raise LogicError("a page has to be copied, but the ExternalGpuTierConfig has no transfer; give it one")
        return self._given

    def copy_slots(self, stream: Stream, sources: list[SlotId], destinations: list[SlotId]) -> None:
        self._transfer().copy_pages(stream, self._pool_group, sources, destinations)

    def to_memory(self, stream: Stream, pool: int, slots: list[SlotId], offset: int, nbytes: int, memory: list[int]) -> None:
        self._transfer().to_memory(stream, self._pool_group, pool, slots, offset, nbytes, memory)

    def from_memory(self, stream: Stream, pool: int, slots: list[SlotId], offset: int, nbytes: int, memory: list[int]) -> None:
        self._transfer().from_memory(stream, self._pool_group, pool, slots, offset, nbytes, memory)
