"""The emulated device: a `Driver` over host memory, with asynchronous streams, strict checks and faults that tests inject.

Accesses that a real device would perform silently and wrongly are errors here. On schedule `eager` work runs as soon as possible,
on the calling thread; on `threads`, on real threads. On `random` each driver call runs some work, in any legal order that the seed
chooses, so a missing wait shows as wrong bytes under some seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from ctypes import memmove
from itertools import count
from typing import Final, SupportsFloat, SupportsIndex

from kv_cache_manager_v2.arguments import at_least, octets, positive, text, whole
from kv_cache_manager_v2.device.checksums import FileChecksums
from kv_cache_manager_v2.device.driver import IdentifyingDriver
from kv_cache_manager_v2.device.file_transfers import BUFFERED_IO_THREADS, DEFAULT_TIMEOUT_S
from kv_cache_manager_v2.device.process import PROCESS, forked_error
from kv_cache_manager_v2.emulated.address_space import AddressSpace, check_size, read_memory, write_memory
from kv_cache_manager_v2.emulated.faults import CALLS, EFFECT_ERROR, FILE_CALLS, FaultPlan
from kv_cache_manager_v2.emulated.files import FileTransfers
from kv_cache_manager_v2.emulated.schedules import EagerSchedule, RandomSchedule, Schedule
from kv_cache_manager_v2.emulated.streams import CallOperation, CopyOperation, Event, EventWait, StreamQueue, Tally
from kv_cache_manager_v2.emulated.threads import ThreadSchedule
from kv_cache_manager_v2.emulated.transfers import EmulatedGate, HoldOperation
from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.ids import Stream

GRANULARITY: Final = 2 << 20  # bytes, as on real GPUs
DEFAULT_STREAM: Final = Stream(0)
DEFAULT_TIMEOUT_CALLS: Final = 1000

_SCHEDULES: Final = ("eager", "threads", "random")


class EmulatedDriver(IdentifyingDriver):
    """A device whose memory is host memory. Stream 0 always exists. Any number of threads may use the device.

    `schedule` is "eager", "threads" or "random"; `seed` decides the order of "random". `transfer_timeout` is the time limit of a
    file transfer: driver calls on `eager` and `random` (default 1000), seconds on `threads` (60). On `threads`, a call that waits
    `stall_timeout_s` without progress raises, and `io_threads` file transfers run at once.

    An exception of a launched function is raised by the next `synchronize`, or `synchronize_event` of a later event: as a CuError,
    or unchanged if it is no Exception, like KeyboardInterrupt. A child of `os.fork()` may only close the device.
    """

    def __init__(
        self,
        schedule: str = "eager",
        seed: SupportsIndex = 0,
        transfer_timeout: SupportsFloat | None = None,
        stall_timeout_s: SupportsFloat = 30.0,
        io_threads: SupportsIndex = BUFFERED_IO_THREADS,
    ) -> None:
        self.schedule_name: str = text(schedule, "schedule")
        if self.schedule_name not in _SCHEDULES:
            raise ConfigError(f"schedule is {schedule!r}: must be one of {', '.join(_SCHEDULES)}")
        self.seed: int = whole(seed, "seed")
        timeout = None if transfer_timeout is None else positive(transfer_timeout, "transfer_timeout")
        stall_s = positive(stall_timeout_s, "stall_timeout_s")
        workers = at_least(io_threads, "io_threads", 1)
        self._tally = Tally()
        self._schedule: Schedule
        if self.schedule_name == "threads":
            self._schedule = ThreadSchedule(self._tally, DEFAULT_TIMEOUT_S if timeout is None else timeout, stall_s, workers)
        else:
            calls = DEFAULT_TIMEOUT_CALLS if timeout is None else int(timeout)
            if self.schedule_name == "eager":
                self._schedule = EagerSchedule(self._tally, calls)
            else:
                self._schedule = RandomSchedule(self._tally, calls, self.seed)
        self._space = self.memory = AddressSpace(GRANULARITY)  # `memory` is internal: `extras` registers its views there
        self._failures = FaultPlan(CALLS)
        self._hangs = FaultPlan(FILE_CALLS)
        self._numbers = count(1)  # handles of streams, events and gates; never reused
        self._files = FileTransfers(self._schedule, self._space, self._failures, self._hangs, self._numbers)
        self._queues: dict[int, StreamQueue] = {}  # by stream handle
        self._events: dict[int, Event] = {}  # by event handle
        self._forks = PROCESS.forks  # of the process that created this device
        self._closed = False
        self._add_stream(DEFAULT_STREAM)

    def _add_stream(self, handle: int) -> None:
        queue = StreamQueue(handle, self._schedule.failures)
        self._schedule.adopt(queue)
        self._queues[handle] = queue

    def describe(self) -> str:
        how = f"random (seed {self.seed})" if self.schedule_name == "random" else self.schedule_name
        return f"emulated device over host memory, schedule {how}"

    # --- faults and barriers, for tests

    def fail(
        self,
        call: str,
        nth: SupportsIndex = 1,
        times: SupportsIndex | None = 1,
        effect: str = EFFECT_ERROR,
        error: BaseException | type[BaseException] | None = None,
    ) -> None:
        """Make the nth next call of a driver method fail, and the `times` - 1 after it (None: all), before it changes anything.

        The call raises `error`, an exception or an exception class. The default is OutOfMemoryError for a call that allocates,
        HostRegistrationError for `host_register`, else CuError. A file transfer without `error` fails at its gate instead: with
        EIO, or with a short count if `effect` is "short".
        """
        with self._schedule.lock:
            self._failures.add(call, nth, times, effect, error)

    def hang(self, call: str, nth: SupportsIndex = 1, times: SupportsIndex | None = 1) -> EmulatedGate:
        """Make the nth next `read_file` or `write_file`, and the `times` - 1 after it, hang until the returned gate is opened."""
        with self._schedule.lock:
            fault = self._hangs.add(call, nth, times, EFFECT_ERROR, None)
            fault.gate = EmulatedGate(f"the gate of hanging {call}", self._schedule)
            return fault.gate

    def heal(self) -> None:
        """Cancel all injected faults. A transfer that hangs already still hangs."""
        with self._schedule.lock:
            self._failures.clear()
            self._hangs.clear()

    def gate(self, stream: SupportsIndex = DEFAULT_STREAM) -> EmulatedGate:
        """Hold back all work that is queued on the stream from now on, until the returned gate is opened."""
        self._enter("gate")
        queue = self._queue("gate", whole(stream, "stream"))
        gate = EmulatedGate(f"gate {next(self._numbers)} on stream {stream}", self._schedule)
        self._schedule.submit(queue, HoldOperation(gate))
        return gate

    def _enter(self, call: str) -> None:
        """Start of every call: advance pending work. Raises LogicError after a fork or `close()`."""
        if PROCESS.forks != self._forks:
            raise forked_error(call)
        if self._schedule.busy:
            self._schedule.advance()
        if self._closed:
            raise LogicError(f"{call}: the device is closed")

    def _begin(self, call: str) -> None:
        """As `_enter`, for a call for which faults can be injected."""
        self._enter(call)
        if self._failures.armed:
            self._fail(call)

    def _fail(self, call: str) -> None:
        """Count the call, and raise its injected fault if there is one."""
        with self._schedule.lock:
            fault = self._failures.next(call)
        if fault is not None:
            raise fault.error()

    def _queue(self, call: str, stream: int) -> StreamQueue:
        queue = self._queues.get(stream)
        if queue is None:
            raise LogicError(
                f"{call}: no stream {stream}: never created, or destroyed" + (", the device is closed" if self._closed else "")
            )
        return queue

    def _event(self, call: str, event: int) -> Event:
        found = self._events.get(event)
        if found is None:
            raise LogicError(f"{call}: no event {event}: never created, or destroyed")
        return found

    # --- device and host memory

    def granularity(self) -> int:
        return GRANULARITY

    def reserve(self, nbytes: int) -> int:
        self._begin("reserve")
        with self._schedule.lock:
            return self._space.reserve(nbytes)

    def release_reservation(self, address: int, nbytes: int) -> None:
        self._begin("release_reservation")
        with self._schedule.lock:
            self._space.release_reservation(address, nbytes)

    def create_chunk(self, nbytes: int) -> int:
        self._begin("create_chunk")
        with self._schedule.lock:
            return self._space.create_chunk(nbytes)

    def destroy_chunk(self, chunk: int) -> None:
        self._begin("destroy_chunk")
        with self._schedule.lock:
            self._space.destroy_chunk(chunk)

    def map_chunk(self, address: int, nbytes: int, chunk: int) -> None:
        self._begin("map_chunk")
        with self._schedule.lock:
            self._space.map_chunk(address, nbytes, chunk)

    def unmap(self, address: int, nbytes: int) -> None:
        self._begin("unmap")
        with self._schedule.lock:
            self._space.unmap(address, nbytes)

    def set_access(self, address: int, nbytes: int) -> None:
        self._begin("set_access")
        with self._schedule.lock:
            self._space.set_access(address, nbytes)

    def host_register(self, address: int, nbytes: int) -> None:
        self._begin("host_register")
        with self._schedule.lock:
            self._space.host_register(address, nbytes)

    def host_unregister(self, address: int, nbytes: int) -> None:
        self._begin("host_unregister")
        with self._schedule.lock:
            self._space.host_unregister(address, nbytes)

    def read_bytes(self, address: SupportsIndex, nbytes: SupportsIndex) -> bytes:
        """The present bytes of device or registered host memory. Does not wait for queued work."""
        source, count = whole(address, "address"), at_least(nbytes, "nbytes", 0)
        if count == 0:
            return b""
        self._space.check_copy("read_bytes", "source", source, count)
        return read_memory(source, count)

    def write_bytes(self, address: SupportsIndex, data: bytes) -> None:
        """Overwrite device or registered host memory. Does not wait for queued work."""
        destination, given = whole(address, "address"), octets(data, "data")
        if given:
            self._space.check_copy("write_bytes", "destination", destination, len(given))
            write_memory(destination, given)

    # --- streams and events

    def create_stream(self) -> Stream:
        self._begin("create_stream")
        handle = next(self._numbers)
        self._add_stream(handle)
        return Stream(handle)

    def destroy_stream(self, stream: Stream) -> None:
        self._begin("destroy_stream")
        queue = self._queue("destroy_stream", stream)
        if stream == DEFAULT_STREAM:
            raise LogicError("destroy_stream: stream 0 is the default stream, which always exists")
        self._schedule.retire(queue)
        del self._queues[stream]

    def stream_identity(self, stream: Stream) -> int:
        return stream + 1  # handles are never reused

    def create_event(self) -> int:
        self._begin("create_event")
        handle = next(self._numbers)
        self._events[handle] = Event()
        return handle

    def destroy_event(self, event: int) -> None:
        self._begin("destroy_event")
        self._event("destroy_event", event)
        del self._events[event]

    def record_event(self, event: int, stream: Stream) -> None:
        if self._schedule.busy or self._failures.armed or PROCESS.forks != self._forks:
            self._begin("record_event")
        found = self._event("record_event", event)
        queue = self._queue("record_event", stream)
        found.queue = queue
        found.target = queue.submitted

    def wait_event(self, stream: Stream, event: int) -> None:
        if self._schedule.busy or self._failures.armed or PROCESS.forks != self._forks:
            self._begin("wait_event")
        found = self._event("wait_event", event)
        queue = self._queue("wait_event", stream)
        other = found.queue
        if other is not None and other is not queue and other.finished() < found.target:
            self._schedule.submit(queue, EventWait(other, found.target))

    def query_event(self, event: int) -> bool:
        if self._schedule.busy or self._failures.armed or PROCESS.forks != self._forks:
            self._begin("query_event")
        return self._event("query_event", event).complete()

    def synchronize_event(self, event: int) -> None:
        self._begin("synchronize_event")
        self._wait(self._event("synchronize_event", event))

    def synchronize(self) -> None:
        """Run all queued work. Raises LogicError with the blocked streams and gates if that cannot end: a test's gate is closed."""
        self._begin("synchronize")
        self._wait(None)

    def order(self, stream: Stream) -> None:
        self._begin("order")
        self._wait(self._queue("order", whole(stream, "stream")).end())

    def _wait(self, event: Event | None) -> None:
        """Run until the event is complete (None: all work), and raise the first error of that work."""
        if event is None or not event.complete():
            self._schedule.run_until(event)
        failure = self._schedule.failures.take(event)
        if failure is not None:
            raise failure

    # --- work

    def copy(self, stream: Stream, destination: int, source: int, nbytes: int) -> None:
        if self._schedule.busy or self._failures.armed or PROCESS.forks != self._forks:
            self._begin("copy")
        queue = self._queue("copy", stream)
        if nbytes <= 0:
            check_size("copy", nbytes)
            return
        self._space.check_copy("copy", "destination", destination, nbytes)
        self._space.check_copy("copy", "source", source, nbytes)
        if queue.direct:
            memmove(destination, source, nbytes)
            self._tally.copies += 1
            self._tally.copied_bytes += nbytes
        else:
            self._schedule.submit(queue, CopyOperation(self._space, self._tally, [destination], [source], nbytes))

    def copy_batch(self, stream: Stream, destinations: list[int], sources: list[int], nbytes: int) -> None:
        if self._schedule.busy or self._failures.armed or PROCESS.forks != self._forks:
            self._begin("copy_batch")
        queue = self._queue("copy_batch", stream)
        count = len(destinations)
        if len(sources) != count:
            raise LogicError(f"copy_batch: {count} destinations but {len(sources)} sources")
        if count == 0 or nbytes <= 0:
            check_size("copy_batch", nbytes)
            return
        self._space.check_batch("copy_batch", "destination", destinations, nbytes)
        self._space.check_batch("copy_batch", "source", sources, nbytes)
        if queue.direct:
            for i in range(count):
                memmove(destinations[i], sources[i], nbytes)
            self._tally.copies += count
            self._tally.copied_bytes += count * nbytes
        else:
            operation = CopyOperation(self._space, self._tally, destinations.copy(), sources.copy(), nbytes)
            self._schedule.submit(queue, operation)

    def launch(self, stream: Stream, function: Callable[[], None]) -> None:
        self._begin("launch")
        queue = self._queue("launch", stream)
        at_once = queue.direct
        self._schedule.submit(queue, CallOperation(function))
        if at_once:
            self._schedule.advance()

    # --- files

    def read_file(self, stream: Stream, fd: int, offset: int, address: int, nbytes: int) -> int:
        gates: list[int] = []
        self.read_files(stream, fd, [offset], [address], nbytes, gates)
        return gates[0]

    def write_file(self, stream: Stream, fd: int, offset: int, address: int, nbytes: int) -> int:
        gates: list[int] = []
        self.write_files(stream, fd, [offset], [address], nbytes, gates)
        return gates[0]

    def read_files(self, stream: Stream, fd: int, offsets: list[int], addresses: list[int], nbytes: int, gates: list[int]) -> None:
        self._enter("read_file")
        self._files.submit("read_file", self._queue("read_file", stream), fd, offsets, addresses, nbytes, gates)

    def write_files(self, stream: Stream, fd: int, offsets: list[int], addresses: list[int], nbytes: int, gates: list[int]) -> None:
        self._enter("write_file")
        self._files.submit("write_file", self._queue("write_file", stream), fd, offsets, addresses, nbytes, gates)

    def protect_file(self, fd: int, checksums: FileChecksums) -> bool:
        self._files.checksums[fd] = checksums
        return True

    def unprotect_file(self, fd: int) -> None:
        self._files.checksums.pop(fd, None)

    def wait_gate(self, stream: Stream, gate: int) -> None:
        self.wait_gates(stream, [gate])

    def wait_gates(self, stream: Stream, gates: list[int]) -> None:
        self._begin("wait_gate")
        self._files.wait(self._queue("wait_gate", stream), gates)

    def poll_gate(self, gate: int) -> int:
        if self._schedule.busy or self._failures.armed or PROCESS.forks != self._forks:
            self._begin("poll_gate")
        return self._files.transfer("poll_gate", gate).state

    def watch_gates(self, gates: list[int], changed: deque[int]) -> bool:
        return self._files.watch(gates, changed)

    def gate_error(self, gate: int) -> str:
        self._begin("gate_error")
        return self._files.transfer("gate_error", gate).error

    def release_gate(self, gate: int) -> None:
        self._begin("release_gate")
        self._files.release(gate)

    # --- counters and checks

    @property
    def copies_made(self) -> int:
        return self._tally.copies

    @property
    def bytes_copied(self) -> int:
        return self._tally.copied_bytes

    @property
    def transfers_made(self) -> int:
        return self._tally.transfers

    @property
    def bytes_transferred(self) -> int:
        return self._tally.transferred_bytes

    @property
    def events_live(self) -> int:
        return len(self._events)

    @property
    def streams_live(self) -> int:
        """Streams of `create_stream`, not counting the default stream."""
        return len(self._queues) - (1 if DEFAULT_STREAM in self._queues else 0)

    @property
    def gates_live(self) -> int:
        return len(self._files.by_gate)

    @property
    def chunks_live(self) -> int:
        return len(self._space.chunks)

    @property
    def mapped_bytes(self) -> int:
        return self._space.mapped_bytes

    @property
    def registered_bytes(self) -> int:
        return sum(self._space.host_ranges.values())

    @property
    def registered_ranges(self) -> list[tuple[int, int]]:
        """(address, bytes) of every registered host range, in ascending order."""
        return sorted(self._space.host_ranges.items())

    def idle(self) -> bool:
        """Whether no work is queued and every gate of a transfer is open. Runs nothing."""
        return self._schedule.idle()

    def leaks(self) -> list[str]:
        """What was created and not freed, one text each."""
        found = self._space.leaks()
        found += [f"stream {handle}" for handle in self._queues if handle != DEFAULT_STREAM]
        found += [f"event {handle}" for handle in self._events]
        return found + self._files.leaks()

    def check_invariants(self) -> None:
        with self._schedule.lock:
            self._space.check_invariants()
            for handle, queue in list(self._queues.items()):
                assert queue.handle == handle
                assert not queue.retired
                assert 0 <= queue.finished() <= queue.submitted
                assert not (queue.direct and queue.pending)

    def close(self) -> None:
        if self._closed:
            return
        if PROCESS.forks != self._forks:
            self._closed = True  # threads, memory and files belong to the parent
            return
        self._begin("close")
        stuck = ""
        try:
            self._schedule.run_until(None)
        except LogicError as error:
            stuck = str(error)
        self._schedule.close()
        self._closed = True
        found = self.leaks()
        self._space.clear()
        self._queues = {}
        self._events = {}
        self._files.by_gate = {}
        failure = self._schedule.failures.take(None)
        if stuck:
            raise LogicError(f"the device was closed with work that can never run: {stuck}; open its gates first")
        if found:
            more = f" and {len(found) - 16} more" if len(found) > 16 else ""
            raise LogicError(f"the device was closed with {len(found)} things not freed: {'; '.join(found[:16])}{more}")
        if failure is not None:
            raise failure
