"""The children of a block: a Patricia trie over their packed tokens.

Rule: no two siblings are prefixes of one another, so any two differ in some bit that both have. A trie is one leaf, or a node with
two smaller tries. The node stands for the first bit in which the leaves below it differ.

Descending by the bits of a query ends at a leaf that shares the longest run with the query; one comparison gives the run's length.
Leaves on the other side of a node on that path share exactly the bits before the node's bit. Every node also summarises what the
leaves below it offer a match (`reach`, `ends`), so the best sibling is found without visiting the others. Every operation costs
O(depth): at most the bits of a block, typically the logarithm of the number of siblings.
"""

from __future__ import annotations

from typing import TypeAlias

from librt.strings import read_i64_le
from mypy_extensions import i32, mypyc_attr

from kv_cache_manager_v2.reuse.tokens import TokenSequence
from kv_cache_manager_v2.storage.page import PageOwner


@mypyc_attr(acyclic=True)
class Leaf(PageOwner):
    """Packed tokens, and how many of the first ones can be reused from cached pages."""

    def __init__(self, tokens: bytes) -> None:
        self.tokens = tokens
        self.ends = 0  # bit set: bit n is set if n <= reach and every recurrent life cycle has a snapshot after n tokens
        self.reach: i32 = 0  # number of first tokens for which every attention life cycle has a page


@mypyc_attr(acyclic=True)
class TrieNode:
    """The first bit in which the leaves below differ. Bits of a byte are ordered from the highest down."""

    def __init__(self, byte: int, mask: int, low: Leaf | TrieNode, high: Leaf | TrieNode) -> None:
        self.byte: i32 = byte  # offset of the byte that has the bit
        self.mask: i32 = mask  # the bit within its byte, as a power of two
        self.low = low  # the leaves whose bit is 0
        self.high = high  # the leaves whose bit is 1
        self.reach: i32 = 0  # the maximum below
        self.ends = 0  # the union of those below
        self.summarise()

    def summarise(self) -> bool:
        """Recompute `reach` and `ends` from the two halves. Returns whether they changed."""
        reach = max(self.low.reach, self.high.reach)
        ends = self.low.ends | self.high.ends
        if reach == self.reach and ends == self.ends:
            return False
        self.reach = reach
        self.ends = ends
        return True


SiblingTrie: TypeAlias = Leaf | TrieNode


def nearest(trie: SiblingTrie, data: bytes, beg: int, end: int) -> Leaf:
    """A leaf that shares the longest run with data[beg:end]. O(depth)."""
    node = trie
    while isinstance(node, TrieNode):
        at: int = beg + int(node.byte)
        node = node.high if at < end and data[at] & node.mask else node.low
    return node


def has_many(trie: SiblingTrie, count: int) -> bool:
    """Whether there are at least `count` leaves. O(count)."""
    pending = [trie]
    leaves = 0
    while pending and leaves + len(pending) < count:
        node = pending.pop()
        if isinstance(node, TrieNode):
            pending.append(node.low)
            pending.append(node.high)
        else:
            leaves += 1
    return leaves + len(pending) >= count


def common_bytes(stored: bytes, data: bytes, beg: int, end: int) -> int:
    """Length of the longest common prefix of `stored` and data[beg:end]; O(length) in a few comparisons."""
    most = min(len(stored), end - beg)
    if data[beg : beg + most] == stored[:most]:
        return most
    equal = 0  # invariant: the first `equal` bytes are equal, and a difference lies among the first `most`
    while most - equal > 64:
        half = (equal + most) >> 1
        if data[beg + equal : beg + half] == stored[equal:half]:
            equal = half
        else:
            most = half
    while equal + 8 <= most and read_i64_le(stored, equal) == read_i64_le(data, beg + equal):
        equal += 8  # by words, since comparing slices costs an allocation for each
    while data[beg + equal] == stored[equal]:
        equal += 1
    return equal


def insert(trie: SiblingTrie, leaf: Leaf, neighbour: Leaf, common: int) -> SiblingTrie:
    """Add a leaf and return the new top. `neighbour` is `nearest` to it and shares `common` bytes, fewer than either has."""
    tokens = leaf.tokens
    difference = tokens[common] ^ neighbour.tokens[common]
    assert difference, "siblings must differ in the first byte that they do not share"
    mask = 1 << (difference.bit_length() - 1)
    above: list[TrieNode] = []
    node = trie
    while isinstance(node, TrieNode) and (node.byte < common or (node.byte == common and node.mask > mask)):
        above.append(node)
        node = node.high if tokens[node.byte] & node.mask else node.low
    added = TrieNode(common, mask, node, leaf) if tokens[common] & mask else TrieNode(common, mask, leaf, node)
    return _attach(trie, above, tokens, added)


def replace(trie: SiblingTrie, leaf: Leaf, substitute: Leaf) -> SiblingTrie:
    """Replace `leaf` by a leaf that begins with its tokens, and return the new top."""
    return _attach(trie, _path_to(trie, leaf), leaf.tokens, substitute)


def remove(trie: SiblingTrie, leaf: Leaf) -> SiblingTrie | None:
    """Remove a leaf and return the new top; None if it was the only one."""
    above = _path_to(trie, leaf)
    if not above:
        return None
    parent = above.pop()
    return _attach(trie, above, leaf.tokens, parent.low if parent.high is leaf else parent.high)


