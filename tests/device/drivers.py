"""Drivers in front of an emulated one: handles that come back, and calls that raise anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kv_cache_manager_v2.device.driver import Driver, IdentifyingDriver
from kv_cache_manager_v2.emulated.driver import EmulatedDriver

_STREAM_AT = {  # position of the stream among a call's arguments
    "copy": 0,
    "copy_batch": 0,
    "launch": 0,
    "order": 0,
    "wait_event": 0,
    "record_event": 1,
    "read_file": 0,
    "write_file": 0,
    "read_files": 0,
    "write_files": 0,
    "wait_gate": 0,
    "wait_gates": 0,
    "destroy_stream": 0,
}


def _calls() -> list[str]:
    return [name for name in dir(Driver) if not name.startswith("_") and callable(getattr(Driver, name))]


def _built(name: str, base: type, body: dict[str, Callable[..., Any]]) -> Any:
    return type(name, (base,), body)()


def reusing_handles(inner: EmulatedDriver, identifies: bool) -> Any:
    """A driver whose `create_stream` returns the handle of the stream that was destroyed last, as CUDA may.

    `identifies`: whether it can tell such streams apart. `real` maps a handle to the stream of the emulated device.
    """

    def forward(name: str) -> Callable[..., Any]:
        position = _STREAM_AT.get(name, -1)

        def call(self: Any, *given: Any) -> Any:
            arguments = list(given)
            if position >= 0:
                arguments[position] = self.real.get(arguments[position], arguments[position])
            return getattr(inner, name)(*arguments)

        return call

    def create_stream(self: Any) -> int:
        stream = inner.create_stream()
        handle: int = self.free.pop() if self.free else (1 << 30) + len(self.real)
        self.real[handle] = stream
        return handle

    def destroy_stream(self: Any, handle: int) -> None:
        inner.destroy_stream(self.real[handle])
        del self.real[handle]
        self.free.append(handle)

    def stream_identity(self: Any, handle: int) -> int:
        real: int = self.real.get(handle, 0)
        return real

    body: dict[str, Callable[..., Any]] = {name: forward(name) for name in _calls()}
    body.update(create_stream=create_stream, destroy_stream=destroy_stream)
    if identifies:
        body.update(stream_identity=stream_identity)
    driver = _built("ReusingHandles", IdentifyingDriver if identifies else Driver, body)
    driver.inner, driver.real, driver.free = inner, {}, []
    return driver


def refusing(inner: EmulatedDriver) -> Any:
    """A driver with `refuse(error, skip, times)`: all calls but the first `skip` raise, `times` of them, before anything happens.

    `made` counts the calls. With `after`, the error comes when the call has been carried out.
    """

    def forward(name: str) -> Callable[..., Any]:
        def call(self: Any, *given: Any) -> Any:
            self.made += 1
            strikes = self.error is not None and self.made > self.skip and self.times > 0
            if strikes:
                self.times -= 1
            if strikes and not self.after:
                raise self.error
            answer = getattr(inner, name)(*given)
            if strikes:
                raise self.error
            return answer

        return call

    def refuse(self: Any, error: BaseException | None, skip: int = 0, times: int = 1, after: bool = False) -> None:
        self.error, self.skip, self.times, self.after = error, self.made + skip, times, after

    body: dict[str, Callable[..., Any]] = {name: forward(name) for name in _calls()}
    body.update(refuse=refuse, stream_identity=lambda self, stream: stream + 1)
    driver = _built("Refusing", IdentifyingDriver, body)
    driver.inner, driver.made, driver.error, driver.skip, driver.times, driver.after = inner, 0, None, 0, 0, False
    return driver


def watched(inner: EmulatedDriver, before: Callable[[], object]) -> Any:
    """A driver that calls `before` ahead of each call in which the host waits for the device."""

    def forward(name: str) -> Callable[..., Any]:
        def call(self: Any, *given: Any) -> Any:
            if name in ("synchronize", "synchronize_event"):
                before()
            return getattr(inner, name)(*given)

        return call

    body: dict[str, Callable[..., Any]] = {name: forward(name) for name in _calls()}
    body.update(stream_identity=lambda self, stream: stream + 1)
    return _built("Watched", IdentifyingDriver, body)
