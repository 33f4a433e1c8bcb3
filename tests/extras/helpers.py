"""Memory and files for tests of the CUDA driver, real or not: host ranges that are registered, device ranges that are mapped."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading

from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.ids import Stream


class HostBuffer:
    """Registered host memory."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.driver = driver
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self.nbytes)
        self._first = ctypes.c_char.from_buffer(self._map)  # keeps the mapping where it is
        self.address = ctypes.addressof(self._first)
        driver.host_register(self.address, self.nbytes)

    def write(self, data: bytes, at: int = 0) -> None:
        ctypes.memmove(self.address + at, data, len(data))

    def read(self, nbytes: int, at: int = 0) -> bytes:
        return ctypes.string_at(self.address + at, nbytes)

    def close(self) -> None:
        self.driver.host_unregister(self.address, self.nbytes)


class DeviceBuffer:
    """Device memory of some granules, each a chunk of its own, mapped side by side."""

    def __init__(self, driver: Driver, granules: int) -> None:
        self.driver = driver
        self.granule = driver.granularity()
        self.nbytes = granules * self.granule
        self.address = driver.reserve(self.nbytes)
        self.chunks: list[int] = []
        for at in range(0, self.nbytes, self.granule):
            self.chunks.append(driver.create_chunk(self.granule))
            driver.map_chunk(self.address + at, self.granule, self.chunks[-1])
            driver.set_access(self.address + at, self.granule)

    def close(self) -> None:
        for i, chunk in enumerate(self.chunks):
            self.driver.unmap(self.address + i * self.granule, self.granule)
            self.driver.destroy_chunk(chunk)
        self.driver.release_reservation(self.address, self.nbytes)


class TemporaryFile:
    """A file without a name."""

    def __init__(self, content: bytes = b"") -> None:
        self.fd, path = tempfile.mkstemp()
        os.unlink(path)
        os.pwrite(self.fd, content, 0)

    def close(self) -> None:
        os.close(self.fd)


def pattern(nbytes: int) -> bytes:
    """Bytes that repeat only after a prime number of them, so that a shift shows."""
    return bytes(i % 251 for i in range(nbytes))


def hold(driver: Driver, stream: Stream, go: threading.Event) -> None:
    """Block a stream until `go` is set, or for half a minute: a test that forgets to fails, and does not hang."""

    def stand() -> None:
        go.wait(30.0)

    driver.launch(stream, stand)
