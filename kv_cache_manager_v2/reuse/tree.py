"""The radix tree of cached blocks: which tokens are cached under which scope, and the page of each life cycle.

Rule: a block stays only while something can still match through it. If a lost page makes every longer sequence unmatchable (full
attention, sinks), the block's subtree is dropped; a block without a child, a page and an open request is pruned. Blocks own their
children. Pages belong to the storage: the tree lists them, and tells the storage when it starts and stops listing one.

Only full blocks have children. No two siblings are prefixes of one another: a block that a longer sibling covers is not added, and
a longer block takes the place, and the pages, of the one that it continues. Nothing here recurses, however deep the tree.
"""

from __future__ import annotations

from typing import Final

from kv_cache_manager_v2.ids import PageStatus
from kv_cache_manager_v2.layout.life_cycle import NEVER, LifeCycle
from kv_cache_manager_v2.listener import CacheListener
from kv_cache_manager_v2.reuse import sibling_trie
from kv_cache_manager_v2.reuse.block import Block, RootBlock, as_block, subtree
from kv_cache_manager_v2.reuse.key_index import KeyIndex
from kv_cache_manager_v2.reuse.keys import BlockKeys, ReuseScope
from kv_cache_manager_v2.reuse.sibling_trie import TrieNode
from kv_cache_manager_v2.reuse.tokens import count_tokens
from kv_cache_manager_v2.storage.page import Page, PageKeeper

BLOCK_NEW: Final = 0  # the block was added
BLOCK_EXISTS: Final = 1  # an identical block was there: it is returned
BLOCK_COVERED: Final = 2  # a longer sibling begins with these tokens: it is returned, nothing was added
LOSS_NONE: Final = -2  # in `RadixTree.loss_level`: what goes is not a loss
LOSS_CLEARED: Final = -1


