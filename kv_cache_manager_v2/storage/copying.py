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
from typing import Final

from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.staging import StagingPiece, StagingRing
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.errors import CorruptedError, OutOfMemoryError
from kv_cache_manager_v2.ids import NULL_POINT, CacheTier, Point, SlotId, Stream
from kv_cache_manager_v2.storage.page import Page
from kv_cache_manager_v2.storage.places import Place
from kv_cache_manager_v2.storage.settling import Settling

NUM_STREAMS: Final = 4  # batches take turns, so that one does not often wait for an unrelated one
PIECE_BYTES: Final = 1 << 20  # a slot larger than this passes in several pieces; smaller ones share one, so a file read that hangs
# keeps no more than this of the ring

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
        self.piece: StagingPiece | None = None  # staging piece that it passes through ...
        self.address = 0  # ... and where in it


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
        self._pieces: list[StagingPiece] = []  # staging pieces of the batch being queued that it has not left yet
        self._gates: list[int] = []  # gates that the stream has yet to be told to wait for
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
        self._settling.stamp(self.ready)
        self._settling.end_batch()
        self._leave_pieces(self.ready)

    def abandon(self, pages: list[Page]) -> Point:
        """After an exception from `run`: a point that covers whatever it had queued; the readiness of `pages` includes it."""
        point = NULL_POINT
        try:
            self._pass_gates()
            point = self._timeline.record(self._stream)
        except Exception:
            self._driver.synchronize()  # the stream takes no more work: wait for what it has
        self._gates.clear()
        self._settling.abandon(point)
        self._leave_pieces(point)
        for page in pages:
            page.ready = self._timeline.merge(page.ready, point)
        return point

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
            fd = batch.source.fds[pool]
            for i in range(len(batch.pages)):
                offset = source.address(batch.source_slots[i])
                gate = self._driver.read_file(self._stream, fd, offset, destination.address(batch.slots[i]), source.slot_bytes)
                self._note_direct(gate, batch, i)

    def _write(self, batch: CopyBatch) -> None:
        """Host memory to file."""
        for pool in range(len(batch.source.arenas)):
            source = batch.source.arenas[pool]
            destination = batch.destination.arenas[pool]
            fd = batch.destination.fds[pool]
            for i in range(len(batch.pages)):
                offset = destination.address(batch.slots[i])
                gate = self._driver.write_file(self._stream, fd, offset, source.address(batch.source_slots[i]), source.slot_bytes)
                self._note_direct(gate, batch, i)

    # --- through staging

    def _stage(self, batch: CopyBatch) -> None:
        """Rounds: as many units as the staging area takes go in, then out, all in stream order."""
        reads = batch.source.tier == CacheTier.DISK
        writes = batch.destination.tier == CacheTier.DISK
        units = self._cut(batch)
        done = 0
        while done < len(units):
            count = self._place(units, done, reads)
            if count == 0:
                self._go_round()
                continue
            group = units[done : done + count]
            done += count
            if reads:
                self._units_from_file(batch, group)
                self._pass_gates()
            else:
                self._units_by_copy(batch, group, False)
            if writes:
                if not reads and done == len(units):
                    self.source_free = self._timeline.record(self._stream)
                self._units_to_file(batch, group)
            else:
                self._units_by_copy(batch, group, True)

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

    def _place(self, units: list[Unit], beg: int, from_file: bool) -> int:
        """Give staging memory to units from `beg` on, as many as fit; the stream waits for its last use. Returns how many."""
        index = beg
        while index < len(units):
            first = units[index].nbytes
            piece = self._ring.acquire(self._stream, first, max(first, min(PIECE_BYTES, self._ring.largest)), from_file)
            if piece is None:
                break
            self._pieces.append(piece)
            left = piece.nbytes
            address = piece.address
            while index < len(units) and units[index].nbytes <= left:
                unit = units[index]
                unit.piece = piece
                unit.address = address
                address += unit.nbytes
                left -= unit.nbytes
                index += 1
        return index - beg

    def _go_round(self) -> None:
        """The ring is used up: let go of our own pieces, so that the rest of the batch follows in them, in stream order."""
        if not self._pieces:
            self._settling.poll()  # perhaps a read that had timed out has ended by now
            if self._ring.quarantined:
                raise OutOfMemoryError(
                    "the staging ring has no room: file reads that timed out may still write to it: " + self._settling.last_error
                )
            raise CorruptedError("the staging ring has no room, and nobody uses it")
        self._pass_gates()
        point = self._timeline.record(self._stream)
        self._settling.stamp(point)
        self._leave_pieces(point)

    def _units_by_copy(self, batch: CopyBatch, units: list[Unit], outward: bool) -> None:
        """Copy between staging and slots of memory; one driver call for neighbours that differ in the page only."""
        place = batch.destination if outward else batch.source
        slots = batch.slots if outward else batch.source_slots
        beg = 0
        while beg < len(units):
            first = units[beg]
            arena = place.arenas[first.pool]
            staged: list[int] = []
            direct: list[int] = []
            end = beg
            while end < len(units) and units[end].pool == first.pool and units[end].offset == first.offset:
                staged.append(units[end].address)
                direct.append(arena.address(slots[units[end].index]) + first.offset)
                end += 1
            if outward:
                self._driver.copy_batch(self._stream, direct, staged, first.nbytes)
            else:
                self._driver.copy_batch(self._stream, staged, direct, first.nbytes)
            beg = end

    def _units_from_file(self, batch: CopyBatch, units: list[Unit]) -> None:
        for unit in units:
            offset = batch.source.arenas[unit.pool].address(batch.source_slots[unit.index]) + unit.offset
            gate = self._driver.read_file(self._stream, batch.source.fds[unit.pool], offset, unit.address, unit.nbytes)
            self._note_transfer(gate, batch, unit, True)

    def _units_to_file(self, batch: CopyBatch, units: list[Unit]) -> None:
        for unit in units:
            offset = batch.destination.arenas[unit.pool].address(batch.slots[unit.index]) + unit.offset
            gate = self._driver.write_file(self._stream, batch.destination.fds[unit.pool], offset, unit.address, unit.nbytes)
            self._note_transfer(gate, batch, unit, False)

    # --- parts

    def _next_stream(self) -> Stream:
        if len(self._streams) < NUM_STREAMS:
            self._streams.append(self._driver.create_stream())
            return self._streams[-1]
        self._turn = (self._turn + 1) % NUM_STREAMS
        return self._streams[self._turn]

    def _note_direct(self, gate: int, batch: CopyBatch, index: int) -> None:
        """A transfer that writes to the destination slot itself, from memory that is not staging."""
        self._gates.append(gate)
        self._settling.add(gate, batch.pages[index], batch.cell, batch.slots[index], None)

    def _note_transfer(self, gate: int, batch: CopyBatch, unit: Unit, into_staging: bool) -> None:
        """A transfer between a file and a staging piece."""
        self._gates.append(gate)
        cell = -1 if into_staging else batch.cell
        self._settling.add(gate, batch.pages[unit.index], cell, batch.slots[unit.index], unit.piece)

    def _pass_gates(self) -> None:
        for gate in self._gates:
            self._driver.wait_gate(self._stream, gate)
        self._gates.clear()

    def _leave_pieces(self, point: Point) -> None:
        for piece in self._pieces:
            self._ring.release(piece, point)
        self._pieces.clear()
