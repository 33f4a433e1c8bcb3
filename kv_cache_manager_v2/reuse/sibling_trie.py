"""The children of a block: a Patricia tree over their packed tokens.

Rule: no two siblings are prefixes of one another, so any two differ in some bit that both have, and a branch is that first bit.
A fan is one leaf, or a branch over two smaller fans; a lone child costs nothing beside itself.

Following a query's bits down ends at a leaf that shares the longest run with it; one comparison then tells how long. Leaves to
the side of a branch on that way share exactly the bits before it. Every branch also knows the best that any leaf below offers to
a match (`reach`, `ends`), so the best sibling is found without looking at the others. Every operation costs O(depth), at most the
bits of a block and about the logarithm of the number of siblings.
"""

from __future__ import annotations

from typing import TypeAlias

from mypy_extensions import i32, mypyc_attr

from kv_cache_manager_v2.reuse.tokens import TokenSequence
from kv_cache_manager_v2.storage.page import PageOwner


@mypyc_attr(acyclic=True)
class Leaf(PageOwner):
    """What a fan lists: packed tokens, and which leading runs of them can be reused from the pages at hand."""

    def __init__(self, tokens: bytes) -> None:
        self.tokens = tokens
        self.ends = 0  # bit set of runs not above `reach` at which there is a snapshot: where a match with SSM layers may end
        self.reach: i32 = 0  # leading tokens for which every attention life cycle has a page


@mypyc_attr(acyclic=True)
class Branch:
    """A bit in which the leaves below differ, being equal before it. The bits of a byte count from its highest."""

    def __init__(self, byte: int, mask: int, low: Leaf | Branch, high: Leaf | Branch) -> None:
        self.byte: i32 = byte  # position of the bit: the byte, and its place there as a power of two
        self.mask: i32 = mask
        self.low = low  # those with a 0
        self.high = high  # those with a 1
        self.reach: i32 = 0  # the maximum below
        self.ends = 0  # the union of those below
        self.summarise()

    def summarise(self) -> bool:
        """Recompute what the branch knows of its leaves from its two halves; whether that changed anything."""
        reach = max(self.low.reach, self.high.reach)
        ends = self.low.ends | self.high.ends
        if reach == self.reach and ends == self.ends:
            return False
        self.reach = reach
        self.ends = ends
        return True


Fan: TypeAlias = Leaf | Branch


def nearest(fan: Fan, data: bytes, beg: int, end: int) -> Leaf:
    """A leaf that shares the longest run with data[beg:end]; O(depth)."""
    node = fan
    while isinstance(node, Branch):
        at: int = beg + int(node.byte)
        node = node.high if at < end and data[at] & node.mask else node.low
    return node


def common_bytes(stored: bytes, data: bytes, beg: int, end: int) -> int:
    """Length of the longest common prefix of `stored` and data[beg:end]; O(length) in a few comparisons."""
    most = min(len(stored), end - beg)
    if data[beg : beg + most] == stored[:most]:
        return most
    equal = 0  # the first `equal` bytes are equal, the first `most` are not
    while most - equal > 8:
        half = (equal + most) >> 1
        if data[beg + equal : beg + half] == stored[equal:half]:
            equal = half
        else:
            most = half
    while data[beg + equal] == stored[equal]:
        equal += 1
    return equal


def insert(fan: Fan, leaf: Leaf, neighbour: Leaf, common: int) -> Fan:
    """Add a leaf; gives the fan's new top. `neighbour` is `nearest` to it and shares `common` bytes, fewer than either has."""
    tokens = leaf.tokens
    difference = tokens[common] ^ neighbour.tokens[common]
    assert difference, "siblings must differ in the first byte that they do not share"
    mask = 1 << (difference.bit_length() - 1)
    above: list[Branch] = []
    node = fan
    while isinstance(node, Branch) and (node.byte < common or (node.byte == common and node.mask > mask)):
        above.append(node)
        node = node.high if tokens[node.byte] & node.mask else node.low
    branch = Branch(common, mask, node, leaf) if tokens[common] & mask else Branch(common, mask, leaf, node)
    return _hang(fan, above, tokens, branch)


def replace(fan: Fan, leaf: Leaf, substitute: Leaf) -> Fan:
    """Put a leaf that continues `leaf` in its place; gives the fan's new top."""
    return _hang(fan, _way_to(fan, leaf), leaf.tokens, substitute)


def remove(fan: Fan, leaf: Leaf) -> Fan | None:
    """Take a leaf out; gives the fan's new top, None if it was the only one."""
    above = _way_to(fan, leaf)
    if not above:
        return None
    branch = above.pop()
    return _hang(fan, above, leaf.tokens, branch.low if branch.high is leaf else branch.high)


def refresh(fan: Fan, leaf: Leaf) -> None:
    """Take note that the leaf's `reach` or `ends` changed."""
    _summarise(_way_to(fan, leaf))


