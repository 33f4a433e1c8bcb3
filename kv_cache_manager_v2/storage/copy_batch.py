"""A batch of copies on its way from one cell to another: what is reserved for it, and what the device was told.

Rule: a batch owns its destination slots, its staging pieces and its file transfers until it is installed or abandoned. Only then
does any of it show in pages and cells.
"""

from __future__ import annotations

from kv_cache_manager_v2.device.staging import StagingPiece
from kv_cache_manager_v2.ids import NO_SLOT, NULL_POINT, Point, SlotId, Stream
from kv_cache_manager_v2.storage.cell import Cell
from kv_cache_manager_v2.storage.page import Page


class Transfer:
    """One file read or write that the host has not seen the end of."""

    def __init__(self, gate: int, index: int, piece: StagingPiece | None) -> None:
        self.gate = gate
        self.index = index  # in its batch, of the page whose bytes it carries
        self.piece = piece  # staging piece that it reads or writes
        self.page: Page | None = None  # the page that depends on it; None once no page does
        self.cell: Cell | None = None  # of the slot that it writes to; None if it writes to no slot
        self.slot = NO_SLOT
        self.passed: Point = NULL_POINT  # the copy stream is past the gate: only then may the gate be released
        self.timed_out = False
        self.is_copy = False  # stands for a copy of the page's unconfirmed bytes: another entry owns the gate
        self.batch: CopyBatch | None = None  # the abandoned batch that keeps its gate


class Segment:
    """A part of one page that passes through staging at once."""

    def __init__(self, index: int, pool: int, offset: int, nbytes: int) -> None:
        self.index = index  # of the page in the batch
        self.pool = pool
        self.offset = offset  # in the slot
        self.nbytes = nbytes
        self.address = 0  # where in staging it passes


class StagedCopy:
    """Segments that pass through one piece of staging."""

    def __init__(self, piece: StagingPiece, segments: list[Segment]) -> None:
        self.piece = piece
        self.segments = segments
        self.rounds = 0  # pieces of the same batch that have used the same memory before
        self.transfers: list[Transfer] = []
        self.waited = 0  # so many of them, from the front, are ones that the stream was told to wait for


class CopyBatch:
    """Bytes of pages of one pool group that go from one cell to another (or the same): from source_slots[i] to slots[i]."""

    def __init__(self, source: Cell, cell: Cell) -> None:
        self.source = source
        self.cell = cell
        self.source_slots: list[SlotId] = []
        self.slots: list[SlotId] = []
        self.free_from: list[Point] = []  # ends of the last uses of the slots
        self.waits: list[Point] = []  # what the batch waits for: these, and the source pages' points
        self.stream: Stream | None = None  # the copy stream, once work may have been queued on it
        self.staged: list[StagedCopy] = []  # not released yet, oldest first
        self.under_way = 0  # the first of them whose segments have not come out
        self.transfers: list[Transfer] = []
        self.gates: list[int] = []  # of transfers without staging, that the stream has yet to be told to wait for
        self.source_free: Point = NULL_POINT  # from which on the source slots may be overwritten
        self.ready: Point = NULL_POINT  # from which on the destination slots hold the bytes
        self.end: Point = NULL_POINT  # of an abandoned batch: after all that was queued

    def reserve(self, page: Page) -> None:
        """Take a destination slot for a page's bytes. Raises OutOfPagesError if none is free."""
        slot, free_from = self.cell.allocator.allocate()
        self.free_from.append(free_from)
        self.slots.append(slot)
        self.waits.append(free_from)
        self.waits.append(page.ready)
        self.source_slots.append(page.slot)

    def add_transfers(self, gates: list[int], indices: list[int], piece: StagingPiece | None, writes_slot: bool) -> list[Transfer]:
        """Note file transfers just queued, of these pages of the batch."""
        added: list[Transfer] = []
        for i in range(len(gates)):
            transfer = Transfer(gates[i], indices[i], piece)
            if writes_slot:
                transfer.cell = self.cell
                transfer.slot = self.slots[indices[i]]
            if piece is not None:
                piece.transfers += 1
            added.append(transfer)
        self.transfers += added
        return added
