"""Copies of slots between any two tiers, batched, in stream order.

Rule: a batch runs on a copy stream of its own, after everything that it is told to wait for, and ends in two points:
`source_free`, from which on the source slots may be overwritten, and `ready`, from which on the destination slots hold the bytes.
Queueing changes no page and no cell. A batch whose queueing raised is abandoned (see `TransfersInFlight`).

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

from kv_cache_manager_v2.device.arenas import Arena
from kv_cache_manager_v2.device.checksums import EXTENT_BYTES
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.staging import StagingRing
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.errors import CorruptedError, OutOfMemoryError
from kv_cache_manager_v2.ids import NULL_POINT, Point, SlotId, Stream
from kv_cache_manager_v2.storage.copy_batch import CopyBatch, Segment, StagedCopy
from kv_cache_manager_v2.storage.in_flight import TransfersInFlight

NUM_STREAMS: Final = 4  # batches take turns, so that one does not often wait for an unrelated one
# A slot larger than this passes in several pieces; smaller ones share one, so a file read that hangs keeps no more than this of the
# ring. File transfers move whole extents, because each extent has a checksum.
PIECE_BYTES: Final = EXTENT_BYTES
MOST_STAGED_COPIES: Final = 4  # pieces of staging that a batch uses at once: enough to keep the threads that move files busy, and
# so few that the processor's caches hold them until they are used again ...
MOST_READS: Final = 2  # ... which for file reads is not more often than this: one that hangs spoils what follows in the same memory

_log: Final = logging.getLogger(__name__)


def end_of_alike(segments: list[Segment], beg: int) -> int:
    """End of the run of segments that differ from segments[beg] in the page only."""
    end = beg + 1
    while end < len(segments) and segments[end].pool == segments[beg].pool and segments[end].offset == segments[beg].offset:
        end += 1
    return end


def addresses_of(arena: Arena, slots: list[SlotId], segments: list[Segment]) -> list[int]:
    """Where segments are in their slots: memory addresses, or file offsets."""
    return [arena.address(slots[segment.index]) + segment.offset for segment in segments]


class Copier:
    """Queues batches. It never blocks the host: a batch larger than the staging ring goes round it in stream order."""

    def __init__(self, driver: Driver, timeline: Timeline, in_flight: TransfersInFlight, ring: StagingRing) -> None:
        self._driver = driver
        self._timeline = timeline
        self._in_flight = in_flight
        self._ring = ring
        self._streams: list[Stream] = []
        self._turn = 0
        self._staged: Point = NULL_POINT  # end of the latest batch that went through staging ...
        self._staged_from = 0  # ... and the part of the ring that it used
        self._staged_to = 0

    def queue(self, batch: CopyBatch) -> None:
        """Queue a batch. On an exception some of its copies may have been queued: the caller abandons it."""
        stream = self._next_stream()
        batch.stream = stream
        last = NULL_POINT
        for point in batch.waits:
            if point != last:
                self._timeline.wait(stream, point)
                last = point
        source = batch.source.tier
        destination = batch.cell.tier
        if not source.by_file and not destination.by_file:
            self._copy(batch, stream)
        elif source.by_file and destination.takes_files:
            self._read(batch, stream)
        elif destination.by_file and source.takes_files:
            self._write(batch, stream)
        else:
            self._stage(batch, stream)
        self._wait_for_direct(batch, stream)
        batch.ready = self._timeline.record(stream)
        if batch.source_free == NULL_POINT:
            batch.source_free = batch.ready
        self._release(batch, len(batch.staged), batch.ready)

    def close(self) -> None:
        """Free streams and staging; all work is complete. Can be tried again after an error."""
        while self._streams:
            self._timeline.destroy_stream(self._streams[-1])
            self._streams.pop()
        if self._ring.quarantined or self._in_flight.uses_staging():
            _log.warning("the staging ring stays: a file read that timed out, or a copy that failed, may still write to it")
        else:
            self._ring.close()

    # --- without staging

    def _copy(self, batch: CopyBatch, stream: Stream) -> None:
        for pool in range(len(batch.source.arenas)):
            source = batch.source.arenas[pool]
            destination = batch.cell.arenas[pool]
            sources = [source.address(slot) for slot in batch.source_slots]
            destinations = [destination.address(slot) for slot in batch.slots]
            self._driver.copy_batch(stream, destinations, sources, source.slot_bytes)

    def _read(self, batch: CopyBatch, stream: Stream) -> None:
        """File to host memory. A late read may still write to the slots themselves."""
        for pool in range(len(batch.source.arenas)):
            source = batch.source.arenas[pool]
            destination = batch.cell.arenas[pool]
            offsets = [source.address(slot) for slot in batch.source_slots]
            addresses = [destination.address(slot) for slot in batch.slots]
            gates: list[int] = []
            try:
                self._driver.read_files(stream, source.fd, offsets, addresses, source.slot_bytes, gates)
            finally:
                self._note_direct(batch, gates)

    def _write(self, batch: CopyBatch, stream: Stream) -> None:
        """Host memory to file."""
        for pool in range(len(batch.source.arenas)):
            source = batch.source.arenas[pool]
            destination = batch.cell.arenas[pool]
            offsets = [destination.address(slot) for slot in batch.slots]
            addresses = [source.address(slot) for slot in batch.source_slots]
            gates: list[int] = []
            try:
                self._driver.write_files(stream, destination.fd, offsets, addresses, source.slot_bytes, gates)
            finally:
                self._note_direct(batch, gates)

    def _note_direct(self, batch: CopyBatch, gates: list[int]) -> None:
        """Transfers of the first pages between a file and memory that is not staging; they write to the destination slots."""
        batch.gates += gates
        batch.add_transfers(gates, list(range(len(gates))), None, True)

    def _wait_for_direct(self, batch: CopyBatch, stream: Stream) -> None:
        if batch.gates:
            self._driver.wait_gates(stream, batch.gates)

    # --- through staging

    def _stage(self, batch: CopyBatch, stream: Stream) -> None:
        """Piece by piece, in stream order: while the segments of one piece come out, those of the next are on their way in.

        A file transfer waits for the stream, and the stream does not wait for it.
        """
        segments = self._cut(batch)
        ring = self._ring
        rounds = 0
        if self._in_flight.in_flight == 0 and self._timeline.done(self._staged):
            ring.cursor = self._staged_from
        else:
            ring.cursor = self._staged_to
        self._staged_from = ring.cursor
        self._staged_to = ring.cursor
        done = 0
        while done < len(segments):
            staged: StagedCopy | None = None
            if len(batch.staged) < MOST_STAGED_COPIES:
                staged = self._acquire(segments, done, stream, batch.source.tier.by_file)
            if staged is None:
                rounds = self._release_oldest(batch, stream)
                continue
            batch.staged.append(staged)
            staged.rounds = rounds
            if rounds == 0:
                self._staged_to = ring.cursor
            done += len(staged.segments)
            self._bring_in(batch, stream, staged)
        if not batch.source.tier.by_file:
            batch.source_free = self._timeline.record(stream)
        while batch.under_way < len(batch.staged):
            self._bring_out(batch, stream)

    def _bring_in(self, batch: CopyBatch, stream: Stream, staged: StagedCopy) -> None:
        """Segments go into their staging piece; from memory, they leave for a file at once."""
        if batch.source.tier.by_file:
            self._segments_from_file(batch, stream, staged)
        else:
            self._segments_by_copy(batch, stream, staged.segments, False)
            self._segments_to_file(batch, stream, staged)

    def _bring_out(self, batch: CopyBatch, stream: Stream) -> None:
        """The segments of the oldest piece that holds some come out of it, in stream order."""
        staged = batch.staged[batch.under_way]
        self._wait_for_staged(stream, staged)
        if batch.source.tier.by_file:
            if batch.cell.tier.by_file:
                self._segments_to_file(batch, stream, staged)
                self._wait_for_staged(stream, staged)
            else:
                self._segments_by_copy(batch, stream, staged.segments, True)
        batch.under_way += 1

    def _cut(self, batch: CopyBatch) -> list[Segment]:
        segments: list[Segment] = []
        for pool in range(len(batch.source.arenas)):
            slot_bytes = batch.source.arenas[pool].slot_bytes
            step = min(slot_bytes, PIECE_BYTES, self._ring.largest)
            for offset in range(0, slot_bytes, step):
                nbytes = min(step, slot_bytes - offset)
                for index in range(len(batch.slots)):
                    segments.append(Segment(index, pool, offset, nbytes))
        return segments

    def _acquire(self, segments: list[Segment], beg: int, stream: Stream, from_file: bool) -> StagedCopy | None:
        """A staging piece for segments from `beg` on, as many as fit; the stream waits for its last use. None: the ring is full."""
        most = min(PIECE_BYTES, self._ring.largest)
        wanted = segments[beg].nbytes
        for index in range(beg + 1, len(segments)):
            if wanted + segments[index].nbytes > most:
                break
            wanted += segments[index].nbytes
        piece = self._ring.acquire(stream, segments[beg].nbytes, wanted, from_file)
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

    def _release_oldest(self, batch: CopyBatch, stream: Stream) -> int:
        """Release the batch's oldest piece. Returns how often the memory that comes next has been used by the batch."""
        if not batch.staged:
            self._in_flight.poll()  # perhaps a read that had timed out has ended by now
            if self._ring.quarantined or self._in_flight.uses_staging():
                raise OutOfMemoryError(
                    "the staging ring is full: file reads that timed out, or copies that failed, may still write to it: "
                    + self._in_flight.last_error
                )
            raise CorruptedError("the staging ring is full, and none of it is in use")
        self._bring_out(batch, stream)
        oldest = batch.staged[0]
        self._release(batch, 1, self._timeline.record(stream))
        if batch.source.tier.by_file and oldest.rounds + 1 >= MOST_READS:
            self._ring.cursor = self._staged_to
            return 0
        self._ring.cursor = oldest.piece.offset
        return oldest.rounds + 1

    def _segments_by_copy(self, batch: CopyBatch, stream: Stream, segments: list[Segment], outward: bool) -> None:
        """Copy between staging and slots of memory; one driver call for neighbours that differ in the page only."""
        cell = batch.cell if outward else batch.source
        slots = batch.slots if outward else batch.source_slots
        beg = 0
        while beg < len(segments):
            first = segments[beg]
            end = end_of_alike(segments, beg)
            staged = [segment.address for segment in segments[beg:end]]
            direct = addresses_of(cell.arenas[first.pool], slots, segments[beg:end])
            if outward:
                self._driver.copy_batch(stream, direct, staged, first.nbytes)
            else:
                self._driver.copy_batch(stream, staged, direct, first.nbytes)
            beg = end

    def _segments_from_file(self, batch: CopyBatch, stream: Stream, staged: StagedCopy) -> None:
        segments = staged.segments
        beg = 0
        while beg < len(segments):
            first = segments[beg]
            end = end_of_alike(segments, beg)
            addresses = [segment.address for segment in segments[beg:end]]
            arena = batch.source.arenas[first.pool]
            offsets = addresses_of(arena, batch.source_slots, segments[beg:end])
            gates: list[int] = []
            try:
                self._driver.read_files(stream, arena.fd, offsets, addresses, first.nbytes, gates)
            finally:
                self._note_staged(batch, staged, gates, beg, False)
            beg = end

    def _segments_to_file(self, batch: CopyBatch, stream: Stream, staged: StagedCopy) -> None:
        segments = staged.segments
        beg = 0
        while beg < len(segments):
            first = segments[beg]
            end = end_of_alike(segments, beg)
            addresses = [segment.address for segment in segments[beg:end]]
            arena = batch.cell.arenas[first.pool]
            offsets = addresses_of(arena, batch.slots, segments[beg:end])
            gates: list[int] = []
            try:
                self._driver.write_files(stream, arena.fd, offsets, addresses, first.nbytes, gates)
            finally:
                self._note_staged(batch, staged, gates, beg, True)
            beg = end

    # --- parts

    def _next_stream(self) -> Stream:
        if len(self._streams) < NUM_STREAMS:
            self._streams.append(self._timeline.create_stream())
            return self._streams[-1]
        self._turn = (self._turn + 1) % NUM_STREAMS
        return self._streams[self._turn]

    def _note_staged(self, batch: CopyBatch, staged: StagedCopy, gates: list[int], beg: int, to_slot: bool) -> None:
        """Transfers between a file and a staging piece, of its segments from `beg` on."""
        indices = [segment.index for segment in staged.segments[beg : beg + len(gates)]]
        staged.transfers += batch.add_transfers(gates, indices, staged.piece, to_slot)

    def _wait_for_staged(self, stream: Stream, staged: StagedCopy) -> None:
        """The stream waits until the file transfers of a piece are over."""
        gates = [transfer.gate for transfer in staged.transfers[staged.waited :]]
        if gates:
            self._driver.wait_gates(stream, gates)
        staged.waited = len(staged.transfers)

    def _release(self, batch: CopyBatch, count: int, point: Point) -> None:
        """Release the oldest pieces of the batch: at this point their segments have come out."""
        if count > 0:
            self._staged = point
        for staged in batch.staged[:count]:
            for transfer in staged.transfers:
                transfer.passed = point
            self._ring.release(staged.piece, point)
        del batch.staged[:count]
        batch.under_way = max(0, batch.under_way - count)
