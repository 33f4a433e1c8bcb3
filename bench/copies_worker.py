"""The process that moves pages between tiers of the emulated device: `python -m bench.copies_worker`.

Rule: every move is paired with a plain loop of one thread over as many bytes, one page at a time, run directly before or after:
memmove between memory of the same two tiers, or pwrite or pread of the same file. Neither finds its bytes in the processor's
caches: the tiers have slots for many batches, and each batch moves once before any moves again. The share is the median of the
pairs' own ratios, so a machine that is slow for a while is slow for both.

Files are buffered and clean before every move; pages have checksums, the plain loop has none. Modes: *cached*, all of it in the
operating system's page cache; *unchecked*, the same without checksums; *cold*, what is read was dropped from the page cache first;
*synced*, the clock stops when what was written is on the device.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from bench.copies import CopyRow
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
from kv_cache_manager_v2.device.arenas import Arena, DiskArena
from kv_cache_manager_v2.device.checksums import FileChecksums
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.eviction.order import EvictionOrder
from kv_cache_manager_v2.ids import NULL_POINT
from kv_cache_manager_v2.layout.pools import build_layout
from kv_cache_manager_v2.layout.sizing import size_levels
from kv_cache_manager_v2.statistics import MovementCounters
from kv_cache_manager_v2.storage.hierarchy import Hierarchy
from kv_cache_manager_v2.storage.page import Page

PAGE_SIZES: Final = (16 << 10, 256 << 10, 1 << 20)
BATCHES: Final = (1, 16, 256, 4096)
MOST_BYTES: Final = 1 << 30  # of one batch
SPAN_BYTES: Final = 128 << 20  # of all batches at least: far more than the processor's caches hold
MOST_TIMED: Final = 64  # batches whose way from tier to tier is timed; the others follow in one
FEWEST_PAIRS: Final = 5  # moves with their loops
TIERS: Final = ("GPU", "host", "disk")
MEMORY: Final = "memory"  # the modes; copies.MODES says what they are
CACHED: Final = "file cached"
UNCHECKED: Final = "file no sums"
COLD: Final = "file cold"
SYNCED: Final = "file synced"


class Way(NamedTuple):
    """From one tier to another, in one mode."""

    source: int
    destination: int
    mode: str

    @property
    def pair(self) -> str:
        return f"{TIERS[self.source]} to {TIERS[self.destination]}"


WAYS: Final = (  # each starts where the one before ended
    Way(0, 1, MEMORY),
    Way(1, 0, MEMORY),
    Way(0, 2, CACHED),
    Way(2, 0, CACHED),
    Way(0, 2, UNCHECKED),
    Way(2, 0, UNCHECKED),
    Way(0, 2, SYNCED),
    Way(2, 0, COLD),
    Way(0, 1, MEMORY),
    Way(1, 2, CACHED),
    Way(2, 1, CACHED),
    Way(1, 2, UNCHECKED),
    Way(2, 1, UNCHECKED),
    Way(1, 2, SYNCED),
    Way(2, 1, COLD),
    Way(1, 0, MEMORY),
)


class Pair(NamedTuple):
    """Seconds of one move, and of its plain loop."""

    engine: float
    plain: float


class Tiers:
    """Three tiers, each with slots for the same number of batches."""

    def __init__(self, page_bytes: int, batch: int, batches: int, directory: str) -> None:
        self.page_bytes = page_bytes
        self.batch = batch
        self.batches = batches
        quota = page_bytes * batch * batches
        layers = [AttentionLayerConfig(LayerId(0), [BufferConfig(DataRole("kv"), page_bytes)])]
        tiers = [GpuCacheTierConfig(quota), HostCacheTierConfig(quota), DiskCacheTierConfig(quota, directory)]
        config = KVCacheManagerConfig(32, tiers, layers)
        layout = build_layout(config)
        sizings = size_levels(layout, config)
        self.driver = EmulatedDriver("threads")
        self.timeline = Timeline(self.driver)
        self.hierarchy = Hierarchy(
            self.driver, self.timeline, layout, sizings, config.cache_tiers, MovementCounters(1, 3), EvictionOrder()
        )
        assert self.hierarchy.acquire([batch * batches], []) is None
        self.pages: list[Page] = [self.hierarchy.new_page(0, 35) for _i in range(batch * batches)]
        self.arenas: list[Arena] = [self.hierarchy.cells[0][level].arenas[0] for level in range(3)]
        for arena in self.arenas[:2]:
            ctypes.memset(arena.address(0), 1, quota)  # fault the memory in
        disk = self.arenas[2]
        assert isinstance(disk, DiskArena)
        assert disk.checksums is not None
        self.fd: int = disk.fd
        self.checksums: FileChecksums = disk.checksums
        for page in self.pages:
            self.hierarchy.hold_locked(page, NULL_POINT)

    def move(self, pages: list[Page], way: Way) -> float:
        """Move pages; seconds until their bytes are there, and for a synced file on the device."""
        if way.mode == UNCHECKED:  # all pages have the same bytes, so the sums of the slots stay right
            self.driver.unprotect_file(self.fd)
        start = time.perf_counter()
        self.hierarchy.mover.move(pages, self.hierarchy.cells[0][way.destination])
        self.driver.synchronize()
        if way.mode == SYNCED:
            os.fdatasync(self.fd)
        elapsed = time.perf_counter() - start
        self.driver.protect_file(self.fd, self.checksums)
        self.hierarchy.settle()
        assert not any(page.lost for page in pages)
        return elapsed

    def plain(self, which: int, way: Way) -> float:
        """Seconds of a plain loop over the slots of one batch, whichever pages are in them: all pages have the same size.

        A file is read to and written from the host tier, the GPU tier's pages too: a file knows no device.
        """
        slots = range(which * self.batch, (which + 1) * self.batch)
        step = self.page_bytes
        if way.mode == MEMORY:
            to, of = self.arenas[way.destination], self.arenas[way.source]
            copies = [(to.address(slot), of.address(slot)) for slot in slots]
            start = time.perf_counter()
            for destination, source in copies:
                ctypes.memmove(destination, source, step)
            return time.perf_counter() - start
        call = os.pwritev if way.destination == 2 else os.preadv
        host = self.arenas[1]
        views = [(memoryview((ctypes.c_char * step).from_address(host.address(slot))), slot * step) for slot in slots]
        start = time.perf_counter()
        for view, offset in views:
            call(self.fd, [view], offset)
        if way.mode == SYNCED:
            os.fdatasync(self.fd)
        return time.perf_counter() - start

    def prepare(self, mode: str) -> None:
        """Bring the file into the state that the mode asks for."""
        if mode != MEMORY:
            os.fdatasync(self.fd)
        if mode == COLD:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def go(self, way: Way, plain_first: bool) -> list[Pair]:
        """Move all pages, batch by batch, each with the plain loop over a batch that is half of the tier away."""
        pairs: list[Pair] = []
        timed = min(self.batches, MOST_TIMED)
        for which in range(timed):
            pages = self.pages[which * self.batch : (which + 1) * self.batch]
            other = (which + self.batches // 2) % self.batches
            plain = 0.0
            if plain_first:
                self.prepare(way.mode)
                plain = self.plain(other, way)
            self.prepare(way.mode)
            engine = self.move(pages, way)
            if not plain_first:
                self.prepare(way.mode)
                plain = self.plain(other, way)
            pairs.append(Pair(engine, plain))
            plain_first = not plain_first
        if timed < self.batches:
            self.move(self.pages[timed * self.batch :], way)
        return pairs

    def close(self) -> None:
        for page in self.pages:
            self.hierarchy.release(page)
        self.hierarchy.close()
        self.timeline.close()
        self.driver.close()


def measure(page_bytes: int, batch: int, directory: str, span_bytes: int = SPAN_BYTES) -> list[CopyRow]:
    """A row for each way: medians over pairs; the first time round is not counted."""
    nbytes = page_bytes * batch
    batches = max(1, span_bytes // nbytes)
    tiers = Tiers(page_bytes, batch, batches, directory)
    pairs: dict[Way, list[Pair]] = {}
    for way in WAYS:
        tiers.go(way, False)
    for i in range(-(-FEWEST_PAIRS // min(batches, MOST_TIMED))):
        for way in WAYS:
            pairs.setdefault(way, []).extend(tiers.go(way, bool(i % 2)))
    tiers.close()
    return [row(way, page_bytes, batch, found) for way, found in pairs.items()]


def row(way: Way, page_bytes: int, batch: int, pairs: Sequence[Pair]) -> CopyRow:
    nbytes = page_bytes * batch
    return {
        "pair": way.pair,
        "mode": way.mode,
        "page": page_bytes,
        "batch": batch,
        "pairs": len(pairs),
        "rate": nbytes / statistics.median([pair.engine for pair in pairs]) / 1e9,
        "plain": nbytes / statistics.median([pair.plain for pair in pairs]) / 1e9,
        "share": statistics.median([pair.plain / pair.engine for pair in pairs]),
        "more": statistics.median([pair.engine - pair.plain for pair in pairs]),
    }


def sizes(quick: bool) -> list[tuple[int, int]]:
    """(bytes, pages) of the batches, the largest cut to MOST_BYTES."""
    found: list[tuple[int, int]] = []
    for page_bytes in PAGE_SIZES[:2] if quick else PAGE_SIZES:
        for batch in BATCHES[:2] if quick else BATCHES:
            found.append((page_bytes, min(batch, MOST_BYTES // page_bytes)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.copies_worker")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", type=int, nargs=2, metavar=("KIB", "PAGES"), help="one size only")
    parser.add_argument("--directory", required=True, help="where the files lie")
    options = parser.parse_args()
    check_build()
    rows: list[CopyRow] = []
    for page_bytes, batch in [(options.only[0] << 10, options.only[1])] if options.only else sizes(options.quick):
        with tempfile.TemporaryDirectory(prefix="kvcm-bench-", dir=options.directory) as directory:
            rows += measure(page_bytes, batch, directory, 8 << 20 if options.quick else SPAN_BYTES)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
