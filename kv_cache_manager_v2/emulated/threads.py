"""The `threads` schedule: one real worker thread a stream, and the bounded pool of I/O threads for files.

Rule: one lock guards all queues; work itself runs with no lock held. What takes no time - waits that are over, the start of a file
transfer - is done by whichever thread made it possible, so that a worker is woken for real work only; and a thread that waits for
the device carries out copies that nobody has begun, since handing over takes longer than a small copy. Nothing waits without a
limit: when no operation has finished for the stall limit while something is pending, the waiting call raises an error that names
the stuck streams.
"""

from __future__ import annotations

import time
from threading import Condition, Lock, RLock, Thread, get_ident

from kv_cache_manager_v2.device.file_transfers import TransferPool
from kv_cache_manager_v2.emulated.address_space import AddressSpace
from kv_cache_manager_v2.emulated.streams import ALL_STEPS, EmulatedTransfer, Event, Operation, Schedule, StreamQueue, Tally
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
        """Who waits for others besides is let through by the last of them."""
        waits = self.waits
        for wait in waits:
            if not wait.blocked():
                self.schedule.changed()
                return
        if not waits:
            self.schedule.changed()


class StreamWorker:
    """The thread of one stream. What it shares is guarded by the schedule's lock."""

    def __init__(self, schedule: ThreadSchedule, queue: StreamQueue) -> None:
        self.schedule = schedule
        self.queue = queue
        self.running = False  # somebody runs the stream's first operation ...
        self.runner = 0  # ... the thread of this number, if it is real work; else 0
        self._asleep = False
        self._bell = Lock()  # released to wake the thread
        self._bell.acquire()

    def begin(self) -> None:
        """The lock is held: the caller is going to run the stream's first operation."""
        self.running = True
        self.schedule.executing += 1

    def run_first(self) -> None:
        """No lock held, after `begin`."""
        failure: Exception | None = None
        self.runner = get_ident()
        try:
            self.queue.pending[0].run(ALL_STEPS)
        except Exception as caught:  # raised again by the next driver call
            failure = caught
        finally:  # also when a host thread that helps is interrupted: nobody else would go on with the stream
            self.runner = 0
            self.schedule.finished(self, failure)

    def ring(self) -> None:
        """The lock is held: let the thread look for work."""
        if self._asleep:
            self._asleep = False
            self._bell.release()

    def work(self) -> None:
        while True:
            with self.schedule.lock:
                if self.schedule.lets_go(self):
                    return
                queue = self.queue
                found = bool(queue.pending) and not self.running and not queue.pending[0].instant()
                if found:
                    self.begin()
                else:
                    self._asleep = True
            if found:
                self.run_first()
            else:
                self._bell.acquire()


