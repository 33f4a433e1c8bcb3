"""Page-index rows: where the engine reads the base page index of each block.

Rule: an entry is the slot id of a page that the running request has locked, and BAD_PAGE_INDEX in every other case, so that an
index that can be read is an index that may be used.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Final, cast

from librt.strings import BytesWriter, write_i32_le
from mypy_extensions import i32

from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX

_BIG_ENDIAN: Final = sys.byteorder == "big"
_BAD_RUN: Final = array("i", [BAD_PAGE_INDEX]) * 256  # source of slices for blanking without building lists


def bad_run(length: int) -> array[int]:
    """`length` BAD entries."""
    if length <= 256:
        return _BAD_RUN[:length]
    return array("i", [BAD_PAGE_INDEX]) * length


class SlotWriter:
    """Entries of a row, written one after the other: word by word into bytes, since compiled code has no faster way to an array."""

    def __init__(self) -> None:
        self._words = BytesWriter()

    def add(self, value: int) -> None:
        write_i32_le(self._words, i32(value))

    def values(self) -> array[int]:
        entries = array("i", self._words.getvalue())
        if _BIG_ENDIAN:
            entries.byteswap()
        return entries


class PageIndexRow:
    """Base page indices of one life cycle and beam, in an array of ours or in the engine's own int32 buffer.

    Ours has exactly one entry a block. The engine's may be longer: entries past the last block are BAD.
    """

    def __init__(self) -> None:
        self.own: array[int] = array("i")  # one entry a block; kept up to date only while no buffer is attached
        self.buffer: memoryview[int] | None = None  # the attached buffer, as 32-bit ints
        self.attached: object = None  # the object that the engine passed, which reads give back
        self.length = 0  # blocks

    def live(self) -> Sequence[int]:
        """The object that changes as the request does: the engine's buffer, or our array."""
        return cast("Sequence[int]", self.attached) if self.buffer is not None else self.own

    def set(self, ordinal: int, value: int) -> None:
        buffer = self.buffer
        if buffer is None:
            self.own[ordinal] = value
        else:
            buffer[ordinal] = value

    def append(self, value: int) -> None:
        """One more block. The caller has checked `room`."""
        buffer = self.buffer
        if buffer is None:
            self.own.append(value)
        else:
            buffer[self.length] = value
        self.length += 1

    def extend(self, values: array[int]) -> None:
        """Further blocks. The caller has checked `room`."""
        buffer = self.buffer
        if buffer is None:
            self.own.extend(values)
        else:
            buffer[self.length : self.length + len(values)] = memoryview(values)
        self.length += len(values)

    def truncate(self, length: int) -> None:
        """Forget the blocks from `length` on; a buffer reads BAD there."""
        if length >= self.length:
            return
        buffer = self.buffer
        if buffer is None:
            del self.own[length:]
        else:
            buffer[length : self.length] = memoryview(bad_run(self.length - length))
        self.length = length

    def fill(self, values: array[int]) -> None:
        """Replace all entries by `values`, one a block."""
        buffer = self.buffer
        if buffer is None:
            self.own[:] = values
        else:
            buffer[: len(values)] = memoryview(values)
            if len(values) < self.length:
                buffer[len(values) : self.length] = memoryview(bad_run(self.length - len(values)))
        self.length = len(values)

    def blank(self) -> None:
        """All entries BAD."""
        self.fill(bad_run(self.length))

    def values(self) -> array[int]:
        """A copy of the entries, one a block."""
        buffer = self.buffer
        if buffer is None:
            return self.own[:]
        return array("i", buffer[: self.length])

    def room(self) -> int:
        """Blocks that the row can hold; no limit (a huge number) for our own array."""
        return len(self.buffer) if self.buffer is not None else 1 << 62

    def attach(self, target: object) -> None:
        """Write in place into `target`: a writable, contiguous, one-dimensional buffer of int32 with room for every block.

        Raises ConfigError before anything changes.
        """
        view = _int32_view(target)
        if len(view) < self.length:
            raise ConfigError(f"page-index buffer too short: {len(view)} entries for {self.length} blocks; pass a longer one")
        values = self.values()
        self.detach()
        view[: self.length] = memoryview(values)
        view[self.length :] = memoryview(bad_run(len(view) - self.length))
        self.own = array("i")
        self.buffer = view
        self.attached = target

    def detach(self) -> None:
        """Back to our own array; the engine's memory is left as it is and never written again."""
        if self.buffer is None:
            return
        self.own = self.values()
        self.buffer.release()
        self.buffer = None
        self.attached = None


def _int32_view(target: object) -> memoryview[int]:
    try:
        view = memoryview(target)  # type: ignore[arg-type]  # the point is to find out
    except TypeError:
        raise ConfigError(
            f"a page-index buffer must support the buffer protocol, got {type(target).__name__}: pass an int32 numpy array or an "
            "array('i'); of a torch tensor in host memory, tensor.numpy()"
        ) from None
    if view.format not in ("i", "@i") or view.ndim != 1:
        raise ConfigError(
            f"a page-index buffer must be one-dimensional int32, got format {view.format!r} with {view.ndim} dimensions"
        )
    if view.readonly or not view.c_contiguous:
        raise ConfigError("a page-index buffer must be writable and contiguous")
    return view
