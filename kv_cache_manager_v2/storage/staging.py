"""The staging area: pinned host memory through which bytes pass between the device, or a file, and a file.

Rule: a piece whose last use was a copy or a file write is taken again in stream order. A piece that a file read writes to is taken
again only after the host has seen the read end, because a read that timed out may still write.
"""

from __future__ import annotations

from typing import Final

from kv_cache_manager_v2.device.arenas import HostArena
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.ids import Point, SlotId
from kv_cache_manager_v2.storage.allocator import SlotAllocator

PIECE_BYTES: Final = 1 << 20  # a slot larger than this passes in several pieces, smaller ones share a piece
NUM_PIECES: Final = 64


class Staging:
    """Equal pieces of host memory, made on first use."""

    def __init__(self, driver: Driver, timeline: Timeline, piece_bytes: int = PIECE_BYTES, num_pieces: int = NUM_PIECES) -> None:
        self.piece_bytes = piece_bytes
        self.num_pieces = num_pieces
        self._arena = HostArena(driver, piece_bytes)
        self._pieces = SlotAllocator(timeline, 0)
        self._reads: list[int] = [0] * num_pieces  # by piece: file reads into it whose end the host has not seen
        self._done: list[Point | None] = [None] * num_pieces  # by piece: end of its use in stream order, once known

    def open(self) -> None:
        """Make the memory. Raises HostRegistrationError or OutOfMemoryError."""
        if self._pieces.capacity == 0:
            self._arena.resize(self.num_pieces)
            self._pieces.expand(self.num_pieces)

    def free(self) -> int:
        return self._pieces.free

    def take(self) -> tuple[SlotId, Point]:
        """A piece, and the point that the next copy or read into it must wait for. Raises OutOfPagesError if there is none."""
        return self._pieces.allocate()

    def address(self, piece: SlotId) -> int:
        return self._arena.address(piece)

    def note_read(self, piece: SlotId) -> None:
        """A file read into the piece has been queued."""
        self._reads[piece] += 1

    def read_ended(self, piece: SlotId) -> None:
        """The host has seen the end of one such read."""
        self._reads[piece] -= 1
        self._give_back(piece)

    def leave(self, piece: SlotId, point: Point) -> None:
        """Nothing queued after `point` uses the piece."""
        self._done[piece] = point
        self._give_back(piece)

    def _give_back(self, piece: SlotId) -> None:
        point = self._done[piece]
        if point is not None and self._reads[piece] == 0:
            self._done[piece] = None
            self._pieces.release(piece, point)

    def close(self) -> None:
        """Give the memory back, unless a read that timed out may still write to it."""
        if sum(self._reads) == 0:
            self._arena.close()
