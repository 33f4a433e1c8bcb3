"""A manager as a context manager."""

from __future__ import annotations

import warnings

import pytest

from kv_cache_manager_v2 import EmulatedDriver, KVCache, KVCacheManager, LogicError
from tests.support.models import small


def test_an_exception_inside_the_block_is_the_one_that_is_seen() -> None:
    """Caches left open by it are closed, the memory is freed, and the cause is raised."""
    driver = EmulatedDriver()
    kept: list[KVCache] = []

    def body() -> None:
        with KVCacheManager(small(4), driver=driver) as manager:
            kept.append(manager.create_kv_cache())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert kept[0].status is KVCache.Status.CLOSED
    driver.close()  # raises if anything leaked


def test_a_block_that_ends_with_open_caches_says_so() -> None:
    """Without an exception, open caches are refused as in `shutdown()`, with nothing changed."""
    driver = EmulatedDriver()
    manager = KVCacheManager(small(4), driver=driver)
    with pytest.raises(LogicError, match="1 KV cache"), manager:
        cache = manager.create_kv_cache()
    cache.close()
    manager.shutdown()
    driver.close()


def test_addresses_are_gone_with_the_manager() -> None:
    """A request for memory after shutdown is refused with an error that says so."""
    driver = EmulatedDriver()
    manager = KVCacheManager(small(4), driver=driver)
    buffer = manager.all_buffer_ids[0]
    manager.shutdown()
    for question in (
        lambda: manager.get_mem_pool_base_address(buffer.layer_id, buffer.role),
        lambda: manager.pool_group_descs,
        lambda: manager.get_aggregated_pages([buffer]),
        manager.check_invariants,
    ):
        with pytest.raises(LogicError, match="shut down"):
            question()
    driver.close()


def test_a_warning_that_is_an_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A handle was dropped without close: the call that closes it has happened, so it raises nothing."""
    driver = EmulatedDriver()
    manager = KVCacheManager(small(4), driver=driver)
    manager.create_kv_cache()  # never closed: the next call notices
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with manager.create_kv_cache():
            assert manager.num_open_caches == 1
    assert len([line for line in caplog.messages if "dropped without close()" in line]) == 1
    manager.shutdown()
    driver.close()
