from dataclasses import dataclass
from enum import Enum

from kv_cache_manager_v2.ids import CacheTier
from kv_cache_manager_v2.listener import CachedBlock, CacheListener
from kv_cache_manager_v2.reuse.keys import ReuseScope
from kv_cache_manager_v2.reuse.tokens import TokenSequence
from kv_cache_manager_v2.reuse.tree import RadixTree

class MissCause(Enum):
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
    clock: int
    life_cycle: int
    level: int

    def __init__(self, clock: int, life_cycle: int, level: int) -> None: ...

class MissHistory(CacheListener):
    limit: int

    def __init__(self, limit: int, behind: CacheListener | None) -> None: ...
    def __len__(self) -> int: ...
    def page_stored(self, block: CachedBlock, life_cycle: int, level: int, priority: int, covers_block: bool) -> None: ...
    def page_moved(self, block: CachedBlock, life_cycle: int, source: int, destination: int) -> None: ...
    def item_named(self, digest: bytes, uuid: str) -> None: ...
    def page_removed(self, block: CachedBlock, life_cycle: int) -> None: ...
    def block_removed(self, block: CachedBlock) -> None: ...
    def find(self, key: bytes, life_cycle: int = -1) -> Drop | None: ...

def explain(
    tree: RadixTree,
    scope: ReuseScope,
    tokens: TokenSequence,
    partial: bool,
    backoff: int,
    history: MissHistory | None,
    tiers: list[CacheTier],
) -> MissReport: ...
