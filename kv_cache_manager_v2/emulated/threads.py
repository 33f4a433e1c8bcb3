"""The `threads` schedule: a worker thread for each stream, and a bounded pool of I/O threads for files.

One lock guards all queues; work runs without it. Instant operations (waits that have ended, starts of file transfers) run on the
thread that unblocked them, so that a worker is woken for real work only. A thread that waits for the device runs copies that no
other thread has begun: a small copy takes less time than waking a thread. If pending work makes no progress for the stall limit,
the waiting call raises an error that names the blocked streams.
"""

from __future__ import annotations

import logging
import time
from threading import Lock, Thread, get_ident
from typing import Final

from kv_cache_manager_v2.device.file_transfers import TransferPool
from kv_cache_manager_v2.device.waiters import LONGEST_SLEEP_S, Waiters
from kv_cache_manager_v2.emulated.address_space import AddressSpace
from kv_cache_manager_v2.emulated.schedules import INSIDE_A_KERNEL, Schedule
from kv_cache_manager_v2.emulated.streams import ALL_STEPS, Event, Operation, StreamQueue, Tally
from kv_cache_manager_v2.emulated.transfers import EmulatedTransfer
from kv_cache_manager_v2.errors import LogicError, OutOfMemoryError

_log: Final = logging.getLogger(__name__)


class PooledTransfer(EmulatedTransfer):
    """A transfer that runs on the pool. A hanging one waits until its gate opens."""

    def __init__(
        self, fd: int, offset: int, address: int, nbytes: int, writes: bool, space: AddressSpace, schedule: ThreadSchedule
    ) -> None:
        super().__init__(fd, offset, address, nbytes, writes, space)
        self.schedule = schedule

    def perform(self) -> str:
        if not self.schedule.wait_released(self):
            return "canceled: the device was closed while it hung"
        try:
            error = super().perform()
        except LogicError as misuse:
            self.schedule.failures.add(None, misuse)
            return str(misuse)
        self.schedule.tally.add_transfer(self.nbytes)
        return error

    def opened(self) -> None:
        """Notify the schedule, unless all streams that wait for this gate also wait for one that is still closed."""
        waits = self.waits
        for wait in waits:
            if not wait.blocked():
                self.schedule.changed()
                return
        if not waits:
            self.schedule.changed()


class StreamWorker:
    """The thread of one stream. The schedule's lock guards all fields."""

    def __init__(self, schedule: ThreadSchedule, queue: StreamQueue) -> None:
        self.schedule = schedule
        self.queue = queue
        self._asleep = False
        self._wake_lock = Lock()  # released to wake the thread
        self._wake_lock.acquire()

    def run_first(self) -> None:
        """Run the stream's first operation. The stream's runner is this thread, and no lock is held.

        An exception ends the operation and is kept; an interrupt leaves the operation to the worker.
        """
        queue = self.queue
        done = False
        try:
            done = queue.pending[0].run(queue, ALL_STEPS)
        except Exception as error:
            queue.fail(error)
            done = True
        finally:
            self.schedule.ended(self, done)

    def wake(self) -> None:
        """Wake the thread to look for work. The lock is held."""
        if self._asleep:
            if self._wake_lock.locked():
                self._wake_lock.release()
            self._asleep = False  # last: if this call is interrupted, the next one wakes the thread

    def work(self) -> None:
        """Main loop of the thread."""
        while self._guarded_turn():
            pass

    def _guarded_turn(self) -> bool:
        """As `_turn`; after an exception the thread goes on. A function of its own: mypyc 2.4.1 miscompiles a `try` in a loop."""
        try:
            return self._turn()
        except Exception:
            _log.exception("stream %d: its thread raised an unexpected error and continues", self.queue.handle)
            return True

    def _turn(self) -> bool:
        """Run the stream's first operation, or sleep if there is none; False if the thread should end."""
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
            self._wake_lock.acquire(timeout=LONGEST_SLEEP_S)  # an interrupted call may have failed to wake it
            self._asleep = False
        return True


