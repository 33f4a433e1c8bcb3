"""The emulated device: a `Driver` over host memory, with real asynchronous stream semantics, strict books and ordered faults.

Rule: what a real device would get wrong silently is an error here. Schedules: `eager` runs work as soon as possible on the calling
thread, `threads` on real threads, `random` in any legal order that the seed decides, a little whenever the driver is called and
wholly on `synchronize()`; with `random`, a missing wait shows as wrong bytes under some seed.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import memmove
from typing import Final, SupportsFloat, SupportsIndex

from kv_cache_manager_v2.arguments import at_least, octets, positive, text, whole
from kv_cache_manager_v2.device.driver import GATE_PENDING, IdentifyingDriver
from kv_cache_manager_v2.device.file_transfers import BUFFERED_IO_THREADS, DEFAULT_TIMEOUT_S
from kv_cache_manager_v2.emulated.address_space import AddressSpace, read_memory, write_memory
from kv_cache_manager_v2.emulated.faults import CALLS, EFFECT_ERROR, EFFECT_SHORT, FILE_CALLS, FaultPlan, injected_error
from kv_cache_manager_v2.emulated.schedules import EagerSchedule, RandomSchedule
from kv_cache_manager_v2.emulated.streams import (
    CallOperation,
    CopyOperation,
    EmulatedGate,
    EmulatedTransfer,
    Event,
    EventWait,
    HoldOperation,
    Schedule,
    StreamQueue,
    Tally,
    TransferStart,
    TransferWait,
)
from kv_cache_manager_v2.emulated.threads import ThreadSchedule
from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.ids import Stream

GRANULARITY: Final = 2 << 20  # bytes; as on the devices that this one stands for
DEFAULT_STREAM: Final = Stream(0)
DEFAULT_TIMEOUT_CALLS: Final = 1000

_SCHEDULES: Final = ("eager", "threads", "random")


class EmulatedDriver(IdentifyingDriver):
    """A device whose memory is host memory. Stream 0 always exists.

    `transfer_timeout`: after how long a file transfer's gate opens as timed out: a number of driver calls on `eager` and `random`,
    seconds on `threads`. `stall_timeout_s`: on `threads`, how long a waiting call watches nothing move before it raises.
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
            raise ConfigError(f"schedule={schedule!r}: must be one of {', '.join(_SCHEDULES)}")
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
        self._space = self.memory = AddressSpace(GRANULARITY)  # `memory` is internal: views that `extras` makes are noted there
        self._failures = FaultPlan(CALLS)
        self._hangs = FaultPlan(FILE_CALLS)
        self._queues: dict[int, StreamQueue] = {}  # by stream handle; handles are never used twice
        self._events: dict[int, Event] = {}  # by event handle; never used twice
        self._transfers: dict[int, EmulatedTransfer] = {}  # by gate handle; never used twice
        self._handles = 0  # the last handle given out
        self._closed = False
        self._queues[DEFAULT_STREAM] = StreamQueue(DEFAULT_STREAM)
        self._schedule.adopt(self._queues[DEFAULT_STREAM])

    def describe(self) -> str:
        how = f"random (seed {self.seed})" if self.schedule_name == "random" else self.schedule_name
        return f"emulated device over host memory, schedule {how}"

    # --- faults and gates, for tests

    def fail(self, call: str, nth: SupportsIndex = 1, times: SupportsIndex | None = 1, effect: str = EFFECT_ERROR) -> None:
        """Let the nth next call of a kind fail, and the `times` - 1 after it (None: for ever).

        A call that allocates raises OutOfMemoryError, `host_register` HostRegistrationError, others CuError, nothing being changed.
        A file transfer is accepted and ends with an error at its gate: EIO, or a short count with effect="short".
        """
        self._failures.order(call, nth, times, effect)

    def hang(self, call: str, nth: SupportsIndex = 1, times: SupportsIndex | None = 1) -> EmulatedGate:
        """Let the nth next `read_file` or `write_file`, and the `times` - 1 after it, not end before the gate returned opens."""
        order = self._hangs.order(call, nth, times, EFFECT_ERROR)
        order.gate = EmulatedGate(f"the gate of hanging {call}", self._schedule)
        return order.gate

    def heal(self) -> None:
        """Forget all ordered faults; what hangs already still hangs."""
        self._failures.clear()
        self._hangs.clear()

    def gate(self, stream: SupportsIndex = DEFAULT_STREAM) -> EmulatedGate:
        """Close the stream: nothing that is queued on it from now on runs until the returned gate is opened."""
        self._advance()
        queue = self._queue("gate", whole(stream, "stream"))
        self._handles += 1
        gate = EmulatedGate(f"gate {self._handles} on stream {stream}", self._schedule)
        self._schedule.submit(queue, HoldOperation(gate))
        return gate

    def _fail(self, call: str) -> None:
        """Count the call; raise if it was ordered to fail."""
        if self._failures.next(call) is not None:
            raise injected_error(call)

    def _advance(self) -> None:
        """What every call does first when something is pending."""
        if self._schedule.busy:
            self._schedule.advance()

    def _begin(self, call: str) -> None:
        if self._schedule.busy:
            self._schedule.advance()
        if self._failures.armed:
            self._fail(call)
        if self._closed:
            raise LogicError(f"{call}: the device is closed")

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

    def _transfer(self, call: str, gate: int) -> EmulatedTransfer:
        found = self._transfers.get(gate)
        if found is None:
            raise LogicError(f"{call}: no gate {gate}: never returned by a file transfer, or released")
        return found

    # --- device and host memory

    def granularity(self) -> int:
        return GRANULARITY

    def reserve(self, nbytes: int) -> int:
        self._begin("reserve")
        return self._space.reserve(nbytes)

    def release_reservation(self, address: int, nbytes: int) -> None:
        self._advance()
        self._space.release_reservation(address, nbytes)

    def create_chunk(self, nbytes: int) -> int:
        self._begin("create_chunk")
        return self._space.create_chunk(nbytes)

    def destroy_chunk(self, chunk: int) -> None:
        self._advance()
        self._space.destroy_chunk(chunk)

    def map_chunk(self, address: int, nbytes: int, chunk: int) -> None:
        self._begin("map_chunk")
        self._space.map_chunk(address, nbytes, chunk)

    def unmap(self, address: int, nbytes: int) -> None:
        self._advance()
        self._space.unmap(address, nbytes)

    def set_access(self, address: int, nbytes: int) -> None:
        self._begin("set_access")
        self._space.set_access(address, nbytes)

    def host_register(self, address: int, nbytes: int) -> None:
        self._begin("host_register")
        self._space.host_register(address, nbytes)

    def host_unregister(self, address: int, nbytes: int) -> None:
        self._advance()
        self._space.host_unregister(address, nbytes)

    def read_bytes(self, address: SupportsIndex, nbytes: SupportsIndex) -> bytes:
        """The bytes of device or registered host memory as they are now, whatever is still queued."""
        source, count = whole(address, "address"), at_least(nbytes, "nbytes", 0)
        if count == 0:
            return b""
        self._space.check_copy("read_bytes", "source", source, count)
        return read_memory(source, count)

    def write_bytes(self, address: SupportsIndex, data: bytes) -> None:
        """Overwrite device or registered host memory now, whatever is still queued."""
        destination, given = whole(address, "address"), octets(data, "data")
        if given:
            self._space.check_copy("write_bytes", "destination", destination, len(given))
            write_memory(destination, given)

    # --- streams and events

    def create_stream(self) -> Stream:
        self._begin("create_stream")
        self._handles += 1
        queue = StreamQueue(self._handles)
        self._queues[self._handles] = queue
        self._schedule.adopt(queue)
        return Stream(self._handles)

    def destroy_stream(self, stream: Stream) -> None:
        self._advance()
        queue = self._queue("destroy_stream", stream)
        if stream == DEFAULT_STREAM:
            raise LogicError("destroy_stream: stream 0 is the default stream, which always exists")
        del self._queues[stream]
        self._schedule.retire(queue)

    def stream_identity(self, stream: Stream) -> int:
        return stream + 1  # handles are never used twice

    def create_event(self) -> int:
        self._begin("create_event")
        self._handles += 1
        self._events[self._handles] = Event()
        return self._handles

    def destroy_event(self, event: int) -> None:
        self._advance()
        self._event("destroy_event", event)
        del self._events[event]

    def record_event(self, event: int, stream: Stream) -> None:
        if self._schedule.busy or self._failures.armed:
            self._begin("record_event")
        found = self._event("record_event", event)
        queue = self._queue("record_event", stream)
        found.queue = queue
        found.target = queue.submitted

    def wait_event(self, stream: Stream, event: int) -> None:
        if self._schedule.busy or self._failures.armed:
            self._begin("wait_event")
        found = self._event("wait_event", event)
        queue = self._queue("wait_event", stream)
        other = found.queue
        if other is not None and other is not queue and other.finished < found.target:
            self._schedule.submit(queue, EventWait(other, found.target))

    def query_event(self, event: int) -> bool:
        if self._schedule.busy or self._failures.armed:
            self._begin("query_event")
        return self._event("query_event", event).complete()

    def synchronize_event(self, event: int) -> None:
        self._begin("synchronize_event")
        found = self._event("synchronize_event", event)
        if not found.complete():
            self._schedule.finish(found)

    def synchronize(self) -> None:
        """Run all that is queued. LogicError naming the streams and gates if that can never be: a gate of the test is closed."""
        self._begin("synchronize")
        self._schedule.finish(None)

    # --- work

    def copy(self, stream: Stream, destination: int, source: int, nbytes: int) -> None:
        if self._schedule.busy or self._failures.armed:
            self._begin("copy")
        queue = self._queue("copy", stream)
        if nbytes <= 0:
            self._check_size("copy", nbytes)
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
        if self._schedule.busy or self._failures.armed:
            self._begin("copy_batch")
        queue = self._queue("copy_batch", stream)
        count = len(destinations)
        if len(sources) != count:
            raise LogicError(f"copy_batch: {count} destinations but {len(sources)} sources")
        if count == 0 or nbytes <= 0:
            self._check_size("copy_batch", nbytes)
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

    def _check_size(self, call: str, nbytes: int) -> None:
        if nbytes < 0:
            raise LogicError(f"{call}: a negative size, {nbytes} bytes")

    def launch(self, stream: Stream, function: Callable[[], None]) -> None:
        self._begin("launch")
        queue = self._queue("launch", stream)
        if queue.direct:
            function()
        else:
            self._schedule.submit(queue, CallOperation(function))

    # --- files

    def read_file(self, stream: Stream, fd: int, offset: int, address: int, nbytes: int) -> int:
        return self._transfer_files("read_file", stream, fd, [offset], [address], nbytes, [])

    def write_file(self, stream: Stream, fd: int, offset: int, address: int, nbytes: int) -> int:
        return self._transfer_files("write_file", stream, fd, [offset], [address], nbytes, [])

    def read_files(self, stream: Stream, fd: int, offsets: list[int], addresses: list[int], nbytes: int, gates: list[int]) -> None:
        self._transfer_files("read_file", stream, fd, offsets, addresses, nbytes, gates)

    def write_files(self, stream: Stream, fd: int, offsets: list[int], addresses: list[int], nbytes: int, gates: list[int]) -> None:
        self._transfer_files("write_file", stream, fd, offsets, addresses, nbytes, gates)

    def _transfer_files(
        self, call: str, stream: Stream, fd: int, offsets: list[int], addresses: list[int], nbytes: int, gates: list[int]
    ) -> int:
        """Returns the last gate, 0 for none."""
        self._advance()
        queue = self._queue(call, stream)
        self._check_size(call, nbytes)
        if len(offsets) != len(addresses):
            raise LogicError(f"{call}: {len(offsets)} offsets but {len(addresses)} addresses")
        if not offsets:
            return 0
        if fd < 0 or min(offsets) < 0:
            raise LogicError(f"{call}: file descriptor {fd} and offset {min(offsets)} must not be negative")
        if nbytes > 0:
            self._space.check_hosts(call, addresses, nbytes)
        transfers: list[EmulatedTransfer] = []
        for i in range(len(offsets)):
            transfer = self._schedule.new_transfer(fd, offsets[i], addresses[i], nbytes, call == "write_file", self._space)
            if self._failures.armed or self._hangs.armed:
                self._order_faults(call, transfer)
            self._handles += 1
            self._transfers[self._handles] = transfer
            gates.append(self._handles)
            if queue.direct:  # what goes wrong now is raised, and the others are not queued
                self._schedule.start([transfer])
                self._schedule.advance()
            else:
                transfers.append(transfer)
        if transfers:
            self._schedule.submit(queue, TransferStart(self._schedule, transfers))
        return gates[-1]

    def _order_faults(self, call: str, transfer: EmulatedTransfer) -> None:
        order = self._failures.next(call)
        transfer.broken = order is not None and order.effect == EFFECT_ERROR
        transfer.short = order is not None and order.effect == EFFECT_SHORT
        hanging = self._hangs.next(call)
        transfer.hold = hanging.gate if hanging is not None else None

    def wait_gate(self, stream: Stream, gate: int) -> None:
        self.wait_gates(stream, [gate])

    def wait_gates(self, stream: Stream, gates: list[int]) -> None:
        self._begin("wait_gate")
        transfers = [self._transfer("wait_gate", gate) for gate in gates]
        queue = self._queue("wait_gate", stream)
        if queue.direct:
            transfers = [transfer for transfer in transfers if transfer.state == GATE_PENDING]
        if transfers:
            self._schedule.submit(queue, TransferWait(transfers))

    def poll_gate(self, gate: int) -> int:
        self._advance()
        return self._transfer("poll_gate", gate).state

    def gate_error(self, gate: int) -> str:
        return self._transfer("gate_error", gate).error

    def release_gate(self, gate: int) -> None:
        self._advance()
        transfer = self._transfer("release_gate", gate)
        if transfer.state == GATE_PENDING:
            raise LogicError(f"release_gate: gate {gate} is still closed: {transfer.describe()}")
        if transfer.awaited():
            raise LogicError(f"release_gate: queued work still waits for gate {gate}: {transfer.describe()}")
        del self._transfers[gate]

    # --- the books

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
        """Streams of `create_stream`: the default stream is not counted."""
        return len(self._queues) - (1 if DEFAULT_STREAM in self._queues else 0)

    @property
    def gates_live(self) -> int:
        return len(self._transfers)

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
        """Whether nothing is queued and every gate of a transfer is open; runs nothing."""
        return self._schedule.idle()

    def leaks(self) -> list[str]:
        """What has been taken and not given back, one text each."""
        found = self._space.leaks()
        found += [f"stream {handle}" for handle in self._queues if handle != DEFAULT_STREAM]
        found += [f"event {handle}" for handle in self._events]
        found += [f"gate {handle} of the {transfer.describe()}" for handle, transfer in self._transfers.items()]
        return found

    def check_invariants(self) -> None:
        self._space.check_invariants()
        for handle, queue in self._queues.items():
            assert queue.handle == handle
            assert not queue.retired
            assert queue.finished + len(queue.pending) == queue.submitted
            assert not (queue.direct and queue.pending)

    def close(self) -> None:
        if self._closed:
            return
        stuck = ""
        try:
            self._schedule.finish(None)
        except LogicError as error:
            stuck = str(error)
        self._closed = True
        self._schedule.close()
        found = self.leaks()
        self._space.clear()
        self._queues = {}
        self._events = {}
        self._transfers = {}
        if stuck:
            raise LogicError(f"the device was closed with work that cannot finish: {stuck}")
        if found:
            more = f" and {len(found) - 16} more" if len(found) > 16 else ""
            raise LogicError(f"the device was closed while {len(found)} things were not given back: {'; '.join(found[:16])}{more}")
