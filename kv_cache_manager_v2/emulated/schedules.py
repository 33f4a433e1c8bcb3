"""The schedules without threads: work runs on the thread that calls the driver, and time is the number of its calls.

Rule: a schedule never runs one operation below another: what runs may call the driver, and finds it standing still.
"""

from __future__ import annotations

from abc import abstractmethod
from random import Random
from typing import Final

from kv_cache_manager_v2.device.driver import GATE_PENDING
from kv_cache_manager_v2.emulated.streams import ALL_STEPS, EmulatedTransfer, Event, Operation, Schedule, StreamQueue, Tally
from kv_cache_manager_v2.errors import LogicError

_IO_WINDOW: Final = 8  # transfers that run at the same time


class CooperativeSchedule(Schedule):
    """Work runs on the thread that calls the driver; a subclass chooses what runs next. Time is the number of driver calls."""

    def __init__(self, tally: Tally, timeout_calls: int) -> None:
        super().__init__(tally)
        self.timeout_calls = timeout_calls
        self.clock = 0  # driver calls while something was pending
        self.active: list[StreamQueue] = []  # the streams with something pending, no order promised
        self.started: list[EmulatedTransfer] = []  # transfers that run, in the order in which they started
        self.held: list[EmulatedTransfer] = []  # transfers that hang
        self.running = False  # an operation is on the stack: it may call the driver, which must not run others below it

    def submit(self, queue: StreamQueue, operation: Operation) -> None:
        queue.pending.append(operation)
        queue.submitted += 1
        if len(queue.pending) == 1:
            queue.direct = False
            self.active.append(queue)
        self.busy = True

    def start(self, transfers: list[EmulatedTransfer]) -> None:
        for transfer in transfers:
            if transfer.held():
                transfer.held_since = self.clock
                self.held.append(transfer)
            else:
                self.started.append(transfer)
        self.busy = True

    def run_stream(self, queue: StreamQueue, steps: int) -> bool:
        """Run the stream's first operation for some steps; False if it is blocked."""
        operation = queue.pending[0]
        if operation.blocked():
            return False
        self.running = True
        done = True  # what raises is over, so that the stream is not stuck for ever
        try:
            done = operation.run(steps)
        finally:
            self.running = False
            if done:
                queue.pending.popleft()
                queue.finished += 1
                if not queue.pending:
                    self.active.remove(queue)
                    self.drained(queue)
                    self.settle()
        return True

    def run_transfer(self, transfer: EmulatedTransfer) -> None:
        """Carry out one started transfer."""
        self.started.remove(transfer)
        self.settle()
        try:
            transfer.finish(transfer.perform())
        except LogicError as misuse:
            transfer.finish(str(misuse))
            raise
        self.tally.add_transfer(transfer.nbytes)

    def drained(self, queue: StreamQueue) -> None:
        """Nothing is pending on the stream any more."""

    def settle(self) -> None:
        self.busy = len(self.active) > 0 or len(self.started) > 0 or len(self.held) > 0

    def tick(self) -> None:
        """Let one call's time pass: transfers that hung too long open their gates, those let go may run."""
        self.clock += 1
        if not self.held:
            return
        kept: list[EmulatedTransfer] = []
        for transfer in self.held:
            if not transfer.held():
                self.started.append(transfer)
                continue
            kept.append(transfer)
            if self.clock - transfer.held_since >= self.timeout_calls:
                transfer.expire(f"{self.timeout_calls} driver calls")
        self.held = kept

    @abstractmethod
    def step(self) -> bool:
        """Run one thing that can run; False if nothing can."""

    def finish(self, event: Event | None) -> None:
        if self.running:
            raise LogicError("a function that runs on a stream must not wait for the device: it would wait for itself")
        while not (self.idle() if event is None else event.complete()):
            if self.step():
                continue
            if not self._anything_hangs():
                raise LogicError(self._stuck(event))
            self.tick()

    def _anything_hangs(self) -> bool:
        return any(transfer.state == GATE_PENDING or not transfer.held() for transfer in self.held)

    def _stuck(self, event: Event | None) -> str:
        what = "everything" if event is None else f"operation {event.target} of stream {event.queue.handle if event.queue else 0}"
        lines = [queue.describe() for queue in self.active]
        return f"waiting for {what} would never end: {'; '.join(lines)}"

    def idle(self) -> bool:
        if self.active or self.started:
            return False
        return all(not (transfer.state == GATE_PENDING or not transfer.held()) for transfer in self.held)

    def close(self) -> None:
        for transfer in self.held:
            transfer.finish("dropped: the device was closed while it hung")
        self.held = []


class EagerSchedule(CooperativeSchedule):
    """As soon as possible: an operation that can run when it is queued runs on the spot."""

    def adopt(self, queue: StreamQueue) -> None:
        queue.direct = True

    def drained(self, queue: StreamQueue) -> None:
        queue.direct = True

    def step(self) -> bool:
        if self.started:
            self.run_transfer(self.started[0])
            return True
        return any(self.run_stream(queue, ALL_STEPS) for queue in self.active)

    def changed(self) -> None:
        if self.running:
            return  # whoever runs the operation below goes on with all that can run
        self.tick()
        while self.step():
            pass
        self.settle()

    def advance(self) -> None:
        self.changed()


class RandomSchedule(CooperativeSchedule):
    """Any legal order, decided by the seed: each driver call runs none to three steps of whatever can run."""

    def __init__(self, tally: Tally, timeout_calls: int, seed: int) -> None:
        super().__init__(tally, timeout_calls)
        self.random = Random(seed)

    def adopt(self, queue: StreamQueue) -> None:
        queue.direct = False

    def submit(self, queue: StreamQueue, operation: Operation) -> None:
        operation.shuffle(self.random)
        super().submit(queue, operation)

    def step(self) -> bool:
        window = min(len(self.started), _IO_WINDOW)
        count = len(self.active) + window
        if count == 0:
            return False
        first = self.random.randrange(count)
        for i in range(count):
            choice = (first + i) % count
            if choice < window:
                self.run_transfer(self.started[choice])
                return True
            if self.run_stream(self.active[choice - window], 1 + self.random.getrandbits(3)):
                return True
        return False

    def changed(self) -> None:
        self.advance()

    def advance(self) -> None:
        if self.running:
            return
        self.tick()
        steps = self.random.getrandbits(2)
        while steps > 0 and self.step():
            steps -= 1
        self.settle()
