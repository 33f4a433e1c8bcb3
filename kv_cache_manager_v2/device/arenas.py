"""Arenas: the memory of one pool on one level, an array of equal slots that can grow and shrink.

A `resize` that fails restores the old size. If the device refuses that too, `num_slots` falls to the slots that still have memory;
these keep their bytes. Memory that cannot be freed stays accounted for, and the next `resize` or `close` tries again. The caller
ensures that no transfer of the arena is in flight.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import tempfile
from abc import ABC, abstractmethod
from typing import Final

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.device.checksums import FileChecksums
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

_log: Final = logging.getLogger(__name__)

REGISTRATION_BYTES: Final = 2 << 30  # most host memory in one registration: pinning more at once can stall the machine or fail


@mypyc_attr(allow_interpreted_subclasses=True)
class Arena(ABC):
    """`num_slots` contiguous slots of `slot_bytes` each."""

    def __init__(self, slot_bytes: int) -> None:
        if slot_bytes <= 0:
            raise ConfigError(f"slot_bytes={slot_bytes}: a slot must have at least one byte")
        self.slot_bytes = slot_bytes
        self.num_slots = 0
        self.closed = False
        self.fd = -1  # the file that holds the slots; -1: they are in memory
        self.disturbs_all = True  # a resize may move or register again the memory of slots that remain

    @abstractmethod
    def address(self, slot: int) -> int:
        """The start of a slot: a memory address, or a file offset on disk. O(1)."""

    @abstractmethod
    def _change(self, num_slots: int) -> None:
        """Grow or shrink the memory to this many slots. An earlier error may have left it at any size."""

    @abstractmethod
    def _usable(self) -> int:
        """Slots whose memory the device can use."""

    @abstractmethod
    def _free_all(self) -> None:
        """Free all memory. After an error it can be called again."""

    def most_slots(self) -> int:
        """The most slots that the arena can have; -1: no bound."""
        return -1

    def resize(self, num_slots: int) -> None:
        """Grow or shrink to this many slots; the remaining ones keep their bytes.

        After an error the arena has its old size, or fewer slots if their memory could not be restored.
        """
        if self.closed:
            raise LogicError("a closed arena cannot be resized")
        if num_slots < 0:
            raise LogicError(f"an arena cannot have {num_slots} slots")
        before = self.num_slots
        try:
            self._change(num_slots)
        except BaseException:
            self._regain(before)
            raise
        self.num_slots = num_slots

    def _regain(self, before: int) -> None:
        """After a failed change, restore the old size; if that fails, keep the slots that still have memory."""
        try:
            self._change(before)
        except BaseException as error:  # the caller raises the first error
            self.num_slots = min(before, self._usable())
            _log.error("a failed resize lost memory: a pool has %d of its %d slots left: %r", self.num_slots, before, error)

    def close(self) -> None:
        """Free everything. A second call does nothing; after an error it tries again."""
        if not self.closed:
            self.num_slots = 0
            self._free_all()
            self.closed = True

    def check_invariants(self) -> None:
        assert self.num_slots >= 0
        assert not self.closed or self.num_slots == 0


class ChunkPool:
    """Physical device memory in chunks of one size. All device arenas share it, so that one reuses what another frees."""

    def __init__(self, driver: Driver, chunk_bytes: int) -> None:
        if chunk_bytes <= 0 or chunk_bytes % driver.granularity():
            raise ConfigError(
                f"chunk_bytes={chunk_bytes}: must be a positive multiple of the device's {driver.granularity()} bytes"
            )
        self.driver = driver
        self.chunk_bytes = chunk_bytes
        self.in_use = 0  # chunks that arenas have
        self._spare: list[int] = []  # handles of chunks that no arena has

    @property
    def spare(self) -> int:
        return len(self._spare)

    def acquire(self) -> int:
        """A chunk's handle. Raises OutOfMemoryError."""
        chunk = self._spare.pop() if self._spare else self.driver.create_chunk(self.chunk_bytes)
        self.in_use += 1
        return chunk

    def free(self, chunk: int) -> None:
        """Make an unmapped chunk available to other arenas."""
        assert self.in_use > 0
        self.in_use -= 1
        self._spare.append(chunk)

    def trim(self) -> None:
        """Return the spare chunks to the device: after a resize they are not needed soon."""
        while self._spare:
            self.driver.destroy_chunk(self._spare[-1])
            self._spare.pop()

    def close(self) -> None:
        """Return the spare chunks to the device. Raises LogicError if arenas still have chunks."""
        self.trim()
        if self.in_use:
            raise LogicError(f"device arenas still have {self.in_use} chunks of {self.chunk_bytes} bytes; close the arenas first")


