"""Faults that a test orders in advance: the n-th next call of a kind fails, or hangs.

Rule: a plan only counts calls and answers what shall happen to this one; whoever asks does it. Each order counts by itself.
"""

from __future__ import annotations

from typing import Final

from kv_cache_manager_v2.errors import ConfigError

EFFECT_ERROR: Final = "error"  # the call is refused; a file transfer ends with EIO
EFFECT_SHORT: Final = "short"  # a file transfer ends after half of its bytes

FILE_CALLS: Final = ("read_file", "write_file")
CALLS: Final = (
    "reserve",
    "create_chunk",
    "map_chunk",
    "set_access",
    "host_register",
    "create_stream",
    "create_event",
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
)


class FaultOrder:
    """One order: after `skip` calls, the next `left` calls of this kind have the effect."""

    def __init__(self, call: str, skip: int, left: int, effect: str) -> None:
        self.call = call
        self.skip = skip
        self.left = left  # -1: for ever
        self.effect = effect

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


class FaultPlan:
    """All orders of one kind of effect. `armed` is False while there is nothing to ask, so that the usual call asks nothing."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self.armed = False
        self._allowed = allowed
        self._orders: list[FaultOrder] = []

    def order(self, call: str, nth: int, times: int | None, effect: str) -> FaultOrder:
        if call not in self._allowed:
            raise ConfigError(f"no fault can be ordered for the call {call!r}; one of {', '.join(self._allowed)}")
        if nth < 1 or (times is not None and times < 1):
            raise ConfigError(f"nth={nth} and times={times} must be at least 1 (times=None: for ever)")
        if effect != EFFECT_ERROR and (effect != EFFECT_SHORT or call not in FILE_CALLS):
            raise ConfigError(f"effect {effect!r} of {call}: must be 'error', or 'short' for a file transfer")
        order = FaultOrder(call, nth - 1, -1 if times is None else times, effect)
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
