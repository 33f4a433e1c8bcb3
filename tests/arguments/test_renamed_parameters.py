"""Parameters that took the reference's names: the new name is the way, the old one works for one release and warns."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import pytest

from kv_cache_manager_v2 import ConfigError, PageIndexMode, ReuseScope, UnknownBufferError
from tests.arguments.scene import Scene
from tests.arguments.stubs import OLD

SHARED: Final = PageIndexMode.SHARED
CALLS: Final[dict[str, tuple[Callable[[Scene], Any], str, object]]] = {
    "KVCache.commit": (lambda scene: scene.active.commit, "accepted_input_tokens", [100]),
    "KVCache.prefetch": (lambda scene: scene.suspended.prefetch, "target", 1),
    "KVCache.get_base_page_indices": (lambda scene: lambda **n: list(scene.active.get_base_page_indices(0, **n)), "beam_id", 0),
    "KVCache.get_aggregated_page_indices": (
        lambda scene: lambda **n: list(scene.active.get_aggregated_page_indices(0, **n)), "beam_id", 0
    ),
    "KVCacheManager.probe_reuse": (lambda scene: scene.manager.probe_reuse, "input_tokens", [0, 1, 2]),
    "KVCacheManager.probe_first_new_block_key": (lambda scene: scene.manager.probe_first_new_block_key, "input_tokens", [9] * 9),
    "KVCacheManager.get_and_reset_iteration_peak_block_stats": (
        lambda scene: scene.manager.get_and_reset_iteration_peak_block_stats, "cache_level", 1
    ),
    "KVCacheManager.get_storage_statistics": (lambda scene: scene.manager.get_storage_statistics, "cache_level", 1),
    "KVCacheManager.get_life_cycle_pool_group_indices": (
        lambda scene: scene.manager.get_life_cycle_pool_group_indices, "cache_level", 1
    ),
    "KVCacheManager.mark_stats_dirty": (lambda scene: scene.manager.mark_stats_dirty, "kv_cache_id", 7),
    "KVCacheManager.clear_stats_dirty": (lambda scene: scene.manager.clear_stats_dirty, "kv_cache_id", 7),
    "KVCacheManager.mark_stats_excluded": (lambda scene: scene.manager.mark_stats_excluded, "kv_cache_id", 7),
    "KVCacheManager.clear_stats_excluded": (lambda scene: scene.manager.clear_stats_excluded, "kv_cache_id", 7),
    "KVCacheManager.is_stats_excluded": (lambda scene: scene.manager.is_stats_excluded, "kv_cache_id", 7),
    "PageIndexConverter.__call__": (
        lambda scene: lambda **n: list(scene.manager.get_page_index_converter(0, "key")([1, 2], **n)), "index_mode", SHARED
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", OLD)
def test_old_names_work_and_warn_at_the_callers_line(call: str) -> None:
    """By either name the call does the same; the old one warns, and the warning names this file."""
    method, new, value = CALLS[call]
    results = []
    for name in (new, OLD[call]):
        with Scene() as scene, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results.append(repr(method(scene)(**{name: value})))
        told = [warning for warning in caught if warning.category is DeprecationWarning]
        assert len(told) == (name != new)
        for warning in told:
            assert new in str(warning.message)
            assert warning.filename == __file__
    assert results[0] == results[1]


def test_a_prompt_may_be_left_out() -> None:
    """No tokens: nothing is reused, and no block is new."""
    with Scene() as scene:
        assert scene.manager.probe_reuse() == 0
        assert scene.manager.probe_first_new_block_key() is None


def test_a_scope_is_like_the_tuple_of_its_fields() -> None:
    """Items, unpacking, equality, hash, `_replace`; and a tuple is taken as a scope."""
    scope = ReuseScope(7, 11)
    assert (scope[0], scope[1], scope[-1], len(scope), tuple(scope)) == (7, 11, 11, 2, (7, 11))
    assert scope == (7, 11)
    assert hash(scope) == hash((7, 11))
    assert scope != (7, 12)
    assert scope._replace(salt=None) == ReuseScope(7)
    with pytest.raises(ConfigError, match="tenant"):
        scope._replace(tenant=1)
    with pytest.raises(IndexError):
        scope[2]
    with Scene() as scene:
        cache = scene.manager.create_kv_cache((7, 11))
        assert cache.reuse_scope == scope
        cache.close()
        wrong: Any
        for wrong in ((7,), (7, 11, 13), (7, 1.5), 7, [7, 11]):
            with pytest.raises(ConfigError):
                scene.manager.probe_reuse(wrong, [1])


def test_a_page_index_mode_is_an_int() -> None:
    """0 and 1 are taken for modes, everywhere."""
    with Scene() as scene:
        for mode in PageIndexMode:
            by_int = scene.manager.get_mem_pool_base_address(0, "key", int(mode))
            assert by_int == scene.manager.get_mem_pool_base_address(0, "key", mode)
            assert scene.active.supports_index_mode(int(mode)) == scene.active.supports_index_mode(mode)


def test_an_unknown_buffer_is_a_key_error_too() -> None:
    """Engines ask for a role to see whether it is there, and catch KeyError."""
    with Scene() as scene:
        for layer, role in ((0, "index_key"), (99, "key")):
            with pytest.raises(KeyError, match=str(layer)) as caught:
                scene.manager.get_mem_pool_base_address(layer, role)
            assert type(caught.value) is UnknownBufferError
            assert not str(caught.value).startswith("'")
