"""Drivers in front of an emulated one: handles that come back, and calls that are counted and refused.

Rule: a driver here adds one habit of real ones and forwards everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Final, TypeAlias

from kv_cache_manager_v2 import CuError, Driver, EmulatedDriver, Stream
from kv_cache_manager_v2.device.driver import IdentifyingDriver

if TYPE_CHECKING:
    Base = Driver
else:
    Base = object  # the classes below are completed with one of the two bases of drivers

Refusal: TypeAlias = Callable[[], BaseException]
Method: TypeAlias = Callable[..., object]

FIRST_HANDLE: Final = 1 << 30
STREAM_FIRST: Final = frozenset(
    (
        "copy",
        "copy_batch",
        "launch",
        "order",
        "wait_event",
        "read_file",
        "write_file",
        "read_files",
        "write_files",
        "wait_gate",
        "wait_gates",
    )
)
CALLS: Final = tuple(
    sorted(name for name in dir(Driver) if not name.startswith("_") and callable(getattr(Driver, name)) and name != "describe")
)


class ReturningDevice(Base):
    """A device that gives the handle of the stream that was destroyed last to the next one, as CUDA may."""

    def __init__(self, inner: EmulatedDriver) -> None:
        self.inner = inner
        self.real: dict[int, int] = {}  # the stream of the emulated device, by handle
        self.unused: list[int] = []
        self.lock = Lock()  # of both


def _forward(name: str) -> Method:
    def call(self: ReturningDevice, *arguments: object) -> object:
        if name not in STREAM_FIRST:
            return getattr(self.inner, name)(*arguments)
        stream = arguments[0]
        assert isinstance(stream, int)
        return getattr(self.inner, name)(self.real.get(stream, stream), *arguments[1:])

    return call


def _record_event(self: ReturningDevice, event: int, stream: Stream) -> None:
    self.inner.record_event(event, self.real.get(stream, stream))


def _create_stream(self: ReturningDevice) -> Stream:
    stream = self.inner.create_stream()
    with self.lock:
        handle = self.unused.pop() if self.unused else FIRST_HANDLE + len(self.real)
        self.real[handle] = stream
    return Stream(handle)


def _destroy_stream(self: ReturningDevice, stream: Stream) -> None:
    self.inner.destroy_stream(self.real[stream])
    with self.lock:
        del self.real[stream]
        self.unused.append(stream)


def returning_device(inner: EmulatedDriver, identifies: bool = False) -> ReturningDevice:
    """`identifies`: whether the device can tell streams of one handle apart."""
    body: dict[str, Method] = {name: _forward(name) for name in (*CALLS, "describe")}
    body.update(record_event=_record_event, create_stream=_create_stream, destroy_stream=_destroy_stream)
    body["stream_identity"] = lambda self, handle: self.real.get(handle, 0)
    made = type("ReturningDeviceComplete", (ReturningDevice, IdentifyingDriver if identifies else Driver), body)(inner)
    assert isinstance(made, ReturningDevice)
    return made


class RefusingDevice(Base):
    """A device that counts its calls, and refuses those that were ordered: by number, so many times, with any exception.

    A refused call has changed nothing, unless `after` says that it was carried out. `close` and calls made while `counting` is off
    pass.
    """

    def __init__(self, inner: EmulatedDriver) -> None:
        self.inner = inner
        self.counting = False
        self.calls = 0
        self.names: list[str] = []  # of the calls counted so far
        self.orders: list[tuple[int, int, Refusal]] = []  # first call, the one after the last, error
        self.after = False
        self.orders_at_end: list[tuple[int, int, Refusal]] = []  # the same, counted from the shutdown on
        self.end_at = -1  # calls before the shutdown
        self.refused: list[tuple[int, str]] = []

    def refuse(self, error: BaseException | None, skip: int = 0, times: int = 1, after: bool = False) -> None:
        """Count, and order one refusal: of `times` calls after the next `skip`. None: none."""
        self.counting = True
        self.after = after
        beg = self.calls + skip
        self.orders = [] if error is None else [(beg, beg + times, lambda: error)]

    def begin_end(self) -> None:
        """The shutdown begins: what was ordered for it counts from here."""
        self.end_at = self.calls
        self.orders = [(beg + self.calls, end + self.calls, error) for beg, end, error in self.orders_at_end]

    def heal(self) -> None:
        self.orders = []

    def count(self, name: str) -> Refusal | None:
        """The error with which the call is refused, if any."""
        number = self.calls
        self.calls += 1
        self.names.append(name)
        for beg, end, error in self.orders:
            if beg <= number < end:
                self.refused.append((number, name))
                return error
        return None


def _counted(name: str) -> Method:
    def call(self: RefusingDevice, *arguments: object) -> object:
        refusal = self.count(name) if self.counting else None
        if refusal is not None and not self.after:
            raise refusal()
        result = getattr(self.inner, name)(*arguments)
        if refusal is not None:
            raise refusal()
        return result

    return call


def refusing_device(inner: EmulatedDriver, identifies: bool = False) -> RefusingDevice:
    """`identifies`: whether the device can tell streams of one handle apart."""
    body: dict[str, Method] = {name: _counted(name) for name in CALLS}
    body.update(describe=lambda self: inner.describe(), close=lambda self: inner.close(), stream_identity=lambda self, s: s + 1)
    made = type("RefusingDeviceComplete", (RefusingDevice, IdentifyingDriver if identifies else Driver), body)(inner)
    assert isinstance(made, RefusingDevice)
    return made


class WatchedDevice(Base):
    """A device that makes a call of the test's ahead of each call in which the host waits for the device."""

    def __init__(self, inner: EmulatedDriver, before: Callable[[], object]) -> None:
        self.inner = inner
        self.before = before


def _watched(name: str) -> Method:
    def call(self: WatchedDevice, *arguments: object) -> object:
        if name in ("synchronize", "synchronize_event"):
            self.before()
        return getattr(self.inner, name)(*arguments)

    return call


def watched_device(inner: EmulatedDriver, before: Callable[[], object]) -> WatchedDevice:
    body: dict[str, Method] = {name: _watched(name) for name in (*CALLS, "describe")}
    body["stream_identity"] = lambda self, stream: stream + 1
    made = type("WatchedDeviceComplete", (WatchedDevice, IdentifyingDriver), body)(inner, before)
    assert isinstance(made, WatchedDevice)
    return made


class Strange(Exception):
    """An exception that no code of the package has heard of."""


def _cu_error() -> BaseException:
    return CuError("refused", 999, "call")


REFUSALS: Final[tuple[Refusal, ...]] = (_cu_error, KeyboardInterrupt, MemoryError, Strange)
