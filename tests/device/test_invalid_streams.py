"""Streams that do not exist, that the engine destroyed too early, or on which the device refuses to work."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kv_cache_manager_v2 import KVCacheError, LogicError
from tests.support.models import Kind, small
from tests.support.rig import Request, Rig, toks


def test_a_stream_that_does_not_exist_is_refused_by_resume() -> None:
    """A request that ran on it could never be suspended or closed. It stays SUSPENDED, with nothing changed."""
    with Rig(small(8)) as rig:
        rig.seed(toks(0, 8))
        for tokens in (None, toks(0, 8)):  # without pages there is nothing that the stream would wait for
            cache = rig.create(tokens)
            before = rig.counts()
            with pytest.raises(LogicError, match="stream"):
                cache.resume(1 << 40)
            rig.settle()
            assert not cache.is_active
            assert rig.counts() == before
            assert cache.resume(rig.stream)
            cache.close()


def test_a_stream_that_does_not_exist_is_refused_by_the_property() -> None:
    """`cuda_stream` keeps the stream that it had."""
    with Rig(small(8)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 6))
        for _attempt in range(2):
            with pytest.raises(LogicError, match="stream"):
                request.cache.cuda_stream = 1 << 40
            assert request.cache.cuda_stream == rig.stream
            request.suspend()
            assert request.resume()


def _request_on_a_stream_of_its_own(rig: Rig) -> Request:
    """Six tokens are committed, and the stream is gone."""
    stream = rig.driver.create_stream()
    request = rig.start(stream=stream)
    assert request.advance(toks(0, 6))
    rig.driver.synchronize()
    rig.driver.destroy_stream(stream)
    return request


def test_a_request_whose_stream_was_destroyed_can_be_closed() -> None:
    """An engine may destroy the stream before it closes the cache: all pages come back, and what was committed is cached."""
    with Rig(small(8)) as rig:
        _request_on_a_stream_of_its_own(rig).close()
        rig.settle()
        assert rig.manager.num_open_caches == 0
        request = rig.start(toks(0, 6))
        assert request.cache.num_committed_tokens == 6
        request.check()
        request.close()
        rig.take(8)


def test_a_request_whose_stream_was_destroyed_can_go_on_with_another_one() -> None:
    """Setting `cuda_stream` waits for whatever was under way, since the stream before can no longer be waited for."""
    with Rig(small(8)) as rig:
        request = _request_on_a_stream_of_its_own(rig)
        request.cache.cuda_stream = request.stream = rig.stream
        assert request.advance(toks(6, 12))
        request.check()


def _commit(request: Request) -> None:
    request.cache.commit(toks(6, 12))


def _fork(request: Request) -> None:
    request.rig.own(request.cache.fork())


def _stop(request: Request) -> None:
    request.cache.stop_committing()


def _end(request: Request) -> None:
    request.cache.commit([], is_end=True)


def _suspend(request: Request) -> None:
    request.cache.suspend()


def _close(request: Request) -> None:
    request.cache.close()


@pytest.mark.parametrize("kinds", [["full"], ["full", (4, 4)], [(1, 0)]], ids=str)
@pytest.mark.parametrize("call", [_commit, _fork, _stop, _end, _suspend, _close])
def test_an_event_that_the_device_refuses_to_record_changes_nothing(call: Callable[[Request], None], kinds: list[Kind]) -> None:
    """The events of a call are recorded before anything changes: the call can be repeated, and all pages come back."""
    for nth in (1, 2, 3):
        with Rig(small(16, kinds=kinds)) as rig:
            request = rig.start()
            assert request.advance(toks(0, 6))
            assert request.cache.resize(12)
            request.write(toks(6, 12))
            before = (request.cache.num_committed_tokens, request.cache.history_length, rig.counts())
            rig.driver.fail("record_event", nth)
            failed = False
            try:
                call(request)
            except KVCacheError:
                failed = True
            rig.driver.heal()
            rig.settle()
            if failed:
                assert (request.cache.num_committed_tokens, request.cache.history_length, rig.counts()) == before
                call(request)
            rig.settle()
            request.close()
            assert failed or nth > 1 or call is _close
