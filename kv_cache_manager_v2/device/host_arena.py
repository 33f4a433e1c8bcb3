"""The arena of host memory: anonymous memory that is registered with the device."""

from __future__ import annotations

import math
from functools import partial
from typing import Final

from kv_cache_manager_v2.device.arenas import Arena
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.freeing import Freeing
from kv_cache_manager_v2.device.os_memory import (
    PAGE_BYTES,
    default_populate_threads,
    format_bytes,
    map_range,
    memlock_limit,
    populate_range,
    resize_range,
    round_up,
    uninterrupted,
    unmap_range,
)
from kv_cache_manager_v2.errors import ConfigError, HostRegistrationError, KVCacheError, OutOfMemoryError

REGISTRATION_BYTES: Final = 2 << 30  # most host memory in one registration: pinning more at once can stall the machine or fail


class HostArena(Arena):
    """Slots in anonymous host memory, faulted in at once and registered with the device range by range.

    The base may change when the arena grows. The registered ranges are contiguous from the base. Their size is a multiple of slot
    size and page size, so that no slot spans two ranges, unless no such multiple fits `registration_bytes`.
    """

    def __init__(
        self,
        driver: Driver,
        slot_bytes: int,
        registration_bytes: int = REGISTRATION_BYTES,
        populate_threads: int = -1,
    ) -> None:
        """`populate_threads`: threads that fault the memory in; 0: it is faulted in at first use; -1: half the processors."""
        super().__init__(slot_bytes)
        if registration_bytes < PAGE_BYTES or registration_bytes % PAGE_BYTES:
            raise ConfigError(f"registration_bytes={registration_bytes}: must be a positive multiple of the page size {PAGE_BYTES}")
        self._driver = driver
        self._threads = default_populate_threads() if populate_threads < 0 else populate_threads
        whole = math.lcm(slot_bytes, PAGE_BYTES)
        self._range_bytes = registration_bytes - registration_bytes % whole if whole <= registration_bytes else registration_bytes
        self.base = 0  # address; 0 while there is no memory
        self.nbytes = 0  # mapped bytes, a multiple of the page size; a guard page follows, which is never registered
        self.ranges: list[tuple[int, int]] = []  # registered (address, bytes), ascending, contiguous from the base
        self._unregistering = Freeing()  # of ranges at their addresses, also those of which registering was interrupted
        self._doubtful_bytes = 0  # size of the range in doubt

    def address(self, slot: int) -> int:
        return self.base + slot * self.slot_bytes

    @property
    def registered_bytes(self) -> int:
        return self.ranges[-1][0] + self.ranges[-1][1] - self.base if self.ranges else 0

    def _usable(self) -> int:
        registered = self.registered_bytes
        if self.ranges and self.ranges[-1][0] in self._unregistering.doubtful:
            registered -= self.ranges[-1][1]
        return registered // self.slot_bytes

    def _change(self, num_slots: int) -> None:
        wanted = round_up(num_slots * self.slot_bytes, PAGE_BYTES)
        self._end_doubt()
        if wanted > self.nbytes:
            self._map(wanted)
        self._unregister_unlike(wanted)
        self._register_up_to(wanted)
        if wanted < self.nbytes:
            uninterrupted(partial(self._cut, wanted))

    def _map(self, wanted: int) -> None:
        """Grow the mapping, in place if possible. Before it moves, all of it is unregistered."""
        old = self.nbytes
        uninterrupted(partial(self._extend, wanted))
        if self.nbytes < wanted:
            self._unregister_unlike(0)
            uninterrupted(partial(self._move, wanted))
        populate_range(self.base + old, wanted - old, self._threads)

    def _extend(self, wanted: int) -> None:
        """Make or grow the mapping without moving it, if that is possible."""
        if self.nbytes == 0:
            self.base = map_range(wanted + PAGE_BYTES)
            self.nbytes = wanted
        elif resize_range(self.base, self.nbytes + PAGE_BYTES, wanted + PAGE_BYTES, may_move=False) != 0:
            self.nbytes = wanted

    def _move(self, wanted: int) -> None:
        """Grow the mapping. It may move."""
        moved = resize_range(self.base, self.nbytes + PAGE_BYTES, wanted + PAGE_BYTES, may_move=True)
        if moved == 0:
            raise OutOfMemoryError(
                f"host memory cannot grow from {format_bytes(self.nbytes)} to {format_bytes(wanted)}; configure a smaller host tier"
            )
        self.base = moved
        self.nbytes = wanted

    def _cut(self, wanted: int) -> None:
        """Shrink the mapping in place to `wanted` bytes; nothing beyond them is registered."""
        if wanted == 0:
            unmap_range(self.base, self.nbytes + PAGE_BYTES)
            self.base = 0
        elif resize_range(self.base, self.nbytes + PAGE_BYTES, wanted + PAGE_BYTES, may_move=False) == 0:
            raise OutOfMemoryError(f"the operating system refused to shrink {self.nbytes} bytes at {self.base:#x} to {wanted}")
        self.nbytes = wanted

    def _range_at(self, offset: int, end: int) -> int:
        """Bytes of the range that starts at `offset`, if memory is registered up to `end`."""
        return min(self._range_bytes, end - offset)

    def _unregister_unlike(self, end: int) -> None:
        """Unregister the last ranges, as far as they differ from those of memory registered up to `end`."""
        while self.ranges:
            address, nbytes = self.ranges[-1]
            if nbytes == self._range_at(address - self.base, end):
                return
            self._doubtful_bytes = nbytes
            self._unregistering.free(address, partial(self._driver.host_unregister, address, nbytes))
            del self.ranges[-1]
            self._unregistering.done(address)

    def _end_doubt(self) -> None:
        """Unregister a range of which an interrupt may hide that it was registered or unregistered."""
        for address in list(self._unregistering.doubtful):
            self._unregistering.free(address, partial(self._driver.host_unregister, address, self._doubtful_bytes))
            if self.ranges and self.ranges[-1][0] == address:
                del self.ranges[-1]
            self._unregistering.done(address)

    def _register_up_to(self, end: int) -> None:
        """Register further ranges, up to `end`."""
        done = self.registered_bytes
        while done < end:
            nbytes = self._range_at(done, end)
            address = self.base + done
            self._doubtful_bytes = nbytes
            self._unregistering.doubtful.add(address)
            try:
                self._driver.host_register(address, nbytes)
            except Exception as refusal:
                if isinstance(refusal, KVCacheError):
                    self._unregistering.done(address)
                raise HostRegistrationError(self._refused(end, done, nbytes, refusal)) from refusal
            self.ranges.append((address, nbytes))
            self._unregistering.done(address)
            done += nbytes

    def _refused(self, total: int, done: int, nbytes: int, refusal: Exception) -> str:
        limit = memlock_limit()
        found = "unlimited" if limit < 0 else f"{format_bytes(limit)} ({limit} bytes)"
        return (
            f"the device refused to register {format_bytes(nbytes)} of host memory, of {format_bytes(total)} ({total} bytes) "
            f"in all, after {format_bytes(done)}: {refusal}. RLIMIT_MEMLOCK is {found}. "
            "Raise it (`ulimit -l unlimited`, `--ulimit memlock=-1` for a container), configure a smaller host tier, or use "
            "KVCacheManagerConfig.without_tier(CacheTier.HOST_MEM)"
        )

    def _free_all(self) -> None:
        self._end_doubt()
        self._unregister_unlike(0)
        if self.base:
            uninterrupted(partial(self._cut, 0))

    def check_invariants(self) -> None:
        super().check_invariants()
        assert (self.base == 0) == (self.nbytes == 0)
        assert self.num_slots * self.slot_bytes <= self.registered_bytes <= self.nbytes
        offset = 0
        for address, nbytes in self.ranges:
            assert address == self.base + offset, (address, self.base, offset)
            offset += nbytes
