"""The `threads` schedule: one real worker thread a stream, and the bounded pool of I/O threads for files.

Rule: one lock guards all queues; work itself runs with no lock held. What takes no time - waits that are over, the start of a file
transfer - is done by the thread that made it possible, so that a worker is woken for real work only. A thread that waits for
the device carries out copies that no other thread has begun, since handing over takes longer than a small copy. Nothing waits
without a limit: when no operation has finished for the stall limit while something is pending, the waiting call raises an error
that names the stuck streams.
"""

from __future__ import annotations

import logging
import time
from threading import Condition, Lock, Thread, get_ident
from typing import Final

from kv_cache_manager_v2.device.file_transfers import TransferPool
from kv_cache_manager_v2.emulated.address_space import AddressSpace
from kv_cache_manager_v2.emulated.schedules import INSIDE_A_KERNEL, Schedule
from kv_cache_manager_v2.emulated.streams import ALL_STEPS, Event, Operation, StreamQueue, Tally
from kv_cache_manager_v2.emulated.transfers import EmulatedTransfer
from kv_cache_manager_v2.errors import LogicError, OutOfMemoryError

_LOOK_AGAIN_S: Final = 5.0  # a sleeping worker looks at least so often: an interrupted thread may have failed to wake it

_log: Final = logging.getLogger(__name__)


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
            self.schedule.failures.add(None, misuse)
            return str(misuse)
        self.schedule.tally.add_transfer(self.nbytes)
        return error

    def opened(self) -> None:
        """Streams that wait for other gates besides are let through by the last of them."""
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
        self._asleep = False
        self._bell = Lock()  # released to wake the thread
        self._bell.acquire()

    def run_first(self) -> None:
        """Run the stream's first operation; no lock held, and the stream's runner is this thread. What raises is over, and its
        error is kept; an interruption leaves the operation to the worker."""
        queue = self.queue
        done = False
        try:
            done = queue.pending[0].run(queue, ALL_STEPS)
        except Exception as error:
            queue.fail(error)
            done = True
        finally:
            self.schedule.ended(self, done)

    def ring(self) -> None:
        """Let the thread look for work. The lock is held."""
        if self._asleep:
            if self._bell.locked():
                self._bell.release()
            self._asleep = False  # last: a call that is interrupted before leaves it to the next one to wake the thread

    def work(self) -> None:
        """The thread's life."""
        while self._turn_that_goes_on():
            pass

    def _turn_that_goes_on(self) -> bool:
        """A turn, and the next one whatever it raises. Apart from the loop: mypyc 2.4.1 makes wrong code of a `try` in one."""
        try:
            return self._turn()
        except Exception:
            _log.exception("stream %d: its thread met an unexpected error and goes on", self.queue.handle)
            return True

    def _turn(self) -> bool:
        """Do what there is, or sleep; False when the thread shall end."""
        queue = self.queue
        with self.schedule.lock:
            if self.schedule.retires(self):
                return False
            found = len(queue.pending) > 0 and not queue.runner and not queue.pending[0].instant()
            if found:
                queue.runner = get_ident()
            else:
                self._asleep = True
        if found:
            self.run_first()
        else:
            self._bell.acquire(timeout=_LOOK_AGAIN_S)
            self._asleep = False
        return True


