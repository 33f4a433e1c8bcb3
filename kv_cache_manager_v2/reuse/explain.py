"""Why the reuse of a prompt ended where it did.

Rule: an explanation is found by a second look at the tree; requests record nothing for it. Only drops have to be recorded: with
`miss_history=N` the latest N are, by block key, with the time and the cache level.

Time is `RadixTree.clock`: the number of blocks that ever entered the tree.
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
    """What ended the reuse; the first that applies, in this order."""

    NOTHING_MISSED = "nothing missed"  # the whole prompt is reusable
    UNSETTLED = "unsettled"  # a block further on depends on a file load that has not ended
    NO_SNAPSHOT = "no snapshot"  # the blocks are there, but no recurrent state at a later position
    WINDOW_HOLE = "window hole"  # the blocks are there, but a page in the window before the end is not
    NOT_COVERED = "not covered"  # a block further on has no page for all of the tokens needed
    BACK_OFF = "back-off"  # more is cached; the configured back-off gives it up
    PARTIAL_REUSE_OFF = "partial reuse off"  # a block begins with the next tokens, but only whole blocks are reused
    DROPPED = "dropped"  # the next block was cached once
    OTHER_SCOPE = "other scope"  # the next block is cached under another LoRA id or salt
    NEVER_STORED = "never stored"  # or dropped before the drops that are recorded


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class MissReport:
    """How far a prompt is reusable, and why not further. `str()` says it in a sentence."""

    num_tokens: int  # reusable
    num_lookup_tokens: int  # of the prompt
    cause: MissCause
    position: int  # where what is missing begins (a block, a snapshot), or reuse would have gone on to
    now: int  # logical time: blocks that ever entered the tree
    remembered: int  # drops that the history holds at most; 0: drops are not remembered
    life_cycle: int | None = None  # layer group whose page is missing
    dropped_at: int | None = None  # logical time
    level: int | None = None  # cache level from which it was dropped; None also where the cache was cleared
    tier: CacheTier | None = None  # of that level
    scope: ReuseScope | None = None  # that has more of this prompt

    def __str__(self) -> str:
        return f"{self.num_tokens} of {self.num_lookup_tokens} tokens are reusable{self._reason()}"

    def _reason(self) -> str:
        cause = self.cause
        group = f"layer group {self.life_cycle}"
        if cause == MissCause.NOTHING_MISSED:
            return ""
        if cause == MissCause.UNSETTLED:
            return f": the block at {self.position} depends on a file load that has not ended"
        if cause == MissCause.NO_SNAPSHOT:
            return f": {group} has no snapshot after token {self.num_tokens}, up to {self.position}{self._dropped()}"
        if cause == MissCause.WINDOW_HOLE:
            return f": {group} has no page in its window for the block at {self.position}{self._dropped()}"
        if cause == MissCause.NOT_COVERED:
            return f": {group} has no page for all needed tokens of the block at {self.position}{self._dropped()}"
        if cause == MissCause.BACK_OFF:
            return f": {self.position} are cached, the rest is given up by reuse_match_backoff"
        if cause == MissCause.PARTIAL_REUSE_OFF:
            return f": a cached block shares tokens up to {self.position}, but enable_partial_reuse is off"
        if cause == MissCause.DROPPED:
            return f": the block at {self.position} was cached{self._dropped()}"
        if cause == MissCause.OTHER_SCOPE:
            return f": under {self.scope} tokens up to {self.position} are cached"
        forgotten = "drops are not remembered (miss_history=0)"
        if self.remembered > 0:
            forgotten = f"it was dropped before the latest {self.remembered} drops"
        return f": the block at {self.position} was never stored, or {forgotten}"

    def _dropped(self) -> str:
        if self.dropped_at is None:
            return ""
        ago = self.now - self.dropped_at
        if self.level is None:
            return f"; everything was cleared {ago} new blocks ago"
        tier = self.tier.name if self.tier is not None else "?"
        return f"; dropped from level {self.level} ({tier}) {ago} new blocks ago"


@mypyc_attr(acyclic=True)
class Drop:
    """One page or block that was dropped."""

    def __init__(self, clock: int, life_cycle: int, level: int, num_bytes: int) -> None:
        self.clock = clock
        self.life_cycle = life_cycle  # of the page whose loss caused the drop
        self.level = level  # of that page; LOSS_CLEARED if all was cleared
        self.num_bytes = num_bytes  # of the block's packed tokens; 0 for a single page


class MissHistory(CacheListener):
    """The latest drops by key, the oldest removed first. O(1) for each drop, plus computing its block's key."""

    def __init__(self, limit: int, next_listener: CacheListener | None) -> None:
        self.limit = limit
        self._next = next_listener  # told everything too
        self._drops: dict[bytes, Drop] = {}  # by block key; a single page's by key and life cycle
        self._lengths: dict[int, int] = {}  # how many dropped blocks have so many bytes of packed tokens

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
        """When a block, or one page of it, was last dropped."""
        return self._drops.get(_drop_key(key, life_cycle))

    def lengths(self, most: int) -> list[int]:
        """The different lengths of dropped blocks up to `most`, ascending; bytes of packed tokens. O(different lengths)."""
        return sorted([length for length in self._lengths if length <= most])

    def _record(self, listed: CachedBlock, life_cycle: int) -> None:
        assert isinstance(listed, Block)
        tree = listed.tree
        if tree.loss_level == LOSS_NONE or listed.unsettled > 0:
            return  # replaced by a longer block, or empty, or not matchable yet
        key = _drop_key(listed.block_key(), life_cycle)
        self._remove(key)  # so that the latest drop of a block is the last one in the table
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
    """Why `match` with the same arguments finds no more. Changes nothing. O(prompt), plus one match for each other scope."""
    return _Inquiry(tree, scope, tokens, history, tiers).answer(partial, backoff)


class _Inquiry:
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
        """The path goes on to `limit`; something there is missing."""
        size = self._size
        path = self._path(limit)
        for ordinal in range(len(path)):
            if path[ordinal].unsettled:
                return self._report(MissCause.UNSETTLED, ordinal * size)
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
        """The blocks that hold the first `limit` tokens; of several that share the last ones, one."""
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
        """Nothing cached under this scope begins with more of the prompt."""
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
        """The drop of the longest block at `beg` that the prompt holds whole, and that would have made the match longer.

        Only lengths that were dropped are tried, each on top of the shorter ones: O(tokens of a block).
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
            if end > matched and tokens.byte_offset(tokens.whole_tokens(first + end)) == first + end:  # not within a digest
                ends.append(end)
        candidates = keys.prefix_keys(parent_key, data, ends)
        while candidates:
            drop = self._history.find(candidates.pop())
            if drop is not None:
                return drop
        return None
