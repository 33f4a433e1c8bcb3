"""File transfers of the CUDA driver: when they start, and how their gates open.

A transfer goes to the pool of I/O threads once its stream has reached the position where it was submitted. One thread polls the
streams' events for this. A callback would run the transfer on CUDA's own thread, and a pool thread that waited for one stream would
be missing for the others.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

from kv_cache_manager_v2.device.checksums import FileChecksums, FileMover
from kv_cache_manager_v2.device.driver import GATE_PENDING
from kv_cache_manager_v2.device.file_transfers import Transfer, TransferPool, move_file_range
from kv_cache_manager_v2.device.waiters import LONGEST_SLEEP_S, Waiters
from kv_cache_manager_v2.errors import KVCacheError, LogicError, OutOfMemoryError
from kv_cache_manager_v2.extras.cuda_gates import GateWords, Word
from kv_cache_manager_v2.extras.cuda_streams import CudaStreams
from kv_cache_manager_v2.ids import Stream

POLL_FIRST_SECONDS: Final = 0.00005  # between two polls of the events; doubled while none completes ...
POLL_LAST_SECONDS: Final = 0.001  # ... up to this: a small delay for a stream at almost no cost
IDLE_SECONDS: Final = 3600.0  # the longest single wait; a loop then waits again


class CudaTransfer(Transfer):
    """A transfer whose gate is a word in memory that the device can read."""

    def __init__(self, transfers: CudaTransfers, fd: int, offset: int, address: int, nbytes: int, writes: bool) -> None:
        super().__init__(fd, offset, address, nbytes, writes)
        self._transfers: Final = transfers
        self.word: Word
        self.target: int
        self.word, self.target = transfers.words.take()  # the gate opens when the word reaches the target
        self.refusal = ""  # error text; set if the device failed before the transfer could start
        self.is_open = False  # the word was written; guarded by `CudaTransfers._gate_lock`, as `is_released` is
        self.is_released = False

    def perform(self) -> str:
        return self.refusal or self.move_with(self._transfers.move)

    def opened(self) -> None:
        self._transfers.open(self)


class _Waiting:
    """Transfers that were submitted together and wait for their stream."""

    def __init__(self, transfers: list[CudaTransfer], event: int, number: int) -> None:
        self.transfers: Final = transfers
        self.event: Final = event  # complete when the transfers may start
        self.number = number  # in the order of submission


class CudaTransfers:
    """All file transfers of a driver. Thread safe.

    Transfers that become ready at the same time start in the order in which they were submitted. A blocked stream delays no other.
    """

    def __init__(self, streams: CudaStreams, words: GateWords, pool: TransferPool, move: FileMover = move_file_range) -> None:
        self._streams: Final = streams
        self._pool: Final = pool
        self.words: Final = words
        self.move: Final = move
        self.checksums: dict[int, FileChecksums] = {}  # by file descriptor
        self._gates: dict[int, CudaTransfer] = {}  # not yet released
        self._next_gate = 1
        self._gate_lock = threading.Lock()  # guards `_gates`, and the words and flags of transfers
        self._gate_waiters = Waiters()
        self._lock = threading.Lock()  # guards the following fields
        self._waiters = Waiters()
        self._waiting: dict[Stream, deque[_Waiting]] = {}  # by stream, in order; no empty deques
        self._next_number = 0
        self._thread: threading.Thread | None = None
        self._closing = False

    # --- gates

    def gate(self, gate: int) -> CudaTransfer:
        """The transfer of a gate. Raises LogicError if the gate was released or never existed."""
        transfer = self._gates.get(gate)
        if transfer is None:
            raise LogicError(f"gate {gate} does not exist: it was released, or this driver did not create it")
        return transfer

    def open(self, transfer: CudaTransfer) -> None:
        """Open the transfer's gate."""
        with self._gate_lock:  # taking the lock also orders the word after the transferred bytes
            transfer.word.open(transfer.target)
            transfer.is_open = True
            if transfer.is_released:
                self.words.free(transfer.word)
            self._gate_waiters.wake_all()

    def wait_open(self, transfer: CudaTransfer) -> None:
        """Block the calling thread until the gate is open."""
        while True:
            with self._gate_lock:
                if transfer.is_open:
                    return
                ticket = self._gate_waiters.enter()
            self._gate_waiters.sleep(ticket, LONGEST_SLEEP_S)

    def release(self, gate: int) -> None:
        """Free a gate that is not pending."""
        with self._gate_lock:
            transfer = self.gate(gate)
            if transfer.state == GATE_PENDING:
                raise LogicError(f"gate {gate} is pending ({transfer.describe()}); release it after it has opened")
            del self._gates[gate]
            transfer.is_released = True
            if transfer.is_open:
                self.words.free(transfer.word)

    # --- submission

    def submit(
        self, stream: Stream, fd: int, offsets: Sequence[int], addresses: Sequence[int], nbytes: int, writes: bool, gates: list[int]
    ) -> None:
        """Queue transfers of one size after all work of the stream, and append their gates.

        On an exception none is queued. After an interrupt, `gates` has those of the transfers that are queued.
        """
        if self._closing:
            raise LogicError("a file transfer was submitted to a closed driver")
        if len(offsets) != len(addresses):
            raise LogicError(f"{len(offsets)} file offsets and {len(addresses)} addresses: must be as many")
        if not offsets:
            return
        event = self._streams.create_event()
        transfers: list[CudaTransfer] = []
        checksums = self.checksums.get(fd)
        try:
            self._streams.record_event(event, stream)
            for offset, address in zip(offsets, addresses, strict=True):
                transfers.append(CudaTransfer(self, fd, offset, address, nbytes, writes))
                transfers[-1].checksums = checksums
        except BaseException:
            self._streams.destroy_event(event)
            for transfer in transfers:
                self.words.free(transfer.word)
            raise
        numbers: list[int] = []
        waiting = _Waiting(transfers, event, 0)
        try:
            with self._gate_lock:
                numbers += range(self._next_gate, self._next_gate + len(transfers))
                self._next_gate += len(transfers)
                self._gates.update(zip(numbers, transfers, strict=True))
            self._queue(stream, waiting)
            gates += numbers
        except BaseException:
            self._settle_refusal(stream, waiting, numbers, gates)
            raise

    def _queue(self, stream: Stream, waiting: _Waiting) -> None:
        """Submit transfers to the pool if their stream has reached them, else when it does."""
        with self._lock:
            self._next_number += 1
            waiting.number = self._next_number
            if stream not in self._waiting and self._is_ready(waiting):
                self._pool.submit_all(list(waiting.transfers))
                return
            self._start_thread()
            self._waiting.setdefault(stream, deque()).append(waiting)
            self._waiters.wake_all()

    def _settle_refusal(self, stream: Stream, waiting: _Waiting, numbers: list[int], gates: list[int]) -> None:
        """After an exception, return the gates of transfers that are queued, and free what the others have."""
        with self._lock:
            queued = waiting in self._waiting.get(stream, ())
        for index, transfer in enumerate(waiting.transfers):
            if not queued and not transfer.submitted:
                with self._gate_lock:
                    if index < len(numbers):
                        self._gates.pop(numbers[index], None)
                    self.words.free(transfer.word)
            elif numbers[index] not in gates:
                gates.append(numbers[index])

    def _start_thread(self) -> None:
        """The lock is held. Raises OutOfMemoryError."""
        if self._thread is None:
            thread = threading.Thread(target=self._watch, name="kvcm-io-starter", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise OutOfMemoryError(
                    f"the process cannot start a thread for file transfers ({error}); raise the limit on processes or memory"
                ) from error
            self._thread = thread

    def _watch(self) -> None:
        pause = POLL_FIRST_SECONDS
        while True:
            with self._lock:
                idle = not self._waiting
                if idle and self._closing:
                    return
                handed_over = not idle and self._hand_over()
                ticket = self._waiters.enter()
            if idle or handed_over:
                pause = POLL_FIRST_SECONDS
            if idle:
                self._waiters.sleep(ticket, LONGEST_SLEEP_S)
            elif not handed_over:
                self._waiters.sleep(ticket, pause)
                pause = min(2 * pause, POLL_LAST_SECONDS)

    def _hand_over(self) -> bool:
        """Submit to the pool what is ready; whether anything was. O(streams with waiting transfers + ready transfers)."""
        ready: list[_Waiting] = []
        for stream in list(self._waiting):
            line = self._waiting[stream]
            while line and self._is_ready(line[0]):
                ready.append(line.popleft())
            if not line:
                del self._waiting[stream]
        ready.sort(key=lambda waiting: waiting.number)
        for waiting in ready:
            self._pool.submit_all(list(waiting.transfers))
        if ready and not self._waiting:
            self._waiters.wake_all()
        return bool(ready)

    def _is_ready(self, waiting: _Waiting) -> bool:
        try:
            if not self._streams.query_event(waiting.event):
                return False
        except KVCacheError as error:  # the device is lost: the pool fails the transfers, which opens their gates
            for transfer in waiting.transfers:
                transfer.refusal = f"not started, the device failed: {error}"
        with contextlib.suppress(KVCacheError):  # the device is lost; `close` reports the event as a leak
            self._streams.destroy_event(waiting.event)
        return True

    # --- closing

    def drain(self) -> None:
        """Block until no gate is pending. Transfers that timed out may still run."""
        while True:
            with self._lock:
                if not self._waiting:
                    break
                self._start_thread()
                ticket = self._waiters.enter()
            self._waiters.sleep(ticket, LONGEST_SLEEP_S)
        while not self._pool.wait_idle(IDLE_SECONDS):
            pass

    def close(self, time_limit: float) -> list[str]:
        """Drain and end the threads; returns a text for each gate not released, and one if transfers still run."""
        self.drain()
        with self._lock:
            self._closing = True
            self._waiters.wake_all()
        if self._thread is not None:
            self._thread.join()
        leaks = [f"gate {gate} of the {transfer.describe()}" for gate, transfer in self._gates.items()]
        if not self._pool.close(time_limit):
            leaks.append("a file transfer that timed out and still runs on its thread")
        self._gates.clear()
        return leaks
