"""Requests with a stream each, one after the other: what they leave in the process and on the device.

Rule: what a request used is gone with it. Memory, mappings, descriptors, threads, events and streams are the same after the last
request as after the first tenth of them.
"""

from __future__ import annotations

import gc
import os
import threading
from typing import NamedTuple

from kv_cache_manager_v2 import (
    AttentionLayerConfig,
    BufferConfig,
    CacheTierConfig,
    DiskCacheTierConfig,
    EmulatedDriver,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
)
from tests.hunt.base import Found
from tests.support.drivers import returning_device

TOKENS = 6  # of a request
SPARE_EVENTS = 512  # events are kept for the next use: as many as were ever outstanding at once
PAGE = 16 << 10  # bytes


class Footprint(NamedTuple):
    """What a process and its device hold."""

    resident: int  # bytes
    mappings: int
    descriptors: int
    threads: int
    events: int
    streams: int

    @classmethod
    def now(cls, device: EmulatedDriver) -> Footprint:
        gc.collect()
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        with open("/proc/self/maps") as maps:
            mappings = sum(1 for _line in maps)
        descriptors = len(os.listdir("/proc/self/fd"))
        return cls(resident, mappings, descriptors, threading.active_count(), device.events_live, device.streams_live)


def _nothing() -> None:
    """A kernel."""


def serve(schedule: str, requests: int, folder: str, handles_return: bool, colder: int = 2) -> list[Footprint]:
    """Serve so many requests on the GPU and so many colder tiers; the footprint after each tenth."""
    device = EmulatedDriver(schedule)
    driver = returning_device(device) if handles_return else device
    tiers: list[CacheTierConfig] = [GpuCacheTierConfig(2 << 20), HostCacheTierConfig(1 << 18), DiskCacheTierConfig(2 << 20, folder)]
    config = KVCacheManagerConfig(
        4,
        tiers[: 1 + colder],
        [AttentionLayerConfig(0, [BufferConfig("key", PAGE)]), AttentionLayerConfig(1, [BufferConfig("key", PAGE)], 5, 0)],
        enable_stats=False,
    )
    found: list[Footprint] = []
    tenth = max(1, requests // 10)
    with KVCacheManager(config, driver=driver) as manager:
        for number in range(requests):
            stream = driver.create_stream()
            tokens = [number >> 12, number & 4095, 1, 2, 3, number % 7]
            with manager.create_kv_cache(None, tokens[:-1]) as cache:
                if not cache.resume(stream) or not cache.resize(TOKENS):
                    raise Found(f"a lone request is refused: {cache.last_shortage}")
                driver.launch(stream, _nothing)
                cache.commit(tokens[cache.num_committed_tokens :])
                if colder and number % 16 == 0:
                    cache.suspend()
                    cache.prefetch(1)
            driver.destroy_stream(stream)
            if (number + 1) % tenth == 0:
                driver.synchronize()
                manager.probe_reuse(None, tokens)
                found.append(Footprint.now(device))
        manager.clear_reusable_blocks()
    device.close()
    return found


def growth(footprints: list[Footprint], spare_bytes: int) -> str:
    """What grew after the first tenth; the empty string for nothing. Resident memory may move by `spare_bytes`."""
    first, last = footprints[0], footprints[-1]
    grown = [name for name in ("descriptors", "threads") if getattr(last, name) > getattr(first, name)]
    grown += [name for name in ("mappings", "streams") if getattr(last, name) > getattr(first, name) + 16]
    if last.events > first.events + SPARE_EVENTS:
        grown.append("events")
    if last.resident > first.resident + spare_bytes:
        grown.append("resident")
    return ", ".join(f"{name} from {getattr(first, name)} to {getattr(last, name)}" for name in grown)
