"""The process that moves pages between tiers of the emulated device: `python -m bench.copies_worker`.

Rule: every rate stands beside that of a plain loop over the same bytes in the same sizes: memmove from memory to memory, or one
thread that reads or writes a file front to back. Files are buffered, without checksums, in the mode named: *warm* through the
operating system's page cache, *cold* with the file dropped from it first.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Final

from bench.worker import check_build
from kv_cache_manager_v2 import (
    AttentionLayerConfig,
    BufferConfig,
    DataRole,
    DiskCacheTierConfig,
    EmulatedDriver,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    LayerId,
)
from kv_cache_manager_v2.counters import MovementCounters
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.ids import NULL_POINT
from kv_cache_manager_v2.layout.pools import build_layout
from kv_cache_manager_v2.layout.sizing import size_levels
from kv_cache_manager_v2.storage.hierarchy import Hierarchy
from kv_cache_manager_v2.storage.page import Page

PAGE_SIZES: Final = (16 << 10, 256 << 10, 1 << 20)
BATCHES: Final = (1, 16, 256, 4096)
MOST_BYTES: Final = 256 << 20  # of one batch
TIERS: Final = ("GPU", "host", "disk")
PAIRS: Final = ((0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0))


class Tiers:
    """Three tiers with room for one batch of pages each."""

    def __init__(self, page_bytes: int, batch: int, directory: str) -> None:
        quota = page_bytes * batch
        layers = [AttentionLayerConfig(LayerId(0), [BufferConfig(DataRole("kv"), page_bytes)])]
        tiers = [GpuCacheTierConfig(quota), HostCacheTierConfig(quota), DiskCacheTierConfig(quota, directory)]
        config = KVCacheManagerConfig(32, tiers, layers)
        layout = build_layout(config)
        sizings = size_levels(layout, config)
        self.driver = EmulatedDriver("threads")
        self.timeline = Timeline(self.driver)
        self.hierarchy = Hierarchy(self.driver, self.timeline, layout, sizings, config.cache_tiers, MovementCounters(1, 3))
        assert self.hierarchy.acquire([batch], []) is None
        self.pages: list[Page] = [self.hierarchy.new_page(0, 35) for _i in range(batch)]
        for page in self.pages:
            for arena in self.hierarchy.places.by_cell[0].arenas:
                ctypes.memset(arena.address(page.slot), 1, arena.slot_bytes)  # fault the memory in
            self.hierarchy.hold_locked(page, NULL_POINT)

    def move(self, level: int) -> float:
        """Move all pages to a level; seconds until their bytes are there."""
        hierarchy = self.hierarchy
        start = time.perf_counter()
        hierarchy.mover.move_run(self.pages, level, 0)
        self.driver.synchronize()
        elapsed = time.perf_counter() - start
        hierarchy.settle()
        assert not any(page.lost for page in self.pages)
        return elapsed

    def file(self) -> int:
        fd: int = self.hierarchy.places.by_cell[2].arenas[0].fd  # type: ignore[attr-defined]  # of a disk arena
        return fd

    def close(self) -> None:
        for page in self.pages:
            self.hierarchy.release(page)
        self.hierarchy.close()
        self.timeline.close()
        self.driver.close()


def drop_from_cache(fd: int) -> None:
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def engine_rates(page_bytes: int, batch: int, directory: str, repeats: int) -> dict[str, float]:
    """GB/s of each pair of tiers."""
    tiers = Tiers(page_bytes, batch, directory)
    times: dict[str, list[float]] = {}
    at = 0
    for _i in range(repeats + 1):
        for source, destination in PAIRS:
            if at != source:
                tiers.move(source)
            name = f"{TIERS[source]} to {TIERS[destination]}"
            if source == 2:
                drop_from_cache(tiers.file())
                times.setdefault(f"{name}, cold", []).append(tiers.move(destination))
                tiers.move(2)
            times.setdefault(name + (", warm" if 2 in (source, destination) else ""), []).append(tiers.move(destination))
            at = destination
    tiers.close()
    return {name: page_bytes * batch / statistics.median(values[1:]) / 1e9 for name, values in times.items()}


def plain_rates(page_bytes: int, batch: int, directory: str, repeats: int) -> dict[str, float]:
    """GB/s of plain loops over the same bytes."""
    total = page_bytes * batch
    maps = [mmap.mmap(-1, total) for _i in range(2)]
    views = [memoryview(one) for one in maps]
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in maps]
    for address in addresses:
        ctypes.memset(address, 1, total)
    offsets = range(0, total, page_bytes)
    fd, path = tempfile.mkstemp(dir=directory)
    os.unlink(path)
    os.posix_fallocate(fd, 0, total)

    def copy() -> None:
        for offset in offsets:
            ctypes.memmove(addresses[0] + offset, addresses[1] + offset, page_bytes)

    def write() -> None:
        for offset in offsets:
            os.pwritev(fd, [views[0][offset : offset + page_bytes]], offset)

    def read() -> None:
        for offset in offsets:
            os.preadv(fd, [views[0][offset : offset + page_bytes]], offset)

    def rate(work: Callable[[], None], before: Callable[[], None] | None = None) -> float:
        times: list[float] = []
        for _i in range(repeats + 1):
            if before is not None:
                before()
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return total / statistics.median(times[1:]) / 1e9

    rates = {
        "memcpy": rate(copy),
        "file write, warm": rate(write),
        "file read, warm": rate(read),
        "file read, cold": rate(read, lambda: drop_from_cache(fd)),
    }
    os.close(fd)
    return rates


def plain_of(pair: str) -> str:
    """The plain loop that a pair of tiers is held against."""
    if "to disk" in pair:
        return "file write, warm"
    if "disk" in pair:
        return "file read, cold" if pair.endswith("cold") else "file read, warm"
    return "memcpy"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.copies_worker")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--directory", required=True, help="where the files lie")
    options = parser.parse_args()
    check_build()
    rows: list[dict[str, object]] = []
    for page_bytes in PAGE_SIZES[:2] if options.quick else PAGE_SIZES:
        for batch in BATCHES[:2] if options.quick else BATCHES:
            some = min(batch, MOST_BYTES // page_bytes)
            if some < batch and some <= BATCHES[BATCHES.index(batch) - 1]:
                continue
            repeats = 2 if options.quick else 5
            with tempfile.TemporaryDirectory(prefix="kvcm-bench-", dir=options.directory) as directory:
                plain = plain_rates(page_bytes, some, directory, repeats)
                engine = engine_rates(page_bytes, some, directory, repeats)
            for pair, rate in engine.items():
                rows.append({"pair": pair, "page": page_bytes, "batch": some, "rate": rate, "plain": plain[plain_of(pair)]})
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
