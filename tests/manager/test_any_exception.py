"""Every device call that a public call makes, refused with any exception: nothing has changed, and the same call works later.

The device calls are counted, so a new one is tried as soon as there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kv_cache_manager_v2 import (
    CorruptedError,
    EmulatedDriver,
    KVCache,
    KVCacheManager,
    LogicError,
    PlainBatchTables,
    PlannedDropHandle,
    SuspendCheapest,
    commit_batch,
    resize_batch,
)
from tests.support.drivers import REFUSALS, RefusingDevice, refusing_device
from tests.support.engine import Token
from tests.support.models import GRAIN, Kind, hybrid, small
from tests.support.rig import GPU, HOST, toks

MODELS: dict[str, list[Kind]] = {
    "window": ["full", (8, 0)],
    "recurrent": ["full"],
}


class Scene:
    """A manager whose tiers are full, with an ACTIVE request and a SUSPENDED one whose pages were moved down."""

    def __init__(self, model: str, folder: Path, device: RefusingDevice) -> None:
        kinds = MODELS[model]
        if model == "recurrent":
            config = hybrid(8, 16, kinds=kinds, host_slots=16)
        else:
            config = small(16, kinds=kinds, host_slots=12, disk=(str(folder), 16))
        self.device = device
        self.stream = device.inner.create_stream()
        self.second_stream = device.inner.create_stream()
        self.manager = KVCacheManager(config, driver=device)
        self.opened: list[KVCache] = []
        self.suspended = self.start(toks(0, 10), 8)
        self.suspended.suspend()
        for number in range(1, 9):
            self.start(toks(100 * number, 100 * number + 8), 8).close()
        self.active = self.start(toks(5000, 5010), 6)
        self.ended = self.start(toks(7000, 7009), 9)
        self.ended.stop_committing()
        self.plan: PlannedDropHandle | None = None
        self.ends_shut_down = False
        self.interrupted = False
        device.counting = True

    def start(self, tokens: list[Token], committed: int) -> KVCache:
        cache = self.manager.create_kv_cache()
        self.opened.append(cache)
        assert cache.resume(self.stream), cache.last_shortage
        assert cache.resize(len(tokens)), cache.last_shortage
        cache.commit(tokens[:committed])
        return cache

    def lengths(self) -> list[object]:
        """What a request's owner sees of it. Others may have been evicted."""
        seen: list[object] = [self.manager.num_open_caches]
        for cache in self.opened:
            seen += [cache.status, cache.capacity, cache.history_length, cache.committed_tokens, cache.beam_width, cache.num_blocks]
            seen += [list(cache.get_base_page_indices(self.manager.get_layer_group_id(0)))] if cache.is_active else []
        return seen

    def finish(self) -> None:
        """Everything ends, and nothing is left."""
        manager = self.manager
        for cache in self.opened:
            cache.close()
        if not self.ends_shut_down:
            self._check_slots()
        manager.shutdown()
        assert not self.leaks()

    def leaks(self) -> list[str]:
        """What the manager left on the device. Streams are the test's. An interrupt may leave a new event or gate without owner."""
        own = ("event", "gate", "stream") if self.interrupted else ("stream",)
        return [leak for leak in self.device.inner.leaks() if not leak.startswith(own)]

    def _check_slots(self) -> None:
        manager = self.manager
        manager.check_invariants()
        manager.clear_reusable_blocks()
        self.device.inner.synchronize()
        manager.check_invariants()
        for level in range(len(manager.cache_tier_list)):
            for statistics in manager.get_storage_statistics(level):
                assert statistics.free == statistics.total, f"a slot of level {level} is lost"


def close_all(scene: Scene) -> None:
    for cache in scene.opened:
        cache.close()


def drop(scene: Scene) -> None:
    plan = scene.plan
    if plan is not None:
        plan.drop()


def clear(scene: Scene) -> None:
    close_all(scene)
    scene.manager.clear_reusable_blocks()


def commit_tokens(scene: Scene) -> None:
    for token in (5006, 5007):
        scene.active.commit([token])


def suspend_all(scene: Scene) -> KVCacheManager:
    for cache in (scene.active, scene.ended):
        if cache.is_active:
            cache.suspend()
    return scene.manager


def end(scene: Scene) -> None:
    close_all(scene)
    scene.manager.shutdown()


def step(scene: Scene) -> None:
    with scene.manager.step([scene.active, scene.ended], [10, 20], make_room=SuspendCheapest()) as begun:
        begun.advance([4 for _cache in begun.caches])


def widen(scene: Scene) -> None:
    scene.active.beam_width = 2


def move_stream(scene: Scene) -> None:
    scene.active.cuda_stream = scene.second_stream


