"""What one scrape reads of one manager."""

from __future__ import annotations

from typing import Final, NamedTuple

from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.errors import KVCacheError
from kv_cache_manager_v2.events.manager import KVCacheEventManager
from kv_cache_manager_v2.ids import CacheTier
from kv_cache_manager_v2.manager import KVCacheManager
from kv_cache_manager_v2.manager_statistics import StatisticsReading
from kv_cache_manager_v2.planning.hit_curve import HitCurve

TIER_NAMES: Final = {CacheTier.GPU_MEM: "gpu", CacheTier.HOST_MEM: "host", CacheTier.DISK: "disk"}


class Scrape(NamedTuple):
    """The numbers of one manager at one moment, and what explains them."""

    config: KVCacheManagerConfig
    pool_group_of: list[int]  # by layer group
    reading: StatisticsReading
    curve: HitCurve | None  # None unless it is configured
    dropped_events: int | None  # None without an event manager of the package

    def tier(self, level: int) -> tuple[str, str]:
        """The labels of a level: its number, and what its memory is."""
        return str(level), TIER_NAMES[self.config.cache_tiers[level].tier]

    @property
    def levels(self) -> range:
        return range(len(self.reading.storage))

    def page_bytes(self, layer_group: int) -> int:
        """Bytes of one page of a layer group."""
        return sum(self.reading.storage[0][self.pool_group_of[layer_group]].slot_sizes)

    @property
    def total_bytes(self) -> int:
        """Bytes of the slots of all levels."""
        return sum(sum(item.slot_sizes) * item.total for level in self.reading.storage for item in level)


class Source:
    """A manager whose metrics are collected, and the labels that name it."""

    def __init__(self, manager: KVCacheManager, labels: tuple[str, str]) -> None:
        self.manager = manager
        self.labels = labels  # model name, engine
        self._config = manager.init_config
        self._pool_group_of = [int(group) for group in manager.get_life_cycle_pool_group_indices()]

    def read(self) -> Scrape | None:
        """Read all numbers; None if the manager does not answer any more, since it was shut down or belongs to another process."""
        manager = self.manager
        try:
            reading = manager.read_statistics()
            curve = manager.hit_curve() if self._config.hit_curve_rate > 0 else None
        except KVCacheError:
            return None
        events = manager.event_manager
        dropped = events.num_dropped_events if isinstance(events, KVCacheEventManager) else None
        return Scrape(self._config, self._pool_group_of, reading, curve, dropped)
