"""Arenas: the memory behind one pool on one level, an array of slots of equal size that can grow and shrink.

Rule: `resize` does all of it or nothing: whatever fails, the arena has its old size, the kept slots their bytes, and nothing is
leaked. Whoever resizes has made sure that no transfer into or out of the arena is in flight.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
from abc import ABC, abstractmethod
from typing import Final

from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.os_memory import (
    PAGE_BYTES,
    default_populate_threads,
    format_bytes,
    map_range,
    memlock_limit,
    populate_range,
    resize_range,
    round_up,
    unmap_range,
)
from kv_cache_manager_v2.errors import ConfigError, HostRegistrationError, LogicError, OutOfMemoryError

REGISTRATION_BYTES: Final = 2 << 30  # most host memory registered by one call: one huge pin stalls the node, or fails


class Arena(ABC):
    """`num_slots` slots of `slot_bytes` each, one after the other."""

    def __init__(self, slot_bytes: int) -> None:
        if slot_bytes <= 0:
            raise ConfigError(f"slot_bytes={slot_bytes}: a slot must have at least one byte")
        self.slot_bytes = slot_bytes
        self.num_slots = 0
        self.closed = False

    @abstractmethod
    def address(self, slot: int) -> int:
        """Where the slot begins: a memory address, or on disk a file offset. O(1)."""

    @abstractmethod
    def _change(self, num_slots: int) -> None:
        """Bring the memory to this many slots, or raise with everything as it was."""

    @abstractmethod
    def _give_back(self) -> None:
        """Free all that the arena holds."""

    def resize(self, num_slots: int) -> None:
        """Grow or shrink to this many slots; slots kept keep their bytes."""
        if self.closed:
            raise LogicError("a closed arena cannot be resized")
        if num_slots < 0:
            raise LogicError(f"an arena cannot have {num_slots} slots")
        if num_slots != self.num_slots:
            self._change(num_slots)
            self.num_slots = num_slots

    def close(self) -> None:
        """Give everything back; a second call does nothing."""
        if not self.closed:
            self.closed = True
            self.num_slots = 0
            self._give_back()

    def check_invariants(self) -> None:
        assert self.num_slots >= 0
        assert not self.closed or self.num_slots == 0


class ChunkPool:
    """Physical device memory in chunks of one size, shared by all device arenas: what one gives back another takes."""

    def __init__(self, driver: Driver, chunk_bytes: int) -> None:
        if chunk_bytes <= 0 or chunk_bytes % driver.granularity():
            raise ConfigError(
                f"chunk_bytes={chunk_bytes}: must be a positive multiple of the device's {driver.granularity()} bytes"
            )
        self.driver = driver
        self.chunk_bytes = chunk_bytes
        self.lent = 0  # chunks that arenas hold
        self._spare: list[int] = []  # handles of chunks that nobody holds

    @property
    def spare(self) -> int:
        return len(self._spare)

    def acquire(self) -> int:
        """A chunk's handle. Raises OutOfMemoryError."""
        chunk = self._spare.pop() if self._spare else self.driver.create_chunk(self.chunk_bytes)
        self.lent += 1
        return chunk

    def give_back(self, chunk: int) -> None:
        """Take back a chunk that is mapped nowhere."""
        assert self.lent > 0
        self.lent -= 1
        self._spare.append(chunk)

    def trim(self) -> None:
        """Free the spare chunks: after a resize nobody wants them soon."""
        while self._spare:
            self.driver.destroy_chunk(self._spare.pop())

    def close(self) -> None:
        """Free the spare chunks; LogicError if arenas still hold some."""
        self.trim()
        if self.lent:
            raise LogicError(f"{self.lent} chunks of {self.chunk_bytes} bytes are still held by device arenas; close these first")


