"""Schedules: which queued work runs, and when. Here are those without threads of their own.

Rule: a schedule never runs one operation inside another: what runs may call the driver, and finds all other work standing still.
One lock guards all queues. Work itself runs without it, on the thread that has put its number on the stream; so every schedule can
be used from any number of threads. Whatever interrupts a call, KeyboardInterrupt included, leaves work to be done, never a stream
that no thread can run any more.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from random import Random
from threading import Condition, RLock, get_ident
from typing import Final

from kv_cache_manager_v2.emulated.address_space import AddressSpace
from kv_cache_manager_v2.emulated.streams import ALL_STEPS, Event, FailureLog, Operation, StreamQueue, Tally
from kv_cache_manager_v2.emulated.transfers import EmulatedTransfer, GateKeeper
from kv_cache_manager_v2.errors import LogicError

_IO_WINDOW: Final = 8  # transfers that run at the same time
_LOOK_AGAIN_S: Final = 0.05  # a wait for another thread's work looks at least so often

INSIDE_A_KERNEL: Final = "a function that runs on a stream must not wait for the device: it would wait for itself"


class Schedule(GateKeeper):
    """Who runs queued work, and when. `busy` is True while `advance` could do anything, so that an idle device asks nothing."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.busy = False
        self.lock = RLock()
        self.failures = FailureLog()

    @abstractmethod
    def adopt(self, queue: StreamQueue) -> None:
        """A new stream."""

    @abstractmethod
    def retire(self, queue: StreamQueue) -> None:
        """The stream's handle was destroyed; what is pending still runs."""

    @abstractmethod
    def new_transfer(self, fd: int, offset: int, address: int, nbytes: int, writes: bool, space: AddressSpace) -> EmulatedTransfer:
        """A transfer of the kind that this schedule carries out."""

    @abstractmethod
    def submit(self, queue: StreamQueue, operation: Operation) -> None:
        """Queue an operation at the end of a stream. Raises OutOfMemoryError, with nothing queued, if a thread is needed for it
        that the process cannot have."""

    @abstractmethod
    def advance(self) -> None:
        """The driver was called: do what the schedule does then. Raises nothing that queued work has raised."""

    @abstractmethod
    def run_until(self, event: Event | None) -> None:
        """Run until the event is complete, or everything is; LogicError naming what is stuck if that cannot be."""

    @abstractmethod
    def idle(self) -> bool:
        """Whether nothing is queued and no transfer's gate is closed."""

    @abstractmethod
    def close(self) -> None:
        """Stop for good, dropping what hangs."""


