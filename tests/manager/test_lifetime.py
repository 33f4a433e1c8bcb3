"""Builds, imports and lifetimes: what must hold however the package is loaded, and when objects are dropped."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from kv_cache_manager_v2 import (
    AlreadyDroppedError,
    ConfigError,
    EmulatedDriver,
    HalfOpenRange,
    KVCache,
    KVCacheError,
    KVCacheManager,
    LogicError,
    OutOfMemoryError,
    OutOfPagesError,
)
from tests.support import inside
from tests.support.models import small
from tests.support.rig import Rig, toks


def python(program: str, *flags: str, environment: dict[str, str] | None = None) -> str:
    """The output of a program in a separate process, with the same package."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, *flags, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("beg", "end", "length"), [(2, 5, 3), (3, 3, 0), (5, 2, 0), (0, 0, 0)])
def test_a_range_means_the_same_in_each_build(beg: int, end: int, length: int) -> None:
    """Length, truth, membership, equality and unpacking of half-open ranges."""
    span = HalfOpenRange(beg, end)
    assert len(span) == length
    assert bool(span) is (length > 0)
    assert [number for number in range(8) if number in span] == list(range(beg, end))
    assert span == HalfOpenRange(beg, end)
    assert (span == HalfOpenRange(7, 7)) is (length == 0)
    first, last = span
    assert (first, last) == (beg, end)


REFUSALS = """
from array import array
from kv_cache_manager_v2 import *
from kv_cache_manager_v2.ids import PRIORITY_MAX
assert False if __debug__ else True
def refused(call):
    try:
        call()
    except KVCacheError as error:
        return type(error).__name__
    return "accepted"
layer = AttentionLayerConfig(0, [BufferConfig("key", 64)])
def config(**more):
    return KVCacheManagerConfig(4, [GpuCacheTierConfig(1 << 21)], [layer], **more)
driver = EmulatedDriver()
manager = KVCacheManager(config(), driver=driver)
cache = manager.create_kv_cache()
print([refused(call) for call in [
    lambda: BufferConfig("key", 0),
    lambda: GpuCacheTierConfig(0),
    lambda: AttentionLayerConfig(0, [], None, None),
    lambda: AttentionLayerConfig(0, [BufferConfig("key", 64)], 0),
    lambda: KVCacheDesc(1, 2),
    lambda: config(max_util_for_resume=0.0),
    lambda: config(initial_pool_ratio=[0.5]),
    lambda: ReuseScope(-1),
    lambda: cache.resize(4),
    lambda: cache.suspend(),
    lambda: cache.resume(),
    lambda: cache.commit([1]),
    lambda: cache.cuda_stream,
    lambda: manager.clear_reusable_blocks(),
    lambda: manager.shutdown(),
    lambda: manager.create_kv_cache(None, [1 << 31]),
    lambda: manager.create_kv_cache(None, None, []),
]])
stream = driver.create_stream()
cache.resume(stream)
cache.resize(8, 4)
print([refused(call) for call in [
    lambda: cache.resize(3),
    lambda: cache.resize(8, 3),
    lambda: cache.resize(4, 5),
    lambda: cache.resume(stream),
    lambda: cache.prefetch(0),
    lambda: cache.commit(list(range(9))),
    lambda: cache.commit([-1]),
    lambda: cache.set_base_page_index_buf(0, 0, array("i", [0])),
    lambda: cache.get_base_page_indices(1),
    lambda: manager.get_page_stride(1, "key"),
    lambda: manager.get_page_stride(0, "value"),
    lambda: manager.clamp_max_seq_len_for_mem(0, 1),
]])
print(cache.capacity, cache.history_length, cache.num_committed_tokens)
cache.close()
manager.shutdown()
"""


def test_refusals_are_no_asserts() -> None:
    """The whole set of invalid arguments is refused alike with assertions off, with the debug switch on, and without either."""
    program = REFUSALS.replace("assert False if __debug__ else True\n", "")
    outputs = [
        python(program),
        python(program, "-O"),
        python(program, environment={"KVCM_DEBUG": "1"}),
        python(program, environment={"TLLM_DEBUG_MODE": "1"}),
    ]
    assert len(set(outputs)) == 1
    assert "accepted" not in outputs[0]
    assert outputs[0].splitlines()[-1] == "8 4 0"


def test_import_without_a_device() -> None:
    """Importing needs no GPU and pulls in no driver; keys, tokens and ranges work; a manager without a device says how to get
    one."""
    printed = python(
        "import sys, kv_cache_manager_v2 as k\n"
        "print('cuda' in sys.modules or any(name.startswith('cuda.') for name in sys.modules), 'torch' in sys.modules)\n"
        "print(len(list(k.sequence_to_blockchain_keys(4, None, [1, 2, 3, 4, 5]))), len(k.HalfOpenRange(0, 3)))\n"
        "layer = k.AttentionLayerConfig(0, [k.BufferConfig('key', 64)])\n"
        "config = k.KVCacheManagerConfig(4, [k.GpuCacheTierConfig(1 << 21)], [layer])\n"
        "with k.KVCacheManager(config) as manager:\n"
        "    print(type(manager.driver).__name__)\n",
        environment={"KVCM_DEVICE": "emulated"},
    )
    assert printed.splitlines() == ["False False", "3 3", "EmulatedDriver"]


def test_a_wrong_device_name_is_refused() -> None:
    """No silent fallback to another device."""
    printed = python(
        "import kv_cache_manager_v2 as k\n"
        "layer = k.AttentionLayerConfig(0, [k.BufferConfig('key', 64)])\n"
        "try:\n"
        "    k.KVCacheManager(k.KVCacheManagerConfig(4, [k.GpuCacheTierConfig(1 << 21)], [layer]))\n"
        "except k.KVCacheError as error:\n"
        "    print(type(error).__name__)\n",
        environment={"KVCM_DEVICE": "no such device"},
    )
    assert printed.strip() in ("ConfigError", "DeviceUnavailableError")


