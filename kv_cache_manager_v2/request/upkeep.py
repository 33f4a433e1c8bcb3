"""A request's counts become the manager's, or are forgotten.

Rule: counts are the request's own until they are committed; a call that fails commits none.
"""

from __future__ import annotations

from kv_cache_manager_v2.request.request import Request
from kv_cache_manager_v2.statistics import KVCacheStatsDelta


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
