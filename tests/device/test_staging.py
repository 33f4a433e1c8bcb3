"""The staging ring: wrap, exact fit, oversize, hand-over in stream order, quarantine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.device.driver import GATE_DONE, GATE_LATE, GATE_TIMED_OUT
from kv_cache_manager_v2.device.staging import REGION_ALIGNMENT, StagingRegion, StagingRing
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.errors import ConfigError, HostRegistrationError, LogicError
from kv_cache_manager_v2.ids import NULL_POINT, Stream
from tests.support.device_rig import SCHEDULES, SLOT_BYTES, DeviceRig, rig

RING = 8 * SLOT_BYTES


class Staging:
    """A ring, the timeline that orders its users, and their device."""

    def __init__(self, r: DeviceRig, nbytes: int) -> None:
        self.driver = r.driver
        self.timeline = Timeline(r.driver)
        self.ring = StagingRing(r.driver, self.timeline, nbytes)

    def acquire(self, stream: Stream, minimum: int, maximum: int, from_file: bool = False) -> StagingRegion:
        region = self.ring.acquire(stream, minimum, maximum, from_file)
        assert region is not None
        return region

    def release(self, stream: Stream, *regions: StagingRegion) -> None:
        """The stream's work until now is the last that uses them."""
        for region in regions:
            self.ring.release(region, self.timeline.record(stream))

    def close(self) -> None:
        self.ring.close()
        self.timeline.close()


class Copier(Staging):
    """Moves slots from disk to the device and back through a ring, in rounds, all of it queued without waiting."""

    def __init__(self, r: DeviceRig, ring_bytes: int = RING) -> None:
        super().__init__(r, ring_bytes)
        self.r = r
        self.in_flight: list[tuple[StagingRegion, list[int]]] = []

    def load(self, stream: Stream, disk_slots: list[int], device_slots: list[int]) -> None:
        for region, parts in self._rounds(stream, disk_slots, device_slots, True):
            gates = [self.driver.read_file(stream, self.r.disk.fd, disk, at, SLOT_BYTES) for disk, _device, at in parts]
            for gate in gates:
                self.driver.wait_gate(stream, gate)
            for _disk, device, at in parts:
                self.driver.copy(stream, device, at, SLOT_BYTES)
            self.leave(stream, region, gates)

    def store(self, stream: Stream, device_slots: list[int], disk_slots: list[int]) -> None:
        for region, parts in self._rounds(stream, disk_slots, device_slots, False):
            gates = []
            for disk, device, at in parts:
                self.driver.copy(stream, at, device, SLOT_BYTES)
                gates.append(self.driver.write_file(stream, self.r.disk.fd, disk, at, SLOT_BYTES))
            for gate in gates:
                self.driver.wait_gate(stream, gate)
            self.leave(stream, region, gates)

    def _rounds(
        self, stream: Stream, disk_slots: list[int], device_slots: list[int], from_file: bool
    ) -> Iterator[tuple[StagingRegion, list[tuple[int, int, int]]]]:
        """Regions with what passes through each: where its slot lies on disk, on the device, and in the ring."""
        done = 0
        while done < len(disk_slots):
            left = (len(disk_slots) - done) * SLOT_BYTES
            region = self.acquire(stream, min(SLOT_BYTES, self.ring.largest), left, from_file)
            count = region.nbytes // SLOT_BYTES
            slots = zip(disk_slots[done : done + count], device_slots[done : done + count], strict=True)
            places = [(self.r.disk.address(disk), self.r.device.address(device)) for disk, device in slots]
            yield region, [(disk, device, region.address + i * SLOT_BYTES) for i, (disk, device) in enumerate(places)]
            done += count

    def leave(self, stream: Stream, region: StagingRegion, gates: list[int]) -> None:
        self.release(stream, region)
        self.ring.check_invariants()
        self.in_flight.append((region, gates))

    def finish(self) -> None:
        self.r.driver.synchronize()
        for region, gates in self.in_flight:
            for gate in gates:
                assert self.r.driver.poll_gate(gate) == GATE_DONE
                self.r.driver.release_gate(gate)
            assert not region.suspect()
            self.ring.complete(region)
        self.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [1, 8, 9, 16])
