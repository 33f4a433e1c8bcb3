"""The same numbers under the names that vLLM 0.33 exposes, for dashboards that were made for it."""

from __future__ import annotations

from typing import Final

from kv_cache_manager_v2.extras.metrics.families import Counter, Family, Gauge, Samples, moved_bytes, one, usage
from kv_cache_manager_v2.extras.metrics.scrape import Scrape
from kv_cache_manager_v2.ids import CacheTier

SOURCES: Final = {CacheTier.GPU_MEM: "device", CacheTier.HOST_MEM: "host", CacheTier.DISK: "disk"}


def _by_source(scrape: Scrape) -> Samples:
    found = dict.fromkeys(SOURCES.values(), 0)
    for level, tokens in enumerate(scrape.reading.requests.cached_tokens_by_level):
        found[SOURCES[scrape.config.cache_tiers[level].tier]] += tokens
    for source, tokens in found.items():
        yield (source,), tokens


def _loaded(scrape: Scrape) -> float:
    """Bytes moved to the GPU."""
    return sum(value for _labels, value in moved_bytes(scrape, lambda source, destination: destination == 0 < source))


def _stored(scrape: Scrape) -> float:
    """Bytes moved from the GPU."""
    return sum(value for _labels, value in moved_bytes(scrape, lambda source, destination: source == 0 < destination))


VLLM_FAMILIES: Final[tuple[Family, ...]] = (
    Family("vllm:kv_cache_usage_perc", Gauge, (), "kvcm_kv_cache_usage_ratio of the GPU, 0 to 1", one(lambda s: usage(s, 0))),
    Family("vllm:prefix_cache_queries_total", Counter, (), "tokens looked up", one(lambda s: s.reading.lookups.lookup_tokens)),
    Family("vllm:prefix_cache_hits_total", Counter, (), "tokens matched", one(lambda s: s.reading.lookups.reused_tokens)),
    Family("vllm:prompt_tokens_cached_by_source_total", Counter, ("source",), "reused tokens, by tier", _by_source),
    Family("vllm:kv_offload_load_bytes_total", Counter, (), "bytes moved to the GPU", one(_loaded)),
    Family("vllm:kv_offload_store_bytes_total", Counter, (), "bytes moved from the GPU", one(_stored)),
    Family("vllm:num_preemptions_total", Counter, (), "suspensions of requests", one(lambda s: s.reading.requests.suspensions)),
)
