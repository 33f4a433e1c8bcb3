"""Copies of slots between any two tiers, batched, in stream order.

Rule: a batch runs on a copy stream of our own, after everything that it is told to wait for, and ends in two points:
`source_free`, from which on the source slots may be overwritten, and `ready`, from which on the destination slots hold the bytes.

    from \\ to     GPU                        host                    disk
    GPU           copy                       copy                    copy, staging, file write
    host          copy                       copy                    file write
    disk          file read, staging, copy   file read               file read, staging, file write

File transfers of a batch run in parallel, each with a gate of its own, one per slot and pool (or piece of it), so that a failed one
harms its page only.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

from kv_cache_manager_v2.device.arenas import Arena
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.staging import StagingPiece, StagingRing
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.errors import CorruptedError, OutOfMemoryError
from kv_cache_manager_v2.ids import NULL_POINT, CacheTier, Point, SlotId, Stream
from kv_cache_manager_v2.storage.page import Page
from kv_cache_manager_v2.storage.places import Place
from kv_cache_manager_v2.storage.settling import Settling, Transfer

NUM_STREAMS: Final = 4  # batches take turns, so that one does not often wait for an unrelated one
PIECE_BYTES: Final = 1 << 20  # a slot larger than this passes in several pieces; smaller ones share one, so a file read that hangs
# keeps no more than this of the ring
MOST_PASSAGES: Final = 4  # pieces of staging that a batch uses at once: enough to keep the threads that move files busy, and so few
# that the processor's caches hold them until they are used again ...
MOST_READS: Final = 2  # ... which for file reads is not more often than this: one that hangs spoils what follows in the same memory

_log: Final = logging.getLogger(__name__)


class CopyBatch:
    """Pages of one pool group that go from one place to another: pages[i] from source_slots[i] to slots[i]."""

    def __init__(
        self,
        source: Place,
        source_slots: list[SlotId],
        destination: Place,
        slots: list[SlotId],
        cell: int,
        pages: list[Page],
        waits: list[Point],
    ) -> None:
        self.source = source
        self.source_slots = source_slots
        self.destination = destination
        self.slots = slots
        self.cell = cell  # level and pool group of the destination, flat
        self.pages = pages
        self.waits = waits  # ends of the last uses of all these slots


class Unit:
    """A part of one page that passes through staging at once."""

    def __init__(self, index: int, pool: int, offset: int, nbytes: int) -> None:
        self.index = index  # of the page in the batch
        self.pool = pool
        self.offset = offset  # in the slot
        self.nbytes = nbytes
        self.address = 0  # where in staging it passes through


class Passage:
    """Units that pass through one piece of staging."""

    def __init__(self, piece: StagingPiece, units: list[Unit]) -> None:
        self.piece = piece
        self.units = units
        self.again = 0  # so many pieces of the same batch have had the same memory before
        self.transfers: list[Transfer] = []
        self.passed = 0  # so many of them, from the front, are ones that the stream was told to wait for


def end_of_alike(units: list[Unit], beg: int) -> int:
    """End of the run of units that differ from units[beg] in the page only."""
    end = beg + 1
    while end < len(units) and units[end].pool == units[beg].pool and units[end].offset == units[beg].offset:
        end += 1
    return end


def addresses_of(arena: Arena, slots: list[SlotId], units: list[Unit]) -> list[int]:
    """Where units lie in their slots: memory addresses, or file offsets."""
    return [arena.address(slots[unit.index]) + unit.offset for unit in units]


class Copier:
    """Queues batches. It never blocks the host: a batch larger than the staging ring goes round it in stream order."""

    def __init__(self, driver: Driver, timeline: Timeline, settling: Settling, ring: StagingRing) -> None:
        self._driver = driver
        self._timeline = timeline
        self._settling = settling
        self._ring = ring
        self._streams: list[Stream] = []
        self._turn = 0
        self._stream = Stream(0)  # of the latest batch
        self._passages: list[Passage] = []  # of the batch being queued, that it has not left yet
        self._under_way = 0  # the first of them whose units have not come out
        self._staged: Point = NULL_POINT  # end of the latest batch that went through staging ...
        self._staged_from = 0  # ... and the part of the ring that it used
        self._staged_to = 0
        self._gates: list[int] = []  # of transfers without staging, that the stream has yet to be told to wait for
        self.source_free: Point = NULL_POINT  # of the latest batch
        self.ready: Point = NULL_POINT

    def run(self, batch: CopyBatch) -> None:
        """Queue a batch. On an exception some of its copies may have been queued: `abandon` must follow."""
        self.source_free = NULL_POINT
        self.ready = NULL_POINT
        self._stream = self._next_stream()
        last = NULL_POINT
        for point in batch.waits:
            if point != last:
                self._timeline.wait(self._stream, point)
                last = point
        reads = batch.source.tier == CacheTier.DISK
        writes = batch.destination.tier == CacheTier.DISK
        if not reads and not writes:
            self._copy(batch)
        elif reads and batch.destination.tier == CacheTier.HOST_MEM:
            self._read(batch)
        elif writes and batch.source.tier == CacheTier.HOST_MEM:
            self._write(batch)
        else:
            self._stage(batch)
        self._pass_gates()
        self.ready = self._timeline.record(self._stream)
        if self.source_free == NULL_POINT:
            self.source_free = self.ready
        self._settling.end_batch(self.ready)
        self._leave(len(self._passages), self.ready)

    def abandon(self, pages: list[Page]) -> Point:
        """After an exception from `run`: a point that covers whatever it had queued; the readiness of `pages` includes it."""
        with suppress(Exception):  # whatever it was, `run` has raised already
            self._pass_gates()
            for passage in self._passages:
                self._pass(passage)
        point = self._timeline.record_or_wait(self._stream)
        self._gates.clear()
        self._settling.abandon(point)
        self._leave(len(self._passages), point)
        for page in pages:
            page.ready = self._timeline.merge(page.ready, point)
        return point

    def merge(self, first: Point, second: Point) -> Point:
        """A point that is over once both are."""
        return self._timeline.merge(first, second)

    def close(self) -> None:
        """Give streams and staging back; all work is complete."""
        for stream in self._streams:
            self._timeline.forget(stream)
            self._driver.destroy_stream(stream)
        self._streams.clear()
        if self._ring.quarantined:
            _log.warning("the staging ring is not given back: a file read that timed out may still write to it")
        else:
            self._ring.close()

    # --- without staging

    def _copy(self, batch: CopyBatch) -> None:
        for pool in range(len(batch.source.arenas)):
            source = batch.source.arenas[pool]
            destination = batch.destination.arenas[pool]
            sources = [source.address(slot) for slot in batch.source_slots]
            destinations = [destination.address(slot) for slot in batch.slots]
            self._driver.copy_batch(self._stream, destinations, sources, source.slot_bytes)

    def _read(self, batch: CopyBatch) -> None:
        """File to host memory. A late read may still write to the slots themselves."""
        for pool in range(len(batch.source.arenas)):
            source = batch.source.arenas[pool]
            destination = batch.destination.arenas[pool]
            offsets = [source.address(slot) for slot in batch.source_slots]
            addresses = [destination.address(slot) for slot in batch.slots]
            gates: list[int] = []
            try:
                self._driver.read_files(self._stream, batch.source.fds[pool], offsets, addresses, source.slot_bytes, gates)
            finally:
                self._note_direct(gates, batch)

    def _write(self, batch: CopyBatch) -> None:
        """Host memory to file."""
        for pool in range(len(batch.source.arenas)):
            source = batch.source.arenas[pool]
            destination = batch.destination.arenas[pool]
            offsets = [destination.address(slot) for slot in batch.slots]
            addresses = [source.address(slot) for slot in batch.source_slots]
            gates: list[int] = []
            try:
                self._driver.write_files(self._stream, batch.destination.fds[pool], offsets, addresses, source.slot_bytes, gates)
            finally:
                self._note_direct(gates, batch)

    # --- through staging

    def _stage(self, batch: CopyBatch) -> None:
        """Piece by piece, in stream order: while the units of one come out, those of the next few are on their way in, since a file
        transfer waits for the stream and not the stream for it."""
        units = self._cut(batch)
        ring = self._ring
        again = 0
        if self._settling.in_flight == 0 and self._timeline.done(self._staged):
            ring.cursor = self._staged_from
        else:
            ring.cursor = self._staged_to
        self._staged_from = ring.cursor
        self._staged_to = ring.cursor
        done = 0
        while done < len(units):
            passage: Passage | None = None
            if len(self._passages) < MOST_PASSAGES:
                passage = self._acquire(units, done, batch.source.tier == CacheTier.DISK)
            if passage is None:
                again = self._make_room(batch)
                continue
            passage.again = again
            if again == 0:
                self._staged_to = ring.cursor
            self._passages.append(passage)
            done += len(passage.units)
            self._bring_in(batch, passage)
        if batch.source.tier != CacheTier.DISK:
            self.source_free = self._timeline.record(self._stream)
        while self._under_way < len(self._passages):
            self._bring_out(batch)

    def _bring_in(self, batch: CopyBatch, passage: Passage) -> None:
        """Units go into their staging piece; from memory, they leave for a file at once."""
        if batch.source.tier == CacheTier.DISK:
            self._units_from_file(batch, passage)
        else:
            self._units_by_copy(batch, passage.units, False)
            self._units_to_file(batch, passage)

    def _bring_out(self, batch: CopyBatch) -> None:
        """The units of the oldest piece that holds some come out of it, in stream order."""
        passage = self._passages[self._under_way]
        self._pass(passage)
        if batch.source.tier == CacheTier.DISK:
            if batch.destination.tier == CacheTier.DISK:
                self._units_to_file(batch, passage)
                self._pass(passage)
            else:
                self._units_by_copy(batch, passage.units, True)
        self._under_way += 1

    def _cut(self, batch: CopyBatch) -> list[Unit]:
        units: list[Unit] = []
        for pool in range(len(batch.source.arenas)):
            slot_bytes = batch.source.arenas[pool].slot_bytes
            step = min(slot_bytes, PIECE_BYTES, self._ring.largest)
            for offset in range(0, slot_bytes, step):
                nbytes = min(step, slot_bytes - offset)
                for index in range(len(batch.pages)):
                    units.append(Unit(index, pool, offset, nbytes))
        return units

    def _acquire(self, units: list[Unit], beg: int, from_file: bool) -> Passage | None:
        """A staging piece for units from `beg` on, as many as fit; the stream waits for its last use. None: there is no room."""
        most = min(PIECE_BYTES, self._ring.largest)
        wanted = units[beg].nbytes
        for index in range(beg + 1, len(units)):
            if wanted + units[index].nbytes > most:
                break
            wanted += units[index].nbytes
        piece = self._ring.acquire(self._stream, units[beg].nbytes, wanted, from_file)
        if piece is None:
            return None
        end = beg
        left = piece.nbytes
        address = piece.address
        while end < len(units) and units[end].nbytes <= left:
            unit = units[end]
            unit.address = address
            address += unit.nbytes
            left -= unit.nbytes
            end += 1
        return Passage(piece, units[beg:end])

    def _make_room(self, batch: CopyBatch) -> int:
        """Let go of our oldest piece. Returns how often the memory that comes next has been used by the batch."""
        if not self._passages:
            self._settling.poll()  # perhaps a read that had timed out has ended by now
            if self._ring.quarantined:
                raise OutOfMemoryError(
                    "the staging ring has no room: file reads that timed out may still write to it: " + self._settling.last_error
                )
            raise CorruptedError("the staging ring has no room, and nobody uses it")
        self._bring_out(batch)
        oldest = self._passages[0]
        self._leave(1, self._timeline.record(self._stream))
        if batch.source.tier == CacheTier.DISK and oldest.again + 1 >= MOST_READS:
            self._ring.cursor = self._staged_to
            return 0
        self._ring.cursor = oldest.piece.offset
        return oldest.again + 1

    def _units_by_copy(self, batch: CopyBatch, units: list[Unit], outward: bool) -> None:
        """Copy between staging and slots of memory; one driver call for neighbours that differ in the page only."""
        place = batch.destination if outward else batch.source
        slots = batch.slots if outward else batch.source_slots
        beg = 0
        while beg < len(units):
            first = units[beg]
            end = end_of_alike(units, beg)
            staged = [unit.address for unit in units[beg:end]]
            direct = addresses_of(place.arenas[first.pool], slots, units[beg:end])
            if outward:
                self._driver.copy_batch(self._stream, direct, staged, first.nbytes)
            else:
                self._driver.copy_batch(self._stream, staged, direct, first.nbytes)
            beg = end

    def _units_from_file(self, batch: CopyBatch, passage: Passage) -> None:
        units = passage.units
        beg = 0
        while beg < len(units):
            first = units[beg]
            end = end_of_alike(units, beg)
            staged = [unit.address for unit in units[beg:end]]
            offsets = addresses_of(batch.source.arenas[first.pool], batch.source_slots, units[beg:end])
            gates: list[int] = []
            try:
                self._driver.read_files(self._stream, batch.source.fds[first.pool], offsets, staged, first.nbytes, gates)
            finally:
                self._note_staged(gates, batch, passage, beg, -1)
            beg = end

    def _units_to_file(self, batch: CopyBatch, passage: Passage) -> None:
        units = passage.units
        beg = 0
        while beg < len(units):
            first = units[beg]
            end = end_of_alike(units, beg)
            staged = [unit.address for unit in units[beg:end]]
            offsets = addresses_of(batch.destination.arenas[first.pool], batch.slots, units[beg:end])
            gates: list[int] = []
            try:
                self._driver.write_files(self._stream, batch.destination.fds[first.pool], offsets, staged, first.nbytes, gates)
            finally:
                self._note_staged(gates, batch, passage, beg, batch.cell)
            beg = end

    # --- parts

    def _next_stream(self) -> Stream:
        if len(self._streams) < NUM_STREAMS:
            self._streams.append(self._driver.create_stream())
            return self._streams[-1]
        self._turn = (self._turn + 1) % NUM_STREAMS
        return self._streams[self._turn]

    def _note_direct(self, gates: list[int], batch: CopyBatch) -> None:
        """Transfers of the first pages that write to the destination slots themselves, from memory that is not staging."""
        self._gates += gates
        for index in range(len(gates)):
            self._settling.add(gates[index], batch.pages[index], batch.cell, batch.slots[index], None)

    def _note_staged(self, gates: list[int], batch: CopyBatch, passage: Passage, beg: int, cell: int) -> None:
        """Transfers between a file and a staging piece, of its units from `beg` on."""
        for i in range(len(gates)):
            index = passage.units[beg + i].index
            transfer = self._settling.add(gates[i], batch.pages[index], cell, batch.slots[index], passage.piece)
            passage.transfers.append(transfer)

    def _pass_gates(self) -> None:
        if self._gates:
            self._driver.wait_gates(self._stream, self._gates)
            self._gates.clear()

    def _pass(self, passage: Passage) -> None:
        """The stream waits until the file transfers of a piece are over."""
        gates = [transfer.gate for transfer in passage.transfers[passage.passed :]]
        if gates:
            self._driver.wait_gates(self._stream, gates)
        passage.passed = len(passage.transfers)

    def _leave(self, count: int, point: Point) -> None:
        """Give back the oldest pieces: at this point their units have come out."""
        if self._passages:
            self._staged = point
        for passage in self._passages[:count]:
            self._settling.stamp(passage.transfers, point)
            self._ring.release(passage.piece, point)
        del self._passages[:count]
        self._under_way = max(0, self._under_way - count)
