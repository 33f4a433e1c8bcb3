"""Schedules decide which queued work runs, and when. This file has those without threads of their own.

An operation may call the driver; that call runs no other operation. One lock guards all queues. An operation runs without the lock,
on the thread that has taken it, so any number of threads may use the device. An interrupted call, by KeyboardInterrupt too, leaves
its operation to be run later.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from random import Random
from threading import RLock, get_ident
from typing import Final

from kv_cache_manager_v2.device.waiters import Waiters
from kv_cache_manager_v2.emulated.address_space import AddressSpace
from kv_cache_manager_v2.emulated.streams import ALL_STEPS, Event, FailureLog, Operation, StreamQueue, Tally
from kv_cache_manager_v2.emulated.transfers import EmulatedTransfer, TransferScheduler
from kv_cache_manager_v2.errors import LogicError

_IO_WINDOW: Final = 8  # transfers that run at the same time
_WAIT_S: Final = 0.05  # the longest single wait for another thread's work

INSIDE_A_KERNEL: Final = "a function that runs on a stream must not wait for the device: it would wait for itself"


class Schedule(TransferScheduler):
    """Decides which thread runs queued work, and when. `busy` is False while `advance` would do nothing, to save the call."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.busy = False
        self.lock = RLock()
        self.failures = FailureLog()

    @abstractmethod
    def adopt(self, queue: StreamQueue) -> None:
        """Prepare the queue of a new stream."""

    @abstractmethod
    def retire(self, queue: StreamQueue) -> None:
        """Record that the stream's handle was destroyed. Pending work still runs."""

    @abstractmethod
    def new_transfer(self, fd: int, offset: int, address: int, nbytes: int, writes: bool, space: AddressSpace) -> EmulatedTransfer:
        """A transfer of the class that this schedule runs."""

    @abstractmethod
    def submit(self, queue: StreamQueue, operation: Operation) -> None:
        """Queue an operation on a stream. Raises OutOfMemoryError, and queues nothing, if a thread for it cannot be started."""

    @abstractmethod
    def advance(self) -> None:
        """Run some work; called by each driver call. Errors of queued work are kept in `failures`, not raised."""

    @abstractmethod
    def run_until(self, event: Event | None) -> None:
        """Run until the event is complete (None: all work). Raises LogicError with the blocked work if that cannot end."""

    @abstractmethod
    def idle(self) -> bool:
        """Whether no work is queued and every transfer's gate is open."""

    @abstractmethod
    def close(self) -> None:
        """Stop. It cannot be started again; a transfer that hangs ends as failed."""


