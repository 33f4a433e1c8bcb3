"""Listeners that misbehave: they raise, or call back into the manager."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kv_cache_manager_v2 import CacheListener, KVCacheEventManager, KVCacheManager, LogicError
from kv_cache_manager_v2.build import COMPILED
from kv_cache_manager_v2.listener import CachedBlock
from tests.support.models import small
from tests.support.rig import Rig, toks


class Boom(Exception):
    """What a faulty listener raises."""


class Faulty(CacheListener):
    """Does something of its own at every `every`-th thing that it is told."""

    def __init__(self, every: int, act: Callable[[], object]) -> None:
        self.every = every
        self.act = act
        self.told: list[str] = []

    def page_stored(self, block: CachedBlock, life_cycle: int, level: int, priority: int, covers_block: bool) -> None:
        self._tell("stored")

    def page_removed(self, block: CachedBlock, life_cycle: int) -> None:
        self._tell("page removed")

    def block_removed(self, block: CachedBlock) -> None:
        self._tell("block removed")

    def page_moved(self, block: CachedBlock, life_cycle: int, source: int, destination: int) -> None:
        self._tell("moved")

    def _tell(self, what: str) -> None:
        self.told.append(what)
        if len(self.told) % self.every == 0:
            self.act()


def boom() -> None:
    raise Boom


def churn(rig: Rig) -> None:
    """Requests that share prefixes, overflow every tier, and go."""
    draw = random.Random(3)
    for _request in range(60):
        rig.seed([draw.randrange(2) for _position in range(draw.randrange(1, 14))])
        rig.settle()
        rig.manager.check_invariants()


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_a_listener_that_raises_stops_nothing(every: int, caplog: pytest.LogCaptureFixture) -> None:
    """It is told in the midst of a change: the change is finished, the error is logged, and it is told whatever comes next."""
    listener = Faulty(every, boom)
    with Rig(small(10, kinds=["full", (6, 0)], host_slots=6), events=listener) as rig:
        churn(rig)
        assert rig.manager.event_manager is listener
    assert set(listener.told) == {"stored", "page removed", "block removed", "moved"}
    assert "the cache listener raised an exception in page_stored" in caplog.text
    assert "Boom" in caplog.text
    assert 4 <= len(caplog.records) <= 4 + len(listener.told).bit_length()


@pytest.mark.skipif(COMPILED, reason="a compiled event manager cannot be subclassed")
def test_an_event_manager_of_the_user_is_guarded_too(caplog: pytest.LogCaptureFixture) -> None:
    """What a subclass raises stops nothing either, and the events that it did not spoil come out."""

    class FaultyEvents(KVCacheEventManager):
        def page_stored(self, block: CachedBlock, life_cycle: int, level: int, priority: int, covers_block: bool) -> None:
            super().page_stored(block, life_cycle, level, priority, covers_block)
            raise Boom

    events = FaultyEvents(1 << 16)
    with Rig(small(10, host_slots=6), events=events) as rig:
        churn(rig)
        assert rig.manager.event_manager is events
    assert "the cache listener raised an exception in page_stored" in caplog.text
    events.flush_iteration_events()
    assert events.get_latest_events(0)


def test_a_listener_behind_the_miss_history_is_shielded_too(caplog: pytest.LogCaptureFixture) -> None:
    """The record of drops is told first."""
    config = small(6, host_slots=6)
    config.miss_history = 8
    with Rig(config, events=Faulty(1, boom)) as rig:
        churn(rig)
        assert rig.manager.movement.pages_dropped(1) > 0
    assert "the cache listener raised an exception in" in caplog.text


def test_a_listener_that_calls_the_manager_is_refused() -> None:
    """A listener may not call the manager, which is inside a call. That call goes on."""
    managers: list[KVCacheManager] = []
    refused: list[str] = []

    def create() -> None:
        try:
            managers[0].create_kv_cache()
        except LogicError as error:
            refused.append(str(error))

    listener = Faulty(1, create)
    with Rig(small(8), events=listener) as rig:
        managers.append(rig.manager)
        rig.seed(toks(0, 8))
        managers.clear()
        assert rig.manager.num_open_caches == 0
        assert rig.probe(toks(0, 8)) == 8
        listener.every = 1 << 30
    assert len(refused) == 2
    assert "listener must not call" in refused[0]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("every", [1, 2, 3, 5, 7])
def test_an_interrupt_in_a_listener_waits_for_the_end_of_the_call(every: int, interrupt: type[BaseException]) -> None:
    """The change that was told is finished, and then the interrupt goes on: once, from the call that told it."""

    def stop() -> None:
        raise interrupt

    listener = Faulty(every, stop)
    with Rig(small(10, kinds=["full", (6, 0)], host_slots=6), events=listener, engine=False) as rig:
        interrupts = 0
        for number in range(30):
            cache = rig.create()
            tokens = toks(10 * number, 10 * number + 8)
            steps: list[Callable[[], object]] = [
                lambda cache=cache: cache.resume(rig.stream),  # type: ignore[misc]
                lambda cache=cache: cache.resize(8),  # type: ignore[misc]
                lambda cache=cache, tokens=tokens: cache.commit(tokens),  # type: ignore[misc]
                cache.close,
            ]
            for step in steps:
                try:
                    step()
                except interrupt:
                    interrupts += 1
            assert cache.committed_tokens == tokens
            rig.manager.check_invariants()
        assert interrupts > 5
        assert rig.manager.poison_reason() is None
        listener.every = 1 << 30


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("every", [1, 3])
def test_an_interrupt_in_a_listener_waits_for_the_end_of_the_batch(every: int, interrupt: type[BaseException]) -> None:
    """The end of a step is one call: each of its caches is committed, and then the interrupt goes on."""

    def stop() -> None:
        raise interrupt

    listener = Faulty(1 << 30, stop)
    with Rig(small(16), events=listener, engine=False) as rig:
        caches = [rig.open() for _ in range(4)]
        listener.every = every
        with pytest.raises(interrupt), rig.manager.step(caches, 4) as step:
            step.commit([toks(4 * i, 4 * i + 4) for i in range(4)])
        assert [cache.num_committed_tokens for cache in caches] == [4] * 4
        listener.every = 1 << 30
        with rig.manager.step(caches, 4) as step:
            step.commit([toks(4 * i, 4 * i + 4) for i in range(4)])
        assert [cache.num_committed_tokens for cache in caches] == [8] * 4

        def fail() -> None:
            with rig.manager.step(caches, 4) as step:
                step.commit_ahead([toks(20 + 4 * i, 24 + 4 * i) for i in range(4)])
                listener.every = every
                raise ZeroDivisionError

        with pytest.raises(interrupt):
            fail()
        assert [cache.num_committed_tokens for cache in caches] == [8] * 4, "all are taken back before the interrupt is raised"
        listener.every = 1 << 30
