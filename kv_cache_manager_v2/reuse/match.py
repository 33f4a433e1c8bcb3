"""Finds the longest reusable prefix of a prompt.

The first n tokens of a prompt are reusable if some path of the tree begins with them, and every life cycle has its pages. An
attention life cycle needs a page for each block that is not stale at n, covering the block's tokens among the first n. A recurrent
life cycle needs a snapshot at exactly n. A match is the largest such n not above the longest common path minus the back-off.

A full block is unique among its siblings, so only the last block of a path is a choice: any sibling with the needed tokens will do.
Candidates are tried from the longest down: first the end of a block, then the best position inside it. Results for the pages of a
window are kept between candidates, so the whole search costs O(blocks x life cycles).

Without partial matching, the path contains only blocks that are wholly in the prompt: full blocks, and a cached partial block that
the prompt ends with. Back-off or missing pages may still end a match inside such a block.
"""

from __future__ import annotations

from typing import Final, cast

from mypy_extensions import i64

from kv_cache_manager_v2.layout.life_cycle import LifeCycle
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.limits import MatchLimits
from kv_cache_manager_v2.reuse.sibling_trie import TrieNode, best_leaf, common_bytes, nearest, usable_run
from kv_cache_manager_v2.reuse.tokens import TokenSequence, check_range
from kv_cache_manager_v2.reuse.tree import RadixTree

_NOTHING: Final = -1


class Match:
    """The reusable part of a prompt. It owns no pages: hold those that are needed before the tree changes."""

    def __init__(self, blocks: list[Block], num_tokens: int, num_lookup_tokens: int, divergence: int, before_hybrid: int) -> None:
        self.blocks = blocks  # the blocks of the first `num_tokens` tokens; the last one may be used in part
        self.num_tokens = num_tokens
        self.num_lookup_tokens = num_lookup_tokens
        self.divergence = divergence  # length of the longest common path, before back-off and regardless of missing pages
        self.before_hybrid = before_hybrid  # tokens that would be reusable if no life cycle needed snapshots
        self.path: list[Block] = blocks  # the full blocks of the longest common path, and perhaps the last block of the match


def match(
    tree: RadixTree,
    scope: ReuseScope,
    tokens: TokenSequence,
    partial: bool,
    backoff: int,
    limits: MatchLimits | None = None,
) -> Match:
    """Find the longest reusable prefix of a prompt under a scope. Changes nothing. O(blocks x life cycles).

    `partial` allows a match to end inside a block. Raises ConfigError for ids out of range.
    """
    tree.num_searches += 1
    root = tree.find_root(scope)
    if root is None:
        check_range(tokens, 0)
        return Match([], 0, tokens.num_tokens, 0, 0)
    search = _Search(tree, root, tokens.num_tokens)
    search.follow(tokens, partial)
    return search.result(backoff) if limits is None else search.limited(backoff, limits)


def match_keys(tree: RadixTree, scope: ReuseScope, block_keys: list[bytes], backoff: int) -> Match:
    """Find the longest reusable prefix of a prompt given only the keys of its blocks, without the root key.

    Blocks match as wholes. A match may end with a partial block, and nothing after one is considered.
    """
    num_lookup = tree.tokens_per_block * len(block_keys)
    found = Match([], 0, num_lookup, 0, 0)
    root = tree.find_root(scope)
    if root is None:
        return found
    starts: list[list[Block]] = [[]]  # paths to start from; one more for each further block that shares a key
    while starts:
        search = _Search(tree, root, num_lookup)
        search.follow_keys(block_keys, starts.pop(), starts)
        result = search.result(backoff)
        if (result.num_tokens, result.divergence) > (found.num_tokens, found.divergence):
            found = result
    return found


