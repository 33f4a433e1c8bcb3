"""A driver that costs nothing: memory is addresses only, every copy is done when it is queued.

Rule: what is timed on it is bookkeeping alone. Its own calls are interpreted in every arm, some 50 ns each. Host and disk tiers
take their memory from the operating system, so slots are kept small.
"""

from __future__ import annotations

from collections.abc import Callable

from kv_cache_manager_v2.device.checksums import FileChecksums
from kv_cache_manager_v2.device.driver import GATE_DONE, IdentifyingDriver
from kv_cache_manager_v2.ids import Stream


class FreeDriver(IdentifyingDriver):
    """Streams and events that are always idle, over memory that does not exist."""

    def __init__(self) -> None:
        self._next_address = 1 << 40
        self._handles = 0

    def describe(self) -> str:
        return "no device: copies take no time"

    def granularity(self) -> int:
        return 2 << 20

    def reserve(self, nbytes: int) -> int:
        address = self._next_address
        self._next_address += nbytes
        return address

    def release_reservation(self, address: int, nbytes: int) -> None: ...

    def create_chunk(self, nbytes: int) -> int:
        self._handles += 1
        return self._handles

    def destroy_chunk(self, chunk: int) -> None: ...

    def map_chunk(self, address: int, nbytes: int, chunk: int) -> None: ...

    def unmap(self, address: int, nbytes: int) -> None: ...

    def set_access(self, address: int, nbytes: int) -> None: ...

    def host_register(self, address: int, nbytes: int) -> None: ...

    def host_unregister(self, address: int, nbytes: int) -> None: ...

    def create_stream(self) -> Stream:
        self._handles += 1
        return Stream(self._handles)

    def destroy_stream(self, stream: Stream) -> None: ...

    def stream_identity(self, stream: Stream) -> int:
        return stream  # no handle is used twice

    def create_event(self) -> int:
        self._handles += 1
        return self._handles

    def destroy_event(self, event: int) -> None: ...

    def record_event(self, event: int, stream: Stream) -> None: ...

    def wait_event(self, stream: Stream, event: int) -> None: ...

    def query_event(self, event: int) -> bool:
        return True

    def synchronize_event(self, event: int) -> None: ...

    def synchronize(self) -> None: ...

    def copy(self, stream: Stream, destination: int, source: int, nbytes: int) -> None: ...

    def copy_batch(self, stream: Stream, destinations: list[int], sources: list[int], nbytes: int) -> None: ...

    def launch(self, stream: Stream, function: Callable[[], None]) -> None:
        function()

    def read_file(self, stream: Stream, fd: int, offset: int, address: int, nbytes: int) -> int:
        self._handles += 1
        return self._handles

    def write_file(self, stream: Stream, fd: int, offset: int, address: int, nbytes: int) -> int:
        return self.read_file(stream, fd, offset, address, nbytes)

    def protect_file(self, fd: int, checksums: FileChecksums) -> bool:
        return True  # no byte is moved

    def wait_gate(self, stream: Stream, gate: int) -> None: ...

    def poll_gate(self, gate: int) -> int:
        return GATE_DONE

    def gate_error(self, gate: int) -> str:
        return ""

    def release_gate(self, gate: int) -> None: ...

    def close(self) -> None: ...
