"""Faults that a test orders in advance: the n-th next call of a kind fails, or hangs.

Rule: a plan only counts calls and answers what shall happen to this one; the driver does it. Each order counts by itself.
"""

from __future__ import annotations

from typing import Final

from kv_cache_manager_v2.arguments import at_least, at_least_or_none, text
from kv_cache_manager_v2.emulated.transfers import EmulatedGate
from kv_cache_manager_v2.errors import ConfigError, CuError, HostRegistrationError, KVCacheError, OutOfMemoryError

EFFECT_ERROR: Final = "error"  # the call is refused; a file transfer ends with EIO
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
    """What a call of this kind raises when it fails and the order names no exception."""
    what = f"{call}: injected failure"
    if call == "reserve" or call == "create_chunk":
        return OutOfMemoryError(what)
    if call == "host_register":
        return HostRegistrationError(what)
    return CuError(what, INJECTED_ERROR_CODE, call)


class FaultOrder:
    """One order: after `skip` calls, the next `left` calls of this kind have the effect."""

    def __init__(self, call: str, skip: int, left: int, effect: str, error: object) -> None:
        self.call = call
        self._error = error  # an exception or its class; None: the usual one of this call
        self.skip = skip
        self.left = left  # -1: for ever
        self.effect = effect
        self.gate: EmulatedGate | None = None  # lets go what the order makes hang

    def strikes(self) -> bool:
        """Count one call; whether the effect is on this one."""
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.left == 0:
            return False
        if self.left > 0:
            self.left -= 1
        return True

    def refuses(self) -> bool:
        """Whether the call itself raises. That of a file transfer does only if the order names an exception."""
        return self._error is not None or self.call not in FILE_CALLS

    def error(self) -> BaseException:
        """What the call raises."""
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
    """All orders of one kind of effect. `armed` is False while there is nothing to ask, so that the usual call asks nothing."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self.armed = False
        self._allowed = allowed
        self._orders: list[FaultOrder] = []

    def order(self, call: object, nth: object, times: object, effect: object, error: object) -> FaultOrder:
        name = text(call, "call")
        if name not in self._allowed:
            raise ConfigError(f"no fault can be ordered for the call {name!r}; one of {', '.join(self._allowed)}")
        skip = at_least(nth, "nth", 1) - 1
        count = at_least_or_none(times, "times", 1)
        kind = text(effect, "effect")
        if kind != EFFECT_ERROR and (kind != EFFECT_SHORT or name not in FILE_CALLS):
            raise ConfigError(f"effect {kind!r} of {name}: must be 'error', or 'short' for a file transfer")
        if error is not None and not _is_exception(error):
            raise ConfigError(f"error is {error!r}: must be an exception or a class of exceptions")
        if error is not None and kind != EFFECT_ERROR:
            raise ConfigError(f"error is {error!r} and effect {kind!r}: what raises has no other effect")
        order = FaultOrder(name, skip, -1 if count is None else count, kind, error)
        self._orders.append(order)
        self.armed = True
        return order

    def next(self, call: str) -> FaultOrder | None:
        """Count one call of this kind in every order; the first order that strikes, if any."""
        struck: FaultOrder | None = None
        spent = False
        for order in self._orders:
            if order.call == call and order.strikes() and struck is None:
                struck = order
            spent = spent or order.left == 0
        if spent:
            self._orders = [order for order in self._orders if order.left != 0]
            self.armed = len(self._orders) > 0
        return struck

    def clear(self) -> None:
        """Forget all orders."""
        self._orders = []
        self.armed = False
