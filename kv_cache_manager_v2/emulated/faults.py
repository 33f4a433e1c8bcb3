"""Faults that a test injects: the n-th next call of a driver method fails, or its file transfer hangs.

A plan counts calls and answers which fault applies to one of them; the driver then carries it out. Each fault counts on its own.
"""

from __future__ import annotations

from typing import Final

from kv_cache_manager_v2.arguments import at_least, at_least_or_none, text
from kv_cache_manager_v2.emulated.transfers import EmulatedGate
from kv_cache_manager_v2.errors import ConfigError, CuError, HostRegistrationError, KVCacheError, OutOfMemoryError

EFFECT_ERROR: Final = "error"  # the call raises; a file transfer ends with EIO
EFFECT_SHORT: Final = "short"  # a file transfer ends after half of its bytes

INJECTED_ERROR_CODE: Final = 999  # "unknown error" in the numbering of the device's driver

FILE_CALLS: Final = ("read_file", "write_file")
CALLS: Final = (
    "reserve",
    "release_reservation",
    "create_chunk",
    "destroy_chunk",
    "map_chunk",
    "unmap",
    "set_access",
    "host_register",
    "host_unregister",
    "create_stream",
    "destroy_stream",
    "order",
    "create_event",
    "destroy_event",
    "record_event",
    "wait_event",
    "query_event",
    "synchronize_event",
    "synchronize",
    "copy",
    "copy_batch",
    "launch",
    "read_file",
    "write_file",
    "wait_gate",
    "poll_gate",
    "gate_error",
    "release_gate",
    "close",
)


def injected_error(call: str) -> KVCacheError:
    """The default exception of a call that is made to fail."""
    what = f"{call}: injected failure"
    if call == "reserve" or call == "create_chunk":
        return OutOfMemoryError(what)
    if call == "host_register":
        return HostRegistrationError(what)
    return CuError(what, INJECTED_ERROR_CODE, call)


class Fault:
    """One injected fault: `skip` calls succeed, and the next `left` calls have the effect."""

    def __init__(self, call: str, skip: int, left: int, effect: str, error: object) -> None:
        self.call = call
        self._error = error  # an exception or its class; None: the default of this call
        self.skip = skip
        self.left = left  # -1: no limit
        self.effect = effect
        self.gate: EmulatedGate | None = None  # ends the hang when it is opened

    def applies(self) -> bool:
        """Count one call; whether it has the effect."""
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.left == 0:
            return False
        if self.left > 0:
            self.left -= 1
        return True

    def raises(self) -> bool:
        """Whether the call raises. A file transfer does so only for a given exception; else its gate fails."""
        return self._error is not None or self.call not in FILE_CALLS

    def error(self) -> BaseException:
        """The exception that the call raises."""
        given = self._error
        if isinstance(given, BaseException):
            return given
        if isinstance(given, type):
            made = given(f"{self.call}: injected failure")
            assert isinstance(made, BaseException)
            return made
        return injected_error(self.call)


def _is_exception(error: object) -> bool:
    return isinstance(error, BaseException) or (isinstance(error, type) and issubclass(error, BaseException))


class FaultPlan:
    """All faults of one kind. `armed` is False while there are none, so that a call need not ask."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self.armed = False
        self._allowed = allowed
        self._faults: list[Fault] = []

    def add(self, call: object, nth: object, times: object, effect: object, error: object) -> Fault:
        """Validate and add a fault. Raises ConfigError."""
        name = text(call, "call")
        if name not in self._allowed:
            raise ConfigError(f"call is {name!r}: must be one of {', '.join(self._allowed)}")
        skip = at_least(nth, "nth", 1) - 1
        count = at_least_or_none(times, "times", 1)
        kind = text(effect, "effect")
        if kind != EFFECT_ERROR and (kind != EFFECT_SHORT or name not in FILE_CALLS):
            raise ConfigError(f"effect is {kind!r}: must be 'error', or 'short' for a file transfer")
        if error is not None and not _is_exception(error):
            raise ConfigError(f"error is {error!r}: must be an exception or an exception class")
        if error is not None and kind != EFFECT_ERROR:
            raise ConfigError(f"error is {error!r} and effect is {kind!r}: a call that raises has no other effect; leave one out")
        fault = Fault(name, skip, -1 if count is None else count, kind, error)
        self._faults.append(fault)
        self.armed = True
        return fault

    def next(self, call: str) -> Fault | None:
        """Count one call in all its faults; the first fault that applies, if any."""
        found: Fault | None = None
        spent = False
        for fault in self._faults:
            if fault.call == call and fault.applies() and found is None:
                found = fault
            spent = spent or fault.left == 0
        if spent:
            self._faults = [fault for fault in self._faults if fault.left != 0]
            self.armed = len(self._faults) > 0
        return found

    def clear(self) -> None:
        """Cancel all faults."""
        self._faults = []
        self.armed = False