class CooperativeSchedule(Schedule):
    """Work runs on the threads that call the driver; a subclass chooses what runs next. Time is the number of driver calls."""

    def __init__(self, tally: Tally, timeout_calls: int) -> None:
        super().__init__(tally)
        self.timeout_calls = timeout_calls
        self.clock = 0  # driver calls while something was pending
        self.active: list[StreamQueue] = []  # the streams with something pending, no order promised
        self.ready: list[EmulatedTransfer] = []  # transfers that can run, in the order in which they started
        self.hanging: list[EmulatedTransfer] = []  # transfers that were told to hang, timed out or not
        self.deadlines: deque[tuple[int, EmulatedTransfer]] = deque()  # of those that hang and have not timed out, ascending
        self.claims: dict[int, StreamQueue] = {}  # by thread: the stream whose first operation it runs
        self.moving: dict[int, EmulatedTransfer] = {}  # by thread: the transfer that it carries out
        self._gate_opened = False  # perhaps that of a hanging transfer
        self._ran = Condition(self.lock)  # something that ran on another thread has ended

    def retire(self, queue: StreamQueue) -> None:
        queue.retired = True

    def new_transfer(self, fd: int, offset: int, address: int, nbytes: int, writes: bool, space: AddressSpace) -> EmulatedTransfer:
        return EmulatedTransfer(fd, offset, address, nbytes, writes, space)

    def submit(self, queue: StreamQueue, operation: Operation) -> None:
        with self.lock:
            self.busy = True
            queue.direct = False
            if not queue.listed:
                self.active.append(queue)
                queue.listed = True
            queue.add(operation)

    def start(self, transfer: EmulatedTransfer) -> None:
        with self.lock:
            if transfer.started:
                return
            self.busy = True
            if transfer.held():
                self.hanging.append(transfer)
                self.deadlines.append((self.clock + self.timeout_calls, transfer))
            else:
                self.ready.append(transfer)
            transfer.started = True

    def changed(self) -> None:
        self._gate_opened = True
        self.advance()

    # --- one piece of work

    def step(self) -> bool:
        """Run one thing that can run; False if there is none, or if this thread is running one already."""
        me = get_ident()
        if me in self.claims or me in self.moving:
            return False
        try:
            try:
                with self.lock:
                    self._collect()
                    chosen = self.choose(me)
                if chosen:
                    self._carry_out(me)
            finally:
                self._end_claim(me)
        finally:
            if me in self.claims or me in self.moving:  # the end was interrupted
                self._end_claim(me)
        return chosen

    @abstractmethod
    def choose(self, me: int) -> bool:
        """Lock held: claim a stream whose first operation can run, or a transfer, for the thread; False if there is neither."""

    def claim_stream(self, queue: StreamQueue, me: int) -> bool:
        """Lock held: as `choose`, for this stream."""
        if not queue.pending or queue.pending[0].blocked():
            return False
        for other in self.claims.values():
            if other is queue:
                return False
        self.claims[me] = queue
        return True

    def claim_transfer(self, transfer: EmulatedTransfer, me: int) -> bool:
        """Lock held: as `choose`, for this transfer."""
        for other in self.moving.values():
            if other is transfer:
                return False
        self.moving[me] = transfer
        return True

    def steps(self) -> int:
        """How many parts of an operation are done at once."""
        return ALL_STEPS

    def _carry_out(self, me: int) -> None:
        """Run what this thread has claimed. What raises is over, and its error is kept; an interruption leaves it to be done."""
        queue = self.claims.get(me)
        if queue is None:
            self._transfer(self.moving[me])
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
        try:
            error = transfer.perform()
            self.tally.add_transfer(transfer.nbytes)
        except Exception as misuse:  # whatever it is, the gate must open
            error = str(misuse)
            self.failures.add(None, misuse)
        with self.lock:
            if transfer.running():
                transfer.finish(error)
            self.ready.remove(transfer)

    def _end_claim(self, me: int) -> None:
        """End this thread's claim, if it has one, and take a stream without work off the list."""
        with self.lock:
            queue = self.claims.get(me)
            if queue is not None and not queue.pending:
                queue.listed = False
                if queue in self.active:
                    self.active.remove(queue)
                self.drained(queue)
            self.claims.pop(me, None)
            self.moving.pop(me, None)
            self._ran.notify_all()
            self.busy = len(self.active) > 0 or len(self.ready) > 0 or len(self.hanging) > 0

    def drained(self, queue: StreamQueue) -> None:
        """Nothing is pending on the stream any more."""

    # --- time, and what hangs

    def tick(self) -> None:
        """Let one call's time pass: transfers that hung too long open their gates, those let go may run."""
        self.clock += 1
        if self.deadlines or self._gate_opened:
            self._collect()
            while self.deadlines and self.deadlines[0][0] <= self.clock:
                self.deadlines[0][1].expire(f"{self.timeout_calls} driver calls")
                self.deadlines.popleft()

    def _collect(self) -> None:
        """Lock held: transfers that hung and were let go may run. O(1) if no gate was opened since."""
        if self._gate_opened:
            self._gate_opened = False
            self.ready += [transfer for transfer in self.hanging if not transfer.held() and transfer not in self.ready]
            self.hanging = [transfer for transfer in self.hanging if transfer.held()]
            self.deadlines = deque([(when, transfer) for when, transfer in self.deadlines if transfer.held()])

    # --- waiting

    def run_until(self, event: Event | None) -> None:
        me = get_ident()
        with self.lock:
            if me in self.claims or me in self.moving:
                raise LogicError(INSIDE_A_KERNEL)
        while not (self.idle() if event is None else event.complete()):
            if not self.step():
                self._wait_for_others(event)

    def _wait_for_others(self, event: Event | None) -> None:
        """Nothing can run here: wait for what runs on other threads, else let the time pass until a transfer times out."""
        with self.lock:
            if self.idle() if event is None else event.complete():
                return
            if self.claims or self.moving:
                self._ran.wait(_LOOK_AGAIN_S)
            elif self.deadlines:
                self.clock = max(self.clock, self.deadlines[0][0] - 1)
                self.tick()
            elif not self._gate_opened and not self._any_can_run():
                raise LogicError(self._stuck(event))

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
                transfer.finish("dropped: the device was closed while it hung")
        self.hanging = []
        self.deadlines.clear()


class EagerSchedule(CooperativeSchedule):
    """As soon as possible: an operation that can run when it is queued runs on the spot."""

    def adopt(self, queue: StreamQueue) -> None:
        queue.direct = True

    def drained(self, queue: StreamQueue) -> None:
        queue.direct = True

    def choose(self, me: int) -> bool:
        for transfer in self.ready:
            if self.claim_transfer(transfer, me):
                return True
        for queue in self.active:  # noqa: SIM110 (a generator is slow in the compiled build)
            if self.claim_stream(queue, me):
                return True
        return False

    def advance(self) -> None:
        if self.claims and get_ident() in self.claims:
            return  # the call that runs the operation goes on with all that can run
        with self.lock:
            self.tick()
        while self.step():
            pass


class RandomSchedule(CooperativeSchedule):
    """Any legal order, decided by the seed: each driver call runs none to three steps of whatever can run."""

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
                if self.claim_transfer(self.ready[choice], me):
                    return True
            elif self.claim_stream(self.active[choice - window], me):
                return True
        return False

    def advance(self) -> None:
        if self.claims and get_ident() in self.claims:
            return
        with self.lock:
            self.tick()
            steps = self.random.getrandbits(2)
        while steps > 0 and self.step():
            steps -= 1