class CooperativeSchedule(Schedule):
    """Runs work on the threads that call the driver. A subclass chooses what runs next. Time is counted in driver calls."""

    def __init__(self, tally: Tally, timeout_calls: int) -> None:
        super().__init__(tally)
        self.timeout_calls = timeout_calls
        self.clock = 0  # driver calls made while work was pending
        self.active: list[StreamQueue] = []  # the streams with pending work, in no particular order
        self.ready: list[EmulatedTransfer] = []  # transfers that can run, in the order in which they started
        self.hanging: list[EmulatedTransfer] = []  # transfers that were made to hang, timed out or not
        self.deadlines: deque[tuple[int, EmulatedTransfer]] = deque()  # of those that hang and have not timed out, ascending
        self.running: dict[int, StreamQueue] = {}  # by thread: the stream whose first operation it runs
        self.transferring: dict[int, EmulatedTransfer] = {}  # by thread: the transfer that it runs
        self._gate_opened = False  # since the latest `_collect`
        self._waiters = Waiters()  # for work on another thread to end

    def retire(self, queue: StreamQueue) -> None:
        queue.retired = True

    def new_transfer(self, fd: int, offset: int, address: int, nbytes: int, writes: bool, space: AddressSpace) -> EmulatedTransfer:
        return EmulatedTransfer(fd, offset, address, nbytes, writes, space)

    def submit(self, queue: StreamQueue, operation: Operation) -> None:
        with self.lock:
            self.busy = True
            queue.direct = False
            if not queue.listed:
                queue.listed = True
                self.active.append(queue)  # no call, hence no interrupt, comes between this line and the one before
            queue.add(operation)

    def start(self, transfer: EmulatedTransfer) -> None:
        with self.lock:
            if transfer.submitted:
                return
            self.busy = True
            if transfer.held():
                hanging = [*self.hanging, transfer]
                deadlines = self.deadlines.copy()
                deadlines.append((self.clock + self.timeout_calls, transfer))
                self.hanging = hanging  # from here on no call, hence no interrupt
                self.deadlines = deadlines
                transfer.submitted = True
            else:
                transfer.submitted = True
                try:
                    self.ready.append(transfer)
                except MemoryError:
                    transfer.submitted = False
                    raise

    def changed(self) -> None:
        with self.lock:
            self._gate_opened = True
        self.advance()

    # --- running one operation or transfer

    def step(self) -> bool:
        """Run one operation or transfer; False if none can run, or if this thread is running one already."""
        me = get_ident()
        if me in self.running or me in self.transferring:
            return False
        try:
            try:
                with self.lock:
                    self._collect()
                    chosen = self.choose(me)
                if chosen:
                    self._run_taken(me)
            finally:
                self._end_taken(me)
        finally:
            if me in self.running or me in self.transferring:  # the first attempt was interrupted
                self._end_taken(me)
        return chosen

    @abstractmethod
    def choose(self, me: int) -> bool:
        """Take an operation or a transfer for the thread to run; False if none can run. The lock is held."""

    def take_stream(self, queue: StreamQueue, me: int) -> bool:
        """Take the stream's first operation, if it can run and no other thread has it. The lock is held."""
        if not queue.pending or queue.pending[0].blocked():
            return False
        for other in self.running.values():
            if other is queue:
                return False
        self.running[me] = queue
        return True

    def take_transfer(self, transfer: EmulatedTransfer, me: int) -> bool:
        """Take the transfer, if no other thread has it. The lock is held."""
        for other in self.transferring.values():
            if other is transfer:
                return False
        self.transferring[me] = transfer
        return True

    def steps(self) -> int:
        """How many parts of an operation run at once."""
        return ALL_STEPS

    def _run_taken(self, me: int) -> None:
        """Run what this thread has taken. An exception ends the operation and is kept; an interrupt leaves it to be run again."""
        queue = self.running.get(me)
        if queue is None:
            self._transfer(self.transferring[me])
            return
        try:
            done = queue.pending[0].run(queue, self.steps())
        except Exception as error:
            queue.fail(error)
            done = True
        if done:
            with self.lock:
                queue.pending.popleft()

    def _transfer(self, transfer: EmulatedTransfer) -> None:
        if transfer.running():  # else an interrupt came when it had ended: others may use its memory now
            try:
                error = transfer.perform()
                self.tally.add_transfer(transfer.nbytes)
            except Exception as failure:  # the gate must open after any error
                error = f"{type(failure).__name__}: {failure}"
                if isinstance(failure, LogicError):  # a mistake of the caller, who may not ask for the gate's error
                    self.failures.add(None, failure)
            if transfer.running():
                transfer.finish(error)
        with self.lock:
            self.ready.remove(transfer)

    def _end_taken(self, me: int) -> None:
        """Release what this thread has taken, and remove a stream without work from `active`."""
        with self.lock:
            queue = self.running.get(me)
            if queue is not None and not queue.pending:
                queue.listed = False
                if queue in self.active:
                    self.active.remove(queue)
                self.drained(queue)
            self.running.pop(me, None)
            self.transferring.pop(me, None)
            self._waiters.wake_all()
            self.busy = len(self.active) > 0 or len(self.ready) > 0 or len(self.hanging) > 0

    def drained(self, queue: StreamQueue) -> None:
        """Called when the stream has no more pending work."""

    # --- time limits and hanging transfers

    def tick(self) -> None:
        """Count one driver call. Open the gates of transfers past their time limit; let transfers run that no longer hang."""
        self.clock += 1
        if self.deadlines or self._gate_opened:
            self._collect()
            while self.deadlines and self.deadlines[0][0] <= self.clock:
                self.deadlines[0][1].expire(f"{self.timeout_calls} driver calls")
                self.deadlines.popleft()

    def _collect(self) -> None:
        """Let transfers run whose hang has ended. O(1) if no gate was opened since the last call. The lock is held."""
        if self._gate_opened:
            ready = self.ready + [transfer for transfer in self.hanging if not transfer.held()]
            hanging = [transfer for transfer in self.hanging if transfer.held()]
            deadlines = deque([(when, transfer) for when, transfer in self.deadlines if transfer.held()])
            self.ready = ready  # from here on no call, hence no interrupt
            self.hanging = hanging
            self.deadlines = deadlines
            self._gate_opened = False

    # --- waiting

    def run_until(self, event: Event | None) -> None:
        me = get_ident()
        with self.lock:
            if me in self.running or me in self.transferring:
                raise LogicError(INSIDE_A_KERNEL)
        while not (self.idle() if event is None else event.complete()):
            if not self.step():
                self._wait_for_others(event)

    def _wait_for_others(self, event: Event | None) -> None:
        """Wait for work on other threads; if there is none, advance the clock until a transfer times out."""
        with self.lock:
            if self.idle() if event is None else event.complete():
                return
            if not (self.running or self.transferring):
                if self.deadlines:
                    self.clock = max(self.clock, self.deadlines[0][0] - 1)
                    self.tick()
                elif not self._gate_opened and not self._any_can_run():
                    raise LogicError(self._stuck(event))
                return
            ticket = self._waiters.enter()
        self._waiters.sleep(ticket, _WAIT_S)

    def _any_can_run(self) -> bool:
        return bool(self.ready) or any(queue.pending and not queue.pending[0].blocked() for queue in self.active)

    def _stuck(self, event: Event | None) -> str:
        what = "everything" if event is None else f"operation {event.target} of stream {event.queue.handle if event.queue else 0}"
        lines = [queue.describe() for queue in self.active if queue.pending]
        return f"waiting for {what} would never end: {'; '.join(lines)}"

    def idle(self) -> bool:
        if self._gate_opened:
            with self.lock:
                self._collect()
        return not (self.ready or self.deadlines or any(queue.pending for queue in self.active))

    def close(self) -> None:
        for transfer in self.hanging:
            if transfer.running():
                transfer.finish("canceled: the device was closed while it hung")
        self.hanging = []
        self.deadlines.clear()


