"""Numbers the prefixes of a trace's prompts: equal beginnings get equal numbers.

A prompt is a sequence of *units* of equal length. Its path has a number for each: that of the prefix that ends with it. An id of
the trace is one unit or several.
"""

from __future__ import annotations

from typing import Final

ROOT: Final = -1  # the prefix without units


class PrefixTree:
    """All prefixes so far, numbered from 0 in order of first appearance."""

    def __init__(self, units_per_id: int) -> None:
        self.units_per_id = units_per_id
        self.size = 0  # prefixes so far
        self._usual: dict[int, int] = {}  # block id -> number of the first prefix that ended with the id's first unit
        self._parents: list[int] = []  # by number: the prefix before the id's first unit
        self._others: dict[tuple[int, int], int] = {}  # (prefix, block id) -> number, for ids that follow several prefixes

    def path(self, block_ids: list[int], num_units: int) -> list[int]:
        """The numbers of a prompt's prefixes, at most `num_units` of them. O(units)."""
        usual, parents = self._usual, self._parents
        units = self.units_per_id
        found: list[int] = []
        before = ROOT
        for block_id in block_ids:
            number = usual.get(block_id, ROOT)
            if number == ROOT:
                number = self._new(before)
                usual[block_id] = number
            elif parents[number] != before:
                number = self._other(before, block_id)
            found.append(number)
            before = number
            if units > 1:
                found.extend(range(number + 1, number + units))
                before += units - 1
        del found[num_units:]
        return found

    def _other(self, before: int, block_id: int) -> int:
        key = (before, block_id)
        number = self._others.get(key, ROOT)
        if number == ROOT:
            number = self._new(before)
            self._others[key] = number
        return number

    def _new(self, before: int) -> int:
        number = self.size
        self.size += self.units_per_id
        self._parents.extend([before] * self.units_per_id)
        return number
