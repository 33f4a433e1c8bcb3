"""The tree and the match as their definitions say, with nothing clever: a dict of token tuples.

A block is known by all tokens from the start of its scope to its own end, so the block before it is a shorter tuple.
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache_manager_v2.layout.life_cycle import LifeCycle
from tests.support.tree_rig import Token

Path = tuple[Token, ...]


class Model:
    """The blocks of one scope, each with the coverage of every life cycle's page, 0 for none."""

    def __init__(self, life_cycles: list[LifeCycle], tokens_per_block: int) -> None:
        self.life_cycles = life_cycles
        self.size = tokens_per_block
        self.blocks: dict[Path, list[int]] = {}
        self.pins: dict[Path, int] = {}

    def start(self, path: Path) -> int:
        """Where the block of a path begins."""
        return (len(path) - 1) // self.size * self.size

    def siblings(self, path: Path) -> list[Path]:
        beg = self.start(path)
        return [other for other in self.blocks if self.start(other) == beg and other[:beg] == path[:beg] and other != path]

    def insert(self, path: Path) -> str:
        if path in self.blocks:
            return "exists"
        siblings = self.siblings(path)
        if any(other[: len(path)] == path for other in siblings):
            return "covered"
        self.blocks[path] = [0] * len(self.life_cycles)
        for other in siblings:
            if path[: len(other)] == other:
                self.blocks[path] = self.blocks.pop(other)
                self.pins.pop(other, None)
        return "new"

    def install(self, path: Path, life_cycle: int, coverage: int) -> bool:
        if self.blocks[path][life_cycle] >= coverage:
            return False
        self.blocks[path][life_cycle] = coverage
        return True

    def lose(self, path: Path, life_cycle: int) -> None:
        self.blocks[path][life_cycle] = 0
        if self.life_cycles[life_cycle].loss_ends_path(self.start(path) // self.size):
            self.remove(path)
        else:
            self.prune(path)

    def remove(self, path: Path) -> None:
        for other in list(self.blocks):
            if other[: len(path)] == path:
                del self.blocks[other]
                self.pins.pop(other, None)
        self.prune(path[: self.start(path)])

    def prune(self, path: Path) -> None:
        while path and not any(self.blocks[path]) and not self.pins.get(path):
            if any(len(other) > len(path) and other[: len(path)] == path for other in self.blocks):
                return
            del self.blocks[path]
            path = path[: self.start(path)]

    def longest(self, query: Sequence[Token], partial: bool) -> int:
        """Length of the longest common path."""
        return max((self.common(path, query) for path in self.blocks if partial or self.belongs(path, query)), default=0)

    def common(self, path: Path, query: Sequence[Token]) -> int:
        run = 0
        while run < min(len(path), len(query)) and path[run] == query[run]:
            run += 1
        return run

    def belongs(self, path: Path, query: Sequence[Token]) -> bool:
        """Whether a block is on the query's path without partial matching."""
        if tuple(query[: len(path)]) != path:
            return False
        return len(path) % self.size == 0 or len(path) == len(query)

    def reusable(self, query: Sequence[Token], n: int, partial: bool, snapshots: bool) -> bool:
        """Whether some path begins with the first n tokens and has the pages for them."""
        last_start = (n - 1) // self.size * self.size
        for ordinal in range(last_start // self.size):
            path = tuple(query[: (ordinal + 1) * self.size])
            if path not in self.blocks or not self.has_pages(path, ordinal, self.size, n, False):
                return False
        for path in self.blocks:
            if self.start(path) != last_start or path[:n] != tuple(query[:n]):
                continue
            if not partial and not self.belongs(path, query):
                continue
            if self.has_pages(path, last_start // self.size, n - last_start, n, snapshots):
                return True
        return False

    def has_pages(self, path: Path, ordinal: int, share: int, n: int, snapshots: bool) -> bool:
        for life_cycle, coverage in zip(self.life_cycles, self.blocks[path], strict=True):
            if not life_cycle.is_attention:
                if snapshots and coverage != share:
                    return False
                continue
            beg, end = life_cycle.stale(n)
            if not beg <= ordinal < end and coverage < share:
                return False
        return True

    def match(self, query: Sequence[Token], partial: bool, backoff: int, snapshots: bool = True) -> int:
        limit = max(0, self.longest(query, partial) - backoff)
        for n in range(limit, 0, -1):
            if self.reusable(query, n, partial, snapshots):
                return n
        return 0
