"""What a real HTTP endpoint says to prometheus_client's own parser, against the manager's own calls."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed")

from prometheus_client import start_http_server
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from kv_cache_manager_v2 import GPU_LEVEL, ConfigError, KVCacheEventManager, introspection
from kv_cache_manager_v2.extras.metrics import MetricsCollector
from kv_cache_manager_v2.extras.metrics.families import CAPACITIES, FAMILIES, SHARES
from kv_cache_manager_v2.extras.metrics.vllm_names import VLLM_FAMILIES
from tests.statistics.helpers import blocks, rig_of
from tests.support.models import GRAIN
from tests.support.rig import GPU, HOST, Rig, toks

ROOT = Path(__file__).resolve().parent.parent.parent
Numbers = dict[tuple[str, tuple[str, ...]], float]  # by metric and label values, common labels left out

PREFIX = "kvcm_prefix_cache_"


def serve_some(rig: Rig) -> None:
    """16 tokens cached; 12 of them move to the host, and are found and loaded again; one more block is computed."""
    rig.seed(toks(0, 16))
    assert rig.manager.resize(GPU_LEVEL, GRAIN)
    cache = rig.create(toks(0, 20))
    assert rig.manager.resize(GPU_LEVEL, 5 * GRAIN)
    assert cache.resume(rig.stream)
    assert cache.resize(20)
    cache.suspend()
    assert cache.resume(rig.stream)
    cache.commit_pending_stats()


def scraped(collector: MetricsCollector, engine: str = "0") -> Numbers:
    """One scrape over HTTP, of one engine."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(collector)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            text: str = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    numbers: Numbers = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels["engine"] == engine:
                labels = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
                numbers[sample.name, tuple(sorted(labels))] = sample.value
    return numbers


def test_each_number_is_the_managers() -> None:
    """And a scrape resets nothing: the changes that an engine reads afterwards are complete."""
    with rig_of(blocks(5, host=8)) as rig:
        serve_some(rig)
        manager = rig.manager
        numbers = scraped(MetricsCollector(manager, "tiny", vllm_names=True))
        hits = manager.explain_hits()
        assert numbers[f"{PREFIX}lookups_total", ()] == hits.num_lookups == 1
        assert numbers[f"{PREFIX}queries_total", ()] == numbers["vllm:prefix_cache_queries_total", ()] == hits.lookup_tokens == 20
        assert numbers[f"{PREFIX}hits_total", ()] == numbers["vllm:prefix_cache_hits_total", ()] == hits.reused_tokens == 16
        assert numbers[f"{PREFIX}path_tokens_total", ()] == hits.cached_tokens
        assert numbers[f"{PREFIX}lost_tokens_total", ("0",)] == hits.groups[0].lost_tokens
        tokens = manager.get_and_reset_iteration_cached_tokens_by_level()
        assert [numbers[f"{PREFIX}hit_tokens_total", ("0", "gpu")], numbers[f"{PREFIX}hit_tokens_total", ("1", "host")]] == tokens
        assert [numbers["vllm:prompt_tokens_cached_by_source_total", (tier,)] for tier in ("device", "host")] == tokens == [4, 12]
        table = manager.get_and_reset_iteration_reused_blocks_by_level()[introspection.attention_life_cycle_ids(manager)[0]]
        assert numbers["kvcm_reused_blocks_total", ("0", "0", "full", "gpu")] == table.full[0] == 1
        assert numbers["kvcm_reused_blocks_total", ("0", "1", "full", "host")] == table.full[1] == 3
        assert numbers["kvcm_reused_blocks_total", ("0", "1", "host", "partial")] == table.partial[1]
        delta = next(iter(manager.get_and_reset_iteration_stats().values()))
        assert numbers["kvcm_missed_blocks_total", ("0",)] == delta.iter_missed_blocks
        assert numbers["kvcm_onboard_bytes_total", ("0", "0", "1")] == delta.iter_onboard_bytes == 3 * GRAIN
        assert numbers["vllm:kv_offload_load_bytes_total", ()] == delta.iter_onboard_bytes
        assert numbers["kvcm_offload_bytes_total", ("0", "0", "1")] == delta.iter_offload_bytes == 3 * GRAIN
        assert numbers["vllm:kv_offload_store_bytes_total", ()] == delta.iter_offload_bytes
        assert numbers["kvcm_intra_device_copy_bytes_total", ("0",)] == delta.iter_intra_device_copy_bytes
        assert numbers["kvcm_lost_blocks_total", ("0",)] == delta.iter_lost_blocks
        movement = manager.movement
        assert numbers["kvcm_evicted_blocks_total", ("0", "0", "gpu", "offloaded")] == movement.pages_moved(0, 1) == 3
        assert numbers["kvcm_evicted_blocks_total", ("0", "0", "dropped", "gpu")] == movement.pages_dropped(0)
        assert numbers["kvcm_evicted_blocks_total", ("0", "1", "dropped", "host")] == movement.pages_dropped(1)
        assert numbers["kvcm_returned_blocks_total", ("0", "1", "host")] == movement.pages_returned(1)
        suspended, resumed = manager.get_and_reset_iteration_suspend_resume_stats()
        assert numbers["kvcm_suspensions_total", ()] == numbers["vllm:num_preemptions_total", ()] == suspended == 1
        assert numbers["kvcm_resumes_total", ()] == resumed == 1
        assert numbers["kvcm_disk_prefetch_blocks_total", ()] == manager.get_and_reset_iteration_disk_prefetch_blocks()
        for level, tier in ((GPU, "gpu"), (HOST, "host")):
            counts = introspection.slot_counts(manager, level)
            for state in ("free", "evictable", "unavailable"):
                labels = tuple(sorted((str(level), tier, "0", state)))
                assert numbers["kvcm_kv_cache_bytes", labels] == getattr(counts, state) * GRAIN
            assert numbers["kvcm_kv_cache_usage_ratio", (str(level), tier)] == counts.unavailable / counts.total
        assert numbers["vllm:kv_cache_usage_perc", ()] == introspection.storage_utilization(manager)[0] > 0
        assert (numbers["kvcm_requests", ("active",)], numbers["kvcm_requests", ("suspended",)]) == (1, 0)
        assert numbers["kvcm_cached_blocks", ()] == introspection.num_tree_blocks(manager) == 4
        assert numbers["kvcm_poisoned", ()] == numbers["kvcm_transfers_in_flight", ()] == 0
        configured = {labels for name, labels in numbers if name == "kvcm_config_info"}
        assert [{"gpu,host", "hints", "blake3", "4"} <= set(labels) for labels in configured] == [True]