def first_new_block_key(tree: RadixTree, scope: ReuseScope, tokens: TokenSequence, found: Match) -> bytes | None:
    """The key of the first block that a request with this match would compute; None if the prompt does not fill that block."""
    size = tree.tokens_per_block
    ordinal = found.num_tokens // size
    if (ordinal + 1) * size > tokens.num_tokens:
        return None
    parent_key = found.blocks[ordinal - 1].block_key() if ordinal > 0 else tree.keys.root_key(scope)
    return tree.keys.block_key(parent_key, tokens.slice_bytes(ordinal * size, (ordinal + 1) * size))


def is_reusable(tree: RadixTree, blocks: list[Block], num_tokens: int) -> bool:
    """Whether exactly the first `num_tokens` tokens of a path of the tree are reusable. O(blocks)."""
    size = tree.tokens_per_block
    full = num_tokens // size
    run = num_tokens - full * size
    snapshots = tree.snapshot_mask != 0
    search = _Search(tree, blocks[0], num_tokens)
    search.path = blocks[:full]
    search.good_from = [full] * len(tree.windows)
    for ordinal in range(full):
        needed = tree.path_mask(ordinal)
        if blocks[ordinal].covered & needed != needed:
            return False
    if run == 0:
        return search._ends_after(full - 1, snapshots)
    if usable_run(blocks[full], run, snapshots) < run:
        return False
    for number, life_cycle in enumerate(tree.windows):
        stale = life_cycle.stale(num_tokens)
        if not search._window_holds(number, life_cycle, stale[1], full):
            return False
    return True


