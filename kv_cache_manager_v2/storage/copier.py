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
from kv_cache_manager_v2.storage.in_flight import Transfer, TransfersInFlight
from kv_cache_manager_v2.storage.page import Page
from kv_cache_manager_v2.storage.places import Place

NUM_STREAMS: Final = 4  # batches take turns, so that one does not often wait for an unrelated one
PIECE_BYTES: Final = 1 << 20  # a slot larger than this passes in several pieces; smaller ones share one, so a file read that hangs
# keeps no more than this of the ring
MOST_STAGED_COPIES: Final = (
    4  # pieces of staging that a batch uses at once: enough to keep the threads that move files busy, and so few
)
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


class Segment:
    """A part of one page that passes through staging at once."""

    def __init__(self, index: int, pool: int, offset: int, nbytes: int) -> None:
        self.index = index  # of the page in the batch
        self.pool = pool
        self.offset = offset  # in the slot
        self.nbytes = nbytes
        self.address = 0  # where in staging it passes through


class StagedCopy:
    """Units that pass through one piece of staging."""

    def __init__(self, piece: StagingPiece, segments: list[Segment]) -> None:
        self.piece = piece
        self.segments = segments
        self.again = 0  # so many pieces of the same batch have had the same memory before
        self.transfers: list[Transfer] = []
        self.passed = 0  # so many of them, from the front, are ones that the stream was told to wait for


def end_of_alike(segments: list[Segment], beg: int) -> int:
    """End of the run of segments that differ from segments[beg] in the page only."""
    end = beg + 1
    while end < len(segments) and segments[end].pool == segments[beg].pool and segments[end].offset == segments[beg].offset:
        end += 1
    return end


def addresses_of(arena: Arena, slots: list[SlotId], segments: list[Segment]) -> list[int]:
    """Where segments lie in their slots: memory addresses, or file offsets."""
    return [arena.address(slots[segment.index]) + segment.offset for segment in segments]


