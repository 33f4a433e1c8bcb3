"""What a metrics endpoint costs the engine: a reading of all statistics, and a scrape around it."""

from __future__ import annotations

import importlib.util

from bench.setting import Bench, Setting
from bench.work import Work
from kv_cache_manager_v2 import StatisticsReading

TIMES = 100  # readings of one run


class ReadStatistics(Work):
    """Read everything that is counted, over `setting.cached` blocks. The manager's lock is held meanwhile."""

    unit = "reading"

    def __init__(self, setting: Setting) -> None:
        self.bench = Bench(setting, setting.cached + 256, setting.cached)
        self.bench.cache_others(setting.cached)
        self.reading: StatisticsReading | None = None

    def run(self) -> int:
        for _i in range(TIMES):
            self.reading = self.bench.manager.read_statistics()
        return TIMES

    def after(self) -> None:
        assert self.reading is not None
        assert self.reading.cached_blocks >= self.bench.setting.cached

    def close(self) -> None:
        self.bench.close()


class Scrape(ReadStatistics):
    """The same, and all metrics of the collector made from it."""

    unit = "scrape"

    def __init__(self, setting: Setting) -> None:
        from kv_cache_manager_v2.extras.metrics import MetricsCollector

        super().__init__(setting)
        self.metrics = MetricsCollector(self.bench.manager)

    def run(self) -> int:
        self.reading = self.bench.manager.read_statistics()
        return sum([len(list(self.metrics.collect())) > 0 for _i in range(TIMES)])


def has_metrics() -> bool:
    """Whether the collector can be imported: both it and prometheus_client are there."""
    return importlib.util.find_spec("prometheus_client") is not None
