"""Schedulers of other engines over our manager and over their own. A benchmark, pinned to their versions; no interface."""

from __future__ import annotations

from typing import Final

ARMS: Final = ("vLLM", "vLLM, short cut", "ours", "floor")  # what is compared, in the order of tables
