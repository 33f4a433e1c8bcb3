"""Explains why the reuse of a prompt ended where it did.

An explanation comes from a second search of the tree, so requests record nothing for it. Dropped blocks are the exception, since
the tree no longer has them: `miss_history=N` records the latest N drops by block key, with their time and cache level.

Time is logical: `RadixTree.clock`, the number of blocks added to the tree so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import cast

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.ids import CacheTier
from kv_cache_manager_v2.listener import CachedBlock, CacheListener
from kv_cache_manager_v2.reuse import sibling_trie
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.match import match
from kv_cache_manager_v2.reuse.tokens import TokenSequence
from kv_cache_manager_v2.reuse.tree import LOSS_CLEARED, LOSS_NONE, RadixTree


class MissCause(Enum):
    """Why reuse ended. Where several causes apply, the first in this order is reported."""

    NOTHING_MISSED = "nothing missed"  # the whole prompt is reusable
    UNSETTLED = "unsettled"  # a later block depends on a file load that is still in flight
    UNCOMPUTED = "uncomputed"  # the match ends inside a block that is published ahead, which matches as a whole only
    NO_SNAPSHOT = "no snapshot"  # the blocks are cached, but no recurrent state at a later position
    WINDOW_HOLE = "window hole"  # the blocks are cached, but a page inside the window is missing
    NOT_COVERED = "not covered"  # a later block has no page that covers all tokens needed
    BACK_OFF = "back-off"  # more is cached, but the configured back-off leaves it unused
    PARTIAL_REUSE_OFF = "partial reuse off"  # a block begins with the next tokens, but only whole blocks may be reused
    DROPPED = "dropped"  # the next block was cached and has been dropped
    OTHER_SCOPE = "other scope"  # the next block is cached under another LoRA id or salt
    NEVER_STORED = "never stored"  # never cached, or dropped before the earliest recorded drop


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class MissReport:
    """How far a prompt is reusable, and why not further. `str()` gives one sentence."""

    num_tokens: int  # reusable tokens
    num_lookup_tokens: int  # tokens of the prompt
    cause: MissCause
    position: int  # token position: start of the missing block, position of the missing snapshot, or end of a longer match
    now: int  # logical time: blocks added to the tree so far
    remembered: int  # most drops that the history records; 0: none are recorded
    life_cycle: int | None = None  # layer group whose page is missing
    dropped_at: int | None = None  # logical time of the drop
    level: int | None = None  # cache level from which the page was dropped; None if not recorded, or if the cache was cleared
    tier: CacheTier | None = None  # tier of that level
    scope: ReuseScope | None = None  # scope under which more of the prompt is cached

    def __str__(self) -> str:
        return f"{self.num_tokens} of {self.num_lookup_tokens} tokens are reusable{self._reason()}"

    def _reason(self) -> str:
        cause = self.cause
        group = f"layer group {self.life_cycle}"
        if cause == MissCause.NOTHING_MISSED:
            return ""
        if cause == MissCause.UNSETTLED:
            return f": the block at {self.position} depends on a file load that is still in flight"
        if cause == MissCause.UNCOMPUTED:
            return f": the block at {self.position} is not computed yet, and until then only the whole of it can be reused"
        if cause == MissCause.NO_SNAPSHOT:
            return f": {group} has no snapshot after token {self.num_tokens}, up to {self.position}{self._dropped()}"
        if cause == MissCause.WINDOW_HOLE:
            return f": {group} has no page in its window for the block at {self.position}{self._dropped()}"
        if cause == MissCause.NOT_COVERED:
            return f": {group} has no page for all needed tokens of the block at {self.position}{self._dropped()}"
        if cause == MissCause.BACK_OFF:
            return f": {self.position} are cached, but reuse_match_backoff leaves the rest unused"
        if cause == MissCause.PARTIAL_REUSE_OFF:
            return f": a cached block shares tokens up to {self.position}, but enable_partial_reuse is off"
        if cause == MissCause.DROPPED:
            return f": the block at {self.position} was cached{self._dropped()}"
        if cause == MissCause.OTHER_SCOPE:
            return f": tokens up to {self.position} are cached under {self.scope}"
        unrecorded = "it was dropped: drops are not recorded (miss_history=0)"
        if self.remembered > 0:
            unrecorded = f"it was dropped before the latest {self.remembered} drops"
        return f": the block at {self.position} was never stored, or {unrecorded}"

    def _dropped(self) -> str:
        if self.dropped_at is None:
            return ""
        ago = self.now - self.dropped_at
        if self.level is None:
            return f"; the cache was cleared {ago} new blocks ago"
        tier = self.tier.name if self.tier is not None else "?"
        return f"; dropped from level {self.level} ({tier}) {ago} new blocks ago"


@mypyc_attr(acyclic=True)
class Drop:
    """The drop of one page or block."""

    def __init__(self, clock: int, life_cycle: int, level: int, num_bytes: int) -> None:
        self.clock = clock
        self.life_cycle = life_cycle  # life cycle of the page whose loss caused the drop
        self.level = level  # cache level of that page; LOSS_CLEARED if the cache was cleared
        self.num_bytes = num_bytes  # length of the block's packed tokens; 0 for a single page


class MissHistory(CacheListener):
    """A listener that records the latest `limit` drops by block key. O(1) per drop, plus computing the block's key."""

    def __init__(self, limit: int, next_listener: CacheListener | None) -> None:
        self.limit = limit
        self._next = next_listener  # receives every call too
        self._drops: dict[bytes, Drop] = {}  # by block key; the drop of a single page by block key and life cycle
        self._lengths: dict[int, int] = {}  # number of recorded blocks by the length of their packed tokens

    def __len__(self) -> int:
        return len(self._drops)

    def page_stored(self, block: CachedBlock, life_cycle: int, level: int, priority: int, covers_block: bool) -> None:
        if self._next is not None:
            self._next.page_stored(block, life_cycle, level, priority, covers_block)

    def page_moved(self, block: CachedBlock, life_cycle: int, source: int, destination: int) -> None:
        if self._next is not None:
            self._next.page_moved(block, life_cycle, source, destination)

    def item_named(self, digest: bytes, uuid: str) -> None:
        if self._next is not None:
            self._next.item_named(digest, uuid)

    def page_removed(self, block: CachedBlock, life_cycle: int) -> None:
        self._record(block, life_cycle)
        if self._next is not None:
            self._next.page_removed(block, life_cycle)

    def block_removed(self, block: CachedBlock) -> None:
        self._record(block, -1)
        if self._next is not None:
            self._next.block_removed(block)

    def find(self, key: bytes, life_cycle: int = -1) -> Drop | None:
        """The latest recorded drop of a block, or of its page in one life cycle."""
        return self._drops.get(_drop_key(key, life_cycle))

    def lengths(self, most: int) -> list[int]:
        """The distinct lengths of recorded blocks up to `most` bytes of packed tokens, ascending. O(distinct lengths)."""
        return sorted([length for length in self._lengths if length <= most])

    def _record(self, listed: CachedBlock, life_cycle: int) -> None:
        assert isinstance(listed, Block)
        tree = listed.tree
        if tree.loss_level == LOSS_NONE or listed.num_pending_loads > 0:
            return  # not a drop: replaced by a longer block, pruned while empty, or never matchable
        key = _drop_key(listed.block_key(), life_cycle)
        self._remove(key)  # a repeated drop moves to the end: the table is ordered by the latest drop
        num_bytes = len(listed.tokens) if life_cycle < 0 else 0
        self._drops[key] = Drop(tree.clock, tree.loss_life_cycle, tree.loss_level, num_bytes)
        self._lengths[num_bytes] = self._lengths.get(num_bytes, 0) + 1
        if len(self._drops) > self.limit:
            self._remove(next(iter(self._drops)))

    def _remove(self, key: bytes) -> None:
        drop = self._drops.pop(key, None)
        if drop is not None:
            count = self._lengths[drop.num_bytes] - 1
            if count:
                self._lengths[drop.num_bytes] = count
            else:
                del self._lengths[drop.num_bytes]


