"""Metrics of managers for Prometheus (extra `metrics`). docs/metrics.md says what each one means, and what to do."""

from __future__ import annotations

from kv_cache_manager_v2.extras.metrics.collector import MetricsCollector

__all__ = ["MetricsCollector"]
