"""Explains why the reuse of a prompt ended where it did.

An explanation comes from a second search of the tree, so requests record nothing for it. Dropped blocks are the exception, since
the tree no longer has them: `miss_history=N` records the latest N drops by block key, with their time and cache level.

Time is logical: `RadixTree.clock`, the number of blocks added to the tree so far.
"""

from dataclasses import dataclass
from enum import Enum

from kv_cache_manager_v2.ids import CacheTier
from kv_cache_manager_v2.listener import CachedBlock, CacheListener
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.tokens import TokenSequence
from kv_cache_manager_v2.reuse.tree import RadixTree

class MissCause(Enum):
    """Why reuse ended. Where several causes apply, the first in this order is reported."""

    NOTHING_MISSED = "nothing missed"
    UNSETTLED = "unsettled"
    UNCOMPUTED = "uncomputed"
    NO_SNAPSHOT = "no snapshot"
    WINDOW_HOLE = "window hole"
    NOT_COVERED = "not covered"
    BACK_OFF = "back-off"
    PARTIAL_REUSE_OFF = "partial reuse off"
    DROPPED = "dropped"
    OTHER_SCOPE = "other scope"
    NEVER_STORED = "never stored"

@dataclass(frozen=True)
class MissReport:
    """How far a prompt is reusable, and why not further. `str()` gives one sentence."""

    num_tokens: int
    num_lookup_tokens: int
    cause: MissCause
    position: int
    now: int
    remembered: int
    life_cycle: int | None = None
    dropped_at: int | None = None
    level: int | None = None
    tier: CacheTier | None = None
    scope: ReuseScope | None = None

class Drop:
    """The drop of one page or block."""

    clock: int
    life_cycle: int
    level: int
    num_bytes: int

    def __init__(self, clock: int, life_cycle: int, level: int, num_bytes: int) -> None: ...

class MissHistory(CacheListener):
    """A listener that records the latest `limit` drops by block key. O(1) per drop, plus computing the block's key."""

    limit: int

    def __init__(self, limit: int, next_listener: CacheListener | None) -> None: ...
    def __len__(self) -> int: ...
    def page_stored(self, block: CachedBlock, life_cycle: int, level: int, priority: int, covers_block: bool) -> None: ...
    def page_moved(self, block: CachedBlock, life_cycle: int, source: int, destination: int) -> None: ...
    def item_named(self, digest: bytes, uuid: str) -> None: ...
    def page_removed(self, block: CachedBlock, life_cycle: int) -> None: ...
    def block_removed(self, block: CachedBlock) -> None: ...
    def find(self, key: bytes, life_cycle: int = -1) -> Drop | None:
        """The latest recorded drop of a block, or of its page in one life cycle."""

    def lengths(self, most: int) -> list[int]:
        """The distinct lengths of recorded blocks up to `most` bytes of packed tokens, ascending. O(distinct lengths)."""

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