def _drop_key(key: bytes, life_cycle: int) -> bytes:
    return key if life_cycle < 0 else key + life_cycle.to_bytes(4, "little")


def explain(
    tree: RadixTree,
    scope: ReuseScope,
    tokens: TokenSequence,
    partial: bool,
    backoff: int,
    history: MissHistory | None,
    tiers: list[CacheTier],
) -> MissReport:
    """Explain why `match` with the same arguments finds no more. Changes nothing. O(prompt), plus one match per other scope."""
    return _Explanation(tree, scope, tokens, history, tiers).answer(partial, backoff)


class _Explanation:
    """One explanation in progress."""

    def __init__(
        self, tree: RadixTree, scope: ReuseScope, tokens: TokenSequence, history: MissHistory | None, tiers: list[CacheTier]
    ) -> None:
        self._tree = tree
        self._scope = scope
        self._tokens = tokens
        self._history = history
        self._tiers = tiers
        self._size = tree.tokens_per_block
        self._num_tokens = 0

    def answer(self, partial: bool, backoff: int) -> MissReport:
        tree, scope, tokens = self._tree, self._scope, self._tokens
        found = match(tree, scope, tokens, partial, backoff)
        self._num_tokens = found.num_tokens
        if found.num_tokens == tokens.num_tokens:
            return self._report(MissCause.NOTHING_MISSED, tokens.num_tokens)
        limit = max(0, found.divergence - backoff)
        if found.num_tokens < limit:
            return self._missing_page(limit, found.before_hybrid)
        if found.num_tokens < found.divergence:
            return self._report(MissCause.BACK_OFF, found.divergence)
        if not partial:
            more = match(tree, scope, tokens, True, backoff).num_tokens
            if more > found.num_tokens:
                return self._report(MissCause.PARTIAL_REUSE_OFF, more)
        return self._path_end(found.blocks, partial, backoff)

    def _report(
        self,
        cause: MissCause,
        position: int,
        life_cycle: int | None = None,
        drop: Drop | None = None,
        scope: ReuseScope | None = None,
    ) -> MissReport:
        level = None if drop is None or drop.level == LOSS_CLEARED else drop.level
        return MissReport(
            self._num_tokens,
            self._tokens.num_tokens,
            cause,
            position,
            self._tree.clock,
            0 if self._history is None else self._history.limit,
            life_cycle,
            None if drop is None else drop.clock,
            level,
            None if level is None else self._tiers[level],
            scope,
        )

    def _missing_page(self, limit: int, before_hybrid: int) -> MissReport:
        """The path is cached up to `limit`, but a page or a snapshot on it is missing."""
        size = self._size
        path = self._path(limit)
        for ordinal in range(len(path)):
            if path[ordinal].num_pending_loads:
                return self._report(MissCause.UNSETTLED, ordinal * size)
        if path[len(path) - 1].uncomputed and limit % size != 0:
            return self._report(MissCause.UNCOMPUTED, limit // size * size)
        for life_cycle in self._tree.life_cycles:
            if not life_cycle.is_attention:
                if before_hybrid > self._num_tokens:
                    drop = self._drop_of(path[len(path) - 1], life_cycle.index)
                    return self._report(MissCause.NO_SNAPSHOT, limit, life_cycle.index, drop)
                continue
            beg, end = life_cycle.stale(limit)
            for ordinal in range(len(path)):
                if beg <= ordinal < end:
                    continue
                page = path[ordinal].page(life_cycle.index)
                share = min(size, limit - ordinal * size)
                if page is not None and life_cycle.usable_tokens(page.coverage, share) >= share:
                    continue
                drop = self._drop_of(path[ordinal], life_cycle.index) if page is None else None
                hole = page is None and not life_cycle.loss_ends_path(ordinal)
                cause = MissCause.WINDOW_HOLE if hole else MissCause.NOT_COVERED
                return self._report(cause, ordinal * size, life_cycle.index, drop)
        return self._report(MissCause.NOT_COVERED, self._num_tokens // size * size)

    def _drop_of(self, block: Block, life_cycle: int) -> Drop | None:
        return None if self._history is None else self._history.find(block.block_key(), life_cycle)

    def _path(self, limit: int) -> list[Block]:
        """The blocks of the first `limit` tokens. If several blocks share the last tokens, any one of them ends the path."""
        node = self._tree.find_root(self._scope)
        path: list[Block] = []
        position = 0
        while position < limit and node is not None and node.children is not None:
            beg = self._tokens.byte_offset(position)
            end = self._tokens.byte_offset(min(position + self._size, self._tokens.num_tokens))
            node = cast(Block, sibling_trie.nearest(node.children, self._tokens.data, beg, end))
            path.append(node)
            position += self._size
        return path

    def _path_end(self, blocks: list[Block], partial: bool, backoff: int) -> MissReport:
        """Explain a match that is as long as the cached path of this scope."""
        beg = self._num_tokens // self._size * self._size
        drop = self._dropped_block(blocks, beg)
        if drop is not None:
            return self._report(MissCause.DROPPED, beg, drop.life_cycle if drop.life_cycle >= 0 else None, drop)
        most = self._num_tokens
        owner: ReuseScope | None = None
        for root in self._tree.roots():
            if root.scope != self._scope:
                length = match(self._tree, root.scope, self._tokens, partial, backoff).num_tokens
                if length > most:
                    most, owner = length, root.scope
        if owner is not None:
            return self._report(MissCause.OTHER_SCOPE, most, None, None, owner)
        return self._report(MissCause.NEVER_STORED, beg)

    def _dropped_block(self, blocks: list[Block], beg: int) -> Drop | None:
        """The drop of the longest block that begins at `beg`, is wholly in the prompt, and would have lengthened the match.

        Only lengths of recorded blocks are tried, in one pass of the hash: O(tokens of a block).
        """
        if self._history is None:
            return None
        keys = self._tree.keys
        parent_key = blocks[beg // self._size - 1].block_key() if beg > 0 else keys.root_key(self._scope)
        tokens = self._tokens
        data = tokens.slice_bytes(beg, min(beg + self._size, tokens.num_tokens))
        matched = len(tokens.slice_bytes(beg, self._num_tokens))
        first = tokens.byte_offset(beg)
        ends: list[int] = []
        for end in self._history.lengths(len(data)):
            if end > matched and tokens.byte_offset(tokens.whole_tokens(first + end)) == first + end:  # not inside a digest
                ends.append(end)
        candidates = keys.prefix_keys(parent_key, data, ends)
        while candidates:
            drop = self._history.find(candidates.pop())
            if drop is not None:
                return drop
        return None
