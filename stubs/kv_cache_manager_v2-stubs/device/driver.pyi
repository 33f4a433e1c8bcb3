"""The one seam to memory, streams and files: every call that touches a device goes through a `Driver`.

Rule: nothing above this file knows which device it runs on, and nothing below it knows what a page is. All calls may raise
`CuError` (or `OutOfMemoryError` where a call allocates) and then have changed nothing.

Order: work queued on one stream runs in the order in which it was queued; work on different streams runs in any order, unless an
event or a gate orders it. Addresses are ints. All sizes are bytes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from kv_cache_manager_v2.device.checksums import FileChecksums
from kv_cache_manager_v2.ids import Stream

GATE_PENDING: Final = 0
GATE_DONE: Final = 1
GATE_FAILED: Final = 2
GATE_TIMED_OUT: Final = 3
GATE_LATE: Final = 4

class Driver(ABC):
    """Memory, streams, events, copies and file transfers of one device.

    A *gate* is what a file transfer returns: a door that opens when the transfer ends. A stream can be made to wait for it
    (`wait_gate`), the host can look at it (`poll_gate`). It opens whatever happens, and says how the transfer ended.
    """

    def __reduce__(self) -> str: ...
    @abstractmethod
    def describe(self) -> str:
        """One line for people: the device and how it is driven."""

    @abstractmethod
    def granularity(self) -> int:
        """Smallest size and alignment of a physical chunk; chunk sizes are multiples of it."""

    @abstractmethod
    def reserve(self, nbytes: int) -> int:
        """Reserve a device address range, backed by nothing; returns its address."""

    @abstractmethod
    def release_reservation(self, address: int, nbytes: int) -> None:
        """Give back a whole range of `reserve`, with nothing mapped in it."""

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
        """Undo `map_chunk` of exactly this range; the caller has made sure that no work still uses it."""

    @abstractmethod
    def set_access(self, address: int, nbytes: int) -> None:
        """Make a mapped range readable and writable by the device."""

    @abstractmethod
    def host_register(self, address: int, nbytes: int) -> None:
        """Pin a range of host memory and make it known to the device. Raises HostRegistrationError."""

    @abstractmethod
    def host_unregister(self, address: int, nbytes: int) -> None:
        """Undo `host_register` of exactly this range."""

    @abstractmethod
    def create_stream(self) -> Stream:
        """A new stream that is ordered with no other."""

    @abstractmethod
    def destroy_stream(self, stream: Stream) -> None:
        """Give back a stream of `create_stream`; work already queued still runs."""

    @abstractmethod
    def create_event(self) -> int:
        """A new event, complete until it is recorded. It may be recorded any number of times."""

    @abstractmethod
    def destroy_event(self, event: int) -> None:
        """Give back an event."""

    @abstractmethod
    def record_event(self, event: int, stream: Stream) -> None:
        """Mark the present end of the stream's queue; the event is complete when all work before the mark is."""

    @abstractmethod
    def wait_event(self, stream: Stream, event: int) -> None:
        """Work queued on the stream from now on waits until the event's latest record is complete."""

    @abstractmethod
    def query_event(self, event: int) -> bool:
        """Whether the event's latest record is complete; never blocks."""

    @abstractmethod
    def synchronize_event(self, event: int) -> None:
        """Block the host until the event's latest record is complete."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until all queued work, file transfers included, is complete."""

    @abstractmethod
    def copy(self, stream: Stream, destination: int, source: int, nbytes: int) -> None:
        """Queue one copy between any two of device memory and registered host memory; the source is read when it runs."""

    @abstractmethod
    def copy_batch(self, stream: Stream, destinations: list[int], sources: list[int], nbytes: int) -> None:
        """Queue copies of `nbytes` each, of equal count, unordered among each other; empty lists are a no-op."""

    @abstractmethod
    def launch(self, stream: Stream, function: Callable[[], None]) -> None:
        """Queue a host function in the stream's order: on the emulated device, the engine's kernel."""

    @abstractmethod
    def read_file(self, stream: Stream, fd: int, offset: int, address: int, nbytes: int) -> int:
        """Read a file range into host memory once all work queued on the stream so far is complete; returns its gate.

        The stream itself does not wait unless `wait_gate` says so. Transfers start in submission order on a bounded pool and run
        in parallel. A short read is an error: the gate says GATE_FAILED.
        """

    @abstractmethod
    def write_file(self, stream: Stream, fd: int, offset: int, address: int, nbytes: int) -> int:
        """As `read_file`, from host memory into the file range."""

    def read_files(self, stream: Stream, fd: int, offsets: list[int], addresses: list[int], nbytes: int, gates: list[int]) -> None:
        """As `read_file` for ranges of `nbytes` each, of equal count, in this order: a driver may make one call cheaper than many.

        Appends the gate of each to `gates`; on an exception, of those that were queued.
        """

    def write_files(self, stream: Stream, fd: int, offsets: list[int], addresses: list[int], nbytes: int, gates: list[int]) -> None:
        """As `read_files`, from host memory into the file ranges."""

    def protect_file(self, fd: int, checksums: FileChecksums) -> bool:
        """Transfers of this descriptor make and compare these checksums, until `unprotect_file`. Whether the driver does that.

        A driver that does it lets `FileChecksums.move` carry out the transfers. A read of damaged bytes then ends in GATE_FAILED.
        O(1), no call of the device.
        """

    def unprotect_file(self, fd: int) -> None:
        """The descriptor is about to be closed. Transfers in flight keep their checksums. O(1), no call of the device."""

    @abstractmethod
    def wait_gate(self, stream: Stream, gate: int) -> None:
        """Work queued on the stream from now on waits until the gate opens."""

    def wait_gates(self, stream: Stream, gates: list[int]) -> None:
        """As `wait_gate` for each of them."""

    @abstractmethod
    def poll_gate(self, gate: int) -> int:
        """GATE_PENDING, GATE_DONE, GATE_FAILED, GATE_TIMED_OUT or GATE_LATE; never blocks.

        A timed-out gate turns into GATE_LATE when its transfer really ends, never into GATE_DONE: what a stream did meanwhile
        may have read or overwritten the same memory.
        """

    @abstractmethod
    def gate_error(self, gate: int) -> str:
        """What went wrong with a failed or timed-out transfer, with the file range; empty for one that did not."""

    @abstractmethod
    def release_gate(self, gate: int) -> None:
        """Forget a gate that is not pending and that no queued work still waits for."""

    @abstractmethod
    def close(self) -> None:
        """Finish all work and give everything back; raises LogicError naming what the caller leaked."""

class IdentifyingDriver(Driver):
    """A driver that can tell a stream from a later one with the same handle, which saves waits between works of one stream."""

    @abstractmethod
    def stream_identity(self, stream: Stream) -> int:
        """A positive number that no other stream of this driver ever has; 0 if the driver cannot tell, or has no such stream.

        Cheap, and never raises.
        """
