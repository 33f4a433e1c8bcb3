"""Two ways to ask for the same: the calls that have a quick path inside, and the forms of them that always take the long way.

Rule: both leave the same trace. A history that is given, and tokens that are no list, are reasons enough for the long way.
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache_manager_v2 import KVCache, commit_batch, resize_batch
from tests.simulation.model import Token


class Calls:
    """As engines make them: nothing is said that need not be said."""

    def resize(self, cache: KVCache, capacity: int, history: int) -> bool:
        return cache.resize(capacity, None if history == cache.history_length else history)

    def commit(self, cache: KVCache, tokens: Sequence[Token], indices: list[int] | None, is_end: bool) -> None:
        cache.commit(list(tokens), indices, is_end)

    def resize_batch(self, caches: list[KVCache], capacities: list[int], histories: list[int]) -> int:
        same = all(cache.history_length == history for cache, history in zip(caches, histories, strict=True))
        return resize_batch(caches, capacities, None if same else histories)

    def commit_batch(self, caches: list[KVCache], tokens: list[Token]) -> None:
        commit_batch(caches, [token if isinstance(token, int) else [token] for token in tokens])


class LongCalls(Calls):
    """The long way, request by request."""

    def resize(self, cache: KVCache, capacity: int, history: int) -> bool:
        return cache.resize(capacity, history)

    def commit(self, cache: KVCache, tokens: Sequence[Token], indices: list[int] | None, is_end: bool) -> None:
        cache.commit(tuple(tokens), indices, is_end)

    def resize_batch(self, caches: list[KVCache], capacities: list[int], histories: list[int]) -> int:
        for done, cache in enumerate(caches):
            if not self.resize(cache, capacities[done], histories[done]):
                return done
        return len(caches)

    def commit_batch(self, caches: list[KVCache], tokens: list[Token]) -> None:
        for cache, token in zip(caches, tokens, strict=True):
            self.commit(cache, [token], None, False)