class DeviceArena(Arena):
    """Slots in device memory: one address range reserved for good, backed chunk by chunk, so addresses never move.

    Chunks are mapped like a stack; slots may straddle them. `reserve_bytes` is the most that the arena can ever hold.
    """

    def __init__(self, driver: Driver, chunk_pool: ChunkPool, slot_bytes: int, reserve_bytes: int) -> None:
        super().__init__(slot_bytes)
        self._driver = driver
        self._chunk_pool = chunk_pool
        self._chunks: list[int] = []  # mapped chunks, lowest address first
        self.reserved_bytes = round_up(max(1, reserve_bytes), chunk_pool.chunk_bytes)  # most that the arena can ever hold
        self.base = driver.reserve(self.reserved_bytes)

    @property
    def mapped_bytes(self) -> int:
        return len(self._chunks) * self._chunk_pool.chunk_bytes

    def address(self, slot: int) -> int:
        return self.base + slot * self.slot_bytes

    def _change(self, num_slots: int) -> None:
        wanted = num_slots * self.slot_bytes
        if wanted > self.reserved_bytes:
            raise OutOfMemoryError(
                f"{num_slots} slots of {self.slot_bytes} bytes need {format_bytes(wanted)}, more than the "
                f"{format_bytes(self.reserved_bytes)} of address space reserved for this pool"
            )
        before = len(self._chunks)
        after = -(-wanted // self._chunk_pool.chunk_bytes)
        try:
            while len(self._chunks) < after:
                self._push()
        except Exception:
            while len(self._chunks) > before:
                self._pop()
            raise
        while len(self._chunks) > after:
            self._pop()

    def _push(self) -> None:
        pool = self._chunk_pool
        chunk = pool.acquire()
        where = self.base + len(self._chunks) * pool.chunk_bytes
        try:
            self._driver.map_chunk(where, pool.chunk_bytes, chunk)
        except Exception:
            pool.give_back(chunk)
            raise
        self._chunks.append(chunk)
        try:
            self._driver.set_access(where, pool.chunk_bytes)
        except Exception:
            self._pop()
            raise

    def _pop(self) -> None:
        pool = self._chunk_pool
        self._driver.unmap(self.base + (len(self._chunks) - 1) * pool.chunk_bytes, pool.chunk_bytes)
        pool.give_back(self._chunks.pop())

    def _give_back(self) -> None:
        while self._chunks:
            self._pop()
        self._driver.release_reservation(self.base, self.reserved_bytes)

    def check_invariants(self) -> None:
        super().check_invariants()
        assert self.num_slots * self.slot_bytes <= self.mapped_bytes <= self.reserved_bytes
        assert len(set(self._chunks)) == len(self._chunks)
        assert self._chunk_pool.lent >= len(self._chunks)


class HostArena(Arena):
    """Slots in anonymous host memory, present from the start and registered with the device range by range.

    The base may move when the arena grows. The ranges tile the memory from its base. Each is the largest multiple of both slot and
    page size within `registration_bytes`, so that no slot straddles two of them; where the two sizes have no such multiple, slots
    do straddle.
    """

    def __init__(
        self,
        driver: Driver,
        slot_bytes: int,
        registration_bytes: int = REGISTRATION_BYTES,
        populate_threads: int = -1,
    ) -> None:
        """`populate_threads`: threads that fault the memory in; 0: leave that to the first use; -1: half the processors."""
        super().__init__(slot_bytes)
        if registration_bytes < PAGE_BYTES or registration_bytes % PAGE_BYTES:
            raise ConfigError(f"registration_bytes={registration_bytes}: must be a positive multiple of the page size {PAGE_BYTES}")
        self._driver = driver
        self._threads = default_populate_threads() if populate_threads < 0 else populate_threads
        whole = math.lcm(slot_bytes, PAGE_BYTES)
        self._range_bytes = registration_bytes - registration_bytes % whole if whole <= registration_bytes else registration_bytes
        self.base = 0  # address; 0 while there is no memory
        self.nbytes = 0  # registered bytes, a multiple of the page size; an unregistered guard page follows
        self.ranges: list[tuple[int, int]] = []  # registered (address, bytes), ascending, tiling [base, base + nbytes)

    def address(self, slot: int) -> int:
        return self.base + slot * self.slot_bytes

    def _change(self, num_slots: int) -> None:
        wanted = round_up(num_slots * self.slot_bytes, PAGE_BYTES)
        if wanted > self.nbytes:
            self._grow(wanted)
        elif wanted < self.nbytes:
            self._shrink(wanted)

    def _grow(self, wanted: int) -> None:
        old_base, old_bytes = self.base, self.nbytes
        if old_bytes == 0:
            self.base = map_range(wanted + PAGE_BYTES)
        elif resize_range(old_base, old_bytes + PAGE_BYTES, wanted + PAGE_BYTES, may_move=False) == 0:
            self._unregister_from(0)  # registered memory must not move
            moved = resize_range(old_base, old_bytes + PAGE_BYTES, wanted + PAGE_BYTES, may_move=True)
            if moved == 0:
                self._fall_back_to(old_bytes, old_bytes)
                raise OutOfMemoryError(
                    f"no room to grow host memory from {format_bytes(old_bytes)} to {format_bytes(wanted)}; "
                    "configure a smaller host tier"
                )
            self.base = moved
        try:
            populate_range(self.base + old_bytes, wanted - old_bytes, self._threads)
            self._unregister_from(old_bytes - old_bytes % self._range_bytes)  # the last range may be a partial one
            self._register_up_to(wanted)
        except Exception:
            self._fall_back_to(wanted, old_bytes)
            raise
        self.nbytes = wanted

    def _shrink(self, wanted: int) -> None:
        old_bytes = self.nbytes
        self._unregister_from(wanted - wanted % self._range_bytes)
        try:
            self._register_up_to(wanted)
        except Exception:
            self._fall_back_to(old_bytes, old_bytes)
            raise
        self._resize_mapping(old_bytes, wanted)
        self.nbytes = wanted

    def _fall_back_to(self, now: int, before: int) -> None:
        """Undo: the mapping has `now` bytes and shall have, and have registered, `before`. If even that is refused the arena is
        empty: memory that the device does not know is of no use."""
        self._unregister_from(before - before % self._range_bytes)
        try:
            self._register_up_to(before)
        except Exception:
            self._unregister_from(0)
            self._resize_mapping(now, 0)
            self.nbytes = 0
            self.num_slots = 0
            raise
        self._resize_mapping(now, before)

    def _resize_mapping(self, now: int, wanted: int) -> None:
        """Cut the mapping to `wanted` bytes; nothing registered lies beyond. Cutting never fails and never moves."""
        if wanted == 0:
            unmap_range(self.base, now + PAGE_BYTES)
            self.base = 0
        elif wanted < now and resize_range(self.base, now + PAGE_BYTES, wanted + PAGE_BYTES, may_move=False) == 0:
            raise LogicError(f"the operating system refused to cut {now} bytes at {self.base:#x} to {wanted}")

    def _register_up_to(self, end: int) -> None:
        """Register [what is registered, end) in ranges that tile from the base; on failure those of this call are given back."""
        done = self.ranges[-1][0] + self.ranges[-1][1] - self.base if self.ranges else 0
        first = done
        while done < end:
            nbytes = min(self._range_bytes - done % self._range_bytes, end - done)
            try:
                self._driver.host_register(self.base + done, nbytes)
            except Exception as refusal:
                self._unregister_from(first)
                raise HostRegistrationError(self._refused(end, done, nbytes, refusal)) from refusal
            self.ranges.append((self.base + done, nbytes))
            done += nbytes

    def _unregister_from(self, offset: int) -> None:
        """Unregister every range that begins at the offset or behind it, last first."""
        while self.ranges and self.ranges[-1][0] - self.base >= offset:
            address, nbytes = self.ranges.pop()
            self._driver.host_unregister(address, nbytes)

    def _refused(self, total: int, done: int, nbytes: int, refusal: Exception) -> str:
        limit = memlock_limit()
        found = "unlimited" if limit < 0 else f"{format_bytes(limit)} ({limit} bytes)"
        return (
            f"the device refused to register {format_bytes(nbytes)} of host memory, of {format_bytes(total)} ({total} bytes) "
            f"in all, {format_bytes(done)} being registered: {refusal}. RLIMIT_MEMLOCK is {found}. "
            "Raise it (`ulimit -l unlimited`, `--ulimit memlock=-1` for a container), configure a smaller host tier, or use "
            "KVCacheManagerConfig.without_tier(CacheTier.HOST_MEM)"
        )

    def _give_back(self) -> None:
        self._unregister_from(0)
        if self.base:
            self._resize_mapping(self.nbytes, 0)
        self.nbytes = 0

    def check_invariants(self) -> None:
        super().check_invariants()
        assert self.nbytes == round_up(self.num_slots * self.slot_bytes, PAGE_BYTES)
        assert (self.base == 0) == (self.nbytes == 0)
        offset = 0
        for address, nbytes in self.ranges:
            assert address == self.base + offset, (address, self.base, offset)
            assert nbytes == min(self._range_bytes, self.nbytes - offset)
            offset += nbytes
        assert offset == self.nbytes


class DiskArena(Arena):
    """Slots in a file without a name under a directory: its space is allocated up front, and it is gone with the process."""

    def __init__(self, slot_bytes: int, path: str) -> None:
        super().__init__(slot_bytes)
        self.path = path
        self.fd = _open_unnamed(path)

    def address(self, slot: int) -> int:
        return slot * self.slot_bytes

    def _change(self, num_slots: int) -> None:
        old, new = self.num_slots * self.slot_bytes, num_slots * self.slot_bytes
        if new < old:
            os.ftruncate(self.fd, new)
            return
        system = os.fstatvfs(self.fd)
        space = system.f_bavail * system.f_frsize
        if new - old > space:  # asked first: an allocation that must fail would fill the disk before it does
            raise OutOfMemoryError(self._full(new, f"{format_bytes(space)} are free"))
        try:
            os.posix_fallocate(self.fd, old, new - old)
        except OSError as error:
            os.ftruncate(self.fd, old)
            raise OutOfMemoryError(self._full(new, f"{error.strerror} (errno {error.errno})")) from error

    def _full(self, nbytes: int, why: str) -> str:
        return (
            f"no room for {format_bytes(nbytes)} ({nbytes} bytes) under {self.path!r}: {why}; "
            "configure a smaller disk tier or another path"
        )

    def _give_back(self) -> None:
        os.close(self.fd)
        self.fd = -1

    def check_invariants(self) -> None:
        super().check_invariants()
        assert (self.fd < 0) == self.closed
        assert self.closed or os.fstat(self.fd).st_size == self.num_slots * self.slot_bytes


def _open_unnamed(path: str) -> int:
    """A descriptor of a new file without a name in a directory. Raises ConfigError if the directory cannot have one."""
    if not os.path.exists(path):
        raise ConfigError(f"disk tier path {path!r} does not exist; create the directory or configure another one")
    if not os.path.isdir(path):
        raise ConfigError(f"disk tier path {path!r} is not a directory; configure a directory")
    try:
        return os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):  # all say: not known here
            raise ConfigError(_unwritable(path, error)) from error
    try:
        fd, name = tempfile.mkstemp(prefix="kvcm-", dir=path)
    except OSError as error:
        raise ConfigError(_unwritable(path, error)) from error
    os.unlink(name)
    return fd


def _unwritable(path: str, error: OSError) -> str:
    return (
        f"disk tier path {path!r} cannot hold files: {error.strerror} (errno {error.errno}); "
        "make it writable or configure another one"
    )
