"""Priority callbacks that misbehave: they raise, answer nonsense, or call back into the manager."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kv_cache_manager_v2 import ConfigError, KVCache, LogicError
from tests.support.models import hybrid, small
from tests.support.rig import Rig, toks


class Boom(Exception):
    """What a faulty callback raises."""


def test_a_callback_that_raises_while_a_request_is_created_leaves_nothing_held() -> None:
    """The match is released: no page stays held, no block pinned, and the next request gets it."""

    def second_page_raises(ordinal: int, life_cycle: object) -> int:
        if ordinal == 1:
            raise Boom
        return 50

    with Rig(small(8)) as rig:
        rig.seed(toks(0, 16))
        before = rig.counts()
        with pytest.raises(Boom):
            rig.create(toks(0, 16), priority=second_page_raises)
        rig.settle()
        assert rig.counts() == before
        assert rig.manager.num_open_caches == 0
        rig.take(8)  # all of it can be evicted


@pytest.mark.parametrize("answer", [-1, 101, 35.5, "35", None, True])
def test_a_callback_must_answer_with_a_priority(answer: object) -> None:
    """Anything but an integer in 0..100 is a LogicError, with nothing changed, in every call that asks."""

    def priority(ordinal: int, life_cycle: object) -> int:
        return answer  # type: ignore[return-value]  # that is the mistake

    with Rig(small(8)) as rig:
        rig.seed(toks(0, 8))
        with pytest.raises(LogicError, match="priority callback returned"):
            rig.create(toks(0, 8), priority=priority)
        request = rig.start(None, priority=priority)
        with pytest.raises(LogicError, match="priority callback returned"):
            request.cache.resize(4)
        assert request.cache.capacity == 0
        rig.settle()


def test_a_callback_may_answer_with_any_integer_type() -> None:
    """A numpy integer is a priority, in both builds."""
    with Rig(small(8)) as rig:
        request = rig.start(None, priority=lambda ordinal, life_cycle: np.int64(50))  # type: ignore[arg-type, return-value]
        assert request.cache.resize(8)


def test_what_is_no_callback_is_refused_at_once() -> None:
    """A callback that cannot be called is a ConfigError of the creation, not of the first page."""
    with Rig(small(8)) as rig:
        with pytest.raises(ConfigError, match="custom_priority_callback"):
            rig.create(None, priority=50)  # type: ignore[arg-type]  # that is the mistake
        assert rig.manager.num_open_caches == 0


def test_a_commit_whose_callback_raises_commits_nothing() -> None:
    """The priority of the snapshot is asked before the first token is committed, so that the commit can be repeated."""
    armed: list[int] = []

    def priority(ordinal: int, life_cycle: object) -> int:
        if armed:
            raise Boom
        return 50

    with Rig(hybrid(4, 8)) as rig:
        request = rig.start(None, priority=priority)
        assert request.cache.resize(6, 0)
        request.write(toks(0, 6))
        armed.append(1)
        with pytest.raises(Boom):
            request.cache.commit(toks(0, 6))
        assert request.cache.num_committed_tokens == 0
        assert request.cache.history_length == 0
        assert rig.probe(toks(0, 6)) == 0
        armed.clear()
        request.cache.commit(toks(0, 6))
        assert rig.probe(toks(0, 6)) == 6


def _close(cache: KVCache, rig: Rig) -> None:
    cache.close()


def _suspend(cache: KVCache, rig: Rig) -> None:
    cache.suspend()


def _resize(cache: KVCache, rig: Rig) -> None:
    cache.resize(16)


def _commit(cache: KVCache, rig: Rig) -> None:
    cache.commit(toks(100, 104))


def _commit_inside_the_block(cache: KVCache, rig: Rig) -> None:
    cache.commit([7])


def _clear(cache: KVCache, rig: Rig) -> None:
    rig.manager.clear_reusable_blocks()


def _create(cache: KVCache, rig: Rig) -> None:
    rig.create(toks(0, 8))


@pytest.mark.parametrize("call", [_close, _suspend, _resize, _commit, _commit_inside_the_block, _clear, _create])
def test_a_callback_must_not_call_the_manager(call: Callable[[KVCache, Rig], None]) -> None:
    """A callback runs inside a call. A call that it makes is a LogicError, which the outer call raises; all structures agree."""
    armed: list[Callable[[], None]] = []

    def priority(ordinal: int, life_cycle: object) -> int:
        if armed:
            armed.pop()()
        return 50

    with Rig(small(8)) as rig:
        rig.seed(toks(0, 8))
        request = rig.start(None, priority=priority)
        assert request.cache.resize(4)
        armed.append(lambda: call(request.cache, rig))
        with pytest.raises(LogicError, match="priority callback"):
            request.cache.resize(8)
        assert request.cache.capacity == 4
        rig.settle()
        if call is not _commit_inside_the_block:
            armed.append(lambda: call(request.cache, rig))
            with pytest.raises(LogicError, match="priority callback"):
                rig.create(toks(0, 8), priority=priority)
        rig.settle()
        assert rig.manager.num_open_caches == 1


def test_no_callback_is_asked_for_a_length_that_can_never_be_had() -> None:
    """An impossible length is a permanent shortage at once, and the callback is not called."""
    asked: list[int] = []

    def priority(ordinal: int, life_cycle: object) -> int:
        asked.append(ordinal)
        return 50

    with Rig(small(8)) as rig:
        request = rig.start(None, priority=priority)
        assert not request.cache.resize(1 << 60)
        assert request.cache.last_shortage is not None
        assert request.cache.last_shortage.permanent
        assert asked == []
