"""The emulated device's streams, and the operations that are queued on them.

Rule: work of one stream runs in the order in which it was queued, and a schedule may choose anything else. A place in a stream is a
count: the n-th operation is complete when the stream has finished n, so recording an event costs two stores and queues nothing.

An operation can be run again after an interruption: what it has done, it does not undo and may do a second time.
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

ALL_STEPS: Final = 1 << 60  # more than any operation has
LAUNCH_FAILED: Final = 719  # "launch failure" in the numbering of the device's driver

_log: Final = logging.getLogger(__name__)


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


class FailureLog:
    """What queued work has raised, until it is reported to a call that waits for it."""

    def __init__(self) -> None:
        self._entries: list[tuple[StreamQueue | None, int, BaseException]] = []  # (its stream, the operation's number, the error)
        self._lock = Lock()

    def add(self, queue: StreamQueue | None, error: BaseException) -> None:
        """An error of the stream's first operation; None: of work that belongs to no stream."""
        with self._lock:
            self._entries.append((queue, 0 if queue is None else queue.finished(), error))

    def take(self, event: Event | None) -> BaseException | None:
        """The first error of work that the event comes after, or of any work; it counts as reported, and so do later ones."""
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
    """One stream: what is queued on it and not done. What is not said to be otherwise is guarded by the schedule's lock."""

    def __init__(self, handle: int, failures: FailureLog) -> None:
        self.handle = handle
        self._failures = failures
        self.pending: deque[Operation] = deque()
        self.submitted = 0  # operations ever queued; what the caller ran on the spot does not count
        self.direct = False  # nothing is pending and the schedule runs work at once: the caller may do it on the spot
        self.retired = False  # its handle was destroyed; what is pending still runs
        self.listed = False  # the schedule has it among the streams with something pending
        self.runner = 0  # on `threads`: the thread that runs the first operation; 0 for none

    def finished(self) -> int:
        """Operations done, in order. Counted by what is left, so that one step, taking an operation out, moves both."""
        return self.submitted - len(self.pending)

    def add(self, operation: Operation) -> None:
        """Queue an operation at the end."""
        self.pending.append(operation)  # first: a count that lags makes an event late, never early
        self.submitted += 1

    def fail(self, error: BaseException) -> None:
        """The first operation has failed."""
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
    def run(self, queue: StreamQueue, steps: int) -> bool:
        """Do up to `steps` parts of the work, as the first of the queue; True when all is done."""

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

    def run(self, queue: StreamQueue, steps: int) -> bool:
        first = self.done
        last = min(len(self.sources), first + steps)
        done = first
        while done < last:
            destination, source = self.destinations[done], self.sources[done]
            nbytes = self.nbytes
            done += 1
            while (  # neighbours on both sides go in one
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
    """The engine's kernel. What it raises, of whatever class, is kept for the next call that waits for it."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function: Callable[[], None] | None = function

    def run(self, queue: StreamQueue, steps: int) -> bool:
        function = self.function
        self.function = None  # a kernel that was interrupted does not run twice
        if function is not None:
            try:
                function()
            except BaseException as error:
                queue.fail(kernel_error(queue.handle, error))
        return True

    def describe(self) -> str:
        return "is a launched function"


def kernel_error(stream: int, error: BaseException) -> BaseException:
    """What is raised for a kernel's exception: one of our own, KeyboardInterrupt and the like as they are, else a CuError."""
    if isinstance(error, KVCacheError) or not isinstance(error, Exception):
        return error
    reported = CuError(f"a function launched on stream {stream} raised {type(error).__name__}: {error}", LAUNCH_FAILED, "launch")
    reported.__cause__ = error
    return reported


class EventWait(Operation):
    """Waits for the place that an event marked when the wait was queued."""

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