class Copier:
    """Queues batches. It never blocks the host: a batch larger than the staging ring goes round it in stream order."""

    def __init__(self, driver: Driver, timeline: Timeline, settling: TransfersInFlight, ring: StagingRing) -> None:
        self._driver = driver
        self._timeline = timeline
        self._settling = settling
        self._ring = ring
        self._streams: list[Stream] = []
        self._turn = 0
        self._stream = Stream(0)  # of the latest batch
        self._staged_copies: list[StagedCopy] = []  # of the batch being queued, that it has not left yet
        self._under_way = 0  # the first of them whose segments have not come out
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
        self._leave(len(self._staged_copies), self.ready)

    def abandon(self, pages: list[Page]) -> Point:
        """After an exception from `run`: a point that covers whatever it had queued; the readiness of `pages` includes it."""
        with suppress(Exception):  # whatever it was, `run` has raised already
            self._pass_gates()
            for staged_copy in self._staged_copies:
                self._pass(staged_copy)
        point = self._timeline.record_or_wait(self._stream)
        self._gates.clear()
        self._settling.abandon(point)
        self._leave(len(self._staged_copies), point)
        for page in pages:
            page.ready = self._timeline.merge(page.ready, point)
        return point

    def merge(self, first: Point, second: Point) -> Point:
        """A point that is over once both are."""
        return self._timeline.merge(first, second)

    def close(self) -> None:
        """Give streams and staging back; all work is complete."""
        for stream in self._streams:
            self._timeline.destroy_stream(stream)
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
        """Piece by piece, in stream order: while the segments of one piece come out, those of the next are on their way in.

        A file transfer waits for the stream, and the stream does not wait for it.
        """
        segments = self._cut(batch)
        ring = self._ring
        again = 0
        if self._settling.in_flight == 0 and self._timeline.done(self._staged):
            ring.cursor = self._staged_from
        else:
            ring.cursor = self._staged_to
        self._staged_from = ring.cursor
        self._staged_to = ring.cursor
        done = 0
        while done < len(segments):
            staged_copy: StagedCopy | None = None
            if len(self._staged_copies) < MOST_STAGED_COPIES:
                staged_copy = self._acquire(segments, done, batch.source.tier == CacheTier.DISK)
            if staged_copy is None:
                again = self._make_room(batch)
                continue
            staged_copy.again = again
            if again == 0:
                self._staged_to = ring.cursor
            self._staged_copies.append(staged_copy)
            done += len(staged_copy.segments)
            self._bring_in(batch, staged_copy)
        if batch.source.tier != CacheTier.DISK:
            self.source_free = self._timeline.record(self._stream)
        while self._under_way < len(self._staged_copies):
            self._bring_out(batch)

    def _bring_in(self, batch: CopyBatch, staged_copy: StagedCopy) -> None:
        """Units go into their staging piece; from memory, they leave for a file at once."""
        if batch.source.tier == CacheTier.DISK:
            self._segments_from_file(batch, staged_copy)
        else:
            self._segments_by_copy(batch, staged_copy.segments, False)
            self._segments_to_file(batch, staged_copy)

    def _bring_out(self, batch: CopyBatch) -> None:
        """The segments of the oldest piece that holds some come out of it, in stream order."""
        staged_copy = self._staged_copies[self._under_way]
        self._pass(staged_copy)
        if batch.source.tier == CacheTier.DISK:
            if batch.destination.tier == CacheTier.DISK:
                self._segments_to_file(batch, staged_copy)
                self._pass(staged_copy)
            else:
                self._segments_by_copy(batch, staged_copy.segments, True)
        self._under_way += 1

    def _cut(self, batch: CopyBatch) -> list[Segment]:
        segments: list[Segment] = []
        for pool in range(len(batch.source.arenas)):
            slot_bytes = batch.source.arenas[pool].slot_bytes
            step = min(slot_bytes, PIECE_BYTES, self._ring.largest)
            for offset in range(0, slot_bytes, step):
                nbytes = min(step, slot_bytes - offset)
                for index in range(len(batch.pages)):
                    segments.append(Segment(index, pool, offset, nbytes))
        return segments

    def _acquire(self, segments: list[Segment], beg: int, from_file: bool) -> StagedCopy | None:
        """A staging piece for segments from `beg` on, as many as fit; the stream waits for its last use. None: there is no room."""
        most = min(PIECE_BYTES, self._ring.largest)
        wanted = segments[beg].nbytes
        for index in range(beg + 1, len(segments)):
            if wanted + segments[index].nbytes > most:
                break
            wanted += segments[index].nbytes
        piece = self._ring.acquire(self._stream, segments[beg].nbytes, wanted, from_file)
        if piece is None:
            return None
        end = beg
        left = piece.nbytes
        address = piece.address
        while end < len(segments) and segments[end].nbytes <= left:
            segment = segments[end]
            segment.address = address
            address += segment.nbytes
            left -= segment.nbytes
            end += 1
        return StagedCopy(piece, segments[beg:end])

    def _make_room(self, batch: CopyBatch) -> int:
        """Let go of our oldest piece. Returns how often the memory that comes next has been used by the batch."""
        if not self._staged_copies:
            self._settling.poll()  # perhaps a read that had timed out has ended by now
            if self._ring.quarantined:
                raise OutOfMemoryError(
                    "the staging ring has no room: file reads that timed out may still write to it: " + self._settling.last_error
                )
            raise CorruptedError("the staging ring has no room, and nobody uses it")
        self._bring_out(batch)
        oldest = self._staged_copies[0]
        self._leave(1, self._timeline.record(self._stream))
        if batch.source.tier == CacheTier.DISK and oldest.again + 1 >= MOST_READS:
            self._ring.cursor = self._staged_to
            return 0
        self._ring.cursor = oldest.piece.offset
        return oldest.again + 1

    def _segments_by_copy(self, batch: CopyBatch, segments: list[Segment], outward: bool) -> None:
        """Copy between staging and slots of memory; one driver call for neighbours that differ in the page only."""
        place = batch.destination if outward else batch.source
        slots = batch.slots if outward else batch.source_slots
        beg = 0
        while beg < len(segments):
            first = segments[beg]
            end = end_of_alike(segments, beg)
            staged = [segment.address for segment in segments[beg:end]]
            direct = addresses_of(place.arenas[first.pool], slots, segments[beg:end])
            if outward:
                self._driver.copy_batch(self._stream, direct, staged, first.nbytes)
            else:
                self._driver.copy_batch(self._stream, staged, direct, first.nbytes)
            beg = end

    def _segments_from_file(self, batch: CopyBatch, staged_copy: StagedCopy) -> None:
        segments = staged_copy.segments
        beg = 0
        while beg < len(segments):
            first = segments[beg]
            end = end_of_alike(segments, beg)
            staged = [segment.address for segment in segments[beg:end]]
            offsets = addresses_of(batch.source.arenas[first.pool], batch.source_slots, segments[beg:end])
            gates: list[int] = []
            try:
                self._driver.read_files(self._stream, batch.source.fds[first.pool], offsets, staged, first.nbytes, gates)
            finally:
                self._note_staged(gates, batch, staged_copy, beg, -1)
            beg = end

    def _segments_to_file(self, batch: CopyBatch, staged_copy: StagedCopy) -> None:
        segments = staged_copy.segments
        beg = 0
        while beg < len(segments):
            first = segments[beg]
            end = end_of_alike(segments, beg)
            staged = [segment.address for segment in segments[beg:end]]
            offsets = addresses_of(batch.destination.arenas[first.pool], batch.slots, segments[beg:end])
            gates: list[int] = []
            try:
                self._driver.write_files(self._stream, batch.destination.fds[first.pool], offsets, staged, first.nbytes, gates)
            finally:
                self._note_staged(gates, batch, staged_copy, beg, batch.cell)
            beg = end

    # --- parts

    def _next_stream(self) -> Stream:
        if len(self._streams) < NUM_STREAMS:
            self._streams.append(self._timeline.create_stream())
            return self._streams[-1]
        self._turn = (self._turn + 1) % NUM_STREAMS
        return self._streams[self._turn]

    def _note_direct(self, gates: list[int], batch: CopyBatch) -> None:
        """Transfers of the first pages that write to the destination slots themselves, from memory that is not staging."""
        self._gates += gates
        for index in range(len(gates)):
            self._settling.add(gates[index], batch.pages[index], batch.cell, batch.slots[index], None)

    def _note_staged(self, gates: list[int], batch: CopyBatch, staged_copy: StagedCopy, beg: int, cell: int) -> None:
        """Transfers between a file and a staging piece, of its segments from `beg` on."""
        for i in range(len(gates)):
            index = staged_copy.segments[beg + i].index
            transfer = self._settling.add(gates[i], batch.pages[index], cell, batch.slots[index], staged_copy.piece)
            staged_copy.transfers.append(transfer)

    def _pass_gates(self) -> None:
        if self._gates:
            self._driver.wait_gates(self._stream, self._gates)
            self._gates.clear()

    def _pass(self, staged_copy: StagedCopy) -> None:
        """The stream waits until the file transfers of a piece are over."""
        gates = [transfer.gate for transfer in staged_copy.transfers[staged_copy.passed :]]
        if gates:
            self._driver.wait_gates(self._stream, gates)
        staged_copy.passed = len(staged_copy.transfers)

    def _leave(self, count: int, point: Point) -> None:
        """Give back the oldest pieces: at this point their segments have come out."""
        if self._staged_copies:
            self._staged = point
        for staged_copy in self._staged_copies[:count]:
            self._settling.stamp(staged_copy.transfers, point)
            self._ring.release(staged_copy.piece, point)
        del self._staged_copies[:count]
        self._under_way = max(0, self._under_way - count)
