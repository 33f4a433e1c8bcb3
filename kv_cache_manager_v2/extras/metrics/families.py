"""The table of all metrics: the name of each, its labels, what it means, and how it follows from what a scrape reads.

Rule: tokens, blocks or bytes, never percentages; a gauge that is a share is a ratio from 0 to 1. Hit ratios are quotients of
counters, which the reader forms over an interval of his own. A page of a layer group counts as a block of that group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from kv_cache_manager_v2.build import COMPILED, VERSION
from kv_cache_manager_v2.extras.metrics.scrape import Scrape
from kv_cache_manager_v2.statistics import StorageStatistics

Samples: TypeAlias = Iterator[tuple[tuple[str, ...], float]]  # label values, and the value

CAPACITIES: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of the live hit curve, by the memory that there is
SHARES: Final = (0.5, 0.8, 0.9, 0.95)  # of the hits of an unlimited cache

Gauge: Final = GaugeMetricFamily
Counter: Final = CounterMetricFamily
LEVEL: Final = ("cache_level", "cache_tier")
MOVE: Final = ("layer_group", "source", "destination")


class Family(NamedTuple):
    """One metric."""

    name: str  # as it is exposed
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    labels: tuple[str, ...]  # besides model_name and engine
    meaning: str
    samples: Callable[[Scrape], Samples]


def one(number: Callable[[Scrape], float]) -> Callable[[Scrape], Samples]:
    """The samples of a metric that is one number."""

    def samples(scrape: Scrape) -> Samples:
        yield (), number(scrape)

    return samples


def by_level(numbers: Callable[[Scrape], list[int]]) -> Callable[[Scrape], Samples]:
    """The samples of a metric that has a number for each level."""

    def samples(scrape: Scrape) -> Samples:
        for level, number in enumerate(numbers(scrape)):
            yield scrape.tier(level), number

    return samples


def by_group(numbers: Callable[[Scrape], list[int]]) -> Callable[[Scrape], Samples]:
    """The samples of a metric that has a number for each layer group."""

    def samples(scrape: Scrape) -> Samples:
        for group, number in enumerate(numbers(scrape)):
            yield (str(group),), number

    return samples


def slot_bytes(item: StorageStatistics, slots: int) -> int:
    return sum(item.slot_sizes) * slots


def usage(scrape: Scrape, level: int) -> float:
    """The share of a level's bytes that can neither be given to a request nor be freed for one."""
    items = scrape.reading.storage[level]
    total = sum(slot_bytes(item, item.total) for item in items)
    return sum(slot_bytes(item, item.unavailable) for item in items) / total if total else 0.0


def _usage(scrape: Scrape) -> Samples:
    for level in scrape.levels:
        yield scrape.tier(level), usage(scrape, level)


def _bytes(scrape: Scrape) -> Samples:
    for level in scrape.levels:
        for group, item in enumerate(scrape.reading.storage[level]):
            for state, slots in (("free", item.free), ("evictable", item.evictable), ("unavailable", item.unavailable)):
                yield (*scrape.tier(level), str(group), state), slot_bytes(item, slots)


def _requests(scrape: Scrape) -> Samples:
    reading = scrape.reading
    yield ("active",), reading.active_requests
    yield ("suspended",), reading.open_requests - reading.active_requests


def _reused(scrape: Scrape) -> Samples:
    for group, table in enumerate(scrape.reading.requests.reused_blocks):
        for match, counts in (("full", table.full), ("partial", table.partial)):
            for level, count in enumerate(counts):
                yield (str(group), *scrape.tier(level), match), count


def moved_bytes(scrape: Scrape, wanted: Callable[[int, int], bool]) -> Samples:
    """Bytes moved, by layer group, for the pairs of levels that are wanted."""
    for group, table in enumerate(scrape.reading.movement.moved):
        for source in scrape.levels:
            for destination in scrape.levels:
                if wanted(source, destination):
                    pages = table[source][destination]
                    yield (str(group), str(source), str(destination)), pages * scrape.page_bytes(group)


def _onboarded(scrape: Scrape) -> Samples:
    return moved_bytes(scrape, lambda source, destination: destination < source)


def _offloaded(scrape: Scrape) -> Samples:
    return moved_bytes(scrape, lambda source, destination: destination > source)


def _copied(scrape: Scrape) -> Samples:
    for (group, _source, _destination), value in moved_bytes(scrape, lambda source, destination: source == destination == 0):
        yield (group,), value


def _evicted(scrape: Scrape) -> Samples:
    movement = scrape.reading.movement
    for group, table in enumerate(movement.moved):
        for level in scrape.levels:
            labels = (str(group), *scrape.tier(level))
            yield (*labels, "offloaded"), sum(table[level][level + 1 :])
            yield (*labels, "dropped"), movement.dropped[group][level]


def _returned(scrape: Scrape) -> Samples:
    for group, row in enumerate(scrape.reading.movement.returned):
        for level in scrape.levels[1:]:
            yield (str(group), *scrape.tier(level)), row[level]


def _events(scrape: Scrape) -> Samples:
    if scrape.dropped_events is not None:
        yield (), scrape.dropped_events


