"""A stand-in for the module `cuda.bindings.driver`: same signatures, same return tuples, acting on host memory.

Rule: it is stricter than the real one, never laxer. Wrong argument types raise TypeError; calls without a current context, work on
unknown handles, copies outside accessible memory and device calls from a host function return the errors that the driver
documents. `StandIn().module()` is the module; the object around it sets the scene: how many devices, how much memory, what fails.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.extras import cuda_standin_device as parts
from tests.extras import cuda_standin_types as types
from tests.extras.cuda_standin_memory import DEVICE_ALIAS, INVALID, OK, MemoryCalls
from tests.extras.cuda_standin_types import (
    CUcontext,
    CUdevice,
    CUdevice_attribute,
    CUdeviceptr,
    CUevent,
    CUmemcpyAttributes,
    CUmemcpySrcAccessOrder,
    CUresult,
    CUstream,
    count_of,
    entries,
    instance,
    integer,
)

BAD_HANDLE = CUresult.CUDA_ERROR_INVALID_HANDLE

POLL_SECONDS = 0.0005  # how often a waiting stream looks at what it waits for
CONTEXT = 0xC0000  # handle of device 0's primary context

WITHOUT_LIBRARY = {"cuGetErrorName", "cuGetErrorString"}
BEFORE_INIT = {"cuInit", "cuDriverGetVersion", *WITHOUT_LIBRARY}
WITHOUT_CONTEXT: tuple[str, ...] = (
    "cuDevice",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent",
    "cuEventQuery",
    "cuMemGetAllocation",
    "cuMemAddress",
)
WITHOUT_CONTEXT += ("cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess")  # beginnings of names


class DynamicLibNotFoundError(RuntimeError):
    """What the real package raises when there is no driver library."""


class StandIn(MemoryCalls):
    """The driver library, its devices and their memory."""

    def __init__(
        self,
        *,
        devices: int = 1,
        version: int = 13000,
        bindings: int = types.CUDA_VERSION,
        library: bool = True,
        memory_operations: bool = True,
        rdma: bool = True,
        granularity: int = 2 << 20,
        memory: int = 1 << 30,
        pinnable: int = 1 << 30,
    ) -> None:
        super().__init__(devices, granularity, memory, pinnable)
        self.version = version  # of the driver
        self.bindings = bindings  # what the bindings were made for
        self.library = library  # whether there is a driver library at all
        self.attributes = {102: 1, 110: int(rdma), 122: int(memory_operations)}
        self.calls: Counter[str] = Counter()  # how often each call was made
        self.faults: list[str] = []  # what went wrong inside queued work
        self.retained: Counter[int] = Counter()  # primary contexts, by device
        self._failures: dict[str, list[CUresult]] = {}
        self._initialised = False
        self._thread = threading.local()  # .contexts: the stack of current contexts; .in_callback
        self._streams: dict[int, parts.Stream] = {}
        self._default_streams: dict[int, parts.Stream] = {}  # by context
        self._ended: list[parts.Stream] = []
        self._events: dict[int, parts.Event] = {}
        self._shut = threading.Event()

    # --- the scene

    def module(self) -> ModuleType:
        """The module to pass as `bindings`."""
        made = ModuleType("cuda.bindings.driver")
        for name in dir(types):
            if name.startswith("CU"):
                setattr(made, name, getattr(types, name))
        made.__dict__["CUDA_VERSION"] = self.bindings
        for name in dir(self):
            if name.startswith("cu") and not (name == "cuMemcpyBatchAsync" and self.bindings < 12080):
                setattr(made, name, self._guarded(name, getattr(self, name)))
        return made

    def fail(self, call: str, code: CUresult, times: int = 1) -> None:
        """Let the next calls of this name return an error and do nothing."""
        self._failures.setdefault(call, []).extend([code] * times)

    def held(self) -> list[str]:
        """What was allocated and not freed, in words."""
        kinds: dict[str, dict[int, Any]] = {
            "reservation": self.reservations,
            "chunk": self.chunks,
            "mapping": self.mappings,
            "registration": self.registered,
            "pinned": self.pinned,
            "stream": self._streams,
            "event": self._events,
            "context": dict(+self.retained),
        }
        return [f"{kind} {handle:#x}" for kind, table in kinds.items() for handle in table]

    def close(self) -> None:
        """End all threads, waiting ones too."""
        self._shut.set()
        streams = [*self._streams.values(), *self._default_streams.values()]
        for stream in streams:
            stream.end()
        for stream in streams + self._ended:
            stream.join()

    def _guarded(self, name: str, function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        valued = str(function.__annotations__["return"]) != "tuple[CUresult]"

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            if not self.library and name not in WITHOUT_LIBRARY:
                raise DynamicLibNotFoundError('"cuda" is an NVIDIA driver library and cannot be found')
            refusal = self._refusal(name)
            if refusal is not None:
                return (refusal, None) if valued else (refusal,)
            return function(*args, **kwargs)

        return call

    def _refusal(self, name: str) -> CUresult | None:
        self.calls[name] += 1
        pending = self._failures.get(name)
        if pending:
            return pending.pop(0)
        if getattr(self._thread, "in_callback", False):
            return CUresult.CUDA_ERROR_NOT_PERMITTED
        if name not in BEFORE_INIT and not self._initialised:
            return CUresult.CUDA_ERROR_NOT_INITIALIZED
        if name not in BEFORE_INIT and not name.startswith(WITHOUT_CONTEXT) and not self._contexts():
            return CUresult.CUDA_ERROR_INVALID_CONTEXT
        return None

    def _contexts(self) -> list[int]:
        if not hasattr(self._thread, "contexts"):
            self._thread.contexts = []
        stack: list[int] = self._thread.contexts
        return stack

    # --- the library, the device, its context

    def cuInit(self, Flags: int) -> tuple[CUresult]:
        if count_of(Flags) != 0:
            return (INVALID,)
        if self.devices == 0:
            return (CUresult.CUDA_ERROR_NO_DEVICE,)
        self._initialised = True
        return (OK,)

    def cuDriverGetVersion(self) -> tuple[CUresult, int | None]:
        return OK, self.version

    def cuGetErrorName(self, error: CUresult) -> tuple[CUresult, bytes | None]:
        instance(error, CUresult)
        return OK, error.name.encode()

    def cuGetErrorString(self, error: CUresult) -> tuple[CUresult, bytes | None]:
        instance(error, CUresult)
        return OK, error.name.removeprefix("CUDA_ERROR_").lower().replace("_", " ").encode()

    def cuDeviceGetCount(self) -> tuple[CUresult, int | None]:
        return OK, self.devices

    def cuDeviceGet(self, ordinal: int) -> tuple[CUresult, CUdevice | None]:
        if not 0 <= integer(ordinal) < self.devices:
            return CUresult.CUDA_ERROR_INVALID_DEVICE, None
        return OK, CUdevice(ordinal)

    def cuDeviceGetName(self, length: int, dev: CUdevice | int) -> tuple[CUresult, bytes | None]:
        return OK, f"Stand-in GPU {integer(dev)}".encode().ljust(count_of(length), b"\0")

    def cuDeviceGetAttribute(self, attrib: CUdevice_attribute, dev: CUdevice | int) -> tuple[CUresult, int | None]:
        instance(attrib, CUdevice_attribute)
        integer(dev)
        return OK, self.attributes[int(attrib)]

    def cuDevicePrimaryCtxRetain(self, dev: CUdevice | int) -> tuple[CUresult, CUcontext | None]:
        self.retained[integer(dev)] += 1
        return OK, CUcontext(CONTEXT + integer(dev))

    def cuDevicePrimaryCtxRelease(self, dev: CUdevice | int) -> tuple[CUresult]:
        self.retained[integer(dev)] -= 1
        return (OK,)

    def cuCtxGetCurrent(self) -> tuple[CUresult, CUcontext | None]:
        return OK, CUcontext((self._contexts() or [0])[-1])

    def cuCtxGetDevice(self) -> tuple[CUresult, CUdevice | None]:
        return OK, CUdevice(self._contexts()[-1] - CONTEXT)

    def cuCtxPushCurrent(self, ctx: CUcontext | int) -> tuple[CUresult]:
        if self.retained[integer(ctx) - CONTEXT] < 1:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        self._contexts().append(integer(ctx))
        return (OK,)

    def cuCtxPopCurrent(self) -> tuple[CUresult, CUcontext | None]:
        return OK, CUcontext(self._contexts().pop())

    def cuCtxSynchronize(self) -> tuple[CUresult]:
        context = self._contexts()[-1]
        streams = [*self._streams.values(), *self._default_streams.values()]
        for mark in [stream.mark() for stream in streams if stream.context == context]:
            mark.wait()
        for stream in self._ended:
            stream.join()
        return (OK,)

    # --- streams and events

    def _stream(self, handle: CUstream | int) -> parts.Stream | None:
        if integer(handle) not in (0, 1):
            return self._streams.get(integer(handle))
        context = self._contexts()[-1]
        with self.lock:
            if context not in self._default_streams:
                self._default_streams[context] = parts.Stream(context, self.faults.append)
            return self._default_streams[context]

    def cuStreamCreate(self, Flags: int) -> tuple[CUresult, CUstream | None]:
        if count_of(Flags) != 1:
            return INVALID, None
        handle = self.new_handle()
        self._streams[handle] = parts.Stream(self._contexts()[-1], self.faults.append)
        return OK, CUstream(handle)

    def cuStreamGetId(self, hStream: CUstream | int) -> tuple[CUresult, int | None]:
        stream = self._stream(hStream)
        return (BAD_HANDLE, None) if stream is None else (OK, stream.number)

    def cuStreamDestroy(self, hStream: CUstream | int) -> tuple[CUresult]:
        stream = self._streams.pop(integer(hStream), None)
        if stream is None:
            return (BAD_HANDLE,)
        stream.end()
        self._ended.append(stream)
        return (OK,)

    def cuStreamWaitEvent(self, hStream: CUstream | int, hEvent: CUevent | int, Flags: int) -> tuple[CUresult]:
        stream, event = self._stream(hStream), self._events.get(integer(hEvent))
        if stream is None or event is None or count_of(Flags):
            return (BAD_HANDLE,)
        latest = event.latest
        stream.queue(lambda: self._stand(latest.is_set))
        return (OK,)

    def _stand(self, may_go: Callable[[], bool]) -> None:
        while not may_go() and not self._shut.wait(POLL_SECONDS):
            pass

    def cuStreamWaitValue32(self, stream: CUstream | int, addr: CUdeviceptr | int, value: int, flags: int) -> tuple[CUresult]:
        found, address = self._stream(stream), integer(addr) - DEVICE_ALIAS
        if not self.attributes[122]:
            return (CUresult.CUDA_ERROR_NOT_SUPPORTED,)
        if found is None:
            return (BAD_HANDLE,)
        if count_of(flags) or not any(base <= address < base + length for base, length in self.pinned.items()) or address % 4:
            return (INVALID,)
        word, target = ctypes.c_uint32.from_address(address), count_of(value)
        found.queue(lambda: self._stand(lambda: ctypes.c_int32(word.value - target).value >= 0))
        return (OK,)

    def cuEventCreate(self, Flags: int) -> tuple[CUresult, CUevent | None]:
        if count_of(Flags) & ~3:
            return INVALID, None
        handle = self.new_handle()
        self._events[handle] = parts.Event(self._contexts()[-1])
        return OK, CUevent(handle)

    def cuEventDestroy(self, hEvent: CUevent | int) -> tuple[CUresult]:
        return (OK,) if self._events.pop(integer(hEvent), None) else (BAD_HANDLE,)

    def cuEventRecord(self, hEvent: CUevent | int, hStream: CUstream | int) -> tuple[CUresult]:
        stream, event = self._stream(hStream), self._events.get(integer(hEvent))
        if stream is None or event is None or stream.context != event.context:
            return (BAD_HANDLE,)
        event.latest = stream.mark()
        return (OK,)

    def cuEventQuery(self, hEvent: CUevent | int) -> tuple[CUresult]:
        event = self._events.get(integer(hEvent))
        if event is None:
            return (BAD_HANDLE,)
        return (OK,) if event.latest.is_set() else (CUresult.CUDA_ERROR_NOT_READY,)

    def cuEventSynchronize(self, hEvent: CUevent | int) -> tuple[CUresult]:
        event = self._events.get(integer(hEvent))
        if event is None:
            return (BAD_HANDLE,)
        event.latest.wait()
        return (OK,)

    # --- work

    def _move(self, copies: list[tuple[int, int, int]]) -> None:
        for destination, source, nbytes in reversed(copies):  # the order within a batch is undefined
            if not self.reachable(destination, nbytes) or not self.reachable(source, nbytes):
                raise RuntimeError(f"copy of {nbytes} bytes from {source:#x} to {destination:#x} ran when its memory was gone")
            ctypes.memmove(destination, source, nbytes)

    def _queue_copies(self, copies: list[tuple[int, int, int]], stream: parts.Stream | None) -> CUresult:
        if stream is None:
            return BAD_HANDLE
        for destination, source, nbytes in copies:
            if not self.reachable(destination, nbytes) or not self.reachable(source, nbytes):
                return INVALID
        stream.queue(lambda: self._move(copies))
        return OK

    def cuMemcpyAsync(
        self, dst: CUdeviceptr | int, src: CUdeviceptr | int, ByteCount: int, hStream: CUstream | int
    ) -> tuple[CUresult]:
        return (self._queue_copies([(integer(dst), integer(src), count_of(ByteCount))], self._stream(hStream)),)

    def cuMemcpyBatchAsync(
        self,
        dsts: tuple[CUdeviceptr, ...] | list[CUdeviceptr] | None,
        srcs: tuple[CUdeviceptr, ...] | list[CUdeviceptr] | None,
        sizes: tuple[int, ...] | list[int],
        count: int,
        attrs: tuple[CUmemcpyAttributes, ...] | list[CUmemcpyAttributes] | None,
        attrsIdxs: tuple[int, ...] | list[int],
        numAttrs: int,
        hStream: CUstream | int,
    ) -> tuple[CUresult] | tuple[CUresult, int | None]:
        to, of = entries(dsts, CUdeviceptr, count_of(count)), entries(srcs, CUdeviceptr, count)
        nbytes = [integer(one) for one in entries(sizes, int, count)]
        how = entries(attrs, CUmemcpyAttributes, count_of(numAttrs))
        first = entries(attrsIdxs, int, numAttrs)
        in_order = CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        right = all(isinstance(one, CUmemcpyAttributes) and one.srcAccessOrder == in_order for one in how)
        if count == 0 or 0 in nbytes or numAttrs != 1 or first != [0] or not right or integer(hStream) in (0, 1):
            code = INVALID
        else:
            copies = [(integer(to[i]), integer(of[i]), nbytes[i]) for i in range(count)]
            code = self._queue_copies(copies, self._stream(hStream))
        return (code, 0) if self.bindings < 13000 else (code,)

    def cuLaunchHostFunc(self, hStream: CUstream | int, fn: int, userData: int) -> tuple[CUresult]:
        stream, address, data = self._stream(hStream), integer(fn), integer(userData)
        if stream is None or address == 0:
            return (BAD_HANDLE,)

        def run() -> None:
            self._thread.in_callback = True
            try:
                ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(data)
            finally:
                self._thread.in_callback = False

        stream.queue(run)
        return (OK,)