class ThreadSchedule(Schedule):
    """Real concurrency: what runs when is the operating system's choice."""

    def __init__(self, tally: Tally, timeout_s: float, stall_s: float, io_threads: int) -> None:
        super().__init__(tally)
        self.stall_s = stall_s  # how long a waiting call watches nothing happen before it gives up
        self.pool = TransferPool(io_threads, timeout_s)  # its lock may be taken while ours is held, never the other way round
        self._complete = Condition(self.lock)  # something that a host thread waits for is over
        self._let_go = Condition(self.lock)  # a gate was opened, perhaps that of a hanging transfer
        self._workers: dict[int, StreamWorker] = {}  # by stream handle: streams that have a worker thread
        self._awaited: list[Event | None] = []  # what host threads wait for; None: everything
        self._progress = 0  # operations finished and gates opened, ever
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
            worker = self._workers.get(queue.handle)
            if worker is None:
                worker = self._start_worker(queue)
            queue.add(operation)
            if not queue.runner and self._pass(worker):
                self._pass_all()

    def _start_worker(self, queue: StreamQueue) -> StreamWorker:
        worker = StreamWorker(self, queue)
        try:
            Thread(target=worker.work, name=f"kvcm-stream-{queue.handle}", daemon=True).start()
        except RuntimeError as error:
            raise OutOfMemoryError(
                f"the process cannot start a thread for stream {queue.handle} ({error}); raise the limit on processes or memory"
            ) from error
        self._workers[queue.handle] = worker  # last: until here an interruption leaves a thread that finds no work
        return worker

    def start(self, transfer: EmulatedTransfer) -> None:
        if not transfer.started:
            self.pool.submit(transfer)
            transfer.started = True

    def changed(self) -> None:
        with self.lock:
            self._progress += 1
            self._pass_all()
            self._let_go.notify_all()

    def advance(self) -> None:
        """The threads do it."""

    def ended(self, worker: StreamWorker, done: bool) -> None:
        """A thread no longer runs the stream's first operation."""
        queue = worker.queue
        with self.lock:
            if done:
                self._pop(queue)
            queue.runner = 0
            if not done or self._closing or (queue.retired and not queue.pending):
                worker.ring()
            self._pass_all()

    def retires(self, worker: StreamWorker) -> bool:
        """Whether the worker's thread shall end: then it is none of ours any more. The lock is held."""
        queue = worker.queue
        if queue.runner or not (self._closing or (queue.retired and not queue.pending)):
            return False
        if self._workers.get(queue.handle) is worker:
            del self._workers[queue.handle]
        self._complete.notify_all()
        return True

    # --- inside; the lock is held

    def _pop(self, queue: StreamQueue) -> None:
        queue.pending.popleft()
        self._progress += 1

    def _pass(self, worker: StreamWorker) -> bool:
        """Do what takes no time at the front of a stream, and wake its worker for what comes then; whether anything was done."""
        queue = worker.queue
        moved = False
        while queue.pending and not queue.runner:
            operation = queue.pending[0]
            if not operation.instant():
                worker.ring()
                break
            if operation.blocked():
                break
            self._run_instant(queue, operation)
            moved = True
        if queue.retired and not queue.pending:
            worker.ring()
        return moved

    def _run_instant(self, queue: StreamQueue, operation: Operation) -> None:
        try:
            try:
                queue.runner = get_ident()  # starting a transfer may open its gate at once, which comes back to `_pass`
                operation.run(queue, ALL_STEPS)
                self._pop(queue)
            except Exception as error:
                queue.fail(error)
                self._pop(queue)
            finally:
                queue.runner = 0
        finally:
            queue.runner = 0  # also if the line before was interrupted

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

    def _claim_copy(self, event: Event | None, me: int) -> StreamWorker | None:
        """A worker whose stream's first operation is a copy that nobody has begun, and that the event waits for: this thread runs
        it."""
        for worker in self._workers.values():
            queue = worker.queue
            wanted = event is None or event.queue is queue
            if wanted and queue.pending and not queue.runner and queue.pending[0].shareable():
                queue.runner = me
                return worker
        return None

    def _end_claims(self, me: int) -> None:
        """This thread was interrupted: what it was about to run is its worker's."""
        with self.lock:
            for worker in self._workers.values():
                if worker.queue.runner == me:
                    worker.queue.runner = 0
                    worker.ring()

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

    def run_until(self, event: Event | None) -> None:
        me = get_ident()
        with self.lock:
            if me in [worker.queue.runner for worker in self._workers.values()]:
                raise LogicError(INSIDE_A_KERNEL)
        try:
            helping = True
            while helping:
                with self.lock:
                    worker = self._wait(event, me)
                helping = worker is not None
                if worker is not None:
                    worker.run_first()
        except BaseException:
            self._end_claims(me)
            raise

    def _wait(self, event: Event | None, me: int) -> StreamWorker | None:
        """Wait until the event, or everything, is over: None; or until there is a copy to help with, which this thread then has."""
        try:
            self._awaited.append(event)
            self._pass_all()  # what an interrupted call has left to be done
            seen = self._progress
            end = time.monotonic() + self.stall_s
            while not self._over(event):
                worker = self._claim_copy(event, me)
                if worker is not None:
                    return worker
                now = time.monotonic()
                if self._progress != seen or self._executing() or self.pool.outstanding() > 0:
                    seen = self._progress
                    end = now + self.stall_s
                elif now >= end:
                    lines = [worker.queue.describe() for worker in self._workers.values() if worker.queue.pending]
                    raise LogicError(f"nothing has moved for {self.stall_s:g} s: {'; '.join(lines)}")
                self._complete.wait(min(1.0, max(0.001, end - now)))
        finally:
            if event in self._awaited:
                self._awaited.remove(event)
        return None

    def _executing(self) -> bool:
        for worker in self._workers.values():  # noqa: SIM110 (a generator is slow in the compiled build)
            if worker.queue.runner:
                return True
        return False

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