CALLS: dict[str, Callable[[Scene], object]] = {
    "create": lambda scene: scene.opened.append(scene.manager.create_kv_cache(None, toks(100, 108))),
    "resume": lambda scene: scene.suspended.resume(scene.second_stream),
    "grow": lambda scene: scene.active.resize(40),
    "grow with a history": lambda scene: scene.active.resize(40, 10),
    "shrink": lambda scene: scene.active.resize(6),
    "commit": lambda scene: scene.active.commit(toks(5006, 5010)),
    "commit a token": commit_tokens,
    "commit what is cached": lambda scene: scene.active.commit(toks(5006, 5010), None, True),
    "commit ahead": lambda scene: scene.active.commit_ahead(toks(5006, 5010)),
    "compute": lambda scene: scene.active.resize(40, 10),
    "stop committing": lambda scene: scene.active.stop_committing(),
    "plan": lambda scene: scene.ended.plan_committed_block_drop(),
    "drop": drop,
    "suspend": lambda scene: scene.active.suspend(),
    "prefetch": lambda scene: scene.suspended.prefetch(GPU),
    "is loaded": lambda scene: scene.suspended.is_loaded,
    "fork": lambda scene: scene.opened.append(scene.active.fork()),
    "widen": widen,
    "move stream": move_stream,
    "close": lambda scene: scene.active.close(),
    "suspend ahead": lambda scene: scene.active.suspend(),
    "close ahead": lambda scene: scene.active.close(),
    "close suspended": lambda scene: scene.suspended.close(),
    "resize batch": lambda scene: resize_batch([scene.active, scene.ended], [20, 30]),
    "commit batch": lambda scene: commit_batch([scene.active], [toks(5006, 5010)]),
    "add to tables": lambda scene: PlainBatchTables(scene.manager, 2, 16).add(scene.active),
    "step": step,
    "probe": lambda scene: scene.manager.probe_reuse(None, toks(0, 8)),
    "clear": clear,
    "resize host": lambda scene: suspend_all(scene).resize(HOST, GRAIN // 3),
    "resize GPU": lambda scene: suspend_all(scene).resize(GPU, 3 * GRAIN),
    "adjust": lambda scene: suspend_all(scene).adjust(),
    "shutdown": end,
}


def scene_of(model: str, folder: Path, name: str) -> Scene:
    device = refusing_device(EmulatedDriver())
    scene = Scene(model, folder, device)
    scene.ends_shut_down = name == "shutdown"
    if name in ("compute", "suspend ahead", "close ahead"):
        scene.active.commit_ahead(toks(5006, 5010))
    if name == "drop":
        scene.plan = scene.ended.plan_committed_block_drop()
    return scene


def free_lock(manager: KVCacheManager) -> bool:
    """Whether another thread can enter."""
    got: list[int] = []
    thread = threading.Thread(
        target=lambda: got.append(manager.num_open_caches if manager.get_committed_stats() else 0), daemon=True
    )
    thread.start()
    thread.join(10)
    return bool(got)


def poisoned(scene: Scene) -> bool:
    """Whether the manager is poisoned. If so, checks that it refuses calls with CorruptedError and can be shut down."""
    manager = scene.manager
    if manager.poison_reason() is None:
        return False
    with pytest.raises(CorruptedError, match="poisoned"):
        manager.create_kv_cache()
    manager.shutdown()
    assert not scene.leaks()
    return True


# The manager does without the answer, waits on the host instead of marking the stream, or keeps the old size of the tier.
DISPENSABLE = ("query_event", "create_event", "record_event", "host_register")


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: type(refusal()).__name__)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", CALLS)
def test_a_refused_device_call_changes_nothing(name: str, model: str, refusal: Callable[[], BaseException], tmp_path: Path) -> None:
    """Each device call of each public call, once; the same public call succeeds when it is tried again."""
    points = 0
    while True:
        scene = scene_of(model, tmp_path, name)
        before = scene.lengths()
        scene.device.orders = [(scene.device.calls + points, scene.device.calls + points + 1, refusal)]
        error: BaseException | None = None
        try:
            CALLS[name](scene)
        except BaseException as raised:
            error = raised
        refused = scene.device.refused
        scene.device.heal()
        what = f"device call {points} ({refused[0][1] if refused else 'none'})"
        if not refused:
            assert error is None, error
            scene.finish()
            return
        points += 1
        assert error is not None or refused[0][1] in DISPENSABLE, f"{what}: the refusal is lost"
        assert error is not None or not isinstance(refusal(), KeyboardInterrupt), f"{what}: the interrupt is lost"
        assert error is None or isinstance(error, type(refusal())), f"{what}: {error!r} came out"
        assert free_lock(scene.manager), f"{what}: the lock is held"
        assert not poisoned(scene), f"{what}: poisoned"
        if error is not None and name in SINGLE:
            assert scene.lengths() == before, f"{what}: something has changed"
            CALLS[name](scene)
        scene.finish()


# Calls of one step, which can be compared and tried again.
SINGLE = set(CALLS) - {"clear", "resize host", "resize GPU", "adjust", "shutdown", "commit a token", "resize batch", "step"}


def test_a_nested_call_is_refused_and_changes_nothing() -> None:
    """From a driver, as from a finaliser or a signal handler that runs in the middle of a call."""
    device = refusing_device(EmulatedDriver())
    refusals: list[str] = []

    def call_back() -> BaseException:
        try:
            scene.manager.create_kv_cache()
        except LogicError as error:
            refusals.append(str(error))
        return KeyboardInterrupt()

    scene = Scene("window", Path("/tmp"), device)
    device.orders = [(device.calls, device.calls + 1, call_back)]
    with pytest.raises(KeyboardInterrupt):
        scene.active.suspend()
    device.heal()
    assert len(refusals) == 1
    assert "inside suspend()" in refusals[0]
    scene.finish()
