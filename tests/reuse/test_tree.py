"""The radix tree: insertion, page slots, loss and pruning, pins, clearing, and what a listener is told."""

from __future__ import annotations

import itertools

import pytest

from kv_cache_manager_v2.errors import LogicError
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.keys import ReuseScope, sequence_to_blockchain_keys
from kv_cache_manager_v2.reuse.tokens import pack
from kv_cache_manager_v2.reuse.tree import BLOCK_COVERED, BLOCK_EXISTS, BLOCK_NEW
from tests.support.tree_rig import EMPTY_SCOPE, FULL, SSM, Cache, KeyNotes, Notes, Token, digest, toks, window


def insert(cache: Cache, parent: Block, tokens: list[Token]) -> tuple[Block, int]:
    part = pack(tokens)
    return cache.tree.insert(parent, part.data, part.num_tokens)


def coverage(block: Block) -> list[int]:
    return [0 if page is None else page.coverage for page in block.pages]


class TestInsertion:
    def test_new_then_identical(self) -> None:
        """A second insertion of the same tokens returns the block of the first."""
        cache = Cache(2, FULL)
        root = cache.tree.root(EMPTY_SCOPE)
        block, how = insert(cache, root, [1, 2])
        assert (how, block.ordinal, block.num_tokens, block.parent) == (BLOCK_NEW, 0, 2, root)
        assert insert(cache, root, [1, 2]) == (block, BLOCK_EXISTS)
        child, how = insert(cache, block, [1, 2])
        assert (how, child.ordinal) == (BLOCK_NEW, 1)
        assert cache.tree.num_blocks == 2

    def test_a_longer_sibling_covers(self) -> None:
        """A partial block that is a prefix of a sibling is not inserted; after a clear it is a block of its own."""
        notes = Notes()
        cache = Cache(8, FULL, listener=notes)
        [full] = cache.store(toks(0, 8))
        full_key = full.block_key()
        notes.take()
        root = cache.tree.root(EMPTY_SCOPE)
        assert insert(cache, root, toks(0, 6)) == (full, BLOCK_COVERED)
        assert cache.tree.num_blocks == 1
        assert notes.take() == []
        cache.tree.clear()
        [partial] = cache.store(toks(0, 6))
        assert partial.num_tokens == 6
        assert partial.block_key() != full_key

    def test_a_longer_block_takes_the_place_of_its_prefix(self) -> None:
        """A longer block takes the pages of the shorter one with their coverage. Pages with more coverage replace them."""
        notes = Notes()
        cache = Cache(8, FULL, window(8), SSM, listener=notes)
        [old] = cache.store(toks(0, 4))
        old_pages = old.pages
        notes.take()
        root = cache.tree.root(EMPTY_SCOPE)
        new, how = insert(cache, root, toks(0, 8))
        assert how == BLOCK_NEW
        assert root.child_blocks() == [new]
        assert not old.attached
        assert new.pages == old_pages
        assert coverage(new) == [4, 4, 4]
        assert [page.owner for page in new.pages if page is not None] == [new, new, new]
        assert notes.take() == [
            ("block removed", toks(0, 4)),
            *[("stored", toks(0, 8), life_cycle, False) for life_cycle in range(3)],
        ]
        assert cache.give(new, 0, 8) is not None
        assert notes.take() == [("stored", toks(0, 8), 0, True)]
        assert coverage(new) == [8, 4, 4]
        assert cache.keeper.unlisted == [old_pages[0]]
        cache.tree.check_invariants()
        assert cache.probe(toks(0, 4)) == 4
        assert cache.probe(toks(0, 8)) == 4

    def test_siblings_that_share_a_prefix_coexist(self) -> None:
        cache = Cache(4, FULL)
        root = cache.tree.root(EMPTY_SCOPE)
        branches: list[list[Token]] = [[1, 2, 3], [1, 2, 4], [1, 3], [1, digest(1), 2], [1, digest(2), 2]]
        for tokens in branches:
            assert insert(cache, root, tokens)[1] == BLOCK_NEW
        assert len(root.child_blocks()) == 5
        assert insert(cache, root, [1, digest(1)])[1] == BLOCK_COVERED


