"""The exact hit curve of an LRU cache, for every size in one pass.

LRU keeps in a larger cache all that it keeps in a smaller one. So a block is found from one size on: its *reuse distance*, the
number of blocks that have been touched since its own last touch, itself included (Mattson et al., "Evaluation techniques for
storage hierarchies", 1970).

A request touches its whole path at once, and a prefix is never older than a longer one. So the prefixes of a path that were last
touched by one request are neighbours, and their distances are consecutive. The blocks that each request was the last to touch are
counted in a Fenwick tree over the requests. It is asked once for each run of such prefixes, not once for each block.
"""

from __future__ import annotations

from kv_cache_manager_v2.planning.hit_curve import HitCurve, points_of

NEVER = -1  # the request that last touched a new prefix


class LruCurve:
    """Takes the requests of a trace in order, and gives the curve at the end. O(units of a request + runs log requests) each.

    A unit of a path (see `PrefixTree`) is `blocks_per_unit` blocks, or `units_per_block` units are one block: one of the two is 1.
    """

    def __init__(self, num_requests: int, tokens_per_block: int, blocks_per_unit: int, units_per_block: int) -> None:
        assert blocks_per_unit == 1 or units_per_block == 1, (blocks_per_unit, units_per_block)
        self._tokens_per_block = tokens_per_block
        self._unit_tokens = tokens_per_block * blocks_per_unit // units_per_block
        self._units_per_block = units_per_block
        self._tree = [0] * (num_requests + 1)  # Fenwick tree: blocks by the request that touched them last
        self._num_blocks = 0  # distinct blocks so far
        self._request = 0  # number of the next request
        self._last: list[int] = []  # by prefix: the request that touched it last
        self._blocks: list[int] = []  # by prefix: the blocks counted for it
        self._known: list[int] = []  # by prefix: the most tokens of its last unit that were ever cached
        self._slopes: dict[int, int] = {}  # see `points_of`
        self._total_tokens = 0

    def add(self, path: list[int], num_prefixes: int, input_length: int, counted: bool) -> None:
        """Serve a request. `num_prefixes` is the number of prefixes of the tree; its hits count if `counted`.

        `path` covers at most the prompt of `input_length` tokens: tokens after it are never found.
        """
        self._make_room(num_prefixes)
        num_tokens = min(input_length, len(path) * self._unit_tokens)
        if counted:
            self._total_tokens += input_length
        runs, weights = self._find_runs(path, num_tokens, counted)
        for number in range(len(runs)):
            self._count_blocks(runs[number], -weights[number])
        self._count_blocks(self._request, self._touch(path, num_tokens))
        self._request += 1

    def curve(self) -> HitCurve:
        """The curve of the requests so far."""
        sizes, hit_tokens = points_of(self._slopes)
        return HitCurve(sizes, hit_tokens, self._total_tokens, True)

    def _make_room(self, num_prefixes: int) -> None:
        missing = num_prefixes - len(self._last)
        if missing > 0:
            self._last.extend([NEVER] * missing)
            self._blocks.extend([NEVER] * missing)
            self._known.extend([0] * missing)

    def _find_runs(self, path: list[int], num_tokens: int, counted: bool) -> tuple[list[int], list[int]]:
        """The requests that touched the path's known part last, and how many blocks of it each. Counts the hits if `counted`."""
        last, blocks, known = self._last, self._blocks, self._known
        unit_tokens = self._unit_tokens
        single = self._units_per_block == 1
        runs: list[int] = []
        weights: list[int] = []
        run = NEVER  # the request that touched the present run
        before = 0  # blocks younger than the present prefix
        weight = 0  # blocks of the run so far
        found = 0  # tokens found from the beginning of the run on, which are not counted yet
        left = num_tokens  # from the present prefix on
        for prefix in path:
            request = last[prefix]
            if request == NEVER:
                break
            if request != run:
                if found > 0:
                    self._found(before, found)
                    found = 0
                if run != NEVER:
                    runs.append(run)
                    weights.append(weight)
                run, weight = request, 0
                before = self._num_blocks - self._blocks_up_to(request)
            if counted:
                tokens = min(known[prefix], left, unit_tokens)
                if single:
                    found += tokens
                elif tokens > 0:
                    self._found(before + weight, tokens)
                counted = tokens == unit_tokens
            left -= unit_tokens
            weight += blocks[prefix]
        if found > 0:
            self._found(before, found)
        if run != NEVER:
            runs.append(run)
            weights.append(weight)
        return runs, weights

    def _found(self, younger: int, num_tokens: int) -> None:
        """Count hit tokens of consecutive blocks, of which the first has `younger` blocks before it. The last may be partial."""
        slopes = self._slopes
        size = self._tokens_per_block
        whole, rest = divmod(num_tokens, size)
        if whole > 0:
            slopes[younger + 1] = slopes.get(younger + 1, 0) + size
            slopes[younger + whole + 1] = slopes.get(younger + whole + 1, 0) - size
        if rest > 0:
            slopes[younger + whole + 1] = slopes.get(younger + whole + 1, 0) + rest
            slopes[younger + whole + 2] = slopes.get(younger + whole + 2, 0) - rest

    def _touch(self, path: list[int], num_tokens: int) -> int:
        """Make the request the last one that touched its path. Returns the blocks of the path."""
        last, blocks, known = self._last, self._blocks, self._known
        request, unit_tokens, per_block = self._request, self._unit_tokens, self._units_per_block
        total = 0
        left = num_tokens
        for position, prefix in enumerate(path):
            last[prefix] = request
            if known[prefix] < unit_tokens:
                known[prefix] = max(known[prefix], min(left, unit_tokens))
            if per_block == 1:
                if blocks[prefix] == NEVER or left < unit_tokens:
                    blocks[prefix] = -(-known[prefix] // self._tokens_per_block)
            elif (position + 1) % per_block == 0:
                blocks[prefix] = 1  # a block counts for its last unit
            elif position + 1 < len(path):
                blocks[prefix] = 0  # a longer block covers it
            elif blocks[prefix] != 0:
                blocks[prefix] = 1  # a partly filled block
            left -= unit_tokens
            total += blocks[prefix]
        return total

    # --- the Fenwick tree

    def _count_blocks(self, request: int, count: int) -> None:
        """Add to the number of blocks that a request was the last to touch."""
        tree = self._tree
        self._num_blocks += count
        node = request + 1
        while node < len(tree):
            tree[node] += count
            node += node & -node

    def _blocks_up_to(self, request: int) -> int:
        """The number of blocks that this request or an earlier one was the last to touch."""
        tree = self._tree
        total = 0
        node = request + 1
        while node > 0:
            total += tree[node]
            node &= node - 1
        return total
