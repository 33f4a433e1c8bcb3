"""What a GPU costs: driver calls, copies between device and host, file transfers, through the `Driver` that the manager uses.

Rule: every figure is measured on the device that the first line names; the best of several rounds, since a shared machine only ever
makes a round slower. `python bench/device_costs.py [--quick]` needs a GPU; `measure` takes any driver.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from kv_cache_manager_v2.device.driver import GATE_DONE, Driver
from kv_cache_manager_v2.errors import DeviceUnavailableError
from kv_cache_manager_v2.extras.cuda import CudaDriver
from kv_cache_manager_v2.ids import Stream

PAGE_SIZES: Final = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
MOST_PAGES: Final = 256  # in one batch
POOL_BYTES: Final = 64 << 20  # on each side
CALLS: Final = 1000  # in one round


class Row(NamedTuple):
    """One line of the table."""

    what: str
    value: float
    unit: str


class Memory:
    """A stretch of device memory, as much registered host memory, and a file as large."""

    def __init__(self, driver: Driver, nbytes: int, directory: str | None) -> None:
        granule = driver.granularity()
        self.driver: Final = driver
        self.nbytes: Final = -(-nbytes // granule) * granule
        self.device: Final = driver.reserve(self.nbytes)
        self._chunk = driver.create_chunk(self.nbytes)
        driver.map_chunk(self.device, self.nbytes, self._chunk)
        driver.set_access(self.device, self.nbytes)
        self._map = mmap.mmap(-1, self.nbytes)
        self.host: Final = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        ctypes.memset(self.host, 1, self.nbytes)
        driver.host_register(self.host, self.nbytes)
        self.fd, path = tempfile.mkstemp(dir=directory)
        os.unlink(path)
        os.posix_fallocate(self.fd, 0, self.nbytes)

    def close(self) -> None:
        """Give it all back."""
        os.close(self.fd)
        self.driver.host_unregister(self.host, self.nbytes)
        self.driver.unmap(self.device, self.nbytes)
        self.driver.destroy_chunk(self._chunk)
        self.driver.release_reservation(self.device, self.nbytes)


def best(rounds: int, run: Callable[[], None]) -> float:
    """Seconds of the fastest round."""
    shortest = float("inf")
    for _i in range(rounds):
        begin = time.perf_counter()
        run()
        shortest = min(shortest, time.perf_counter() - begin)
    return shortest


def call_costs(driver: Driver, memory: Memory, rounds: int, calls: int) -> list[Row]:
    """Host time of single calls."""
    stream, event = driver.create_stream(), driver.create_event()
    driver.record_event(event, stream)
    kinds: dict[str, Callable[[], object]] = {
        "record_event": lambda: driver.record_event(event, stream),
        "query_event": lambda: driver.query_event(event),
        "wait_event": lambda: driver.wait_event(stream, event),
        "copy, 64 bytes": lambda: driver.copy(stream, memory.device, memory.host, 64),
    }
    rows: list[Row] = []
    for name, call in kinds.items():

        def run(call: Callable[[], object] = call) -> None:
            for _i in range(calls):
                call()

        rows.append(Row(f"call {name}", best(rounds, run) / calls * 1e6, "us"))
        driver.synchronize()
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    return rows


def copy_rates(driver: Driver, memory: Memory, rounds: int) -> list[Row]:
    """Rates of batched page copies, each way, from queueing to completion."""
    stream = driver.create_stream()
    rows: list[Row] = []
    for page in PAGE_SIZES:
        count = min(MOST_PAGES, memory.nbytes // 2 // page)
        device = [memory.device + page * i for i in range(count)]
        other = [memory.device + memory.nbytes // 2 + page * i for i in range(count)]
        host = [memory.host + page * i for i in reversed(range(count))]
        ways = (("host to device", device, host), ("device to host", host, device), ("on the device", other, device))
        for name, destinations, sources in ways:

            def run(destinations: list[int] = destinations, sources: list[int] = sources, page: int = page) -> None:
                driver.copy_batch(stream, destinations, sources, page)
                driver.synchronize()

            rows.append(Row(f"{name}, {count} pages of {page >> 10} KiB", count * page / best(rounds, run) / 1e9, "GB/s"))
    driver.destroy_stream(stream)
    return rows


def transfer(driver: Driver, memory: Memory, stream: Stream, page: int, count: int, writes: bool) -> None:
    """Move pages between file and host memory; the stream passes all gates, the host waits for the stream."""
    move = driver.write_file if writes else driver.read_file
    gates = [move(stream, memory.fd, page * i, memory.host + page * i, page) for i in range(count)]
    for gate in gates:
        driver.wait_gate(stream, gate)
    driver.synchronize()
    for gate in gates:
        if driver.poll_gate(gate) != GATE_DONE:
            raise RuntimeError(driver.gate_error(gate))
        driver.release_gate(gate)


def file_rates(driver: Driver, memory: Memory, rounds: int) -> list[Row]:
    """Rates of page transfers between file (in the page cache) and host memory, and how long one small one takes to its gate."""
    stream = driver.create_stream()
    rows: list[Row] = []
    for page in PAGE_SIZES:
        count = min(MOST_PAGES, memory.nbytes // page)
        for name, writes in (("write", True), ("read", False)):

            def run(page: int = page, count: int = count, writes: bool = writes) -> None:
                transfer(driver, memory, stream, page, count, writes)

            rows.append(Row(f"file {name}, {count} pages of {page >> 10} KiB", count * page / best(rounds, run) / 1e9, "GB/s"))
    latency = best(10 * rounds, lambda: transfer(driver, memory, stream, 4096, 1, False))
    rows.append(Row("file read of 4 KiB, to the end of the stream", latency * 1e6, "us"))
    driver.destroy_stream(stream)
    return rows


def measure(driver: Driver, rounds: int, nbytes: int = POOL_BYTES, calls: int = CALLS, directory: str | None = None) -> list[Row]:
    """All figures of one device; the file lies in `directory`."""
    memory = Memory(driver, nbytes, directory)
    rows = call_costs(driver, memory, rounds, calls) + copy_rates(driver, memory, rounds) + file_rates(driver, memory, rounds)
    memory.close()
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Print the table. Exit status 1, and a line that says why, where there is no GPU."""
    parser = argparse.ArgumentParser(description="time the CUDA driver's calls, copies and file transfers")
    parser.add_argument("--quick", action="store_true", help="few repetitions: whether it runs, not how fast")
    parser.add_argument("--directory", help="where the file lies (default: the system's temporary directory)")
    options = parser.parse_args(arguments)
    try:
        driver = CudaDriver()
    except DeviceUnavailableError as error:
        print(f"bench/device_costs.py: {error}", file=sys.stderr)
        return 1
    print(driver.describe())
    for row in measure(driver, 1 if options.quick else 5, directory=options.directory):
        print(f"{row.what:52} {row.value:10.2f} {row.unit}")
    driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
