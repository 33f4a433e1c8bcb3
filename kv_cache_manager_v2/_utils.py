"""Arithmetic by the path under which engines of the reference import it."""

from __future__ import annotations

from kv_cache_manager_v2.layout.arithmetic import HalfOpenRange, exact_div, typed_range

__all__ = ["HalfOpenRange", "exact_div", "typed_range"]
