"""Devices in front of the emulated one: handles that come back, and calls that are counted and refused.

Rule: a device here adds one habit of real ones and forwards everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from kv_cache_manager_v2 import CuError, Driver, EmulatedDriver, Stream

Refusal: TypeAlias = Callable[[], BaseException]

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


class ReturningDevice(Driver):
    """A device that gives the handle of the stream that was destroyed last to the next one, as CUDA may."""

    def __init__(self, inner: EmulatedDriver) -> None:
        self.inner = inner
        self.real: dict[int, int] = {}
        self.unused: list[int] = []


def _forward_by_stream(name: str) -> Callable[..., object]:
    def call(self: ReturningDevice, *arguments: object) -> object:
        stream = arguments[0]
        assert isinstance(stream, int)
        return getattr(self.inner, name)(self.real.get(stream, stream), *arguments[1:])

    return call


def _forward(name: str) -> Callable[..., object]:
    def call(self: ReturningDevice, *arguments: object) -> object:
        return getattr(self.inner, name)(*arguments)

    return call


def _describe(self: ReturningDevice) -> str:
    return self.inner.describe()


def _record_event(self: ReturningDevice, event: int, stream: Stream) -> None:
    self.inner.record_event(event, self.real.get(stream, stream))


def _create_stream(self: ReturningDevice) -> Stream:
    stream = self.inner.create_stream()
    handle = self.unused.pop() if self.unused else FIRST_HANDLE + len(self.real)
    self.real[handle] = stream
    return Stream(handle)


def _destroy_stream(self: ReturningDevice, stream: Stream) -> None:
    self.inner.destroy_stream(self.real[stream])
    del self.real[stream]
    self.unused.append(stream)


def returning_device(inner: EmulatedDriver) -> ReturningDevice:
    body: dict[str, object] = {
        name: _forward_by_stream(name) if name in STREAM_FIRST else _forward(name) for name in (*CALLS, "describe")
    }
    body.update(record_event=_record_event, create_stream=_create_stream, destroy_stream=_destroy_stream)
    made = type("ReturningDeviceComplete", (ReturningDevice,), body)(inner)
    assert isinstance(made, ReturningDevice)
    return made


class RefusingDevice(Driver):
    """A device that counts its calls, and refuses those that were ordered: by number, so many times, with any exception.

    A refused call has changed nothing. `close` and calls made while `counting` is off pass.
    """

    def __init__(self, inner: EmulatedDriver) -> None:
        self.inner = inner
        self.counting = False
        self.calls = 0
        self.names: list[str] = []  # of the calls counted so far
        self.orders: list[tuple[int, int, Refusal]] = []  # first call, the one behind the last, error
        self.orders_at_end: list[tuple[int, int, Refusal]] = []  # the same, counted from the shutdown on
        self.end_at = -1  # calls before the shutdown
        self.refused: list[tuple[int, str]] = []

    def begin_end(self) -> None:
        """The shutdown begins: what was ordered for it counts from here."""
        self.end_at = self.calls
        self.orders = [(beg + self.calls, end + self.calls, error) for beg, end, error in self.orders_at_end]

    def heal(self) -> None:
        self.orders = []

    def count(self, name: str) -> None:
        number = self.calls
        self.calls += 1
        self.names.append(name)
        for beg, end, error in self.orders:
            if beg <= number < end:
                self.refused.append((number, name))
                raise error()


def _counted(name: str) -> Callable[..., object]:
    def call(self: RefusingDevice, *arguments: object) -> object:
        if self.counting:
            self.count(name)
        return getattr(self.inner, name)(*arguments)

    return call


def _describe_refusing(self: RefusingDevice) -> str:
    return self.inner.describe()


def _close(self: RefusingDevice) -> None:
    self.inner.close()


def refusing_device(inner: EmulatedDriver) -> RefusingDevice:
    body: dict[str, object] = {name: _counted(name) for name in CALLS}
    body.update(describe=_describe_refusing, close=_close)
    made = type("RefusingDeviceComplete", (RefusingDevice,), body)(inner)
    assert isinstance(made, RefusingDevice)
    return made


class Strange(Exception):
    """An exception that no code of the package has heard of."""


def _cu_error() -> BaseException:
    return CuError("refused", 999, "call")


REFUSALS: Final[tuple[Refusal, ...]] = (_cu_error, KeyboardInterrupt, MemoryError, Strange)
