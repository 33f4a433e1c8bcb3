"""The emulated device's streams and the order in which their work runs.

Rule: work of one stream runs in the order in which it was queued, and a schedule may choose anything else. A place in a stream is a
count: the n-th operation is complete when the stream has finished n, so recording an event costs two stores and queues nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from ctypes import memmove
from random import Random
from threading import Lock
from typing import Final

from kv_cache_manager_v2.device.driver import GATE_PENDING
from kv_cache_manager_v2.device.memory import AddressSpace
from kv_cache_manager_v2.device.transfers import Transfer
from kv_cache_manager_v2.errors import LogicError

ALL_STEPS: Final = 1 << 60  # more than any operation has

_IO_WINDOW: Final = 8  # transfers that run at the same time on the schedules without threads


class EmulatedGate:
    """A door in a stream, or before a file transfer: nothing behind it runs until `open()`."""

    def __init__(self, name: str, schedule: Schedule) -> None:
        self.name = name
        self.is_open = False
        self._schedule = schedule

    def open(self) -> None:
        """Let what waits go on; a second call does nothing."""
        if not self.is_open:
            self.is_open = True
            self._schedule.changed()


class EmulatedTransfer(Transfer):
    """A file transfer that can be told to fail or to hang."""

    def __init__(self, fd: int, offset: int, address: int, nbytes: int, writes: bool, space: AddressSpace) -> None:
        super().__init__(fd, offset, address, nbytes, writes)
        self.space = space
        self.short = False  # an ordered fault: end after half of the bytes
        self.broken = False  # an ordered fault: end with EIO
        self.hold: EmulatedGate | None = None  # an ordered fault: do not end before this opens
        self.held_since = 0  # reading of the schedule's clock when it began to hang
        self.waits: list[TransferWait] = []  # every operation that was queued to wait for the gate

    def awaited(self) -> bool:
        """Whether queued work still waits for the gate, open or not."""
        return any(not wait.passed for wait in self.waits)

    def held(self) -> bool:
        return self.hold is not None and not self.hold.is_open

    def perform(self) -> str:
        call = "write_file" if self.writes else "read_file"
        nbytes = self.nbytes
        if nbytes > 0:
            self.space.check_host(f"{call}, when it ran", self.address, nbytes)
        if self.broken or self.short:
            self.nbytes = nbytes // 2  # what a device does before it fails: some of the work
        error = super().perform()
        self.nbytes = nbytes
        if self.broken:
            return f"injected: input/output error (errno 5) of {nbytes} bytes"
        if self.short and not error:
            return f"injected: short by {nbytes - nbytes // 2} of {nbytes} bytes"
        return error


class Tally:
    """What the device has done, for tests and tools."""

    def __init__(self) -> None:
        self.copies = 0
        self.copied_bytes = 0
        self.transfers = 0
        self.transferred_bytes = 0
        self._lock = Lock()  # queued work may run on several threads

    def add_copies(self, count: int, nbytes: int) -> None:
        with self._lock:
            self.copies += count
            self.copied_bytes += nbytes

    def add_transfer(self, nbytes: int) -> None:
        with self._lock:
            self.transfers += 1
            self.transferred_bytes += nbytes


class StreamQueue:
    """One stream: what is queued on it and not done."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.pending: deque[Operation] = deque()
        self.submitted = 0  # operations ever queued
        self.finished = 0  # operations done, in order; what the caller ran on the spot counts in neither
        self.direct = False  # nothing is pending and the schedule runs work at once: the caller may do it on the spot
        self.retired = False  # its handle was destroyed; what is pending still runs

    def describe(self) -> str:
        if not self.pending:
            return f"stream {self.handle}: nothing pending"
        return f"stream {self.handle}: {len(self.pending)} operations pending, the first {self.pending[0].describe()}"


class Event:
    """A mark in a stream: complete once the stream has finished `target` operations."""

    def __init__(self) -> None:
        self.queue: StreamQueue | None = None  # None: never recorded, hence complete
        self.target = 0

    def complete(self) -> bool:
        queue = self.queue
        return queue is None or queue.finished >= self.target


class Operation(ABC):
    """One thing queued on a stream."""

    def blocked(self) -> bool:
        """Whether it cannot run yet."""
        return False

    def shuffle(self, random: Random) -> None:
        """Put parts that are unordered among each other in any order."""
        del random  # most operations have no such parts

    @abstractmethod
    def run(self, steps: int) -> bool:
        """Do up to `steps` parts of the work; True when all is done."""

    @abstractmethod
    def describe(self) -> str:
        """What it is or waits for, to follow "the first"."""


