"""Policies that learn which requests are continued, and keep their blocks longer: `adaptive` and `hints`.

A request has a kind: what the engine has said about its conversation, or else how many turns this had. The share of each kind that
was continued, and how soon, is learnt from the past. The blocks of a kind get this credit, less that of the least kind:

    SPREAD x mean time to a continuation x ln(share)

So the page that is evicted is about the one whose continuation is least likely now. If these times are distributed exponentially,
the density of continuations at idle time t is proportional to share x exp(-t / mean). Its logarithm times the mean is the rank,
age + mean x ln(share), but for a constant. SPREAD makes up for times that spread wider than that.

All times are numbers of pages that become evictable, so nothing depends on the speed of the load.

Rule: the order is never worse than least recently used for long. Two ghost caches simulate both orders for the same requests. While
least recently used finds more, all credits are 0, which is least recently used for all cached pages at once.
"""

from typing import Final

from kv_cache_manager_v2.eviction.policy import EvictionPolicy, RequestEnd

TURNS: Final = 9
SPREAD: Final = 2.5
LEAST_SHARE: Final = 0.002
COUNTED: Final = 500
WINDOW: Final = 8.0
MARGIN: Final = 0.003
CREDIT_INTERVAL: Final = 16

class LearningPolicy(EvictionPolicy):
    """Classes, from the least worth: a request said to be the last of its conversation; by turn; one said to be continued."""

    def __init__(self, turns: int) -> None: ...
    @property
    def trusted(self) -> bool:
        """Whether the learnt order applies; False while least recently used would find more."""

    def class_of(self, end: RequestEnd) -> int: ...

class AdaptivePolicy(LearningPolicy):
    """Learns how likely a conversation goes on after each turn, and after what the engine says in `KVCache.close(expect=...)`."""

    def __init__(self) -> None: ...

class HintsPolicy(LearningPolicy):
    """Least recently used until the engine says how conversations go on, and then by how often what it says is right."""

    listens: bool

    def __init__(self) -> None: ...
    def class_of(self, end: RequestEnd) -> int: ...
