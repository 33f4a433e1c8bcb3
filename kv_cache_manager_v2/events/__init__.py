"""The event stream, by which routers and mirrors follow what is cached."""

from __future__ import annotations

from kv_cache_manager_v2.events.manager import KVCacheEventManager

__all__ = ["KVCacheEventManager"]
