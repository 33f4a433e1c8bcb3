"""Numbers that are not plain ints: any integer type is taken, anything else refused, the same on both builds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kv_cache_manager_v2 import ConfigError, LogicError, commit_batch, resize_batch
from tests.support.models import small
from tests.support.rig import Rig, toks


def test_numpy_integers_are_lengths_and_ids() -> None:
    """Engines keep lengths in arrays: single items and whole arrays are as good as ints."""
    with Rig(small(16), engine=False) as rig:
        caches = [rig.manager.create_kv_cache(id=np.int64(number)) for number in range(2)]
        for cache in caches:
            assert cache.resume(rig.stream)
        assert [cache.id for cache in caches] == [0, 1]
        assert caches[0].resize(np.int32(3))
        assert caches[0].resize(np.int64(4), np.uint8(2))
        assert type(caches[0].capacity) is int
        assert type(caches[0].history_length) is int
        arrays = np.array([8, 7]), np.array([4, 4]), np.array([5, 6])  # to a type checker no sequences, but taken as such
        assert resize_batch(caches, arrays[0], arrays[1]) == 2
        commit_batch(caches, arrays[2])
        assert [cache.committed_tokens for cache in caches] == [[5], [6]]
        commit_batch(caches, [*np.array([9, 8])])  # scalars, as a loop over drawn tokens gives them
        commit_batch(caches, [np.array([3]), np.array([2, 1])])
        assert [cache.committed_tokens for cache in caches] == [[5, 9, 3], [6, 8, 2, 1]]
        for cache in caches:
            cache.close()


@pytest.mark.parametrize("value", [1.0, float("nan"), np.float64(2), True, "3", b"3", [3]])
def test_other_types_are_refused_with_the_value(value: Any) -> None:
    """A float is no length, not even one that is whole; nothing changes."""
    with Rig(small(16), engine=False) as rig:
        cache = rig.create()
        assert cache.resume(rig.stream)
        assert cache.resize(4)
        with pytest.raises(ConfigError, match="must be an integer"):
            cache.resize(value)
        with pytest.raises(ConfigError, match="must be an integer"):
            cache.resize(None, value)
        with pytest.raises(ConfigError, match="must be an integer"):
            resize_batch([cache], [value])
        with pytest.raises(ConfigError, match="must be an integer"):
            rig.manager.create_kv_cache(id=value)
        with pytest.raises(ConfigError, match="must be an integer"):
            cache.fork(value)
        assert (cache.capacity, cache.history_length) == (4, 0)
        assert rig.manager.num_open_caches == 1


@pytest.mark.parametrize("number", [-1, 1 << 64])
def test_ids_are_unsigned_64_bit_in_both_calls(number: int) -> None:
    with Rig(small(16), engine=False) as rig:
        cache = rig.create()
        with pytest.raises(ConfigError, match="out of range"):
            rig.manager.create_kv_cache(id=number)
        with pytest.raises(ConfigError, match="out of range"):
            cache.fork(number)


def test_a_device_that_refuses_to_say_whether_work_is_over_fails_no_call() -> None:
    """The question is only an optimisation: bookkeeping goes on, and what must be ordered still is."""
    with Rig(small(4, host_slots=4), schedule="random", seed=3) as rig:
        rig.driver.fail("query_event", 1, None)
        request = rig.start()
        assert request.advance(toks(0, 12))
        request.suspend()
        other = rig.start()
        assert other.advance(toks(100, 112))
        other.suspend()
        assert request.resume()
        request.check()
        rig.driver.heal()
        request.close()
        other.close()


def test_an_error_of_a_batch_says_whose_it_is() -> None:
    """Those before it are done, it and those behind it are as they were."""
    with Rig(small(16), engine=False) as rig:
        caches = [rig.manager.create_kv_cache(id=number) for number in (7, 8, 9)]
        for cache in caches:
            assert cache.resume(rig.stream)
        caches[1].suspend()
        with pytest.raises(LogicError, match=r"caches\[1\] \(id 8\): resize\(\) needs a cache that is ACTIVE"):
            resize_batch(caches, [4, 4, 4])
        assert [cache.capacity for cache in caches] == [4, 0, 0]
        assert caches[1].resume()
        assert resize_batch(caches, [4, 4, 4]) == 3
        with pytest.raises(ConfigError, match=r"caches\[2\] \(id 9\): committing 5 tokens"):
            commit_batch(caches, [1, [2], toks(0, 5)])
        assert [cache.num_committed_tokens for cache in caches] == [1, 1, 0]
        for cache in caches:
            cache.close()
