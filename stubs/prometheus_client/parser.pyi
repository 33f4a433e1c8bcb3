from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

def text_string_to_metric_families(text: str) -> Iterator[Metric]: ...
