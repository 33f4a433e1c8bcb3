"""Which ended request a request continues, known from its tokens alone.

A request continues the one whose last full block is the deepest that its own path has in common with an ended request. A block that
several paths branch off, such as the end of a system prompt, belongs to no conversation.
"""

from __future__ import annotations

from typing import Final

from kv_cache_manager_v2.eviction.policy import RequestEnd

REMEMBERED: Final = 4096  # latest requests of each of two generations: about 1 MB


class Ended:
    """A request that has ended, until another one continues it."""

    def __init__(self, conversation: int, turn: int, blocks: int, worth: int, clock: int) -> None:
        self.conversation = conversation  # number of the conversation
        self.turn = turn  # requests of the conversation before it
        self.blocks = blocks  # full blocks
        self.worth = worth  # eviction class
        self.clock = clock  # when its pages were evictable
        self.branches = 0  # requests that went on after exactly these blocks
        self.continued = False


class Conversations:
    """The latest ended requests, by the number of their prefix. O(1) for each request, and O(blocks) for its prefixes."""

    def __init__(self) -> None:
        self._young: dict[int, Ended] = {}
        self._old: dict[int, Ended] = {}
        self._count = 0

    def continued_by(self, prefixes: list[int]) -> Ended | None:
        """The request that one with these prefixes continues; None if it begins a conversation. Called once for each request."""
        for number in range(len(prefixes) - 1, -1, -1):
            prefix = prefixes[number]
            found = self._young.get(prefix)
            if found is None:
                found = self._old.get(prefix)
            if found is not None:
                if number == len(prefixes) - 1:
                    return found  # the same prompt again
                found.branches += 1
                if found.branches > 1:
                    self._young[prefix] = found  # remembered while it is used: else it would be taken for a conversation again
                    return None
                return found
        return None

    def add(self, prefix: int, earlier: Ended | None, blocks: int, worth: int, clock: int) -> Ended:
        """Remember a request that ends with this prefix and continues `earlier`."""
        if earlier is None:
            self._count += 1
            added = Ended(self._count, 0, blocks, worth, clock)
        else:
            added = Ended(earlier.conversation, earlier.turn + 1, blocks, worth, clock)
        before = self._young.get(prefix) or self._old.get(prefix)
        if before is not None:
            added.branches = before.branches
        self._young[prefix] = added
        if len(self._young) >= REMEMBERED:
            self._old = self._young
            self._young = {}
        return added


def prefixes_of(end: RequestEnd) -> list[int]:
    """A number for each prefix of full blocks. Equal prefixes have equal numbers; others hardly ever have. O(blocks)."""
    found: list[int] = []
    key = hash(end.scope) & _KEY_BITS
    for tokens in end.blocks:
        key = ((key & _LOW_BITS) * _FACTOR + (hash(tokens) & _KEY_BITS)) & _KEY_BITS  # `bytes` keep their hash
        found.append(key)
    return found


# Products stay below 2**62, so that they are machine words.
_LOW_BITS: Final = (1 << 38) - 1
_KEY_BITS: Final = (1 << 56) - 1
_FACTOR: Final = 8388593