class TestPageSlots:
    def test_coverage_only_grows(self) -> None:
        """A page is replaced only by one with more coverage; the replaced page is unlisted."""
        cache = Cache(8, FULL, window(4))
        [block] = cache.store(toks(0, 8), without=[0, 1])
        first = cache.give(block, 1, 4)
        assert first is not None
        assert cache.give(block, 1, 4) is None
        assert cache.give(block, 1, 3) is None
        assert cache.keeper.unlisted == []
        wider = cache.give(block, 1, 6)
        assert block.pages[1] is wider
        assert cache.keeper.unlisted == [first]
        assert first.owner is None
        assert not first.alive()

    def test_a_replaced_page_in_use_lives_on_unlisted(self) -> None:
        """A replaced page stays with the request that uses it. The block does not list it, and freeing it changes nothing."""
        cache = Cache(8, FULL)
        [block] = cache.store(toks(0, 8), without=[0])
        old = cache.give(block, 0, 4)
        assert old is not None
        old.holds = 1
        new = cache.give(block, 0, 8)
        assert old.alive()
        assert old.owner is None
        block.page_gone(old)
        assert block.pages == (new,)
        cache.tree.check_invariants()

    def test_a_detached_block_takes_no_page(self) -> None:
        """Nothing can match there any more."""
        cache = Cache(2, FULL)
        [block] = cache.store([1, 2])
        cache.tree.clear()
        assert cache.give(block, 0, 2) is None
        assert block.pages == (None,)


class TestLoss:
    def test_a_lost_full_attention_page_takes_its_subtree(self) -> None:
        """Descendants can never match again: their pages are released, parents reported first."""
        notes = Notes()
        cache = Cache(4, FULL, listener=notes)
        path = cache.store(toks(0, 16))
        cache.store([*toks(0, 8), 90, 91])
        notes.take()
        pages = [block.pages[0] for block in path]
        cache.lose(path[1])
        removed = [note[1] for note in notes.take() if note[0] == "block removed"]
        assert removed[0] == toks(4, 8)
        assert removed.index(toks(8, 12)) < removed.index(toks(12, 16))
        assert [90, 91] in removed
        assert len(removed) == 4
        assert cache.tree.num_blocks == 1
        assert len(cache.keeper.dropped) == 3
        assert not any(page.alive() for page in pages[1:] if page is not None)
        assert cache.probe(toks(0, 16)) == 4
        assert [block.attached for block in path] == [True, False, False, False]
        assert all(block.children is None for block in path)

    def test_pages_in_use_below_a_lost_one_are_orphaned(self) -> None:
        """Requests that hold its pages keep them."""
        cache = Cache(4, FULL)
        path = cache.store(toks(0, 12))
        held = path[2].pages[0]
        assert held is not None
        held.locks = 1
        cache.lose(path[1])
        assert held.alive()
        assert held.owner is None
        assert cache.keeper.unlisted == [held]

    def test_losing_the_first_block_empties_the_scope(self) -> None:
        """A root is removed with its last block."""
        cache = Cache(4, FULL)
        path = cache.store(toks(0, 12))
        cache.lose(path[0])
        assert cache.tree.num_blocks == 0
        assert cache.tree.find_root(EMPTY_SCOPE) is None

    def test_empty_ancestors_go_with_a_subtree(self) -> None:
        """Ancestors that a cascade leaves without children and pages are pruned too."""
        cache = Cache(4, FULL, window(4))
        path = cache.store(toks(0, 12), without=[0])
        cache.give(path[2], 0, 4)
        for block in path[:2]:
            cache.lose(block, 1)
        assert cache.tree.num_blocks == 3
        cache.lose(path[2], 0)
        assert cache.tree.num_blocks == 0

    def test_a_lost_window_page_leaves_its_block(self) -> None:
        """Losing a page removes only its entry while the block has other pages or descendants."""
        notes = Notes()
        cache = Cache(4, FULL, window(4), listener=notes)
        path = cache.store(toks(0, 8))
        notes.take()
        cache.lose(path[0], 1)
        assert notes.take() == [("page removed", toks(0, 4), 1)]
        assert coverage(path[0]) == [4, 0]
        assert cache.probe(toks(0, 8)) == 8

    @pytest.mark.parametrize("first", [0, 1])
    def test_stale_prune(self, first: int) -> None:
        """The last block of a path stays while any life cycle has a page there; without one, it and its ancestors are removed."""
        cache = Cache(2, window(64), window(64))
        x, y = cache.store(toks(0, 4))
        for life_cycle in (0, 1):
            cache.lose(x, life_cycle)
        cache.lose(y, first)
        assert [x.attached, y.attached] == [True, True]
        cache.lose(y, 1 - first)
        assert [x.attached, y.attached] == [False, False]
        assert cache.tree.find_root(EMPTY_SCOPE) is None

    def test_a_sink_page_ends_the_path(self) -> None:
        """Losing a sink drops the subtree; losing a later page of a window only unlists it."""
        cache = Cache(4, window(8, sink_blocks=2))
        path = cache.store(toks(0, 20))
        cache.lose(path[2])
        assert cache.tree.num_blocks == 5
        cache.lose(path[1])
        assert cache.tree.num_blocks == 1
        assert cache.probe(toks(0, 20)) == 4

    def test_a_lost_snapshot_leaves_the_attention_pages(self) -> None:
        """The block is removed with its last page, as for windows."""
        cache = Cache(4, FULL, SSM)
        path = cache.store(toks(0, 8))
        cache.lose(path[1], 1)
        assert coverage(path[1]) == [4, 0]
        pure = Cache(4, SSM)
        path = pure.store(toks(0, 8))
        pure.lose(path[1])
        assert pure.tree.num_blocks == 0

    def test_a_page_dropped_in_the_same_sweep_is_told_late(self) -> None:
        """The storage drops several pages before it notifies their owners: the block of the second is gone by then."""
        cache = Cache(4, FULL)
        path = cache.store(toks(0, 8))
        first, second = path[0].pages[0], path[1].pages[0]
        assert first is not None
        assert second is not None
        second.slot = type(second.slot)(-1)
        cache.keeper.lose(first)
        assert cache.tree.num_blocks == 0
        assert cache.keeper.dropped == []
        path[1].page_gone(second)
        cache.tree.check_invariants()

    def test_drop_page_on_purpose(self) -> None:
        """A planned drop drops its page; the pages of other life cycles stay."""
        cache = Cache(4, FULL, window(4))
        path = cache.store(toks(0, 8))
        page = path[1].pages[1]
        assert page is not None
        cache.tree.drop_page(page)
        assert cache.keeper.dropped == [page]
        assert coverage(path[1]) == [4, 0]
        assert cache.probe(toks(0, 8)) == 4


