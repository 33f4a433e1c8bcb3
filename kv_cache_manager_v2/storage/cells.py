"""All cells of a manager: one for each pool group on each level. Their memory is allocated and freed together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import get_ident
from typing import Final

from kv_cache_manager_v2.config import CacheTierConfig
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.eviction.order import EvictionOrder
from kv_cache_manager_v2.layout.pools import StorageLayout
from kv_cache_manager_v2.layout.sizing import LevelSizing
from kv_cache_manager_v2.storage.cell import Cell
from kv_cache_manager_v2.storage.tiers import Tier, make_tier

_log: Final = logging.getLogger(__name__)
BUILDING: Final[set[int]] = set()  # threads that construct a manager
# Of constructions of managers that are under way, that failed, or that were interrupted, with memory that is not freed yet.
UNBUILT: Final[list[Cells]] = []


class Cells:
    """The cells by pool group and level, those of swap slots, and the tiers by level."""

    def __init__(
        self,
        driver: Driver,
        timeline: Timeline,
        layout: StorageLayout,
        sizings: Sequence[LevelSizing],
        tier_configs: Sequence[CacheTierConfig],
        eviction: EvictionOrder,
    ) -> None:
        """Allocates the memory of all levels. On an exception, none remains allocated."""
        self.driver = driver
        self.builder = get_ident()  # the thread that constructs a manager of them; 0 if the construction failed
        self.by_group: list[list[Cell]] = [[] for _group in range(layout.num_pool_groups)]  # by pool group, then by level
        self.swaps: list[Cell] = []  # cells of swap slots; see Mover
        self.tiers: list[Tier] = []  # by level
        self.has_admission = False  # a level does not take all pages
        if self.builder in BUILDING:
            UNBUILT.append(self)
        try:
            for level in range(len(sizings)):
                tier = make_tier(driver, sizings[level], tier_configs[level])
                admission = tier_configs[level].make_admission()
                self.has_admission = self.has_admission or admission is not None
                self.tiers.append(tier)
                for group in range(layout.num_pool_groups):
                    cell = Cell(timeline, level, group, tier, level == len(sizings) - 1, eviction)
                    cell.admission = admission
                    cell.keeps_copies = level > 0 and tier_configs[level].keeps_copies
                    self.by_group[group].append(cell)
                    for slot_bytes in layout.slot_sizes[group]:
                        cell.arenas.append(tier.make_arena(slot_bytes))
                    cell.resize_memory(sizings[level].slots[group])
                    cell.allocator.expand(sizings[level].slots[group])
        except BaseException:
            self.abandon()
            raise

    def built(self) -> None:
        """The construction is complete: the manager owns the memory."""
        if self in UNBUILT:
            UNBUILT.remove(self)

    def abandon(self) -> None:
        """Free the memory after a failed construction. What the device refuses to free is kept for `free_unbuilt`."""
        self.builder = 0
        if self not in UNBUILT:
            UNBUILT.append(self)
        for _attempt in range(2):
            try:
                self.close_memory([])
                return
            except BaseException as error:  # the caller raises the first error
                _log.error("after a failed construction of a manager, memory could not be freed: %r", error)

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
        self.built()


def free_unbuilt() -> None:
    """Free what earlier constructions that failed could not free. What the device still refuses is logged and kept."""
    for cells in UNBUILT.copy():
        if cells.builder == 0:
            try:
                cells.close_memory([])
            except Exception as error:
                _log.error("memory of a manager whose construction failed could not be freed yet: %r", error)


def abandon_interrupted() -> None:
    """Called when a construction begins: an earlier one of this thread that has not ended was interrupted."""
    for cells in UNBUILT:
        if cells.builder == get_ident():
            cells.builder = 0
