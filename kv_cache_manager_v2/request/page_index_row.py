"""Page-index rows, in which the engine reads the base page index of each block.

Rule: an entry is the slot id of a page that the ACTIVE request has locked, and BAD_PAGE_INDEX in every other case.

A view of a row's own array (numpy, memoryview, torch) never blocks the request. Entries change in place, and a view shows the
changes. If the number of blocks changes while a view exists, the row moves to a new array; the view stays valid and keeps the old
entries. A view is up to date if `version` has not changed since it was taken.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Final, cast

from kv_cache_manager_v2.buffers import writable_integers
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX

_BIG_ENDIAN: Final = sys.byteorder == "big"
_BAD_RUN: Final = array("i", [BAD_PAGE_INDEX]) * 256  # slicing it is cheaper than making a new array


def bad_run(length: int) -> array[int]:
    """`length` BAD entries."""
    if length <= 256:
        return _BAD_RUN[:length]
    return array("i", [BAD_PAGE_INDEX]) * length


def entries_of(words: bytes) -> array[int]:
    """Entries from little-endian words of 32 bits."""
    entries = array("i", words)
    if _BIG_ENDIAN:
        entries.byteswap()
    return entries


class TableEntries:
    """How one batch table shows page indices, and the number of changes of all its rows."""

    def __init__(self, pad: int, offset: int, code: str) -> None:
        self.version = 0
        self.pad = pad  # stands for BAD_PAGE_INDEX, and after the last block
        self.offset = offset  # added to a base page index
        self.code = code  # "i" for int32, "q" for int64
        self.plain = pad == BAD_PAGE_INDEX and offset == 0 and code == "i"  # entries are base page indices

    def shown(self, index: int) -> int:
        """The entry for a base page index."""
        return self.pad if index < 0 else index + self.offset

    def shown_all(self, indices: array[int], count: int) -> array[int]:
        """`count` entries: for base page indices, then padding."""
        entries = array("q" if self.code == "q" else "i", [self.shown(index) for index in indices])
        entries.extend([self.pad] * (count - len(entries)))
        return entries


class PageIndexRow:
    """Base page indices of one life cycle and beam, in the row's own array or in a buffer of the engine.

    The own array has exactly one entry per block. A buffer may be longer: entries after the last block are BAD_PAGE_INDEX.
    A row of a batch table is a buffer if the table shows base page indices; else the table has a mirror of the own array.
    """

    def __init__(self) -> None:
        self.own: array[int] = array("i")  # one entry per block; empty while a buffer is attached
        self.buffer: memoryview[int] | None = None  # the attached buffer, as 32-bit ints
        self.attached: object = None  # the object that the engine passed as the buffer
        self.table: TableEntries | None = None  # of the batch table in which this is a row; None if it is in none
        self.mirror: memoryview[int] | None = None  # the row of a table with other entries
        self.length = 0  # blocks
        self.version = 0  # changes exactly when an entry, the number of blocks or the array changes

    def live(self) -> Sequence[int]:
        """The array in use: the engine's buffer, or the row's own."""
        return cast("Sequence[int]", self.attached) if self.buffer is not None else self.own

    def _changed(self, first: int, after: int) -> None:
        """Entries first .. after - 1 have changed, or have come or gone."""
        self.version += 1
        if self.table is not None:
            self.table.version += 1
            if self.mirror is not None:
                self._show(self.table, self.mirror, first, after)

    def _show(self, table: TableEntries, mirror: memoryview[int], first: int, after: int) -> None:
        if after - first == 1 and first < self.length:
            mirror[first] = table.shown(self.own[first])
        else:
            mirror[first:after] = memoryview(table.shown_all(self.own[first:after], after - first))

    def check_mirror(self) -> None:
        """Assert that the row of a batch table shows the entries of this one."""
        if self.mirror is not None and self.table is not None:
            assert self.mirror == memoryview(self.table.shown_all(self.own, len(self.mirror)))

    def set(self, ordinal: int, value: int) -> None:
        """Change one entry."""
        buffer = self.buffer
        if buffer is None:
            if self.own[ordinal] == value:
                return
            self.own[ordinal] = value
        else:
            if buffer[ordinal] == value:
                return
            buffer[ordinal] = value
        self._changed(ordinal, ordinal + 1)

    def append(self, value: int) -> None:
        """Append a block. The caller has checked `max_blocks`."""
        buffer = self.buffer
        if buffer is None:
            try:
                self.own.append(value)
            except BufferError:  # a view exists
                self.own = self.own + array("i", [value])
        else:
            buffer[self.length] = value
        self.length += 1
        self._changed(self.length - 1, self.length)

    def extend(self, values: array[int]) -> None:
        """Append blocks. The caller has checked `max_blocks`."""
        if not values:
            return
        buffer = self.buffer
        if buffer is None:
            try:
                self.own.extend(values)
            except BufferError:
                self.own = self.own + values
        else:
            buffer[self.length : self.length + len(values)] = memoryview(values)
        self.length += len(values)
        self._changed(self.length - len(values), self.length)

    def truncate(self, length: int) -> None:
        """Remove the blocks from `length` on. A buffer gets BAD_PAGE_INDEX there."""
        if length >= self.length:
            return
        buffer = self.buffer
        if buffer is None:
            try:
                del self.own[length:]
            except BufferError:
                self.own = self.own[:length]
        else:
            buffer[length : self.length] = memoryview(bad_run(self.length - length))
        before = self.length
        self.length = length
        self._changed(length, before)

    def fill(self, values: array[int]) -> None:
        """Replace all entries by `values`, one per block. O(blocks)."""
        if len(values) != self.length:
            self.truncate(len(values))
            self.extend(bad_run(len(values) - self.length))
        buffer = self.buffer
        if buffer is None:
            if self.own == values:
                return
            self.own[:] = values
        else:
            if buffer[: self.length] == memoryview(values):
                return
            buffer[: self.length] = memoryview(values)
        self._changed(0, self.length)

    def blank(self) -> None:
        """Set all entries to BAD_PAGE_INDEX."""
        self.fill(bad_run(self.length))

    def blank_range(self, start: int, end: int) -> None:
        """Set the entries of blocks start .. end - 1 to BAD_PAGE_INDEX."""
        end = min(end, self.length)
        if end - start == 1:
            self.set(start, BAD_PAGE_INDEX)
        elif start < end:
            self._blank_several(start, end)

    def _blank_several(self, start: int, end: int) -> None:
        blanks = bad_run(end - start)
        buffer = self.buffer
        if buffer is None:
            if self.own[start:end] == blanks:
                return
            self.own[start:end] = blanks
        else:
            if buffer[start:end] == memoryview(blanks):
                return
            buffer[start:end] = memoryview(blanks)
        self._changed(start, end)

    def values(self) -> array[int]:
        """A copy of the entries, one per block."""
        buffer = self.buffer
        if buffer is None:
            return self.own[:]
        return array("i", buffer[: self.length])

    def is_fixed(self) -> bool:
        """Whether the number of blocks is limited."""
        return self.buffer is not None or self.mirror is not None

    def max_blocks(self) -> int:
        """How many blocks the array can hold; a huge number for the row's own array, which can grow."""
        fixed = self.buffer if self.mirror is None else self.mirror
        return len(fixed) if fixed is not None else 1 << 62

    def attach(self, target: object) -> None:
        """Use the engine's buffer: writable, contiguous, one-dimensional int32 memory with an entry for every block.

        Accepts any object with the buffer protocol, and torch tensors in host memory. Raises ConfigError before anything changes.
        """
        view = writable_integers(target, "page-index buffer", "i")
        if self.table is not None:
            raise ConfigError("page-index buffer: this cache has a row of a batch table; remove it there first")
        if len(view) < self.length:
            raise ConfigError(f"page-index buffer too short: {len(view)} entries for {self.length} blocks; pass a longer one")
        values = self.values()
        self.detach()
        view[: self.length] = memoryview(values)
        view[self.length :] = memoryview(bad_run(len(view) - self.length))
        self.own = array("i")
        self.buffer = view
        self.attached = target
        self._changed(0, self.length)

    def detach(self) -> None:
        """Use the row's own array again. The engine's buffer keeps its entries and is not written any more.

        Does nothing for a row of a batch table, which stays in it.
        """
        if self.buffer is None or self.table is not None:
            return
        self.own = self.values()
        self.buffer.release()
        self.buffer = None
        self.attached = None
        self._changed(0, self.length)

    def join(self, view: memoryview[int], table: TableEntries) -> None:
        """Use a row of a batch table. The caller has checked that it is long enough."""
        values = self.values()
        self.detach()
        if not table.plain:
            self.mirror = view
            self.table = table
            table.version += 1
            self._show(table, view, 0, len(view))
            return
        view[: self.length] = memoryview(values)
        view[self.length :] = memoryview(bad_run(len(view) - self.length))
        self.own = array("i")
        self.buffer = view
        self.attached = view
        self.table = table
        self._changed(0, self.length)

    def leave(self) -> None:
        """Use the row's own array again. The row of the batch table gets BAD_PAGE_INDEX, or what stands for it."""
        table, mirror, buffer = self.table, self.mirror, self.buffer
        assert table is not None
        if mirror is not None:
            mirror[:] = memoryview(table.shown_all(bad_run(0), len(mirror)))
            table.version += 1
            self.mirror = None
            self.table = None
            return
        assert buffer is not None
        self.own = self.values()
        buffer[: self.length] = memoryview(bad_run(self.length))
        self._changed(0, self.length)
        self.table = None
        self.buffer = None
        self.attached = None
