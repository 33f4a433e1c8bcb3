"""One step's work for many requests in one call each.

Rule: equal to the loop over the requests' own calls; what is saved is the loop's cost in the caller's interpreter.
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
    """`caches[i].resize(capacities[i], histories[i])` from the front until one returns False; how many were done.

    Each is atomic and the rest is untouched: equal to the loop in lengths, pages, statistics and events. Raises as `resize`
    does, with the requests before the faulty one done; ConfigError, with nothing done, if the lists differ in length or the caches
    in their manager.
    """
    settled = items_of(histories, "histories", "integers") if histories is not None else None
    return batch.resize_all(_states(caches), items_of(capacities, "capacities", "integers"), settled)


def commit_batch(caches: Sequence[KVCache], tokens: Sequence[SupportsIndex | Tokens] | IntBuffer) -> None:
    """`caches[i].commit(tokens[i])` for each, where an int stands for a list of that one token.

    Raises as `commit` does, with the requests before the faulty one done; the text names it.
    """
    batch.commit_all(_states(caches), items_of(tokens, "tokens", "ids, or sequences of tokens"))


def _states(caches: object) -> list[Request]:
    """Raises ConfigError unless all are caches of one manager."""
    states = [_state(cache) for cache in items_of(caches, "caches", "KVCache objects")]
    for position in range(1, len(states)):
        if states[position].shared is not states[0].shared:
            raise ConfigError(f"caches[{position}] belongs to another manager than caches[0]: make one call for each manager")
    return states


def _state(cache: object) -> Request:
    if not isinstance(cache, KVCache):
        raise ConfigError(f"caches hold {shown(cache)}; they must be KVCache objects")
    return cache.state