def _curve_ratio(scrape: Scrape) -> Samples:
    curve = scrape.curve
    if curve is not None and curve.total_tokens > 0:
        for times in CAPACITIES:
            yield (f"{times:g}",), curve.ratio(int(scrape.total_bytes * times) // curve.block_bytes)
        yield ("unlimited",), curve.ceiling / curve.total_tokens


def _curve_bytes(scrape: Scrape) -> Samples:
    curve = scrape.curve
    if curve is not None and curve.total_tokens > 0:
        for share in SHARES:
            blocks = curve.size_for(int(curve.ceiling * share))
            if blocks is not None:
                yield (f"{share:g}",), blocks * curve.block_bytes


def _config(scrape: Scrape) -> Samples:
    config = scrape.config
    policy = config.eviction_policy
    yield (
        (
            VERSION,
            "compiled" if COMPILED else "interpreted",
            str(config.tokens_per_block),
            ",".join(scrape.tier(level)[1] for level in scrape.levels),
            policy if isinstance(policy, str) else getattr(policy, "__name__", type(policy).__name__),
            config.block_key_hash,
        ),
        1,
    )


def _layer_groups(scrape: Scrape) -> Samples:
    for group, pool_group in enumerate(scrape.pool_group_of):
        yield (str(group), str(pool_group), scrape.reading.lookups.groups[group].name), 1


FAMILIES: Final[tuple[Family, ...]] = (
    Family(
        "kvcm_config_info",
        Gauge,
        ("version", "build", "tokens_per_block", "cache_tiers", "eviction_policy", "block_key_hash"),
        "1, with the configuration as labels",
        _config,
    ),
    Family("kvcm_layer_group_info", Gauge, ("layer_group", "pool_group", "layers"), "1, with what a layer group is", _layer_groups),
    Family("kvcm_poisoned", Gauge, (), "1 if the manager is poisoned and refuses work", one(lambda s: s.reading.poisoned)),
    Family("kvcm_kv_cache_usage_ratio", Gauge, LEVEL, "share of a level's bytes that requests keep, 0 to 1", _usage),
    Family("kvcm_kv_cache_bytes", Gauge, (*LEVEL, "pool_group", "state"), "bytes of slots, by state", _bytes),
    Family("kvcm_requests", Gauge, ("state",), "open requests", _requests),
    Family("kvcm_cached_blocks", Gauge, (), "blocks in the radix tree", one(lambda s: s.reading.cached_blocks)),
    Family("kvcm_prefix_cache_lookups_total", Counter, (), "prompts looked up", one(lambda s: s.reading.lookups.num_lookups)),
    Family("kvcm_prefix_cache_queries_total", Counter, (), "tokens looked up", one(lambda s: s.reading.lookups.lookup_tokens)),
    Family("kvcm_prefix_cache_hits_total", Counter, (), "tokens matched", one(lambda s: s.reading.lookups.reused_tokens)),
    Family(
        "kvcm_prefix_cache_path_tokens_total",
        Counter,
        (),
        "tokens that look-ups would have matched if no page on their path were missing",
        one(lambda s: s.reading.lookups.cached_tokens),
    ),
    Family(
        "kvcm_prefix_cache_hit_tokens_total",
        Counter,
        LEVEL,
        "reused tokens, by the coldest level of each block's pages",
        by_level(lambda s: s.reading.requests.cached_tokens_by_level),
    ),
    Family(
        "kvcm_prefix_cache_lost_tokens_total",
        Counter,
        ("layer_group",),
        "tokens by which missing pages of a layer group made matches shorter",
        by_group(lambda s: [group.lost_tokens for group in s.reading.lookups.groups]),
    ),
    Family("kvcm_reused_blocks_total", Counter, ("layer_group", *LEVEL, "match"), "blocks reused, by where they lay", _reused),
    Family(
        "kvcm_missed_blocks_total",
        Counter,
        ("layer_group",),
        "blocks of prompts that had to be computed",
        by_group(lambda s: s.reading.requests.missed_blocks),
    ),
    Family("kvcm_onboard_bytes_total", Counter, MOVE, "bytes moved to a warmer level", _onboarded),
    Family("kvcm_offload_bytes_total", Counter, MOVE, "bytes moved to a colder level", _offloaded),
    Family("kvcm_intra_device_copy_bytes_total", Counter, ("layer_group",), "bytes copied on the GPU", _copied),
    Family("kvcm_evicted_blocks_total", Counter, ("layer_group", *LEVEL, "reason"), "blocks that left a level", _evicted),
    Family("kvcm_returned_blocks_total", Counter, ("layer_group", *LEVEL), "blocks evicted to their clean copy here", _returned),
    Family(
        "kvcm_lost_blocks_total",
        Counter,
        ("layer_group",),
        "blocks whose bytes a failed or late transfer lost",
        by_group(lambda s: s.reading.movement.lost),
    ),
    Family("kvcm_transfers_in_flight", Gauge, (), "file transfers in flight", one(lambda s: s.reading.transfers_in_flight)),
    Family(
        "kvcm_disk_prefetch_blocks_total",
        Counter,
        (),
        "blocks that a prefetch moved from disk to host memory",
        one(lambda s: s.reading.requests.disk_prefetched_blocks),
    ),
    Family("kvcm_suspensions_total", Counter, (), "suspensions of requests", one(lambda s: s.reading.requests.suspensions)),
    Family("kvcm_resumes_total", Counter, (), "resumes after a suspension", one(lambda s: s.reading.requests.resumes)),
    Family("kvcm_events_dropped_total", Counter, (), "events that no reader took in time", _events),
    Family("kvcm_hit_curve_ratio", Gauge, ("capacity",), "hit ratio of a cache of so many times the memory", _curve_ratio),
    Family("kvcm_hit_curve_bytes", Gauge, ("hits",), "memory for this share of an unlimited cache's hits", _curve_bytes),
)