class TestPins:
    def test_a_pinned_block_stays_without_pages(self) -> None:
        """The path of an open request is never pruned. Removing its pin prunes the blocks that only the pin kept."""
        cache = Cache(4, window(4))
        path = cache.store(toks(0, 12))
        cache.tree.pin(path[2])
        for block in path:
            cache.lose(block)
        assert cache.tree.num_blocks == 3
        cache.tree.pin(path[2])
        cache.tree.unpin(path[2])
        assert cache.tree.num_blocks == 3
        cache.tree.unpin(path[2])
        assert cache.tree.num_blocks == 0
        assert cache.tree.find_root(EMPTY_SCOPE) is None

    def test_pageless_blocks_in_the_middle_wait_for_the_tip(self) -> None:
        """A pin at the end of a path keeps every block before it."""
        cache = Cache(4, window(4))
        path = cache.store(toks(0, 12))
        cache.tree.pin(path[1])
        for block in path:
            cache.lose(block)
        assert [block.attached for block in path] == [True, True, False]

    def test_a_pinned_root_stays(self) -> None:
        """A request that has committed nothing yet pins the root."""
        cache = Cache(4, FULL)
        root = cache.tree.root(EMPTY_SCOPE)
        cache.tree.pin(root)
        path = cache.store(toks(0, 4))
        cache.lose(path[0])
        assert cache.tree.find_root(EMPTY_SCOPE) is root
        cache.tree.unpin(root)
        assert cache.tree.find_root(EMPTY_SCOPE) is None

    def test_unpin_after_clear(self) -> None:
        """Unpinning a block that has left the tree changes nothing."""
        cache = Cache(4, FULL)
        [block] = cache.store(toks(0, 4))
        root = cache.tree.root(EMPTY_SCOPE)
        for node in (block, root):
            cache.tree.pin(node)
        cache.tree.clear()
        fresh = cache.tree.root(EMPTY_SCOPE)
        for node in (block, root):
            cache.tree.unpin(node)
        assert cache.tree.find_root(EMPTY_SCOPE) is fresh

    def test_misuse_is_caught(self) -> None:
        """Refused: unpinning without a pin, a child of a partial block, a child of a block that left the tree."""
        cache = Cache(4, FULL)
        [partial] = cache.store([1])
        with pytest.raises(AssertionError, match="unpin without pin"):
            cache.tree.unpin(partial)
        with pytest.raises(AssertionError, match="only a full block"):
            insert(cache, partial, [2])
        cache.tree.clear()
        with pytest.raises(AssertionError, match="left the tree"):
            insert(cache, partial, [2])


