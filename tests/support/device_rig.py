"""A small rig for the tests of the device floor: a driver with some device and some host memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from kv_cache_manager_v2.device.arenas import ChunkPool, DeviceArena, DiskArena
from kv_cache_manager_v2.device.host_arena import HostArena
from kv_cache_manager_v2.emulated.driver import GRANULARITY, EmulatedDriver
from kv_cache_manager_v2.emulated.transfers import EmulatedGate
from kv_cache_manager_v2.ids import Stream

SCHEDULES = ("eager", "threads", "random")
SLOT_BYTES = 512


class DeviceRig:
    """A driver, 16 slots on the device, 16 on the host, 16 on disk, and three streams."""

    def __init__(
        self, schedule: str, seed: int = 0, transfer_timeout: float | None = None, io_threads: int = 4, stall_s: float = 10
    ) -> None:
        """`stall_s`: short only where a test blocks the device, since a busy machine may look blocked."""
        self.driver = EmulatedDriver(schedule, seed, transfer_timeout, stall_timeout_s=stall_s, io_threads=io_threads)
        self.chunks = ChunkPool(self.driver, GRANULARITY)
        self.device = DeviceArena(self.driver, self.chunks, SLOT_BYTES, GRANULARITY)
        self.host = HostArena(self.driver, SLOT_BYTES)
        self.disk = DiskArena(SLOT_BYTES, tempfile.gettempdir())
        self.device.resize(16)
        self.host.resize(16)
        self.disk.resize(16)
        self.streams = [self.driver.create_stream() for _i in range(3)]

    def fill(self, address: int, value: int) -> None:
        self.driver.write_bytes(address, bytes([value]) * SLOT_BYTES)

    def value(self, address: int) -> int:
        """The one value that all bytes of a slot have; -1 if they differ."""
        found = set(self.driver.read_bytes(address, SLOT_BYTES))
        return found.pop() if len(found) == 1 else -1

    def file_fill(self, slot: int, value: int) -> None:
        os.pwrite(self.disk.fd, bytes([value]) * SLOT_BYTES, self.disk.address(slot))

    def file_value(self, slot: int) -> int:
        found = set(os.pread(self.disk.fd, SLOT_BYTES, self.disk.address(slot)))
        return found.pop() if len(found) == 1 else -1

    def let_go(self, gate: EmulatedGate) -> None:
        """Open the gate and run everything: one of the two raises what the work behind the gate does wrong."""
        gate.open()
        self.driver.synchronize()

    def finish(self, stream: Stream) -> None:
        """Wait for all that is queued on the stream now, and for nothing else."""
        event = self.driver.create_event()
        self.driver.record_event(event, stream)
        self.driver.synchronize_event(event)
        self.driver.destroy_event(event)

    def is_over(self, stream: Stream) -> bool:
        """Whether all that is queued on the stream now completes within some calls. For saying that it does not: on `threads`
        even what is free to run may take longer."""
        event = self.driver.create_event()
        self.driver.record_event(event, stream)
        over = False
        for _i in range(20):
            over = over or self.driver.query_event(event)
        self.driver.destroy_event(event)
        return over

    def close(self) -> None:
        self.driver.synchronize()
        self.driver.check_invariants()
        for stream in self.streams:
            self.driver.destroy_stream(stream)
        self.device.close()
        self.host.close()
        self.disk.close()
        self.chunks.close()
        self.driver.close()


@contextmanager
def rig(
    schedule: str, seed: int = 0, transfer_timeout: float | None = None, io_threads: int = 4, stall_s: float = 10
) -> Iterator[DeviceRig]:
    """A rig that is closed, and hence checked for leaks, when the test has passed."""
    made = DeviceRig(schedule, seed, transfer_timeout, io_threads, stall_s)
    yield made
    made.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
