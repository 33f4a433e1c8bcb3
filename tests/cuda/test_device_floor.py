"""Arenas and the timeline, which know of no device, do on the CUDA driver what they do on the emulated one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kv_cache_manager_v2.device.arenas import Arena, ChunkPool, DeviceArena, DiskArena
from kv_cache_manager_v2.device.driver import GATE_DONE
from kv_cache_manager_v2.device.host_arena import HostArena
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.errors import HostRegistrationError, OutOfMemoryError
from kv_cache_manager_v2.extras.cuda import CudaDriver
from kv_cache_manager_v2.ids import NULL_POINT, Stream
from tests.extras.cuda_standin import StandIn
from tests.extras.helpers import HostBuffer, hold, pattern

SLOT = 40_000  # bytes: no multiple of anything


def fill(driver: CudaDriver, stream: Stream, arena: Arena, host: HostBuffer) -> None:
    """Give each slot of a memory arena bytes of its own."""
    for slot in range(arena.num_slots):
        host.write(pattern(SLOT + slot)[slot:])
        driver.copy(stream, arena.address(slot), host.address, SLOT)
        driver.synchronize()


def mismatches(driver: CudaDriver, stream: Stream, arena: Arena, host: HostBuffer, num_slots: int) -> list[int]:
    """Slots of a memory arena that have not the bytes of `fill`."""
    wrong: list[int] = []
    for slot in range(num_slots):
        driver.copy(stream, host.address, arena.address(slot), SLOT)
        driver.synchronize()
        if host.read(SLOT) != pattern(SLOT + slot)[slot:]:
            wrong.append(slot)
    return wrong


class TestArenas:
    def test_a_device_arena_grows_and_shrinks_in_place(self, driver: CudaDriver) -> None:
        """The base never moves, kept slots keep their bytes though they straddle chunks, and another arena takes spare chunks."""
        pool = ChunkPool(driver, driver.granularity())
        arena, other = (DeviceArena(driver, pool, SLOT, 4 * driver.granularity()) for _i in range(2))
        stream, host = driver.create_stream(), HostBuffer(driver, SLOT)
        arena.resize(100)
        base = arena.address(0)
        fill(driver, stream, arena, host)
        arena.resize(200)
        arena.resize(60)
        assert arena.address(0) == base
        assert mismatches(driver, stream, arena, host, 60) == []
        spare = pool.spare
        assert spare > 0
        other.resize(52)
        assert pool.spare == spare - 1
        other.check_invariants()
        arena.check_invariants()
        for one in (arena, other, pool):
            one.close()
        driver.destroy_stream(stream)
        host.close()

    def test_a_host_arena_keeps_its_bytes_when_it_moves(self, driver: CudaDriver) -> None:
        """Registered range by range; what grows is unregistered, moved and registered again."""
        arena = HostArena(driver, SLOT, registration_bytes=1 << 20)
        stream, host = driver.create_stream(), HostBuffer(driver, SLOT)
        arena.resize(50)
        fill(driver, stream, arena, host)
        arena.resize(500)
        assert mismatches(driver, stream, arena, host, 50) == []
        arena.resize(20)
        assert mismatches(driver, stream, arena, host, 20) == []
        arena.check_invariants()
        arena.close()
        driver.destroy_stream(stream)
        host.close()

    def test_pages_reach_a_disk_arena_and_come_back(self, driver: CudaDriver, tmp_path: Path) -> None:
        """From device memory through a host slot to the file and all the way back, on one stream, with no wait of the host."""
        pool = ChunkPool(driver, driver.granularity())
        device, staging = DeviceArena(driver, pool, SLOT, driver.granularity()), HostArena(driver, SLOT)
        disk, stream, host = DiskArena(SLOT, str(tmp_path)), driver.create_stream(), HostBuffer(driver, SLOT)
        for arena in (device, staging, disk):
            arena.resize(4)
        fill(driver, stream, device, host)
        gates: list[int] = []
        for slot in range(4):
            driver.copy(stream, staging.address(slot), device.address(slot), SLOT)
            gates.append(driver.write_file(stream, disk.fd, disk.address(slot), staging.address(slot), SLOT))
        for gate in gates:
            driver.wait_gate(stream, gate)
        gates += [driver.read_file(stream, disk.fd, disk.address(slot), staging.address(3 - slot), SLOT) for slot in range(4)]
        for gate in gates[4:]:
            driver.wait_gate(stream, gate)
        driver.copy_batch(
            stream, [device.address(slot) for slot in range(4)], [staging.address(3 - slot) for slot in range(4)], SLOT
        )
        driver.synchronize()
        assert [driver.poll_gate(gate) for gate in gates] == [GATE_DONE] * 8
        assert mismatches(driver, stream, device, host, 4) == []
        for gate in gates:
            driver.release_gate(gate)
        for arena in (device, staging, disk):
            arena.close()
        pool.close()
        driver.destroy_stream(stream)
        host.close()


class TestTimeline:
    def test_points_follow_the_streams(self, driver: CudaDriver) -> None:
        """A point behind held work is not over; a stream that waits for it sees the work done; the null point is always over."""
        timeline = Timeline(driver)
        host = HostBuffer(driver, 8192)
        first, second, go = driver.create_stream(), driver.create_stream(), threading.Event()
        host.write(pattern(100))
        hold(driver, first, go)
        driver.copy(first, host.address + 4096, host.address, 100)
        point = timeline.record(first)
        assert timeline.done(NULL_POINT)
        assert not timeline.done(point)
        assert timeline.merge(point, NULL_POINT) == point
        timeline.wait(second, point)
        driver.copy(second, host.address + 5000, host.address + 4096, 100)
        both = timeline.merge(point, timeline.record(second))
        assert not timeline.done(both)
        go.set()
        timeline.synchronize(both)
        assert timeline.done(both)
        assert timeline.done(point)
        assert host.read(100, at=5000) == pattern(100)
        timeline.check_invariants()
        timeline.close()
        for stream in (first, second):
            driver.destroy_stream(stream)
        host.close()

    def test_a_thousand_points_need_few_events(self, driver: CudaDriver) -> None:
        """Events of points that are over are used again."""
        timeline, stream = Timeline(driver), driver.create_stream()
        for _i in range(1000):
            point = timeline.record(stream)
        timeline.synchronize(point)
        assert timeline.done(point)
        assert timeline.events_outstanding == 0
        timeline.check_invariants()
        timeline.close()
        driver.destroy_stream(stream)


class TestShortage:
    """What only a scene can bring about: a device and a host that are full."""

    @pytest.fixture
    def scene(self) -> StandIn:
        return StandIn(memory=6 << 20, pinnable=1 << 20)

    def test_a_full_device_leaves_an_arena_as_it_was(self, scene: StandIn) -> None:
        """Chunks taken on the way are spare again."""
        driver = CudaDriver(bindings=scene.module())
        pool = ChunkPool(driver, driver.granularity())
        arena = DeviceArena(driver, pool, SLOT, 8 << 20)
        arena.resize(60)
        with pytest.raises(OutOfMemoryError, match="cuMemCreate"):
            arena.resize(200)
        assert arena.num_slots == 60
        arena.check_invariants()
        arena.close()
        pool.close()
        driver.close()
        scene.close()

    def test_a_refused_registration_gives_back_what_was_taken(self, scene: StandIn) -> None:
        """The error names the whole size, the limit and the remedy; nothing stays registered."""
        driver = CudaDriver(bindings=scene.module())
        arena = HostArena(driver, SLOT, registration_bytes=1 << 20)
        with pytest.raises(HostRegistrationError, match=r"RLIMIT_MEMLOCK is .*without_tier\(CacheTier\.HOST_MEM\)"):
            arena.resize(100)
        assert arena.num_slots == 0
        arena.close()
        driver.close()
        assert scene.held() == []
        scene.close()
