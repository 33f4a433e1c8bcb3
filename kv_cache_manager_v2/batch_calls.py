"""Calls that resize or commit a batch of requests. They equal a loop over the requests, without its cost in Python.

No cache may be in a batch twice: it would have two lengths in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

from kv_cache_manager_v2.arguments import IntBuffer, Integers, items_of, shown
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.request import batch
from kv_cache_manager_v2.request.request import Request
from kv_cache_manager_v2.reuse.tokens import Tokens


def resize_batch(caches: Sequence[KVCache], capacities: Integers, histories: Integers | None = None) -> int:
    """Call `caches[i].resize(capacities[i], histories[i])` in order until one returns False. Returns how many succeeded.

    Equal to the loop in lengths, pages, statistics and events. Raises the errors of `resize`, after earlier requests are resized.
    Raises ConfigError, with nothing changed, for a cache given twice, and if the lists differ in length or the caches in their
    manager.
    """
    settled = items_of(histories, "histories", "integers") if histories is not None else None
    return batch.resize_all(distinct_requests_of(caches), items_of(capacities, "capacities", "integers"), settled)


def commit_batch(caches: Sequence[KVCache], tokens: Sequence[SupportsIndex | Tokens] | IntBuffer) -> None:
    """Call `caches[i].commit(tokens[i])` in order. An int in `tokens` is a list of that one token.

    Raises the errors of `commit`, after earlier requests are committed. The text names the request that failed. Raises ConfigError,
    with nothing changed, for a cache given twice.
    """
    batch.commit_all(distinct_requests_of(caches), items_of(tokens, "tokens", "ids, or sequences of tokens"))


def commit_ahead_batch(caches: Sequence[KVCache], tokens: Sequence[SupportsIndex | Tokens] | IntBuffer) -> None:
    """As `commit_batch`, by `caches[i].commit_ahead(tokens[i])`."""
    batch.commit_ahead_all(distinct_requests_of(caches), items_of(tokens, "tokens", "ids, or sequences of tokens"))


def requests_of(caches: object) -> list[Request]:
    """The requests of a batch. Raises ConfigError unless all are caches of one manager."""
    return _requests(caches, None)


def distinct_requests_of(caches: object) -> list[Request]:
    """As `requests_of`. Raises ConfigError for a cache given twice."""
    return _requests(caches, object())


def _requests(caches: object, mark: object) -> list[Request]:
    """The requests of a batch. `mark`: an object of this call, with which each request is marked; None if one may come twice."""
    states = [_state(cache) for cache in items_of(caches, "caches", "KVCache objects")]
    for position in range(len(states)):
        request = states[position]
        if request.shared is not states[0].shared:
            raise ConfigError(f"caches[{position}] belongs to another manager than caches[0]; make one call per manager")
        if mark is not None:
            if request.seen_by is mark:
                first = states.index(request)
                raise ConfigError(f"caches[{position}] is caches[{first}] again; pass each cache once, with all of its new tokens")
            request.seen_by = mark
    return states


def _state(cache: object) -> Request:
    if not isinstance(cache, KVCache):
        raise ConfigError(f"caches has {shown(cache)}; each item must be a KVCache")
    return cache.state