class _Search:
    """Finds the longest common path, then the longest part of it for which all pages are cached."""

    def __init__(self, tree: RadixTree, root: Block, num_lookup: int) -> None:
        self.tree = tree
        self.root = root
        self.num_lookup = num_lookup
        self.path: list[Block] = []  # the full blocks of the longest common path
        self.whole = 0  # first blocks of the path that have all pages of `RadixTree.path_mask`
        self.length = 0  # tokens of the longest common path
        self.tokens: TokenSequence | None = None  # with partial matching, the prompt: any sibling may be the last block
        self.partial_end: Block | None = None  # without it, a partial block after the path that the prompt ends with
        self.good_from: list[int] = []  # by windowed life cycle: blocks from here to the candidate's end have their page
        self.whole_only = False  # whether a match may end at the ends of blocks only
        self.computed_only = False  # whether uncomputed pages count as missing
        self.before = -1  # a match may not end inside a block that is born at this time or later; -1: any
        self.found: Block | None = None  # last block of the accepted candidate, if the candidate ends inside it

    def follow(self, tokens: TokenSequence, partial: bool) -> None:
        """Descend the tree along the prompt's tokens."""
        node = self.root
        path = self.path
        data = tokens.data
        size: i64 = self.tree.tokens_per_block  # i64 locals: the loop below is nearly all the cost of a probe
        num_tokens: i64 = tokens.num_tokens
        is_text = not tokens.digests
        masks = self.tree.path_masks
        mask = self.tree.path_mask_past_sinks
        whole: i64 = _NOTHING
        depth: i64 = 0
        position: i64 = 0
        beg: i64 = 0  # byte offset of `position` in `data`
        while position + size <= num_tokens:
            children = node.children
            if children is None:
                break
            end: i64 = 4 * (position + size) if is_text else i64(tokens.byte_offset(position + size))
            leaf = nearest(children, data, beg, end) if isinstance(children, TrieNode) else children
            if data[beg:end] != leaf.tokens:
                break
            node = cast(Block, leaf)
            if node.num_tokens != size:
                break  # equal bytes but other tokens: an unchecked id equals the digest mark, and `check_range` below raises
            if whole < 0:
                needed = mask if depth >= len(masks) else masks[depth]
                if node.covered & needed != needed:
                    whole = depth
            path.append(node)
            depth += 1
            position += size
            beg = end
        self.whole = whole if whole >= 0 else depth
        self.length = position
        if not tokens.checked:
            check_range(tokens, position)
        if partial:
            self.tokens = tokens
        if position < num_tokens:
            self._follow_into(tokens, partial, beg, min(position + size, num_tokens))

    def _follow_into(self, tokens: TokenSequence, partial: bool, beg: int, position_end: int) -> None:
        """Extend the path into a last block that shares the prompt's next tokens."""
        parent = self.path[len(self.path) - 1] if self.path else self.root
        children = parent.children
        if children is None:
            return
        end = tokens.byte_offset(position_end)
        leaf = nearest(children, tokens.data, beg, end)
        shared = common_bytes(leaf.tokens, tokens.data, beg, end)
        if partial:
            self.length = tokens.whole_tokens(beg + shared)
        elif shared == len(leaf.tokens) and beg + shared == len(tokens.data):
            self.length = tokens.num_tokens
            self.partial_end = cast(Block, leaf)

    def follow_keys(self, block_keys: list[bytes], start: list[Block], others: list[list[Block]]) -> None:
        """Descend the tree along block keys, at most to a partial block.

        The path begins with the blocks of `start`. Where several children share the next key, the path follows one, and the paths
        to the rest are added to `others`.
        """
        for block in start:
            self._step_to(block)
        node = start[len(start) - 1] if start else self.root
        depth = len(start)
        while depth < len(block_keys) and self.partial_end is None:
            children = [block for block in self.tree.find_key(block_keys[depth]) if block.parent is node]
            if not children:
                return
            for block in children[1:]:
                others.append([*self.path, block])
            node = children[0]
            self._step_to(node)
            depth += 1

    def _step_to(self, block: Block) -> None:
        """Append a block found by its key to the path."""
        tree = self.tree
        self.length += block.num_tokens
        if block.num_tokens < tree.tokens_per_block:
            self.partial_end = block
            return
        needed = tree.path_mask(len(self.path))
        if self.whole == len(self.path) and block.covered & needed == needed:
            self.whole += 1
        self.path.append(block)

    def limited(self, backoff: int, limits: MatchLimits) -> Match:
        """As `result`, within limits."""
        size = self.tree.tokens_per_block
        divergence = self.length
        self._cut_path(limits)
        if limits.whole_blocks:
            self.whole_only = True
        limit = max(0, self.length - backoff)
        most = limits.max_tokens if limits.exact_tokens is None else limits.exact_tokens
        if most is not None:
            limit = min(limit, most)
        if limits.whole_blocks:
            limit -= limit % size
        found = self._up_to(limit)
        if limits.exact_tokens is not None and found.num_tokens != limits.exact_tokens:
            return Match([], 0, self.num_lookup, divergence, found.before_hybrid)
        found.divergence = divergence
        return found

    def _cut_path(self, limits: MatchLimits) -> None:
        """End the path before the first block that the limits exclude."""
        mark = -1 if limits.published_before is None else limits.published_before
        self.before = mark
        self.computed_only = limits.computed_only
        for ordinal, block in enumerate(self.path):
            needed = self.tree.path_mask(ordinal)
            lacking = limits.computed_only and block.uncomputed and self.tree.computed(block) & needed != needed
            if lacking or (0 <= mark <= block.born):
                del self.path[ordinal:]
                self.length = ordinal * self.tree.tokens_per_block
                self.whole = min(self.whole, ordinal)
                self.tokens = None
                self.partial_end = None
                return

    def result(self, backoff: int) -> Match:
        return self._up_to(max(0, self.length - backoff))

    def _up_to(self, limit: int) -> Match:
        """The longest match of at most `limit` tokens."""
        tree = self.tree
        num_tokens = self._longest(limit, tree.snapshot_mask != 0)
        last = self.found
        before_hybrid = num_tokens
        if tree.snapshot_mask and num_tokens < limit:
            before_hybrid = self._longest(limit, False)
        blocks = self.path
        if num_tokens < tree.tokens_per_block * len(blocks):
            blocks = blocks[: num_tokens // tree.tokens_per_block]
        if last is not None:
            blocks.append(last)
        match = Match(blocks, num_tokens, self.num_lookup, self.length, before_hybrid)
        match.path = self.path
        return match

    def _longest(self, limit: int, snapshots: bool) -> int:
        """The largest reusable length not above `limit`. Sets `found` if it ends inside a block."""
        size = self.tree.tokens_per_block
        self.found = None
        self.good_from = [len(self.path)] * len(self.tree.windows)
        ordinal = min((limit - 1) // size, self.whole) if limit > 0 else _NOTHING  # of the candidate's last block
        while ordinal >= 0:
            if ordinal < self.whole and (ordinal + 1) * size <= limit and self._ends_after(ordinal, snapshots):
                self.found = None
                return (ordinal + 1) * size
            run = 0 if self.whole_only else self._ends_inside(ordinal, min(limit - ordinal * size, size - 1), snapshots)
            if run > 0 and self._is_old_enough():
                return ordinal * size + run
            ordinal -= 1
        self.found = None
        return 0

    def _is_old_enough(self) -> bool:
        """Whether the block inside which a candidate ends was cached before the time of the limits."""
        return self.before < 0 or (self.found is not None and self.found.born < self.before)

    def _ends_after(self, ordinal: int, snapshots: bool) -> bool:
        """Whether a match may end at the end of this block. The caller has checked the path-ending life cycles."""
        end = ordinal + 1
        mask = self.tree.snapshot_mask
        if snapshots and self.path[ordinal].covered & mask != mask:
            return False
        windows = self.tree.windows
        for i in range(len(windows)):
            life_cycle = windows[i]
            stale = life_cycle.stale(end * self.tree.tokens_per_block)
            if not self._window_holds(i, life_cycle, stale[1], end):
                return False
        return True

    def _window_holds(self, i: int, life_cycle: LifeCycle, beg: int, end: int) -> bool:
        """Whether blocks beg..end-1 of the path have their page in the i-th windowed life cycle."""
        good_from = min(self.good_from[i], end)
        path = self.path
        bit = 1 << life_cycle.index
        while good_from > beg and path[good_from - 1].covered & bit:
            if self.computed_only and not self.tree.computed(path[good_from - 1]) & bit:
                break
            good_from -= 1
        self.good_from[i] = good_from
        return good_from <= beg

    def _ends_inside(self, ordinal: int, most: int, snapshots: bool) -> int:
        """The longest reusable run of tokens in a block that follows `ordinal` blocks of the path.

        At most `most` tokens, fewer than a block; 0 if none. Sets `found` to that block.
        """
        size = self.tree.tokens_per_block
        least = 1
        windows = self.tree.windows
        for i in range(len(windows)):
            life_cycle = windows[i]
            while least <= most:
                stale = life_cycle.stale(ordinal * size + least)
                if self._window_holds(i, life_cycle, stale[1], ordinal):
                    break
                least = life_cycle.next_stale_change(ordinal * size + least) - ordinal * size
        if least > most:
            return 0
        return self._best_end(ordinal, least, most, snapshots)

    def _best_end(self, ordinal: int, least: int, most: int, snapshots: bool) -> int:
        """The longest run of `least` to `most` tokens for which a sibling has the pages; 0 if none. Sets `found`."""
        path = self.path
        tokens = self.tokens
        parent = path[ordinal - 1] if ordinal > 0 else self.root
        children = parent.children
        if tokens is None or (ordinal < len(path) and not isinstance(children, TrieNode)):
            block = path[ordinal] if ordinal < len(path) else self.partial_end
            if block is None:
                return 0
            run = usable_run(block, most, snapshots)
            if run < least:
                return 0
            self.found = block
            return run
        if children is None or usable_run(children, most, snapshots) < least:
            return 0
        size = self.tree.tokens_per_block
        end = min((ordinal + 1) * size, tokens.num_tokens)
        leaf, run = best_leaf(children, tokens, ordinal * size, end, least, most, snapshots)
        if leaf is None:
            return 0
        self.found = cast(Block, leaf)
        return run
