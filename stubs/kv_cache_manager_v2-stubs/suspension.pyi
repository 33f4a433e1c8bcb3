"""Make-room policies that suspend another cache."""

from collections.abc import Sequence

from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.make_room import MakeRoom
from kv_cache_manager_v2.storage.planner import Shortage

class SuspendYoungest(MakeRoom):
    """Suspends the cache that was created last, if it is younger than the one with the shortage and has pages that no other cache
    uses.

    The oldest request always keeps its pages, and two requests never suspend each other in turn. `also` are further caches
    that may be suspended: a list that the engine keeps, read at each shortage. Suspends nothing if no colder tier has room.
    """

    also: Sequence[KVCache]

    def __init__(self, also: Sequence[KVCache] = ()) -> None: ...
    def make_room(self, asking: KVCache, shortage: Shortage, candidates: Sequence[KVCache]) -> bool: ...

class SuspendCheapest(MakeRoom):
    """Suspends the cache with the fewest bytes to load when it resumes, among those that end the shortage. If none does, suspends
    the one that reduces it most. Pages that other requests use too stay where they are, and are not counted. O(pages of the
    candidates). `also` are further caches that may be suspended: a list that the engine keeps, read at each shortage. Suspends
    nothing if no colder tier has room.
    """

    also: Sequence[KVCache]

    def __init__(self, also: Sequence[KVCache] = ()) -> None: ...
    def make_room(self, asking: KVCache, shortage: Shortage, candidates: Sequence[KVCache]) -> bool: ...
