"""The collector that a registry of prometheus_client asks at each scrape."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from kv_cache_manager_v2.arguments import flag, instance, text
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.extras.metrics.families import FAMILIES, Family
from kv_cache_manager_v2.extras.metrics.scrape import Scrape, Source
from kv_cache_manager_v2.extras.metrics.vllm_names import VLLM_FAMILIES
from kv_cache_manager_v2.manager import KVCacheManager

COMMON_LABELS = ("model_name", "engine")


class MetricsCollector:
    """The metrics of managers of this process: `prometheus_client.REGISTRY.register(MetricsCollector(manager))`.

    A scrape takes each manager's lock once, for a time that does not depend on the number of blocks, and once more for the live hit
    curve. It resets no statistic. A manager that was shut down is left out. `vllm_names` adds the names that vLLM has for the same
    numbers. Raises ConfigError.
    """

    def __init__(
        self, manager: KVCacheManager | None = None, model_name: str = "", engine: str = "0", vllm_names: bool = False
    ) -> None:
        self._families: tuple[Family, ...] = FAMILIES
        if flag(vllm_names, "vllm_names"):
            self._families += VLLM_FAMILIES
        self._sources: tuple[Source, ...] = ()  # replaced as a whole: a scrape on another thread sees it before or after
        if manager is not None:
            self.add(manager, model_name, engine)

    def add(self, manager: KVCacheManager, model_name: str = "", engine: str = "0") -> None:
        """Collect another manager too. Its samples have the labels `model_name` and `engine`.

        Raises ConfigError, with nothing changed, if another manager has the same labels.
        """
        source = Source(instance(manager, KVCacheManager, "manager"), (text(model_name, "model_name"), text(engine, "engine")))
        if source.labels in [other.labels for other in self._sources]:
            raise ConfigError(
                f"another manager has model_name={model_name!r} and engine={engine!r}; give each manager labels of its own"
            )
        self._sources += (source,)

    def remove(self, manager: KVCacheManager) -> None:
        """Collect a manager no more. Does nothing if it is not collected."""
        self._sources = tuple(source for source in self._sources if source.manager is not manager)

    def describe(self) -> Iterable[Metric]:
        """The families without samples, by which a registry finds names that are registered twice."""
        return [_family(family) for family in self._families]

    def collect(self) -> Iterable[Metric]:
        """One scrape."""
        scrapes = [(source.labels, source.read()) for source in self._sources]
        metrics: list[Metric] = []
        for family in self._families:
            metric = _family(family)
            for labels, scrape in scrapes:
                if scrape is not None:
                    _add(metric, family, labels, scrape)
            if metric.samples:
                metrics.append(metric)
        return metrics


def _family(family: Family) -> CounterMetricFamily | GaugeMetricFamily:
    return family.kind(family.name, family.meaning, labels=[*COMMON_LABELS, *family.labels])


def _add(metric: CounterMetricFamily | GaugeMetricFamily, family: Family, labels: tuple[str, str], scrape: Scrape) -> None:
    for own, value in family.samples(scrape):
        metric.add_metric([*labels, *own], value)
