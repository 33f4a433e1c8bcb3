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

from __future__ import annotations

import math
from typing import Final

from kv_cache_manager_v2.eviction.conversations import Conversations, Ended, prefixes_of
from kv_cache_manager_v2.eviction.ghost_cache import GhostCache
from kv_cache_manager_v2.eviction.policy import END, MORE, EvictionPolicy, RequestEnd

TURNS: Final = 9  # kinds by turn: the first, ..., the ninth and all later ones
SPREAD: Final = 2.5
LEAST_SHARE: Final = 0.002
COUNTED: Final = 500  # requests of a kind after which its counts are halved
WINDOW: Final = 8.0  # capacities of the cache whose worth of blocks the ghosts remember
MARGIN: Final = 0.003  # the share of all blocks by which least recently used has to be better
CREDIT_INTERVAL: Final = 16  # requests between two computations of the credits


class LearningPolicy(EvictionPolicy):
    """Classes, from the least worth: a request said to be the last of its conversation; by turn; one said to be continued."""

    def __init__(self, turns: int) -> None:
        super().__init__([0] * (turns + 2), 1)
        self._turns = turns
        self._conversations = Conversations()
        self._ended = [2.0] * (turns + 2)  # by class: requests that ended, halved from time to time ...
        self._continued = [0.0] + [1.0] * (turns + 1)  # ... and those of them that were continued
        self._gap = 0.0  # mean time from the end of a request to the start of one that continues it
        self._gaps = 0
        self._plain = GhostCache()  # least recently used
        self._ranked = GhostCache()  # with the credits that would apply now
        self._total = 1.0  # blocks of all requests, decaying like the hits of the ghosts
        self._wanted = [0] * (turns + 2)  # the credits, whether they apply or not
        self._delays = [0.0] * (turns + 2)  # the same but for a constant, at most 0: comparable while the mean time changes
        self._trusted = True  # whether they apply
        self._since = 0  # requests since the credits were computed

    @property
    def trusted(self) -> bool:
        """Whether the learnt order applies; False while least recently used would find more."""
        return self._trusted

    def class_of(self, end: RequestEnd) -> int:
        if not end.blocks:
            return self.order.usual
        prefixes = prefixes_of(end)
        earlier = self._conversations.continued_by(prefixes)
        now = self.order.clock
        if earlier is not None and not earlier.continued:
            self._learn(earlier, now)
        turn = 0 if earlier is None else earlier.turn + 1
        worth = self._class(end, turn)
        self._ended[worth] += 1
        if self._ended[worth] > COUNTED:
            self._ended[worth] /= 2
            self._continued[worth] /= 2
        added = self._conversations.add(prefixes[-1], earlier, len(prefixes), worth, now + len(prefixes))
        self._since += 1
        if self._since >= CREDIT_INTERVAL:
            self._since = 0
            self._compute_credits()
        self._simulate(earlier, added, end.capacity)
        return worth

    def _class(self, end: RequestEnd, turn: int) -> int:
        if end.expect == END:
            return 0
        return self._turns + 1 if end.expect == MORE else 1 + min(turn, self._turns - 1)

    def _learn(self, earlier: Ended, now: int) -> None:
        """A request is continued."""
        earlier.continued = True
        self._continued[earlier.worth] += 1
        self._gaps = min(self._gaps + 1, COUNTED)
        self._gap += (max(0, now - earlier.clock) - self._gap) / self._gaps

    def _compute_credits(self) -> None:
        """The credits by share. They never decrease from class to class, so a class has at least the share of those before it."""
        scale = SPREAD * self._gap
        share = LEAST_SHARE
        for worth in range(len(self._ended)):
            share = max(share, min(1.0, self._continued[worth] / self._ended[worth]))
            self._delays[worth] = scale * math.log(share)
        least = self._delays[0]
        self._wanted = [int(delay - least) for delay in self._delays]
        self._apply()

    def _apply(self) -> None:
        self.order.credits = self._wanted if self._trusted else [0] * len(self._wanted)

    def _simulate(self, earlier: Ended | None, added: Ended, capacity: int) -> None:
        """Serve the request from both ghosts, and compare what they have found."""
        decay = math.exp(-added.blocks / (WINDOW * max(1, capacity)))
        self._total = self._total * decay + added.blocks
        for ghost, delay in ((self._plain, 0.0), (self._ranked, self._delays[added.worth])):
            ghost.hits *= decay
            if earlier is not None:
                ghost.hits += ghost.find(added.conversation, min(earlier.blocks, added.blocks))
            ghost.add(added.conversation, added.blocks, added.clock + delay, capacity)
        gain = (self._ranked.hits - self._plain.hits) / self._total
        trusted = gain > -MARGIN if self._trusted else gain > 0.0
        if trusted != self._trusted:
            self._trusted = trusted
            self._apply()


class AdaptivePolicy(LearningPolicy):
    """Learns how likely a conversation goes on after each turn, and after what the engine says in `KVCache.close(expect=...)`."""

    def __init__(self) -> None:
        super().__init__(TURNS)


class HintsPolicy(LearningPolicy):
    """Least recently used until the engine says how conversations go on, and then by how often what it says is right."""

    def __init__(self) -> None:
        super().__init__(1)
        self.listens = False

    def class_of(self, end: RequestEnd) -> int:
        self.listens = True  # to the requests that follow, of which nothing may be expected
        return super().class_of(end)
