"""Book-keeping: exactly N pages in memory of the engine, no memory of the manager, copies by the engine's `Transfer`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from ctypes import memmove
from pathlib import Path

import numpy as np
import pytest

from kv_cache_manager_v2 import (
    CacheTierConfig,
    ConfigError,
    DiskCacheTierConfig,
    EmulatedDriver,
    ExternalGpuTierConfig,
    HostCacheTierConfig,
    KVCache,
    KVCacheManager,
    KVCacheManagerConfig,
    LogicError,
    Stream,
    Transfer,
)
from tests.support.engine import Token
from tests.support.models import GRAIN, attention, ssm
from tests.support.rig import toks

SIZE = 24  # bytes of a page: far less than a grain of the device


class Worker(Transfer):
    """Owns the pages; every block of four tokens is one page, whose first bytes are the tokens."""

    def __init__(self, driver: EmulatedDriver, pages: int) -> None:
        self.driver = driver
        self.pages = np.zeros((pages, SIZE), np.uint8)
        self.calls = 0

    def copy_pages(self, stream: Stream, pool_group: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
        pairs = list(zip(sources, destinations, strict=True))
        self.calls += 1

        def kernel() -> None:
            for source, destination in pairs:
                self.pages[destination] = self.pages[source]

        self.driver.launch(stream, kernel)

    def to_memory(
        self, stream: Stream, pool_group: int, pool: int, pages: Sequence[int], offset: int, num_bytes: int, memory: Sequence[int]
    ) -> None:
        self._move(stream, list(pages), offset, num_bytes, list(memory), True)

    def from_memory(
        self, stream: Stream, pool_group: int, pool: int, pages: Sequence[int], offset: int, num_bytes: int, memory: Sequence[int]
    ) -> None:
        self._move(stream, list(pages), offset, num_bytes, list(memory), False)

    def _move(self, stream: Stream, pages: list[int], offset: int, num_bytes: int, memory: list[int], out: bool) -> None:
        self.calls += 1

        def kernel() -> None:
            for page, address in zip(pages, memory, strict=True):
                own = self.pages[page].ctypes.data + offset
                memmove(address if out else own, own if out else address, num_bytes)

        self.driver.launch(stream, kernel)

    def write(self, cache: KVCache, tokens: Sequence[Token], beg: int) -> None:
        """Queue the step that computes these tokens from position `beg` on."""
        indices = list(cache.get_base_page_indices(0))

        def kernel() -> None:
            for number, token in enumerate(tokens, beg):
                self.pages[indices[number // 4], number % 4] = token

        self.driver.launch(cache.cuda_stream, kernel)

    def read(self, cache: KVCache, count: int) -> list[int]:
        self.driver.synchronize()
        indices = list(cache.get_base_page_indices(0))
        return [int(self.pages[indices[number // 4], number % 4]) for number in range(count)]


def configured(*tiers: CacheTierConfig, partial: bool = True) -> KVCacheManagerConfig:
    return KVCacheManagerConfig(4, list(tiers), [attention(0, SIZE)], max_util_for_resume=1.0, enable_partial_reuse=partial)


def serve(worker: Worker, manager: KVCacheManager, stream: Stream, tokens: list[Token]) -> int:
    """Compute a prompt on top of what is cached, and check all of it; how much was reused."""
    with manager.create_kv_cache(None, tokens) as cache:
        reused = cache.num_committed_tokens
        assert cache.resume(stream)
        assert cache.resize(len(tokens))
        worker.write(cache, tokens[reused:], reused)
        cache.commit(tokens[reused:])
        assert worker.read(cache, len(tokens)) == tokens
    return reused


def test_there_are_exactly_as_many_pages_as_asked_and_no_memory() -> None:
    """A page may have any size. Only the manager of the pages knows where they are."""
    driver = EmulatedDriver()
    stream = driver.create_stream()
    with KVCacheManager(configured(ExternalGpuTierConfig(7), partial=False), driver=driver) as manager:
        assert manager.free_and_evictable() == (7, 0)
        assert driver.mapped_bytes == 0
        with manager.create_kv_cache() as cache:
            assert cache.resume(stream)
            assert not cache.resize(29)
            assert cache.resize(28)
            assert sorted(cache.get_base_page_indices(0)) == list(range(7))
            cache.commit(toks(0, 28))
        with manager.create_kv_cache() as cache:
            assert cache.resume(stream)
            assert cache.resize(6)
            cache.commit(toks(50, 56))
            with pytest.raises(LogicError, match="has no transfer"):
                cache.beam_width = 2
            with pytest.raises(LogicError, match="has no transfer"):
                cache.fork()
            assert manager.num_open_caches == 1
            assert (cache.beam_width, cache.num_committed_tokens) == (1, 6)
            manager.check_invariants()
        assert manager.probe_reuse(None, toks(0, 10)) == 8
        with pytest.raises(LogicError, match="memory of the engine"):
            manager.get_mem_pool_base_address(0, "key")


@pytest.mark.parametrize("schedule", ["eager", "threads", "random"])
def test_colder_tiers_get_the_bytes_through_the_transfer(schedule: str, tmp_path: Path) -> None:
    """To the host and to disk and back; and a partly matched block is copied."""
    driver = EmulatedDriver(schedule, 3)
    stream = driver.create_stream()
    worker = Worker(driver, 4)
    tiers = [ExternalGpuTierConfig(4, worker), HostCacheTierConfig(3 * 4096), DiskCacheTierConfig(GRAIN, str(tmp_path))]
    with KVCacheManager(configured(*tiers), driver=driver) as manager:
        for tag in range(0, 240, 16):
            assert serve(worker, manager, stream, toks(tag, tag + 16)) == 0
        assert worker.calls > 0
        for tag in range(0, 240, 16):
            assert serve(worker, manager, stream, [*toks(tag, tag + 10), 250]) == 10
    driver.synchronize()


def test_what_needs_copies_needs_a_transfer() -> None:
    external = ExternalGpuTierConfig(4)
    with pytest.raises(ConfigError, match="give it a transfer"):
        configured(external, HostCacheTierConfig(1 << 20), partial=False)
    with pytest.raises(ConfigError, match="enable_partial_reuse is True"):
        configured(external)
    with pytest.raises(ConfigError, match="cannot copy snapshots"):
        KVCacheManagerConfig(4, [external], [ssm(0, SIZE)], commit_min_snapshot=True, enable_partial_reuse=False)
    with pytest.raises(ConfigError, match="transfer"):
        ExternalGpuTierConfig(4, "worker")  # type: ignore[arg-type]


def test_the_number_of_pages_is_never_raised() -> None:
    """Too few for one request, or pages of several sizes: an error, where a quota would be raised."""
    config = KVCacheManagerConfig(4, [ExternalGpuTierConfig(3)], [attention(0, SIZE, window=64)], enable_partial_reuse=False)
    with pytest.raises(ConfigError, match="raise num_slots"):
        KVCacheManager(config, driver=EmulatedDriver())
    layers = [attention(0, SIZE), attention(1, 2 * SIZE, window=8)]
    config = KVCacheManagerConfig(4, [ExternalGpuTierConfig(64)], layers, enable_partial_reuse=False)
    with pytest.raises(ConfigError, match="pages of one size"):
        KVCacheManager(config, driver=EmulatedDriver())


def test_a_copy_of_a_configuration_has_the_same_transfer() -> None:
    worker = Worker(EmulatedDriver(), 1)
    config = configured(ExternalGpuTierConfig(4, worker))
    (tier,) = copy.deepcopy(config).cache_tiers
    assert isinstance(tier, ExternalGpuTierConfig)
    assert tier.transfer is worker
