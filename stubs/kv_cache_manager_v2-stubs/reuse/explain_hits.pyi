"""Which layer groups make matches shorter, and why.

A match ends where one layer group lacks a page, however many the others have: full attention may have a whole prompt cached, and a
recurrent group without a snapshot leaves none of it reusable. Each look-up is counted here; only one that lost a block or more is
looked at again.
"""

from dataclasses import dataclass
from typing import Final

from kv_cache_manager_v2.ids import LayerGroupId
from kv_cache_manager_v2.layout.pools import StorageLayout
from kv_cache_manager_v2.reuse.match import Match
from kv_cache_manager_v2.statistics import MovementCounters

FIRST_WARNING: Final = 100

@dataclass(frozen=True)
class GroupHits:
    """What one layer group did to the matches."""

    layer_group: LayerGroupId
    name: str
    spoiled: int
    lost_tokens: int
    dropped: int
    remedy: str

@dataclass(frozen=True)
class HitsReport:
    """What all look-ups found, and which layer groups made their matches shorter. `str()` gives a line for each group."""

    num_lookups: int
    lookup_tokens: int
    cached_tokens: int
    reused_tokens: int
    groups: tuple[GroupHits, ...]

class HitLosses:
    """Counts look-ups, and what each layer group has lost. O(1) each; O(blocks of the windows) for one that lost something."""

    def __init__(self, layout: StorageLayout, counters: MovementCounters, backoff: int, min_snapshot: bool) -> None: ...
    def count(self, found: Match) -> None:
        """Count a look-up without limits."""

    def report(self) -> HitsReport:
        """What was counted so far."""
