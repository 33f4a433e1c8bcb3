"""Copies slots between any two tiers, in batches and in stream order.

A batch runs on one copy stream, after the points that it waits for. Two points mark its end: after `source_free` the source slots
may be overwritten, after `ready` the destination slots have the bytes. Queueing changes no page and no cell. A batch whose
queueing raised is canceled (see `TransfersInFlight`).

    from \\ to     GPU                        host                    disk
    GPU           copy                       copy                    copy, staging, file write
    host          copy                       copy                    file write
    disk          file read, staging, copy   file read               file read, staging, file write

File transfers of a batch run in parallel, each with a gate of its own, one per slot and pool (or region of it), so that a failed
one affects only its page.
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

NUM_STREAMS: Final = 4  # used in turn by batches, so that one seldom waits for an unrelated one
# Size of a staging region. Larger slots need several, smaller ones share one. A hanging file read quarantines no more than this.
# File transfers move whole extents, because each extent has a checksum.
REGION_BYTES: Final = 4 * EXTENT_BYTES
# Staging regions of a batch at one time: enough to keep the I/O threads busy, and few enough to stay in the processor's caches.
MOST_STAGED_COPIES: Final = 4
# How often a batch of file reads uses the same staging memory: bytes of a read that hangs may overwrite those of later reads.
MOST_READS: Final = 2

_log: Final = logging.getLogger(__name__)


def end_of_alike(segments: list[Segment], beg: int) -> int:
    """End of the run of segments from `beg` on that differ only in the page."""
    end = beg + 1
    while end < len(segments) and segments[end].pool == segments[beg].pool and segments[end].offset == segments[beg].offset:
        end += 1
    return end


def addresses_of(arena: Arena, slots: list[SlotId], segments: list[Segment]) -> list[int]:
    """The memory addresses or file offsets of segments in their slots."""
    return [arena.address(slots[segment.index]) + segment.offset for segment in segments]


class Copier:
    """Queues batches without blocking the host: a batch larger than the staging ring reuses it in stream order."""

    def __init__(self, driver: Driver, timeline: Timeline, in_flight: TransfersInFlight, ring: StagingRing) -> None:
        self._driver = driver
        self._timeline = timeline
        self._in_flight = in_flight
        self._ring = ring
        self._streams: list[Stream] = []
        self._turn = 0
        self._staged: Point = NULL_POINT  # end of the latest batch that used staging ...
        self._staged_from = 0  # ... and the part of the ring that it used
        self._staged_to = 0

    def queue(self, batch: CopyBatch) -> None:
        """Queue a batch. After an exception some of its copies may be queued, and the caller cancels it."""
        stream = self._next_stream()
        batch.stream = stream
        for point in batch.waits:
            self._timeline.wait(stream, point)
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
        """Free streams and staging, when all work is complete. Can be called again after an error."""
        while self._streams:
            self._timeline.destroy_stream(self._streams[-1])
            self._streams.pop()
        if self._ring.quarantined or self._in_flight.uses_staging():
            _log.warning("the staging ring is not freed: a file read that timed out, or a failed copy, may still write to it")
        else:
            self._ring.close()

    # --- without staging

    def _copy(self, batch: CopyBatch, stream: Stream) -> None:
        """Between cells in memory, of which at least one has addresses, or within one."""
        source, destination = batch.source, batch.cell
        if source is destination:
            source.copier.copy_slots(stream, batch.source_slots, batch.slots)
            return
        for pool, arena in enumerate(source.arenas):
            memory = destination.copier.addresses(pool, batch.slots)
            if memory is not None:
                source.copier.to_memory(stream, pool, batch.source_slots, 0, arena.slot_bytes, memory)
            else:
                memory = source.copier.addresses(pool, batch.source_slots)
                assert memory is not None, "two cells without addresses"
                destination.copier.from_memory(stream, pool, batch.slots, 0, arena.slot_bytes, memory)

    def _read(self, batch: CopyBatch, stream: Stream) -> None:
        """File to host memory. A late read may write to the slots themselves."""
        for pool in range(len(batch.source.arenas)):
            source = batch.source.arenas[pool]
            destination = batch.cell.arenas[pool]
            offsets = [source.address(slot) for slot in batch.source_slots]
            addresses = [destination.address(slot) for slot in batch.slots]
            gates: list[int] = []
            try:
                self._driver.read_files(stream, source.fd, offsets, addresses, source.slot_bytes, gates)
            finally:
                self._add_direct(batch, gates)

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
                self._add_direct(batch, gates)

    def _add_direct(self, batch: CopyBatch, gates: list[int]) -> None:
        """Add transfers without staging, of the first pages. They write to the destination slots."""
        batch.gates += gates
        self._in_flight.watch(batch.add_transfers(gates, list(range(len(gates))), None, True))

    def _wait_for_direct(self, batch: CopyBatch, stream: Stream) -> None:
        if batch.gates:
            self._driver.wait_gates(stream, batch.gates)

    # --- through staging

    def _stage(self, batch: CopyBatch, stream: Stream) -> None:
        """Copy through staging, region by region, in stream order. The next regions fill while one is emptied.

        A file transfer waits for the stream, but the stream does not wait for the transfer until the region is emptied.
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
            self._fill(batch, stream, staged)
        if not batch.source.tier.by_file:
            batch.source_free = self._timeline.record(stream)
        while batch.emptied < len(batch.staged):
            self._empty(batch, stream)

    def _fill(self, batch: CopyBatch, stream: Stream, staged: StagedCopy) -> None:
        """Fill a staging region. Segments from memory are then written to the file."""
        if batch.source.tier.by_file:
            self._segments_by_file(batch, stream, staged, False)
        else:
            self._segments_by_copy(batch, stream, staged.segments, False)
            self._segments_by_file(batch, stream, staged, True)

    def _empty(self, batch: CopyBatch, stream: Stream) -> None:
        """Empty the oldest filled region, in stream order."""
        staged = batch.staged[batch.emptied]
        self._wait_for_staged(stream, staged)
        if batch.source.tier.by_file:
            if batch.cell.tier.by_file:
                self._segments_by_file(batch, stream, staged, True)
                self._wait_for_staged(stream, staged)
            else:
                self._segments_by_copy(batch, stream, staged.segments, True)
        batch.emptied += 1

    def _cut(self, batch: CopyBatch) -> list[Segment]:
        segments: list[Segment] = []
        for pool in range(len(batch.source.arenas)):
            slot_bytes = batch.source.arenas[pool].slot_bytes
            step = min(slot_bytes, REGION_BYTES, self._ring.largest)
            for offset in range(0, slot_bytes, step):
                nbytes = min(step, slot_bytes - offset)
                for index in range(len(batch.slots)):
                    segments.append(Segment(index, pool, offset, nbytes))
        return segments

    def _acquire(self, segments: list[Segment], beg: int, stream: Stream, from_file: bool) -> StagedCopy | None:
        """A staging region for segments from `beg` on, as many as fit; None if the ring is full."""
        most = min(REGION_BYTES, self._ring.largest)
        wanted = segments[beg].nbytes
        for index in range(beg + 1, len(segments)):
            if wanted + segments[index].nbytes > most:
                break
            wanted += segments[index].nbytes
        region = self._ring.acquire(stream, segments[beg].nbytes, wanted, from_file)
        if region is None:
            return None
        end = beg
        left = region.nbytes
        address = region.address
        while end < len(segments) and segments[end].nbytes <= left:
            segment = segments[end]
            segment.address = address
            address += segment.nbytes
            left -= segment.nbytes
            end += 1
        return StagedCopy(region, segments[beg:end])

    def _release_oldest(self, batch: CopyBatch, stream: Stream) -> int:
        """Release the batch's oldest region. Returns how often the batch has used the memory of the next region."""
        if not batch.staged:
            self._in_flight.poll()  # a read that timed out may have ended
            if self._ring.quarantined or self._in_flight.uses_staging():
                raise OutOfMemoryError(
                    "the staging ring is full: file reads that timed out, or failed copies, may still write to it: "
                    + self._in_flight.last_error
                )
            raise CorruptedError("the staging ring is full although none of it is in use")
        self._empty(batch, stream)
        oldest = batch.staged[0]
        self._release(batch, 1, self._timeline.record(stream))
        if batch.source.tier.by_file and oldest.rounds + 1 >= MOST_READS:
            self._ring.cursor = self._staged_to
            return 0
        self._ring.cursor = oldest.region.offset
        return oldest.rounds + 1

    def _segments_by_copy(self, batch: CopyBatch, stream: Stream, segments: list[Segment], outward: bool) -> None:
        """Copy between staging and slots in memory, with one driver call for each run of segments that differ only in the page."""
        cell = batch.cell if outward else batch.source
        slots = batch.slots if outward else batch.source_slots
        beg = 0
        while beg < len(segments):
            first = segments[beg]
            end = end_of_alike(segments, beg)
            staged = [segment.address for segment in segments[beg:end]]
            own = [slots[segment.index] for segment in segments[beg:end]]
            if outward:
                cell.copier.from_memory(stream, first.pool, own, first.offset, first.nbytes, staged)
            else:
                cell.copier.to_memory(stream, first.pool, own, first.offset, first.nbytes, staged)
            beg = end

    def _segments_by_file(self, batch: CopyBatch, stream: Stream, staged: StagedCopy, to_file: bool) -> None:
        """Queue transfers between a staging region and a file, with one driver call for each run of segments of one kind."""
        cell = batch.cell if to_file else batch.source
        slots = batch.slots if to_file else batch.source_slots
        segments = staged.segments
        beg = 0
        while beg < len(segments):
            first = segments[beg]
            end = end_of_alike(segments, beg)
            addresses = [segment.address for segment in segments[beg:end]]
            arena = cell.arenas[first.pool]
            offsets = addresses_of(arena, slots, segments[beg:end])
            gates: list[int] = []
            try:
                if to_file:
                    self._driver.write_files(stream, arena.fd, offsets, addresses, first.nbytes, gates)
                else:
                    self._driver.read_files(stream, arena.fd, offsets, addresses, first.nbytes, gates)
            finally:
                self._add_staged(batch, staged, gates, beg, to_file)
            beg = end

    # --- parts

    def _next_stream(self) -> Stream:
        if len(self._streams) < NUM_STREAMS:
            self._streams.append(self._timeline.create_stream())
            return self._streams[-1]
        self._turn = (self._turn + 1) % NUM_STREAMS
        return self._streams[self._turn]

    def _add_staged(self, batch: CopyBatch, staged: StagedCopy, gates: list[int], beg: int, to_slot: bool) -> None:
        """Add transfers between a file and a staging region, for its segments from `beg` on."""
        indices = [segment.index for segment in staged.segments[beg : beg + len(gates)]]
        added = batch.add_transfers(gates, indices, staged.region, to_slot)
        staged.transfers += added
        self._in_flight.watch(added)

    def _wait_for_staged(self, stream: Stream, staged: StagedCopy) -> None:
        """Make the stream wait for the gates of a region's file transfers."""
        gates = [transfer.gate for transfer in staged.transfers[staged.waited :]]
        if gates:
            self._driver.wait_gates(stream, gates)
        staged.waited = len(staged.transfers)

    def _release(self, batch: CopyBatch, count: int, point: Point) -> None:
        """Release the oldest regions of the batch, which are empty after this point."""
        if count > 0:
            self._staged = point
        for staged in batch.staged[:count]:
            for transfer in staged.transfers:
                transfer.passed = point
            self._ring.release(staged.region, point)
        del batch.staged[:count]
        batch.emptied = max(0, batch.emptied - count)
