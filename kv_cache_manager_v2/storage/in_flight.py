"""File transfers in flight, with the pages and slots that depend on them.

A stream passes a gate however the transfer ended, so the host must poll the gate. Until then the page's bytes are unconfirmed
(`Page.transfers`), and no other page gets the memory that the transfer may still write to. So a transfer that ends after its time
limit does no harm. A page remains the same object when it moves, so a failed load is found even if the page has moved since.

A batch whose queueing failed is canceled: its slots and staging regions are freed after its transfers have ended.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from typing import Final

from kv_cache_manager_v2.device.driver import GATE_DONE, GATE_LATE, GATE_PENDING, GATE_TIMED_OUT, Driver
from kv_cache_manager_v2.device.freeing import Freeing
from kv_cache_manager_v2.device.staging import StagingRing
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.ids import NULL_POINT, Point, SlotId
from kv_cache_manager_v2.storage.cell import Cell
from kv_cache_manager_v2.storage.clean_copy import discard_all
from kv_cache_manager_v2.storage.copy_batch import CopyBatch, Transfer
from kv_cache_manager_v2.storage.page import PINNED, Page

_log: Final = logging.getLogger(__name__)
_LOOK_AT: Final = 4  # positions of streams that a call looks at in vain before it leaves the other spent gates to the next one


class TransfersInFlight:
    """The transfers in flight.

    `poll` is O(transfers that have changed since the last one), and one driver call if none has. If the driver does not watch gates
    (`Driver.watch_gates`), it is O(transfers in flight).
    """

    def __init__(self, driver: Driver, timeline: Timeline, ring: StagingRing) -> None:
        self._driver = driver
        self._timeline = timeline
        self._ring = ring
        self._by_gate: dict[int, Transfer] = {}  # in order of submission
        self._of_page: dict[Page, list[Transfer]] = {}  # by page that depends on them, as many as `Page.transfers`
        self._changed: deque[int] = deque()  # gates to look at: those that have changed, in the order of the changes, and new ones
        self._unwatched = 0  # transfers whose gates the driver does not watch
        self._canceled: list[CopyBatch] = []  # canceled batches whose slots are not free yet
        self._spent: deque[tuple[Point, list[int]]] = deque()  # gates of ended transfers, and where their streams have passed them
        self._freeing = Freeing()  # of gates
        self.ended = 0  # how often a transfer has ended, or a page was detached
        self.losses = 0  # pages that were found lost
        self.lost: list[Page] = []  # those newly found lost, for `Hierarchy.settle`
        self.last_error = ""  # error text of the latest failed transfer

    @property
    def in_flight(self) -> int:
        """Transfers that have not ended."""
        return len(self._by_gate)

    # --- submission

    def watch(self, transfers: list[Transfer]) -> None:
        """Have the driver report the changes of these new transfers' gates."""
        watched = self._driver.watch_gates([transfer.gate for transfer in transfers], self._changed)
        for transfer in transfers:
            transfer.watched = watched

    def install(self, batch: CopyBatch, pages: list[Page]) -> None:
        """Make pages depend on the transfers of a queued batch; pages[i] has its slot i."""
        for transfer in batch.transfers:
            if transfer.passed == NULL_POINT:
                transfer.passed = batch.ready
            self._add(transfer)
            self._depend(pages[transfer.index], transfer)

    def cancel(self, batch: CopyBatch) -> None:
        """Free the slots and staging regions of a batch whose queueing failed. Never raises.

        They are free after all work that was queued, and once its file transfers have ended.
        """
        if batch.stream is not None:
            batch.end = self._timeline.record_or_wait(batch.stream)
        batch.unended = len(batch.transfers)
        if not batch.transfers:
            self._release(batch)
            return
        self._canceled.append(batch)
        for transfer in batch.transfers:
            transfer.batch = batch
            self._add(transfer)

    def _add(self, transfer: Transfer) -> None:
        if transfer.cell is not None:
            transfer.cell.begin_write(transfer.slot)
        if not transfer.watched:
            self._unwatched += 1
        self._by_gate[transfer.gate] = transfer
        self._changed.append(transfer.gate)  # it may have changed before

    def _depend(self, page: Page, transfer: Transfer) -> None:
        """Make the page's bytes depend on the transfer."""
        self._of_page.setdefault(page, []).append(transfer)
        transfer.pages.append(page)
        page.transfers += 1

    def inherit(self, source: Page, copy: Page) -> None:
        """Make a copy depend on the transfers of its source: the copy's bytes are confirmed or lost with the source's."""
        copy.lost = copy.lost or source.lost
        if source.transfers == 0:
            return
        for transfer in self._of_page[source]:
            self._depend(copy, transfer)
        if copy.list != PINNED:
            copy.cell.requeue(copy)

    def detach(self, page: Page) -> None:
        """Make the page depend on no transfer, as its bytes are elsewhere now. The caller calls `Cell.requeue`."""
        for transfer in self._of_page.pop(page, []):
            transfer.pages.remove(page)
        page.transfers = 0
        self.ended += 1

    # --- ended transfers

    def poll(self) -> None:
        """Look at the gates that have changed, and free what ended transfers used. Lost pages are added to `lost`."""
        self.release_passed_gates()
        oldest = next(iter(self._by_gate.values()), None)
        if oldest is not None:
            self._look_at(oldest)  # in any case: a device may do its work only in its calls
        if self._unwatched > 0:
            for transfer in list(self._by_gate.values()):
                self._look_at(transfer)
        changed = self._changed
        while changed:
            found = self._by_gate.get(changed[0])
            if found is not None:
                self._look_at(found)
            changed.popleft()

    def _look_at(self, transfer: Transfer) -> None:
        if self._has_ended(transfer, self._driver.poll_gate(transfer.gate)):
            self._finish(transfer)

    def _has_ended(self, transfer: Transfer, state: int) -> bool:
        """Process the state of a gate; whether the transfer has ended."""
        region = transfer.region
        if state == GATE_PENDING or (state == GATE_DONE and region is not None and not region.decided()):
            return False  # in the second case the driver reports the earlier user of the region next, and this transfer after it
        if state in (GATE_TIMED_OUT, GATE_LATE) and not transfer.timed_out:
            transfer.timed_out = True
            self._lose_pages_of(transfer)
            if region is not None and not (transfer.batch is not None and region.in_use):
                self._ring.quarantine(region)
        if state == GATE_TIMED_OUT:
            return False
        if state != GATE_DONE or (region is not None and region.suspect()):
            self._lose_pages_of(transfer)
        return True

    def _lose_pages_of(self, transfer: Transfer) -> None:
        error = self._driver.gate_error(transfer.gate)
        self.last_error = (
            error if error else "a file read that timed out may have overwritten the staging memory of another transfer"
        )
        _log.error("the bytes of a page are lost: %s", self.last_error)
        for page in transfer.pages:
            self.lose(page)

    def lose(self, page: Page) -> None:
        """Mark a page as lost. The next `Hierarchy.settle` notifies its owner."""
        if not page.lost:
            discard_all(page)
            page.lost = True
            self.losses += 1
            self.lost.append(page)

    def _finish(self, transfer: Transfer) -> None:
        """Free what the transfer used. An interrupt leaves the rest to the next poll: no call parts lines that belong together."""
        pages = transfer.pages
        while pages:
            page = pages[-1]
            needed = self._of_page[page]
            index = needed.index(transfer)
            page.transfers -= 1
            del pages[-1]
            del needed[index]
            if not needed:
                del self._of_page[page]
            if page.transfers == 0 and page.list != PINNED:
                page.cell.requeue(page)
        cell = transfer.cell
        if cell is not None:
            transfer.cell = None
            cell.end_write(transfer.slot)
        region = transfer.region
        if region is not None:
            if region.transfers == 1 and not region.in_use:
                self._ring.complete(region)
            transfer.region = None
            region.transfers -= 1
        batch = transfer.batch
        spent = [] if batch is not None else self._spent_at(transfer.passed)
        spent += [transfer.gate]
        del self._by_gate[transfer.gate]
        self.ended += 1
        if not transfer.watched:
            self._unwatched -= 1
        if batch is not None:
            batch.unended -= 1
            if batch.unended == 0:
                self._canceled.remove(batch)
                self._release(batch)

    def _release(self, batch: CopyBatch) -> None:
        for index in range(len(batch.slots)):  # the stream may not wait for their last uses
            batch.cell.free_slot(batch.slots[index], self._timeline.merge(batch.free_from[index], batch.end))
        for staged in batch.staged:
            self._ring.finish(staged.region, batch.end)
        spent = self._spent_at(batch.end)
        spent += [transfer.gate for transfer in batch.transfers]

    def _spent_at(self, passed: Point) -> list[int]:
        """The list for gates that a stream has passed at this point."""
        if not self._spent or self._spent[-1][0] != passed:
            self._spent.append((passed, []))
        return self._spent[-1][1]

    def release_passed_gates(self) -> None:
        """Release gates of ended transfers that their streams have passed. Some are left to the next call."""
        misses = 0
        while self._spent and misses < _LOOK_AT:
            passed, gates = self._spent[0]
            if not self._timeline.done(passed):
                self._spent.rotate(-1)
                misses += 1
                continue
            while gates:
                gate = gates[-1]
                self._freeing.free(gate, partial(self._driver.release_gate, gate))
                del gates[-1]
                self._freeing.done(gate)
            self._spent.popleft()

    # --- questions

    def ends(self, cells: list[Cell] | None = None) -> list[Point]:
        """For each transfer that uses one of the cells (None: any) and has not timed out, a point after its end."""
        points: list[Point] = []
        for transfer in self._by_gate.values():
            if not transfer.timed_out and (cells is None or _uses(transfer, cells)):
                points.append(transfer.passed if transfer.batch is None else transfer.batch.end)
        return points

    def any_timed_out(self, cells: list[Cell]) -> bool:
        """Whether a transfer that has timed out still uses one of the cells."""
        for transfer in self._by_gate.values():  # noqa: SIM110 (as a loop: any() would make a generator)
            if transfer.timed_out and _uses(transfer, cells):
                return True
        return False

    def cells_written(self) -> list[Cell]:
        """Cells with slots that transfers may still write to."""
        return [transfer.cell for transfer in self._by_gate.values() if transfer.cell is not None]

    def uses_staging(self) -> bool:
        """Whether canceled batches may still use the staging ring."""
        return len(self._canceled) > 0

    def kept_slots(self, cell: Cell) -> list[SlotId]:
        """Slots of a cell that canceled batches keep. O(canceled batches)."""
        return [slot for batch in self._canceled if batch.cell is cell for slot in batch.slots]

    def check_invariants(self, cells: list[Cell]) -> None:
        """Assert that counts agree with the transfers. O(transfers in flight)."""
        transfers = list(self._by_gate.values())
        writes = sum([sum(cell.writes.values()) for cell in cells])
        listed = sum([1 for transfer in transfers if transfer.cell is not None])
        assert writes == listed, f"{writes} writes to slots are counted, but {listed} transfers write to one"
        assert self._unwatched == sum([1 for transfer in transfers if not transfer.watched]), "a wrong count of unwatched gates"
        for batch in self._canceled:
            unended = sum([1 for transfer in transfers if transfer.batch is batch])
            assert unended > 0, "a canceled batch keeps its slots although its transfers have ended"
            assert unended == batch.unended, f"a canceled batch counts {batch.unended} transfers in flight of {unended}"
        written: dict[tuple[int, int], int] = {}
        depends = 0
        for transfer in transfers:
            depends += len(transfer.pages)
            for page in transfer.pages:
                assert transfer in self._of_page[page], "a page does not list a transfer that it depends on"
            if transfer.cell is not None:
                key = (id(transfer.cell), int(transfer.slot))
                written[key] = written.get(key, 0) + 1
        for page, needed in self._of_page.items():
            assert page.transfers == len(needed) > 0, "a page has a wrong count of transfers"
            depends -= len(needed)
        assert depends == 0, "a page lists a transfer that it does not depend on"
        for transfer in transfers:
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