class DeviceArena(Arena):
    """Slots in device memory. One reserved address range is backed chunk by chunk, so addresses never change.

    Chunks are mapped from the lowest address up; a slot may span two of them. `reserve_bytes` bounds the arena's size for good.
    """

    def __init__(self, driver: Driver, chunk_pool: ChunkPool, slot_bytes: int, reserve_bytes: int) -> None:
        super().__init__(slot_bytes)
        self.disturbs_all = False
        self._driver = driver
        self._chunk_pool = chunk_pool
        self._chunks: list[int] = []  # mapped chunks, lowest address first
        self._accessible = 0  # how many of the first chunks the device may read and write
        self.reserved_bytes = round_up(max(1, reserve_bytes), chunk_pool.chunk_bytes)  # upper bound of the arena's size
        self.base = driver.reserve(self.reserved_bytes)  # 0 once the range is released

    @property
    def mapped_bytes(self) -> int:
        return len(self._chunks) * self._chunk_pool.chunk_bytes

    def address(self, slot: int) -> int:
        return self.base + slot * self.slot_bytes

    def most_slots(self) -> int:
        return self.reserved_bytes // self.slot_bytes

    def _usable(self) -> int:
        return self._accessible * self._chunk_pool.chunk_bytes // self.slot_bytes

    def _change(self, num_slots: int) -> None:
        wanted = num_slots * self.slot_bytes
        if wanted > self.reserved_bytes:
            raise OutOfMemoryError(
                f"{num_slots} slots of {self.slot_bytes} bytes need {format_bytes(wanted)}, more than the "
                f"{format_bytes(self.reserved_bytes)} of address space reserved for this pool"
            )
        after = -(-wanted // self._chunk_pool.chunk_bytes)
        while self._accessible < after:
            if len(self._chunks) == self._accessible:
                self._map_chunk()
            self._driver.set_access(self._address_of(self._accessible), self._chunk_pool.chunk_bytes)
            self._accessible += 1
        while len(self._chunks) > after:
            self._unmap_chunk()

    def _address_of(self, chunk: int) -> int:
        return self.base + chunk * self._chunk_pool.chunk_bytes

    def _map_chunk(self) -> None:
        pool = self._chunk_pool
        chunk = pool.acquire()
        try:
            self._driver.map_chunk(self._address_of(len(self._chunks)), pool.chunk_bytes, chunk)
        except BaseException:
            pool.free(chunk)
            raise
        self._chunks.append(chunk)

    def _unmap_chunk(self) -> None:
        last = len(self._chunks) - 1
        self._driver.unmap(self._address_of(last), self._chunk_pool.chunk_bytes)
        self._accessible = min(self._accessible, last)
        self._chunk_pool.free(self._chunks.pop())

    def _free_all(self) -> None:
        while self._chunks:
            self._unmap_chunk()
        if self.base:
            self._driver.release_reservation(self.base, self.reserved_bytes)
            self.base = 0

    def check_invariants(self) -> None:
        super().check_invariants()
        assert self._accessible <= len(self._chunks)
        assert self.num_slots * self.slot_bytes <= self.mapped_bytes <= self.reserved_bytes
        assert self.num_slots <= self._usable()
        assert len(set(self._chunks)) == len(self._chunks)
        assert self._chunk_pool.in_use >= len(self._chunks)


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

    def address(self, slot: int) -> int:
        return self.base + slot * self.slot_bytes

    @property
    def registered_bytes(self) -> int:
        return self.ranges[-1][0] + self.ranges[-1][1] - self.base if self.ranges else 0

    def _usable(self) -> int:
        return self.registered_bytes // self.slot_bytes

    def _change(self, num_slots: int) -> None:
        wanted = round_up(num_slots * self.slot_bytes, PAGE_BYTES)
        if wanted > self.nbytes:
            self._map(wanted)
        self._unregister_unlike(wanted)
        self._register_up_to(wanted)
        if wanted < self.nbytes:
            self._cut(wanted)

    def _map(self, wanted: int) -> None:
        """Grow the mapping, in place if possible. Before it moves, all of it is unregistered."""
        old = self.nbytes
        if old == 0:
            self.base = map_range(wanted + PAGE_BYTES)
        elif resize_range(self.base, old + PAGE_BYTES, wanted + PAGE_BYTES, may_move=False) == 0:
            self._unregister_unlike(0)
            moved = resize_range(self.base, old + PAGE_BYTES, wanted + PAGE_BYTES, may_move=True)
            if moved == 0:
                raise OutOfMemoryError(
                    f"host memory cannot grow from {format_bytes(old)} to {format_bytes(wanted)}; configure a smaller host tier"
                )
            self.base = moved
        self.nbytes = wanted
        populate_range(self.base + old, wanted - old, self._threads)

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
            self._driver.host_unregister(address, nbytes)
            self.ranges.pop()

    def _register_up_to(self, end: int) -> None:
        """Register further ranges, up to `end`."""
        done = self.registered_bytes
        while done < end:
            nbytes = self._range_at(done, end)
            try:
                self._driver.host_register(self.base + done, nbytes)
            except Exception as refusal:
                raise HostRegistrationError(self._refused(end, done, nbytes, refusal)) from refusal
            self.ranges.append((self.base + done, nbytes))
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
        self._unregister_unlike(0)
        if self.base:
            self._cut(0)

    def check_invariants(self) -> None:
        super().check_invariants()
        assert (self.base == 0) == (self.nbytes == 0)
        assert self.num_slots * self.slot_bytes <= self.registered_bytes <= self.nbytes
        offset = 0
        for address, nbytes in self.ranges:
            assert address == self.base + offset, (address, self.base, offset)
            offset += nbytes


class DiskArena(Arena):
    """Slots in an unnamed file, allocated in full when the arena grows. The file disappears with the process."""

    def __init__(self, slot_bytes: int, path: str) -> None:
        super().__init__(slot_bytes)
        self.disturbs_all = False
        self.path = path
        self.fd = _open_unnamed(path)
        self.checksums: FileChecksums | None = None  # None: its bytes are not checked
        self._driver: Driver | None = None  # that makes and compares them

    def protect(self, driver: Driver) -> None:
        """Let file transfers make and compare checksums from now on. The arena has no slots yet."""
        checksums = FileChecksums(self.slot_bytes)
        if driver.protect_file(self.fd, checksums):
            self.checksums = checksums
            self._driver = driver
        else:
            _log.warning("this driver makes no checksums, pages on disk are not checked: %s", driver.describe())

    def address(self, slot: int) -> int:
        return slot * self.slot_bytes

    def _usable(self) -> int:
        return os.fstat(self.fd).st_size // self.slot_bytes

    def _change(self, num_slots: int) -> None:
        self._change_file(num_slots)
        if self.checksums is not None:
            self.checksums.resize(num_slots)

    def _change_file(self, num_slots: int) -> None:
        old, new = os.fstat(self.fd).st_size, num_slots * self.slot_bytes
        if new <= old:
            try:
                os.ftruncate(self.fd, new)
            except OSError as error:
                why = f"{error.strerror} (errno {error.errno})"
                raise OutOfMemoryError(f"a file under {self.path!r} cannot be shrunk: {why}") from error
            return
        system = os.fstatvfs(self.fd)
        space = system.f_bavail * system.f_frsize
        if new - old > space:  # checked first: an allocation that fails may fill the disk before it does
            raise OutOfMemoryError(self._full(new, f"{format_bytes(space)} are free"))
        try:
            os.posix_fallocate(self.fd, old, new - old)
        except OSError as error:
            raise OutOfMemoryError(self._full(new, f"{error.strerror} (errno {error.errno})")) from error

    def _full(self, nbytes: int, why: str) -> str:
        return (
            f"no space for {format_bytes(nbytes)} ({nbytes} bytes) under {self.path!r}: {why}; "
            "configure a smaller disk tier or another path"
        )

    def _free_all(self) -> None:
        fd = self.fd
        if self._driver is not None:
            self._driver.unprotect_file(fd)
            self._driver = None
        self.fd = -1  # the system frees the descriptor even if close() reports an error
        if fd >= 0:
            os.close(fd)

    def check_invariants(self) -> None:
        super().check_invariants()
        assert (self.fd < 0) == self.closed
        assert self.closed or os.fstat(self.fd).st_size >= self.num_slots * self.slot_bytes


def _open_unnamed(path: str) -> int:
    """The descriptor of a new unnamed file in a directory. Raises ConfigError if that is impossible."""
    if not os.path.exists(path):
        raise ConfigError(f"disk tier path {path!r} does not exist; create the directory or configure another one")
    if not os.path.isdir(path):
        raise ConfigError(f"disk tier path {path!r} is not a directory; configure a directory")
    try:
        return os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):  # all mean: not supported
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