class TestClear:
    def test_chains_branches_and_roots(self) -> None:
        """Clearing detaches all blocks, unlists all pages and removes every root."""
        cache = Cache(2, FULL)
        paths = [cache.store(toks(0, 6)), cache.store([0, 1, 7, 8])]
        paths.append(cache.store(toks(0, 4), ReuseScope(1)))
        for lora in (2, 4):
            cache.tree.root(ReuseScope(lora))
        assert len(cache.tree.roots()) == 4
        cache.tree.clear()
        assert cache.tree.roots() == []
        assert cache.tree.num_blocks == 0
        for path in paths:
            for block in path:
                assert not block.attached
                assert block.parent is None
                assert block.pages == (None,)
        assert len(cache.keeper.dropped) == 6
        cache.tree.clear()

    def test_a_very_deep_path(self) -> None:
        """Clearing, a cascade, and deallocation do not recurse."""
        for how in ("clear", "lose", "unpin"):
            cache = Cache(1, window(1) if how == "unpin" else FULL)
            node = cache.tree.root(EMPTY_SCOPE)
            first: Block | None = None
            for i in range(20_000):
                node, _how = insert(cache, node, [i])
                first = node if first is None else first
            assert first is not None
            cache.give(first, 0, 1)
            node.block_key()
            if how == "clear":
                cache.tree.clear()
            elif how == "lose":
                cache.keeper.lose(first.pages[0])  # type: ignore[arg-type]  # it was just given
            else:
                cache.keeper.lose(first.pages[0])  # type: ignore[arg-type]
                cache.tree.pin(node)
                cache.tree.unpin(node)
            assert cache.tree.num_blocks == 0
            assert cache.tree.roots() == []


class TestUnsettled:
    def test_hidden_blocks_do_not_match(self) -> None:
        """Blocks whose bytes depend on a load in flight cannot match. Each hide needs a show."""
        cache = Cache(4, FULL, window(4))
        path = cache.store(toks(0, 12))
        cache.tree.hide(path[1])
        cache.tree.hide(path[1])
        assert cache.probe(toks(0, 12)) == 4
        assert cache.match(toks(0, 12)).divergence == 12
        cache.tree.show(path[1])
        assert cache.probe(toks(0, 12)) == 4
        cache.tree.show(path[1])
        assert cache.probe(toks(0, 12)) == 12
        cache.tree.check_invariants()

    def test_a_failed_load_removes_what_depended_on_it(self) -> None:
        """The block goes with its descendants."""
        cache = Cache(4, window(4))
        path = cache.store(toks(0, 12))
        cache.tree.hide(path[1])
        cache.tree.remove(path[1])
        assert [block.attached for block in path] == [True, False, False]
        assert len(cache.keeper.dropped) == 2

    def test_pages_of_a_hidden_block_are_not_taken_over(self) -> None:
        """The block that continues it starts without them."""
        cache = Cache(4, FULL)
        [old] = cache.store(toks(0, 2))
        cache.store([0, 7])
        cache.tree.hide(old)
        new, how = insert(cache, cache.tree.root(EMPTY_SCOPE), toks(0, 4))
        assert how == BLOCK_NEW
        assert coverage(new) == [0]
        assert len(cache.keeper.dropped) == 1
        cache.tree.show(old)
        cache.tree.check_invariants()


