"""What an engine does for all open requests in every step: one more token of capacity, one token committed.

A run is as many steps as a block has tokens, so that each request takes one block in it and every step pays its share.
"""

from __future__ import annotations

import gc
from array import array
from typing import ClassVar

from bench.setting import BLOCK, WINDOW, Bench, Setting, prompt_tokens
from bench.work import Work, now
from kv_cache_manager_v2 import DEFAULT_BEAM_INDEX, KVCache, LayerGroupId, commit_batch, resize_batch


class DecodeCalls(Work):
    """Each request by its own calls."""

    unit = "step"
    steps: ClassVar[int] = BLOCK  # of one run
    most_runs: ClassVar[int] = 24  # that the pages must last for
    matrix: ClassVar[bool] = False  # whether the page indices are written into one shared matrix

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        context = setting.prompt if setting.prompt != Setting.prompt else WINDOW
        self.length = context + (4 * BLOCK if setting.layers != "full" else 0)
        self.requests = setting.requests
        per_request = -(-self.length // BLOCK) + self.most_runs * self.steps // BLOCK + 2
        self.bench = Bench(setting, setting.cached + self.requests * per_request)
        self.bench.cache_others(setting.cached)
        self.caches: list[KVCache] = []
        self.indices = array("i", [-1]) * (self.requests * per_request if self.matrix else 0)
        for serial in range(self.requests):
            cache = self.bench.serve(prompt_tokens(self.length, serial))
            if self.matrix:
                row = memoryview(self.indices)[serial * per_request : (serial + 1) * per_request]
                cache.set_base_page_index_buf(DEFAULT_BEAM_INDEX, LayerGroupId(0), row)
            self.caches.append(cache)

    def run(self) -> int:
        caches = self.caches
        length = self.length
        for _step in range(BLOCK):
            length += 1
            for cache in caches:
                if not cache.resize(length):
                    raise AssertionError("too few pages")
            for cache in caches:
                cache.commit([17])
        self.length = length
        return BLOCK

    def close(self) -> None:
        for cache in self.caches:
            cache.close()
        self.bench.close()


class DecodeBatch(DecodeCalls):
    """All requests in one call each for capacity and commit."""

    def run(self) -> int:
        caches = self.caches
        drawn = [17] * len(caches)
        length = self.length
        for _step in range(BLOCK):
            length += 1
            if resize_batch(caches, [length] * len(caches)) != len(caches):
                raise AssertionError("too few pages")
            commit_batch(caches, drawn)
        self.length = length
        return BLOCK


class DecodeStep(DecodeCalls):
    """All requests in one block: `manager.step`."""

    def run(self) -> int:
        caches = self.caches
        drawn = [17] * len(caches)
        step = self.bench.manager.step
        for _step in range(BLOCK):
            with step(caches, 1, drawn) as begun:
                if begun.short:
                    raise AssertionError("too few pages")
        self.length += BLOCK
        return BLOCK


class DecodeMatrix(DecodeBatch):
    """The batch calls, with every request's page indices written into its row of one int32 matrix."""

    matrix = True


class DecodeStatistics(DecodeCalls):
    """The per-request calls, and the counts of every request that took a page committed at the end of each step."""

    def run(self) -> int:
        caches = self.caches
        manager = self.bench.manager
        length = self.length
        for _step in range(BLOCK):
            length += 1
            for cache in caches:
                if not cache.resize(length):
                    raise AssertionError("too few pages")
            for cache in caches:
                cache.commit([17])
            if manager.get_dirty_stats_kv_cache_ids():
                for cache in caches:
                    cache.commit_pending_stats()
        self.length = length
        return BLOCK


class Collection(Work):
    """One full collection of the cyclic collector while blocks are cached."""

    unit = "collection"

    def __init__(self, setting: Setting) -> None:
        self.bench = Bench(setting, setting.cached + 256)
        self.bench.cache_others(setting.cached)
        gc.collect()

    def run(self) -> int:
        gc.collect()
        return 1

    def close(self) -> None:
        self.bench.close()


class CollectionFrozen(Collection):
    """The same where the process called `gc.freeze` once the manager stood, as a server does: what stood by then is skipped."""

    def __init__(self, setting: Setting) -> None:
        self.bench = Bench(setting, setting.cached + 256)
        gc.freeze()
        self.bench.cache_others(setting.cached)
        gc.collect()

    def close(self) -> None:
        super().close()
        gc.unfreeze()


class DecodeCollected(DecodeBatch):
    """The slowest but one of a thousand steps (p99.9) with automatic collection on, while blocks are cached."""

    collector = True
    steps = 1000
    most_runs = 6

    def timed(self) -> float:
        steps: list[float] = []
        caches = self.caches
        drawn = [17] * len(caches)
        for _step in range(self.steps):
            self.length += 1
            start = now()
            if resize_batch(caches, [self.length] * len(caches)) != len(caches):
                raise AssertionError("too few pages")
            commit_batch(caches, drawn)
            steps.append(now() - start)
        steps.sort()
        return steps[-2]
