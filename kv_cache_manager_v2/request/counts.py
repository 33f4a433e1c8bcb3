"""What a request counted: committed to the manager's statistics, or discarded.

Rule: counts that a request throws away at its end are never lost without a word.
"""

from __future__ import annotations

import logging
from typing import Final

from kv_cache_manager_v2.request.request import Request
from kv_cache_manager_v2.statistics import KVCacheStatsDelta

_log: Final = logging.getLogger(__name__)


def commit_stats(request: Request) -> KVCacheStatsDelta:
    """Add a request's pending counts to the manager's statistics. Returns them."""
    pending = request.pending
    delta = KVCacheStatsDelta()
    if pending is not None and not request.excluded():
        delta = pending.request_delta(request.shared.attention)
        if request.shared.ledger.enabled:
            ssm = request.shared.ssm
            request.shared.ledger.commit(pending, delta, ssm.index if ssm is not None else None)
    discard_stats(request)
    return delta


def discard_stats(request: Request) -> None:
    """Set a request's pending counts to 0."""
    if request.pending is not None:
        request.pending.clear()
        request.settle_counts()
    request.clear_dirty()


def end_stats(request: Request) -> None:
    """The request closes: commit its counts if the configuration says so. Else the first request that loses any is logged."""
    pending = request.pending
    ledger = request.shared.ledger
    if pending is not None and pending.dirty and ledger.enabled and not request.excluded():
        if ledger.commit_on_close:
            commit_stats(request)
            return
        if not ledger.told_of_lost_counts:
            ledger.told_of_lost_counts = True
            _log.warning(
                "a request closed before it committed its statistics, which are lost (said once for each manager): call "
                "commit_pending_stats() or discard_pending_stats() first, or set commit_stats_on_close=True in KVCacheManagerConfig"
            )
    discard_stats(request)
