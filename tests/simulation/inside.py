"""Reads the internal state of a manager, and never changes it: the tree's blocks with their pages, and slots on all tiers.

Rule: this is the only file here that uses more than the public interface.
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache_manager_v2 import EmulatedDriver, KVCacheManager
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.tree import RadixTree
from kv_cache_manager_v2.storage.hierarchy import Hierarchy
from kv_cache_manager_v2.storage.page import Page
from tests.simulation.model import Kind, Token

Path = tuple[Token, ...]


class Inside:
    """The internal structures of one manager."""

    def __init__(self, manager: KVCacheManager, driver: EmulatedDriver) -> None:
        self.driver = driver
        self.shared: ManagerState = manager.shared
        self.tree: RadixTree = self.shared.tree
        self.hierarchy: Hierarchy = self.shared.hierarchy

    # --- blocks

    def blocks(self) -> list[tuple[bytes, Path, Block]]:
        """(scope bytes, all tokens up to the block's end, block) of every block in the tree, parents first."""
        found: list[tuple[bytes, Path, Block]] = []
        for root in self.tree.roots():
            stack: list[tuple[Path, Block]] = [((), root)]
            while stack:
                path, block = stack.pop()
                for child in block.child_blocks():
                    below = (*path, *child.token_list())
                    found.append((root.scope.data, below, child))
                    stack.append((below, child))
        return found

    # --- room, counted page by page

    def fits(self, need: Sequence[int], load: Sequence[Page]) -> bool:
        """Whether the GPU can have need[g] free slots of each pool group and all pages of `load`: droppable pages can be moved or
        dropped, held ones need a slot on a colder level, and a loaded page frees its slot."""
        mine = {id(page) for page in load}
        hierarchy = self.hierarchy
        for group in range(hierarchy.num_groups):
            coming = [page for page in load if page.pool_group == group and page.level > 0]
            below = len(coming)
            for level in range(1, hierarchy.num_levels):
                below += hierarchy.free(level, group) + len(self._pages(level, group, mine, False))
            here = hierarchy.free(0, group) + len(self._pages(0, group, mine, False))
            movable = min(len(self._pages(0, group, mine, True)), below)
            if need[group] + len(coming) > here + movable:
                return False
        return True

    def _pages(self, level: int, group: int, mine: set[int], held: bool) -> list[Page]:
        """Pages that are not locked, held by a suspended request or not, those of `mine` left out."""
        pages = self.hierarchy.cells[group][level].pages()
        return [page for page in pages if page.locks == 0 and id(page) not in mine and (page.holds > 0) == held]

    def sizes(self) -> list[int]:
        """Slots of every pool group on every level."""
        return [cell.total for level in range(self.hierarchy.num_levels) for cell in self.hierarchy.level_cells(level)]

    # --- the whole state, to see that nothing changed

    def fingerprint(self) -> tuple[object, ...]:
        """Slots, queues in their order, counters and the size of the tree."""
        hierarchy = self.hierarchy
        cells = hierarchy.all_cells()
        queues = tuple(tuple((page.life_cycle, page.slot, page.priority, page.holds) for page in cell.order()) for cell in cells)
        slots = tuple((cell.total, cell.open) for cell in cells)
        counters = hierarchy.counters
        return (queues, slots, repr(counters.moved), repr(counters.dropped), repr(counters.lost), self.tree.num_blocks)


def longest_match(
    blocks: Sequence[tuple[bytes, Path, Block]],
    scope: bytes,
    prompt: Sequence[Token],
    kinds: Sequence[Kind],
    size: int,
    partial: bool,
    backoff: int,
) -> int:
    """The definition of a match, tried length by length over all blocks. n tokens are reusable if some path begins with them and
    every block that is not stale at n has a page of each life cycle that covers its tokens. A snapshot must be at exactly n."""
    known = {path: block for data, path, block in blocks if data == scope}
    wanted = tuple(prompt)
    longest = 0
    for path in known:
        run = _common(path, wanted)
        if run > longest and (partial or _belongs(path, wanted, size)):
            longest = run
    for n in range(max(0, longest - backoff), 0, -1):
        if _reusable(known, wanted, n, kinds, size, partial):
            return n
    return 0


def _common(path: Path, wanted: Path) -> int:
    run = 0
    for mine, theirs in zip(path, wanted, strict=False):
        if mine != theirs:
            break
        run += 1
    return run


def _belongs(path: Path, wanted: Path, size: int) -> bool:
    """Without partial matching a block counts only whole: a full one, or a partial one that the prompt ends with."""
    return wanted[: len(path)] == path and (len(path) % size == 0 or len(path) == len(wanted))


def _reusable(known: dict[Path, Block], wanted: Path, n: int, kinds: Sequence[Kind], size: int, partial: bool) -> bool:
    last = (n - 1) // size
    for ordinal in range(last):
        block = known.get(wanted[: (ordinal + 1) * size])
        if block is None or not _has_pages(block, ordinal, size, n, kinds, size, False):
            return False
    for path, block in known.items():
        if (len(path) - 1) // size != last or path[:n] != wanted[:n]:
            continue
        if (partial or _belongs(path, wanted, size)) and _has_pages(block, last, n - last * size, n, kinds, size, True):
            return True
    return False


def _has_pages(block: Block, ordinal: int, share: int, n: int, kinds: Sequence[Kind], size: int, is_last: bool) -> bool:
    for number, kind in enumerate(kinds):
        page = block.pages[number]
        coverage = page.coverage if page is not None and not block.num_pending_loads else 0
        if block.uncomputed and share < block.num_tokens:
            coverage = 0  # it matches as a whole only
        if kind.recurrent:
            if is_last and coverage != share:
                return False
        elif ordinal not in kind.stale(size, n) and coverage < share:
            return False
    return True
