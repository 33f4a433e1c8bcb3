"""Copies of public values: on both builds, either an equal value that never changes, or an error that says why not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kv_cache_manager_v2 as kvcm
from kv_cache_manager_v2 import LogicError
from kv_cache_manager_v2.layout.life_cycle import AttentionLifeCycle, SsmLifeCycle
from tests.arguments.scene import Scene
from tests.support.models import KEY
from tests.support.rig import toks

WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with Scene() as scene:
        scene.suspend_all()
        yield scene


def values(scene: Scene) -> dict[str, object]:
    """What a user can have in hand and may want to keep, send or compare."""
    manager = scene.manager
    scene.events.add_updated_event(1, kvcm.KVCacheEventDiff(0, 1))
    return {
        "movement": manager.movement,
        "converter": manager.get_page_index_converter(0, KEY),
        "scratch": kvcm.ScratchDesc(kvcm.HalfOpenRange(1, 3), [5, 6]),
        "range": kvcm.HalfOpenRange(1, 3),
        "attention life cycle": AttentionLifeCycle.make(8, 2, 4),
        "recurrent life cycle": SsmLifeCycle(kvcm.LifeCycleId(1), 4),
        "configuration": manager.init_config,
        "committed statistics": manager.get_committed_stats(),
        "iteration statistics": manager.get_and_reset_iteration_stats(),
        "storage statistics": manager.get_storage_statistics(0),
        "peaks": manager.get_and_reset_iteration_peak_block_stats(0),
        "reused blocks": kvcm.ReusedBlocksByLevel([1], [2]),
        "pool groups": manager.pool_group_descs,
        "aggregated pages": manager.get_aggregated_pages(manager.all_buffer_ids),
        "page table": scene.table,
        "transfer plan": scene.plan,
        "sizing": kvcm.explain_sizing(manager.init_config),
        "mirror": scene.mirror,
        "snapshot": scene.events.snapshot_events(),
        "miss report": manager.explain_miss(None, toks(500, 520)),
        "scope": kvcm.ReuseScope(1, 2),
        "item": kvcm.MmItemContext(bytes(32), "name"),
        "shortage": kvcm.Shortage(1, 0, 3, False, True),
        "resize result": resized(manager, manager.get_quota(1)),
        "refused resize": resized(manager, 1),
        "adjust result": kvcm.AdjustResult([kvcm.ResizeResult(0, [1], [2])]),
        "build": kvcm.build_info(),
    }


def resized(manager: kvcm.KVCacheManager, quota: int) -> kvcm.ResizeResult | None:
    """What a resize of the host tier did."""
    manager.resize(1, quota)
    return manager.last_resize


def refused(scene: Scene) -> dict[str, object]:
    """What owns memory, threads or a place in the cache."""
    return {
        "manager": scene.manager,
        "cache": scene.active,
        "step": scene.manager.step([scene.active], 1),
        "driver": scene.driver,
        "event manager": scene.events,
        "tuner": scene.manager.tuner,
        "block": scene.manager.shared.tree.all_blocks()[0],
    }


NAMES_OF_VALUES = [
    "movement",
    "converter",
    "scratch",
    "range",
    "attention life cycle",
    "recurrent life cycle",
    "configuration",
    "committed statistics",
    "iteration statistics",
    "storage statistics",
    "peaks",
    "reused blocks",
    "pool groups",
    "aggregated pages",
    "page table",
    "transfer plan",
    "sizing",
    "mirror",
    "snapshot",
    "miss report",
    "scope",
    "item",
    "shortage",
    "resize result",
    "refused resize",
    "adjust result",
    "build",
]
NAMES_OF_REFUSED = ["manager", "cache", "step", "driver", "event manager", "tuner", "block"]


def seen(value: object) -> object:
    """What a user can see of a value, as plain objects."""
    if value is None or isinstance(value, (int, float, str, bytes)):
        return value
    if isinstance(value, dict):
        return {key: seen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return [seen(item) for item in value]
    names = [name for name in dir(value) if not name.startswith("_") and not callable(getattr(value, name))]
    return (type(value).__name__, [(name, seen(getattr(value, name))) for name in names])


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", NAMES_OF_VALUES)
def test_a_value_can_be_copied(scene: Scene, name: str, way: str) -> None:
    """The copy shows what the value shows."""
    given = values(scene)
    assert sorted(given) == sorted(NAMES_OF_VALUES)
    value = given[name]
    twin = WAYS[way](value)
    assert type(twin) is type(value)
    assert seen(twin) == seen(value)


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", NAMES_OF_REFUSED)
def test_what_owns_something_is_not_copied(scene: Scene, name: str, way: str) -> None:
    """The refusal says so, and it is one of ours."""
    with pytest.raises(LogicError, match="cannot be copied or pickled"):
        WAYS[way](refused(scene)[name])


@pytest.mark.parametrize("way", list(WAYS))
def test_a_copy_stands_still(way: str) -> None:
    """Counters and mirrors change; copies of them do not."""
    with Scene() as scene:
        movement, mirror = WAYS[way](scene.manager.movement), WAYS[way](scene.mirror)
        before = (seen(movement), sorted(map(str, mirror.blocks)), mirror.next_event_id)
        for cache in (scene.suspended, scene.active, scene.stepping):
            cache.close()
        scene.manager.clear_reusable_blocks()
        scene.events.flush_iteration_events()
        assert scene.mirror.apply(scene.events.get_latest_events(0))
        assert seen(scene.manager.movement) != seen(movement)
        assert scene.mirror.next_event_id > mirror.next_event_id
        assert (seen(movement), sorted(map(str, mirror.blocks)), mirror.next_event_id) == before


def test_copies_of_converters_and_life_cycles_answer_alike(scene: Scene) -> None:
    for copied in WAYS.values():
        converter = scene.manager.get_page_index_converter(1, KEY)
        assert list(copied(converter)([0, 1, -1, 5])) == list(converter([0, 1, -1, 5]))
        assert copied(converter) == converter
        assert hash(copied(converter)) == hash(converter)
        for cycle in (
            AttentionLifeCycle.make(None, None, 4),
            AttentionLifeCycle.make(8, 2, 4),
            SsmLifeCycle(kvcm.LifeCycleId(0), 4),
        ):
            assert [copied(cycle).stale(h) for h in range(40)] == [cycle.stale(h) for h in range(40)]
