from collections.abc import Sequence
from typing import NamedTuple

class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float

class Metric:
    name: str
    documentation: str
    type: str
    samples: list[Sample]

class GaugeMetricFamily(Metric):
    def __init__(self, name: str, documentation: str, value: float | None = None, labels: Sequence[str] | None = None) -> None: ...
    def add_metric(self, labels: Sequence[str], value: float) -> None: ...

class CounterMetricFamily(Metric):
    def __init__(self, name: str, documentation: str, value: float | None = None, labels: Sequence[str] | None = None) -> None: ...
    def add_metric(self, labels: Sequence[str], value: float) -> None: ...
