"""Checksums of a file of slots, XXH3 with 64 bits: made when bytes are written, compared when they are read.

Rule: a read ends without an error only if its bytes have the checksum of the bytes that were written there last. The sums are in
memory, 9 bytes for each extent, because the files do not outlive the process.

The file is divided into extents: a slot, or EXTENT_BYTES of a larger one. A file transfer moves whole extents, one by one. Each is
summed after it was read or written, while the processor's caches hold its bytes. A write invalidates its sums first, so that what a
failed write has left cannot be read.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from typing import Final

from mypy_extensions import mypyc_attr
from xxhash import xxh3_64_intdigest

EXTENT_BYTES: Final = 256 << 10  # so much stays in a processor's own cache between the transfer and the sum

FileMover = Callable[[int, int, int, int, bool], str]  # fd, offset, address, nbytes, writes; what went wrong, empty for nothing


@mypyc_attr(allow_interpreted_subclasses=True)
class FileChecksums:
    """The checksums of one file of slots. Different threads may move different extents at the same time."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.extent_bytes = min(EXTENT_BYTES, slot_bytes)
        self._extents_per_slot = -(-slot_bytes // self.extent_bytes)
        self._sums = array("Q")  # by extent
        self._known = bytearray()  # by extent; 1: its bytes were written whole and have this sum

    def resize(self, num_slots: int) -> None:
        """Adjust to the file's new number of slots. No transfer is in flight."""
        extents = num_slots * self._extents_per_slot
        more = extents - len(self._known)
        if more > 0:
            self._sums.frombytes(bytes(8 * more))
            self._known += bytes(more)
        else:
            del self._sums[extents:]
            del self._known[extents:]

    def move(self, mover: FileMover, fd: int, offset: int, address: int, nbytes: int, writes: bool) -> str:
        """Move a range of whole extents between file and memory; blocks. Returns what went wrong, empty for nothing.

        O(nbytes). A sum that differs is an error, and then the bytes in memory are not those that were written.
        """
        extents = self._cut(offset, nbytes)
        if extents is None:
            return f"not whole extents of {self.extent_bytes} bytes in slots of {self.slot_bytes} bytes, so it has no checksum"
        if writes:
            self._invalidate(extents)
        beg = offset
        for extent in extents:
            end = self._end_of(beg)
            part = address + beg - offset
            if writes:
                error = self._write(mover, fd, beg, end, part, extent)
            else:
                error = self._read(mover, fd, beg, end, part, extent)
            if error:
                return error
            beg = end
        return ""

    def invalidate(self, offset: int, nbytes: int) -> None:
        """Bytes of this range may have been overwritten: no extent of it can be read before it is written again."""
        if nbytes > 0:
            first = self._index(offset)
            last = min(self._index(offset + nbytes - 1), len(self._known) - 1)
            self._invalidate(range(first, last + 1))

    # --- inside

    def _index(self, offset: int) -> int:
        """The extent of a file offset."""
        slot = offset // self.slot_bytes
        return slot * self._extents_per_slot + (offset - slot * self.slot_bytes) // self.extent_bytes

    def _end_of(self, beg: int) -> int:
        """Where the extent that begins at a file offset ends."""
        slot_end = (beg // self.slot_bytes + 1) * self.slot_bytes
        return min(beg + self.extent_bytes, slot_end)

    def _cut(self, offset: int, nbytes: int) -> range | None:
        """The extents of a range; None if it is not whole extents of the file."""
        if nbytes <= 0:
            return range(0)
        end = offset + nbytes
        last = self._index(end - 1)
        whole = offset % self.slot_bytes % self.extent_bytes == 0
        whole = whole and (end % self.slot_bytes == 0 or end % self.slot_bytes % self.extent_bytes == 0)
        return range(self._index(offset), last + 1) if whole and last < len(self._known) else None

    def _invalidate(self, extents: range) -> None:
        for extent in extents:
            self._known[extent] = 0

    def _sum(self, address: int, nbytes: int) -> int:
        return xxh3_64_intdigest(memoryview((ctypes.c_char * nbytes).from_address(address)))

    def _write(self, mover: FileMover, fd: int, beg: int, end: int, address: int, extent: int) -> str:
        error = mover(fd, beg, address, end - beg, True)
        if not error:
            self._sums[extent] = self._sum(address, end - beg)
            self._known[extent] = 1
        return error

    def _read(self, mover: FileMover, fd: int, beg: int, end: int, address: int, extent: int) -> str:
        if self._known[extent] == 0:
            return f"bytes {beg} to {end} of the file have no checksum: their last write failed, or there was none"
        error = mover(fd, beg, address, end - beg, False)
        if error:
            return error
        found = self._sum(address, end - beg)
        wanted = self._sums[extent]
        if found == wanted:
            return ""
        return (
            f"bytes {beg} to {end} of the file are damaged: the checksum of what was read is {found:#018x}, "
            f"of what was written {wanted:#018x}"
        )