def test_no_reference_cycles() -> None:
    """With the collector off, 1000 requests and a manager are created and closed, and all their objects are freed."""
    driver = EmulatedDriver()
    stream = driver.create_stream()
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            before = len(gc.get_objects())
            manager = KVCacheManager(small(16), driver=driver)
            for number in range(500):
                cache = manager.create_kv_cache(None, toks(number % 50, number % 50 + 6))
                if number % 4 == 0:
                    cache.resume(stream)
                    cache.resize(8)
                    cache.commit(toks(number % 50, number % 50 + 8)[cache.num_committed_tokens :])
                cache.close()
            manager.shutdown()
            del manager, cache
            after = len(gc.get_objects())
        assert after - before < 50
        assert gc.collect() < 50
    finally:
        gc.enable()
    driver.destroy_stream(stream)
    driver.close()


def test_handles_after_shutdown() -> None:
    """Afterwards a plan handle, a closed cache and the manager can be dropped safely; using them raises or reports CLOSED."""
    rig = Rig(small(8, kinds=[(8, 0)]))
    request = rig.start()
    assert request.advance(toks(0, 16))
    cache = request.cache
    cache.stop_committing()
    plan = cache.plan_committed_block_drop()
    assert plan is not None
    request.close()
    rig.settle()
    rig.manager.shutdown()
    rig.manager.shutdown()
    assert cache.status is KVCache.Status.CLOSED
    cache.close()
    for call in (
        lambda: cache.resize(4),
        lambda: cache.resume(rig.stream),
        lambda: rig.manager.create_kv_cache(),
        lambda: rig.manager.probe_reuse(None, [1]),
    ):
        with pytest.raises(KVCacheError):
            call()
    with contextlib.suppress(KVCacheError):
        plan.drop()
    with pytest.raises((AlreadyDroppedError, LogicError)):
        plan.drop()
    del plan
    rig.driver.destroy_stream(rig.stream)
    rig.driver.close()


def test_a_dropped_cache_is_closed_by_the_next_call() -> None:
    """A handle is dropped without close: the next call closes the cache with a ResourceWarning, and its pages are freed."""
    with Rig(small(8)) as rig:
        cache = rig.manager.create_kv_cache()
        assert cache.resume(rig.stream)
        assert cache.resize(16)
        del cache
        gc.collect()
        with pytest.warns(ResourceWarning):
            rig.create().close()
        assert rig.manager.num_open_caches == 0
        assert rig.counts().free == 8


def test_a_dropped_cache_that_the_device_does_not_let_close_is_closed_by_a_later_call(tmp_path: Path) -> None:
    """The load of its pages cannot be polled: the call that notices it succeeds, and the next one closes it."""
    with Rig(small(4, host_slots=4, disk=(str(tmp_path), 8)), engine=False) as rig:
        for first in (0, 100, 200):
            rig.seed(toks(first, first + 16), chunk=4)
        cache = rig.manager.create_kv_cache(None, toks(0, 16))
        hanging = rig.driver.hang("read_file")
        assert cache.resume(rig.stream)
        del cache
        rig.driver.fail("poll_gate")
        other = rig.create()
        assert rig.manager.num_open_caches == 2
        with pytest.warns(ResourceWarning):
            other.close()
        assert rig.manager.num_open_caches == 0
        hanging.open()


def test_a_dropped_manager_gives_everything_back() -> None:
    """Without `shutdown()` there is a ResourceWarning, and nothing on the device is leaked."""
    driver = EmulatedDriver()
    stream = driver.create_stream()
    manager = KVCacheManager(small(8), driver=driver)
    cache = manager.create_kv_cache()
    assert cache.resume(stream)
    assert cache.resize(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del cache, manager
        gc.collect()
    driver.destroy_stream(stream)
    driver.close()


def test_one_handler_for_both_shortages() -> None:
    """Pages and memory: one `except MemoryError`, or OutOfMemoryError, catches either; in resize and resume a shortage is a
    False."""
    assert issubclass(OutOfPagesError, OutOfMemoryError)
    assert issubclass(OutOfMemoryError, MemoryError)
    with Rig(small(4)) as rig:
        cache = rig.open()
        assert cache.resize(100) is False
        with pytest.raises(MemoryError):
            cache.capacity = 100
    driver = EmulatedDriver()
    driver.fail("create_chunk")
    with pytest.raises(OutOfMemoryError):
        KVCacheManager(small(4), driver=driver)
    driver.close()


def test_errors_have_the_bases_that_engines_catch() -> None:
    """Configuration errors are ValueError and AssertionError, misuse is RuntimeError, a second drop is both RuntimeError and
    ValueError."""
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, AssertionError)
    assert issubclass(LogicError, RuntimeError)
    assert issubclass(AlreadyDroppedError, RuntimeError)
    assert issubclass(AlreadyDroppedError, ValueError)


@pytest.mark.parametrize("schedule", ["eager", "random"])
def test_a_cache_is_a_context_manager(schedule: str) -> None:
    """Leaving the block closes it."""
    with Rig(small(8), schedule, 1) as rig:
        with rig.manager.create_kv_cache() as cache:
            assert cache.resume(rig.stream)
            assert cache.resize(8)
            cache.commit(toks(0, 8))
        assert cache.status is KVCache.Status.CLOSED
        assert rig.probe(toks(0, 8)) == 8
        assert inside.num_tree_blocks(rig.manager) == 2
