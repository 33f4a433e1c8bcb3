"""File transfers of the CUDA driver: when they start, and the gate that they open.

Rule: a transfer goes to the pool of I/O threads when its stream has come to the place where it was submitted, and not before. A
thread of ours finds that out by asking the streams' events, because a transfer must never run on a thread of the device's driver,
and a pool thread that waited for one stream would be missing to the others.
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
from kv_cache_manager_v2.errors import KVCacheError, LogicError
from kv_cache_manager_v2.extras.cuda_gates import GateWords, Word
from kv_cache_manager_v2.extras.cuda_streams import CudaStreams
from kv_cache_manager_v2.ids import Stream

POLL_FIRST_SECONDS: Final = 0.00005  # between two looks at the events; doubled while none of them moves ...
POLL_LAST_SECONDS: Final = 0.001  # ... up to this, which costs a waiting stream little and the interpreter next to nothing
IDLE_SECONDS: Final = 3600.0  # a wait without an end in sight still wakes up now and then


class CudaTransfer(Transfer):
    """A transfer whose gate is a word that the device can see."""

    def __init__(self, transfers: CudaTransfers, fd: int, offset: int, address: int, nbytes: int, writes: bool) -> None:
        super().__init__(fd, offset, address, nbytes, writes)
        self._transfers: Final = transfers
        self.word: Word
        self.target: int
        self.word, self.target = transfers.words.take()  # the gate is open once the word has reached the target
        self.refusal = ""  # why it shall not be carried out: the device failed before it
        self.is_open = False  # the word was written; guarded, as the next, by the condition of all transfers
        self.is_released = False

    def perform(self) -> str:
        return self.refusal or self.move_with(self._transfers.move)

    def opened(self) -> None:
        self._transfers.open(self)


class _Waiting:
    """Transfers on their way to the pool, submitted together."""

    def __init__(self, transfers: list[CudaTransfer], event: int, number: int) -> None:
        self.transfers: Final = transfers
        self.event: Final = event  # recorded where the transfers were submitted
        self.number: Final = number  # in the order of submission


class CudaTransfers:
    """All file transfers of a driver. Thread safe.

    Transfers that become ready together start in the order in which they were submitted; a stream that stands still holds up no
    other.
    """

    def __init__(self, streams: CudaStreams, words: GateWords, pool: TransferPool, move: FileMover = move_file_range) -> None:
        self._streams: Final = streams
        self._pool: Final = pool
        self.words: Final = words
        self.move: Final = move
        self.checksums: dict[int, FileChecksums] = {}  # by file descriptor
        self._gates: dict[int, CudaTransfer] = {}  # not yet released
        self._next_gate = 1
        self._opened = threading.Condition()  # guards gates, their words and flags
        self._moved = threading.Condition()  # guards what follows
        self._lines: dict[Stream, deque[_Waiting]] = {}  # not ready when last looked at, by stream; no empty ones
        self._next_number = 0
        self._thread: threading.Thread | None = None
        self._closing = False

    # --- gates

    def gate(self, gate: int) -> CudaTransfer:
        """The transfer behind a gate. Raises LogicError for one that was released or never existed."""
        transfer = self._gates.get(gate)
        if transfer is None:
            raise LogicError(f"gate {gate} does not exist: it was released already or is no gate of this driver")
        return transfer

    def open(self, transfer: CudaTransfer) -> None:
        """Let through who waits for the transfer."""
        with self._opened:  # taking a lock after the pool gave one back also keeps the word behind the bytes that came before it
            transfer.word.open(transfer.target)
            transfer.is_open = True
            if transfer.is_released:
                self.words.give_back(transfer.word)
            self._opened.notify_all()

    def wait_open(self, transfer: CudaTransfer) -> None:
        """Block the calling thread until the gate is open."""
        with self._opened:
            while not transfer.is_open:
                self._opened.wait()

    def release(self, gate: int) -> None:
        """Forget a gate that is not pending."""
        with self._opened:
            transfer = self.gate(gate)
            if transfer.state == GATE_PENDING:
                raise LogicError(f"gate {gate} is pending ({transfer.describe()}): it cannot be released before it opens")
            del self._gates[gate]
            transfer.is_released = True
            if transfer.is_open:
                self.words.give_back(transfer.word)

    # --- submission

    def submit(
        self, stream: Stream, fd: int, offsets: Sequence[int], addresses: Sequence[int], nbytes: int, writes: bool
    ) -> list[int]:
        """Queue transfers of one size behind all work of the stream; returns their gates. All of them or, on an exception, none."""
        if self._closing:
            raise LogicError("a file transfer was submitted to a driver that is closed")
        if len(offsets) != len(addresses):
            raise LogicError(f"{len(offsets)} file offsets and {len(addresses)} addresses: give as many of one as of the other")
        if not offsets:
            return []
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
                self.words.give_back(transfer.word)
            raise
        with self._opened:
            gates = list(range(self._next_gate, self._next_gate + len(transfers)))
            self._next_gate += len(transfers)
            self._gates.update(zip(gates, transfers, strict=True))
        with self._moved:
            self._next_number += 1
            waiting = _Waiting(transfers, event, self._next_number)
            if stream not in self._lines and self._is_ready(waiting):
                self._pool.submit_all(list(transfers))
            else:
                if not self._lines:
                    self._moved.notify_all()
                self._lines.setdefault(stream, deque()).append(waiting)
                self._start_thread()
        return gates

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="kvcm-io-starter", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        pause = POLL_FIRST_SECONDS
        with self._moved:
            while self._lines or not self._closing:
                if not self._lines:
                    self._moved.wait(IDLE_SECONDS)
                    pause = POLL_FIRST_SECONDS
                elif self._hand_over():
                    pause = POLL_FIRST_SECONDS
                else:
                    self._moved.wait(pause)
                    pause = min(2 * pause, POLL_LAST_SECONDS)

    def _hand_over(self) -> bool:
        """Give to the pool what is ready; whether anything was. O(streams), plus O(1) for each that is."""
        ready: list[_Waiting] = []
        for stream in list(self._lines):
            line = self._lines[stream]
            while line and self._is_ready(line[0]):
                ready.append(line.popleft())
            if not line:
                del self._lines[stream]
        ready.sort(key=lambda waiting: waiting.number)
        for waiting in ready:
            self._pool.submit_all(list(waiting.transfers))
        if ready and not self._lines:
            self._moved.notify_all()
        return bool(ready)

    def _is_ready(self, waiting: _Waiting) -> bool:
        try:
            if not self._streams.query_event(waiting.event):
                return False
        except KVCacheError as error:  # the device is lost: the transfers fail on the pool, and their gates open
            for transfer in waiting.transfers:
                transfer.refusal = f"not started, the device failed: {error}"
        with contextlib.suppress(KVCacheError):  # as lost as the device; `close` will name the event
            self._streams.destroy_event(waiting.event)
        return True

    # --- the end

    def drain(self) -> None:
        """Block until no gate is pending. What timed out may still run."""
        with self._moved:
            while self._lines:
                self._moved.wait()
        while not self._pool.wait_idle(IDLE_SECONDS):
            pass

    def close(self, time_limit: float) -> list[str]:
        """Drain and end the threads; returns the gates never released and whether transfers still run, in words."""
        self.drain()
        with self._moved:
            self._closing = True
            self._moved.notify_all()
        if self._thread is not None:
            self._thread.join()
        leaks = [f"gate {gate} of the {transfer.describe()}" for gate, transfer in self._gates.items()]
        if not self._pool.close(time_limit):
            leaks.append("a file transfer that timed out and still runs, with its thread and its memory")
        self._gates.clear()
        return leaks
