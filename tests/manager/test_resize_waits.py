"""A resize of a level waits for the device without the lock: other threads are served, whatever the device does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kv_cache_manager_v2 import (
    CacheTierConfig,
    DiskCacheTierConfig,
    Driver,
    EmulatedDriver,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    LogicError,
)
from tests.support.drivers import watched_device
from tests.support.models import GRAIN, KIB, MIB, attention, model
from tests.support.rig import DISK, GPU, HOST, Request, Rig, toks

WATCHDOG_S = 60
SCHEDULES = [("eager", 0), ("threads", 0)] + [("random", seed) for seed in range(6)]
LENGTH = 16  # tokens of a request: 4 blocks
SLOT = GRAIN // 16


class Scene:
    """A GPU of 32 slots, a host of 32 and a disk of 64, all in use; two suspended requests.

    When the host waits for the first time, `meanwhile` runs on another thread, and must end.
    """

    def __init__(self, schedule: str, seed: int, folder: Path) -> None:
        tiers: list[CacheTierConfig] = [
            GpuCacheTierConfig(2 * GRAIN),
            HostCacheTierConfig(32 * SLOT),
            DiskCacheTierConfig(4 * GRAIN, str(folder)),
        ]
        layers = [attention(0, SLOT // 2), attention(1, SLOT // 2)]
        self.waits = 0
        self.meanwhile: Callable[[], object] | None = None
        self.rig = Rig(model(layers, tokens_per_block=4, tiers=tiers, max_util=1.0), schedule, seed, wrap=self._wrap)
        self.first = self._request(0)
        for number in range(1, 24):
            self.rig.seed(toks(100 * number, 100 * number + LENGTH))
        self.second = self._request(9000)
        self.rig.settle()

    def _wrap(self, inner: EmulatedDriver) -> Driver:
        return watched_device(inner, self._before_a_wait)

    def _request(self, beg: int) -> Request:
        request = self.rig.start()
        assert request.advance(toks(beg, beg + LENGTH))
        request.suspend()
        return request

    def _before_a_wait(self) -> None:
        work = self.meanwhile
        self.waits += work is not None
        self.meanwhile = None
        if work is not None:
            failures: list[BaseException] = []

            def guarded() -> None:
                try:
                    work()
                except BaseException as error:
                    failures.append(error)

            other = threading.Thread(target=guarded, daemon=True)
            other.start()
            other.join(WATCHDOG_S)
            assert not other.is_alive(), "another thread waits for the manager's lock"
            if failures:
                raise failures[0]

    def serve_others(self) -> None:
        """Questions are answered, and a request runs from its beginning to its end."""
        manager = self.rig.manager
        assert manager.probe_reuse(None, toks(9000, 9000 + LENGTH)) == LENGTH
        assert manager.get_storage_statistics(GPU)
        assert manager.get_quota(HOST) == 32 * SLOT
        cache = manager.create_kv_cache(None, toks(5000, 5008), 77)
        stream = self.rig.driver.create_stream()
        assert cache.resume(stream), cache.last_shortage
        assert cache.resize(8), cache.last_shortage
        cache.suspend()
        cache.close()
        self.rig.driver.destroy_stream(stream)

    def finish(self) -> None:
        """Every byte of the two requests is there."""
        self.rig.settle()
        for request in (self.first, self.second):
            assert request.resume(), request.cache.last_shortage
            request.check()
            request.suspend()
        self.rig.settle()
        self.rig.__exit__(None, None, None)


@pytest.fixture(params=SCHEDULES, ids=lambda schedule: f"{schedule[0]}-{schedule[1]}")
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    schedule, seed = request.param
    return Scene(schedule, seed, tmp_path)


def shrink_host(scene: Scene) -> bool:
    return scene.rig.manager.resize(HOST, 16 * SLOT)


def shrink_gpu(scene: Scene) -> bool:
    return scene.rig.manager.resize(GPU, GRAIN)


def shrink_disk(scene: Scene) -> bool:
    return scene.rig.manager.resize(DISK, 3 * GRAIN)


def grow_host(scene: Scene) -> bool:
    return scene.rig.manager.resize(HOST, 64 * SLOT)


@pytest.mark.parametrize("resize", [shrink_host, grow_host, shrink_disk])
def test_others_are_served_while_a_resize_waits_for_a_file_transfer_that_hangs(
    scene: Scene, resize: Callable[[Scene], bool]
) -> None:
    """Pages that leave the host are written to a disk that does not answer; a disk shrinks while its pages are read."""
    hanging = scene.rig.driver.hang("read_file" if resize is shrink_disk else "write_file", times=None)
    if resize is grow_host:
        request = scene.rig.start()
        assert request.advance(toks(20_000, 20_000 + LENGTH))  # pages move from the GPU to the host, from there to disk
        request.close()
    elif resize is shrink_disk:
        assert scene.first.cache.prefetch(HOST), scene.first.cache.last_shortage

    def meanwhile() -> None:
        scene.serve_others()
        scene.rig.driver.heal()
        hanging.open()

    scene.meanwhile = meanwhile
    assert resize(scene)
    assert scene.waits == 1
    scene.finish()


def test_a_level_that_a_hanging_read_does_not_touch_is_resized_at_once(scene: Scene) -> None:
    """Bytes pass from disk to the GPU through staging memory: the host's own memory has no part in that."""
    hanging = scene.rig.driver.hang("read_file", times=None)
    assert scene.first.cache.prefetch(GPU), scene.first.cache.last_shortage
    scene.rig.driver.heal()
    assert scene.rig.manager.resize(GPU, 3 * GRAIN)
    assert scene.waits == 0
    hanging.open()
    scene.finish()