class ThreadSchedule(Schedule):
    """Real concurrency: what runs when is the operating system's choice."""

    def __init__(self, tally: Tally, timeout_s: float, stall_s: float, io_threads: int) -> None:
        super().__init__(tally)
        self.stall_s = stall_s  # how long a waiting call watches nothing happen before it gives up
        self.pool = TransferPool(io_threads, timeout_s)
        self.lock = RLock()  # may be held when the pool's is taken, never the other way round
        self.executing = 0  # operations being run right now
        self._complete = Condition(self.lock)  # something that a host thread waits for is over
        self._let_go = Condition(self.lock)  # a gate was opened, perhaps that of a hanging transfer
        self._workers: dict[int, StreamWorker] = {}  # by stream handle: streams that have a worker thread
        self._awaited: list[Event | None] = []  # what host threads wait for; None: everything
        self._progress = 0  # operations finished and gates opened, ever
        self._failure: Exception | None = None  # what queued work raised and nobody has seen
        self._closing = False

    def adopt(self, queue: StreamQueue) -> None:
        queue.direct = False

    def retire(self, queue: StreamQueue) -> None:
        with self.lock:
            queue.retired = True
            worker = self._workers.get(queue.handle)
            if worker is not None:
                worker.ring()

    def new_transfer(self, fd: int, offset: int, address: int, nbytes: int, writes: bool, space: AddressSpace) -> EmulatedTransfer:
        return PooledTransfer(fd, offset, address, nbytes, writes, space, self)

    def submit(self, queue: StreamQueue, operation: Operation) -> None:
        with self.lock:
            queue.pending.append(operation)
            queue.submitted += 1
            worker = self._workers.get(queue.handle)
            if worker is None:
                worker = StreamWorker(self, queue)
                self._workers[queue.handle] = worker
                Thread(target=worker.work, name=f"kvcm-stream-{queue.handle}", daemon=True).start()
            if len(queue.pending) == 1 and self._pass(worker):
                self._pass_all()

    def start(self, transfers: list[EmulatedTransfer]) -> None:
        self.pool.submit_all(list(transfers))

    def changed(self) -> None:
        with self.lock:
            self._progress += 1
            self._pass_all()
            self._let_go.notify_all()

    def advance(self) -> None:
        if self._failure is not None:
            with self.lock:
                failure = self._failure
                self._failure = None
                self.busy = False
            if failure is not None:
                raise failure

    def finished(self, worker: StreamWorker, failure: Exception | None) -> None:
        """The stream's first operation is over."""
        with self.lock:
            worker.running = False
            self.executing -= 1
            self._pop(worker.queue)
            if failure is not None:
                self._keep(failure)
            if self._closing or (worker.queue.retired and not worker.queue.pending):
                worker.ring()  # perhaps it shall end, and somebody else has run its last operation
            self._pass_all()

    def lets_go(self, worker: StreamWorker) -> bool:
        """The lock is held: whether the worker's thread shall end."""
        queue = worker.queue
        if worker.running or not (self._closing or (queue.retired and not queue.pending)):
            return False
        del self._workers[queue.handle]
        self._complete.notify_all()
        return True

    def report(self, failure: Exception) -> None:
        """Something went wrong that the next call to the driver shall raise."""
        with self.lock:
            self._keep(failure)

    # --- inside; the lock is held

    def _keep(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
            self.busy = True

    def _pop(self, queue: StreamQueue) -> None:
        queue.pending.popleft()
        queue.finished += 1
        self._progress += 1

    def _pass(self, worker: StreamWorker) -> bool:
        """Do what takes no time at the front of a stream, and wake its worker for what comes then; whether anything was done."""
        queue = worker.queue
        moved = False
        while queue.pending and not worker.running:
            operation = queue.pending[0]
            if not operation.instant():
                worker.ring()
                break
            if operation.blocked():
                break
            worker.running = True  # starting a transfer may open its gate at once, which comes back here
            try:
                operation.run(ALL_STEPS)
            except Exception as caught:
                self._keep(caught)
            worker.running = False
            self._pop(queue)
            moved = True
        if queue.retired and not queue.pending:
            worker.ring()
        return moved

    def _pass_all(self) -> None:
        """Something has moved: so may what waited for it, streams and host threads."""
        moved = True
        while moved:
            moved = False
            for worker in list(self._workers.values()):
                if worker.queue.pending and self._pass(worker):
                    moved = True
        for event in self._awaited:
            if self._over(event):
                self._complete.notify_all()
                return

    def _over(self, event: Event | None) -> bool:
        return self.idle() if event is None else event.complete()

    def _begin_copy(self, event: Event | None) -> StreamWorker | None:
        """A worker whose stream's first operation is a copy that nobody has begun, and that the event waits for."""
        for worker in self._workers.values():
            queue = worker.queue
            wanted = event is None or event.queue is queue
            if wanted and queue.pending and not worker.running and queue.pending[0].shareable():
                worker.begin()
                return worker
        return None

    # --- waiting

    def wait_released(self, transfer: EmulatedTransfer) -> bool:
        """Block while the transfer is told to hang; False if the device is closed before it is let go."""
        if not transfer.held():
            return True
        with self.lock:
            while transfer.held():
                if self._closing:
                    return False
                self._let_go.wait()
        return True

    def finish(self, event: Event | None) -> None:
        me = get_ident()
        while True:
            with self.lock:
                if me in [worker.runner for worker in self._workers.values()]:
                    raise LogicError("a function that runs on a stream must not wait for the device: it would wait for itself")
                worker = self._wait(event)
            if worker is None:
                break
            worker.run_first()
        self.advance()

    def _wait(self, event: Event | None) -> StreamWorker | None:
        """Wait until the event, or everything, is over: None; or until there is a copy to help with, which has been begun."""
        self._awaited.append(event)
        try:
            seen = self._progress
            end = time.monotonic() + self.stall_s
            while not self._over(event):
                worker = self._begin_copy(event)
                if worker is not None:
                    return worker
                now = time.monotonic()
                if self._progress != seen or self.executing > 0 or self.pool.outstanding() > 0:
                    seen = self._progress
                    end = now + self.stall_s
                elif now >= end:
                    lines = [worker.queue.describe() for worker in self._workers.values() if worker.queue.pending]
                    raise LogicError(f"nothing has moved for {self.stall_s:g} s: {'; '.join(lines)}")
                self._complete.wait(min(self.stall_s, max(0.001, end - now)))
        finally:
            self._awaited.remove(event)
        return None

    def idle(self) -> bool:
        for worker in list(self._workers.values()):
            if worker.queue.pending:
                return False
        return self.pool.outstanding() == 0

    def close(self) -> None:
        with self.lock:
            self._closing = True
            self._let_go.notify_all()
            for worker in self._workers.values():
                worker.ring()
            while self._workers:
                self._complete.wait()
        self.pool.close()
        self.advance()
