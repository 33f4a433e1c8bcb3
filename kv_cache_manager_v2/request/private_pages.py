"""Private pages: what a request writes into must be its own.

Rule: a copy is made on the device, in the order of the request's own stream, so that nobody waits for it but the request's
next step.
"""

from __future__ import annotations

from kv_cache_manager_v2.errors import KVCacheError
from kv_cache_manager_v2.request.request import Request
from kv_cache_manager_v2.storage.page import Page


def private_copy(request: Request, life_cycle: int, source: Page | None, priority: int) -> Page:
    """A locked page of ours with the bytes of `source`, or with undefined bytes if there is none."""
    shared = request.shared
    own = shared.hierarchy.new_page(life_cycle, priority)
    try:
        shared.timeline.wait(request.stream, own.ready)
        if source is not None:
            shared.hierarchy.copy_into(source, own, request.stream)
    except KVCacheError:  # our stream may still write there: the copy of another pool was queued before
        shared.hierarchy.unlock(own, shared.timeline.record_or_wait(request.stream))
        raise
    return own
