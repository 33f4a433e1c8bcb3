"""A node of the radix tree: the tokens of one block, and its page in each life cycle.

Blocks own their children and refer to their parent. Only the tree that a block belongs to changes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i32, i64, mypyc_attr

from kv_cache_manager_v2.errors import LogicError
from kv_cache_manager_v2.listener import CachedBlock
from kv_cache_manager_v2.reuse import sibling_trie
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.sibling_trie import Leaf, TrieNode
from kv_cache_manager_v2.reuse.tokens import count_tokens, unpack
from kv_cache_manager_v2.storage.page import Page

if TYPE_CHECKING:
    from kv_cache_manager_v2.reuse.tree import RadixTree


@mypyc_attr(acyclic=True)
class Block(Leaf):
    """Up to tokens_per_block tokens that follow those of the parent, and their pages: at most one per life cycle."""

    def __init__(self, tree: RadixTree, parent: Block | None, ordinal: int, tokens: bytes, num_tokens: int) -> None:
        super().__init__(tokens)
        # Four-byte fields, declared next to the four-byte field of `Leaf`, so that the compiled class has no padding.
        self.ordinal: i32 = ordinal  # position in the sequence; -1 for a root
        self.num_tokens: i32 = num_tokens
        self.pins: i32 = 0  # open requests whose path ends here: a pinned block stays even without pages
        self.num_pending_loads: i32 = (
            0  # loads in flight that the pages' bytes depend on; while there are any, the block cannot match
        )
        self.attached = True
        self.uncomputed = False  # published ahead: the step that computes it may not be queued yet
        # Eight-byte fields.
        self.tree = tree
        self.born: i64 = 0  # logical time at which it entered the tree
        self.parent = parent  # None for a root and for a detached block
        self.first: Page | None = None  # first page of the list; the others follow through `Page.next_in_block`
        self.children: Leaf | TrieNode | None = None  # see sibling_trie.py
        self.covered = 0  # bit set of the life cycles whose page covers all tokens of the block
        self.key: bytes | None = None  # computed on demand
        self.event_state: object = None  # belongs to the event manager

    def is_final(self, page: Page) -> bool:
        """A page of a full block, or a snapshot. The request of a partial block may go on to write to its page."""
        tree = self.tree
        return page.coverage == tree.tokens_per_block or not tree.life_cycles[page.life_cycle].is_attention

    def page_gone(self, page: Page) -> None:
        self.tree.page_gone(self, page)

    def page_relocated(self, page: Page, source: int, destination: int) -> None:
        listener = self.tree.listener
        if listener is not None and self.attached and self.page(page.life_cycle) is page:
            listener.page_moved(self, page.life_cycle, source, destination)

    def block_key(self) -> bytes:
        """The chained key. O(ancestors whose key is not computed yet).

        Raises LogicError for a block that left the tree before its key was computed.
        """
        missing: list[Block] = []
        node = self
        key = node.key
        while key is None:
            missing.append(node)
            parent = node.parent
            if parent is None:
                raise LogicError(
                    "the block has left the tree, and its key was not computed before; ask for the key while the block is cached"
                )
            node = parent
            key = node.key
        while missing:
            node = missing.pop()
            key = self.tree.keys.block_key(key, node.tokens)
            node.key = key
        return key

    def parent_block(self) -> CachedBlock | None:
        parent = self.parent
        return None if parent is None or parent.ordinal < 0 else parent

    def token_list(self) -> list[int | bytes]:
        return unpack(self.tokens)

    def child_blocks(self) -> list[Block]:
        """The children, in the order of their packed bits."""
        return [as_block(leaf) for leaf in sibling_trie.leaves(self.children)]

    # --- pages: a list linked through the pages themselves, so that it needs no memory and no work of the garbage collector

    def page(self, life_cycle: int) -> Page | None:
        """The page of a life cycle, None if it has none. O(life cycles)."""
        page = self.first
        while page is not None and page.life_cycle != life_cycle:
            page = page.next_in_block
        return page

    @property
    def pages(self) -> tuple[Page | None, ...]:
        """By life cycle."""
        return tuple([self.page(life_cycle.index) for life_cycle in self.tree.life_cycles])

    def put_page(self, page: Page) -> None:
        """Add a page to the list. It replaces the page of the same life cycle, if there is one."""
        before: Page | None = None
        after = self.first
        while after is not None and after.life_cycle < page.life_cycle:
            before = after
            after = after.next_in_block
        if after is not None and after.life_cycle == page.life_cycle:
            rest = after.next_in_block
            after.next_in_block = None
            after = rest
        page.next_in_block = after
        if before is None:
            self.first = page
        else:
            before.next_in_block = page

    def put_pages(self, pages: list[Page]) -> list[Page] | None:
        """Add pages, in ascending order of life cycles. Returns the pages that they replace; None for none. O(life cycles)."""
        replaced: list[Page] | None = None  # a list for each new block would take 3 % of the time of a commit
        before: Page | None = None
        after = self.first
        for page in pages:
            while after is not None and after.life_cycle < page.life_cycle:
                before = after
                after = after.next_in_block
            if after is page:
                before = page
                after = page.next_in_block
                continue
            if after is not None and after.life_cycle == page.life_cycle:
                if replaced is None:
                    replaced = []
                replaced.append(after)
                rest = after.next_in_block
                after.next_in_block = None
                after = rest
            page.next_in_block = after
            if before is None:
                self.first = page
            else:
                before.next_in_block = page
            before = page
        return replaced

    def unlist_page(self, page: Page) -> bool:
        """Remove a page from the list. Returns whether it was listed."""
        before: Page | None = None
        found = self.first
        while found is not None and found is not page:
            before = found
            found = found.next_in_block
        if found is None:
            return False
        if before is None:
            self.first = page.next_in_block
        else:
            before.next_in_block = page.next_in_block
        page.next_in_block = None
        return True

    def unlist_pages(self) -> list[Page]:
        """Remove all pages from the list, and return them."""
        taken: list[Page] = []
        page = self.first
        self.first = None
        while page is not None:
            taken.append(page)
            following = page.next_in_block
            page.next_in_block = None
            page = following
        return taken

    # --- checks

    def check_children(self) -> None:
        """Assert that the block is in the tree, and that its children are in order and know it."""
        assert self.attached
        if self.children is not None:
            sibling_trie.check(self.children)
            for child in self.child_blocks():
                assert child.parent is self
                assert child.ordinal == self.ordinal + 1

    def check_pages(self, life_cycles: int) -> None:
        """Assert that the pages are listed by life cycle, and belong to this block, whose tokens are counted."""
        assert self.num_tokens == count_tokens(self.tokens) > 0
        page = self.first
        below = -1
        while page is not None:
            assert below < page.life_cycle < life_cycles, "the pages of a block are listed by life cycle"
            assert page.owner is self, "a listed page has another owner"
            assert 0 < page.coverage <= self.num_tokens, (page.coverage, self.num_tokens)
            below = page.life_cycle
            page = page.next_in_block


@mypyc_attr(acyclic=True)
class RootBlock(Block):
    """The parent of all first blocks of one scope. It has no tokens and no pages."""

    def __init__(self, tree: RadixTree, scope: ReuseScope) -> None:
        super().__init__(tree, None, -1, b"", 0)
        self.scope = scope
        self.key = tree.keys.root_key(scope)


def as_block(leaf: object) -> Block:
    """Narrow a leaf of a sibling trie, or the owner of a cached page, to `Block`."""
    assert isinstance(leaf, Block)
    return leaf


def subtree(top: Block) -> list[Block]:
    """A block and its descendants, parents first."""
    result: list[Block] = []
    stack = [top]
    while stack:
        block = stack.pop()
        result.append(block)
        stack.extend(block.child_blocks())
    return result
