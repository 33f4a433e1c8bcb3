"""Managers that are not shut down: inherited by a forked child, dropped, or found by the collector."""

from __future__ import annotations

import gc
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kv_cache_manager_v2 import EmulatedDriver, KVCacheManager, LogicError, resize_batch
from kv_cache_manager_v2.request.live_managers import DROPPED, LIVE
from tests.manager.test_any_exception import scene_of
from tests.support.drivers import refusing_device
from tests.support.models import GRAIN, small
from tests.support.rig import GPU, toks


@pytest.fixture(autouse=True)
def _drops_are_expected() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield


def in_child(act: Callable[[], None]) -> None:
    """Run in a forked child; fails with what the child said."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = b""
        try:
            act()
        except BaseException:
            said = traceback.format_exc().encode()
        os.write(write, said[-8000:])
        os._exit(1 if said else 0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    _pid, status = os.waitpid(child, 0)
    assert status == 0, said.decode() or f"the child ended with status {status}"


# --- after os.fork()


def test_a_child_is_refused_before_it_touches_anything(tmp_path: Path) -> None:
    """Each call that could touch memory or a file raises LogicError, without a device call."""
    scene = scene_of("window", tmp_path, "")
    active = scene.active
    manager = scene.manager

    def use() -> None:
        calls = scene.device.calls
        refused: list[Callable[[], object]] = [
            lambda: active.resize(active.capacity),
            lambda: active.commit([5006]),
            lambda: resize_batch([active], [40]),
            active.suspend,
            active.close,
            active.fork,
            lambda: scene.suspended.resume(scene.stream),
            lambda: scene.suspended.prefetch(GPU),
            lambda: manager.create_kv_cache(None, toks(0, 8)),
            lambda: manager.probe_reuse(None, toks(0, 8)),
            lambda: manager.resize(GPU, GRAIN),
            manager.adjust,
            manager.clear_reusable_blocks,
            manager.check_invariants,
            manager.shutdown,
        ]
        for call in refused:
            with pytest.raises(LogicError, match="forked"):
                call()
        assert scene.device.calls == calls

    in_child(use)
    scene.finish()


def test_a_child_may_drop_what_it_inherited(tmp_path: Path) -> None:
    """Handles and managers: nothing happens, not even when the child ends in the middle of it."""
    scenes = [scene_of("window", tmp_path, "")]
    device = scenes[0].device
    before = device.calls

    def drop() -> None:
        scenes.clear()
        gc.collect()
        assert device.calls == before

    in_child(drop)
    scenes[0].finish()


def test_a_child_may_make_a_manager_of_its_own(tmp_path: Path) -> None:
    """On a device of its own, while the parent's is inherited."""
    scene = scene_of("window", tmp_path, "")

    def serve() -> None:
        scene_of("window", tmp_path, "").finish()

    in_child(serve)
    scene.finish()


def test_a_child_of_a_call_is_not_kept_waiting(tmp_path: Path) -> None:
    """Another thread of the parent held the lock: there is no such thread in the child."""
    scene = scene_of("window", tmp_path, "")
    children: list[BaseException | None] = []

    def ask() -> None:
        with pytest.raises(LogicError, match="forked"):
            scene.manager.probe_reuse(None, toks(0, 8))

    def fork_here() -> BaseException:
        try:
            in_child(ask)
            children.append(None)
        except BaseException as error:
            children.append(error)
        return LogicError("the device was asked in the middle of a call")

    scene.device.orders = [(scene.device.calls, scene.device.calls + 1, fork_here)]
    with pytest.raises(LogicError):
        scene.active.suspend()
    scene.device.heal()
    assert children == [None]
    scene.finish()


# --- finalisers


def dropped_in_a_cycle(driver: EmulatedDriver) -> None:
    """A manager and a running request that only the collector will find."""
    manager = KVCacheManager(small(8), driver=driver)
    cache = manager.create_kv_cache()
    cache.resume(driver.create_stream())
    cache.resize(8)
    cycle: list[object] = [manager, cache]
    cycle.append(cycle)


