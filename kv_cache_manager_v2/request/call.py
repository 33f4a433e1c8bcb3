"""The beginning and the end of every public call.

A call that may change something is `with shared.lock, Call(shared, "name()"):`. It begins with the work that finalisers and file
transfers have left. If an unexpected exception leaves it, every structure is audited. A manager that fails the audit is poisoned:
from then on only questions, `close()`, `clear_reusable_blocks()` and `shutdown()` are answered.
"""

from __future__ import annotations

import logging
import warnings
from types import TracebackType
from typing import Final

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.errors import (
    ConfigError,
    CorruptedError,
    KVCacheError,
    LogicError,
    OutOfMemoryError,
    OutOfPagesError,
    PageDataLostError,
)
from kv_cache_manager_v2.request.audit import check_everything
from kv_cache_manager_v2.request.live_managers import DROPPED, close_dropped
from kv_cache_manager_v2.request.lock import held_twice
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.request.request import CLOSED, Request
from kv_cache_manager_v2.request.reservation import release_again
from kv_cache_manager_v2.request.residency import close

_log: Final = logging.getLogger(__name__)


@mypyc_attr(free_list_len=1)
class Call:
    """A call that may change a manager. The lock is held.

    Raises LogicError inside another call (from a callback, listener, finaliser or signal handler) and after `shutdown()`, and
    CorruptedError for a poisoned manager. Nothing has changed then.
    """

    def __init__(self, shared: ManagerState, name: str) -> None:
        self._shared = shared
        self._name = name
        self._closed: list[Request] | None = None  # requests that this call closed, since their handles were dropped

    def __enter__(self) -> None:
        shared = self._shared
        if shared.running or shared.refusal:
            _admit(shared, self._name)
        shared.running = self._name
        shared.timeline.begin_call()
        if shared.ledger.enabled:  # slot counts do not change between calls
            shared.ledger.update_peaks()
        if (
            shared.unclosed
            or shared.finalized_plans
            or shared.closed_loads
            or shared.unreleased
            or shared.hierarchy.transfers_in_flight > 0
            or DROPPED
        ):
            try:
                self._closed = _run_deferred_work(shared)
            except BaseException as error:
                shared.timeline.end_call()
                _leave(shared, error)
                raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        shared = self._shared
        shared.timeline.end_call()
        if error is not None or shared.debug:
            _leave(shared, error)
        else:
            shared.running = ""
        if shared.guard is not None:
            shared.guard.raise_interrupt()
        if self._closed is not None:
            _warn_of(self._closed)


class CallsInOne:
    """Calls of a batch, which are one call for the engine: an interrupt of a listener is raised when all are complete."""

    def __init__(self, shared: ManagerState) -> None:
        self._guard = shared.guard

    def __enter__(self) -> None:
        if self._guard is not None:
            self._guard.keeps = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._guard is not None:
            self._guard.keeps = False
            self._guard.raise_interrupt()


def look(shared: ManagerState, name: str) -> None:
    """Called before a question: settle file transfers that have ended, so that lost pages are not counted. The lock is held.

    Costs nothing while no transfer is in flight. A callback may ask in the middle of a call. A poisoned manager answers as far as
    it can. Raises LogicError after `shutdown()`.
    """
    if shared.refusal and not shared.poison:
        raise LogicError(f"{name}: {shared.refusal}")
    audit_cut_call(shared)
    if shared.hierarchy.transfers_in_flight > 0 and not shared.running and not shared.poison:
        with Call(shared, name):
            pass


def audit_cut_call(shared: ManagerState) -> None:
    """Audit the manager if its last call did not reach its end. The lock is held."""
    if shared.running and not held_twice(shared.mutex):
        judge(shared, None)


def poison_of(shared: ManagerState) -> str | None:
    """Why the manager is poisoned; None if it is not."""
    with shared.lock:
        audit_cut_call(shared)
        return shared.poison or None


def take_poison_of(shared: ManagerState) -> str | None:
    """Clear the poison of a repaired manager, and return its cause; None if it is not poisoned.

    Raises LogicError until `clear_reusable_blocks()` has succeeded.
    """
    with shared.lock:
        audit_cut_call(shared)
        reason = shared.poison
        if not reason:
            return None
        if not shared.repaired:
            raise LogicError("take_poison(): the manager is inconsistent; call clear_reusable_blocks() first")
        shared.take_poison()
        return reason


