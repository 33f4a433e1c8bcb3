"""The children of a block, against a plain list of them."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_cache_manager_v2.reuse import sibling_trie
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.sibling_trie import Leaf, TrieNode
from kv_cache_manager_v2.reuse.tokens import TokenSequence, pack, unpack
from kv_cache_manager_v2.reuse.tree import BLOCK_NEW
from tests.support.tree_rig import EMPTY_SCOPE, FULL, SSM, Cache, Token, digest

TOKENS: list[Token] = [0, 1, 256, 1 << 30, digest(0), digest(1), digest(1 << 200)]
runs: st.SearchStrategy[list[Token]] = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=6)


def common(a: list[Token], b: list[Token]) -> int:
    """Leading tokens that two runs share."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def fill(cache: Cache, children: list[list[Token]]) -> dict[tuple[Token, ...], Block]:
    """Blocks of these tokens under the root, each of them once."""
    root = cache.tree.root(EMPTY_SCOPE)
    for tokens in children:
        part = pack(tokens)
        cache.tree.insert(root, part.data, part.num_tokens)
    return {tuple(unpack(block.tokens)): block for block in root.child_blocks()}


def top(cache: Cache) -> Leaf | TrieNode:
    children = cache.tree.root(EMPTY_SCOPE).children
    assert children is not None
    return children


@given(st.lists(runs, min_size=1, max_size=20), runs)
def test_the_nearest_leaf_shares_the_longest_run(children: list[list[Token]], query: list[Token]) -> None:
    """No other child shares more with the query, in bytes and so in tokens."""
    cache = Cache(6, FULL)
    stored = fill(cache, children)
    sequence = pack([7, *query, 9])
    beg, end = sequence.byte_offset(1), sequence.byte_offset(1 + len(query))
    leaf = sibling_trie.nearest(top(cache), sequence.data, beg, end)
    shared = sibling_trie.common_bytes(leaf.tokens, sequence.data, beg, end)
    assert sequence.whole_tokens(beg + shared) - 1 == max(common(list(tokens), query) for tokens in stored)
    for block in stored.values():
        assert sibling_trie.common_bytes(block.tokens, sequence.data, beg, end) <= shared


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 300), st.integers(0, 8))
def test_common_bytes_is_the_common_prefix(a: bytes, b: bytes, same: int, beg: int) -> None:
    """Of whatever length, and from the beginning given."""
    stored = a[:same] + b
    data = bytes(beg) + a + b"tail"
    expected = 0
    while expected < min(len(stored), len(a)) and stored[expected] == a[expected]:
        expected += 1
    assert sibling_trie.common_bytes(stored, data, beg, beg + len(a)) == expected


@settings(max_examples=100)
@given(st.data(), st.lists(runs, min_size=1, max_size=12), st.booleans())
def test_the_best_leaf_is_best(data: st.DataObject, children: list[list[Token]], snapshots: bool) -> None:
    """Of all children, the one that offers the longest run within the bounds; None exactly if none offers any."""
    cache = Cache(6, FULL, SSM)
    stored = fill(cache, children)
    for tokens, block in stored.items():
        for life_cycle in (0, 1):
            coverage = data.draw(st.integers(0, len(tokens)), label="coverage")
            if coverage:
                cache.give(block, life_cycle, coverage)
    query = data.draw(runs, label="query")
    least = data.draw(st.integers(1, 6), label="least")
    most = data.draw(st.integers(0, 6), label="most")
    sequence: TokenSequence = pack(query)
    leaf, run = sibling_trie.best_leaf(top(cache), sequence, 0, len(query), least, most, snapshots)
    offers: dict[tuple[Token, ...], int] = {}
    for tokens, block in stored.items():
        usable = min(most, common(list(tokens), query))
        page = block.pages[0]
        ends = {page.coverage if page is not None else 0}
        reach = min(usable, *ends)
        if snapshots:
            snapshot = block.pages[1]
            position = 0 if snapshot is None or page is None else snapshot.coverage
            reach = position if position <= reach else 0
        offers[tokens] = reach if reach >= least else 0
    assert run == max(offers.values())
    if run == 0:
        assert leaf is None
    else:
        assert leaf is not None
        assert offers[tuple(unpack(leaf.tokens))] == run


@given(st.data(), st.lists(runs, min_size=1, max_size=20))
def test_children_come_and_go_in_any_order(data: st.DataObject, children: list[list[Token]]) -> None:
    """After every removal the others are there still, the summaries of the nodes are right, and the last one leaves nothing."""
    cache = Cache(6, FULL, SSM)
    stored = list(fill(cache, children).values())
    for block in stored:
        for life_cycle in (0, 1):
            cache.give(block, life_cycle, data.draw(st.integers(1, block.num_tokens), label="coverage"))
    cache.tree.check_invariants()
    while stored:
        block = stored.pop(data.draw(st.integers(0, len(stored) - 1), label="which"))
        cache.tree.remove(block)
        cache.tree.check_invariants()
        root = cache.tree.find_root(EMPTY_SCOPE)
        assert (root is None) == (not stored)
        if root is not None:
            assert sorted(child.tokens for child in root.child_blocks()) == sorted(child.tokens for child in stored)


def test_a_lone_child_is_the_fan() -> None:
    """One child is held as itself; a second one makes a node."""
    cache = Cache(2, FULL)
    root = cache.tree.root(EMPTY_SCOPE)
    first, _how = cache.tree.insert(root, pack([1, 2]).data, 2)
    assert root.children is first
    cache.tree.insert(root, pack([1, 3]).data, 2)
    assert isinstance(root.children, TrieNode)


def test_ten_thousand_siblings_stay_shallow() -> None:
    """Depth grows like the logarithm of the number of siblings, so no operation has a cliff."""
    cache = Cache(4, FULL)
    root = cache.tree.root(EMPTY_SCOPE)
    for i in range(10_000):
        part = pack([5, i * 7919 % 100_003, i, 1])
        _block, how = cache.tree.insert(root, part.data, 4)
        assert how == BLOCK_NEW
    depth = 0
    level: list[Leaf | TrieNode] = [top(cache)]
    while level:
        level = [side for node in level if isinstance(node, TrieNode) for side in (node.low, node.high)]
        depth += 1
    assert depth <= 34, depth
    assert len(root.child_blocks()) == 10_000


DEEP_FAN = """
from kv_cache_manager_v2.reuse.tokens import pack
from tests.support.tree_rig import EMPTY_SCOPE, FULL, Cache
cache = Cache(32, FULL)
root = cache.tree.root(EMPTY_SCOPE)
for position in range(32):
    for bit in range(31):
        part = pack([0] * position + [1 << bit] + [0] * (31 - position))
        block, _how = cache.tree.insert(root, part.data, part.num_tokens)
        cache.give(block, 0, part.num_tokens)
cache.tree.check_invariants()
cache.tree.clear()
"""


def test_a_deep_trie_is_freed_node_by_node() -> None:
    """A thousand siblings that each differ in a bit of their own make a trie a thousand deep; freeing it leaves memory intact."""
    environment = {**os.environ, "PYTHONMALLOC": "debug", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", DEEP_FAN], env=environment, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr[-2000:]
