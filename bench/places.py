"""Eviction of pages, and blocks with many siblings."""

from __future__ import annotations

import gc
import statistics
from array import array
from typing import Final

from bench.setting import BLOCK, Bench, Setting, prompt_tokens
from bench.work import Work, now
from kv_cache_manager_v2 import KVCache

EVICTED: Final = 256  # pages of one run
PAIRS: Final = 3  # of growths, over cached pages and over free ones


class Evict(Work):
    """Drop a page, the oldest of `setting.cached`, each the only block of its prompt: a leaf below the root.

    Measured as the difference between growing a request over cached pages and over free ones.
    """

    unit = "page"

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.bench = Bench(setting, setting.held + setting.cached + 2 * EVICTED)
        self.serial = 0
        self.held = self.bench.manager.create_kv_cache()
        if setting.held:
            assert self.held.resume(self.bench.stream)
            assert self.held.resize(setting.held * BLOCK)
            self.held.suspend()
        self._refill()
        if setting.held:
            self._grow()[1].close()  # fills the level below with held pages
            self._refill()

    def _refill(self) -> None:
        for _i in range(self.bench.manager.get_storage_statistics()[0].free):
            self.serial += 1
            self.bench.cache_prompt(prompt_tokens(BLOCK, self.serial))

    def _grow(self) -> tuple[float, KVCache]:
        cache = self.bench.manager.create_kv_cache()
        assert cache.resume(self.bench.stream)
        gc.disable()
        start = now()
        done = cache.resize(EVICTED * BLOCK)
        elapsed = now() - start
        gc.enable()
        assert done
        return elapsed, cache

    def timed(self) -> float:
        movement = self.bench.manager.movement
        over_cached: list[float] = []
        over_free: list[float] = []
        for _i in range(PAIRS):
            dropped = movement.pages_dropped(0)
            elapsed, cache = self._grow()
            over_cached.append(elapsed)
            assert movement.pages_dropped(0) == dropped + EVICTED
            cache.close()
            elapsed, cache = self._grow()
            over_free.append(elapsed)
            cache.close()
            self._refill()
        difference = statistics.median(over_cached) - statistics.median(over_free)
        return max(difference, 1e-9) / EVICTED  # a time cannot be negative, whatever the machine's other users did

    def close(self) -> None:
        self.held.close()
        self.bench.close()


class PushDown(Work):
    """Evict pages to a colder tier: the oldest of the GPU move to the host, and the oldest of the host are dropped."""

    unit = "page"

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.bench = Bench(setting, 4 * EVICTED, 8 * EVICTED)
        self.serial = 0
        self.cache: KVCache | None = None
        movement = self.bench.manager.movement
        while movement.pages_dropped(setting.tiers - 1) < EVICTED:
            self._serve_one()

    def _serve_one(self) -> None:
        self.serial += 1
        self.bench.cache_prompt(prompt_tokens(EVICTED * BLOCK, self.serial))

    def before(self) -> None:
        while self.bench.manager.get_storage_statistics()[0].free >= 1:
            self._serve_one()
        self.cache = self.bench.manager.create_kv_cache()
        assert self.cache.resume(self.bench.stream)
        self.moved = self.bench.manager.movement.pages_moved(0, 1)

    def run(self) -> int:
        assert self.cache is not None
        assert self.cache.resize(EVICTED * BLOCK)
        return EVICTED

    def after(self) -> None:
        assert self.cache is not None
        assert self.bench.manager.movement.pages_moved(0, 1) >= self.moved + EVICTED
        self.cache.close()

    def close(self) -> None:
        self.bench.close()


class ReturnToCopies(Work):
    """As `PushDown`, of pages that were loaded from the host before and have clean copies there."""

    unit = "page"

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.bench = Bench(setting, 4 * EVICTED, 64 * EVICTED)
        slots = self.bench.manager.get_storage_statistics()[0].total  # a grain of memory has more than were asked for
        self.prompts = [prompt_tokens(EVICTED * BLOCK, serial) for serial in range(slots // EVICTED + 2)]
        self.serial = 0
        self.cache: KVCache | None = None
        for _turn in range(3 * len(self.prompts)):
            self._serve_one()

    def _serve_one(self) -> None:
        self.bench.cache_prompt(self.prompts[self.serial % len(self.prompts)])
        self.serial += 1

    def before(self) -> None:
        while self.bench.manager.get_storage_statistics()[0].free >= 1:
            self._serve_one()
        self.cache = self.bench.manager.create_kv_cache()
        assert self.cache.resume(self.bench.stream)
        self.returned = self.bench.manager.movement.pages_returned(1)

    def run(self) -> int:
        assert self.cache is not None
        assert self.cache.resize(EVICTED * BLOCK)
        return EVICTED

    def after(self) -> None:
        assert self.cache is not None
        assert self.bench.manager.movement.pages_returned(1) == self.returned + EVICTED
        self.cache.close()

    def close(self) -> None:
        self.bench.close()


class _Siblings(Work):
    """One prompt of 256 tokens that goes on in `setting.siblings` ways, each two tokens into its next block."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.bench = Bench(setting, setting.siblings + 4 * EVICTED)
        self.prefix = prompt_tokens(8 * BLOCK)
        self.next_way = 0
        self.parent = self.bench.serve(self.prefix)  # keeps the prefix on the GPU
        for _i in range(setting.siblings):
            self.bench.cache_prompt(self._prompt(self.next_way))
            self.next_way += 1

    def _prompt(self, way: int) -> array[int]:
        prompt = self.prefix[:]
        prompt.extend([5, way])
        prompt.extend(range(9, 9 + BLOCK - 2))
        return prompt

    def close(self) -> None:
        self.parent.close()
        self.bench.close()


class PartialMatch(_Siblings):
    """Match a prompt that shares one token and more of its last block with the siblings."""

    unit = "prompt"

    def run(self) -> int:
        manager = self.bench.manager
        for i in range(100):
            prompt = self.prompts[i]
            assert manager.probe_reuse(None, prompt) == 8 * BLOCK + 20
        return 100

    def before(self) -> None:
        self.prompts = []
        for i in range(100):
            prompt = self._prompt(i * 97 % self.setting.siblings)
            for position in range(8 * BLOCK + 20, len(prompt)):
                prompt[position] += 1000
            self.prompts.append(prompt)


class InsertSibling(_Siblings):
    """Commit one more sibling block."""

    unit = "block"

    def before(self) -> None:
        self.cache = self.bench.manager.create_kv_cache(None, self.prefix)
        assert self.cache.resume(self.bench.stream)
        assert self.cache.resize(9 * BLOCK)
        self.suffix = self._prompt(self.next_way)[8 * BLOCK :]
        self.next_way += 1

    def run(self) -> int:
        self.cache.commit(self.suffix)
        return 1

    def after(self) -> None:
        self.cache.close()
