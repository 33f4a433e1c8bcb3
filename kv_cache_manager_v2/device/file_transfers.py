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
from functools import partial
from threading import Lock, Thread
from typing import Final

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.device.checksums import FileChecksums, FileMover
from kv_cache_manager_v2.device.driver import GATE_DONE, GATE_FAILED, GATE_LATE, GATE_PENDING, GATE_TIMED_OUT
from kv_cache_manager_v2.device.waiters import LONGEST_SLEEP_S, Waiters
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
        self.submitted = False  # whether something runs it, or will
        self.deadline_s = 0.0  # monotonic clock; set when the pool starts it
        self._gate = 0
        self._changed: deque[int] | None = None  # gets the gate whenever the state changes

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

    def watch(self, gate: int, changed: deque[int]) -> None:
        """Append the gate to `changed` whenever its state changes from now on."""
        self._gate = gate
        self._changed = changed

    def _change(self, state: int, error: str) -> None:
        self.error = error
        self.state = state
        if self._changed is not None:
            self._changed.append(self._gate)  # no call, hence no interrupt, comes between the change and this line

    def finish(self, error: str) -> bool:
        """Record that the transfer ended; whether that opened the gate. A timed-out gate was open already."""
        if self.state == GATE_TIMED_OUT:
            self._change(GATE_LATE, f"{self.describe()}: ended after its time limit" + (f": {error}" if error else ""))
            return False
        if self.state != GATE_PENDING:
            raise LogicError(f"{self.describe()} ended twice")
        self._change(GATE_FAILED if error else GATE_DONE, f"{self.describe()}: {error}" if error else "")
        return True

    def expire(self, limit: str) -> bool:
        """Open the gate of a transfer that has passed its time limit; False if the gate was open already."""
        if self.state != GATE_PENDING:
            return False
        self._change(GATE_TIMED_OUT, f"{self.describe()}: still running after {limit}")
        return True


class _Worker:
    """One thread of a pool. The pool's lock guards its place in the pool's lists."""

    def __init__(self) -> None:
        self._ticket = Lock()  # released to wake the thread
        self._ticket.acquire()

    def wake(self) -> None:
        """Let the thread look for work. The pool's lock is held."""
        if self._ticket.locked():
            self._ticket.release()

    def sleep(self) -> None:
        """Block the thread until it is woken. An interrupted call may have failed to wake it, so not for ever."""
        self._ticket.acquire(timeout=LONGEST_SLEEP_S)