class _Wait:
    """A host thread's wait for an event, or for all work."""

    def __init__(self, event: Event | None, seen: int, end: float) -> None:
        self.event = event
        self.seen = seen  # the count of progress when it was last compared
        self.end = end  # monotonic clock: when the wait ends unless there is progress


class ThreadSchedule(Schedule):
    """Runs work concurrently on real threads, which the operating system schedules."""

    def __init__(self, tally: Tally, timeout_s: float, stall_s: float, io_threads: int) -> None:
        super().__init__(tally)
        self.stall_s = stall_s  # how long a call waits without progress before it raises
        self.pool = TransferPool(io_threads, timeout_s)  # lock order: the schedule's lock before the pool's
        self._hosts = Waiters()  # host threads: until the work that they wait for is complete
        self._hanging = Waiters()  # threads of transfers that hang: until a test opens a gate
        self._workers: dict[int, StreamWorker] = {}  # by stream handle: streams that have a worker thread
        self._awaited: list[Event | None] = []  # what host threads wait for; None: all work
        self._progress = 0  # count of finished operations and opened gates
        self._closing = False

    def adopt(self, queue: StreamQueue) -> None:
        queue.direct = False

    def retire(self, queue: StreamQueue) -> None:
        with self.lock:
            queue.retired = True
            worker = self._workers.get(queue.handle)
            if worker is not None:
                worker.wake()

    def new_transfer(self, fd: int, offset: int, address: int, nbytes: int, writes: bool, space: AddressSpace) -> EmulatedTransfer:
        return PooledTransfer(fd, offset, address, nbytes, writes, space, self)

    def submit(self, queue: StreamQueue, operation: Operation) -> None:
        with self.lock:
            worker = self._workers.get(queue.handle)
            if worker is None:
                worker = self._start_worker(queue)
            try:
                queue.add(operation)
                if not queue.runner and self._run_instants(worker):
                    self._run_all_instants()
            except BaseException:
                self.busy = True
                raise

    def _start_worker(self, queue: StreamQueue) -> StreamWorker:
        worker = StreamWorker(self, queue)
        try:
            Thread(target=worker.work, name=f"kvcm-stream-{queue.handle}", daemon=True).start()
        except RuntimeError as error:
            raise OutOfMemoryError(
                f"the process cannot start a thread for stream {queue.handle} ({error}); raise the limit on processes or memory"
            ) from error
        self._workers[queue.handle] = worker  # last: an interrupt before it leaves only a thread without work
        return worker

    def start(self, transfer: EmulatedTransfer) -> None:
        if not transfer.submitted:
            self.pool.submit(transfer)

    def changed(self) -> None:
        with self.lock:
            self._progress += 1
            try:
                self._run_all_instants()
                self._hanging.wake_all()
            except BaseException:
                self.busy = True
                raise

    def advance(self) -> None:
        """The threads run all work. Only what an interrupted call has not done is done here."""
        if self.busy:
            self.busy = False
            self.changed()

    def ended(self, worker: StreamWorker, done: bool) -> None:
        """Record that a thread stops running the stream's first operation, which is complete if `done`."""
        queue = worker.queue
        with self.lock:
            try:
                if done:
                    self._pop(queue)
                queue.runner = 0
                if not done or self._closing or (queue.retired and not queue.pending):
                    worker.wake()
                self._run_all_instants()
            except BaseException:
                self.busy = True
                raise

    def retires(self, worker: StreamWorker) -> bool:
        """Whether the worker's thread should end; if so, forget the worker. The lock is held."""
        queue = worker.queue
        if queue.runner or not (self._closing or (queue.retired and not queue.pending)):
            return False
        if self._workers.get(queue.handle) is worker:
            del self._workers[queue.handle]
        self._hosts.wake_all()
        return True

    # --- internals; the lock is held

    def _pop(self, queue: StreamQueue) -> None:
        self._progress += 1
        queue.pending.popleft()

    def _run_instants(self, worker: StreamWorker) -> bool:
        """Run the stream's leading instant operations, and wake its worker for the one after them; whether any ran."""
        queue = worker.queue
        moved = False
        while queue.pending and not queue.runner:
            operation = queue.pending[0]
            if not operation.instant():
                worker.wake()
                break
            if operation.blocked():
                break
            self._run_instant(queue, operation)
            moved = True
        if queue.retired and not queue.pending:
            worker.wake()
        return moved

    def _run_instant(self, queue: StreamQueue, operation: Operation) -> None:
        try:
            try:
                queue.runner = get_ident()  # starting a transfer may open its gate at once, which calls `_run_instants`
                operation.run(queue, ALL_STEPS)
                self._pop(queue)
            except Exception as error:
                queue.fail(error)
                self._pop(queue)
            finally:
                queue.runner = 0
        finally:
            queue.runner = 0  # again, in case the line above was interrupted

    def _run_all_instants(self) -> None:
        """Run all instant operations that are not blocked, and notify host threads whose wait has ended."""
        moved = True
        while moved:
            moved = False
            for worker in list(self._workers.values()):
                if worker.queue.pending and self._run_instants(worker):
                    moved = True
        for event in self._awaited:
            if self._over(event):
                self._hosts.wake_all()
                return

    def _over(self, event: Event | None) -> bool:
        return self.idle() if event is None else event.complete()

    def _take_copy(self, event: Event | None, me: int) -> StreamWorker | None:
        """Take a copy that the event waits for and no thread has begun; returns its stream's worker, None if there is none."""
        for worker in self._workers.values():
            queue = worker.queue
            wanted = event is None or event.queue is queue
            if wanted and queue.pending and not queue.runner and queue.pending[0].shareable():
                queue.runner = me
                return worker
        return None

    def _return_work(self, me: int) -> None:
        """After an interrupt, leave the operations that this thread has taken to their workers."""
        with self.lock:
            for worker in self._workers.values():
                if worker.queue.runner == me:
                    worker.queue.runner = 0
                    worker.wake()

    # --- waiting

    def wait_released(self, transfer: EmulatedTransfer) -> bool:
        """Block while the transfer is made to hang; False if the device is closed first."""
        while transfer.held():
            with self.lock:
                if self._closing or not transfer.held():
                    return not self._closing
                ticket = self._hanging.enter()
            self._hanging.sleep(ticket, LONGEST_SLEEP_S)
        return True

    def run_until(self, event: Event | None) -> None:
        me = get_ident()
        with self.lock:
            if me in [worker.queue.runner for worker in self._workers.values()]:
                raise LogicError(INSIDE_A_KERNEL)
        waiting = _Wait(event, self._progress, time.monotonic() + self.stall_s)
        try:
            self._awaited.append(event)
            while self._turn(waiting, me):
                pass
        except BaseException:
            self._return_work(me)
            raise
        finally:
            if event in self._awaited:
                self._awaited.remove(event)

    def _turn(self, waiting: _Wait, me: int) -> bool:
        """Run a copy that the event waits for, or wait for a change; False if the event (None: all work) is complete."""
        with self.lock:
            self._run_all_instants()  # in case an interrupted call did not
            if self._over(waiting.event):
                return False
            worker = self._take_copy(waiting.event, me)
            left = self._check_progress(waiting)
            ticket = self._hosts.enter() if worker is None else None
        if worker is not None:
            worker.run_first()
        elif ticket is not None:
            self._hosts.sleep(ticket, min(1.0, max(0.001, left)))
        return True

    def _check_progress(self, waiting: _Wait) -> float:
        """The seconds until the wait ends without progress. Raises LogicError if there are none left. The lock is held."""
        now = time.monotonic()
        if self._progress != waiting.seen or self._executing() or self.pool.outstanding() > 0:
            waiting.seen = self._progress
            waiting.end = now + self.stall_s
        elif now >= waiting.end:
            lines = [worker.queue.describe() for worker in self._workers.values() if worker.queue.pending]
            raise LogicError(f"no progress for {self.stall_s:g} s: {'; '.join(lines)}")
        return waiting.end - now

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
        stopping = True
        while stopping:
            with self.lock:
                self._closing = True
                self._hanging.wake_all()
                for worker in self._workers.values():
                    worker.wake()
                stopping = len(self._workers) > 0
                ticket = self._hosts.enter()
            if stopping:
                self._hosts.sleep(ticket, LONGEST_SLEEP_S)
        self.pool.close()
