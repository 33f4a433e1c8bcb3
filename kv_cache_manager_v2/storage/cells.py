"""All cells of a manager: one for each pool group on each level. Their memory is allocated and freed together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from kv_cache_manager_v2.config import CacheTierConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.layout.pools import StorageLayout
from kv_cache_manager_v2.layout.sizing import LevelSizing
from kv_cache_manager_v2.storage.cell import Cell
from kv_cache_manager_v2.storage.tiers import Tier, make_tier

_log: Final = logging.getLogger(__name__)
UNBUILT: Final[list[Cells]] = []  # of failed constructions, with memory that the device refused to free


class Cells:
    """The cells by pool group and level, those of swap slots, and the tiers by level."""

    def __init__(
        self,
        driver: Driver,
        timeline: Timeline,
        layout: StorageLayout,
        sizings: Sequence[LevelSizing],
        tier_configs: Sequence[CacheTierConfig],
    ) -> None:
        """Allocates the memory of all levels. On an exception, none remains allocated."""
        self.by_group: list[list[Cell]] = [[] for _group in range(layout.num_pool_groups)]  # by pool group, then by level
        self.swaps: list[Cell] = []  # cells of swap slots; see Mover
        self.tiers: list[Tier] = []  # by level
        try:
            for level in range(len(sizings)):
                tier = make_tier(driver, sizings[level], tier_configs[level])
                self.tiers.append(tier)
                for group in range(layout.num_pool_groups):
                    cell = Cell(timeline, level, group, tier, level == len(sizings) - 1)
                    self.by_group[group].append(cell)
                    for slot_bytes in layout.slot_sizes[group]:
                        cell.arenas.append(tier.make_arena(slot_bytes))
                    cell.resize_memory(sizings[level].slots[group])
                    cell.allocator.expand(sizings[level].slots[group])
        except BaseException:
            self._free_unbuilt()
            raise

    def _free_unbuilt(self) -> None:
        """Free the memory after a failed construction. What the device refuses to free is kept for `free_unbuilt`."""
        for _attempt in range(2):
            try:
                self.close_memory([])
                return
            except BaseException as error:  # the caller raises the first error
                _log.error("after a failed construction of a manager, memory could not be freed: %r", error)
        UNBUILT.append(self)

    def of_level(self, level: int) -> list[Cell]:
        """The cells of a level, by pool group."""
        return [column[level] for column in self.by_group]

    def all(self) -> list[Cell]:
        """Every cell, those of swap slots last."""
        return [cell for column in self.by_group for cell in column] + self.swaps

    def close_memory(self, spared: list[Cell]) -> None:
        """Free the memory of all cells but `spared`, then raise the first error."""
        failure: BaseException | None = None
        for cell in self.all():
            if cell not in spared:
                try:
                    cell.close_memory()
                except BaseException as error:
                    failure = failure or error
        if failure is not None:
            raise failure
        for tier in self.tiers:
            tier.close()


def free_unbuilt() -> None:
    """Free what earlier constructions that failed could not free. What the device still refuses is logged and kept."""
    for cells in UNBUILT.copy():
        try:
            cells.close_memory([])
        except Exception as error:
            _log.error("memory of a manager whose construction failed could not be freed yet: %r", error)
        else:
            UNBUILT.remove(cells)
