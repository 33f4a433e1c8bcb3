"""Why the reuse of a prompt ended where it did.

Rule: an explanation is found by a second look at the tree; requests record nothing for it. Only drops have to be recorded: with
`miss_history=N` the latest N are, by block key, with the time and the cache level.

Time is `RadixTree.clock`: the number of blocks that ever entered the tree.
"""

from dataclasses import dataclass
from enum import Enum

from kv_cache_manager_v2.ids import CacheTier
from kv_cache_manager_v2.listener import CachedBlock, CacheListener
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.tokens import TokenSequence
from kv_cache_manager_v2.reuse.tree import RadixTree

class MissCause(Enum):
    """What ended the reuse; the first that applies, in this order."""

    NOTHING_MISSED = "nothing missed"
    UNSETTLED = "unsettled"
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
    """How far a prompt is reusable, and why not further. `str()` says it in a sentence."""

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
    """One page or block that was dropped."""

    clock: int
    life_cycle: int
    level: int
    num_bytes: int

    def __init__(self, clock: int, life_cycle: int, level: int, num_bytes: int) -> None: ...

class MissHistory(CacheListener):
    """The latest drops by key, the oldest removed first. O(1) for each drop, plus computing its block's key."""

    limit: int

    def __init__(self, limit: int, next_listener: CacheListener | None) -> None: ...
    def __len__(self) -> int: ...
    def page_stored(self, block: CachedBlock, life_cycle: int, level: int, priority: int, covers_block: bool) -> None: ...
    def page_moved(self, block: CachedBlock, life_cycle: int, source: int, destination: int) -> None: ...
    def item_named(self, digest: bytes, uuid: str) -> None: ...
    def page_removed(self, block: CachedBlock, life_cycle: int) -> None: ...
    def block_removed(self, block: CachedBlock) -> None: ...
    def find(self, key: bytes, life_cycle: int = -1) -> Drop | None:
        """When a block, or one page of it, was last dropped."""

    def lengths(self, most: int) -> list[int]:
        """The different lengths of dropped blocks up to `most`, ascending; bytes of packed tokens. O(different lengths)."""

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