def test_others_are_served_while_a_resize_waits_for_the_engine(scene: Scene) -> None:
    """The engine's stream does not advance, and its last request is suspended: its pages leave the GPU once it has."""
    rig = scene.rig
    request = rig.start()
    held = rig.driver.gate(rig.stream)
    assert request.advance(toks(20_000, 20_000 + 20 * 4))  # more than the smaller GPU holds
    request.suspend()

    def meanwhile() -> None:
        scene.serve_others()
        held.open()

    scene.meanwhile = meanwhile
    assert shrink_gpu(scene)
    assert scene.waits == 1
    assert rig.manager.resize(GPU, 2 * GRAIN)
    assert request.resume()
    request.check()
    request.close()
    scene.finish()


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_others_are_served_while_an_adjustment_waits_for_the_engine(schedule: str, seed: int) -> None:
    """The pool group that shrinks has slots that the engine's stream still uses."""
    layers = [attention(0, 8 * KIB, window=128), attention(1, 2 * KIB)]
    answers: list[int] = []

    def before_a_wait() -> None:
        if not held.is_open:
            other = threading.Thread(target=lambda: answers.append(rig.manager.probe_reuse(None, toks(0, 300))), daemon=True)
            other.start()
            other.join(WATCHDOG_S)
            held.open()

    with Rig(model(layers, gpu=16 * MIB), schedule, seed, wrap=lambda inner: watched_device(inner, before_a_wait)) as rig:
        tokens = toks(0, 300)
        rig.extend(tokens)
        totals = [rig.counts(group=group).total for group in range(2)]
        held = rig.driver.gate(rig.stream)
        user = rig.start()
        length = 32 * (totals[1] - 16)
        assert user.cache.resize(length, length)
        user.close()
        rig.manager.tuner.num_samples = 1000
        rig.manager.tuner.set_gpu_weights([0.95, 0.05])
        rig.manager.adjust()
        assert answers == [300]
        assert rig.counts(group=1).total < totals[1]
        again = rig.start(tokens)
        again.check()


def test_a_request_that_runs_meanwhile_keeps_its_pages(scene: Scene) -> None:
    """It locks pages in slots that were to be removed: the resize is refused, says so, and the level is as before."""
    rig = scene.rig
    hanging = rig.driver.hang("write_file", times=None)
    running: list[Request] = []

    def meanwhile() -> None:
        running.append(rig.start(stream=rig.new_stream()))
        for beg in range(30_000, 30_000 + 28 * 4, 16):
            assert running[0].cache.resize(len(running[0].tokens) + 16, len(running[0].tokens))
            running[0].write(toks(beg, beg + 16))
        rig.driver.heal()
        hanging.open()

    scene.meanwhile = meanwhile
    assert not shrink_gpu(scene)  # the host is full: what leaves the GPU makes it write
    assert rig.manager.last_resize is not None
    assert "locked" in rig.manager.last_resize.reason
    assert rig.manager.get_quota(GPU) == 2 * GRAIN
    running[0].check()
    running[0].close()
    scene.finish()


def test_an_interrupted_wait_changes_nothing(scene: Scene) -> None:
    """Ctrl-C ends the call. The level has its old size, and the next resize succeeds."""
    hanging = scene.rig.driver.hang("write_file", times=None)

    def meanwhile() -> None:
        scene.rig.driver.heal()
        hanging.open()
        raise KeyboardInterrupt

    scene.meanwhile = meanwhile
    with pytest.raises(KeyboardInterrupt):
        shrink_host(scene)
    scene.rig.settle()
    assert scene.rig.manager.get_quota(HOST) == 32 * SLOT
    assert shrink_host(scene)
    scene.finish()


def test_a_manager_is_not_shut_down_while_a_resize_waits(scene: Scene) -> None:
    """The resize needs its event. Afterwards the shutdown succeeds, and nothing is left on the device."""
    rig = scene.rig
    hanging = rig.driver.hang("write_file", times=None)

    def meanwhile() -> None:
        rig.driver.heal()
        hanging.open()
        scene.first.close()
        scene.second.close()
        with pytest.raises(LogicError, match="another thread"):
            rig.manager.shutdown()

    scene.meanwhile = meanwhile
    assert shrink_host(scene)
    rig.manager.shutdown()
    rig.driver.destroy_stream(rig.stream)
    rig.driver.close()
