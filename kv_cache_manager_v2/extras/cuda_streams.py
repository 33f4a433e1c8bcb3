"""Streams, events and the work queued on streams of one CUDA device.

Streams and events are CUDA handles as ints; a stream may be the engine's own. Events are created without timing and are pooled. An
event returns to the pool only when it is complete, because a new event must be complete until it is recorded.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Final

from kv_cache_manager_v2.errors import KVCacheError, LogicError
from kv_cache_manager_v2.extras.cuda_context import SUCCESS, CudaContext
from kv_cache_manager_v2.extras.cuda_memory import Allocations
from kv_cache_manager_v2.ids import Stream

if TYPE_CHECKING:
    from cuda.bindings.driver import CUdeviceptr

log = logging.getLogger(__name__)

ERROR_NOT_READY: Final = 600
EVENT_POOL_LIMIT: Final = 1024  # idle events kept; the rest is destroyed
POINTER_CACHE_LIMIT: Final = 1 << 16  # CUdeviceptr objects kept, about 150 bytes each
LEGACY_STREAMS: Final = (0, 1)  # both handles of the legacy default stream, which batch copies refuse
DEFAULT_STREAMS: Final = (*LEGACY_STREAMS, 2)  # and the per-thread default stream

# The first CUDA releases with the entry point that cuMemcpyBatchAsync calls: in the bindings of CUDA 12, and in those of 13.
BATCH_SINCE_12: Final = 12080
BATCH_SINCE_13: Final = 13000

IDENTITY_SINCE: Final = 12000  # the first CUDA release with cuStreamGetId

# Host functions that are queued and have not run. They and the C callback are kept in the module, so that they live as long as CUDA
# has their addresses.
_queued_functions: dict[int, Callable[[], None]] = {}
_function_keys = itertools.count(1)


def _run_queued(key: int | None) -> None:
    function = _queued_functions.pop(key or 0)
    try:
        function()
    except BaseException:  # CUDA's own thread calls this function and cannot handle exceptions
        log.exception("a host function launched on a stream raised; the stream goes on")


_TRAMPOLINE: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_run_queued)
_TRAMPOLINE_ADDRESS: Final = ctypes.cast(_TRAMPOLINE, ctypes.c_void_p).value or 0


class _Pointers(dict[int, "CUdeviceptr"]):
    """A cache of CUdeviceptr objects by address. Batch copies need such objects, and the addresses of slots recur."""

    def __init__(self, make: type[CUdeviceptr]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, address: int) -> CUdeviceptr:
        if len(self) >= POINTER_CACHE_LIMIT:
            self.clear()
        pointer = self[address] = self._make(address)
        return pointer


class CudaStreams:
    """Streams, events, copies and host functions. Every handle is CUDA's own, as an int."""

    def __init__(self, bindings: ModuleType, context: CudaContext) -> None:
        if TYPE_CHECKING:
            from cuda.bindings import driver as api
        else:
            api = bindings
        self._context: Final = context
        self._cuStreamCreate = api.cuStreamCreate
        self._cuStreamDestroy = api.cuStreamDestroy
        self._cuStreamWaitEvent = api.cuStreamWaitEvent
        self._cuStreamWaitValue32 = api.cuStreamWaitValue32
        self._cuEventCreate = api.cuEventCreate
        self._cuEventDestroy = api.cuEventDestroy
        self._cuEventRecord = api.cuEventRecord
        self._cuEventQuery = api.cuEventQuery
        self._cuEventSynchronize = api.cuEventSynchronize
        self._cuMemcpyAsync = api.cuMemcpyAsync
        self._cuLaunchHostFunc = api.cuLaunchHostFunc
        self._stream_flags = int(api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        # A thread that waits for an event sleeps instead of spinning, which would slow the I/O threads.
        self._event_flags = int(api.CUevent_flags.CU_EVENT_DISABLE_TIMING | api.CUevent_flags.CU_EVENT_BLOCKING_SYNC)
        self._wait_flags = int(api.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        # Since CUDA 12 only 64-bit stream memory operations have an attribute. Devices that have these have 32-bit ones too.
        memory_operations = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
        self.can_wait_for_memory: Final = bool(context.attribute(memory_operations))
        since = BATCH_SINCE_13 if api.CUDA_VERSION >= BATCH_SINCE_13 else BATCH_SINCE_12
        self.has_batch_copy: Final = hasattr(bindings, "cuMemcpyBatchAsync") and context.version >= since
        if self.has_batch_copy:
            self._cuMemcpyBatchAsync = api.cuMemcpyBatchAsync
            attributes = api.CUmemcpyAttributes()
            attributes.srcAccessOrder = api.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
            self._batch_attributes = [attributes]
        self.has_identity: Final = hasattr(bindings, "cuStreamGetId") and context.version >= IDENTITY_SINCE
        if self.has_identity:
            self._cuStreamGetId = api.cuStreamGetId
        self._pointers = _Pointers(api.CUdeviceptr)
        self._streams = Allocations("stream")
        self._events = Allocations("event")
        self._idle_events: list[int] = []  # created, complete and unused

    # --- streams

    def create_stream(self) -> Stream:
        """A new stream that does not synchronise with the legacy default stream."""
        with self._context:
            stream = int(self._context.value("cuStreamCreate", self._cuStreamCreate(self._stream_flags)))
        self._streams.add(stream)
        return Stream(stream)

    def destroy_stream(self, stream: Stream) -> None:
        """Destroy a stream of `create_stream`. Queued work still runs."""
        self._streams.require(stream)
        with self._context:
            self._context.check("cuStreamDestroy", self._cuStreamDestroy(stream))
        self._streams.remove(stream)

    def stream_identity(self, stream: Stream) -> int:
        """A positive number that no later stream with this handle has; 0 if CUDA has no such number."""
        if not self.has_identity:
            return 0
        result: tuple[object, int | None] = (None, None)
        if stream not in DEFAULT_STREAMS:  # in each context or thread these are different streams
            result = self._cuStreamGetId(stream)
        if result[0] != SUCCESS:
            try:
                with self._context:
                    result = self._cuStreamGetId(stream)
            except KVCacheError:
                return 0
        return result[1] + 1 if result[0] == SUCCESS and result[1] is not None else 0

    # --- events

    def create_event(self) -> int:
        """An event without timing, from the pool if one is idle."""
        try:
            event = self._idle_events.pop()
        except IndexError:
            with self._context:
                event = int(self._context.value("cuEventCreate", self._cuEventCreate(self._event_flags)))
        self._events.add(event)
        return event

    def destroy_event(self, event: int) -> None:
        """Free an event: to the pool if it is complete; else CUDA destroys it once it is."""
        self._events.require(event)
        if len(self._idle_events) < EVENT_POOL_LIMIT and self._cuEventQuery(event)[0] == SUCCESS:
            self._events.remove(event)
            self._idle_events.append(event)
            return
        self._destroy_event(event)
        self._events.remove(event)

    def _destroy_event(self, event: int) -> None:
        with self._context:
            self._context.check("cuEventDestroy", self._cuEventDestroy(event))

    def record_event(self, event: int, stream: Stream) -> None:
        """Record the event at the end of the stream's queue."""
        with self._context:
            self._context.check("cuEventRecord", self._cuEventRecord(event, stream))

    def wait_event(self, stream: Stream, event: int) -> None:
        """Make the stream wait for the event's latest record."""
        with self._context:
            self._context.check("cuStreamWaitEvent", self._cuStreamWaitEvent(stream, event, 0))

    def query_event(self, event: int) -> bool:
        """Whether the event's latest record is complete. Needs no context, so it is cheap to poll."""
        result = self._cuEventQuery(event)
        if result[0] == SUCCESS:
            return True
        if result[0] == ERROR_NOT_READY:
            return False
        raise self._context.error("cuEventQuery", result[0])

    def synchronize_event(self, event: int) -> None:
        """Block the host until the event's latest record is complete."""
        with self._context:
            self._context.check("cuEventSynchronize", self._cuEventSynchronize(event))

    # --- work

    def copy(self, stream: Stream, destination: int, source: int, nbytes: int) -> None:
        """Queue one copy; nothing to copy is a no-op."""
        if nbytes == 0:
            return
        with self._context:
            self._context.check("cuMemcpyAsync", self._cuMemcpyAsync(destination, source, nbytes, stream))

    def copy_batch(self, stream: Stream, destinations: list[int], sources: list[int], nbytes: int) -> None:
        """Queue copies of `nbytes` each, which run in any order. One CUDA call, where a batch copy is available."""
        count = len(destinations)
        if count != len(sources):
            raise LogicError(f"a batch has {count} destinations and {len(sources)} sources: must be as many")
        if count == 0 or nbytes == 0:
            return
        with self._context:
            if not self.has_batch_copy or stream in LEGACY_STREAMS:
                for destination, source in zip(destinations, sources, strict=True):
                    self._context.check("cuMemcpyAsync", self._cuMemcpyAsync(destination, source, nbytes, stream))
                return
            to, of = self._pointers.__getitem__, self._pointers.__getitem__
            result = self._cuMemcpyBatchAsync(
                list(map(to, destinations)), list(map(of, sources)), [nbytes] * count, count, self._batch_attributes, [0], 1, stream
            )
            self._context.check("cuMemcpyBatchAsync", result)

    def wait_for_value(self, stream: Stream, device_address: int, value: int) -> None:
        """Make the stream wait until the 32-bit word at the address reaches `value` in cyclic order."""
        with self._context:
            result = self._cuStreamWaitValue32(stream, device_address, value, self._wait_flags)
            self._context.check("cuStreamWaitValue32", result)

    def launch(self, stream: Stream, function: Callable[[], None]) -> None:
        """Queue a host function. It runs on a thread of CUDA and must make no CUDA calls. Its exceptions are logged."""
        key = next(_function_keys)
        _queued_functions[key] = function
        try:
            with self._context:
                self._context.check("cuLaunchHostFunc", self._cuLaunchHostFunc(stream, _TRAMPOLINE_ADDRESS, key))
        except BaseException:
            del _queued_functions[key]
            raise

    # --- closing

    def free_all(self) -> list[str]:
        """Destroy all streams and events; returns a text for each that its owner did not free."""
        leaks = self._streams.leaks() + self._events.leaks()
        for stream in list(self._streams.live):
            self.destroy_stream(Stream(stream))
        for event in [*self._events.live, *self._idle_events]:
            self._destroy_event(event)
        self._events.live.clear()
        self._idle_events.clear()
        return leaks
