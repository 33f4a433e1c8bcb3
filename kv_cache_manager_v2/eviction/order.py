"""The order of eviction of one manager: a clock, and the classes of pages with their credits.

Within a priority, pages of one class are evicted oldest first. Between classes the page with the smallest rank goes first:

    rank = age + credit of the class

Ages count how many pages have become evictable, so a credit says how many of them a page of the class is kept longer.

Rule: credits never decrease from one class to the next. A parent's class is at least that of its children, and it becomes evictable
after them, so its rank is larger than theirs: the tail of a path is evicted before its head.
"""

from __future__ import annotations

from typing import Final, SupportsIndex

from mypy_extensions import i64

from kv_cache_manager_v2.arguments import Integers, at_least, wholes
from kv_cache_manager_v2.errors import ConfigError

MAX_CLASSES: Final = 64  # each evicted page costs a look at every class
MAX_CREDIT: Final = 1 << 48  # more pages than ever become evictable


class EvictionOrder:
    """What all cells of a manager share. Policies set the credits, cells advance the clock."""

    def __init__(self, credits: Integers = (0,), usual: SupportsIndex = 0) -> None:
        """`credits`: of each class, in pages, from 0 to 2**48. `usual`: the class of pages of which the policy says nothing."""
        self.clock: int = 0  # pages that became evictable so far, in all cells
        self.uniform: bool = True  # whether all pages are of the usual class
        self.credits: list[int] = _checked(credits)
        self.classes: i64 = len(self.credits)
        self.usual: int = at_least(usual, "usual", 0)
        if self.usual >= len(self.credits):
            raise ConfigError(f"usual is {self.usual}; it must be one of the classes 0..{len(self.credits) - 1}")

    def set_credits(self, credits: Integers) -> None:
        """Change the credits, of as many classes as before. O(classes). Raises ConfigError, with nothing changed."""
        found = _checked(credits)
        if len(found) != len(self.credits):
            raise ConfigError(f"credits has {len(found)} classes; this policy has {len(self.credits)}, which cannot change")
        self.credits = found


def _checked(credits: Integers) -> list[int]:
    found = wholes(credits, "credits", 0)
    if not 1 <= len(found) <= MAX_CLASSES:
        raise ConfigError(f"credits has {len(found)} classes; it must have 1 to {MAX_CLASSES}")
    if max(found) > MAX_CREDIT:
        raise ConfigError(f"credits are {found}; each must be at most {MAX_CREDIT}")
    for position in range(1, len(found)):
        if found[position] < found[position - 1]:
            raise ConfigError(f"credits are {found}; they must not decrease from one class to the next")
    return found