class EagerSchedule(CooperativeSchedule):
    """Runs work as soon as possible: an operation that can run when it is queued runs at once."""

    def adopt(self, queue: StreamQueue) -> None:
        queue.direct = True

    def drained(self, queue: StreamQueue) -> None:
        queue.direct = True

    def choose(self, me: int) -> bool:
        for transfer in self.ready:
            if self.take_transfer(transfer, me):
                return True
        for queue in self.active:  # noqa: SIM110 (a generator is slow in the compiled build)
            if self.take_stream(queue, me):
                return True
        return False

    def advance(self) -> None:
        if self.running and get_ident() in self.running:
            return  # this thread's outer call continues with all work that can run
        with self.lock:
            self.tick()
        while self.step():
            pass


class RandomSchedule(CooperativeSchedule):
    """Runs work in any legal order, chosen by the seed. Each driver call runs zero to three steps."""

    def __init__(self, tally: Tally, timeout_calls: int, seed: int) -> None:
        super().__init__(tally, timeout_calls)
        self.random = Random(seed)

    def adopt(self, queue: StreamQueue) -> None:
        queue.direct = False

    def submit(self, queue: StreamQueue, operation: Operation) -> None:
        with self.lock:
            operation.shuffle(self.random)
            super().submit(queue, operation)

    def steps(self) -> int:
        return 1 + self.random.getrandbits(3)

    def choose(self, me: int) -> bool:
        window = min(len(self.ready), _IO_WINDOW)
        count = len(self.active) + window
        if count == 0:
            return False
        first = self.random.randrange(count)
        for i in range(count):
            choice = (first + i) % count
            if choice < window:
                if self.take_transfer(self.ready[choice], me):
                    return True
            elif self.take_stream(self.active[choice - window], me):
                return True
        return False

    def advance(self) -> None:
        if self.running and get_ident() in self.running:
            return
        with self.lock:
            self.tick()
            steps = self.random.getrandbits(2)
        while steps > 0 and self.step():
            steps -= 1
