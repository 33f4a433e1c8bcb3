"""One step's work for many requests in one call each.

Rule: equal to the loop over the requests' own calls; what is saved is the loop's cost in the caller's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

from kv_cache_manager_v2.doors import as_list
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.sequence import batch
from kv_cache_manager_v2.sequence.state import SequenceState


def resize_batch(
    caches: Sequence[KVCache], capacities: Sequence[SupportsIndex], histories: Sequence[SupportsIndex] | None = None
) -> int:
    """`caches[i].resize(capacities[i], histories[i])` from the front until one returns False; how many were done.

    Each is atomic and the rest is untouched: equal to the loop in lengths, pages, statistics and events. Raises as `resize`
    does, with the requests before the faulty one done; ConfigError, with nothing done, if the lists differ in length or the caches
    in their manager.
    """
    return batch.resize_all(_states(caches), capacities, histories)


def commit_batch(caches: Sequence[KVCache], tokens: Sequence[object]) -> None:
    """`caches[i].commit(tokens[i])` for each, where an int stands for a list of that one token. Raises as `commit` does."""
    batch.commit_all(_states(caches), tokens)


def _states(caches: Sequence[KVCache]) -> list[SequenceState]:
    """Raises ConfigError unless all are caches of one manager."""
    states = [_state(cache) for cache in as_list(caches)]
    for state in states:
        if state.shared is not states[0].shared:
            raise ConfigError(f"caches hold {state.request_id=} of another manager than the first: make one call for each manager")
    return states


def _state(cache: object) -> SequenceState:
    if not isinstance(cache, KVCache):
        raise ConfigError(f"caches hold {cache!r}: they must be KVCache objects")
    return cache.state
