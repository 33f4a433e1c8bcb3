"""Arenas: the memory of one pool on one level, an array of equal slots that can grow and shrink.

A `resize` that fails restores the old size. If the device refuses that too, `num_slots` falls to the slots that still have memory;
these keep their bytes. Memory that cannot be freed stays accounted for, and the next `resize` or `close` tries again. The caller
ensures that no transfer of the arena is in flight.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from abc import ABC, abstractmethod
from functools import partial
from typing import Final

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.device.checksums import FileChecksums
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.freeing import Freeing
from kv_cache_manager_v2.device.os_memory import format_bytes, round_up
from kv_cache_manager_v2.errors import ConfigError, KVCacheError, LogicError, OutOfMemoryError

_log: Final = logging.getLogger(__name__)


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
        self._freeing = Freeing()  # of chunks

    @property
    def spare(self) -> int:
        return len(self._spare)

    def offer(self) -> int:
        """The handle of a spare chunk, which the caller then takes. Raises OutOfMemoryError."""
        while self._spare and self._spare[-1] in self._freeing.doubtful:
            self._destroy_last()
        if not self._spare:
            self._spare.append(self.driver.create_chunk(self.chunk_bytes))
        return self._spare[-1]

    def take(self, chunks: list[int]) -> None:
        """Move the chunk that was offered to an arena's list. No interrupt leaves it in both lists or in none."""
        chunk = self._spare[-1]
        self.in_use += 1
        del self._spare[-1]
        chunks.append(chunk)

    def free(self, chunks: list[int]) -> None:
        """Make the last chunk of an arena's list, which is unmapped, available to other arenas."""
        assert self.in_use > 0
        chunk = chunks[-1]
        self.in_use -= 1
        del chunks[-1]
        self._spare.append(chunk)

    def trim(self) -> None:
        """Return the spare chunks to the device: after a resize they are not needed soon."""
        while self._spare:
            self._destroy_last()

    def _destroy_last(self) -> None:
        chunk = self._spare[-1]
        self._freeing.free(chunk, partial(self.driver.destroy_chunk, chunk))
        del self._spare[-1]
        self._freeing.done(chunk)

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
        self._unmapping = Freeing()  # of chunks at their addresses, also those of which mapping was interrupted
        self._releasing = Freeing()  # of the address range
        self.reserved_bytes = round_up(max(1, reserve_bytes), chunk_pool.chunk_bytes)  # upper bound of the arena's size
        self.base = 0  # address; 0 until the arena first has slots, and once the range is released

    @property
    def mapped_bytes(self) -> int:
        return len(self._chunks) * self._chunk_pool.chunk_bytes

    def address(self, slot: int) -> int:
        return self.base + slot * self.slot_bytes

    def most_slots(self) -> int:
        return self.reserved_bytes // self.slot_bytes

    def _usable(self) -> int:
        accessible = self._accessible
        if self._chunks and self._address_of(len(self._chunks) - 1) in self._unmapping.doubtful:
            accessible = min(accessible, len(self._chunks) - 1)
        return accessible * self._chunk_pool.chunk_bytes // self.slot_bytes

    def _change(self, num_slots: int) -> None:
        wanted = num_slots * self.slot_bytes
        if wanted > self.reserved_bytes:
            raise OutOfMemoryError(
                f"{num_slots} slots of {self.slot_bytes} bytes need {format_bytes(wanted)}, more than the "
                f"{format_bytes(self.reserved_bytes)} of address space reserved for this pool"
            )
        after = -(-wanted // self._chunk_pool.chunk_bytes)
        if self.base == 0 and after > 0:
            self.base = self._driver.reserve(self.reserved_bytes)
        self._end_doubt()
        while self._accessible < after:
            if len(self._chunks) == self._accessible:
                self._map_chunk()
            self._driver.set_access(self._address_of(self._accessible), self._chunk_pool.chunk_bytes)
            self._accessible += 1
        while len(self._chunks) > after:
            self._unmap_chunk()

    def _address_of(self, chunk: int) -> int:
        return self.base + chunk * self._chunk_pool.chunk_bytes

    def _end_doubt(self) -> None:
        """Unmap a chunk of which an interrupt may hide that it was mapped or unmapped: the last one, or one after it."""
        for address in sorted(self._unmapping.doubtful):
            if address < self._address_of(len(self._chunks)):
                self._unmap_chunk()
            else:
                self._unmapping.free(address, partial(self._driver.unmap, address, self._chunk_pool.chunk_bytes))
                self._unmapping.done(address)

    def _map_chunk(self) -> None:
        pool = self._chunk_pool
        chunk = pool.offer()
        address = self._address_of(len(self._chunks))
        self._unmapping.doubtful.add(address)
        try:
            self._driver.map_chunk(address, pool.chunk_bytes, chunk)
        except KVCacheError:
            self._unmapping.done(address)
            raise
        pool.take(self._chunks)
        self._unmapping.done(address)

    def _unmap_chunk(self) -> None:
        last = len(self._chunks) - 1
        address = self._address_of(last)
        self._unmapping.free(address, partial(self._driver.unmap, address, self._chunk_pool.chunk_bytes))
        if self._accessible > last:
            self._accessible = last
        self._chunk_pool.free(self._chunks)
        self._unmapping.done(address)

    def _free_all(self) -> None:
        if self.base == 0:
            return
        self._end_doubt()
        while self._chunks:
            self._unmap_chunk()
        self._releasing.free(self.base, partial(self._driver.release_reservation, self.base, self.reserved_bytes))
        self.base = 0

    def check_invariants(self) -> None:
        super().check_invariants()
        assert self._accessible <= len(self._chunks)
        assert self.num_slots * self.slot_bytes <= self.mapped_bytes <= self.reserved_bytes
        assert self.num_slots <= self._usable()
        assert len(set(self._chunks)) == len(self._chunks)
        assert self._chunk_pool.in_use >= len(self._chunks)


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
