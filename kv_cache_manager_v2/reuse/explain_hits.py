"""Which layer groups make matches shorter, and why.

A match ends where one layer group lacks a page, however many the others have: full attention may have a whole prompt cached, and a
recurrent group without a snapshot leaves none of it reusable. Each look-up is counted here; only one that lost a block or more is
looked at again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.ids import LayerGroupId
from kv_cache_manager_v2.layout.explain import name_group
from kv_cache_manager_v2.layout.life_cycle import LifeCycle
from kv_cache_manager_v2.layout.pools import StorageLayout
from kv_cache_manager_v2.reuse.match import Match
from kv_cache_manager_v2.statistics import MovementCounters

_log: Final = logging.getLogger(__name__)

FIRST_WARNING: Final = 100  # look-ups before a layer group can be named in the log


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class GroupHits:
    """What one layer group did to the matches."""

    layer_group: LayerGroupId
    name: str  # such as "window 1024, 2 layers"
    spoiled: int  # look-ups whose match was at least a block shorter since this group lacked a page
    lost_tokens: int  # tokens by which they were shorter
    dropped: int  # pages of the group that were dropped so far
    remedy: str  # what to configure; empty if nothing was spoiled

    def __str__(self) -> str:
        text = f"layer group {self.layer_group} ({self.name})"
        if self.spoiled == 0:
            return f"{text} made no match shorter"
        return f"{text} made {self.spoiled:,} matches shorter, by {self.lost_tokens:,} tokens: {self.remedy}"


@mypyc_attr(native_class=False)
@dataclass(frozen=True)
class HitsReport:
    """What all look-ups found, and which layer groups made their matches shorter. `str()` gives a line for each group."""

    num_lookups: int  # caches created with tokens
    lookup_tokens: int
    cached_tokens: int  # with a cached path: what would be reused if no page were missing
    reused_tokens: int
    groups: tuple[GroupHits, ...]  # by layer group

    def __str__(self) -> str:
        found = (
            f"{self.reused_tokens:,} of {self.lookup_tokens:,} tokens were reused in {self.num_lookups:,} look-ups; "
            f"{self.cached_tokens:,} were on a cached path"
        )
        return "\n".join([found, *[str(group) for group in self.groups]])


class HitLosses:
    """Counts look-ups, and what each layer group has lost. O(1) each; O(blocks of the windows) for one that lost something."""

    def __init__(self, layout: StorageLayout, counters: MovementCounters, backoff: int, min_snapshot: bool) -> None:
        self._layout = layout
        self._counters = counters
        self._backoff = backoff  # tokens that every match leaves unused
        self._min_snapshot = min_snapshot  # whether commits keep only the pages that their own length needs
        self._size: int = layout.tokens_per_block
        self._num_lookups = 0
        self._lookup_tokens = 0
        self._cached_tokens = 0
        self._reused_tokens = 0
        self._spoiled: list[int] = [0] * len(layout.life_cycles)  # by life cycle
        self._lost_tokens: list[int] = [0] * len(layout.life_cycles)
        self._told: list[bool] = [False] * len(layout.life_cycles)  # whether the log names it

    def count(self, found: Match) -> None:
        """Count a look-up without limits."""
        cached = max(0, found.divergence - self._backoff)
        self._num_lookups += 1
        self._lookup_tokens += found.num_lookup_tokens
        self._cached_tokens += cached
        self._reused_tokens += found.num_tokens
        if found.num_tokens + self._size <= cached:
            self._count_losses(found, cached)

    def _count_losses(self, found: Match, cached: int) -> None:
        snapshots = found.before_hybrid - found.num_tokens
        windows = cached - found.before_hybrid
        for life_cycle in self._layout.life_cycles:
            if not life_cycle.is_attention:
                if snapshots >= self._size:
                    self._lose(life_cycle, snapshots)
            elif windows >= self._size and _lacks_page(found, life_cycle, cached):
                self._lose(life_cycle, windows)

    def _lose(self, life_cycle: LifeCycle, num_tokens: int) -> None:
        index = life_cycle.index
        self._spoiled[index] += 1
        self._lost_tokens[index] += num_tokens
        if self._num_lookups >= FIRST_WARNING and not self._told[index] and self._lost_tokens[index] > self._reused_tokens:
            self._told[index] = True
            _log.warning(
                "after %d look-ups, %d of %d tokens were reused: %s",
                self._num_lookups,
                self._reused_tokens,
                self._lookup_tokens,
                self._group(index),
            )

    def report(self) -> HitsReport:
        """What was counted so far."""
        groups = tuple([self._group(index) for index in range(len(self._spoiled))])
        return HitsReport(self._num_lookups, self._lookup_tokens, self._cached_tokens, self._reused_tokens, groups)

    def _group(self, index: int) -> GroupHits:
        dropped = sum(self._counters.dropped[index])
        remedy = self._remedy(self._layout.life_cycles[index], dropped) if self._spoiled[index] > 0 else ""
        name = name_group(self._layout, index)
        return GroupHits(LayerGroupId(index), name, self._spoiled[index], self._lost_tokens[index], dropped, remedy)

    def _remedy(self, life_cycle: LifeCycle, dropped: int) -> str:
        if dropped > 0:
            return (
                f"{dropped:,} of its pages were dropped to make room; give its pool group a larger share (initial_pool_ratio), "
                "or add memory or a colder tier"
            )
        if not life_cycle.is_attention:
            return (
                "it has no snapshot where other requests branch off; end a prefill chunk at cache.prefill_end(), and commit where "
                "prompts have a common beginning"
            )
        if self._min_snapshot:
            return (
                "commit_min_snapshot keeps the window of committed lengths only; commit where prompts have a common beginning, or "
                "turn it off"
            )
        return "blocks that left its window within a prefill step kept no page; use shorter steps, or turn swa_scratch_reuse off"


def _lacks_page(found: Match, life_cycle: LifeCycle, cached: int) -> bool:
    """Whether a block in the window of the query after `cached` tokens has no page. Blocks before the window are not looked at."""
    end = min(len(found.path), cached // life_cycle.tokens_per_block)
    for ordinal in range(life_cycle.stale(cached)[1], end):  # noqa: SIM110 (as a loop: any() would make a generator)
        if found.path[ordinal].page(life_cycle.index) is None:
            return True
    return False
