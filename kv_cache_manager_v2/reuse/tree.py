"""The radix tree of cached blocks: which tokens are cached under which scope, and their page in each life cycle.

A block stays only while a match can still use it. If a lost page makes every longer match impossible (full attention, sinks), the
block's subtree is dropped. A block without children, pages and pins is pruned. Blocks own their children. Pages belong to the
storage, which the tree informs when it starts and stops listing a page.

Rule: only full blocks have children, and no two siblings are prefixes of one another. A block that a longer sibling covers is not
added. A longer block replaces the one that it continues, and takes over its pages. No method recurses, however deep the tree.
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
from kv_cache_manager_v2.storage.page import Page, PageKeeper

# What `RadixTree.insert` did.
BLOCK_NEW: Final = 0  # it added the block
BLOCK_EXISTS: Final = 1  # it found an identical block
BLOCK_COVERED: Final = 2  # it found a longer sibling that begins with these tokens
# Values of `RadixTree.loss_level` that are no cache level.
LOSS_NONE: Final = -2  # a block is removed without a loss: it was replaced, or pruned while empty
LOSS_CLEARED: Final = -1  # the whole cache is cleared


class RadixTree:
    """All cached blocks. Call `clear` when a tree is no longer needed: blocks and tree refer to each other."""

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
        self.num_blocks = 0  # without roots
        self.clock = 0  # logical time: blocks added so far
        self.version = 0  # changes whenever a match may have another result
        self.num_searches = 0  # matches searched so far
        self.loss_life_cycle = -1  # for listeners, during a removal: life cycle of the lost page that caused it ...
        self.loss_level = LOSS_NONE  # ... and the cache level of that page
        self.num_superseded = 0  # partial blocks replaced by a longer one so far
        self.snapshot_mask = 0  # bit set of the recurrent life cycles: only the last block of a match needs their page
        self.has_attention = False
        self.windows: list[LifeCycle] = []  # the windowed life cycles: a match needs their pages in the window and the sinks only
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
        self.duplicates: dict[Block, list[Page]] = {}  # with the bytes of a block's page, of requests that do not adopt
        self.added_ahead: dict[Block, int] = {}  # uncomputed blocks that had other pages before: bit set of the uncomputed ones
        self._index: KeyIndex | None = None  # made by the first look-up by key, then kept up to date

    def _path_mask_at(self, ordinal: int) -> int:
        mask = 0
        for life_cycle in self.life_cycles:
            if life_cycle.loss_ends_path(ordinal):
                mask |= 1 << life_cycle.index
        return mask

    def path_mask(self, ordinal: int) -> int:
        """Bit set of the path-ending life cycles at this ordinal: if their page is missing, no longer match is possible."""
        masks = self.path_masks
        return masks[ordinal] if ordinal < len(masks) else self.path_mask_past_sinks

    # -- roots and keys ------------------------------------------------------------------------------------------------------

    def root(self, scope: ReuseScope) -> Block:
        """The root of a scope, made if absent. It is removed once it has neither children nor pins."""
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
        """The blocks with this key: at most one, except with SHA-256 keys (see the framing in keys.py).

        The first call computes the keys of all blocks, O(blocks). Later calls are O(1).
        """
        index = self._index
        if index is None:
            index = self._index = KeyIndex(self.all_blocks())
        return index.find(key)

    def all_blocks(self) -> list[Block]:
        """Every block except the roots, parents before children. O(blocks)."""
        result: list[Block] = []
        for root in self._roots.values():
            result.extend(subtree(root)[1:])
        return result

    # -- blocks --------------------------------------------------------------------------------------------------------------

    def insert(self, parent: Block, tokens: bytes, num_tokens: int) -> tuple[Block, int]:
        """Find or add the block of these packed tokens below a full block or a root. O(depth of the sibling trie).

        Returns the block and BLOCK_NEW, BLOCK_EXISTS or BLOCK_COVERED. A new block takes over the pages of the sibling that it
        continues; their coverage does not change.
        """
        assert parent.attached, "the parent has left the tree: pin a block before adding children to it"
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
        """The child of `parent` that has these packed tokens or begins with them: what `insert` would find. Changes nothing."""
        children = parent.children
        if children is None:
            return None
        found = as_block(sibling_trie.nearest(children, tokens, 0, len(tokens)))
        if len(found.tokens) > len(tokens):
            return found if found.tokens[: len(tokens)] == tokens else None
        return found if found.tokens == tokens else None

    def find_related(self, parent: Block, tokens: bytes) -> Block | None:
        """As `find`; failing that, the child that these tokens continue, which `insert` would replace. Changes nothing."""
        children = parent.children
        if children is None:
            return None
        sibling = as_block(sibling_trie.nearest(children, tokens, 0, len(tokens)))
        common = sibling_trie.common_bytes(sibling.tokens, tokens, 0, len(tokens))
        return sibling if common in (len(tokens), len(sibling.tokens)) else None

    def _new_block(self, parent: Block, tokens: bytes, num_tokens: int) -> Block:
        block = Block(self, parent, parent.ordinal + 1, tokens, num_tokens)
        block.born = self.clock
        if not self.has_attention:
            block.reach = num_tokens  # no attention life cycle, so no token needs a page
        self.num_blocks += 1
        self.clock += 1
        self.version += 1
        if self._index is not None:
            self._index.add(block)
        return block

    def detached_block(self, ordinal: int, tokens: bytes) -> Block:
        """Make a full block that is not in the tree."""
        block = Block(self, None, ordinal, tokens, self.tokens_per_block)
        block.attached = False
        return block

    def _supersede(self, old: Block, new: Block) -> None:
        """Replace a block by a longer one that begins with its tokens, and hand over its pages."""
        self.num_superseded += 1
        assert old.children is None, "a block that another one continues is partial, so it has no children"
        self.loss_level = LOSS_NONE
        self._notify_removed(old)
        pages = old.unlist_pages()
        self._detach(old)
        if old.num_pending_loads:  # its pages may turn out lost, and the pending load refers to the old block
            self._unlist_all(pages)
            return
        for page in pages:
            new.put_page(page)
            self.keeper.adopt(page, new, page.coverage)
            self._notify_stored(new, page)
        self._recount(new)

    def pin(self, block: Block) -> None:
        """Keep a full block or a root, where a request's path ends, until `unpin`."""
        block.pins += 1

    def unpin(self, block: Block) -> None:
        """Undo one `pin`. If the block has no pins, children and pages left, it is pruned, then its parent likewise."""
        assert block.pins > 0, "unpin without pin"
        block.pins -= 1
        if block.attached:
            self.loss_level = LOSS_NONE
            self._prune(block)

    def clear(self) -> None:
        """Drop every block and every root, pinned or not. O(blocks)."""
        self.loss_level = LOSS_CLEARED
        for root in list(self._roots.values()):
            self._drop_subtree(root)
        self._roots.clear()
        assert self.num_blocks == 0, self.num_blocks

    # -- pages ---------------------------------------------------------------------------------------------------------------

    def install(self, block: Block, page: Page, coverage: int) -> bool:
        """List a page that covers the first `coverage` tokens of a block. Returns whether it did.

        Does nothing if the block has a page of that life cycle with at least that coverage, or has left the tree. A page with less
        coverage is replaced. A page whose coverage has grown may be installed again.
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
        self._notify_stored(block, page)
        return True

    def install_all(self, block: Block, pages: list[Page], coverage: int) -> None:
        """As `install`, for pages of ascending life cycles, each of which has more coverage than the block's present page."""
        if not block.attached:
            return
        assert 0 < coverage <= block.num_tokens, (coverage, block.num_tokens)
        replaced = block.put_pages(pages)
        if replaced is not None:
            for old in replaced:
                self.keeper.unlist(old)
        for page in pages:
            self.keeper.adopt(page, block, coverage)
        self._recount(block)
        for page in pages:
            self._notify_stored(block, page)

    def page_gone(self, block: Block, page: Page) -> None:
        """Unlist a page that the storage has dropped or lost, and remove the blocks that cannot match without it."""
        if not block.unlist_page(page):
            return  # unlisted before, as when an ancestor was removed first
        if not block.attached:
            return
        if self.duplicates and self._replace_by_duplicate(block, page):
            return
        self.loss_life_cycle = page.life_cycle
        self.loss_level = page.level
        if self.life_cycles[page.life_cycle].loss_ends_path(block.ordinal):
            self.remove(block)
            return
        if self.listener is not None and not self._is_uncomputed(block, page):
            self.listener.page_removed(block, page.life_cycle)
        self._recount(block)
        self._prune(block)

    def drop_page(self, page: Page) -> None:
        """Drop a page for a planned drop, with the same consequences as its loss."""
        owner = page.owner
        if owner is not None:
            block = as_block(owner)
            assert block.page(page.life_cycle) is page, "the page's owner does not list it"
            self.page_gone(block, page)
            self._unlist(page)

    def add_duplicate(self, block: Block, page: Page) -> None:
        """Record a private page with all bytes of a full block, which replaces the block's page if that is dropped or lost."""
        if block.attached and page.owner is None:
            page.coverage = block.num_tokens
            self.duplicates[block] = [*self._duplicates_in_use(block), page]

    def forget_duplicates(self, blocks: list[Block]) -> None:
        """Remove records of pages that are no longer in use. O(blocks)."""
        for block in blocks:
            if block in self.duplicates:
                pages = self._duplicates_in_use(block)
                if pages:
                    self.duplicates[block] = pages
                else:
                    del self.duplicates[block]

    def _duplicates_in_use(self, block: Block) -> list[Page]:
        return [page for page in self.duplicates.get(block, []) if page.alive() and page.owner is None]

    def _replace_by_duplicate(self, block: Block, lost: Page) -> bool:
        """List a duplicate in place of a page that the block has lost. Returns False if there is none."""
        for page in self._duplicates_in_use(block):
            if page.life_cycle == lost.life_cycle and page.transfers == 0 and not page.lost:
                block.put_page(page)
                self.keeper.adopt(page, block, block.num_tokens)
                self._recount(block)
                if self.listener is not None and self._is_reported(block, page) and page.level != lost.level:
                    self.listener.page_moved(block, page.life_cycle, lost.level, page.level)
                return True
        return False

    def remove(self, block: Block) -> None:
        """Remove a block and all its descendants, then prune its ancestors. O(subtree)."""
        parent = block.parent
        assert block.attached, "the block has left the tree"
        assert parent is not None, "a root is removed by `clear`, or together with its last block"
        assert parent.children is not None
        parent.children = sibling_trie.remove(parent.children, block)
        self._drop_subtree(block)
        self._prune(parent)

    def hide(self, block: Block) -> None:
        """Count a load in flight that this block's bytes depend on. The block cannot match until `show`."""
        block.num_pending_loads += 1
        self._recount(block)

    def show(self, block: Block) -> None:
        """Undo one `hide`, after a load that succeeded. (A failed load calls `remove`.) The last one makes all pages matchable."""
        assert block.num_pending_loads > 0, "show without hide"
        block.num_pending_loads -= 1
        self._recount(block)
        self._notify_all_stored(block, -1)

    def install_ahead(self, block: Block, pages: list[Page], is_new: bool) -> None:
        """As `install_all`, for pages that are not computed yet. Until `set_computed` they are not reported, and nothing is copied
        from the block: it matches as a whole only. The other pages of a block that is not new are computed.
        """
        if not is_new:
            self.added_ahead[block] = sum([1 << page.life_cycle for page in pages])
        block.uncomputed = True
        self.install_all(block, pages, block.num_tokens)

    def set_computed(self, block: Block) -> None:
        """Record that all pages of a block are computed, and report those that were not."""
        added = self.added_ahead.pop(block, -1)
        block.uncomputed = False
        self._recount(block)
        self._notify_all_stored(block, added)

    def computed(self, block: Block) -> int:
        """Bit set of the life cycles whose page covers all tokens of the block, and is computed."""
        return block.covered & ~self.added_ahead.get(block, -1) if block.uncomputed else block.covered

    def _notify_all_stored(self, block: Block, life_cycles: int) -> None:
        page = block.first if block.attached else None
        while page is not None:
            if life_cycles & 1 << page.life_cycle:
                self._notify_stored(block, page)
            page = page.next_in_block

    # -- inside --------------------------------------------------------------------------------------------------------------

    def _recount(self, block: Block) -> None:
        """Recompute `covered`, `reach` and `ends`, the summary of the block's pages that a match reads."""
        self.version += 1
        num_tokens: int = block.num_tokens  # int rather than i32: used as a shift distance below
        covered = 0
        reach = num_tokens
        snapshot = num_tokens + 1  # the common position of all snapshots; 0 if one is missing or the positions differ
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
        if block.num_pending_loads:
            covered = reach = ends = 0
        if block.uncomputed:  # nothing is copied from it
            reach = ends = 0
        block.covered = covered
        if reach != block.reach or ends != block.ends:
            block.reach = reach
            block.ends = ends
            parent = block.parent
            if parent is not None and isinstance(parent.children, TrieNode):
                sibling_trie.refresh(parent.children, block)

    def _prune(self, block: Block) -> None:
        """Remove a block that has no children, pins and pages, then its parent likewise, up to the root."""
        node = block
        while node.children is None and node.pins == 0 and node.first is None:
            parent = node.parent
            if parent is None:
                self._drop_root(node)
                return
            assert parent.children is not None
            parent.children = sibling_trie.remove(parent.children, node)
            self._notify_removed(node)
            self._detach(node)
            node = parent

    def _drop_root(self, block: Block) -> None:
        assert isinstance(block, RootBlock)
        if block.attached:
            block.attached = False
            del self._roots[block.scope.data]

    def _drop_subtree(self, top: Block) -> None:
        """Detach `top`, which its parent no longer lists, and all its descendants. Listeners hear of parents first."""
        gone = subtree(top)
        for block in gone if top.ordinal >= 0 else gone[1:]:  # listeners do not know roots
            self._notify_removed(block)
        top.attached = False
        for block in gone:
            pages = block.unlist_pages()
            if block.ordinal >= 0:
                self._detach(block)
            if isinstance(block.children, TrieNode):
                sibling_trie.dismantle(block.children)
            block.children = None
            self._unlist_all(pages)

    def _notify_stored(self, block: Block, page: Page) -> None:
        """Report a page that can match. Pages of a block that waits for loads or for its computation are reported after that."""
        if self.listener is not None and self._is_reported(block, page):
            covers = self.life_cycles[page.life_cycle].usable_tokens(page.coverage, block.num_tokens) >= block.num_tokens
            self.listener.page_stored(block, page.life_cycle, page.level, page.priority, covers)

    def _is_reported(self, block: Block, page: Page) -> bool:
        return block.num_pending_loads == 0 and not self._is_uncomputed(block, page)

    def _is_uncomputed(self, block: Block, page: Page) -> bool:
        return block.uncomputed and bool(self.added_ahead.get(block, -1) & 1 << page.life_cycle)

    def _notify_removed(self, block: Block) -> None:
        """Called before the block is detached: computing its key needs the parent."""
        if self._index is not None:
            self._index.remove(block)
        if self.listener is not None:
            self.listener.block_removed(block)

    def _detach(self, block: Block) -> None:
        """Cut the link to the parent, and mark the block as detached. Its tokens stay readable."""
        block.attached = False
        block.parent = None
        self.num_blocks -= 1
        self.version += 1
        if self.duplicates:
            self.duplicates.pop(block, None)
        if self.added_ahead:
            self.added_ahead.pop(block, None)

    def _unlist_all(self, pages: list[Page]) -> None:
        for page in pages:
            self._unlist(page)

    def _unlist(self, page: Page) -> None:
        """Tell the storage that the tree no longer lists a page."""
        if not page.alive():
            return  # the storage has dropped it already
        if page.status() == PageStatus.DROPPABLE:
            self.keeper.drop(page)
        else:
            self.keeper.unlist(page)

    def check_invariants(self) -> None:
        """Assert every invariant of the tree. O(blocks x life cycles)."""
        blocks = self.all_blocks()
        assert self.num_blocks == len(blocks), (self.num_blocks, len(blocks))
        for root in self._roots.values():
            assert root.parent is None
            assert self._roots[root.scope.data] is root
            root.check_children()
        for block in blocks:
            assert block.children is None or block.num_tokens == self.tokens_per_block, "a partial block has children"
            block.check_children()
            block.check_pages(len(self.life_cycles))
            before = (block.covered, block.reach, block.ends)
            self._recount(block)
            assert before == (block.covered, block.reach, block.ends), "the summary of the block's pages is out of date"
        if self._index is not None:
            self._index.check(blocks)
        for block in self.duplicates:
            assert block.attached, "a block with duplicates has left the tree"
        for block, added in self.added_ahead.items():
            assert block.uncomputed, "a block has pages added ahead, and counts as computed"
            assert block.covered & added == added, "a block has lost a page that was added ahead"
