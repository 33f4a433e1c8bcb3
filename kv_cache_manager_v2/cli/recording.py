"""Records a replay over time, for its picture: hits, occupied slots and moved pages at some moments, and the ages of evicted pages.

The age of a page is the number of requests since the last one with its block. A block is known by its first token, which no other
position of the replay has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kv_cache_manager_v2 import CacheListener, KVCacheManager
from kv_cache_manager_v2.listener import CachedBlock

if TYPE_CHECKING:
    from kv_cache_manager_v2.cli.contents import TokenBuffer
    from kv_cache_manager_v2.cli.serving import Outcome

NUM_SAMPLES: Final = 60
DROPPED: Final = "dropped"


@dataclass(frozen=True)
class Sample:
    """What has happened up to one moment of a replay, and what the tiers hold then."""

    admitted: int  # requests
    hit_tokens: list[int]  # by level
    computed_tokens: int
    occupied: list[float]  # by level: share of the slots that have a page
    pages_moved: list[list[int]]  # by source level, then destination level


class Recorder(CacheListener):
    """Listens to one manager. The engine tells it each request, and asks it for samples."""

    def __init__(self, num_records: int, tier_names: Sequence[str], tokens_per_block: int) -> None:
        self._every = max(1, num_records // NUM_SAMPLES)  # requests from one sample to the next
        self._tokens_per_block = tokens_per_block
        self._tier_names = tier_names
        self._request = 0  # that was admitted last
        self._listening = True
        self._last_use: dict[int | bytes, int] = {}  # by first token of a block: the request that used it last
        self.samples: list[Sample] = []
        self.ages: dict[str, list[int]] = {}  # by what became of a page: number of pages by the bit length of their ages

    def admit(self, request: int, prompt: TokenBuffer) -> None:
        """A request of the trace is looked up."""
        self._request = request
        self._last_use.update(dict.fromkeys(prompt[:: self._tokens_per_block].tolist(), request))

    def sample(self, admitted: int, outcome: Outcome, manager: KVCacheManager, *, last: bool = False) -> None:
        """Take a sample, if it is time or the `last` one."""
        before = self.samples[-1].admitted if self.samples else 0
        if admitted == before or (admitted < before + self._every and not last):
            return
        if last and len(self.samples) > 1 and admitted < before + self._every:
            del self.samples[-1]  # the last interval is longer than the others, not shorter
        levels = range(len(self._tier_names))
        occupied: list[float] = []
        for level in levels:
            (counts,) = manager.get_storage_statistics(level)  # one pool group: all pages have one size
            occupied.append(1 - counts.free / counts.total)
        moved = [[manager.movement.pages_moved(source, target) for target in levels] for source in levels]
        self.samples.append(Sample(admitted, list(outcome.hit_tokens_by_level), outcome.computed_tokens, occupied, moved))

    def stop(self) -> None:
        """Record nothing more: what the end of the manager drops is no eviction."""
        self._listening = False

    def page_stored(self, block: CachedBlock, life_cycle: int, level: int, priority: int, covers_block: bool) -> None:
        self._last_use.setdefault(block.token_list()[0], self._request)  # a block of generated tokens

    def page_removed(self, block: CachedBlock, life_cycle: int) -> None:
        self._count(block, DROPPED)

    def block_removed(self, block: CachedBlock) -> None:
        self._count(block, DROPPED)

    def page_moved(self, block: CachedBlock, life_cycle: int, source: int, destination: int) -> None:
        if destination > source:
            self._count(block, f"{self._tier_names[source]} to {self._tier_names[destination]}")

    def _count(self, block: CachedBlock, fate: str) -> None:
        if not self._listening:
            return
        age = self._request - self._last_use.get(block.token_list()[0], self._request)
        counts = self.ages.setdefault(fate, [])
        bits = age.bit_length()
        counts.extend([0] * (bits + 1 - len(counts)))
        counts[bits] += 1
