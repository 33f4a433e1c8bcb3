"""Names by which engines of the reference import this package, at the paths from which they do."""

from __future__ import annotations

import importlib

import pytest

import kv_cache_manager_v2
from tests.arguments.scene import Scene
from tests.support.rig import toks

PATHS = {
    "": "CACHE_LEVEL1 AttnLifeCycle TokenIdExt TokenId CudaStream MemAddress Priority PoolIndex PoolGroupIndex SlidingWindowSize "
    "BACKEND NDEBUG num_live_managers KvCacheStatus _KVCache _KV_CACHE_ITERATION_STATS_DELTA_FIELDS _introspection "
    "_cpp_introspection",
    "_common": "BAD_PAGE_INDEX GPU_LEVEL CACHE_LEVEL1 CacheLevel MemAddress CacheTier TokenIdExt",
    "_utils": "typed_range exact_div",
    "_config": "DataRole KVCacheManagerConfig",
    "_exceptions": "OutOfPagesError CuError",
    "_introspection": "storage_statistics storage_utilization life_cycle_pool_group_indices reuse_match_pages",
}


@pytest.mark.parametrize("path", PATHS)
def test_names_are_there(path: str) -> None:
    """One object, whichever path it is taken from."""
    module = importlib.import_module(f"kv_cache_manager_v2.{path}".rstrip("."))
    for name in PATHS[path].split():
        value = getattr(module, name)
        public = getattr(kv_cache_manager_v2, name, value)
        assert value is public or value == public, name


def test_ids_are_callable_and_plain_at_run_time() -> None:
    """`CudaStream(handle)` and the like give the int back."""
    for name in ("CudaStream", "TokenId", "MemAddress", "Priority", "PoolIndex", "PoolGroupIndex", "LayerId", "CacheLevel"):
        assert type(getattr(kv_cache_manager_v2, name)(3)) is int


def test_planned_drops_come_with_the_matched_length() -> None:
    """What the reference's introspection returns beside ours."""
    from kv_cache_manager_v2 import _introspection, introspection

    with Scene() as scene:
        prompt = toks(0, 6)
        counts = introspection.reuse_match_planned_drop_counts(scene.manager, None, prompt, 0)
        with_length: object = _introspection.reuse_match_planned_drop_counts(scene.manager, None, prompt, 0)
        length = scene.manager.probe_reuse(None, prompt)
        assert with_length == (length, counts)
        assert length > 0


def test_ranges_of_ids_are_ranges() -> None:
    """One to three bounds, as `range`; a range is returned."""
    assert kv_cache_manager_v2.typed_range(4) == range(4)
    assert kv_cache_manager_v2.typed_range(1, 4) == range(1, 4)
    assert kv_cache_manager_v2.typed_range(8, 0, -2) == range(8, 0, -2)
    for wrong in ((), (1, 2, 3, 4), (0, 4, 0), (1.5,), ("x",)):
        with pytest.raises(kv_cache_manager_v2.ConfigError):
            kv_cache_manager_v2.typed_range(*wrong)