def refresh(trie: SiblingTrie, leaf: Leaf) -> None:
    """Update the nodes above a leaf whose `reach` or `ends` changed."""
    _summarise(_path_to(trie, leaf))


def leaves(trie: SiblingTrie | None) -> list[Leaf]:
    """All leaves, in the order of their bits."""
    result: list[Leaf] = []
    if trie is None:
        return result
    stack: list[SiblingTrie] = [trie]
    while stack:
        node = stack.pop()
        if isinstance(node, TrieNode):
            stack.append(node.high)
            stack.append(node.low)
        else:
            result.append(node)
    return result


def dismantle(trie: SiblingTrie) -> None:
    """Unlink the nodes of an unused trie from each other, so that each is deallocated by itself. O(nodes).

    Deallocating a deep trie through its top would nest one call per node, which overflows the C stack on the compiled build.
    """
    leaf = trie
    while isinstance(leaf, TrieNode):
        leaf = leaf.low
    stack: list[SiblingTrie] = [trie]
    while stack:
        node = stack.pop()
        if isinstance(node, TrieNode):
            stack.append(node.high)
            stack.append(node.low)
            node.low = node.high = leaf


def best_leaf(
    trie: SiblingTrie, sequence: TokenSequence, beg: int, end: int, least: int, most: int, snapshots: bool
) -> tuple[Leaf | None, int]:
    """The leaf with the longest reusable run of the tokens at positions beg..end-1, and the length of that run.

    Only runs of `least` to `most` tokens count, least > 0; (None, 0) if there is none. With `snapshots`, a run must end at a
    snapshot of its leaf. Among equally good leaves, one that shares more with the query wins. O(depth).
    """
    data = sequence.data
    first = sequence.byte_offset(beg)
    last = sequence.byte_offset(end)
    path: list[TrieNode] = []
    node = trie
    while isinstance(node, TrieNode):
        path.append(node)
        at: int = first + int(node.byte)
        node = node.high if at < last and data[at] & node.mask else node.low
    shared = common_bytes(node.tokens, data, first, last)
    depth = len(path)
    while depth > 0 and path[depth - 1].byte >= shared:
        depth -= 1
        node = path[depth]  # every leaf below it shares the same run with the query
    best = least - 1
    found: SiblingTrie | None = None
    run = min(most, sequence.whole_tokens(first + shared) - beg)
    while run > best:
        usable = usable_run(node, run, snapshots)
        if usable > best:
            best = usable
            found = node
        if depth == 0:
            break
        depth -= 1
        inner = path[depth]
        at = first + int(inner.byte)
        node = inner.low if data[at] & inner.mask else inner.high  # the other side
        run = min(most, sequence.whole_tokens(at) - beg)
    if found is None:
        return None, 0
    while isinstance(found, TrieNode):
        found = found.low if usable_run(found.low, best, snapshots) == best else found.high
    return found, best


def usable_run(node: SiblingTrie, run: int, snapshots: bool) -> int:
    """The longest run of at most `run` tokens that some leaf below offers, 0 or less if none does."""
    if not snapshots:
        return min(node.reach, run)
    return (node.ends & ((2 << run) - 1)).bit_length() - 1


def check(trie: SiblingTrie) -> None:
    """Assert that every node is the first difference of the leaves below it, and that its summary is up to date."""
    stack: list[SiblingTrie] = [trie]
    while stack:
        node = stack.pop()
        if not isinstance(node, TrieNode):
            continue
        assert node.mask in (1, 2, 4, 8, 16, 32, 64, 128), node.mask
        low = leaves(node.low)
        high = leaves(node.high)
        before = low[0].tokens[: node.byte]
        upper = 256 - 2 * node.mask  # the bits before `mask` in its byte
        for leaf in low + high:
            assert leaf.tokens[: node.byte] == before, "leaves below a node are equal before its bit"
            assert leaf.tokens[node.byte] & upper == low[0].tokens[node.byte] & upper, (
                "leaves below a node are equal before its bit"
            )
        assert not any(leaf.tokens[node.byte] & node.mask for leaf in low), "a leaf is on the wrong side"
        assert all(leaf.tokens[node.byte] & node.mask for leaf in high), "a leaf is on the wrong side"
        assert not node.summarise(), "a node's summary is out of date"
        stack.append(node.low)
        stack.append(node.high)


def _path_to(trie: SiblingTrie, leaf: Leaf) -> list[TrieNode]:
    """The nodes from the top down to a leaf of this trie."""
    tokens = leaf.tokens
    path: list[TrieNode] = []
    node = trie
    while isinstance(node, TrieNode):
        path.append(node)
        node = node.high if tokens[node.byte] & node.mask else node.low
    assert node is leaf, "the leaf is not in this trie"
    return path


def _attach(trie: SiblingTrie, above: list[TrieNode], tokens: bytes, node: SiblingTrie) -> SiblingTrie:
    """Make `node` the child of the last node of `above`, on the side of `tokens`, and return the new top."""
    if not above:
        return node
    parent = above[len(above) - 1]
    if tokens[parent.byte] & parent.mask:
        parent.high = node
    else:
        parent.low = node
    _summarise(above)
    return trie


def _summarise(path: list[TrieNode]) -> None:
    """Update the nodes of a path from the bottom up, until nothing changes."""
    i = len(path) - 1
    while i >= 0 and path[i].summarise():
        i -= 1
