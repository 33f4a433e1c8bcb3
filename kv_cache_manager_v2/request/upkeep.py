"""Upkeep around every public call: before it, what happened behind our back is taken in; after it, the books can be audited.

Rule: finalisers and file transfers only leave notes. They are worked off here, on the thread and under the lock of the next call.
"""

from __future__ import annotations

import logging
import warnings
from typing import Final

from kv_cache_manager_v2.errors import KVCacheError
from kv_cache_manager_v2.request.audit import check_everything
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.request.planned_drop import withdraw
from kv_cache_manager_v2.request.request import CLOSED, Request
from kv_cache_manager_v2.request.residency import close
from kv_cache_manager_v2.statistics import KVCacheStatsDelta

_log: Final = logging.getLogger(__name__)


def tidy(shared: ManagerState) -> None:
    """Close caches whose handles were dropped, and settle file transfers that ended. The caller holds the lock.

    First the peaks: nothing changes between calls, so what the last call left, however it ended, is what is there now. Raises
    LogicError within a priority callback or a listener.
    """
    shared.require_outside()
    if shared.ledger.enabled:
        shared.ledger.note_peaks()
    if not (shared.abandoned or shared.discarded_plans or shared.closed_loads or shared.hierarchy.transfers_in_flight > 0):
        return
    if shared.abandoned:
        _close_abandoned(shared)
    while shared.discarded_plans:
        withdraw(shared, shared.discarded_plans.pop())
    _settle(shared)
    if shared.ledger.enabled:  # what was given up just now may be taken again by the call itself
        shared.ledger.note_peaks()


def settle_ended(shared: ManagerState) -> None:
    """Before a call that only looks: settle file transfers that ended, so that nobody is told of a page that was lost. The caller
    holds the lock.

    Free while none is in flight. Not within a callback, which may look, but is asked in the midst of a call.
    """
    if shared.hierarchy.transfers_in_flight == 0 or shared.calling_out or (shared.shield is not None and shared.shield.telling):
        return
    if shared.ledger.enabled:
        shared.ledger.note_peaks()
    _settle(shared)
    conclude(shared)


def _settle(shared: ManagerState) -> None:
    """Take note of file transfers that ended, and publish or withdraw what waited for them."""
    if shared.hierarchy.transfers_in_flight > 0:
        shared.hierarchy.settle()
    if shared.closed_loads:
        shared.closed_loads = [loads for loads in shared.closed_loads if not loads.settle(shared.tree)]


def _close_abandoned(shared: ManagerState) -> None:
    """Close what nobody holds any more. If the device refuses, the next call tries again: whoever calls now has done nothing
    wrong."""
    states = shared.abandoned
    shared.abandoned = []
    closed: list[Request] = []
    for request in states:
        if request.status == CLOSED:
            continue
        try:
            close(request)
        except KVCacheError as error:
            _log.warning("an abandoned KVCache (id %s) could not be closed yet: %s", request.request_id, error)
            shared.abandoned.append(request)
            continue
        closed.append(request)
    for request in closed:  # last: a warning that is an error to the user leaves nothing undone
        warnings.warn(f"a KVCache (id {request.request_id}) was dropped without close(); closed now", ResourceWarning, stacklevel=3)


def conclude(shared: ManagerState) -> None:
    """After a public call: with debugging on, assert every invariant."""
    if shared.debug:
        check_everything(shared)


def commit_stats(request: Request) -> KVCacheStatsDelta:
    """Move a request's pending counts to the books; what they were."""
    pending = request.pending
    if pending is None:
        return KVCacheStatsDelta()
    delta = KVCacheStatsDelta()
    if not request.excluded():
        delta = pending.request_delta(request.shared.attention)
        if request.shared.ledger.enabled:
            ssm = request.shared.ssm
            request.shared.ledger.commit(pending, delta, ssm.index if ssm is not None else None)
    discard_stats(request)
    return delta


def discard_stats(request: Request) -> None:
    """Forget a request's pending counts."""
    if request.pending is not None:
        request.pending.clear()
        request.settle_counts()
    if request.request_id is not None:
        request.shared.ledger.dirty.discard(request.request_id)
