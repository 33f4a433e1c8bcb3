"""Changes of quotas, and of the sizes of all levels together, as loops of attempts (see `storage/resize.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache_manager_v2.errors import ConfigError, OutOfMemoryError
from kv_cache_manager_v2.ids import Point
from kv_cache_manager_v2.layout.arithmetic import round_down, round_up
from kv_cache_manager_v2.layout.sizing import LevelSizing, resized
from kv_cache_manager_v2.storage.cell import Cell
from kv_cache_manager_v2.storage.hierarchy import Hierarchy
from kv_cache_manager_v2.storage.resize import LevelResize, ResizeResult


class QuotaResize:
    """Gives a level another quota in bytes, divided by `weights` (None: by those that it has).

    Refused below the level's minimum, where the pages that must be kept do not fit, and where the device has no memory left.
    `best_efforts`: instead of a refusal, the largest feasible quota not above the asked one, in whole grains. Since only growing
    can fail at the asked size and succeed below it, it lies between the present quota and the asked one. O(log grains) resizes are
    tried then. A host tier leaves free the larger of 1 GiB and 5 % of the memory that is `available` (bytes; None: as the system
    says).
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        level: int,
        quota: int,
        weights: list[float] | None,
        best_efforts: bool,
        available: int | None = None,
    ) -> None:
        self._hierarchy = hierarchy
        self._level = level
        self._weights = weights
        self._before = hierarchy.sizings[level]
        self._grain = self._before.granularity
        self._asked = round_up(quota, self._grain)
        self._best_efforts = best_efforts
        self._low = self._before.quota // self._grain  # grains that are feasible
        self._high = 0  # grains that are not; 0 before the asked size was tried
        self._first: ResizeResult | None = None  # of the asked size; also a refusal without an attempt
        self._current: LevelResize | None = None
        self._refuse_early(quota, available)

    @property
    def pending(self) -> list[Point]:
        """The points that the caller waits for after an attempt has returned None."""
        return [] if self._current is None else self._current.pending

    def attempt(self) -> ResizeResult | None:
        """Resize the level, or refuse that; None if the caller must first wait for `pending`, and try again."""
        if self._first is not None and self._high == 0:
            return self._first
        while True:
            grains = (self._low + self._high) // 2 if self._high > 0 else self._asked // self._grain
            result = self._attempt_size(grains * self._grain)
            if result is None:
                return None
            if self._first is None:
                self._first = result
                if result.ok or not self._best_efforts or self._asked <= self._before.quota:
                    return result
                self._high = grains
            elif result.ok:
                self._low = grains
            else:
                self._high = grains
            if self._high - self._low <= 1:
                return self._best()

    def _refuse_early(self, quota: int, available: int | None) -> None:
        before = self._before
        refused = ResizeResult(self._level, before.slots, before.slots)
        if self._asked < before.minimum_quota:
            text = f"a quota of {quota} bytes is below the level's minimum of {before.minimum_quota} bytes"
            self._first = refused.refuse(text, -1, 0)
        elif self._best_efforts and self._asked > before.quota:
            spare = self._hierarchy.tier(self._level).spare_bytes(available)
            if spare >= 0:
                self._asked = min(self._asked, round_down(before.quota + spare, self._grain))
                if self._asked <= before.quota:
                    text = "the host memory that is available must stay free for other processes"
                    self._first = refused.refuse(text, -1, 0)

    def _attempt_size(self, quota: int) -> ResizeResult | None:
        """One attempt, in which what the device or the index range refuses is a refusal like any other."""
        now = self._hierarchy.sizings[self._level]
        try:
            if self._current is None:
                sizing = resized(self._hierarchy.layout, now, quota, self._weights)
                self._current = LevelResize(self._hierarchy, self._level, sizing)
            current = self._current
            if not current.attempt():
                return None
            result = current.result
        except (OutOfMemoryError, ConfigError) as error:
            result = ResizeResult(self._level, now.slots, now.slots).refuse(str(error), -1, 0)
        self._current = None
        return result

    def _best(self) -> ResizeResult:
        """The result of the search: the level has the largest feasible size now."""
        assert self._first is not None
        if self._low * self._grain > self._before.quota:
            return ResizeResult(self._level, self._before.slots, self._hierarchy.sizings[self._level].slots)
        return self._first


class LevelsResize:
    """Resizes all levels, the coldest first.

    Whether all of them fit is decided on counts before any is touched, so that a refusal moves no page. Only what the device
    refuses, and what other calls do meanwhile, is found later: levels that are done then keep their new sizes.
    """

    def __init__(self, hierarchy: Hierarchy, sizings: Sequence[LevelSizing]) -> None:
        self._hierarchy = hierarchy
        self._sizings = list(sizings)
        self._before = hierarchy.sizings.copy()
        self._left = list(range(hierarchy.num_levels))  # levels to be resized, the next one last
        self._current: LevelResize | None = None
        self._results: list[ResizeResult] = []

    @property
    def pending(self) -> list[Point]:
        """The points that the caller waits for after an attempt has returned None."""
        return [] if self._current is None else self._current.pending

    def attempt(self) -> list[ResizeResult] | None:
        """Resize the levels, or refuse that; None if the caller must first wait for `pending`, and try again.

        The results are those of the levels up to the first refusal.
        """
        if not self._results and self._current is None:
            refused = _refuse_levels(self._hierarchy, self._sizings)
            if refused is not None:
                return [refused]
        while self._left:
            if not self._resize_next():
                return None
        return self._results

    def _resize_next(self) -> bool:
        """An attempt to resize the next level; False if it must wait."""
        level = self._left[-1]
        if self._current is None:
            self._current = LevelResize(self._hierarchy, level, self._sizings[level])
        result = self._current.result
        if self._hierarchy.sizings[level] is not self._before[level]:
            result.refuse("another call has resized this level meanwhile", -1, 0)
        elif not self._current.attempt():
            return False
        self._current = None
        self._results.append(result)
        self._left.pop()
        if not result.ok:
            self._left = []
        return True


def _refuse_levels(hierarchy: Hierarchy, sizings: Sequence[LevelSizing]) -> ResizeResult | None:
    """The refusal if the levels cannot have these sizes together; None if they can.

    Pages that must be kept can only move to colder levels, so those of a level and all colder ones must fit the slots there.
    """
    for column in hierarchy.cells:
        kept = 0
        slots = 0
        for level in range(hierarchy.num_levels - 1, -1, -1):
            cell = column[level]
            kept += cell.total - cell.open - (cell.evictable - _num_held(cell))
            slots += sizings[level].slots[cell.pool_group]
            if kept > slots:
                old = [other.total for other in hierarchy.level_cells(level)]
                what = f"pages of pool group {cell.pool_group} on level {level} and colder"
                text = f"{kept - slots} {what} must be kept and would have no slot"
                return ResizeResult(level, old, sizings[level].slots).refuse(text, cell.pool_group, kept - slots)
    return None


def _num_held(cell: Cell) -> int:
    """Evictable pages that are held. O(pages with file transfers in flight)."""
    return cell.num_held + sum([1 for page in cell.busy.pages() if page.holds > 0])