class TransferPool:
    """Runs transfers on at most `threads` threads, in order of submission; one more thread, the watchdog, enforces the time limit.

    Threads start as they are needed. A thread whose transfer has timed out is replaced, up to twice `threads` in all. When all of
    these hang, transfers that have not started fail at once, so that their gates open. An interrupted `submit` has submitted the
    transfer or not; the threads find it without the rest of the call.
    """

    def __init__(self, threads: int = DEFAULT_IO_THREADS, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if threads < 1:
            raise ConfigError(f"threads is {threads}: a transfer pool needs at least 1")
        if not timeout_s > 0.0:
            raise ConfigError(f"timeout_s is {timeout_s}: must be a positive number of seconds")
        self.threads = threads
        self.timeout_s = timeout_s
        self._lock = Lock()  # guards all fields
        self._callers = Waiters()  # they wait for transfers or threads to end
        self._watchdogs = Waiters()
        self._ready: deque[Transfer] = deque()
        self._running: list[Transfer] = []  # started and not timed out
        self._hung: list[Transfer] = []  # timed out and not ended
        self._workers: list[_Worker] = []  # live threads, including those that hang
        self._idle: list[_Worker] = []  # they wait for work and have not been woken
        self._waking: list[_Worker] = []  # they were started or woken, and have not looked for work yet
        self._no_threads = False  # the operating system refused to start a thread
        self._has_watchdog = False
        self._closing = False

    def submit(self, transfer: Transfer) -> None:
        """Start the transfer as soon as a thread is free and all transfers submitted before it have started."""
        self.submit_all([transfer])

    def submit_all(self, transfers: list[Transfer]) -> None:
        """As `submit` for each, in this order. If interrupted, the first ones are submitted (`Transfer.submitted`)."""
        with self._lock:
            try:
                for transfer in transfers:
                    self._check_open(transfer)
                    transfer.submitted = True
                    self._ready.append(transfer)  # no call comes between this line and the one before, so no interrupt either
                    self._wake_workers()
            except BaseException:  # an interrupt, perhaps before a thread was woken
                for worker in self._waking:
                    worker.wake()
                self._wake_workers()
                raise
            dead = self._no_threads or len(self._hung) >= 2 * self.threads
        if dead:
            self._fail_if_dead()

    def outstanding(self) -> int:
        """Transfers whose gate is closed: those not started, and those running within the time limit."""
        with self._lock:
            return len(self._ready) + len(self._running)

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until every gate is open; False after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if not self._ready and not self._running:
                    return True
                left = end - time.monotonic()
                if left <= 0.0:
                    return False
                ticket = self._callers.enter()
            self._callers.sleep(ticket, min(left, LONGEST_SLEEP_S))

    def close(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        """Wait for all transfers, then stop the threads. False if a transfer still hangs; its thread is left running.

        After an interrupt it can be called again.
        """
        self.wait_idle(timeout_s)
        end = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._closing = True
                for worker in self._idle:
                    worker.wake()
                self._watchdogs.wake_all()
                left = end - time.monotonic()
                if not self._workers or left <= 0.0:
                    return not self._workers
                ticket = self._callers.enter()
            self._callers.sleep(ticket, min(left, LONGEST_SLEEP_S))

    # --- internals; the lock is held unless the docstring says otherwise

    def _check_open(self, transfer: Transfer) -> None:
        if self._closing:
            raise LogicError(f"{transfer.describe()}: the pool of I/O threads is closed")

    def _wake_workers(self) -> None:
        """Wake or start one thread, unless enough of them are about to look for work. Start the watchdog if there is none."""
        if len(self._ready) > len(self._waking):
            if self._idle:
                worker = self._idle[-1]
                del self._idle[-1]
                self._waking.append(worker)  # no call since the thread left `_idle`
                worker.wake()
            elif len(self._workers) - len(self._hung) < self.threads and len(self._workers) < 2 * self.threads:
                self._start_worker()
        if not self._has_watchdog:
            self._has_watchdog = _start(self._watch, "kvcm-io-watchdog")

    def _start_worker(self) -> None:
        worker = _Worker()
        name = f"kvcm-io-{len(self._workers) + 1}"
        started = False
        try:
            self._workers.append(worker)
            self._waking.append(worker)
            started = _start(partial(self._work, worker), name)
            if not started:
                self._no_threads = True
        finally:
            if not started:  # after an interrupt the thread may run all the same: then it enters itself
                self._forget(worker)

    def _forget(self, worker: _Worker) -> None:
        """Remove a thread from all lists."""
        for workers in (self._workers, self._idle, self._waking):
            while worker in workers:
                workers.remove(worker)

    def _fail_if_dead(self) -> None:
        """Fail the transfers that wait for a thread if no thread can run them. The lock is not held."""
        dead: list[Transfer] = []
        with self._lock:
            why = ""
            if len(self._hung) >= 2 * self.threads:
                why = f"not started: all of {len(self._hung)} I/O threads hang in transfers that timed out"
            elif self._no_threads and not self._workers:
                why = "not started: the process cannot start a thread"
            while why and self._ready:
                transfer = self._ready[0]
                if transfer.state == GATE_PENDING:
                    transfer.finish(why)
                dead.append(transfer)
                self._ready.popleft()
            if dead:
                self._callers.wake_all()
        for transfer in dead:
            transfer.opened()

    def _take(self) -> Transfer | None:
        """The next transfer to run; None if there is none."""
        if not self._ready:
            return None
        transfer = self._ready.popleft()
        transfer.deadline_s = time.monotonic() + self.timeout_s
        self._running.append(transfer)
        return transfer

    def _wait_for_work(self, worker: _Worker) -> Transfer | None:
        """Wait for the next transfer to run; None if the thread should end. The lock is not held."""
        while True:
            with self._lock:
                if worker in self._idle:
                    self._idle.remove(worker)
                if worker in self._waking:
                    self._waking.remove(worker)
                transfer = self._take()
                if transfer is not None or self._closing:
                    return transfer
                self._idle.append(worker)
            worker.sleep()

    def _end(self, transfer: Transfer, error: str) -> bool:
        """Record that a transfer has ended; whether that opened its gate."""
        late = transfer in self._hung
        (self._hung if late else self._running).remove(transfer)
        if late or not (self._ready or self._running):
            self._callers.wake_all()
        return transfer.finish(error)

    def _work(self, worker: _Worker) -> None:
        """Main loop of a thread."""
        transfer: Transfer | None = None
        error = ""
        with self._lock:
            if worker not in self._workers:
                self._workers.append(worker)
        while True:
            opened: Transfer | None = None
            following: Transfer | None = None
            surplus = False
            if transfer is not None:
                with self._lock:
                    if self._end(transfer, error):
                        opened = transfer
                    surplus = len(self._workers) - len(self._hung) > self.threads
                    if not surplus:
                        following = self._take()
            if opened is not None:
                opened.opened()  # before this thread may sleep
            if following is None and not surplus:
                following = self._wait_for_work(worker)
            if following is None:
                break
            transfer = following
            error = _perform(transfer)
        with self._lock:
            self._forget(worker)
            self._callers.wake_all()

    def _watch(self) -> None:
        """Main loop of the watchdog."""
        while True:
            expired: list[Transfer] = []
            with self._lock:
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
                    self._callers.wake_all()
                    for _transfer in expired:  # replace their threads
                        self._wake_workers()
                # An idle watchdog looks once per time limit, so that starting a transfer need not wake it.
                wait = self._running[0].deadline_s - now if self._running else self.timeout_s
                ticket = None if expired else self._watchdogs.enter()
            for transfer in expired:
                transfer.opened()
            if ticket is None:
                self._fail_if_dead()
            else:
                self._watchdogs.sleep(ticket, max(0.0, min(wait, _FOREVER_S)))


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