class TestKeys:
    def test_blocks_have_the_keys_of_the_chain(self) -> None:
        """Keys of full and partial blocks, with digests too, do not depend on the order of the calls."""
        cache = Cache(4, FULL)
        tokens: list[Token] = [1, digest(1), 3, 4, 5, 6, 7, 8, digest(2), 10]
        scope = ReuseScope(7, 11)
        path = cache.store(tokens, scope)
        expected = [key for _part, key in sequence_to_blockchain_keys(4, scope, tokens)][1:]
        assert path[2].block_key() == expected[2]
        assert [block.block_key() for block in path] == expected
        assert path[0].parent_block() is None
        assert path[2].parent_block() is path[1]
        assert path[2].token_list() == [digest(2), 10]

    def test_the_index_follows_the_tree(self) -> None:
        """From the first look-up on, additions, replacements and removals are in it."""
        cache = Cache(4, FULL)
        path = cache.store(toks(0, 6))
        keys = [block.block_key() for block in path]
        assert [cache.tree.find_key(key) for key in keys] == [[block] for block in path]
        longer = cache.store(toks(0, 12))
        assert cache.tree.find_key(keys[0]) == [path[0]]
        assert cache.tree.find_key(keys[1]) == []
        assert cache.tree.find_key(longer[2].block_key()) == [longer[2]]
        key = longer[2].block_key()
        cache.lose(longer[1])
        assert cache.tree.find_key(key) == []
        cache.tree.clear()
        assert cache.tree.find_key(keys[0]) == []
        assert cache.tree.find_key(b"no key") == []

    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
    @pytest.mark.parametrize("asked_first", [True, False])
    def test_blocks_of_equal_keys_do_not_hide_each_other(self, order: tuple[int, ...], asked_first: bool) -> None:
        """With SHA-256 a digest made to look like eight ids gives several blocks one key: each is found until it is dropped."""
        cache = Cache(4, FULL, block_key_hash="sha256")
        if asked_first:
            assert cache.tree.find_key(b"") == []
        imitation = bytes(32)
        prompts: list[list[Token]] = [[0, 0, imitation, 0], [0, 0, 0, imitation], [0, imitation, 0, 0]]
        blocks = [cache.store(tokens)[0] for tokens in prompts]
        key = blocks[0].block_key()
        assert {block.block_key() for block in blocks} == {key}
        left = list(blocks)
        assert set(cache.tree.find_key(key)) == set(left)
        for index in order:
            cache.lose(blocks[index])
            left.remove(blocks[index])
            assert set(cache.tree.find_key(key)) == set(left)
        assert cache.tree.num_blocks == 0

    def test_a_removed_block_keeps_its_key_for_the_listener(self) -> None:
        """A listener that asks for a block's key when the block is removed can ask again after its links are cut."""
        cache = Cache(2, FULL, listener=KeyNotes())
        path = cache.store(toks(0, 4))
        expected = [key for _part, key in sequence_to_blockchain_keys(2, None, toks(0, 4))][1:]
        cache.tree.clear()
        assert [block.block_key() for block in path] == expected

    def test_without_listener_a_removed_block_has_no_key(self) -> None:
        """The key was not asked for while the path of the block was known."""
        cache = Cache(2, FULL)
        path = cache.store(toks(0, 4))
        cache.tree.clear()
        with pytest.raises(LogicError, match="left the tree"):
            path[1].block_key()


def test_a_hidden_block_is_told_when_it_is_shown() -> None:
    """Pages whose contents may yet turn out to be wrong are no news; a block that is removed while hidden never was any."""
    notes = Notes()
    cache = Cache(2, FULL, window(4), listener=notes)
    root = cache.tree.root(EMPTY_SCOPE)
    block, _how = insert(cache, root, [1, 2])
    cache.tree.hide(block)
    cache.tree.hide(block)
    cache.give(block, 0, 2)
    cache.give(block, 1, 2)
    cache.tree.show(block)
    assert notes.take() == []
    cache.tree.show(block)
    assert notes.take() == [("stored", [1, 2], 0, True), ("stored", [1, 2], 1, True)]
    other, _how = insert(cache, root, [3, 4])
    cache.tree.hide(other)
    cache.give(other, 0, 2)
    cache.tree.remove(other)
    cache.tree.show(other)
    assert notes.take() == [("block removed", [3, 4])]


def test_moves_are_told_for_listed_pages_only() -> None:
    """A page's change of level concerns the outside while its block is in the tree and lists it."""
    notes = Notes()
    cache = Cache(2, FULL, listener=notes)
    [block] = cache.store([1, 2])
    page = block.pages[0]
    assert page is not None
    notes.take()
    block.page_relocated(page, 0, 1)
    block.page_relocated(cache.keeper.new_page(0), 0, 1)
    cache.tree.clear()
    block.page_relocated(page, 1, 0)
    assert notes.take() == [("moved", [1, 2], 0, 0, 1), ("block removed", [1, 2])]
