"""File transfers: one range of a file to or from host memory, and the bounded pool of threads that carries them out.

Rule: a transfer's gate always opens, and says how. It opens when the transfer ends, or when its time is up while the transfer may
still run: then it is GATE_TIMED_OUT until the transfer really ends and GATE_LATE for ever after, never GATE_DONE, because a stream
that went on may have read or overwritten the memory in between.
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
# Where files lie in the page cache moving them is the processors' work, and more threads than these only take turns.
BUFFERED_IO_THREADS: Final = max(2, min(DEFAULT_IO_THREADS, os.cpu_count() or 1))
DEFAULT_TIMEOUT_S: Final = 60.0

_log: Final = logging.getLogger(__name__)
_FOREVER_S: Final = 3600.0  # a wait without an end in sight still wakes up now and then


def move_file_range(fd: int, offset: int, address: int, nbytes: int, writes: bool) -> str:
    """Read or write a whole file range from or to memory; blocks. Returns what went wrong, empty if all bytes were moved."""
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
    """One file transfer and its gate. A driver subclasses it to carry its own state or to open a gate of the device."""

    def __init__(self, fd: int, offset: int, address: int, nbytes: int, writes: bool) -> None:
        self.fd = fd
        self.offset = offset  # in the file, bytes
        self.address = address  # in host memory
        self.nbytes = nbytes
        self.writes = writes  # memory to file, else file to memory
        self.checksums: FileChecksums | None = None  # of the file; None: its bytes are not checked
        self.state = GATE_PENDING
        self.error = ""  # what went wrong; empty while pending and when done
        self.deadline_s = 0.0  # monotonic clock; set when the pool starts it

    def describe(self) -> str:
        what = "write" if self.writes else "read"
        return f"{what} of {self.nbytes} bytes at offset {self.offset} of file descriptor {self.fd}"

    def perform(self) -> str:
        """Move the bytes; blocks. Returns what went wrong, empty for nothing."""
        return self.move_with(move_file_range)

    def move_with(self, mover: FileMover) -> str:
        """Move the bytes by this function, with the checksums of the file; blocks. Returns what went wrong, empty for nothing."""
        if self.checksums is None:
            return mover(self.fd, self.offset, self.address, self.nbytes, self.writes)
        return self.checksums.move(mover, self.fd, self.offset, self.address, self.nbytes, self.writes)

    def opened(self) -> None:
        """The gate has just opened: called exactly once, with no lock held, on the thread that opened it. Must not raise."""

    def running(self) -> bool:
        """Whether its memory may still be touched."""
        return self.state == GATE_PENDING or self.state == GATE_TIMED_OUT

    def finish(self, error: str) -> bool:
        """The transfer ended; whether that opened the gate (it did not if the time was up already)."""
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
        """The time is up: open the gate although the transfer may still run; whether that opened it."""
        if self.state != GATE_PENDING:
            return False
        self.error = f"{self.describe()}: still running after {limit}"
        self.state = GATE_TIMED_OUT
        return True


class TransferPool:
    """At most `threads` threads that carry out transfers, started in the order of submission, and one that watches the clock.

    A thread whose transfer has timed out no longer counts, and a new one takes its place, up to twice the number of threads in
    all; after that what has not started fails at once, so that gates open even when the file system is dead. Threads start as
    they are needed.
    """

    def __init__(self, threads: int = DEFAULT_IO_THREADS, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if threads < 1:
            raise ConfigError(f"a transfer pool of {threads} threads can do nothing; give at least 1")
        if not timeout_s > 0.0:
            raise ConfigError(f"transfer timeout {timeout_s} must be positive (seconds)")
        self.threads = threads
        self.timeout_s = timeout_s
        lock = Lock()
        self._work_came = Condition(lock)  # for threads without any
        self._changed = Condition(lock)  # for callers: transfers or threads have ended
        self._clock_changed = Condition(lock)  # for the watchman: the pool closes
        self._ready: deque[Transfer] = deque()
        self._running: list[Transfer] = []  # started and not timed out
        self._hung: list[Transfer] = []  # timed out and not ended
        self._workers = 0  # live threads, hung ones included
        self._idle = 0  # of these, the ones that wait for work and have not been told of any
        self._waking = 0  # of these, the ones that were started or told of work and have not looked for it yet
        self._no_threads = False  # the process has refused one
        self._watchman = False
        self._closing = False

    def submit(self, transfer: Transfer) -> None:
        """Start the transfer as soon as a thread is free, after all that were submitted before."""
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
        """Transfers whose gate is closed, that is not started, or running in time."""
        with self._changed:
            return len(self._ready) + len(self._running)

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until every gate is open; False if that took longer than the limit."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while self._ready or self._running:
                left = end - time.monotonic()
                if left <= 0.0:
                    return False
                self._changed.wait(left)
        return True

    def close(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        """Let everything end, then stop the threads; False if some transfer did not end in time: its thread is left behind."""
        self.wait_idle(timeout_s)
        end = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._waking += self._idle
            self._idle = 0
            self._work_came.notify_all()
            self._clock_changed.notify_all()
            while self._workers > 0 and time.monotonic() < end:
                self._changed.wait(max(0.0, end - time.monotonic()))
            return self._workers == 0

    # --- inside; the lock is held unless said otherwise

    def _check_open(self, transfer: Transfer) -> None:
        if self._closing:
            raise LogicError(f"{transfer.describe()}: the pool of I/O threads is closed")

    def _wake(self) -> None:
        if len(self._ready) <= self._waking:
            pass  # enough are on their way
        elif self._idle > 0:
            self._idle -= 1
            self._waking += 1
            self._work_came.notify()
        elif self._workers - len(self._hung) < self.threads and self._workers < 2 * self.threads:
            if _start(self._work, f"kvcm-io-{self._workers + 1}"):
                self._workers += 1
                self._waking += 1
            else:
                self._no_threads = True
        if not self._watchman:
            self._watchman = _start(self._watch, "kvcm-io-watchman")

    def _fail_if_dead(self) -> None:
        """No lock held. When every thread that we may have hangs, open the gates of all that waits for one."""
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
        """The next transfer to carry out, as soon as there is one; None: the thread shall end."""
        while not self._ready:
            if self._closing:
                return None
            self._idle += 1
            self._work_came.wait()
            self._waking -= 1
        transfer = self._ready.popleft()
        transfer.deadline_s = time.monotonic() + self.timeout_s
        self._running.append(transfer)
        return transfer

    def _end(self, transfer: Transfer, error: str) -> bool:
        """The transfer has ended; whether that opened its gate."""
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
                if not surplus and (opened is None or self._ready):  # an open gate is told of before the thread may sleep
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
                for transfer in list(self._running):  # deadlines ascend, since the limit is one for all
                    if transfer.deadline_s > now:
                        break
                    self._running.remove(transfer)
                    self._hung.append(transfer)
                    if transfer.expire(f"{self.timeout_s:g} s"):
                        expired.append(transfer)
                if expired:
                    self._changed.notify_all()
                    for _transfer in expired:  # each of their threads is replaced
                        self._wake()
                else:
                    # without a transfer, too, it looks once in each limit: so nobody needs to wake it for one
                    wait = self._running[0].deadline_s - now if self._running else self.timeout_s
                    self._clock_changed.wait(min(wait, _FOREVER_S))
            for transfer in expired:
                transfer.opened()
            if expired:
                self._fail_if_dead()


def _perform(transfer: Transfer) -> str:
    try:
        return transfer.perform()
    except Exception as caught:  # whatever it is, the gate must open
        return f"{type(caught).__name__}: {caught}"


def _start(target: Callable[[], None], name: str) -> bool:
    """Start a thread; False if the process cannot have another one."""
    try:
        Thread(target=target, name=name, daemon=True).start()
    except RuntimeError as error:
        _log.warning("the thread %s could not be started: %s", name, error)
        return False
    return True