def clear_poisoned(shared: ManagerState) -> None:
    """Drop every cached block of a poisoned manager, and audit it. Raises CorruptedError while it is inconsistent."""
    try:
        shared.tree.clear()
        check_everything(shared)
    except Exception as error:
        raise CorruptedError(
            f"clear_reusable_blocks(): this manager is poisoned ({shared.poison}) and stays so ({type(error).__name__}: {error}); "
            "shut it down and make another one"
        ) from error
    shared.repaired = True


def judge(shared: ManagerState, error: BaseException | None) -> None:
    """Audit a manager after an exception left a call, and poison it if the audit fails. O(pages + blocks + requests).

    `error` is None if the exception is unknown. After an audit that is itself interrupted, the next call starts with another one.
    """
    what = "an exception" if error is None else f"{type(error).__name__}: {error}"
    cause = f"{shared.running} was left by {what}"
    try:
        check_everything(shared)
    except (MemoryError, RecursionError):
        return
    except Exception as found:
        shared.corrupt(f"{cause}; its audit found {type(found).__name__}: {found}")
        _log.critical("a KVCacheManager is poisoned: %s", shared.poison)
    shared.running = ""


def _admit(shared: ManagerState, name: str) -> None:
    """Raise if the call is not allowed. Audit the manager first if the last call did not reach its end."""
    if shared.running:
        if held_twice(shared.mutex):
            raise LogicError(shared.nested_call_error(name))
        judge(shared, None)
        if shared.running:
            raise OutOfMemoryError(
                f"{name}: an exception left {shared.running}, and there is not enough memory or stack for the audit; try again"
            )
    if shared.poison:
        raise CorruptedError(f"{name}: this manager is poisoned: {shared.poison}; shut it down and make another one")
    if shared.refusal:
        raise LogicError(f"{name}: {shared.refusal}")


def _leave(shared: ManagerState, error: BaseException | None) -> None:
    """End a call that failed, or any call with debugging on.

    Expected errors of this package have changed nothing and need no audit. A device error should have changed nothing either, but
    is audited.
    """
    refused = isinstance(error, (ConfigError, LogicError, OutOfPagesError, PageDataLostError))
    if refused and not shared.debug and not isinstance(error, CorruptedError):
        shared.running = ""
        return
    judge(shared, error)
    if error is None and shared.poison:
        raise CorruptedError(shared.poison)


def _run_deferred_work(shared: ManagerState) -> list[Request] | None:
    """Do the work that finalisers and file transfers have left. Returns the requests that were closed.

    What the device refuses is tried again by the next call.
    """
    if DROPPED:
        close_dropped(shared.driver)
    if shared.unreleased:
        release_again(shared)
    closed = _close_unclosed(shared) if shared.unclosed else None
    while shared.finalized_plans:
        shared.withdraw_plan(shared.finalized_plans.pop())
    if shared.hierarchy.transfers_in_flight > 0:
        shared.hierarchy.settle()
    if shared.closed_loads:
        _settle_closed_loads(shared)
    if shared.ledger.enabled:  # before the call allocates slots that were freed here
        shared.ledger.update_peaks()
    return closed


def _settle_closed_loads(shared: ManagerState) -> None:
    in_flight = shared.hierarchy.in_flight
    seen = in_flight.ended + in_flight.losses
    if seen != shared.closed_loads_seen:
        shared.closed_loads = [loads for loads in shared.closed_loads if not loads.settle_closed(shared.tree, in_flight.losses)]
        shared.closed_loads_seen = seen


def _close_unclosed(shared: ManagerState) -> list[Request]:
    """Close requests whose handles were dropped. If the device refuses one, the next call tries again."""
    requests = shared.unclosed  # finalisers may append at any time
    refused = 0
    closed: list[Request] = []
    while len(requests) > refused:
        request = requests[refused]
        if request.status != CLOSED and request.serial in shared.open:  # false if its creation did not complete
            try:
                close(request)
            except KVCacheError as error:
                _log.warning("a KVCache (id %s) dropped without close() could not be closed yet: %s", request.request_id, error)
                refused += 1
                continue
            closed.append(request)
        del requests[refused]
    return closed


def _warn_of(closed: list[Request]) -> None:
    """Warn at the end of a call. Nothing is raised, since the call has happened: a warning that is an error is logged."""
    for request in closed:
        try:
            warnings.warn(
                f"a KVCache (id {request.request_id}) was dropped without close(); it is closed now", ResourceWarning, stacklevel=4
            )
        except Warning as error:
            _log.warning("%s", error)
        except MemoryError:
            continue