def test_events_and_the_curve_are_there_if_they_are_configured() -> None:
    """Dropped events of the package's event manager, and the live hit curve at fixed multiples of the memory."""
    events = KVCacheEventManager(1)
    config = blocks(5)
    config.hit_curve_rate = 1.0
    with Rig(config, engine=False, events=events) as rig:
        serve = rig.create(toks(0, 16))
        serve.close()
        rig.seed(toks(0, 16))
        rig.seed(toks(50, 58))
        rig.create(toks(0, 16)).close()
        events.flush_iteration_events()
        numbers = scraped(MetricsCollector(rig.manager))
        assert numbers["kvcm_events_dropped_total", ()] == events.num_dropped_events
        curve = rig.manager.hit_curve()
        for times in CAPACITIES:
            assert numbers["kvcm_hit_curve_ratio", (f"{times:g}",)] == curve.ratio(int(5 * times))
        assert numbers["kvcm_hit_curve_ratio", ("unlimited",)] == curve.ceiling / curve.total_tokens > 0
        for share in SHARES:
            blocks_of_share = curve.size_for(int(curve.ceiling * share))
            assert blocks_of_share is not None
            assert numbers["kvcm_hit_curve_bytes", (f"{share:g}",)] == blocks_of_share * curve.block_bytes


def test_managers_have_labels_of_their_own_and_leave() -> None:
    """Two managers in one endpoint; the one that was removed, or shut down, is left out."""
    collector = MetricsCollector()
    with rig_of(blocks(5)) as first:
        collector.add(first.manager, engine="0")
        with rig_of(blocks(5)) as second:
            collector.add(second.manager, engine="1")
            with pytest.raises(ConfigError, match="engine='1'"):
                collector.add(first.manager, engine="1")
            second.seed(toks(0, 16))
            found = [scraped(collector, engine)["kvcm_cached_blocks", ()] for engine in ("0", "1")]
            assert found == [0, 4]
        assert scraped(collector, "1") == {}
        assert scraped(collector, "0")
        collector.remove(first.manager)
        assert scraped(collector, "0") == {}


def test_the_page_and_the_dashboard_name_metrics_that_exist() -> None:
    """docs/metrics.md has a row for every metric, and the dashboard's queries use known names and labels."""
    labels = {family.name: {"model_name", "engine", *family.labels} for family in (*FAMILIES, *VLLM_FAMILIES)}
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert set(re.findall(r"^\| `([\w:]+)`", page, re.MULTILINE)) == set(labels)
    board = json.loads((ROOT / "examples" / "grafana" / "kvcm.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert queries
    for query in queries:
        names = re.findall(r"\bkvcm_\w+", query)
        assert names, query
        used = set(re.findall(r"(\w+)\s*=~?\s*\"", query))
        used |= {label for labels_of in re.findall(r"by \(([^)]*)\)", query) for label in labels_of.replace(" ", "").split(",")}
        for name in names:
            assert name in labels, query
        assert used <= set.union(*[labels[name] for name in names]), query
