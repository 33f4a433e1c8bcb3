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
from kv_cache_manager_v2.device.file_transfers import Transfer
from kv_cache_manager_v2.emulated.address_space import AddressSpace

ALL_STEPS: Final = 1 << 60  # more than any operation has


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

    def instant(self) -> bool:
        """Whether it takes no time once it is not blocked, so that any thread may run it in passing."""
        return False

    def shareable(self) -> bool:
        """Whether a thread that waits for the device may run it: it is work, waits for nothing and is no code of the engine's."""
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

    def shareable(self) -> bool:
        return True

    def shuffle(self, random: Random) -> None:
        for i in range(len(self.sources) - 1, 0, -1):
            j = random.randrange(i + 1)
            self.sources[i], self.sources[j] = self.sources[j], self.sources[i]
            self.destinations[i], self.destinations[j] = self.destinations[j], self.destinations[i]

    def run(self, steps: int) -> bool:
        first = self.done
        last = min(len(self.sources), first + steps)
        while self.done < last:
            beg = self.done
            destination, source = self.destinations[beg], self.sources[beg]
            nbytes = self.nbytes
            self.done += 1
            while (  # neighbours on both sides go in one
                self.done < last
                and self.destinations[self.done] == destination + nbytes
                and self.sources[self.done] == source + nbytes
            ):
                nbytes += self.nbytes
                self.done += 1
            self.space.check_copy("copy, when it ran", "destination", destination, nbytes)
            self.space.check_copy("copy, when it ran", "source", source, nbytes)
            memmove(destination, source, nbytes)
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

    def instant(self) -> bool:
        return True

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

    def instant(self) -> bool:
        return True

    def blocked(self) -> bool:
        return not self.gate.is_open

    def run(self, steps: int) -> bool:
        return True

    def describe(self) -> str:
        return f"waits for {self.gate.name}, which is closed"


class TransferStart(Operation):
    """Everything before some file transfers is complete: they may start, in this order. The stream goes on at once."""

    def __init__(self, schedule: Schedule, transfers: list[EmulatedTransfer]) -> None:
        self.schedule = schedule
        self.transfers = transfers

    def instant(self) -> bool:
        return True

    def run(self, steps: int) -> bool:
        self.schedule.start(self.transfers)
        return True

    def describe(self) -> str:
        more = f" and {len(self.transfers) - 1} more" if len(self.transfers) > 1 else ""
        return f"starts the {self.transfers[0].describe()}{more}"


class TransferWait(Operation):
    """Waits until the gates of some file transfers open."""

    def __init__(self, transfers: list[EmulatedTransfer]) -> None:
        self.transfers = transfers
        self.passed = False
        self._open = 0  # so many from the front are known to be open
        for transfer in transfers:
            transfer.waits.append(self)

    def blocked(self) -> bool:
        known = self._open  # several threads may look at once
        while known < len(self.transfers) and self.transfers[known].state != GATE_PENDING:
            known += 1
        self._open = known
        return known < len(self.transfers)

    def instant(self) -> bool:
        return True

    def run(self, steps: int) -> bool:
        self.passed = True
        return True

    def describe(self) -> str:
        left = max(1, len(self.transfers) - self._open)
        more = f" and {left - 1} more" if left > 1 else ""
        return f"waits for the gate of the {self.transfers[len(self.transfers) - left].describe()}{more}"


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
    def start(self, transfers: list[EmulatedTransfer]) -> None:
        """File transfers may start, in this order."""

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
