"""The whole manager on the CUDA driver: requests are pushed to host memory and disk and come back with their bytes.

Rule: the engine of these tests touches device memory by copies on its own stream only, as they work on a real GPU and on the
stand-in alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kv_cache_manager_v2 import KVCache, KVCacheManager, LayerId, Stream
from kv_cache_manager_v2.extras.cuda import CudaDriver
from tests.extras.helpers import HostBuffer
from tests.support.engine import base_indices
from tests.support.models import KEY, attention, small

BLOCK = 4  # tokens
BLOCKS = 6  # of a request
LAYER = LayerId(0)


class CopyEngine:
    """Writes and reads pages by copies between them and host memory, on one stream."""

    def __init__(self, driver: CudaDriver, manager: KVCacheManager, requests: int) -> None:
        self.driver = driver
        self.manager = manager
        self.stream: Stream = driver.create_stream()
        self.stride = manager.get_page_stride(LAYER, KEY)
        self.host = HostBuffer(driver, (requests + 1) * BLOCKS * self.stride)

    def addresses(self, cache: KVCache) -> list[int]:
        """Where the request's pages are now."""
        base = self.manager.get_mem_pool_base_address(LAYER, KEY)
        indices = base_indices(cache, self.manager.get_layer_group_id(LAYER)).tolist()
        pages = self.manager.get_page_index_converter(LAYER, KEY)(indices)
        assert min(pages) >= 0
        return [base + self.stride * page for page in pages]

    def content(self, request: int) -> bytes:
        """What a request's pages shall hold."""
        return b"".join(bytes([request + 1, block]) * (self.stride // 2) for block in range(BLOCKS))

    def write(self, cache: KVCache, request: int) -> None:
        """Queue copies that fill the request's pages; their source stays as it is."""
        at = request * BLOCKS * self.stride
        self.host.write(self.content(request), at)
        sources = [self.host.address + at + self.stride * block for block in range(BLOCKS)]
        self.driver.copy_batch(self.stream, self.addresses(cache), sources, self.stride)

    def read(self, cache: KVCache) -> bytes:
        """The bytes of the request's pages, after everything queued."""
        at = self.host.nbytes - BLOCKS * self.stride
        at -= at % self.stride
        targets = [self.host.address + at + self.stride * block for block in range(BLOCKS)]
        self.driver.copy_batch(self.stream, targets, self.addresses(cache), self.stride)
        self.driver.synchronize()
        return self.host.read(BLOCKS * self.stride, at)

    def close(self) -> None:
        self.host.close()
        self.driver.destroy_stream(self.stream)


def test_requests_move_through_all_tiers_and_keep_their_bytes(driver: CudaDriver, tmp_path: Path) -> None:
    """Four requests of 6 blocks on 8 GPU slots, 8 host slots and 16 disk slots: each is suspended, later resumed and compared."""
    config = small(8, tokens_per_block=BLOCK, host_slots=8, disk=(str(tmp_path), 16))
    manager = KVCacheManager(config, driver=driver)
    engine = CopyEngine(driver, manager, 4)
    caches = [manager.create_kv_cache(None, None, number) for number in range(4)]
    for number, cache in enumerate(caches):
        assert cache.resume(engine.stream)
        assert cache.resize(BLOCK * BLOCKS)
        engine.write(cache, number)
        cache.commit(list(range(100 * number, 100 * number + BLOCK * BLOCKS)))
        cache.suspend()
    for number in (0, 2, 1, 3, 0):
        cache = caches[number]
        assert cache.resume(engine.stream), cache.last_shortage
        assert engine.read(cache) == engine.content(number)
        cache.suspend()
        manager.check_invariants()
    moved = manager.movement
    assert moved.pages_moved(0, 1) > 0
    assert moved.pages_moved(1, 2) > 0
    assert moved.pages_moved(2, 0) > 0
    assert sum(moved.lost) == 0
    for cache in caches:
        cache.close()
    manager.shutdown()
    engine.close()


def test_a_prefix_is_reused_and_a_partly_matched_tail_is_copied(driver: CudaDriver) -> None:
    """The second request finds 5 whole blocks and half of the sixth: the copy of the sixth is its own, with the same bytes."""
    manager = KVCacheManager(small(16, tokens_per_block=BLOCK), driver=driver)
    engine = CopyEngine(driver, manager, 1)
    tokens = list(range(BLOCK * BLOCKS))
    first = manager.create_kv_cache(None, None, 1)
    assert first.resume(engine.stream)
    assert first.resize(len(tokens))
    engine.write(first, 0)
    first.commit(tokens)
    second = manager.create_kv_cache(None, [*tokens[:-2], 900, 901], 2)
    assert second.num_committed_tokens == len(tokens) - 2
    assert second.resume(engine.stream)
    assert second.resize(len(tokens), len(tokens) - 2)
    there, here = engine.addresses(first), engine.addresses(second)
    assert here[:-1] == there[:-1]
    assert here[-1] != there[-1]
    kept = 2 * engine.stride // BLOCK  # of the tail: the bytes of its first two tokens
    assert engine.read(second)[: -engine.stride + kept] == engine.content(0)[: -engine.stride + kept]
    for cache in (first, second):
        cache.close()
    manager.shutdown()
    engine.close()


@pytest.mark.cuda
@pytest.mark.torch
@pytest.mark.parametrize("driver", ["gpu"], indirect=True)
def test_a_tensor_on_the_gpu_shows_the_pages(driver: CudaDriver) -> None:
    """What torch writes through the view is what lies at base + stride x index, and the other way round."""
    torch: Any = pytest.importorskip("torch")
    from kv_cache_manager_v2.extras.torch import pool_tensor

    manager = KVCacheManager(small(8, tokens_per_block=BLOCK), driver=driver)
    engine = CopyEngine(driver, manager, 1)
    tensor = pool_tensor(manager, LAYER, KEY, torch.uint8, (engine.stride,))
    assert tensor.device == torch.device("cuda", driver.device)
    assert tensor.data_ptr() == manager.get_mem_pool_base_address(LAYER, KEY)
    cache = manager.create_kv_cache(None, None, 1)
    assert cache.resume(engine.stream)
    assert cache.resize(BLOCK * BLOCKS)
    engine.write(cache, 0)
    driver.synchronize()
    base = manager.get_mem_pool_base_address(LAYER, KEY)
    pages = [(address - base) // engine.stride for address in engine.addresses(cache)]
    assert bytes(tensor[pages].flatten().tolist()) == engine.content(0)
    tensor[pages[0]] = 77
    torch.cuda.synchronize()
    assert engine.read(cache)[: engine.stride] == bytes([77]) * engine.stride
    cache.close()
    manager.shutdown()
    engine.close()


def test_layers_share_a_pool_on_the_device(driver: CudaDriver) -> None:
    """Two equal layers: their base addresses differ by one buffer, their page indices do not."""
    config = small(8, tokens_per_block=BLOCK)
    config.layers = [attention(0, config.layers[0].buffers[0].size // 2), attention(1, config.layers[0].buffers[0].size // 2)]
    manager = KVCacheManager(config, driver=driver)
    distance = manager.get_mem_pool_base_address(LayerId(1), KEY) - manager.get_mem_pool_base_address(LAYER, KEY)
    assert distance == manager.get_page_stride(LAYER, KEY)
    manager.shutdown()
