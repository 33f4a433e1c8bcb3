"""Illegal calls of a simulation: each raises one of our errors and changes nothing."""

from __future__ import annotations

from collections.abc import Callable

from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.ids import BeamIndex, CacheLevel, LayerGroupId
from tests.simulation.scene import Live
from tests.simulation.world import World

Mistake = Callable[[], str]


def active_mistakes(world: World, live: Live) -> list[Mistake]:
    """Calls that an ACTIVE request must not make."""
    cache, model, mistake = live.cache, live.model, world.mistake
    choices: list[Mistake] = [
        lambda: mistake(live, "resume active", lambda: cache.resume(world.streams[0]), LogicError),
        lambda: mistake(live, "prefetch active", lambda: cache.prefetch(CacheLevel(0)), LogicError),
        lambda: mistake(live, "capacity", lambda: cache.resize(model.history - 1, model.history), ConfigError),
        lambda: mistake(live, "history", lambda: cache.resize(None, model.history - 1), ConfigError),
        lambda: mistake(live, "beam", lambda: setattr(cache, "beam_width", 0), ConfigError),
        lambda: mistake(live, "token", lambda: cache.commit([-1]), ConfigError),
        lambda: mistake(live, "digest", lambda: cache.commit([b"short"]), ConfigError),
        lambda: mistake(live, "token", lambda: cache.commit([2**31]), ConfigError),
        lambda: mistake(live, "group", lambda: cache.get_base_page_indices(LayerGroupId(99)), ConfigError),
        lambda: mistake(live, "beam", lambda: cache.get_base_page_indices(LayerGroupId(0), BeamIndex(9)), ConfigError),
        lambda: mistake(live, "clear", world.manager.clear_reusable_blocks, LogicError),
        lambda: mistake(live, "quota", lambda: world.manager.resize(CacheLevel(0), 1 << 30), LogicError),
        lambda: mistake(live, "adjust", world.manager.adjust, LogicError),
    ]
    if model.committing:
        count = model.capacity - model.committed + 1
        choices.append(lambda: mistake(live, "commit past", lambda: cache.commit([0] * count), ConfigError, LogicError))
        choices.append(lambda: mistake(live, "plan", cache.plan_committed_block_drop, LogicError))
        choices.append(lambda: mistake(live, "beams", lambda: cache.commit([0], [7]), ConfigError, LogicError))
    else:
        choices.append(lambda: mistake(live, "commit stopped", lambda: cache.commit([0]), LogicError))
    return choices


def suspended_mistakes(world: World, live: Live) -> list[Mistake]:
    """Calls that a SUSPENDED request must not make."""
    cache, mistake = live.cache, world.mistake
    choices: list[Mistake] = [
        lambda: mistake(live, "resize suspended", lambda: cache.resize(live.model.capacity + 1), LogicError),
        lambda: mistake(live, "commit suspended", lambda: cache.commit([0]), LogicError),
        lambda: mistake(live, "suspend suspended", cache.suspend, LogicError),
        lambda: mistake(live, "width", lambda: setattr(cache, "beam_width", live.model.width + 1), LogicError),
        lambda: mistake(live, "level", lambda: cache.prefetch(CacheLevel(len(world.quotas))), ConfigError, LogicError),
        lambda: mistake(live, "shutdown", world.manager.shutdown, LogicError),
    ]
    return choices


def manager_mistakes(world: World) -> list[Mistake]:
    """Calls that the manager refuses at any time."""
    manager, mistake = world.manager, world.mistake
    choices: list[Mistake] = [
        lambda: mistake(None, "token", lambda: manager.create_kv_cache(None, [3, -1]), ConfigError),
        lambda: mistake(None, "token", lambda: manager.probe_reuse(None, [2**31]), ConfigError),
        lambda: mistake(None, "id", lambda: manager.create_kv_cache(None, [3], ([],)), ConfigError),
        lambda: mistake(None, "id", lambda: manager.create_kv_cache(None, [3], (1, [2])), ConfigError),
        lambda: mistake(None, "level", lambda: manager.get_quota(CacheLevel(9)), ConfigError),
        lambda: mistake(None, "level", lambda: manager.resize(CacheLevel(-1), 1 << 20), ConfigError),
    ]
    return choices
