"""File transfers between a file range and host memory, and the bounded pool of threads that runs them.

Every gate opens: when its transfer ends, or when the time limit passes. After the limit the gate is GATE_TIMED_OUT while the
transfer still runs, and GATE_LATE once it has ended. It never becomes GATE_DONE, since a stream that went on may have read or
overwritten the memory.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Lock, Thread
from typing import Final

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.device.checksums import FileChecksums, FileMover
from kv_cache_manager_v2.device.driver import GATE_DONE, GATE_FAILED, GATE_LATE, GATE_PENDING, GATE_TIMED_OUT
from kv_cache_manager_v2.errors import ConfigError, LogicError

DEFAULT_IO_THREADS: Final = 8
# Transfers of files in the page cache are work for the processors; more threads than processors would not speed them up.
BUFFERED_IO_THREADS: Final = max(2, min(DEFAULT_IO_THREADS, os.cpu_count() or 1))
DEFAULT_TIMEOUT_S: Final = 60.0

_log: Final = logging.getLogger(__name__)
_FOREVER_S: Final = 3600.0  # the longest single wait; a loop then waits again


def move_file_range(fd: int, offset: int, address: int, nbytes: int, writes: bool) -> str:
    """Read or write a whole file range; blocks. Returns the error as text, empty if all bytes were transferred."""
    done = 0
    try:
        while done < nbytes:
            view = memoryview((ctypes.c_char * (nbytes - done)).from_address(address + done))
            if writes:
                count = os.pwritev(fd, [view], offset + done)
            else:
                count = os.preadv(fd, [view], offset + done)
            if count == 0:
                return f"short by {nbytes - done} of {nbytes} bytes"
            done += count
    except OSError as error:
        return f"{error.strerror} (errno {error.errno}) after {done} of {nbytes} bytes"
    return ""


@mypyc_attr(allow_interpreted_subclasses=True)
class Transfer:
    """One file transfer and its gate. A driver's subclass adds state of its own, or a gate that a device stream can wait for."""

    def __init__(self, fd: int, offset: int, address: int, nbytes: int, writes: bool) -> None:
        self.fd = fd
        self.offset = offset  # in the file, bytes
        self.address = address  # in host memory
        self.nbytes = nbytes
        self.writes = writes  # memory to file, else file to memory
        self.checksums: FileChecksums | None = None  # of the file; None: its bytes are not checked
        self.state = GATE_PENDING
        self.error = ""  # empty while pending and when done
        self.deadline_s = 0.0  # monotonic clock; set when the pool starts it

    def describe(self) -> str:
        what = "write" if self.writes else "read"
        return f"{what} of {self.nbytes} bytes at offset {self.offset} of file descriptor {self.fd}"

    def perform(self) -> str:
        """Transfer the bytes; blocks. Returns the error as text, empty on success."""
        return self.move_with(move_file_range)

    def move_with(self, mover: FileMover) -> str:
        """As `perform`, with a function that transfers the bytes. Updates or checks the checksums of the file."""
        if self.checksums is None:
            return mover(self.fd, self.offset, self.address, self.nbytes, self.writes)
        return self.checksums.move(mover, self.fd, self.offset, self.address, self.nbytes, self.writes)

    def opened(self) -> None:
        """Called once, on the thread that opened the gate and with no lock held. Must not raise."""

    def running(self) -> bool:
        """Whether its memory may still be touched."""
        return self.state == GATE_PENDING or self.state == GATE_TIMED_OUT

    def finish(self, error: str) -> bool:
        """Record that the transfer ended; whether that opened the gate. A timed-out gate was open already."""
        if self.state == GATE_TIMED_OUT:
            self.state = GATE_LATE
            self.error = f"{self.describe()}: ended after its time limit" + (f": {error}" if error else "")
            return False
        if self.state != GATE_PENDING:
            raise LogicError(f"{self.describe()} ended twice")
        self.error = f"{self.describe()}: {error}" if error else ""
        self.state = GATE_FAILED if error else GATE_DONE
        return True

    def expire(self, limit: str) -> bool:
        """Open the gate of a transfer that has passed its time limit; False if the gate was open already."""
        if self.state != GATE_PENDING:
            return False
        self.error = f"{self.describe()}: still running after {limit}"
        self.state = GATE_TIMED_OUT
        return True


