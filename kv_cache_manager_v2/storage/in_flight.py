"""File transfers in flight: which pages and slots they concern, and what to do when each has ended.

Rule: a stream is past a file transfer as soon as its gate opens, whatever happened; the host believes nothing before it has polled
the gate itself. Until then the page's bytes are unconfirmed (`Page.transfers`), and memory that the transfer may still write to,
its *landing*, is not given to anybody else, even if its page has left it. So a transfer that timed out can do no harm when it ends
late.

A page stays the same object wherever it moves, so a load that failed is noticed even if the page has been moved on meanwhile.
"""

from __future__ import annotations

from kv_cache_manager_v2.device.driver import GATE_DONE, GATE_LATE, GATE_PENDING, GATE_TIMED_OUT, Driver
from kv_cache_manager_v2.device.staging import StagingPiece, StagingRing
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.ids import NO_SLOT, NULL_POINT, Point, SlotId
from kv_cache_manager_v2.storage.allocator import SlotAllocator
from kv_cache_manager_v2.storage.page import Page


class Transfer:
    """One file read or write that the host has not seen the end of."""

    def __init__(self, gate: int, page: Page | None, cell: int, slot: SlotId, piece: StagingPiece | None) -> None:
        self.gate = gate
        self.copied = False  # stands for a copy of the page's unconfirmed bytes: another entry owns the gate
        self.page = page  # whose bytes it carries; None once they no longer depend on it
        self.cell = cell  # level and pool group of the slot that it writes to; -1 if it writes to no slot
        self.slot = slot
        self.piece = piece  # staging piece that it reads or writes
        self.passed = NULL_POINT  # the copy stream is past the gate: only then may the gate be forgotten
        self.timed_out = False


