"""Make-room policies that suspend another cache."""

from __future__ import annotations

from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.arguments import instances
from kv_cache_manager_v2.ids import GPU_LEVEL
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.make_room import MakeRoom
from kv_cache_manager_v2.request.request import ACTIVE, Request
from kv_cache_manager_v2.request.residency import cost_of_return
from kv_cache_manager_v2.storage.planner import Shortage


@mypyc_attr(allow_interpreted_subclasses=True)
class SuspendYoungest(MakeRoom):
    """Suspends the cache that was created last, if it is younger than the one with the shortage and has pages that no other cache
    uses.

    The oldest request always keeps its pages, and two requests never suspend each other in turn. `also` are further caches
    that may be suspended: a list that the engine keeps, read at each shortage. Suspends nothing if no colder tier has room.
    """

    def __init__(self, also: Sequence[KVCache] = ()) -> None:
        instances(also, KVCache, "also")
        self.also: Sequence[KVCache] = also

    def make_room(self, asking: KVCache, shortage: Shortage, candidates: Sequence[KVCache]) -> bool:
        chosen: KVCache | None = None
        age = asking.state.serial
        for cache in _suspendable(asking, shortage, candidates, self.also):
            if cache.state.serial > age and cost_of_return(cache.state, shortage.pool_group)[0] > 0:
                chosen, age = cache, cache.state.serial
        return _suspend(chosen)


@mypyc_attr(allow_interpreted_subclasses=True)
class SuspendCheapest(MakeRoom):
    """Suspends the cache with the fewest bytes to load when it resumes, among those that end the shortage. If none does, suspends
    the one that reduces it most. Pages that other requests use too stay where they are, and are not counted. O(pages of the
    candidates). `also` are further caches that may be suspended: a list that the engine keeps, read at each shortage. Suspends
    nothing if no colder tier has room.
    """

    def __init__(self, also: Sequence[KVCache] = ()) -> None:
        instances(also, KVCache, "also")
        self.also: Sequence[KVCache] = also

    def make_room(self, asking: KVCache, shortage: Shortage, candidates: Sequence[KVCache]) -> bool:
        chosen: KVCache | None = None
        most, least = 0, 0  # slots that the chosen one frees, as far as they are missing; bytes to load for it
        for cache in _suspendable(asking, shortage, candidates, self.also):
            slots, nbytes = cost_of_return(cache.state, shortage.pool_group)
            useful = min(slots, shortage.missing)
            if useful > most or (useful == most > 0 and nbytes < least):
                chosen, most, least = cache, useful, nbytes
        return _suspend(chosen)


def _suspendable(asking: KVCache, shortage: Shortage, candidates: Sequence[KVCache], also: Sequence[KVCache]) -> list[KVCache]:
    """The caches that can be suspended; none if their pages could not leave the GPU."""
    request = asking.state
    if not _has_room_below(request, shortage.pool_group):
        return []
    found: list[KVCache] = []
    for cache in [*candidates, *instances(also, KVCache, "also")]:
        other = cache.state
        if other.status == ACTIVE and other is not request and other.shared is request.shared:
            found.append(cache)
    return found


def _has_room_below(request: Request, pool_group: int) -> bool:
    """Whether a colder level has a slot that is free, or whose page can be dropped."""
    hierarchy = request.shared.hierarchy
    for level in range(GPU_LEVEL + 1, hierarchy.num_levels):
        cell = hierarchy.level_cells(level)[pool_group]
        if cell.open > 0 or cell.num_droppable > 0:
            return True
    return False


def _suspend(cache: KVCache | None) -> bool:
    if cache is None:
        return False
    cache.suspend()
    return True