def test_batches_of_any_size_pass_through(schedule: str, count: int) -> None:
    """Batches of one ring, a ring and a page, two rings: all bytes right, and no batch waits for itself."""
    for seed in range(5):
        with rig(schedule, seed) as r:
            copier = Copier(r)
            for slot in range(count):
                r.file_fill(slot, 50 + slot)
            copier.load(r.streams[0], list(range(count)), list(range(count)))
            copier.store(r.streams[0], list(range(count)), list(reversed(range(count))))
            copier.finish()
            assert [r.value(r.device.address(slot)) for slot in range(count)] == [50 + slot for slot in range(count)]
            assert [r.file_value(slot) for slot in range(count)] == [50 + slot for slot in reversed(range(count))]


@given(
    st.sampled_from(SCHEDULES),
    st.integers(0, 1000),
    st.sampled_from([SLOT_BYTES, 3 * SLOT_BYTES, 3 * SLOT_BYTES + REGION_ALIGNMENT]),
    st.lists(
        st.tuples(st.integers(0, 2), st.booleans(), st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True)), max_size=8
    ),
)
def test_small_batches_back_to_back(schedule: str, seed: int, ring_bytes: int, batches: list[tuple[int, bool, list[int]]]) -> None:
    """Many batches on several streams, without the host ever waiting: the ring hands its bytes on in the right order.

    Each stream has disk and device slots of its own, so that nothing but the ring orders the streams.
    """
    with rig(schedule, seed) as r:
        copier = Copier(r, ring_bytes)
        disk, device = list(range(16)), list(range(100, 116))
        for slot in range(16):
            r.file_fill(slot, slot)
            r.fill(r.device.address(slot), 100 + slot)
        for stream_number, loads, picks in batches:
            slots = [5 * stream_number + pick for pick in picks]
            if loads:
                copier.load(r.streams[stream_number], slots, slots)
                for slot in slots:
                    device[slot] = disk[slot]
            else:
                copier.store(r.streams[stream_number], slots, slots)
                for slot in slots:
                    disk[slot] = device[slot]
        copier.finish()
        assert [r.file_value(slot) for slot in range(16)] == disk
        assert [r.value(r.device.address(slot)) for slot in range(16)] == device


def test_regions_follow_one_another_and_wrap() -> None:
    """A region begins where the last one ended; a minimum that does not fit before the end starts at the beginning."""
    with rig("eager") as r:
        staging = Staging(r, 1024)
        ring = staging.ring
        stream = r.streams[0]

        def use(minimum: int, maximum: int) -> tuple[int, int]:
            region = staging.acquire(stream, minimum, maximum)
            assert region.address % REGION_ALIGNMENT == 0
            staging.release(stream, region)
            ring.complete(region)
            ring.check_invariants()
            return region.offset, region.nbytes

        assert use(100, 100) == (0, 100)
        assert use(100, 300) == (256, 300)
        assert use(10, 9999) == (768, 256)  # as much as there is before the end
        assert use(512, 512) == (0, 512)
        assert use(513, 600) == (0, 600)  # does not fit behind: wraps to the start
        assert use(1024, 1024) == (0, 1024)  # the whole ring
        assert use(1, 1) == (0, 1)
        staging.close()


def test_regions_in_use_are_skipped() -> None:
    """A region whose end of use is unknown is not acquired again; without a free region the answer is None."""
    with rig("eager") as r:
        staging = Staging(r, 1024)
        ring = staging.ring
        stream = r.streams[0]
        first = staging.acquire(stream, 256, 256)
        second = staging.acquire(stream, 512, 512)
        assert ring.acquire(stream, 512, 512, False) is None
        third = staging.acquire(stream, 1, 512)
        assert (third.offset, third.nbytes) == (768, 256)
        assert ring.acquire(stream, 1, 1, False) is None
        assert ring.in_use == 3
        ring.release(second, NULL_POINT)
        again = staging.acquire(stream, 1, 1024)
        assert (again.offset, again.nbytes) == (256, 512)
        with pytest.raises(LogicError, match="released already"):
            ring.release(second, NULL_POINT)
        with pytest.raises(LogicError, match="is in use: release it first"):
            ring.complete(again)
        with pytest.raises(LogicError, match="3 regions in use"):
            ring.close()
        for region in (first, third, again):
            ring.release(region, NULL_POINT)
        with pytest.raises(LogicError, match="larger than the staging ring of 1024 bytes: split"):
            ring.acquire(stream, 1025, 2000, False)
        with pytest.raises(LogicError, match="the minimum must be positive"):
            ring.acquire(stream, 2, 1, False)
        with pytest.raises(ConfigError, match="multiple of 256"):
            StagingRing(r.driver, staging.timeline, 1000)
        staging.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_next_user_waits_for_the_last(schedule: str) -> None:
    """Bytes are handed on in stream order: the next user's stream is blocked until the last user's point is over."""
    with rig(schedule) as r:
        staging = Staging(r, 1024)
        first = staging.acquire(r.streams[0], 600, 600)
        gate = r.driver.gate(r.streams[0])
        staging.release(r.streams[0], first)
        free = staging.acquire(r.streams[1], 256, 256)
        assert free.offset == 768
        r.finish(r.streams[1])
        second = staging.acquire(r.streams[1], 256, 256)
        assert second.offset == 0
        assert not r.is_over(r.streams[1])
        gate.open()
        r.finish(r.streams[1])
        staging.release(r.streams[1], free, second)
        staging.close()


