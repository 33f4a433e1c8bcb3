"""Stand-ins for the rooms around the tree, and short ways to fill one."""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache_manager_v2.ids import NO_SLOT, NULL_POINT, PRIORITY_DEFAULT, LifeCycleId, PageStatus, SlotId
from kv_cache_manager_v2.layout.life_cycle import AttentionLifeCycle, LifeCycle, SsmLifeCycle
from kv_cache_manager_v2.listener import CachedBlock, CacheListener
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.keys import ReuseScope, make_block_keys
from kv_cache_manager_v2.reuse.match import Match, match
from kv_cache_manager_v2.reuse.tokens import pack
from kv_cache_manager_v2.reuse.tree import BLOCK_COVERED, RadixTree
from kv_cache_manager_v2.storage.page import Page, PageKeeper, PageOwner
from tests.charter.toys import ChunkedLifeCycle
from tests.support.storage_rig import make_cell

Token = int | bytes
FULL = ("full", 0, 0)
SSM = ("ssm", 0, 0)
EMPTY_SCOPE = ReuseScope()


def window(size: int, sink_blocks: int = 0) -> tuple[str, int, int]:
    """A sliding window of so many tokens, with sinks."""
    return ("window", size, sink_blocks)


def chunked(size: int) -> tuple[str, int, int]:
    """A life cycle from outside the package: a query sees its own chunk of so many tokens."""
    return ("chunked", size, 0)


def make_life_cycles(kinds: Sequence[tuple[str, int, int]], tokens_per_block: int) -> list[LifeCycle]:
    """Life cycles from FULL, SSM, window(...) and chunked(...)."""
    result: list[LifeCycle] = []
    for i, (kind, size, sinks) in enumerate(kinds):
        if kind == "ssm":
            result.append(SsmLifeCycle(LifeCycleId(i), tokens_per_block))
        elif kind == "chunked":
            result.append(ChunkedLifeCycle(LifeCycleId(i), tokens_per_block, size, 0))
        else:
            result.append(AttentionLifeCycle(LifeCycleId(i), tokens_per_block, size if kind == "window" else None, sinks))
    return result


class FakeKeeper(PageKeeper):
    """The storage as the tree sees it, keeping a record of every call."""

    def __init__(self) -> None:
        self.made = 0
        self.adopted: list[Page] = []
        self.unlisted: list[Page] = []
        self.dropped: list[Page] = []

    def new_page(self, life_cycle: int, level: int = 0) -> Page:
        self.made += 1
        return Page(life_cycle, make_cell(level), SlotId(self.made), PRIORITY_DEFAULT, NULL_POINT)

    def adopt(self, page: Page, owner: PageOwner, coverage: int) -> None:
        assert page.alive()
        page.owner = owner
        page.coverage = coverage
        self.adopted.append(page)

    def unlist(self, page: Page) -> None:
        page.owner = None
        self.unlisted.append(page)
        if page.status() == PageStatus.DROPPABLE:
            page.slot = NO_SLOT

    def drop(self, page: Page) -> None:
        assert page.status() == PageStatus.DROPPABLE
        assert page.alive()
        page.owner = None
        page.slot = NO_SLOT
        self.dropped.append(page)

    @staticmethod
    def lose(page: Page) -> None:
        """Evict a page: its slot goes, then its owner is told."""
        owner = page.owner
        assert owner is not None
        page.slot = NO_SLOT
        owner.page_gone(page)


class Notes(CacheListener):
    """A listener that writes down what it is told; blocks by their tokens."""

    def __init__(self) -> None:
        self.notes: list[tuple[object, ...]] = []

    def page_stored(self, block: CachedBlock, life_cycle: int, level: int, priority: int, covers_block: bool) -> None:
        self.notes.append(("stored", block.token_list(), life_cycle, covers_block))

    def page_removed(self, block: CachedBlock, life_cycle: int) -> None:
        self.notes.append(("page removed", block.token_list(), life_cycle))

    def block_removed(self, block: CachedBlock) -> None:
        self.notes.append(("block removed", block.token_list()))

    def page_moved(self, block: CachedBlock, life_cycle: int, source: int, destination: int) -> None:
        self.notes.append(("moved", block.token_list(), life_cycle, source, destination))

    def take(self) -> list[tuple[object, ...]]:
        """What was noted since the last call."""
        result = self.notes
        self.notes = []
        return result


class KeyNotes(Notes):
    """A listener that asks for the keys of the blocks that go."""

    def block_removed(self, block: CachedBlock) -> None:
        self.notes.append(("block removed", block.block_key()))


class Cache:
    """A tree over a fake storage."""

    def __init__(
        self,
        tokens_per_block: int,
        *kinds: tuple[str, int, int],
        listener: CacheListener | None = None,
        block_key_hash: str = "blake3",
    ) -> None:
        self.keeper = FakeKeeper()
        self.life_cycles = make_life_cycles(kinds, tokens_per_block)
        self.tree = RadixTree(self.life_cycles, tokens_per_block, self.keeper, listener, make_block_keys(block_key_hash))

    def store(
        self, tokens: Sequence[Token], scope: ReuseScope = EMPTY_SCOPE, without: Sequence[int] = (), snapshots: bool = True
    ) -> list[Block]:
        """Commit a whole prompt with a page of every life cycle in every block, but for those named in `without`.

        A snapshot is taken after the last token only. Stops at a partial block that a longer one covers.
        """
        size = self.tree.tokens_per_block
        node = self.tree.root(scope)
        path: list[Block] = []
        for beg in range(0, len(tokens), size):
            part = pack(list(tokens[beg : beg + size]))
            node, how = self.tree.insert(node, part.data, part.num_tokens)
            if how == BLOCK_COVERED:
                break
            path.append(node)
            for life_cycle in self.life_cycles:
                wanted = life_cycle.is_attention or (snapshots and beg + size >= len(tokens))
                if wanted and life_cycle.index not in without:
                    self.give(node, life_cycle.index, part.num_tokens)
        self.tree.check_invariants()
        return path

    def give(self, block: Block, life_cycle: int, coverage: int) -> Page | None:
        """Install a new page; None if the block has one as good."""
        page = self.keeper.new_page(life_cycle)
        return page if self.tree.install(block, page, coverage) else None

    def lose(self, block: Block, life_cycle: int = 0) -> None:
        """Evict the block's page."""
        page = block.pages[life_cycle]
        assert page is not None
        self.keeper.lose(page)
        self.tree.check_invariants()

    def match(self, tokens: Sequence[Token], partial: bool = True, backoff: int = 0, scope: ReuseScope = EMPTY_SCOPE) -> Match:
        return match(self.tree, scope, pack(list(tokens)), partial, backoff)

    def probe(self, tokens: Sequence[Token], partial: bool = True, backoff: int = 0, scope: ReuseScope = EMPTY_SCOPE) -> int:
        """Reusable tokens of a prompt."""
        return self.match(tokens, partial, backoff, scope).num_tokens


def toks(beg: int, end: int) -> list[Token]:
    """Distinct ids beg..end-1."""
    return list(range(beg, end))


def digest(number: int) -> bytes:
    """A digest made up from a number."""
    return number.to_bytes(32, "big")
