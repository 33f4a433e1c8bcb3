"""The CUDA driver: `Driver` on a real GPU, through `cuda.bindings.driver`.

This file only forwards calls: memory is in cuda_memory, streams and copies are in cuda_streams, file transfers in cuda_io.
Importing it needs neither the cuda package nor a GPU; creating a `CudaDriver` needs both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import SupportsFloat, SupportsIndex

from kv_cache_manager_v2.arguments import at_least, function, positive, whole
from kv_cache_manager_v2.device.checksums import FileChecksums, FileMover
from kv_cache_manager_v2.device.driver import GATE_PENDING, IdentifyingDriver
from kv_cache_manager_v2.device.file_transfers import DEFAULT_IO_THREADS, DEFAULT_TIMEOUT_S, TransferPool, move_file_range
from kv_cache_manager_v2.errors import ConfigError, KVCacheError, LogicError
from kv_cache_manager_v2.extras.cuda_context import CudaContext, load_bindings
from kv_cache_manager_v2.extras.cuda_gates import GateWords
from kv_cache_manager_v2.extras.cuda_io import CudaTransfers
from kv_cache_manager_v2.extras.cuda_memory import CudaMemory
from kv_cache_manager_v2.extras.cuda_streams import CudaStreams
from kv_cache_manager_v2.ids import INT32_MAX, Stream


class CudaDriver(IdentifyingDriver):
    """A GPU. Streams are CUDA handles as ints, so an engine can pass its own, such as torch's `stream.cuda_stream`.

    `device` is an ordinal among the visible GPUs, and `bindings` a module to use instead of `cuda.bindings.driver`. `io_threads`
    file transfers run at once. `transfer_timeout` is their time limit in seconds. `move` transfers the bytes of a file range.

    Raises DeviceUnavailableError if the device cannot be initialised. Thread safe.

    If the device has no stream memory operations, `wait_gate` blocks the calling thread until the gate opens. A host function that
    waits could deadlock: all host functions share one thread of CUDA, so it could delay one that the file transfer waits for.
    """

    def __init__(
        self,
        device: SupportsIndex = 0,
        *,
        bindings: ModuleType | None = None,
        io_threads: SupportsIndex = DEFAULT_IO_THREADS,
        transfer_timeout: SupportsFloat = DEFAULT_TIMEOUT_S,
        move: FileMover = move_file_range,
    ) -> None:
        ordinal = whole(device, "device")
        if not 0 <= ordinal <= INT32_MAX:
            raise ConfigError(f"device is {ordinal}: must be the ordinal of a GPU, from 0")
        threads, timeout_s = at_least(io_threads, "io_threads", 1), positive(transfer_timeout, "transfer_timeout")
        function(move, "move")
        pool = TransferPool(threads, timeout_s)
        module = load_bindings() if bindings is None else bindings
        self._context = CudaContext(module, ordinal)
        try:
            self._memory = CudaMemory(module, self._context)
            self._streams = CudaStreams(module, self._context)
            self._words = GateWords(self._memory)
        except BaseException:
            self._context.close()
            raise
        self._transfers = CudaTransfers(self._streams, self._words, pool, move)
        self._transfer_timeout = timeout_s
        self._closed = False

    @property
    def device(self) -> int:
        """The GPU's ordinal."""
        return self._context.ordinal

    def describe(self) -> str:
        context, streams = self._context, self._streams
        version = f"{context.version // 1000}.{context.version % 1000 // 10}"
        batches = "batched copies" if streams.has_batch_copy else "single copies"
        gates = "streams wait for files" if streams.can_wait_for_memory else "the host waits for files"
        return f"CUDA device {context.ordinal} ({context.name}), driver {version}, {batches}, {gates}"

    # --- device memory

    def granularity(self) -> int:
        return self._memory.granularity

    def reserve(self, nbytes: int) -> int:
        return self._memory.reserve(nbytes)

    def release_reservation(self, address: int, nbytes: int) -> None:
        self._memory.release_reservation(address, nbytes)

    def create_chunk(self, nbytes: int) -> int:
        return self._memory.create_chunk(nbytes)

    def destroy_chunk(self, chunk: int) -> None:
        self._memory.destroy_chunk(chunk)

    def map_chunk(self, address: int, nbytes: int, chunk: int) -> None:
        self._memory.map_chunk(address, nbytes, chunk)

    def unmap(self, address: int, nbytes: int) -> None:
        self._memory.unmap(address, nbytes)

    def set_access(self, address: int, nbytes: int) -> None:
        self._memory.set_access(address, nbytes)

    # --- host memory

    def host_register(self, address: int, nbytes: int) -> None:
        self._memory.host_register(address, nbytes)

    def host_unregister(self, address: int, nbytes: int) -> None:
        self._memory.host_unregister(address, nbytes)

    # --- streams and events

    def create_stream(self) -> Stream:
        return self._streams.create_stream()

    def destroy_stream(self, stream: Stream) -> None:
        self._streams.destroy_stream(stream)

    def stream_identity(self, stream: Stream) -> int:
        return self._streams.stream_identity(stream)

    def create_event(self) -> int:
        return self._streams.create_event()

    def destroy_event(self, event: int) -> None:
        self._streams.destroy_event(event)

    def record_event(self, event: int, stream: Stream) -> None:
        self._streams.record_event(event, stream)

    def wait_event(self, stream: Stream, event: int) -> None:
        self._streams.wait_event(stream, event)

    def query_event(self, event: int) -> bool:
        return self._streams.query_event(event)

    def synchronize_event(self, event: int) -> None:
        self._streams.synchronize_event(event)

    def synchronize(self) -> None:
        self._transfers.drain()  # first: streams may wait for gates of transfers
        self._context.synchronize()

    # --- work

    def copy(self, stream: Stream, destination: int, source: int, nbytes: int) -> None:
        self._streams.copy(stream, destination, source, nbytes)

    def copy_batch(self, stream: Stream, destinations: list[int], sources: list[int], nbytes: int) -> None:
        self._streams.copy_batch(stream, destinations, sources, nbytes)

    def launch(self, stream: Stream, function: Callable[[], None]) -> None:
        self._streams.launch(stream, function)

    # --- files

    def read_file(self, stream: Stream, fd: int, offset: int, address: int, nbytes: int) -> int:
        gates: list[int] = []
        self._transfers.submit(stream, fd, [offset], [address], nbytes, False, gates)
        return gates[0]

    def write_file(self, stream: Stream, fd: int, offset: int, address: int, nbytes: int) -> int:
        gates: list[int] = []
        self._transfers.submit(stream, fd, [offset], [address], nbytes, True, gates)
        return gates[0]

    def read_files(self, stream: Stream, fd: int, offsets: list[int], addresses: list[int], nbytes: int, gates: list[int]) -> None:
        self._transfers.submit(stream, fd, offsets, addresses, nbytes, False, gates)

    def write_files(self, stream: Stream, fd: int, offsets: list[int], addresses: list[int], nbytes: int, gates: list[int]) -> None:
        self._transfers.submit(stream, fd, offsets, addresses, nbytes, True, gates)

    def protect_file(self, fd: int, checksums: FileChecksums) -> bool:
        self._transfers.checksums[fd] = checksums
        return True

    def unprotect_file(self, fd: int) -> None:
        self._transfers.checksums.pop(fd, None)

    def wait_gate(self, stream: Stream, gate: int) -> None:
        transfer = self._transfers.gate(gate)
        if transfer.state != GATE_PENDING:
            return
        if self._streams.can_wait_for_memory:
            self._streams.wait_for_value(stream, transfer.word.device_address, transfer.target)
        else:
            self._transfers.wait_open(transfer)

    def poll_gate(self, gate: int) -> int:
        return self._transfers.gate(gate).state

    def watch_gates(self, gates: list[int], changed: deque[int]) -> bool:
        for gate in gates:
            self._transfers.gate(gate).watch(gate, changed)
        return True

    def gate_error(self, gate: int) -> str:
        return self._transfers.gate(gate).error

    def release_gate(self, gate: int) -> None:
        self._transfers.release(gate)

    def close(self) -> None:
        """Finish all work and free everything. Raises LogicError with a list of leaks; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._context.inherited():
            return  # threads, context and memory belong to the parent
        leaks: list[str] = []
        failures: list[str] = []
        steps: list[Callable[[], list[str]]] = [self._finish, self._streams.free_all, self._memory.free_all]
        for step in steps:  # all of them, even after an error: the device may be lost
            try:
                leaks += step()
            except KVCacheError as error:
                failures.append(str(error))
        self._context.close()
        if failures:
            raise LogicError(f"the driver was closed, but not everything could be freed: {'; '.join(failures)}")
        if leaks:
            shown = "; ".join(leaks[:8]) + (f"; and {len(leaks) - 8} more" if len(leaks) > 8 else "")
            raise LogicError(f"the driver was closed with {len(leaks)} things not freed: {shown}")

    def _finish(self) -> list[str]:
        """Finish all work and end the threads; returns a text for each gate that was not released."""
        leaks = self._transfers.close(self._transfer_timeout)
        self._context.synchronize()
        self._words.close()
        return leaks
