"""The managers of this process: shutdown, managers dropped without `shutdown()`, and inherited managers after `os.fork()`.

A finaliser makes device calls only if the program dropped the last reference outside of every call. The garbage collector may run
finalisers anywhere, even inside a driver. A manager that it finds is shut down later: by the next call of a manager on the same
driver, or when the next manager is constructed or shut down.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
from threading import get_ident
from typing import Final

from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.errors import LogicError
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.request.request import CLOSED
from kv_cache_manager_v2.request.residency import close
from kv_cache_manager_v2.storage.cells import BUILDING, UNBUILT, abandon_interrupted, free_unbuilt

_log: Final = logging.getLogger(__name__)

LIVE: Final[list[ManagerState]] = []  # constructed and not shut down
DROPPED: Final[list[ManagerState]] = []  # those of LIVE whose manager object no longer exists
UNCLOSED: Final[list[Driver]] = []  # devices of managers that were not constructed, which could not be closed yet
OWN_FAILURES: Final = (AssertionError, LookupError, TypeError, ValueError, AttributeError)
MAX_ATTEMPTS: Final = 8  # most attempts to free the memory of a dropped manager, one per call


def tear_down(shared: ManagerState) -> None:
    """Close open requests and free all memory. The lock is held.

    Raises LogicError, with nothing changed, while another thread waits for the device in a call that has freed the lock.
    A device error is passed on; the next call continues where this one stopped. The structures of a poisoned manager are not
    used: their memory is freed as a whole.
    """
    if shared.waits.others_wait():
        raise LogicError(
            "shutdown(): resize() or adjust() waits for the device on another thread; call shutdown() again when it has ended"
        )
    shared.refuse_changes("shutdown() was refused by the device; nothing but shutdown() can be called")
    if not shared.poison:
        for request in list(shared.open.values()):
            try:
                close(request)
            except Exception as error:
                _log.warning("a request (id %s) could not be closed during shutdown: %s", request.request_id, error)
    for request in shared.open.values():
        request.status = CLOSED
        request.num_blocks = 0
    shared.open.clear()
    shared.unclosed.clear()
    shared.finalized_plans.clear()
    shared.closed_loads.clear()
    if not shared.poison:
        try:
            shared.tree.clear()
        except Exception as error:
            _log.warning("the cached blocks could not be dropped before shutdown: %s", error)
    if shared.poison:
        _close_broken(shared)
    else:
        shared.waits.close()
        shared.hierarchy.close()
        shared.timeline.close()
    if shared.owns_driver:
        shared.driver.close()
    shared.refusal = "the manager has been shut down"
    shared.torn_down = True
    _remove(LIVE, shared)


def _close_broken(shared: ManagerState) -> None:
    """Free the memory of a poisoned manager. Errors of its structures are logged, device errors are raised."""
    try:
        shared.waits.close()
        shared.hierarchy.close()
    except OWN_FAILURES as error:
        _log.error("the storage of a poisoned KVCacheManager is freed as a whole: %s", error)
        for cell in shared.hierarchy.all_cells():
            cell.close_memory()
        for level in range(shared.hierarchy.num_levels):
            shared.hierarchy.tier(level).close()
    try:
        shared.timeline.close()
    except OWN_FAILURES as error:
        _log.error("some events of a poisoned KVCacheManager are not freed: %s", error)


def drop(shared: ManagerState) -> None:
    """Called for a manager dropped without `shutdown()`: free its memory now if no call can be in progress, else later."""
    DROPPED.append(shared)
    if not any(other.running for other in LIVE) and not _collecting():
        _close([shared])
    warnings.warn("a KVCacheManager was dropped without shutdown(); it is shut down now", ResourceWarning, stacklevel=3)


def close_dropped(driver: Driver) -> None:
    """Shut down the dropped managers of this driver. Called at the start of a call that uses the driver."""
    _close([shared for shared in DROPPED if shared.driver is driver])


def close_unused() -> None:
    """Shut down the dropped managers whose driver no living manager uses, and free what failed constructions could not free.

    Called only where a long call is acceptable.
    """
    if UNBUILT:
        free_unbuilt()
    if UNCLOSED:
        _close_drivers()
    used = [other.driver for other in LIVE if other not in DROPPED]
    _close([shared for shared in DROPPED if shared.driver not in used])


def begin_construction(driver: Driver) -> None:
    """Free what dropped managers, and constructions that failed or were interrupted, have left."""
    close_dropped(driver)
    if UNBUILT:
        abandon_interrupted()
    close_unused()
    BUILDING.add(get_ident())


def end_construction(shared: ManagerState) -> None:
    """List a manager that is constructed: it owns its memory."""
    LIVE.append(shared)
    for cells in UNBUILT.copy():
        if cells.driver is shared.driver and cells.builder == get_ident():
            cells.built()
    BUILDING.discard(get_ident())


def abandon(driver: Driver, owned: bool) -> None:
    """Free the memory of a construction on this thread that has failed, and close its device if it is `owned`.

    Never raises. What the device refuses is tried again by later constructions and shutdowns.
    """
    for cells in UNBUILT.copy():
        if cells.driver is driver and cells.builder == get_ident():
            cells.abandon()
    BUILDING.discard(get_ident())
    if owned:
        UNCLOSED.append(driver)
        _close_drivers()


def _close_drivers() -> None:
    """Close the devices of failed constructions, whose memory is freed by now. What is refused is logged, and tried again."""
    for driver in UNCLOSED.copy():
        if [cells for cells in UNBUILT if cells.driver is driver]:
            continue
        try:
            driver.close()
        except BaseException as error:  # a later error of a construction that has failed already
            _log.error("the device of a manager that could not be constructed cannot be closed yet: %r", error)
        else:
            UNCLOSED.remove(driver)


def _close(managers: list[ManagerState]) -> None:
    """Shut down dropped managers. If the device raises anything but Ctrl-C, later calls try again, up to MAX_ATTEMPTS times."""
    for shared in managers:
        if not _remove(DROPPED, shared):
            continue  # another thread shuts it down
        try:
            with shared.lock:
                tear_down(shared)
        except BaseException as error:
            shared.attempts_to_close += 1
            if shared.attempts_to_close < MAX_ATTEMPTS:
                DROPPED.append(shared)
            _log.warning("the memory of a dropped KVCacheManager could not be freed yet: %s", error)
            if isinstance(error, KeyboardInterrupt):
                raise


def _remove(managers: list[ManagerState], shared: ManagerState) -> bool:
    """Remove a manager from a list. Returns whether it was in it."""
    for position, other in enumerate(managers):
        if other is shared:
            del managers[position]
            return True
    return False


def _collecting() -> bool:
    """Whether the garbage collector is running. A nested collection does nothing, so garbage made here is then not found. A
    callback in `gc.callbacks` could tell too, but it would lose a Ctrl-C that arrives during a collection.
    """
    garbage: list[object] = []
    garbage.append(garbage)
    del garbage
    return gc.collect(0) == 0


def _on_fork() -> None:
    """Called in a child process after `os.fork()`: refuse all calls of inherited managers."""
    for shared in LIVE:
        shared.mark_forked(os.getppid())
    LIVE.clear()
    DROPPED.clear()
    UNBUILT.clear()
    BUILDING.clear()
    UNCLOSED.clear()


os.register_at_fork(after_in_child=_on_fork)
