"""The statistics of a request: committed to the manager's totals, or discarded.

Counts that are lost because a request closes without committing them are logged once per manager.
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
        request.mark_counted()
    request.clear_dirty()


def end_stats(request: Request) -> None:
    """Called when a request closes: commit its counts if `commit_stats_on_close` is set; else log the first loss of counts.

    With statistics off, counts are those that the request asked for, which nothing but its own `commit_pending_stats()` returns.
    """
    pending = request.pending
    ledger = request.shared.ledger
    if pending is not None and pending.dirty and not request.excluded():
        if ledger.enabled and ledger.commit_on_close:
            commit_stats(request)
            return
        if not ledger.lost_counts_logged:
            ledger.lost_counts_logged = True
            _log.warning(
                "a request closed before it committed its statistics, which are lost (logged once per manager); call "
                "commit_pending_stats() or discard_pending_stats() first%s",
                ", or set commit_stats_on_close=True in KVCacheManagerConfig" if ledger.enabled else "",
            )
    discard_stats(request)
