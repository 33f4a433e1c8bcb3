"""The `threads` schedule: one real worker thread a stream, and the bounded pool of I/O threads for files.

Rule: one lock guards all queues; work itself runs with no lock held. Nothing waits without a limit: when no operation has finished
for the stall limit while something is pending, the waiting call raises an error that names the stuck streams.
"""

from __future__ import annotations

import time
from threading import Condition, Thread

from kv_cache_manager_v2.device.memory import AddressSpace
from kv_cache_manager_v2.device.schedule import ALL_STEPS, EmulatedTransfer, Event, Operation, Schedule, StreamQueue, Tally
from kv_cache_manager_v2.device.transfers import TransferPool
from kv_cache_manager_v2.errors import LogicError


class PooledTransfer(EmulatedTransfer):
    """A transfer that is carried out on the pool; hanging is waiting on the schedule's condition."""

    def __init__(
        self, fd: int, offset: int, address: int, nbytes: int, writes: bool, space: AddressSpace, schedule: ThreadSchedule
    ) -> None:
        super().__init__(fd, offset, address, nbytes, writes, space)
        self.schedule = schedule

    def perform(self) -> str:
        if not self.schedule.wait_released(self):
            return "dropped: the device was closed while it hung"
        try:
            error = super().perform()
        except LogicError as misuse:
            self.schedule.report(misuse)
            return str(misuse)
        self.schedule.tally.add_transfer(self.nbytes)
        return error

    def opened(self) -> None:
        self.schedule.changed()


class ThreadSchedule(Schedule):
    """Real concurrency: what runs when is the operating system's choice."""

    def __init__(self, tally: Tally, timeout_s: float, stall_s: float, io_threads: int) -> None:
        super().__init__(tally)
        self.stall_s = stall_s  # how long a waiting call watches nothing happen before it gives up
        self.pool = TransferPool(io_threads, timeout_s)
        self._changed = Condition()
        self._queues: list[StreamQueue] = []  # streams that have a worker thread
        self._executing = 0  # operations being run right now
        self._progress = 0  # operations finished and gates opened, ever
        self._failure: Exception | None = None  # what queued work raised and nobody has seen
        self._closing = False

    def adopt(self, queue: StreamQueue) -> None:
        queue.direct = False

    def retire(self, queue: StreamQueue) -> None:
        with self._changed:
            queue.retired = True
            self._changed.notify_all()

    def new_transfer(self, fd: int, offset: int, address: int, nbytes: int, writes: bool, space: AddressSpace) -> EmulatedTransfer:
        return PooledTransfer(fd, offset, address, nbytes, writes, space, self)

    def submit(self, queue: StreamQueue, operation: Operation) -> None:
        with self._changed:
            queue.pending.append(operation)
            queue.submitted += 1
            if queue not in self._queues:
                self._queues.append(queue)
                Thread(target=StreamWorker(self, queue).work, name=f"kvcm-stream-{queue.handle}", daemon=True).start()
            self._changed.notify_all()

    def start(self, transfer: EmulatedTransfer) -> None:
        self.pool.submit(transfer)

    def changed(self) -> None:
        with self._changed:
            self._progress += 1
            self._changed.notify_all()

    def advance(self) -> None:
        if self._failure is not None:
            with self._changed:
                failure = self._failure
                self._failure = None
                self.busy = False
            if failure is not None:
                raise failure

    def next_operation(self, queue: StreamQueue) -> Operation | None:
        """Block until the stream's first operation can run; None: stop."""
        with self._changed:
            while True:
                if self._closing or (queue.retired and not queue.pending):
                    self._queues.remove(queue)
                    self._changed.notify_all()
                    return None
                if queue.pending and not queue.pending[0].blocked():
                    self._executing += 1
                    return queue.pending[0]
                self._changed.wait()

    def finished(self, queue: StreamQueue, failure: Exception | None) -> None:
        """The stream's first operation is over."""
        with self._changed:
            queue.pending.popleft()
            queue.finished += 1
            self._executing -= 1
            self._progress += 1
            if failure is not None:
                self._keep(failure)
            self._changed.notify_all()

    def report(self, failure: Exception) -> None:
        """Something went wrong that the next call to the driver shall raise."""
        with self._changed:
            self._keep(failure)

    def _keep(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
            self.busy = True

    def wait_released(self, transfer: EmulatedTransfer) -> bool:
        """Block while the transfer is told to hang; False if the device is closed before it is let go."""
        with self._changed:
            while transfer.held():
                if self._closing:
                    return False
                self._changed.wait()
        return True

    def finish(self, event: Event | None) -> None:
        with self._changed:
            seen = self._progress
            end = time.monotonic() + self.stall_s
            while not (self.idle() if event is None else event.complete()):
                now = time.monotonic()
                if self._progress != seen or self._executing > 0 or self.pool.outstanding() > 0:
                    seen = self._progress
                    end = now + self.stall_s
                elif now >= end:
                    lines = [queue.describe() for queue in self._queues if queue.pending]
                    raise LogicError(f"nothing has moved for {self.stall_s:g} s: {'; '.join(lines)}")
                self._changed.wait(min(self.stall_s, max(0.001, end - now)))
        self.advance()

    def idle(self) -> bool:
        for queue in self._queues:
            if queue.pending:
                return False
        return self.pool.outstanding() == 0

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            while self._queues:
                self._changed.wait()
        self.pool.close()
        self.advance()


class StreamWorker:
    """The thread of one stream."""

    def __init__(self, schedule: ThreadSchedule, queue: StreamQueue) -> None:
        self.schedule = schedule
        self.queue = queue

    def work(self) -> None:
        while True:
            operation = self.schedule.next_operation(self.queue)
            if operation is None:
                return
            failure: Exception | None = None
            try:
                operation.run(ALL_STEPS)
            except Exception as caught:  # raised again by the next driver call
                failure = caught
            self.schedule.finished(self.queue, failure)
