"""Calls that resize or commit a batch of requests. They equal a loop over the requests, without its cost in Python.

No cache may be in a batch twice: it would have two lengths in one step.
"""

from collections.abc import Sequence
from typing import SupportsIndex

from kv_cache_manager_v2.arguments import IntBuffer, Integers
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.request.request import Request
from kv_cache_manager_v2.reuse.tokens import Tokens

def resize_batch(caches: Sequence[KVCache], capacities: Integers, histories: Integers | None = None) -> int:
    """Call `caches[i].resize(capacities[i], histories[i])` in order until one returns False. Returns how many succeeded.

    Equal to the loop in lengths, pages, statistics and events. Raises the errors of `resize`, after earlier requests are resized.
    Raises ConfigError, with nothing changed, for a cache given twice, and if the lists differ in length or the caches in their
    manager.
    """

def commit_batch(caches: Sequence[KVCache], tokens: Sequence[SupportsIndex | Tokens] | IntBuffer) -> None:
    """Call `caches[i].commit(tokens[i])` in order. An int in `tokens` is a list of that one token.

    Raises the errors of `commit`, after earlier requests are committed. The text names the request that failed. Raises ConfigError,
    with nothing changed, for a cache given twice.
    """

def commit_ahead_batch(caches: Sequence[KVCache], tokens: Sequence[SupportsIndex | Tokens] | IntBuffer) -> None:
    """As `commit_batch`, by `caches[i].commit_ahead(tokens[i])`."""

def requests_of(caches: object) -> list[Request]:
    """The requests of a batch. Raises ConfigError unless all are caches of one manager."""

def distinct_requests_of(caches: object) -> list[Request]:
    """As `requests_of`. Raises ConfigError for a cache given twice."""
