"""Errors by the path under which engines of the reference import them."""

from __future__ import annotations

from kv_cache_manager_v2.errors import CorruptedError, CuError, LogicError, OutOfMemoryError, OutOfPagesError

__all__ = ["CorruptedError", "CuError", "LogicError", "OutOfMemoryError", "OutOfPagesError"]
