"""`introspection` under the reference's module path. The only difference: `reuse_match_planned_drop_counts` also returns the
matched length."""

from __future__ import annotations

from typing import Any

from kv_cache_manager_v2 import introspection
from kv_cache_manager_v2.manager import KVCacheManager
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.tokens import Tokens


def __getattr__(name: str) -> Any:
    """Every other name is that of `introspection`."""
    return getattr(introspection, name)


def reuse_match_planned_drop_counts(
    manager: KVCacheManager, scope: ReuseScope | None, tokens: Tokens, life_cycle: int, enable_partial: bool = False
) -> tuple[int, list[int]]:
    """The length that a look-up finds, in tokens, and the planned drops of the life cycle's page in each matched block."""
    num_tokens, _pages = introspection.reuse_match_pages(manager, scope, tokens, life_cycle, enable_partial)
    return num_tokens, introspection.reuse_match_planned_drop_counts(manager, scope, tokens, life_cycle, enable_partial)
