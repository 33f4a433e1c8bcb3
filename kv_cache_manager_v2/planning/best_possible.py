"""The most that any order of eviction can find in a cache of one size: it drops the block whose next use lies furthest ahead.

What uses a block uses all before it too, so that block is never one that others follow from (L. A. Belady, "A study of replacement
algorithms for a virtual-storage computer", 1966). It knows the future: it is a bound, not a policy. For requests that are longer
than the cache, it is a good order, but no proven bound.
"""

from __future__ import annotations

from heapq import heappop, heappush

NEVER = 1 << 60


class NextUses:
    """For each prefix of each request, the request that uses it next. O(units of the trace)."""

    def __init__(self, paths: list[list[int]], num_prefixes: int) -> None:
        self.paths = paths
        self.num_prefixes = num_prefixes
        self.after: list[list[int]] = [[]] * len(paths)  # by request and position in its path; NEVER if there is none
        self.stride = 1 + max([len(path) for path in paths], default=0)
        ahead = [NEVER] * num_prefixes
        for request in range(len(paths) - 1, -1, -1):
            path = paths[request]
            self.after[request] = [ahead[prefix] for prefix in path]
            for prefix in path:
                ahead[prefix] = request


class BestCache:
    """A cache of `capacity` units. A request's units are not dropped while it runs; a longer request keeps its first ones."""

    def __init__(self, uses: NextUses, capacity: int) -> None:
        self._uses = uses
        self._capacity = capacity
        self._num_cached = 0
        self._next = [-1] * uses.num_prefixes  # by prefix: the next request that uses it; -1: not cached
        self._unneeded: list[int] = []  # cached prefixes that are never used again
        self._furthest: list[int] = []  # a heap of (next use, depth), the largest first; entries may be out of date

    def run(self, request: int) -> int:
        """Serve the requests in order. Returns how many units of the request are found from its beginning on."""
        path, after = self._uses.paths[request], self._uses.after[request]
        following = self._next
        found = 0
        while found < len(path) and following[path[found]] >= 0:
            found += 1
        for position in range(found):
            following[path[position]] = NEVER + 1  # in use
        kept = len(path)
        for position in range(found, len(path)):
            prefix = path[position]
            if following[prefix] < 0:
                if self._num_cached >= self._capacity and not self._drop():
                    kept = position
                    break
                self._num_cached += 1
            following[prefix] = NEVER + 1
        for position in range(kept):
            prefix, use = path[position], after[position]
            following[prefix] = use
            if use == NEVER:
                self._unneeded.append(prefix)
            else:
                heappush(self._furthest, -(use * self._uses.stride + position))
        return found

    def _drop(self) -> bool:
        """Drop a unit. Returns False if all are in use."""
        following = self._next
        while self._unneeded:
            prefix = self._unneeded.pop()
            if following[prefix] == NEVER:
                following[prefix] = -1
                self._num_cached -= 1
                return True
        while self._furthest:
            use, position = divmod(-heappop(self._furthest), self._uses.stride)
            prefix = self._uses.paths[use][position]
            if following[prefix] == use:
                following[prefix] = -1
                self._num_cached -= 1
                return True
        return False
