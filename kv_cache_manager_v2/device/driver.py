"""The device interface: every call that touches device memory, a stream or a file goes through a `Driver`.

No caller knows which device it runs on, and no driver knows what a page is. Any call may raise `CuError`, or `OutOfMemoryError` if
it allocates; it has then changed nothing. A call that another exception leaves, like KeyboardInterrupt, has been carried out or has
changed nothing. A call that frees an object raises an error if it is called for it again.

Work queued on one stream runs in the order in which it was queued. Work on different streams runs in any order, unless an event or
a gate orders it. Addresses are ints. Sizes are in bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.device.checksums import FileChecksums
from kv_cache_manager_v2.errors import LogicError
from kv_cache_manager_v2.ids import Stream

# The results of `poll_gate`.
GATE_PENDING: Final = 0  # the transfer has not ended: the gate is closed, and streams wait for it
GATE_DONE: Final = 1  # ended, all bytes transferred
GATE_FAILED: Final = 2  # ended with an error or a short count; the gate is open, so that no stream hangs
GATE_TIMED_OUT: Final = 3  # opened by the time limit: the transfer may still run, so its memory must not be reused
GATE_LATE: Final = 4  # timed out, and has ended since: its memory may be reused, its bytes are lost


@mypyc_attr(allow_interpreted_subclasses=True)
class Driver(ABC):
    """Memory, streams, events, copies and file transfers of one device.

    A file transfer returns a *gate*, which opens when the transfer ends or its time limit passes. A stream can wait for the gate
    (`wait_gate`); the host can poll it (`poll_gate`) and learn how the transfer ended.
    """

    def __reduce__(self) -> str:
        raise LogicError("a driver cannot be copied or pickled: it owns the device's memory and streams")

    @abstractmethod
    def describe(self) -> str:
        """The device and how it is driven, as one line of text."""

    # --- device memory: an address range is reserved once, and physical chunks are mapped into it as it grows

    @abstractmethod
    def granularity(self) -> int:
        """The smallest size and alignment of a physical chunk. Chunk sizes are multiples of it."""

    @abstractmethod
    def reserve(self, nbytes: int) -> int:
        """Reserve a range of device addresses without memory; returns its address."""

    @abstractmethod
    def release_reservation(self, address: int, nbytes: int) -> None:
        """Release a whole range of `reserve`, in which nothing is mapped."""

    @abstractmethod
    def create_chunk(self, nbytes: int) -> int:
        """Allocate physical device memory; returns its handle. Raises OutOfMemoryError."""

    @abstractmethod
    def destroy_chunk(self, chunk: int) -> None:
        """Free physical memory that is mapped nowhere."""

    @abstractmethod
    def map_chunk(self, address: int, nbytes: int, chunk: int) -> None:
        """Map a chunk at an address inside a reservation. It cannot be accessed before `set_access`."""

    @abstractmethod
    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap one chunk, exactly as it was mapped. The caller ensures that no queued work uses it."""

    @abstractmethod
    def set_access(self, address: int, nbytes: int) -> None:
        """Make a mapped range readable and writable by the device."""

    # --- host memory

    @abstractmethod
    def host_register(self, address: int, nbytes: int) -> None:
        """Pin a range of host memory for access by the device. Raises HostRegistrationError."""

    @abstractmethod
    def host_unregister(self, address: int, nbytes: int) -> None:
        """Unpin a range, exactly as it was registered."""

    # --- streams and events

    @abstractmethod
    def create_stream(self) -> Stream:
        """A new stream, not synchronised with any other."""

    @abstractmethod
    def destroy_stream(self, stream: Stream) -> None:
        """Destroy a stream of `create_stream`. Work already queued on it still runs."""

    @abstractmethod
    def create_event(self) -> int:
        """A new event. It is complete until it is recorded, and may be recorded any number of times."""

    @abstractmethod
    def destroy_event(self, event: int) -> None:
        """Destroy an event."""

    @abstractmethod
    def record_event(self, event: int, stream: Stream) -> None:
        """Record the event at the end of the stream's queue. It is complete when all work before it is."""

    @abstractmethod
    def wait_event(self, stream: Stream, event: int) -> None:
        """Make work queued on the stream from now on wait until the event's latest record is complete."""

    @abstractmethod
    def query_event(self, event: int) -> bool:
        """Whether the event's latest record is complete. Never blocks."""

    @abstractmethod
    def synchronize_event(self, event: int) -> None:
        """Block the host until the event's latest record is complete."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until all queued work, file transfers included, is complete."""

    def order(self, stream: Stream) -> None:
        """Order the engine's own accesses to pages after all work queued on the stream so far.

        An engine that calls it between the manager's calls of a step and its own work runs on both devices. On a GPU it does
        nothing: the engine's kernels are queued on that stream. On the emulated device, numpy and torch on the CPU stand for
        kernels, and know no stream: the host waits until the stream's work is complete, and gets the errors of that work.
        """
        return

    # --- work

    @abstractmethod
    def copy(self, stream: Stream, destination: int, source: int, nbytes: int) -> None:
        """Queue one copy within or between device memory and registered host memory. The source is read when the copy runs."""

    @abstractmethod
    def copy_batch(self, stream: Stream, destinations: list[int], sources: list[int], nbytes: int) -> None:
        """Queue one copy of `nbytes` for each pair of addresses. The copies run in any order; empty lists queue nothing."""

    @abstractmethod
    def launch(self, stream: Stream, function: Callable[[], None]) -> None:
        """Queue a host function in the stream's order. On the emulated device this plays the part of a kernel of the engine."""

    # --- files

    @abstractmethod
    def read_file(self, stream: Stream, fd: int, offset: int, address: int, nbytes: int) -> int:
        """Read a file range into host memory once all work queued on the stream so far is complete; returns its gate.

        The stream does not wait for the transfer; see `wait_gate`. Transfers start in submission order on a bounded pool of
        threads and run in parallel. A short read is an error: its gate is GATE_FAILED.
        """

    @abstractmethod
    def write_file(self, stream: Stream, fd: int, offset: int, address: int, nbytes: int) -> int:
        """As `read_file`, from host memory into the file range."""

    def read_files(self, stream: Stream, fd: int, offsets: list[int], addresses: list[int], nbytes: int, gates: list[int]) -> None:
        """As `read_file` for several ranges of `nbytes` each, in this order. A driver may do it at lower cost than one by one.

        Appends one gate for each range to `gates`; after an exception, one for each range that was queued.
        """
        for i in range(len(offsets)):
            gates.append(self.read_file(stream, fd, offsets[i], addresses[i], nbytes))

    def write_files(self, stream: Stream, fd: int, offsets: list[int], addresses: list[int], nbytes: int, gates: list[int]) -> None:
        """As `read_files`, from host memory into the file ranges."""
        for i in range(len(offsets)):
            gates.append(self.write_file(stream, fd, offsets[i], addresses[i], nbytes))

    def protect_file(self, fd: int, checksums: FileChecksums) -> bool:
        """Transfers of this descriptor make and compare these checksums, until `unprotect_file`. Whether the driver does that.

        A driver that does it lets `FileChecksums.move` carry out the transfers. A read of damaged bytes then ends in GATE_FAILED.
        O(1), no call of the device.
        """
        return False

    def unprotect_file(self, fd: int) -> None:
        """The descriptor is about to be closed. Transfers in flight keep their checksums. O(1), no call of the device."""
        return

    @abstractmethod
    def wait_gate(self, stream: Stream, gate: int) -> None:
        """Make work queued on the stream from now on wait until the gate opens."""

    def wait_gates(self, stream: Stream, gates: list[int]) -> None:
        """As `wait_gate`, for several gates."""
        for gate in gates:
            self.wait_gate(stream, gate)

    @abstractmethod
    def poll_gate(self, gate: int) -> int:
        """GATE_PENDING, GATE_DONE, GATE_FAILED, GATE_TIMED_OUT or GATE_LATE. Never blocks.

        A timed-out gate becomes GATE_LATE when its transfer ends, never GATE_DONE: a stream that went on may have read or
        overwritten the same memory.
        """

    def watch_gates(self, gates: list[int], changed: deque[int]) -> bool:
        """Append each of these gates to `changed` whenever its state changes from now on. Whether the driver does that.

        Any thread appends, in the order of the changes, after the change. Else the manager polls all gates with each of its calls.
        O(gates), no call of the device.
        """
        return False

    @abstractmethod
    def gate_error(self, gate: int) -> str:
        """Why a transfer failed or timed out, with its file range; empty for any other gate."""

    @abstractmethod
    def release_gate(self, gate: int) -> None:
        """Free a gate that is not pending and that no queued work waits for."""

    @abstractmethod
    def close(self) -> None:
        """Finish all work and free everything. Raises LogicError with a list of what the caller has not freed."""


@mypyc_attr(allow_interpreted_subclasses=True)
class IdentifyingDriver(Driver):
    """A driver that can tell a stream from a later one with the same handle. The manager then queues fewer waits."""

    @abstractmethod
    def stream_identity(self, stream: Stream) -> int:
        """A positive number that no other stream of this driver ever has; 0 if it is unknown.

        Cheap: asked for each point that is recorded. Never raises.
        """
