"""The order of eviction of one manager: a clock, and the classes of pages with their credits.

Within a priority, pages of one class are evicted oldest first. Between classes the page with the smallest rank goes first:

    rank = age + credit of the class

Ages count how many pages have become evictable, so a credit says how many of them a page of the class is kept longer.

Rule: credits never decrease from one class to the next. A parent's class is at least that of its children, and it becomes evictable
after them, so its rank is larger than theirs: the tail of a path is evicted before its head.
"""

from typing import Final, SupportsIndex

from mypy_extensions import i64

from kv_cache_manager_v2.arguments import Integers

MAX_CLASSES: Final = 64
MAX_CREDIT: Final[int]

class EvictionOrder:
    """What all cells of a manager share. Policies set the credits, cells advance the clock."""

    clock: int
    uniform: bool
    credits: list[int]
    classes: i64
    usual: int

    def __init__(self, credits: Integers = (0,), usual: SupportsIndex = 0) -> None:
        """`credits`: of each class, in pages, from 0 to 2**48. `usual`: the class of pages of which the policy says nothing."""

    def set_credits(self, credits: Integers) -> None:
        """Change the credits, of as many classes as before. O(classes). Raises ConfigError, with nothing changed."""
