"""What the stand-in's device is made of: streams that are threads, events, and memory that is really mapped and unmapped.

Rule: what the real device forbids fails here too. Memory without access faults, a stream's work runs in its order and in no order
with other streams.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import queue
import threading
from collections.abc import Callable
from typing import ClassVar

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value
_BARE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


def _map(address: int, nbytes: int, protection: int, flags: int, fd: int = -1) -> int:
    result = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if result is None or result == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def reserve(nbytes: int) -> int:
    """Address space that nothing may touch."""
    return _map(0, nbytes, _PROT_NONE, _BARE)


def release(address: int, nbytes: int) -> None:
    """Give address space back."""
    assert _libc.munmap(address, nbytes) == 0


def pinned(nbytes: int) -> int:
    """Host memory with arbitrary contents."""
    address = _map(0, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.memset(address, 0x25, nbytes)
    return address


class Chunk:
    """Physical memory: bytes that live apart from any address."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = os.memfd_create("chunk")
        os.ftruncate(self._fd, nbytes)

    def map(self, address: int) -> None:
        """Put it at an address, without access."""
        _map(address, self.nbytes, _PROT_NONE, mmap.MAP_SHARED | _MAP_FIXED, self._fd)

    def close(self) -> None:
        """Forget it; where it is mapped, it stays."""
        os.close(self._fd)


def allow_access(address: int, nbytes: int) -> None:
    """Make mapped memory readable and writable."""
    assert _libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE) == 0


def unmap(address: int, nbytes: int) -> None:
    """Back to bare address space."""
    _map(address, nbytes, _PROT_NONE, _BARE | _MAP_FIXED)


class Event:
    """An event: complete until it is recorded, then as complete as its latest record."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.latest = threading.Event()
        self.latest.set()


class Stream:
    """A thread that does one thing after the other."""

    numbers: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self, context: int, on_fault: Callable[[str], None]) -> None:
        self.context = context
        self.number = next(Stream.numbers)  # no other stream's, ever
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._on_fault = on_fault
        self._thread = threading.Thread(target=self._run, name="stand-in stream", daemon=True)
        self._thread.start()

    def queue(self, work: Callable[[], None]) -> None:
        """Add work at the end."""
        self._work.put(work)

    def mark(self) -> threading.Event:
        """An event that is set when everything queued so far is done."""
        reached = threading.Event()
        self._work.put(reached.set)
        return reached

    def end(self) -> None:
        """Let the thread end behind the work that is queued."""
        self._work.put(None)

    def join(self) -> None:
        """Wait for the thread."""
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:
                self._on_fault(f"{type(error).__name__}: {error}")
