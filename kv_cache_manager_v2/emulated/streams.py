"""The emulated device's streams, and the operations that are queued on them.

Work of one stream runs in the order in which it was queued; a schedule chooses the order between streams. A position in a stream is
a count: the n-th operation is complete when the stream has finished n. So recording an event costs two stores and queues nothing.

An interrupted operation runs again. What it has done is not undone, and may be done twice.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from ctypes import memmove
from random import Random
from threading import Lock
from typing import Final

from kv_cache_manager_v2.emulated.address_space import AddressSpace
from kv_cache_manager_v2.errors import CuError, KVCacheError

ALL_STEPS: Final = 1 << 60  # more steps than any operation has
LAUNCH_FAILED: Final = 719  # "launch failure" in the numbering of the device's driver

_log: Final = logging.getLogger(__name__)


class Tally:
    """Counts of the device's work, for tests and tools."""

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


class FailureLog:
    """Errors of queued work, kept until a call that waits for the work raises them."""

    def __init__(self) -> None:
        self._entries: list[tuple[StreamQueue | None, int, BaseException]] = []  # (stream, number of the operation, error)
        self._lock = Lock()

    def add(self, queue: StreamQueue | None, error: BaseException) -> None:
        """Keep an error of the stream's first operation. `queue` is None for work of no stream."""
        with self._lock:
            self._entries.append((queue, 0 if queue is None else queue.finished(), error))

    def take(self, event: Event | None) -> BaseException | None:
        """Remove the errors of work before the event (None: of all work), and return the first. Later ones are logged."""
        if not self._entries:
            return None
        taken: list[BaseException] = []
        with self._lock:
            kept: list[tuple[StreamQueue | None, int, BaseException]] = []
            for queue, number, error in self._entries:
                if event is None or (queue is event.queue and number < event.target):
                    taken.append(error)
                else:
                    kept.append((queue, number, error))
            self._entries = kept
        for error in taken[1:]:
            _log.warning("queued work has failed more than once; after the first: %s: %s", type(error).__name__, error)
        return taken[0] if taken else None


class StreamQueue:
    """One stream and its pending operations. The schedule's lock guards all fields."""

    def __init__(self, handle: int, failures: FailureLog) -> None:
        self.handle = handle
        self._failures = failures
        self.pending: deque[Operation] = deque()
        self.submitted = 0  # operations ever queued, without those that the caller ran at once
        self.direct = False  # no work is pending and the schedule runs work at once: the caller may run it itself
        self.retired = False  # its handle was destroyed; pending work still runs
        self.listed = False  # the schedule lists it among the streams with pending work
        self.runner = 0  # on `threads`: the thread that runs the first operation; 0 for none

    def finished(self) -> int:
        """Number of complete operations. Derived from `pending`, so that removing an operation also counts it, in one step."""
        return self.submitted - len(self.pending)

    def end(self) -> Event:
        """A mark after all that was queued so far."""
        event = Event()
        event.queue = self
        event.target = self.submitted
        return event

    def add(self, operation: Operation) -> None:
        """Queue an operation at the end. An interrupt cannot come between the two lines."""
        self.submitted += 1
        self.pending.append(operation)

    def fail(self, error: BaseException) -> None:
        """Keep the error of the first operation."""
        self._failures.add(self, error)

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
        return queue is None or queue.finished() >= self.target


class Operation(ABC):
    """One unit of work on a stream."""

    def blocked(self) -> bool:
        """Whether it cannot run yet."""
        return False

    def instant(self) -> bool:
        """Whether it takes no time unless blocked, so that any thread may run it."""
        return False

    def shareable(self) -> bool:
        """Whether a thread that waits for the device may run it. True for work that never waits and is no code of the engine."""
        return False

    def shuffle(self, random: Random) -> None:
        """Shuffle parts that may run in any order."""
        del random  # most operations have no such parts

    @abstractmethod
    def run(self, queue: StreamQueue, steps: int) -> bool:
        """Run up to `steps` parts, as the first operation of the queue; True when all are done."""

    @abstractmethod
    def describe(self) -> str:
        """What it is or waits for; the text follows "the first"."""


class CopyOperation(Operation):
    """Copies of one size, which may run in any order."""

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

    def run(self, queue: StreamQueue, steps: int) -> bool:
        first = self.done
        last = min(len(self.sources), first + steps)
        done = first
        while done < last:
            destination, source = self.destinations[done], self.sources[done]
            nbytes = self.nbytes
            done += 1
            while (  # copies that are contiguous in both memories become one
                done < last and self.destinations[done] == destination + nbytes and self.sources[done] == source + nbytes
            ):
                nbytes += self.nbytes
                done += 1
            self.space.check_copy("copy, when it ran", "destination", destination, nbytes)
            self.space.check_copy("copy, when it ran", "source", source, nbytes)
            memmove(destination, source, nbytes)
        self.done = done
        self.tally.add_copies(last - first, (last - first) * self.nbytes)
        return done == len(self.sources)

    def describe(self) -> str:
        return f"is a copy of {len(self.sources)} x {self.nbytes} bytes"


class CallOperation(Operation):
    """The engine's kernel. Any exception of it is kept for the next call that waits for it."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function: Callable[[], None] | None = function

    def run(self, queue: StreamQueue, steps: int) -> bool:
        function = self.function
        self.function = None  # an interrupted kernel does not run again
        if function is not None:
            try:
                function()
            except BaseException as error:
                queue.fail(kernel_error(queue.handle, error))
        return True

    def describe(self) -> str:
        return "is a launched function"


def kernel_error(stream: int, error: BaseException) -> BaseException:
    """The error that reports a kernel's exception: the exception if it is a KVCacheError or no Exception, else a CuError."""
    if isinstance(error, KVCacheError) or not isinstance(error, Exception):
        return error
    reported = CuError(f"a function launched on stream {stream} raised {type(error).__name__}: {error}", LAUNCH_FAILED, "launch")
    reported.__cause__ = error
    return reported


class EventWait(Operation):
    """Waits for the position that an event marked when the wait was queued."""

    def __init__(self, queue: StreamQueue, target: int) -> None:
        self.queue = queue
        self.target = target

    def instant(self) -> bool:
        return True

    def blocked(self) -> bool:
        return self.queue.finished() < self.target

    def run(self, queue: StreamQueue, steps: int) -> bool:
        return True

    def describe(self) -> str:
        return f"waits for operation {self.target} of stream {self.queue.handle}, which has finished {self.queue.finished()}"