class CopyOperation(Operation):
    """Copies of one size, unordered among each other."""

    def __init__(self, space: AddressSpace, tally: Tally, destinations: list[int], sources: list[int], nbytes: int) -> None:
        self.space = space
        self.tally = tally
        self.destinations = destinations
        self.sources = sources
        self.nbytes = nbytes
        self.done = 0

    def shuffle(self, random: Random) -> None:
        for i in range(len(self.sources) - 1, 0, -1):
            j = random.randrange(i + 1)
            self.sources[i], self.sources[j] = self.sources[j], self.sources[i]
            self.destinations[i], self.destinations[j] = self.destinations[j], self.destinations[i]

    def run(self, steps: int) -> bool:
        first = self.done
        last = min(len(self.sources), first + steps)
        while self.done < last:
            destination, source = self.destinations[self.done], self.sources[self.done]
            self.done += 1
            self.space.check_copy("copy, when it ran", "destination", destination, self.nbytes)
            self.space.check_copy("copy, when it ran", "source", source, self.nbytes)
            memmove(destination, source, self.nbytes)
        self.tally.add_copies(last - first, (last - first) * self.nbytes)
        return self.done == len(self.sources)

    def describe(self) -> str:
        return f"is a copy of {len(self.sources)} x {self.nbytes} bytes"


class CallOperation(Operation):
    """The engine's kernel."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def run(self, steps: int) -> bool:
        self.function()
        return True

    def describe(self) -> str:
        return "is a launched function"


class EventWait(Operation):
    """Waits for the place that an event marked when the wait was queued."""

    def __init__(self, queue: StreamQueue, target: int) -> None:
        self.queue = queue
        self.target = target

    def blocked(self) -> bool:
        return self.queue.finished < self.target

    def run(self, steps: int) -> bool:
        return True

    def describe(self) -> str:
        return f"waits for operation {self.target} of stream {self.queue.handle}, which has finished {self.queue.finished}"


class HoldOperation(Operation):
    """Waits for a gate that the test opens."""

    def __init__(self, gate: EmulatedGate) -> None:
        self.gate = gate

    def blocked(self) -> bool:
        return not self.gate.is_open

    def run(self, steps: int) -> bool:
        return True

    def describe(self) -> str:
        return f"waits for {self.gate.name}, which is closed"


class TransferStart(Operation):
    """Everything before a file transfer is complete: it may start. The stream goes on at once."""

    def __init__(self, schedule: Schedule, transfer: EmulatedTransfer) -> None:
        self.schedule = schedule
        self.transfer = transfer

    def run(self, steps: int) -> bool:
        self.schedule.start(self.transfer)
        return True

    def describe(self) -> str:
        return f"starts the {self.transfer.describe()}"


class TransferWait(Operation):
    """Waits until a file transfer's gate opens."""

    def __init__(self, transfer: EmulatedTransfer) -> None:
        self.transfer = transfer
        self.passed = False
        transfer.waits.append(self)

    def blocked(self) -> bool:
        return self.transfer.state == GATE_PENDING

    def run(self, steps: int) -> bool:
        self.passed = True
        return True

    def describe(self) -> str:
        return f"waits for the gate of the {self.transfer.describe()}"


class Schedule(ABC):
    """Who runs queued work, and when. `busy` is True while `advance` could do anything, so that an idle device asks nothing."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.busy = False

    @abstractmethod
    def adopt(self, queue: StreamQueue) -> None:
        """A new stream."""

    def retire(self, queue: StreamQueue) -> None:
        """The stream's handle was destroyed; what is pending still runs."""
        queue.retired = True

    def new_transfer(self, fd: int, offset: int, address: int, nbytes: int, writes: bool, space: AddressSpace) -> EmulatedTransfer:
        return EmulatedTransfer(fd, offset, address, nbytes, writes, space)

    @abstractmethod
    def submit(self, queue: StreamQueue, operation: Operation) -> None:
        """Queue an operation at the end of a stream."""

    @abstractmethod
    def start(self, transfer: EmulatedTransfer) -> None:
        """A file transfer may start."""

    @abstractmethod
    def changed(self) -> None:
        """A gate has opened from outside."""

    @abstractmethod
    def advance(self) -> None:
        """The driver was called: do what the schedule does then, and raise what queued work has raised."""

    @abstractmethod
    def finish(self, event: Event | None) -> None:
        """Run until the event is complete, or everything is; raise LogicError naming what is stuck if that cannot be."""

    @abstractmethod
    def idle(self) -> bool:
        """Whether nothing is queued and no transfer's gate is closed."""

    @abstractmethod
    def close(self) -> None:
        """Stop for good, dropping what hangs."""


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

    def start(self, transfer: EmulatedTransfer) -> None:
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
