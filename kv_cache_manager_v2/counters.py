"""Records to which every room may add: counts of what moved and what was dropped.

Rule: adding is a few integer additions where the change happens. Nothing here reads a clock or knows who asks; readers take
differences.
"""

from __future__ import annotations


class MovementCounters:
    """Pages moved between levels and dropped, per life cycle; monotone since construction.

    moved[life_cycle][source][destination] and dropped[life_cycle][level] count pages; a move within level 0 is a device copy.
    Bytes follow from the slot size of the life cycle's pool group.
    """

    def __init__(self, num_life_cycles: int, num_levels: int) -> None:
        self.moved: list[list[list[int]]] = [[[0] * num_levels for _s in range(num_levels)] for _lc in range(num_life_cycles)]
        self.dropped: list[list[int]] = [[0] * num_levels for _lc in range(num_life_cycles)]
        self.lost: list[int] = [0] * num_life_cycles  # pages whose bytes a failed transfer destroyed

    def pages_moved(self, source: int, destination: int) -> int:
        """Pages moved from one level to another, all life cycles together."""
        return sum([table[source][destination] for table in self.moved])

    def pages_dropped(self, level: int) -> int:
        """Pages dropped from a level, all life cycles together."""
        return sum([row[level] for row in self.dropped])