class TransfersInFlight:
    """The list of transfers in flight. Each operation is O(transfers in flight), and free when there is none."""

    def __init__(self, driver: Driver, timeline: Timeline, ring: StagingRing) -> None:
        self._driver = driver
        self._timeline = timeline
        self._transfers: list[Transfer] = []  # in order of submission
        self.in_flight = 0  # length of that list
        self._allocators: list[SlotAllocator] = []  # by cell; see `serve`
        self._ring = ring
        self._batch: list[Transfer] = []  # of the copy batch being queued
        self._spent_gates: list[int] = []  # settled, but a stream may still have to run past them
        self._spent_points: list[Point] = []
        self._landings: dict[int, int] = {}  # slot key -> transfers that may still write to the slot
        self._left: dict[int, Point] = {}  # slot key -> end of last use, for landings that nobody has any more
        self.lost: list[Page] = []  # pages newly known to be lost, for the hierarchy to deal with
        self.last_error = ""  # text of the latest failure, for messages

    def serve(self, allocators: list[SlotAllocator]) -> None:
        """The allocators, by cell, to which slots go back that were kept for a transfer."""
        self._allocators = allocators

    # --- submission

    def add(self, gate: int, page: Page, cell: int, slot: SlotId, piece: StagingPiece | None) -> Transfer:
        """Note a transfer just queued, which writes to a slot (cell >= 0) or to a staging piece; `stamp` or the end must follow."""
        if piece is not None:
            piece.transfers += 1
        transfer = Transfer(gate, page, cell, slot, piece)
        self._transfers.append(transfer)
        self._batch.append(transfer)
        self.in_flight += 1
        page.transfers += 1
        if cell >= 0:
            key = slot_key(cell, slot)
            self._landings[key] = self._landings.get(key, 0) + 1
        return transfer

    def stamp(self, transfers: list[Transfer], point: Point) -> None:
        """At this point the copy stream is past the gates of these transfers of the batch."""
        for transfer in transfers:
            transfer.passed = point

    def end_batch(self, point: Point) -> None:
        """All of the batch is queued, and at this point the copy stream is past all of its gates."""
        for transfer in self._batch:
            if transfer.passed == NULL_POINT:
                transfer.passed = point
        self._batch.clear()

    def abandon(self, point: Point) -> None:
        """The batch failed: its transfers may still write where they were told to, but no page depends on them any more."""
        for transfer in self._batch:
            page = transfer.page
            if page is not None:
                page.transfers -= 1
                transfer.page = None
        self.end_batch(point)

    def inherit(self, source: Page, copy: Page) -> None:
        """The source's bytes have been copied: while they are unconfirmed so are the copy's, and both are lost together."""
        copy.lost = copy.lost or source.lost
        if source.transfers == 0:
            return
        copies: list[Transfer] = []
        for transfer in self._transfers:
            if transfer.page is source:
                stand_in = Transfer(transfer.gate, copy, -1, NO_SLOT, None)
                stand_in.copied = True
                stand_in.passed = transfer.passed
                copies.append(stand_in)
                copy.transfers += 1
        self._transfers += copies  # after the entries that own the gates: a gate is looked at before it is spent
        self.in_flight = len(self._transfers)

    def disown(self, page: Page) -> None:
        """The page's bytes no longer depend on any transfer in flight."""
        for transfer in self._transfers:
            if transfer.page is page:
                transfer.page = None
        page.transfers = 0

    # --- slots that are written to by a transfer

    def leave(self, cell: int, slot: SlotId, point: Point) -> bool:
        """The page has left the slot: if a transfer may still write to it, keep it until then. False: it may be freed now."""
        key = slot_key(cell, slot)
        if key not in self._landings:
            return False
        assert key not in self._left, "a slot was left twice"
        self._left[key] = point
        return True

    def left(self, cell: int, slot: SlotId) -> bool:
        """Whether the slot is kept for a transfer although its page has left it."""
        return bool(self._left) and slot_key(cell, slot) in self._left

    def landing_cells(self) -> list[int]:
        """Levels and pool groups, flat, of slots that a transfer may still write to."""
        return sorted({key >> 40 for key in self._landings})

    # --- settling

    def poll(self) -> None:
        """Look at every gate, in order of submission; free what its transfer kept. Lost pages are appended to `lost`."""
        self.forget_spent_gates()
        if self.in_flight == 0:
            return
        pending: list[Transfer] = []
        for transfer in self._transfers:
            state = self._driver.poll_gate(transfer.gate)
            if state == GATE_PENDING or (transfer.copied and state == GATE_TIMED_OUT):
                pending.append(transfer)
                continue
            if transfer.copied:
                self._finish(transfer)
                continue
            if state in (GATE_TIMED_OUT, GATE_LATE) and not transfer.timed_out:
                transfer.timed_out = True
                self._note_loss(transfer)
                if transfer.piece is not None:
                    self._ring.quarantine(transfer.piece)
            if state == GATE_TIMED_OUT:
                pending.append(transfer)
                continue
            if state != GATE_DONE or (transfer.piece is not None and transfer.piece.suspect()):
                self._note_loss(transfer)
            self._finish(transfer)
        self._transfers = pending
        self.in_flight = len(pending)

    def _note_loss(self, transfer: Transfer) -> None:
        error = self._driver.gate_error(transfer.gate)
        self.last_error = error if error else "a file read that timed out may have written into another transfer's staging memory"
        for other in self._transfers:  # itself, and copies of what it carried
            page = other.page
            if other.gate == transfer.gate and page is not None and not page.lost:
                page.lost = True
                self.lost.append(page)

    def _finish(self, transfer: Transfer) -> None:
        page = transfer.page
        if page is not None:
            page.transfers -= 1
            transfer.page = None
        if transfer.cell >= 0:
            key = slot_key(transfer.cell, transfer.slot)
            count = self._landings[key] - 1
            if count > 0:
                self._landings[key] = count
            else:
                del self._landings[key]
                if key in self._left:
                    self._allocators[transfer.cell].release(transfer.slot, self._left.pop(key))
        if transfer.copied:
            return
        piece = transfer.piece
        if piece is not None:
            piece.transfers -= 1
            if piece.transfers == 0:
                self._ring.settle(piece)
        self._spent_gates.append(transfer.gate)
        self._spent_points.append(transfer.passed)

    def forget_spent_gates(self) -> None:
        """Give the driver back the gates that no stream has to run past any more."""
        if not self._spent_gates:
            return
        gates: list[int] = []
        points: list[Point] = []
        for index in range(len(self._spent_gates)):
            if self._timeline.done(self._spent_points[index]):
                self._driver.release_gate(self._spent_gates[index])
            else:
                gates.append(self._spent_gates[index])
                points.append(self._spent_points[index])
        self._spent_gates = gates
        self._spent_points = points

    def wait(self) -> None:
        """Block the host until the copy streams are past every gate: all transfers have ended or timed out. `poll` must follow."""
        for transfer in self._transfers:
            if not transfer.timed_out:
                self._timeline.synchronize(transfer.passed)

    def busy_pages(self) -> list[Page]:
        """Pages with unconfirmed bytes, some perhaps more than once."""
        return [transfer.page for transfer in self._transfers if transfer.page is not None]

    def check_invariants(self) -> None:
        """Counts agree with the list of transfers. O(transfers in flight)."""
        assert self.in_flight == len(self._transfers), f"{self.in_flight} in flight, {len(self._transfers)} noted"
        assert not self._batch, "a copy batch was queued and not ended"
        landings: dict[int, int] = {}
        for transfer in self._transfers:
            if transfer.cell >= 0:
                key = slot_key(transfer.cell, transfer.slot)
                landings[key] = landings.get(key, 0) + 1
        assert landings == self._landings, "the landings disagree with the transfers"
        for key in self._left:
            assert key in self._landings, "a slot is kept although nothing writes to it"
        for page in self.busy_pages():
            count = sum([1 for transfer in self._transfers if transfer.page is page])
            assert page.transfers == count, f"a page counts {page.transfers} transfers of {count}"
        assert NO_SLOT not in [transfer.slot for transfer in self._transfers if transfer.cell >= 0]


def slot_key(cell: int, slot: SlotId) -> int:
    """One int for a slot on a level."""
    return cell << 40 | slot