def leaves(fan: Fan | None) -> list[Leaf]:
    """All leaves, in the order of their bits."""
    result: list[Leaf] = []
    if fan is None:
        return result
    stack: list[Fan] = [fan]
    while stack:
        node = stack.pop()
        if isinstance(node, Branch):
            stack.append(node.high)
            stack.append(node.low)
        else:
            result.append(node)
    return result


def dismantle(fan: Fan) -> None:
    """Part the branches of a fan that nobody lists any more, so that each is freed by itself; O(branches).

    Freed through the topmost one, a deep fan would free them inside each other, which compiled `acyclic` objects do not survive.
    """
    leaf = fan
    while isinstance(leaf, Branch):
        leaf = leaf.low
    stack: list[Fan] = [fan]
    while stack:
        node = stack.pop()
        if isinstance(node, Branch):
            stack.append(node.high)
            stack.append(node.low)
            node.low = node.high = leaf


def best_leaf(
    fan: Fan, sequence: TokenSequence, beg: int, end: int, least: int, most: int, snapshots: bool
) -> tuple[Leaf | None, int]:
    """The leaf from which the longest run of the tokens at positions beg..end-1 can be reused, and the length of that run.

    Only runs of `least` to `most` tokens count, least > 0; (None, 0) if there is none. With `snapshots`, a run must end where its
    leaf has one. Of equally good leaves it is one that shares more with the query. O(depth).
    """
    data = sequence.data
    first = sequence.byte_offset(beg)
    last = sequence.byte_offset(end)
    way: list[Branch] = []
    node = fan
    while isinstance(node, Branch):
        way.append(node)
        at: int = first + int(node.byte)
        node = node.high if at < last and data[at] & node.mask else node.low
    shared = common_bytes(node.tokens, data, first, last)
    depth = len(way)
    while depth > 0 and way[depth - 1].byte >= shared:
        depth -= 1
        node = way[depth]  # everything below shares what the nearest leaf does
    best = least - 1
    found: Fan | None = None
    run = min(most, sequence.whole_tokens(first + shared) - beg)
    while run > best:
        usable = usable_run(node, run, snapshots)
        if usable > best:
            best = usable
            found = node
        if depth == 0:
            break
        depth -= 1
        branch = way[depth]
        at = first + int(branch.byte)
        node = branch.low if data[at] & branch.mask else branch.high  # the other side
        run = min(most, sequence.whole_tokens(at) - beg)
    if found is None:
        return None, 0
    while isinstance(found, Branch):
        found = found.low if usable_run(found.low, best, snapshots) == best else found.high
    return found, best


def usable_run(node: Fan, run: int, snapshots: bool) -> int:
    """The longest run of at most `run` tokens that some leaf below offers, 0 or less if none does."""
    if not snapshots:
        return min(node.reach, run)
    return (node.ends & ((2 << run) - 1)).bit_length() - 1


def check(fan: Fan) -> None:
    """Assert the structure: every branch is the first difference of the leaves below it, and its summary is theirs."""
    stack: list[Fan] = [fan]
    while stack:
        node = stack.pop()
        if not isinstance(node, Branch):
            continue
        assert node.mask in (1, 2, 4, 8, 16, 32, 64, 128), node.mask
        low = leaves(node.low)
        high = leaves(node.high)
        before = low[0].tokens[: node.byte]
        upper = 256 - 2 * node.mask  # the bits before `mask` in its byte
        for leaf in low + high:
            assert leaf.tokens[: node.byte] == before, "leaves below a branch are equal before it"
            assert leaf.tokens[node.byte] & upper == low[0].tokens[node.byte] & upper, "leaves below a branch are equal before it"
        assert not any(leaf.tokens[node.byte] & node.mask for leaf in low), "a leaf is on the wrong side"
        assert all(leaf.tokens[node.byte] & node.mask for leaf in high), "a leaf is on the wrong side"
        assert not node.summarise(), "a branch's summary is out of date"
        stack.append(node.low)
        stack.append(node.high)


def _way_to(fan: Fan, leaf: Leaf) -> list[Branch]:
    """The branches from the top down to a leaf of this fan."""
    tokens = leaf.tokens
    way: list[Branch] = []
    node = fan
    while isinstance(node, Branch):
        way.append(node)
        node = node.high if tokens[node.byte] & node.mask else node.low
    assert node is leaf, "the leaf is not in this fan"
    return way


def _hang(fan: Fan, above: list[Branch], tokens: bytes, node: Fan) -> Fan:
    """Make `node` the child of the last branch above it, on the side of `tokens`; gives the fan's new top."""
    if not above:
        return node
    parent = above[len(above) - 1]
    if tokens[parent.byte] & parent.mask:
        parent.high = node
    else:
        parent.low = node
    _summarise(above)
    return fan


def _summarise(way: list[Branch]) -> None:
    """Bring the branches on a way up to date, from the bottom up, as far as anything changes."""
    i = len(way) - 1
    while i >= 0 and way[i].summarise():
        i -= 1
