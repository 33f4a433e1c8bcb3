"""File transfers in flight, with the pages and slots that depend on them.

A stream passes a gate however the transfer ended, so the host must poll the gate. Until then the page's bytes are unconfirmed
(`Page.transfers`), and no other page gets the memory that the transfer may still write to. So a transfer that ends after its time
limit does no harm. A page remains the same object when it moves, so a failed load is found even if the page has moved since.

A batch whose queueing failed is canceled: its slots and staging regions are freed after its transfers have ended.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Final

from kv_cache_manager_v2.device.driver import GATE_DONE, GATE_LATE, GATE_PENDING, GATE_TIMED_OUT, Driver
from kv_cache_manager_v2.device.freeing import Freeing
from kv_cache_manager_v2.device.staging import StagingRing
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.ids import NULL_POINT, Point, SlotId
from kv_cache_manager_v2.storage.cell import Cell
from kv_cache_manager_v2.storage.copy_batch import CopyBatch, Transfer
from kv_cache_manager_v2.storage.page import PINNED, Page

_log: Final = logging.getLogger(__name__)


class TransfersInFlight:
    """The transfers in flight. Each operation is O(transfers in flight)."""

    def __init__(self, driver: Driver, timeline: Timeline, ring: StagingRing) -> None:
        self._driver = driver
        self._timeline = timeline
        self._ring = ring
        self._transfers: list[Transfer] = []  # in order of submission
        self._canceled: list[CopyBatch] = []  # canceled batches whose slots are not free yet
        self.in_flight = 0  # transfers and canceled batches
        self._spent: list[tuple[int, Point]] = []  # gates of ended transfers, and where their streams have passed them
        self._freeing = Freeing()  # of gates
        self.lost: list[Page] = []  # pages newly found lost, for `Hierarchy.settle`
        self.last_error = ""  # error text of the latest failed transfer

    # --- submission

    def install(self, batch: CopyBatch, pages: list[Page]) -> None:
        """Make pages depend on the transfers of a queued batch; pages[i] has its slot i."""
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

    def cancel(self, batch: CopyBatch) -> None:
        """Free the slots and staging regions of a batch whose queueing failed. Never raises.

        They are free after all work that was queued, and once its file transfers have ended.
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
        self._canceled.append(batch)
        self._count()

    def inherit(self, source: Page, copy: Page) -> None:
        """Make a copy depend on the transfers of its source: the copy's bytes are confirmed or lost with the source's."""
        copy.lost = copy.lost or source.lost
        if source.transfers == 0:
            return
        copies: list[Transfer] = []
        for transfer in self._transfers:
            if transfer.page is source:
                entry = Transfer(transfer.gate, 0, None)
                entry.page = copy
                entry.is_copy = True
                entry.passed = transfer.passed
                copies.append(entry)
                copy.transfers += 1
        self._transfers += copies  # after the entries that own the gates, which are polled first
        self._count()
        if copy.list != PINNED:
            copy.cell.requeue(copy)

    def detach(self, page: Page) -> None:
        """Make the page depend on no transfer, as its bytes are elsewhere now. The caller calls `Cell.requeue`."""
        for transfer in self._transfers:
            if transfer.page is page:
                transfer.page = None
        page.transfers = 0

    def _count(self) -> None:
        self.in_flight = len(self._transfers) + len(self._canceled)

    # --- ended transfers

    def poll(self) -> None:
        """Poll every gate, in order of submission, and free what ended transfers used. Lost pages are added to `lost`."""
        self.release_passed_gates()
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
        self._release_canceled()

    def _ended(self, transfer: Transfer, state: int) -> bool:
        """Process the state of a gate; whether the transfer has ended."""
        if transfer.is_copy:
            return state != GATE_PENDING and state != GATE_TIMED_OUT
        if state == GATE_PENDING:
            return False
        if state in (GATE_TIMED_OUT, GATE_LATE) and not transfer.timed_out:
            transfer.timed_out = True
            self._lose_pages_of(transfer)
            if transfer.region is not None and not (transfer.batch is not None and transfer.region.in_use):
                self._ring.quarantine(transfer.region)
        if state == GATE_TIMED_OUT:
            return False
        if state != GATE_DONE or (transfer.region is not None and transfer.region.suspect()):
            self._lose_pages_of(transfer)
        return True

    def _lose_pages_of(self, transfer: Transfer) -> None:
        error = self._driver.gate_error(transfer.gate)
        self.last_error = (
            error if error else "a file read that timed out may have overwritten the staging memory of another transfer"
        )
        _log.error("the bytes of a page are lost: %s", self.last_error)
        for other in self._transfers:  # this one, and entries of copies
            page = other.page
            if other.gate == transfer.gate and page is not None:
                self.lose(page)

    def lose(self, page: Page) -> None:
        """Mark a page as lost. The next `Hierarchy.settle` notifies its owner."""
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
        region = transfer.region
        if region is not None:
            region.transfers -= 1
            if region.transfers == 0 and not region.in_use:
                self._ring.complete(region)
        if transfer.batch is None:
            self._spent.append((transfer.gate, transfer.passed))

    def _release_canceled(self) -> None:
        """Free the slots and staging regions of canceled batches whose transfers have ended."""
        for number in range(len(self._canceled) - 1, -1, -1):
            batch = self._canceled[number]
            if not [transfer for transfer in self._transfers if transfer.batch is batch]:
                del self._canceled[number]
                self._release(batch)
        self._count()

    def _release(self, batch: CopyBatch) -> None:
        for index in range(len(batch.slots)):  # the stream may not wait for their last uses
            batch.cell.free_slot(batch.slots[index], self._timeline.merge(batch.free_from[index], batch.end))
        for staged in batch.staged:
            self._ring.finish(staged.region, batch.end)
        for transfer in batch.transfers:
            self._spent.append((transfer.gate, batch.end))

    def release_passed_gates(self) -> None:
        """Release the gates of ended transfers that their streams have passed and that no entry of a copy needs."""
        if not self._spent:
            return
        asked = [transfer.gate for transfer in self._transfers if transfer.is_copy]
        for index in range(len(self._spent) - 1, -1, -1):
            gate, passed = self._spent[index]
            if gate not in asked and self._timeline.done(passed):
                self._freeing.free(gate, partial(self._driver.release_gate, gate))
                del self._spent[index]
                self._freeing.done(gate)

    # --- questions

    def ends(self, cells: list[Cell] | None = None) -> list[Point]:
        """For each transfer that uses one of the cells (None: any) and has not timed out, a point after its end."""
        points: list[Point] = []
        for transfer in self._transfers:
            if not transfer.timed_out and not transfer.is_copy and (cells is None or _uses(transfer, cells)):
                points.append(transfer.passed if transfer.batch is None else transfer.batch.end)
        return points

    def any_timed_out(self, cells: list[Cell]) -> bool:
        """Whether a transfer that has timed out still uses one of the cells."""
        for transfer in self._transfers:  # noqa: SIM110 (as a loop: any() would make a generator)
            if transfer.timed_out and _uses(transfer, cells):
                return True
        return False

    def cells_written(self) -> list[Cell]:
        """Cells with slots that transfers may still write to."""
        return [transfer.cell for transfer in self._transfers if transfer.cell is not None]

    def uses_staging(self) -> bool:
        """Whether canceled batches may still use the staging ring."""
        return len(self._canceled) > 0

    def kept_slots(self, cell: Cell) -> list[SlotId]:
        """Slots of a cell that canceled batches keep. O(canceled batches)."""
        return [slot for batch in self._canceled if batch.cell is cell for slot in batch.slots]

    def check_invariants(self, cells: list[Cell]) -> None:
        """Assert that counts agree with the list of transfers. O(transfers in flight)."""
        writes = sum([sum(cell.writes.values()) for cell in cells])
        listed = sum([1 for transfer in self._transfers if transfer.cell is not None])
        assert writes == listed, f"{writes} writes to slots are counted, but {listed} transfers write to one"
        for batch in self._canceled:
            busy = [transfer for transfer in self._transfers if transfer.batch is batch]
            assert busy, "a canceled batch keeps its slots although its transfers have ended"
        assert self.in_flight == len(self._transfers) + len(self._canceled), "the count in flight is wrong"
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
            assert page is None or page.transfers == carried[id(page)], "a page has a wrong count of transfers"
            cell = transfer.cell
            if cell is not None:
                count = written[id(cell), int(transfer.slot)]
                assert cell.writes[transfer.slot] == count, f"a slot counts {cell.writes[transfer.slot]} writes of {count}"


def _uses(transfer: Transfer, cells: list[Cell]) -> bool:
    """Whether a transfer may access memory of the cells, or its canceled batch keeps slots of them."""
    used = transfer.memory if transfer.batch is None else [*transfer.memory, transfer.batch.cell]
    for cell in used:
        for other in cells:
            if cell is other:
                return True
    return False