@pytest.mark.parametrize("schedule", ["eager", "random"])
def test_a_timed_out_read_quarantines_its_region_and_makes_later_ones_suspect(schedule: str) -> None:
    """The bytes of a read that timed out are not acquired until it has ended; regions acquired over it before that are suspect."""
    with rig(schedule, transfer_timeout=20) as r:
        staging = Staging(r, 1024)
        ring = staging.ring
        stream = r.streams[0]
        held = r.driver.hang("read_file")
        late = staging.acquire(stream, 512, 512, True)
        gate = r.driver.read_file(stream, r.disk.fd, 0, late.address, 512)
        r.driver.wait_gate(stream, gate)
        staging.release(stream, late)
        beside = staging.acquire(stream, 512, 512)
        over = staging.acquire(stream, 512, 512)
        staging.release(stream, over)
        over_again = staging.acquire(stream, 256, 256)
        assert (beside.offset, over.offset, over_again.offset) == (512, 0, 0)
        r.driver.synchronize()
        assert r.driver.poll_gate(gate) == GATE_TIMED_OUT
        ring.quarantine(late)
        ring.quarantine(late)
        assert (ring.quarantined, late.timed_out) == (1, True)
        assert over.suspect()
        assert over_again.suspect()
        assert not beside.suspect()
        staging.release(stream, beside, over_again)
        last = staging.acquire(stream, 512, 1024, True)
        assert (last.offset, last.nbytes) == (512, 512)
        assert not last.suspect()
        assert ring.acquire(stream, 1, 1, True) is None
        with pytest.raises(LogicError, match="1 quarantined"):
            ring.close()
        held.open()
        while r.driver.poll_gate(gate) != GATE_LATE:
            pass
        ring.complete(late)
        assert ring.quarantined == 0
        assert over.suspect()  # it stays so: the bytes are wrong whenever one looks
        fresh = staging.acquire(stream, 512, 512, True)
        assert fresh.offset == 0
        for region in (last, fresh):
            staging.release(stream, region)
            ring.complete(region)
        ring.check_invariants()
        r.driver.release_gate(gate)
        staging.close()


def test_a_timed_out_write_makes_no_region_suspect() -> None:
    """A late write only reads the region: it may spoil its own page on disk, never the next user's."""
    with rig("eager") as r:
        staging = Staging(r, 512)
        ring = staging.ring
        first = staging.acquire(r.streams[0], 512, 512)
        ring.release(first, NULL_POINT)
        second = staging.acquire(r.streams[0], 512, 512)
        ring.quarantine(first)
        assert not second.suspect()
        ring.release(second, NULL_POINT)
        ring.complete(first)
        staging.close()


def test_the_memory_is_taken_at_the_first_use() -> None:
    """An unused ring costs nothing; a refused registration is an error of the first user and leaves the ring usable."""
    descriptors = len(os.listdir("/proc/self/fd"))
    with rig("eager") as r:
        before = r.driver.registered_bytes
        staging = Staging(r, 8192)
        ring = staging.ring
        assert r.driver.registered_bytes == before
        r.driver.fail("host_register")
        with pytest.raises(HostRegistrationError):
            ring.acquire(r.streams[0], 1, 1, False)
        assert ring.in_use == 0
        region = staging.acquire(r.streams[0], 1, 1)
        assert r.driver.registered_bytes == before + 8192
        ring.release(region, NULL_POINT)
        staging.close()
        assert r.driver.registered_bytes == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
