"""File transfers in flight: which pages and slots they concern, and what to do when each has ended.

Rule: a stream is past a file transfer as soon as its gate opens, whatever happened; the host believes nothing before it has polled
the gate itself. Until then the page's bytes are unconfirmed (`Page.transfers`), and the destination, memory that the transfer may
still write to, is given to no other page. So a transfer that timed out can do no harm when it ends late.

A page stays the same object wherever it moves, so a load that failed is noticed even if the page has moved on meanwhile.

A batch of copies that the device refused is abandoned: its slots and staging pieces stay taken until its transfers have ended.
"""

from __future__ import annotations

import logging
from typing import Final

from kv_cache_manager_v2.device.driver import GATE_DONE, GATE_LATE, GATE_PENDING, GATE_TIMED_OUT, Driver
from kv_cache_manager_v2.device.staging import StagingRing
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.ids import NULL_POINT, Point, SlotId
from kv_cache_manager_v2.storage.cell import Cell
from kv_cache_manager_v2.storage.copy_batch import CopyBatch, Transfer
from kv_cache_manager_v2.storage.page import PINNED, Page

_log: Final = logging.getLogger(__name__)


class TransfersInFlight:
    """The list of transfers in flight. Each operation is O(transfers in flight), and free when there is none."""

    def __init__(self, driver: Driver, timeline: Timeline, ring: StagingRing) -> None:
        self._driver = driver
        self._timeline = timeline
        self._ring = ring
        self._transfers: list[Transfer] = []  # in order of submission
        self._abandoned: list[CopyBatch] = []  # batches that failed, whose slots are not free yet
        self.in_flight = 0  # transfers, and abandoned batches
        self._spent_gates: list[int] = []  # of transfers that ended, but a stream may still have to run past them
        self._spent_points: list[Point] = []
        self.lost: list[Page] = []  # pages newly known to be lost, for the hierarchy to deal with
        self.last_error = ""  # text of the latest failure, for messages

    # --- submission

    def install(self, batch: CopyBatch, pages: list[Page]) -> None:
        """A batch is queued, and pages[i] has the bytes that went to its slot i: the page depends on its transfers."""
        if not batch.transfers:
            return
        for transfer in batch.transfers:
            page = pages[transfer.index]
            transfer.page = page
            page.transfers += 1
            if transfer.passed == NULL_POINT:
                transfer.passed = batch.ready
            if transfer.cell is not None:
                transfer.cell.begin_write(transfer.slot)
        self._transfers += batch.transfers
        self._count()

    def abandon(self, batch: CopyBatch) -> None:
        """A batch failed: no page depends on it. Never raises.

        Its slots and staging pieces are free after all that was queued, and once its file transfers have ended.
        """
        if batch.stream is not None:
            batch.end = self._timeline.record_or_wait(batch.stream)
        if not batch.transfers:
            self._release(batch)
            return
        for transfer in batch.transfers:
            transfer.batch = batch
            if transfer.cell is not None:
                transfer.cell.begin_write(transfer.slot)
        self._transfers += batch.transfers
        self._abandoned.append(batch)
        self._count()

    def inherit(self, source: Page, copy: Page) -> None:
        """The source's bytes have been copied: while they are unconfirmed so are the copy's, and both are lost together."""
        copy.lost = copy.lost or source.lost
        if source.transfers == 0:
            return
        copies: list[Transfer] = []
        for transfer in self._transfers:
            if transfer.page is source:
                stand_in = Transfer(transfer.gate, 0, None)
                stand_in.page = copy
                stand_in.is_copy = True
                stand_in.passed = transfer.passed
                copies.append(stand_in)
                copy.transfers += 1
        self._transfers += copies  # after the entries that own the gates: a gate is looked at before it is spent
        self._count()
        if copy.list != PINNED:
            copy.cell.requeue(copy)

    def disown(self, page: Page) -> None:
        """The page's bytes no longer depend on any transfer in flight; the caller puts it into the right list."""
        for transfer in self._transfers:
            if transfer.page is page:
                transfer.page = None
        page.transfers = 0

    def _count(self) -> None:
        self.in_flight = len(self._transfers) + len(self._abandoned)

    # --- what has ended

    def poll(self) -> None:
        """Look at every gate, in order of submission; free what its transfer kept. Lost pages are appended to `lost`."""
        self.forget_spent_gates()
        if self.in_flight == 0:
            return
        number = 0
        pending: list[Transfer] = []
        try:
            while number < len(self._transfers):
                transfer = self._transfers[number]
                ended = self._ended(transfer, self._driver.poll_gate(transfer.gate))
                number += 1
                if ended:
                    self._finish(transfer)
                else:
                    pending.append(transfer)
        finally:
            self._transfers = pending + self._transfers[number:]
            self._count()
        self._release_abandoned()

    def _ended(self, transfer: Transfer, state: int) -> bool:
        """Take note of what a gate says. Whether the transfer has really ended."""
        if transfer.is_copy:
            return state != GATE_PENDING and state != GATE_TIMED_OUT
        if state == GATE_PENDING:
            return False
        if state in (GATE_TIMED_OUT, GATE_LATE) and not transfer.timed_out:
            transfer.timed_out = True
            self._note_loss(transfer)
            if transfer.piece is not None and not (transfer.batch is not None and transfer.piece.lent):
                self._ring.quarantine(transfer.piece)
        if state == GATE_TIMED_OUT:
            return False
        if state != GATE_DONE or (transfer.piece is not None and transfer.piece.suspect()):
            self._note_loss(transfer)
        return True

    def _note_loss(self, transfer: Transfer) -> None:
        error = self._driver.gate_error(transfer.gate)
        self.last_error = error if error else "a file read that timed out may have written into another transfer's staging memory"
        _log.error("the bytes of a page are lost: %s", self.last_error)
        for other in self._transfers:  # itself, and copies of what it carried
            page = other.page
            if other.gate == transfer.gate and page is not None:
                self.lose(page)

    def lose(self, page: Page) -> None:
        """The page's bytes are gone: its owner is told by the next `Hierarchy.settle`."""
        if not page.lost:
            page.lost = True
            self.lost.append(page)

    def _finish(self, transfer: Transfer) -> None:
        page = transfer.page
        if page is not None:
            transfer.page = None
            page.transfers -= 1
            if page.transfers == 0 and page.list != PINNED:
                page.cell.requeue(page)
        cell = transfer.cell
        if cell is not None:
            transfer.cell = None
            cell.end_write(transfer.slot)
        if transfer.is_copy:
            return
        piece = transfer.piece
        if piece is not None:
            piece.transfers -= 1
            if piece.transfers == 0 and not piece.lent:
                self._ring.settle(piece)
        if transfer.batch is None:
            self._spent_gates.append(transfer.gate)
            self._spent_points.append(transfer.passed)

    def _release_abandoned(self) -> None:
        """Free what failed copies kept, and whose transfers have ended."""
        for number in range(len(self._abandoned) - 1, -1, -1):
            batch = self._abandoned[number]
            if not [transfer for transfer in self._transfers if transfer.batch is batch]:
                del self._abandoned[number]
                self._release(batch)
        self._count()

    def _release(self, batch: CopyBatch) -> None:
        for index in range(len(batch.slots)):  # the stream was perhaps not told to wait for their last users
            batch.cell.free_slot(batch.slots[index], self._timeline.merge(batch.free_from[index], batch.end))
        for staged in batch.staged:
            self._ring.finish(staged.piece, batch.end)
        for transfer in batch.transfers:
            self._spent_gates.append(transfer.gate)
            self._spent_points.append(batch.end)

    def forget_spent_gates(self) -> None:
        """Release the gates that no stream has to run past any more, and that no copy of what they carried still asks."""
        if not self._spent_gates:
            return
        asked = [transfer.gate for transfer in self._transfers if transfer.is_copy]
        for index in range(len(self._spent_gates) - 1, -1, -1):
            if self._spent_gates[index] not in asked and self._timeline.done(self._spent_points[index]):
                self._driver.release_gate(self._spent_gates[index])
                del self._spent_gates[index]
                del self._spent_points[index]

    def wait(self) -> None:
        """Block the host until the copy streams are past every gate: all transfers have ended or timed out. `poll` must follow."""
        for transfer in self._transfers:
            if not transfer.timed_out:
                self._timeline.synchronize(transfer.passed if transfer.batch is None else transfer.batch.end)

    # --- questions

    def cells_written(self) -> list[Cell]:
        """Cells with slots that a transfer may still write to."""
        return [transfer.cell for transfer in self._transfers if transfer.cell is not None]

    def uses_staging(self) -> bool:
        """Whether copies that failed may still use the staging ring."""
        return len(self._abandoned) > 0

    def kept_slots(self, cell: Cell) -> list[SlotId]:
        """Slots of a cell that failed copies keep. O(abandoned batches)."""
        return [slot for batch in self._abandoned if batch.cell is cell for slot in batch.slots]

    def check_invariants(self, cells: list[Cell]) -> None:
        """Counts agree with the list of transfers. O(transfers in flight)."""
        writes = sum([sum(cell.writes.values()) for cell in cells])
        noted = sum([1 for transfer in self._transfers if transfer.cell is not None])
        assert writes == noted, f"{writes} writes to slots are counted, {noted} transfers write to one"
        for batch in self._abandoned:
            busy = [transfer for transfer in self._transfers if transfer.batch is batch]
            assert busy, "a batch that failed keeps its slots although none of its transfers is in flight"
        assert self.in_flight == len(self._transfers) + len(self._abandoned), "the count in flight is wrong"
        carried: dict[int, int] = {}
        written: dict[tuple[int, int], int] = {}
        for transfer in self._transfers:
            if transfer.page is not None:
                carried[id(transfer.page)] = carried.get(id(transfer.page), 0) + 1
            if transfer.cell is not None:
                key = (id(transfer.cell), int(transfer.slot))
                written[key] = written.get(key, 0) + 1
        for transfer in self._transfers:
            page = transfer.page
            assert page is None or page.transfers == carried[id(page)], "a page miscounts its transfers"
            cell = transfer.cell
            if cell is not None:
                count = written[id(cell), int(transfer.slot)]
                assert cell.writes[transfer.slot] == count, f"a slot counts {cell.writes[transfer.slot]} writes of {count}"
