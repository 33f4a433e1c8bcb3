"""Lengths and tokens that are not plain ints: any integer type is taken, anything else refused, the same on both builds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kv_cache_manager_v2 import ConfigError, commit_batch, resize_batch
from tests.support.models import small
from tests.support.rig import Rig


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


@pytest.mark.parametrize("value", [1.0, float("nan"), np.float64(2), True, np.True_, "3", b"3", [3]])
def test_other_types_are_refused_with_the_value(value: Any) -> None:
    """A float is no length, not even one that is whole, and a bool neither; nothing changes."""
    with Rig(small(16), engine=False) as rig:
        cache = rig.open()
        assert cache.resize(4)
        with pytest.raises(ConfigError, match="must be an integer"):
            cache.resize(value)
        with pytest.raises(ConfigError, match="must be an integer"):
            cache.resize(None, value)
        with pytest.raises(ConfigError, match="must be an integer"):
            resize_batch([cache], [value])
        assert (cache.capacity, cache.history_length) == (4, 0)
        assert rig.manager.num_open_caches == 1


@pytest.mark.parametrize("endless", [range(1 << 31), range(1 << 63), np.broadcast_to(np.int32(1), (1 << 40,))])
def test_sequences_that_no_memory_holds_are_refused_at_once(endless: Any) -> None:
    """They are not read: a `range` of any length is a sequence."""
    with Rig(small(16), engine=False) as rig:
        cache = rig.open()
        calls: list[Callable[[], object]] = [
            lambda: cache.commit(endless),
            lambda: rig.manager.create_kv_cache(None, endless),
            lambda: rig.manager.probe_reuse(None, endless),
            lambda: resize_batch([cache], endless),
            lambda: commit_batch([cache], endless),
            lambda: rig.manager.drop_cached_pages(0, endless),
        ]
        for call in calls:
            with pytest.raises(ConfigError, match="2\\*\\*31 items or more"):
                call()
        assert rig.manager.num_open_caches == 1


def test_an_array_without_dimensions_is_no_list() -> None:
    """Nor is an array of several an id, though numpy's claim to be integers."""
    with Rig(small(16), engine=False) as rig:
        cache = rig.open()
        assert cache.resize(4)
        calls: list[Callable[[Any], object]] = [lambda value: resize_batch([cache], value), cache.commit, cache.commit_ahead]
        for call in calls:
            with pytest.raises(ConfigError):
                call(np.array(3))
        for wrong in ([np.array([3, 4])], [np.array([3, 4])] * 50):
            with pytest.raises(ConfigError):
                cache.commit(wrong)


def test_a_number_of_thousands_of_digits_is_refused_by_its_size() -> None:
    """Python prints none."""
    with Rig(small(16), engine=False) as rig:
        cache = rig.open()
        calls: list[Callable[[int], object]] = [cache.prefill_end, cache.resize, cache.resume, lambda value: cache.commit([value])]
        for call in calls:
            with pytest.raises(ConfigError, match=r"a number of \d+ bits"):
                call(10**5000)
