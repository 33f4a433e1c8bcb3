"""The event stream: what enters and leaves the cache, told to routers and mirrors."""

from __future__ import annotations

from kv_cache_manager_v2.events.manager import KVCacheEventManager

__all__ = ["KVCacheEventManager"]
