"""Streams, events and the work queued on streams of one CUDA device.

Rule: streams and events are plain ints, and a stream may be the engine's own. Events carry no timing and are pooled; an event goes
back to the pool only when it is complete, because a new event must be complete until it is recorded.
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
from kv_cache_manager_v2.extras.cuda_memory import Holdings
from kv_cache_manager_v2.ids import Stream

if TYPE_CHECKING:
    from cuda.bindings.driver import CUdeviceptr

log = logging.getLogger(__name__)

ERROR_NOT_READY: Final = 600
EVENT_POOL_LIMIT: Final = 1024  # idle events kept; the rest is destroyed
POINTER_CACHE_LIMIT: Final = 1 << 16  # CUdeviceptr objects kept, about 150 bytes each
LEGACY_STREAMS: Final = (0, 1)  # the legacy default stream under both its names: batch copies refuse it
DEFAULT_STREAMS: Final = (*LEGACY_STREAMS, 2)  # and the default stream of the calling thread

# The first releases whose library has the entry point behind cuMemcpyBatchAsync: that of the bindings of CUDA 12, and that of 13.
BATCH_SINCE_12: Final = 12080
BATCH_SINCE_13: Final = 13000

IDENTITY_SINCE: Final = 12000  # the first release whose library tells streams apart

# Host functions that are queued and have not run. They live here, and the one C callback with them, so that neither can vanish
# while the driver still holds its address.
_queued_functions: dict[int, Callable[[], None]] = {}
_function_keys = itertools.count(1)


def _run_queued(key: int | None) -> None:
    function = _queued_functions.pop(key or 0)
    try:
        function()
    except BaseException:  # nobody above us could catch it: the caller is the driver's own thread
        log.exception("a host function launched on a stream raised; the stream goes on")


_TRAMPOLINE: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_run_queued)
_TRAMPOLINE_ADDRESS: Final = ctypes.cast(_TRAMPOLINE, ctypes.c_void_p).value or 0


class _Pointers(dict[int, "CUdeviceptr"]):
    """CUdeviceptr objects by address. Batch copies take only such objects, and the addresses of slots come again and again."""

    def __init__(self, make: type[CUdeviceptr]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, address: int) -> CUdeviceptr:
        if len(self) >= POINTER_CACHE_LIMIT:
            self.clear()
        pointer = self[address] = self._make(address)
        return pointer


class CudaStreams:
    """Streams, events, copies and host functions; every handle is the driver's own, as an int."""

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
        # A host that waits for an event sleeps; the default would spin, and the I/O threads wait a lot.
        self._event_flags = int(api.CUevent_flags.CU_EVENT_DISABLE_TIMING | api.CUevent_flags.CU_EVENT_BLOCKING_SYNC)
        self._wait_flags = int(api.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        # Of the stream memory operations of CUDA 12 and later only the 64-bit ones have an attribute; they are the rarer kind.
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
        self._streams = Holdings("stream")
        self._events = Holdings("event")
        self._idle_events: list[int] = []  # created, complete, with nobody

    # --- streams

    def create_stream(self) -> Stream:
        """A new stream that does not synchronise with the legacy default stream."""
        with self._context:
            stream = int(self._context.value("cuStreamCreate", self._cuStreamCreate(self._stream_flags)))
        self._streams.add(stream)
        return Stream(stream)

    def destroy_stream(self, stream: Stream) -> None:
        """Give back a stream of `create_stream`; queued work still runs."""
        self._streams.require(stream)
        with self._context:
            self._context.check("cuStreamDestroy", self._cuStreamDestroy(stream))
        self._streams.strike(stream)

    def stream_identity(self, stream: Stream) -> int:
        """A positive number that no later stream with this handle has; 0 where the driver has no such number."""
        if not self.has_identity:
            return 0
        result: tuple[object, int | None] = (None, None)
        if stream not in DEFAULT_STREAMS:  # those are another stream's in each context, or thread
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
        """Give back an event: to the pool if it is complete, else to the driver, which frees it when it is."""
        self._events.require(event)
        if len(self._idle_events) < EVENT_POOL_LIMIT and self._cuEventQuery(event)[0] == SUCCESS:
            self._events.strike(event)
            self._idle_events.append(event)
            return
        self._destroy_event(event)
        self._events.strike(event)

    def _destroy_event(self, event: int) -> None:
        with self._context:
            self._context.check("cuEventDestroy", self._cuEventDestroy(event))

    def record_event(self, event: int, stream: Stream) -> None:
        """Mark the present end of the stream's queue."""
        with self._context:
            self._context.check("cuEventRecord", self._cuEventRecord(event, stream))

    def wait_event(self, stream: Stream, event: int) -> None:
        """Let the stream wait for the event's latest record."""
        with self._context:
            self._context.check("cuStreamWaitEvent", self._cuStreamWaitEvent(stream, event, 0))

    def query_event(self, event: int) -> bool:
        """Whether the event's latest record is complete. Needs no context, hence cheap enough to poll."""
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
        """Queue copies of `nbytes` each, unordered among each other: one driver call where there is one for it."""
        count = len(destinations)
        if count != len(sources):
            raise LogicError(f"a batch has {count} destinations and {len(sources)} sources: give as many of one as of the other")
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
        """Let the stream wait until the 32-bit word at the address is not cyclically before `value`."""
        with self._context:
            result = self._cuStreamWaitValue32(stream, device_address, value, self._wait_flags)
            self._context.check("cuStreamWaitValue32", result)

    def launch(self, stream: Stream, function: Callable[[], None]) -> None:
        """Queue a host function. It runs on a thread of the driver and must make no device calls; what it raises is logged."""
        key = next(_function_keys)
        _queued_functions[key] = function
        try:
            with self._context:
                self._context.check("cuLaunchHostFunc", self._cuLaunchHostFunc(stream, _TRAMPOLINE_ADDRESS, key))
        except BaseException:
            del _queued_functions[key]
            raise

    # --- the end

    def give_back_all(self) -> list[str]:
        """Destroy all streams and events; returns those that their owners should have given back, in words."""
        leaks = self._streams.leaks() + self._events.leaks()
        for stream in list(self._streams.live):
            self.destroy_stream(Stream(stream))
        for event in [*self._events.live, *self._idle_events]:
            self._destroy_event(event)
        self._events.live.clear()
        self._idle_events.clear()
        return leaks
