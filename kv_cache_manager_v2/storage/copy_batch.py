"""A batch of copies from one cell to another: what is reserved for it, and what is queued.

A batch owns its destination slots, staging regions and file transfers until it is installed or canceled. Until then pages and cells
do not refer to them.
"""

from __future__ import annotations

from kv_cache_manager_v2.device.staging import StagingRegion
from kv_cache_manager_v2.ids import NO_SLOT, NULL_POINT, Point, SlotId, Stream
from kv_cache_manager_v2.storage.cell import Cell
from kv_cache_manager_v2.storage.page import Page


class Transfer:
    """One file read or write in flight."""

    def __init__(self, gate: int, index: int, region: StagingRegion | None) -> None:
        self.gate = gate
        self.index = index  # index of its page in the batch
        self.region = region  # staging region that it reads or writes
        self.watched = False  # the driver reports changes of its gate
        self.pages: list[Page] = []  # the pages that depend on it: its own, and copies of that
        self.cell: Cell | None = None  # of the slot that it writes to; None if it writes to no slot
        self.slot = NO_SLOT
        self.memory: list[Cell] = []  # cells whose memory or file it accesses
        self.passed: Point = NULL_POINT  # point at which the stream has passed the gate, which may then be released
        self.timed_out = False
        self.batch: CopyBatch | None = None  # the canceled batch that it belongs to


class Segment:
    """A part of one page that passes through staging at once."""

    def __init__(self, index: int, pool: int, offset: int, nbytes: int) -> None:
        self.index = index  # of the page in the batch
        self.pool = pool
        self.offset = offset  # in the slot
        self.nbytes = nbytes
        self.address = 0  # in staging


class StagedCopy:
    """Segments that pass through one region of staging."""

    def __init__(self, region: StagingRegion, segments: list[Segment]) -> None:
        self.region = region
        self.segments = segments
        self.rounds = 0  # earlier regions of the batch in the same memory
        self.transfers: list[Transfer] = []
        self.waited = 0  # how many of the first transfers the stream waits for


class CopyBatch:
    """Copies from source_slots[i] of one cell to slots[i] of another or the same, in one pool group."""

    def __init__(self, source: Cell, cell: Cell) -> None:
        self.source = source
        self.cell = cell
        self.source_slots: list[SlotId] = []
        self.slots: list[SlotId] = []
        self.free_from: list[Point] = []  # ends of the last uses of the slots
        self.waits: list[Point] = []  # the points that the batch waits for
        self.stream: Stream | None = None  # the copy stream, once work may have been queued on it
        self.staged: list[StagedCopy] = []  # those not released, oldest first
        self.emptied = 0  # how many of the first are emptied
        self.transfers: list[Transfer] = []
        self.gates: list[int] = []  # of transfers without staging, which the stream still has to wait for
        self.source_free: Point = NULL_POINT  # after it the source slots may be overwritten
        self.ready: Point = NULL_POINT  # after it the destination slots have the bytes
        self.end: Point = NULL_POINT  # of a canceled batch: after all queued work ...
        self.unended = 0  # ... and its transfers that have not ended

    def reserve(self, page: Page) -> None:
        """Reserve a destination slot for a page's bytes. Raises OutOfPagesError if none is free."""
        slot, free_from = self.cell.allocator.allocate()
        self.free_from.append(free_from)
        self.slots.append(slot)
        self.wait_for(free_from)
        self.wait_for(page.ready)
        self.source_slots.append(page.slot)

    def wait_for(self, point: Point) -> None:
        """Add a point to wait for, unless it is one of the last two: a request's pages mostly have the same points."""
        waits = self.waits
        count = len(waits)
        if point == NULL_POINT or (count > 0 and (waits[count - 1] == point or (count > 1 and waits[count - 2] == point))):
            return
        waits.append(point)

    def add_transfers(
        self, gates: list[int], indices: list[int], region: StagingRegion | None, writes_slot: bool
    ) -> list[Transfer]:
        """Add file transfers that were queued for these pages of the batch."""
        memory = [cell for cell in (self.source, self.cell) if region is None or cell.tier.by_file]
        added: list[Transfer] = []
        for i in range(len(gates)):
            transfer = Transfer(gates[i], indices[i], region)
            transfer.memory = memory
            if writes_slot:
                transfer.cell = self.cell
                transfer.slot = self.slots[indices[i]]
            if region is not None:
                region.transfers += 1
            added.append(transfer)
        self.transfers += added
        return added