def test_the_collector_makes_no_device_calls(tmp_path: Path) -> None:
    """It may run in the middle of another manager's call: the next call shuts down what it found."""
    inner = EmulatedDriver()
    gc.disable()
    try:
        device = refusing_device(inner)
        device.counting = True
        kept = KVCacheManager(small(8), driver=device)
        other = KVCacheManager(small(8), driver=device)
        cycle: list[object] = [other]
        cycle.append(cycle)
        del other, cycle
        calls = device.calls
        mapped = inner.mapped_bytes
        gc.collect()
        assert device.calls == calls
        assert len(DROPPED) == 1
        kept.create_kv_cache().close()
        assert not DROPPED
        assert inner.mapped_bytes == mapped // 2
        kept.shutdown()
    finally:
        gc.enable()
    inner.close()


def test_what_was_dropped_inside_a_call_waits_for_its_end(tmp_path: Path) -> None:
    """The last reference is dropped in the middle of another manager's call, on the same device."""
    scene = scene_of("window", tmp_path, "")
    others = [KVCacheManager(small(8), driver=scene.device)]
    seen: list[int] = []

    def drop() -> BaseException:
        before = scene.device.calls
        others.clear()
        seen.append(scene.device.calls - before)
        return LogicError("dropped here")

    scene.device.orders = [(scene.device.calls, scene.device.calls + 1, drop)]
    with pytest.raises(LogicError, match="dropped here"):
        scene.active.suspend()
    scene.device.heal()
    assert seen == [0]
    assert len(DROPPED) == 1
    scene.active.suspend()
    assert not DROPPED
    scene.finish()


def test_a_manager_that_is_dropped_outside_every_call_is_shut_down_at_once() -> None:
    """Its memory is free when the last reference is gone."""
    driver = EmulatedDriver()
    manager = KVCacheManager(small(8), driver=driver)
    del manager
    assert driver.mapped_bytes == 0
    driver.close()


def test_a_dropped_manager_of_another_device_disturbs_no_call() -> None:
    """Only constructions and shutdowns shut it down, since its device may be slow or hang."""
    theirs = EmulatedDriver()
    ours = EmulatedDriver()
    kept = KVCacheManager(small(8), driver=ours)
    gc.disable()
    try:
        dropped_in_a_cycle(theirs)
        gc.collect()
    finally:
        gc.enable()
    kept.create_kv_cache().close()
    assert theirs.mapped_bytes > 0
    kept.shutdown()
    assert theirs.mapped_bytes == 0
    ours.close()


class _Foreign(BaseException):
    """A class that the package has never heard of."""


@pytest.mark.parametrize("error", [KeyError("theirs"), SystemExit(3), _Foreign("theirs")])
def test_the_device_of_a_dropped_manager_disturbs_no_construction(error: BaseException) -> None:
    """Whatever it raises is logged; a later construction or shutdown frees the memory."""
    theirs = EmulatedDriver()
    ours = EmulatedDriver()
    gc.disable()
    try:
        dropped_in_a_cycle(theirs)
        gc.collect()
    finally:
        gc.enable()
    theirs.fail("synchronize", error=error)
    manager = KVCacheManager(small(8), driver=ours)
    assert theirs.mapped_bytes > 0
    manager.shutdown()
    assert theirs.mapped_bytes == 0
    ours.close()


def test_a_shut_down_manager_is_not_listed() -> None:
    """The list of living managers keeps nothing alive that is gone."""
    before = len(LIVE)
    driver = EmulatedDriver()
    manager = KVCacheManager(small(8), driver=driver)
    assert len(LIVE) == before + 1
    manager.shutdown()
    assert len(LIVE) == before
    driver.close()


def test_a_device_that_refuses_is_asked_again(tmp_path: Path) -> None:
    """The dropped manager's memory is freed by a later call; the caller notices nothing."""
    scene = scene_of("window", tmp_path, "")
    device = scene.device
    others = [KVCacheManager(small(8), driver=device)]
    device.orders = [(device.calls, device.calls + 1, KeyError)]
    others.clear()
    device.heal()
    assert len(DROPPED) == 1
    scene.active.suspend()
    assert not DROPPED
    scene.finish()