class RadixTree:
    """All cached blocks. Call `clear` before dropping a tree: blocks and tree refer to each other."""

    def __init__(
        self,
        life_cycles: list[LifeCycle],
        tokens_per_block: int,
        keeper: PageKeeper,
        listener: CacheListener | None,
        keys: BlockKeys,
    ) -> None:
        self.life_cycles = life_cycles
        self.tokens_per_block = tokens_per_block
        self.keeper = keeper
        self.listener = listener
        self.keys = keys
        self.num_blocks = 0  # roots not counted
        self.clock = 0  # logical time: blocks that ever entered the tree
        self.loss_life_cycle = -1  # while a listener is told of what went: the page that was lost ...
        self.loss_level = LOSS_NONE  # ... and where it lay
        self.num_superseded = 0  # partial blocks that a longer one has replaced, since construction
        self.snapshot_mask = 0  # bit set of the life cycles that keep snapshots (SSM): only the last block of a match needs them
        self.has_attention = False
        self.windows: list[LifeCycle] = []  # windows: they stop needing blocks past their sinks
        for life_cycle in life_cycles:
            if not life_cycle.is_attention:
                self.snapshot_mask |= 1 << life_cycle.index
                continue
            self.has_attention = True
            if not life_cycle.loss_ends_path(NEVER):
                self.windows.append(life_cycle)
        num_sinks = max([life_cycle.num_sink_blocks for life_cycle in life_cycles], default=0)
        self.path_masks: list[int] = [self._path_mask_at(ordinal) for ordinal in range(num_sinks)]
        self.path_mask_past_sinks = self._path_mask_at(NEVER)
        self._roots: dict[bytes, RootBlock] = {}  # by scope bytes
        self._index: KeyIndex | None = None  # kept from the first look-up by key on

    def _path_mask_at(self, ordinal: int) -> int:
        mask = 0
        for life_cycle in self.life_cycles:
            if life_cycle.loss_ends_path(ordinal):
                mask |= 1 << life_cycle.index
        return mask

    def path_mask(self, ordinal: int) -> int:
        """Bit set of the life cycles without whose page at this ordinal nothing longer can match."""
        masks = self.path_masks
        return masks[ordinal] if ordinal < len(masks) else self.path_mask_past_sinks

    # -- roots and keys ------------------------------------------------------------------------------------------------------

    def root(self, scope: ReuseScope) -> Block:
        """The root of a scope, made if absent; it stays only while it has children or is pinned."""
        found = self._roots.get(scope.data)
        if found is None:
            found = RootBlock(self, scope)
            self._roots[scope.data] = found
        return found

    def find_root(self, scope: ReuseScope) -> Block | None:
        return self._roots.get(scope.data)

    def roots(self) -> list[RootBlock]:
        return list(self._roots.values())

    def find_key(self, key: bytes) -> list[Block]:
        """The blocks of a key: one at most, unless the framing of the keys lets several share it.

        The first call computes the keys of all blocks, O(blocks); later ones are O(1).
        """
        index = self._index
        if index is None:
            index = self._index = KeyIndex(self.all_blocks())
        return index.find(key)

    def all_blocks(self) -> list[Block]:
        """Every block but the roots, parents before children; O(blocks)."""
        result: list[Block] = []
        for root in self._roots.values():
            result.extend(subtree(root)[1:])
        return result

    # -- blocks --------------------------------------------------------------------------------------------------------------

    def insert(self, parent: Block, tokens: bytes, num_tokens: int) -> tuple[Block, int]:
        """Find or add the block of these packed tokens below a full block or a root; O(depth of the sibling trie).

        Gives the block and BLOCK_NEW, BLOCK_EXISTS or BLOCK_COVERED. A new block takes over the pages of the sibling that it
        continues, each still good for the tokens that it was good for.
        """
        assert parent.attached, "the parent has left the tree: pin a block before adding to it"
        assert parent.ordinal < 0 or parent.num_tokens == self.tokens_per_block, "only a full block has children"
        assert 0 < num_tokens <= self.tokens_per_block, num_tokens
        children = parent.children
        if children is None:
            block = self._new_block(parent, tokens, num_tokens)
            parent.children = block
            return block, BLOCK_NEW
        sibling = as_block(sibling_trie.nearest(children, tokens, 0, len(tokens)))
        common = sibling_trie.common_bytes(sibling.tokens, tokens, 0, len(tokens))
        if common == len(tokens):
            return sibling, BLOCK_EXISTS if len(sibling.tokens) == common else BLOCK_COVERED
        block = self._new_block(parent, tokens, num_tokens)
        if common < len(sibling.tokens):
            parent.children = sibling_trie.insert(children, block, sibling, common)
        else:
            parent.children = sibling_trie.replace(children, sibling, block)
            self._supersede(sibling, block)
        return block, BLOCK_NEW

    def find(self, parent: Block, tokens: bytes) -> Block | None:
        """The block below `parent` that `insert` would find: it has these packed tokens, or begins with them. Changes nothing."""
        found = self.find_related(parent, tokens)
        return found if found is not None and len(found.tokens) >= len(tokens) else None

    def find_related(self, parent: Block, tokens: bytes) -> Block | None:
        """As `find`, or else the block that a block of these tokens would continue, and take the pages of. Changes nothing."""
        children = parent.children
        if children is None:
            return None
        sibling = as_block(sibling_trie.nearest(children, tokens, 0, len(tokens)))
        common = sibling_trie.common_bytes(sibling.tokens, tokens, 0, len(tokens))
        return sibling if common in (len(tokens), len(sibling.tokens)) else None

    def _new_block(self, parent: Block, tokens: bytes, num_tokens: int) -> Block:
        block = Block(self, parent, parent.ordinal + 1, tokens, num_tokens)
        if not self.has_attention:
            block.reach = num_tokens  # no page is needed for any of them
        self.num_blocks += 1
        self.clock += 1
        if self._index is not None:
            self._index.add(block)
        return block

    def loose_block(self, ordinal: int, tokens: bytes) -> Block:
        """A full block that belongs to no tree."""
        block = Block(self, None, ordinal, tokens, self.tokens_per_block)
        block.attached = False
        return block

    def _supersede(self, old: Block, new: Block) -> None:
        """The old block's tokens begin the new one's: it leaves, its pages move over."""
        self.num_superseded += 1
        assert old.children is None, "a block that another one continues is partial, so it has no children"
        self.loss_level = LOSS_NONE
        self._tell_removed(old)
        pages = old.take_pages()
        self._detach(old)
        if old.unsettled:  # its pages may turn out wrong, and the load that decides it refers to the old block
            self._unlist_all(pages)
            return
        for page in pages:
            new.put_page(page)
            self.keeper.adopt(page, new, page.coverage)
            self._tell_stored(new, page)
        self._recount(new)

    def pin(self, block: Block) -> None:
        """A request's path ends here, at a full block or a root: the block stays until `unpin`."""
        block.pins += 1

    def unpin(self, block: Block) -> None:
        """Undo one `pin`; a block without children and pages goes, and so on upwards."""
        assert block.pins > 0, "unpin without pin"
        block.pins -= 1
        if block.attached:
            self.loss_level = LOSS_NONE
            self._prune(block)

    def clear(self) -> None:
        """Drop every block and every root, pinned or not; O(blocks)."""
        self.loss_level = LOSS_CLEARED
        for root in list(self._roots.values()):
            self._drop_subtree(root)
        self._roots.clear()
        assert self.num_blocks == 0, self.num_blocks

    # -- pages ---------------------------------------------------------------------------------------------------------------

    def install(self, block: Block, page: Page, coverage: int) -> bool:
        """Give a block a page that is good for `coverage` of its tokens, unless it has one as good; whether it took it.

        A narrower one is not listed any more; a page that has become wider in place may be installed again. A block that left the
        tree takes nothing.
        """
        if not block.attached:
            return False
        assert 0 < coverage <= block.num_tokens, (coverage, block.num_tokens)
        old = block.page(page.life_cycle)
        if old is not None and old.coverage >= coverage:
            return False
        if old is not page:
            block.put_page(page)
        self.keeper.adopt(page, block, coverage)
        if old is not None and old is not page:
            self.keeper.unlist(old)
        self._recount(block)
        if block.unsettled == 0:
            self._tell_stored(block, page)
        return True

    def install_all(self, block: Block, pages: list[Page], coverage: int) -> None:
        """As `install`, for pages of ascending life cycles, none of which the block has as good. O(life cycles)."""
        if not block.attached:
            return
        assert 0 < coverage <= block.num_tokens, (coverage, block.num_tokens)
        for old in block.put_pages(pages):
            self.keeper.unlist(old)
        for page in pages:
            self.keeper.adopt(page, block, coverage)
        self._recount(block)
        if block.unsettled == 0:
            for page in pages:
                self._tell_stored(block, page)

    def page_gone(self, block: Block, page: Page) -> None:
        """The storage dropped or lost a page: remove it, and all blocks that cannot be matched without it."""
        if not block.forget_page(page):
            return  # forgotten before, as when a block above went first
        if not block.attached:
            return
        self.loss_life_cycle = page.life_cycle
        self.loss_level = page.level
        if self.life_cycles[page.life_cycle].loss_ends_path(block.ordinal):
            self.remove(block)
            return
        if self.listener is not None:
            self.listener.page_removed(block, page.life_cycle)
        self._recount(block)
        self._prune(block)

    def drop_page(self, page: Page) -> None:
        """Drop a page on purpose (a planned drop), with the same consequences as its loss."""
        owner = page.owner
        if owner is not None:
            block = as_block(owner)
            assert block.page(page.life_cycle) is page, "the page's owner does not list it"
            self.page_gone(block, page)
            self._unlist(page)

    def remove(self, block: Block) -> None:
        """Remove a block, all its descendants, and the blocks above that are then pruned; O(subtree)."""
        parent = block.parent
        assert block.attached, "the block has left the tree"
        assert parent is not None, "a root is dropped by clear, or with its last block"
        assert parent.children is not None
        parent.children = sibling_trie.remove(parent.children, block)
        self._drop_subtree(block)
        self._prune(parent)

    def hide(self, block: Block) -> None:
        """One more load is in flight on which this block's contents depend: nothing of it matches before `show`."""
        block.unsettled += 1
        self._recount(block)

    def show(self, block: Block) -> None:
        """Undo one `hide`: that load went well. (After one that failed: `remove`.) With the last one all pages are told."""
        assert block.unsettled > 0, "show without hide"
        block.unsettled -= 1
        self._recount(block)
        if block.unsettled == 0 and block.attached:
            page = block.first
            while page is not None:
                self._tell_stored(block, page)
                page = page.next_in_block

    # -- inside --------------------------------------------------------------------------------------------------------------

    def _recount(self, block: Block) -> None:
        """Recompute the summary of the block's pages that a match reads."""
        num_tokens: int = block.num_tokens  # not i32, as the attribute is: positions are shifted by below
        covered = 0
        reach = num_tokens
        snapshot = num_tokens + 1  # the position at which all snapshots are; 0 if one is missing or they differ
        following = block.first  # the pages are listed by life cycle
        for life_cycle in self.life_cycles:
            usable = 0
            if following is not None and following.life_cycle == life_cycle.index:
                usable = life_cycle.usable_tokens(following.coverage, num_tokens)
                following = following.next_in_block
            if usable >= num_tokens:
                covered |= 1 << life_cycle.index
            if life_cycle.is_attention:
                reach = min(reach, usable)
            else:
                snapshot = usable if snapshot > num_tokens or snapshot == usable else 0
        ends = 1 << snapshot if 0 < snapshot <= reach else 0
        if block.unsettled:
            covered = reach = ends = 0
        block.covered = covered
        if reach != block.reach or ends != block.ends:
            block.reach = reach
            block.ends = ends
            parent = block.parent
            if parent is not None and isinstance(parent.children, TrieNode):
                sibling_trie.refresh(parent.children, block)

    def _prune(self, block: Block) -> None:
        """Remove a block that nothing can match through, then its parent if that is now one, and so on to the root."""
        node = block
        while node.children is None and node.pins == 0 and node.first is None:
            parent = node.parent
            if parent is None:
                self._drop_root(node)
                return
            assert parent.children is not None
            parent.children = sibling_trie.remove(parent.children, node)
            self._tell_removed(node)
            self._detach(node)
            node = parent

    def _drop_root(self, block: Block) -> None:
        assert isinstance(block, RootBlock)
        if block.attached:
            block.attached = False
            del self._roots[block.scope.data]

    def _drop_subtree(self, top: Block) -> None:
        """Detach `top`, which its parent no longer lists, and all its descendants; parents are reported first."""
        gone = subtree(top)
        for block in gone if top.ordinal >= 0 else gone[1:]:  # a root is no block
            self._tell_removed(block)
        top.attached = False
        for block in gone:
            pages = block.take_pages()
            if block.ordinal >= 0:
                self._detach(block)
            if isinstance(block.children, TrieNode):
                sibling_trie.dismantle(block.children)
            block.children = None
            self._unlist_all(pages)

    def _tell_stored(self, block: Block, page: Page) -> None:
        if self.listener is not None:
            covers = self.life_cycles[page.life_cycle].usable_tokens(page.coverage, block.num_tokens) >= block.num_tokens
            self.listener.page_stored(block, page.life_cycle, page.level, page.priority, covers)

    def _tell_removed(self, block: Block) -> None:
        """Before the block's links are cut: its key still needs them."""
        if self._index is not None:
            self._index.remove(block)
        if self.listener is not None:
            self.listener.block_removed(block)

    def _detach(self, block: Block) -> None:
        """Cut a block's links. References to it still find its tokens, and that it is detached."""
        block.attached = False
        block.parent = None
        self.num_blocks -= 1

    def _unlist_all(self, pages: list[Page]) -> None:
        for page in pages:
            self._unlist(page)

    def _unlist(self, page: Page) -> None:
        """Tell the storage that a page is listed no longer."""
        if not page.alive():
            return  # the storage dropped it in the same sweep
        if page.status() == PageStatus.DROPPABLE:
            self.keeper.drop(page)
        else:
            self.keeper.unlist(page)

    def check_invariants(self) -> None:
        """Assert the whole structure; O(blocks x life cycles)."""
        blocks = self.all_blocks()
        assert self.num_blocks == len(blocks), (self.num_blocks, len(blocks))
        for root in self._roots.values():
            assert root.attached
            assert root.parent is None
            assert self._roots[root.scope.data] is root
            self._check_children(root)
        for block in blocks:
            assert block.attached
            assert block.num_tokens == count_tokens(block.tokens) > 0
            assert block.children is None or block.num_tokens == self.tokens_per_block, "a partial block has children"
            self._check_children(block)
            self._check_pages(block)
        if self._index is not None:
            self._index.check(blocks)

    def _check_children(self, block: Block) -> None:
        if block.children is not None:
            sibling_trie.check(block.children)
            for child in block.child_blocks():
                assert child.parent is block
                assert child.ordinal == block.ordinal + 1

    def _check_pages(self, block: Block) -> None:
        page = block.first
        below = -1
        while page is not None:
            assert below < page.life_cycle < len(self.life_cycles), "the pages of a block are listed by life cycle"
            assert page.owner is block, "a listed page has another owner"
            assert 0 < page.coverage <= block.num_tokens, (page.coverage, block.num_tokens)
            below = page.life_cycle
            page = page.next_in_block
        before = (block.covered, block.reach, block.ends)
        self._recount(block)
        assert before == (block.covered, block.reach, block.ends), "the summary of the block's pages is out of date"
