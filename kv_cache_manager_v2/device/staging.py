"""The staging ring: pinned host memory through which bytes pass between device and disk.

Regions of the ring are reused in stream order: the stream of the next user waits for the point at which the last use ends. The host
never waits. A region that is still in use is skipped. No region can be larger than the ring (`largest`); callers split their data.

A file transfer can outlive its time limit. A region that it may still access is quarantined until the transfer has ended. If a
*read* times out after its memory was reused, the later region is `suspect`: late bytes may have overwritten its data.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.host_arena import HostArena
from kv_cache_manager_v2.device.os_memory import round_up
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.ids import NULL_POINT, Point, Stream

DEFAULT_RING_BYTES: Final = 64 << 20
REGION_ALIGNMENT: Final = 256  # bytes; regions start at multiples of it, which makes copies fast

# The states of a region: in use -> released -> complete, or -> released -> quarantined -> complete.
_IN_USE: Final = 0  # the end of its use is not known
_RELEASED: Final = 1  # its use ends at `point`; its transfers may be pending
_QUARANTINED: Final = 2  # a transfer has timed out and may still access it
_COMPLETE: Final = 3  # its use ends at `point`; all its transfers have ended


class StagingRegion:
    """A part of the ring that one copy uses."""

    def __init__(self, offset: int, nbytes: int, address: int, from_file: bool) -> None:
        self.offset = offset  # in the ring, bytes
        self.nbytes = nbytes
        self.address = address
        self.from_file = from_file  # file reads write to it, perhaps late
        self.point: Point = NULL_POINT  # once released: the end of its use
        self.state = _IN_USE
        self.transfers = 0  # its file transfers that have not ended
        self.timed_out = False  # whether it is or was quarantined
        self.after: list[StagingRegion] = []  # earlier regions in the same memory, filled by file reads, that were not complete

    @property
    def in_use(self) -> bool:
        """Whether a copy still uses the region: True until it is released."""
        return self.state == _IN_USE

    def decided(self) -> bool:
        """Whether `suspect` is known: all earlier regions are complete or quarantined."""
        return not [region for region in self.after if region.state < _QUARANTINED]

    def suspect(self) -> bool:
        """Whether a read that timed out may have written to this region while it was in use; its bytes are lost then."""
        return any(region.from_file and region.timed_out for region in self.after)


class StagingRing:
    """A ring of pinned host memory, allocated at the first `acquire`. That is O(log regions + overlapped regions)."""

    def __init__(self, driver: Driver, timeline: Timeline, nbytes: int = DEFAULT_RING_BYTES) -> None:
        if nbytes < REGION_ALIGNMENT or nbytes % REGION_ALIGNMENT:
            raise ConfigError(f"the staging ring has {nbytes} bytes: must be a positive multiple of {REGION_ALIGNMENT}")
        self.largest = nbytes  # bytes; the largest region, when none is in use or quarantined
        self._timeline = timeline
        self._arena = HostArena(driver, nbytes)
        # Offset at which the search for the next region starts. A user sets it back to a released region, to reuse memory that is
        # still in the processor's caches.
        self.cursor = 0
        self._begins: list[int] = []  # the latest user of each part of the ring; ascending, disjoint
        self._ends: list[int] = []
        self._users: list[StagingRegion] = []
        self._in_use: list[StagingRegion] = []
        self._quarantined: list[StagingRegion] = []

    @property
    def in_use(self) -> int:
        """The number of regions that are not released."""
        return len(self._in_use)

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    def acquire(self, stream: Stream, minimum: int, maximum: int, from_file: bool) -> StagingRegion | None:
        """A region of `minimum` to `maximum` bytes, for work that is queued on the stream from now on.

        None if the free parts of the ring are too small: release a region, or wait for transfers to end. `from_file`: file reads
        will write to it.
        """
        if not 0 < minimum <= maximum:
            raise LogicError(f"a region of {minimum} to {maximum} bytes: the minimum must be positive and at most the maximum")
        if minimum > self.largest:
            raise LogicError(f"a region of {minimum} bytes is larger than the staging ring of {self.largest} bytes: split the data")
        found = self._find(self.cursor, minimum)
        if found is None:
            found = self._find(0, minimum)
            if found is None:
                return None
        begin, end = found
        nbytes = min(maximum, end - begin)
        if self._arena.num_slots == 0:
            self._arena.resize(1)
        region = StagingRegion(begin, nbytes, self._arena.base + begin, from_file)
        self._make_latest(stream, region)
        self.cursor = round_up(begin + nbytes, REGION_ALIGNMENT) % self.largest
        self._in_use.append(region)
        return region

    def release(self, region: StagingRegion, point: Point) -> None:
        """End the region's use at this point, so that its memory can be reused. Its transfers may end later; see `complete`."""
        if region.state != _IN_USE:
            raise LogicError(f"the region at offset {region.offset} is not in use: it was released already")
        region.state = _RELEASED
        region.point = point
        self._in_use.remove(region)  # last, and without a call in between: an interrupt finds all or nothing done

    def complete(self, region: StagingRegion) -> None:
        """Record that all of the region's transfers have ended. This ends its quarantine."""
        if region.state == _IN_USE:
            raise LogicError(f"the region at offset {region.offset} is in use: release it first")
        quarantined = region.state == _QUARANTINED
        region.after = []
        region.state = _COMPLETE
        if quarantined:
            self._quarantined.remove(region)

    def quarantine(self, region: StagingRegion) -> None:
        """Record that a transfer of this region has timed out. The memory is not reused before `complete`."""
        if region.state == _IN_USE:
            self.release(region, NULL_POINT)
        if region.state == _RELEASED:
            region.state = _QUARANTINED
            region.timed_out = True
            self._quarantined.append(region)

    def finish(self, region: StagingRegion, point: Point) -> None:
        """As `release` and `complete`, when all transfers of the region have ended. It may have been released before."""
        if region.state == _IN_USE:
            self.release(region, point)
        self.complete(region)

    def close(self) -> None:
        """Wait for released regions and free the memory. Raises LogicError while a region is in use or quarantined."""
        if self._in_use or self._quarantined:
            raise LogicError(
                f"the staging ring is closed with {len(self._in_use)} regions in use and {len(self._quarantined)} quarantined"
            )
        for region in self._users:
            self._timeline.synchronize(region.point)
        self._begins, self._ends, self._users = [], [], []
        self._arena.close()

    # --- internals

    def _find(self, begin: int, minimum: int) -> tuple[int, int] | None:
        """The first free part of at least `minimum` bytes from an offset on, up to the next region in use or quarantine."""
        blocked = [(region.offset, region.offset + region.nbytes) for region in self._in_use]
        blocked += [(region.offset, region.offset + region.nbytes) for region in self._quarantined]
        blocked.sort()
        blocked.append((self.largest, self.largest))
        for blocked_begin, blocked_end in blocked:
            if begin + minimum <= blocked_begin:
                return begin, blocked_begin
            begin = max(begin, round_up(blocked_end, REGION_ALIGNMENT))
        return None

    def _make_latest(self, stream: Stream, region: StagingRegion) -> None:
        """Make the stream wait for the latest users of the region's memory, and make the region the latest user."""
        begin, end = region.offset, region.offset + region.nbytes
        first = bisect_right(self._ends, begin)  # the first part that ends after `begin`
        last = first
        while last < len(self._begins) and self._begins[last] < end:
            last += 1
        for i in range(first, last):
            user = self._users[i]
            self._timeline.wait(stream, user.point)
            for earlier in [user, *user.after]:
                if earlier.from_file and earlier.state != _COMPLETE and earlier not in region.after:  # file writes change no memory
                    region.after.append(earlier)
        begins, ends, users = [begin], [end], [region]
        if first < last and self._begins[first] < begin:  # the remainder before the region, and after it
            begins.insert(0, self._begins[first])
            ends.insert(0, begin)
            users.insert(0, self._users[first])
        if first < last and self._ends[last - 1] > end:
            begins.append(end)
            ends.append(self._ends[last - 1])
            users.append(self._users[last - 1])
        self._begins[first:last] = begins
        self._ends[first:last] = ends
        self._users[first:last] = users

    def check_invariants(self) -> None:
        assert 0 <= self.cursor < self.largest
        assert self.cursor % REGION_ALIGNMENT == 0
        assert len(self._begins) == len(self._ends) == len(self._users)
        before = 0
        for begin, end, user in zip(self._begins, self._ends, self._users, strict=True):
            assert before <= begin < end <= self.largest
            assert user.offset <= begin
            assert end <= user.offset + user.nbytes
            before = end
        spans = sorted((region.offset, region.offset + region.nbytes) for region in self._in_use)
        for i in range(1, len(spans)):
            assert spans[i - 1][1] <= spans[i][0], "two regions in use overlap"
        assert all(region.state == _IN_USE for region in self._in_use)
        assert all(region.state == _QUARANTINED for region in self._quarantined)