class TransferPool:
    """Runs transfers on at most `threads` threads, in order of submission; one more thread, the watchdog, enforces the time limit.

    Threads start as they are needed. A thread whose transfer has timed out is replaced, up to twice `threads` in all. When all of
    these hang, transfers that have not started fail at once, so that their gates open.
    """

    def __init__(self, threads: int = DEFAULT_IO_THREADS, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if threads < 1:
            raise ConfigError(f"threads is {threads}: a transfer pool needs at least 1")
        if not timeout_s > 0.0:
            raise ConfigError(f"timeout_s is {timeout_s}: must be a positive number of seconds")
        self.threads = threads
        self.timeout_s = timeout_s
        lock = Lock()
        self._work_added = Condition(lock)  # idle threads wait for it
        self._changed = Condition(lock)  # callers wait for it: transfers or threads have ended
        self._closed = Condition(lock)  # the watchdog waits for it
        self._ready: deque[Transfer] = deque()
        self._running: list[Transfer] = []  # started and not timed out
        self._hung: list[Transfer] = []  # timed out and not ended
        self._workers = 0  # live threads, including those that hang
        self._idle = 0  # workers that wait for work and have not been woken
        self._waking = 0  # workers that were started or woken and have not looked for work yet
        self._no_threads = False  # the operating system refused to start a thread
        self._has_watchdog = False
        self._closing = False

    def submit(self, transfer: Transfer) -> None:
        """Start the transfer as soon as a thread is free and all transfers submitted before it have started."""
        self.submit_all([transfer])

    def submit_all(self, transfers: list[Transfer]) -> None:
        """As `submit` for each, in this order."""
        with self._changed:
            for transfer in transfers:
                self._check_open(transfer)
                self._ready.append(transfer)
                self._wake()
            dead = self._no_threads or len(self._hung) >= 2 * self.threads
        if dead:
            self._fail_if_dead()

    def outstanding(self) -> int:
        """Transfers whose gate is closed: those not started, and those running within the time limit."""
        with self._changed:
            return len(self._ready) + len(self._running)

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until every gate is open; False after `timeout_s`."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while self._ready or self._running:
                left = end - time.monotonic()
                if left <= 0.0:
                    return False
                self._changed.wait(left)
        return True

    def close(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        """Wait for all transfers, then stop the threads. False if a transfer still hangs; its thread is left running."""
        self.wait_idle(timeout_s)
        end = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._waking += self._idle
            self._idle = 0
            self._work_added.notify_all()
            self._closed.notify_all()
            while self._workers > 0 and time.monotonic() < end:
                self._changed.wait(max(0.0, end - time.monotonic()))
            return self._workers == 0

    # --- internals; the lock is held unless the docstring says otherwise

    def _check_open(self, transfer: Transfer) -> None:
        if self._closing:
            raise LogicError(f"{transfer.describe()}: the pool of I/O threads is closed")

    def _wake(self) -> None:
        if len(self._ready) <= self._waking:
            pass  # enough threads are waking up
        elif self._idle > 0:
            self._idle -= 1
            self._waking += 1
            self._work_added.notify()
        elif self._workers - len(self._hung) < self.threads and self._workers < 2 * self.threads:
            if _start(self._work, f"kvcm-io-{self._workers + 1}"):
                self._workers += 1
                self._waking += 1
            else:
                self._no_threads = True
        if not self._has_watchdog:
            self._has_watchdog = _start(self._watch, "kvcm-io-watchdog")

    def _fail_if_dead(self) -> None:
        """Fail the transfers that wait for a thread if no thread can run them. The lock is not held."""
        dead: list[Transfer] = []
        with self._changed:
            why = ""
            if len(self._hung) >= 2 * self.threads:
                why = f"not started: all of {len(self._hung)} I/O threads hang in transfers that timed out"
            elif self._no_threads and self._workers == 0:
                why = "not started: the process cannot start a thread"
            if why:
                dead += self._ready
                self._ready.clear()
                for transfer in dead:
                    transfer.finish(why)
                self._changed.notify_all()
        for transfer in dead:
            transfer.opened()

    def _take(self) -> Transfer | None:
        """Wait for the next transfer to run; None if the thread should end."""
        while not self._ready:
            if self._closing:
                return None
            self._idle += 1
            self._work_added.wait()
            self._waking -= 1
        transfer = self._ready.popleft()
        transfer.deadline_s = time.monotonic() + self.timeout_s
        self._running.append(transfer)
        return transfer

    def _end(self, transfer: Transfer, error: str) -> bool:
        """Record that a transfer has ended; whether that opened its gate."""
        late = transfer in self._hung
        (self._hung if late else self._running).remove(transfer)
        if late or not (self._ready or self._running):
            self._changed.notify_all()
        return transfer.finish(error)

    def _work(self) -> None:
        transfer: Transfer | None = None
        error = ""
        with self._changed:
            self._waking -= 1
        while True:
            opened: Transfer | None = None
            following: Transfer | None = None
            surplus = False
            with self._changed:
                if transfer is not None:
                    if self._end(transfer, error):
                        opened = transfer
                    surplus = self._workers - len(self._hung) > self.threads
                if not surplus and (opened is None or self._ready):  # call `opened` before this thread may sleep
                    following = self._take()
                    surplus = following is None
            if opened is not None:
                opened.opened()
            if surplus:
                break
            transfer = following
            if transfer is not None:
                error = _perform(transfer)
        with self._changed:
            self._workers -= 1
            self._changed.notify_all()

    def _watch(self) -> None:
        while True:
            expired: list[Transfer] = []
            with self._changed:
                if self._closing and not self._running:
                    return
                now = time.monotonic()
                for transfer in list(self._running):  # in order of their deadlines: all have the same limit
                    if transfer.deadline_s > now:
                        break
                    self._running.remove(transfer)
                    self._hung.append(transfer)
                    if transfer.expire(f"{self.timeout_s:g} s"):
                        expired.append(transfer)
                if expired:
                    self._changed.notify_all()
                    for _transfer in expired:  # replace their threads
                        self._wake()
                else:
                    # An idle watchdog looks once per time limit, so that starting a transfer need not wake it.
                    wait = self._running[0].deadline_s - now if self._running else self.timeout_s
                    self._closed.wait(min(wait, _FOREVER_S))
            for transfer in expired:
                transfer.opened()
            if expired:
                self._fail_if_dead()


def _perform(transfer: Transfer) -> str:
    try:
        return transfer.perform()
    except Exception as caught:  # the gate must open after any error
        return f"{type(caught).__name__}: {caught}"


def _start(target: Callable[[], None], name: str) -> bool:
    """Start a thread; False if the operating system refuses it."""
    try:
        Thread(target=target, name=name, daemon=True).start()
    except RuntimeError as error:
        _log.warning("the thread %s could not be started: %s", name, error)
        return False
    return True
