"""Virtual memory of the operating system: anonymous ranges, their protection, size and population.

These functions keep no state: the caller unmaps what it maps. Addresses and sizes are multiples of PAGE_BYTES. Linux only.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from _thread import start_new_thread
from collections.abc import Callable
from threading import Lock, Thread, get_ident, main_thread
from typing import Final

from kv_cache_manager_v2.build import COMPILED
from kv_cache_manager_v2.errors import OutOfMemoryError

PAGE_BYTES: Final = mmap.PAGESIZE

_PROT_NONE: Final = 0
_PROT_READ_WRITE: Final = 3
_MAP_PRIVATE_ANONYMOUS: Final = 0x22
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MREMAP_MAYMOVE: Final = 1
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14: fault pages in without touching their contents
_MAP_FAILED: Final = (1 << (8 * ctypes.sizeof(ctypes.c_void_p))) - 1

_POPULATE_PART_BYTES: Final = 512 << 20  # populated by one thread at a time: large enough to pay for it, small enough to balance
_MOST_POPULATE_THREADS: Final = 64

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.munmap.restype = ctypes.c_int
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mprotect.restype = ctypes.c_int
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
_libc.mremap.restype = ctypes.c_void_p


def round_up(nbytes: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `nbytes`."""
    return -(-nbytes // unit) * unit


def format_bytes(nbytes: int) -> str:
    """A size as text: bytes below 1 KiB, otherwise one decimal of the largest fitting binary unit."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024.0
        if value < 1024.0:
            return f"{value:.1f} {unit}"
    return f"{value / 1024.0:.1f} TiB"


def _map(address: int, nbytes: int, protection: int, flags: int) -> int:
    found = _libc.mmap(address if address else None, nbytes, protection, flags, -1, 0)
    if found is None or int(found) == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OutOfMemoryError(
            f"the operating system refused {format_bytes(nbytes)} ({nbytes} bytes) of address space: {os.strerror(code)}; "
            "configure a smaller tier or raise the limit on virtual memory"
        )
    return int(found)


def map_range(nbytes: int) -> int:
    """New zeroed memory, readable and writable; returns its address. Raises OutOfMemoryError."""
    return _map(0, nbytes, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS)


def reserve_range(nbytes: int) -> int:
    """Reserve address space that cannot be accessed and counts against no memory limit; returns its address."""
    return _map(0, nbytes, _PROT_NONE, _MAP_PRIVATE_ANONYMOUS | _MAP_NORESERVE)


def clear_range(address: int, nbytes: int) -> None:
    """Free the memory of a part of a range. The part is as `reserve_range` returns it: without contents or access."""
    _map(address, nbytes, _PROT_NONE, _MAP_PRIVATE_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED)


def zero_range(address: int, nbytes: int) -> None:
    """Replace a part of a range by accessible zeros, which take memory once they are touched."""
    _map(address, nbytes, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED)


def allow_access(address: int, nbytes: int) -> None:
    """Make a part of a reserved range readable and writable. Bytes that were never written read as zero."""
    if int(_libc.mprotect(address, nbytes, _PROT_READ_WRITE)) != 0:
        code = ctypes.get_errno()
        raise OutOfMemoryError(f"cannot make {format_bytes(nbytes)} at {address:#x} accessible: {os.strerror(code)}")


def unmap_range(address: int, nbytes: int) -> None:
    """Unmap a whole range."""
    if int(_libc.munmap(address, nbytes)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot unmap {nbytes} bytes at {address:#x}: {os.strerror(code)}")


def resize_range(address: int, old_bytes: int, new_bytes: int, may_move: bool) -> int:
    """Change a range's size and keep the remaining contents; returns its address, or 0 if it was not changed."""
    found = _libc.mremap(address, old_bytes, new_bytes, _MREMAP_MAYMOVE if may_move else 0)
    if found is None or int(found) == _MAP_FAILED:
        return 0
    return int(found)


_PATIENCE: Final = 0.2  # seconds after which a thread that was started counts as one that cannot run


class _Errand:
    """A call that another thread runs; or the one that waits for it, where the other found no memory for its first line."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._calls = [call]  # until a thread takes it
        self._over = Lock()  # released when the call has ended
        self._over.acquire()
        self._ended = False
        self.error: BaseException | None = None  # that the call raised

    def run(self) -> None:
        try:
            call = self._calls.pop()
        except IndexError:
            return  # the other thread has it
        try:
            call()
        except BaseException as error:
            self.error = error
        finally:
            self._ended = True
            self._over.release()

    def wait(self) -> None:
        while not self._ended:
            if not self._over.acquire(timeout=_PATIENCE) and self._calls:
                self.run()


def uninterrupted(call: Callable[[], None]) -> None:
    """Run a call whose effect on memory must be known to its object. An interrupt (Ctrl-C) is raised when the call has ended.

    Python runs the handlers of signals on the main thread, so there another thread runs the call, which takes a tenth of a
    millisecond. Compiled code needs none. If no thread can be started, an interrupt can come between the effect and its record.
    """
    if COMPILED or get_ident() != main_thread().ident:
        call()
        return
    errand = _Errand(call)
    run = errand.run
    interrupt: BaseException | None = None
    try:
        start_new_thread(run, ())
    except (RuntimeError, MemoryError):
        call()
        return
    except BaseException as error:  # it came after the call of C, so the thread runs
        interrupt = error
    try:
        errand.wait()
    except BaseException as error:
        interrupt = error
        errand.wait()
    if errand.error is not None:
        raise errand.error
    if interrupt is not None:
        raise interrupt


def memlock_limit() -> int:
    """RLIMIT_MEMLOCK of this process in bytes; -1 for no limit."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def available_bytes() -> int:
    """Memory that the system could provide without swapping; -1 if unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as info:
            for line in info:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return -1


def default_populate_threads() -> int:
    """`KVCM_PREFAULT_THREADS` if set (0: no prefaulting), else half of the processors. At most 64."""
    text = os.environ.get("KVCM_PREFAULT_THREADS", "")
    if text.isdigit():
        return min(_MOST_POPULATE_THREADS, int(text))
    return max(1, min(_MOST_POPULATE_THREADS, (os.cpu_count() or 2) // 2))


def _populate_part(address: int, nbytes: int) -> int:
    """Fault in one part of a range; returns 0 or the error number. The part was never written, so it stays zero."""
    if int(_libc.madvise(address, nbytes, _MADV_POPULATE_WRITE)) == 0:
        return 0
    code = ctypes.get_errno()
    if code == errno.EINVAL or code == errno.ENOSYS:  # a kernel without MADV_POPULATE_WRITE: write to each page
        ctypes.memset(address, 0, nbytes)
        return 0
    return code


class _Populator:
    """The parts of one range, which several threads populate."""

    def __init__(self, address: int, nbytes: int, part_bytes: int) -> None:
        self.parts: list[tuple[int, int]] = []  # (address, bytes) not yet started; list.pop is atomic, so threads need no lock
        self.code = 0  # an error number that a thread met; 0: none
        offset = 0
        while offset < nbytes:
            size = min(part_bytes, nbytes - offset)
            self.parts.append((address + offset, size))
            offset += size

    def work(self) -> None:
        while self.code == 0:
            try:
                address, nbytes = self.parts.pop()
            except IndexError:
                return
            code = _populate_part(address, nbytes)
            if code != 0:
                self.code = code

    def stop(self, helpers: list[Thread]) -> None:
        """End the work after an exception: its memory is about to be unmapped."""
        self.code = errno.EINTR
        for helper in helpers:
            if helper.ident is not None:  # it was started
                helper.join()


def populate_range(address: int, nbytes: int, threads: int, part_bytes: int = _POPULATE_PART_BYTES) -> None:
    """Fault in memory that was never written, on up to `threads` threads; 0 threads: do nothing.

    Raises OutOfMemoryError if the system has less memory available.
    """
    if threads <= 0 or nbytes <= 0:
        return
    available = available_bytes()
    if 0 <= available < nbytes:  # checked first: faulting in too much gets the process killed
        raise OutOfMemoryError(
            f"host memory of {format_bytes(nbytes)} ({nbytes} bytes) was requested and {format_bytes(available)} are available; "
            "configure a smaller host tier"
        )
    populator = _Populator(address, nbytes, part_bytes)
    helpers: list[Thread] = []
    work: Callable[[], None] = populator.work
    try:
        for i in range(min(threads, len(populator.parts)) - 1):
            helper = Thread(target=work, name=f"kvcm-prefault-{i}", daemon=True)
            helpers.append(helper)
            helper.start()
    except RuntimeError:  # no more threads: those that there are do it
        helpers.pop()
    except BaseException:
        populator.stop(helpers)
        raise
    try:
        populator.work()
        for helper in helpers:
            helper.join()
    except BaseException:
        populator.stop(helpers)
        raise
    if populator.code != 0:
        raise OutOfMemoryError(
            f"no physical memory for {format_bytes(nbytes)} ({nbytes} bytes) of host memory: {os.strerror(populator.code)}; "
            "configure a smaller host tier"
        )
