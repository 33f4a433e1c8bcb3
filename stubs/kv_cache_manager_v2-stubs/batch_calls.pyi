"""One step's work for many requests in one call each.

Rule: equal to the loop over the requests' own calls; what is saved is the loop's cost in the caller's interpreter.
"""

from collections.abc import Sequence
from typing import SupportsIndex

from kv_cache_manager_v2.arguments import IntBuffer, Integers
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.reuse.tokens import Tokens

def resize_batch(caches: Sequence[KVCache], capacities: Integers, histories: Integers | None = None) -> int:
    """`caches[i].resize(capacities[i], histories[i])` from the front until one returns False; how many were done.

    Each is atomic and the rest is untouched: equal to the loop in lengths, pages, statistics and events. Raises as `resize`
    does, with the requests before the faulty one done; ConfigError, with nothing done, if the lists differ in length or the caches
    in their manager.
    """

def commit_batch(caches: Sequence[KVCache], tokens: Sequence[SupportsIndex | Tokens] | IntBuffer) -> None:
    """`caches[i].commit(tokens[i])` for each, where an int stands for a list of that one token.

    Raises as `commit` does, with the requests before the faulty one done; the text names it.
    """
