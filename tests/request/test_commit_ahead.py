"""Tokens committed before their step is queued: which requests match the blocks, when the blocks count as computed, and what
follows if they never are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kv_cache_manager_v2 import ConfigError, CuError, KVCache, LogicError, PageDataLostError
from tests.support.engine import Token
from tests.support.models import Kind, hybrid, small
from tests.support.rig import GPU, Request, Rig, mixed, toks
from tests.support.tree_rig import Notes

FULL_AND_WINDOW: tuple[Kind, ...] = ("full", (4, 0))


def scheduled(rig: Rig, tokens: list[Token], prompt: list[Token] | None = None) -> Request:
    """A request with pages for these tokens, all committed ahead; the step that computes them is not queued."""
    request = rig.start(prompt)
    assert request.cache.resize(len(tokens), request.cache.history_length), request.cache.last_shortage
    request.cache.commit_ahead(tokens[request.cache.num_committed_tokens :])
    return request


def queue(request: Request, tokens: list[Token]) -> None:
    """Queue the step that computes the tokens after those that the engine has written."""
    request.write(tokens[len(request.tokens) :])


@pytest.mark.parametrize("schedule", ["eager", "threads", "random"])
def test_a_request_of_the_same_step_reuses_whole_blocks_that_the_step_computes(schedule: str) -> None:
    """Its step is queued on the same stream, after the publisher's. The bytes are right on every schedule."""
    with Rig(small(16), schedule, 5) as rig:
        first = scheduled(rig, toks(0, 10))
        second = rig.request(toks(0, 7))
        assert (len(second.tokens), rig.probe(toks(0, 7))) == (4, 4), "nothing is copied from an uncomputed block"
        assert second.resume()
        assert rig.indices(second.cache) == rig.indices(first.cache)[:1]
        queue(first, toks(0, 10))
        assert second.advance(toks(4, 9))
        first.cache.history_length = 10
        first.close()
        second.close()
        third = rig.start(toks(0, 10))
        assert third.tokens == toks(0, 10)
        third.check()


def test_window_pages_stay_until_the_history_moves() -> None:
    """The first queries of a step read pages that are outside the window of its last token."""
    with Rig(small(32, kinds=FULL_AND_WINDOW)) as rig:
        request = rig.start()
        assert request.cache.resize(16, 0)
        before = rig.indices(request.cache, 1)
        request.cache.commit_ahead(toks(0, 16))
        assert (request.cache.num_committed_tokens, request.cache.history_length) == (16, 0)
        assert rig.indices(request.cache, 1) == before
        assert rig.probe(toks(0, 17)) == 16
        queue(request, toks(0, 16))
        request.cache.history_length = 16
        assert rig.blocks_mapped(request.cache, 1) == [3]
        request.close()
        reused = rig.start(toks(0, 17))
        assert len(reused.tokens) == 16
        reused.check()


@pytest.mark.parametrize("by", ["history", "commit", "commit one", "resize"])
def test_blocks_are_computed_once_the_history_covers_them(by: str) -> None:
    """Then a match may end inside them, other streams may use them, and the listener is notified."""
    notes = Notes()
    with Rig(small(16), events=notes) as rig:
        request = scheduled(rig, toks(0, 8))
        other = rig.request(toks(0, 6), stream=rig.new_stream())
        assert len(other.tokens) == 4
        with pytest.raises(LogicError, match="has not computed yet"):
            other.resume()
        queue(request, toks(0, 8))
        assert notes.take() == []
        if by == "history":
            request.cache.history_length = 8
        elif by == "commit":
            assert request.cache.resize(12)
            request.write(toks(8, 12))
            request.cache.commit(toks(8, 12))
        elif by == "commit one":
            assert request.cache.resize(12)
            request.write(toks(8, 9))
            request.cache.commit([8])
        else:
            assert request.cache.resize(20, 8)
        stored = [note[1] for note in notes.take()]
        assert stored == [toks(0, 4), toks(4, 8)] if by != "commit" else stored[:2]
        assert rig.probe(toks(0, 6)) == 6
        assert other.resume()
        other.check()


def test_a_block_that_the_history_covers_in_part_is_not_computed() -> None:
    with Rig(small(16)) as rig:
        request = scheduled(rig, toks(0, 8))
        queue(request, toks(0, 8))
        request.cache.history_length = 7
        assert rig.probe(toks(0, 3)) == 3
        assert rig.probe(toks(0, 7)) == 4
        assert rig.probe(toks(0, 8)) == 8


def take_back_by_close(cache: KVCache) -> None:
    cache.close()


def take_back_by_suspend(cache: KVCache) -> None:
    cache.suspend()


def take_back_by_resize(cache: KVCache) -> None:
    assert cache.resize(cache.num_committed_tokens - 1)


ENDINGS = [take_back_by_close, take_back_by_suspend, take_back_by_resize]


def test_a_block_is_computed_on_the_stream_that_its_request_was_resumed_on() -> None:
    """Not on the stream of an earlier step that ended inside the block."""
    with Rig(small(16)) as rig:
        first = rig.start()
        assert first.cache.resize(8, 0)
        first.cache.commit_ahead(toks(0, 2))
        queue(first, toks(0, 2))
        first.cache.history_length = 2
        first.suspend()
        assert first.resume(rig.new_stream())
        first.cache.commit_ahead(toks(2, 8))
        rig.manager.check_invariants()
        second = rig.request(toks(0, 5))
        with pytest.raises(LogicError, match="has not computed yet"):
            second.resume()
        assert second.resume(first.stream)
        queue(first, toks(0, 8))
        first.cache.history_length = 8
        second.check()


def test_another_stream_waits_for_the_step_that_computes_a_block() -> None:
    """The history ends exactly where the block does."""
    with Rig(small(16)) as rig:
        first = scheduled(rig, toks(0, 4))
        gate = rig.driver.gate(rig.stream)
        queue(first, toks(0, 4))
        first.cache.history_length = 4
        stream = rig.new_stream()
        second = rig.start(toks(0, 5), stream=stream)
        assert second.tokens == toks(0, 4)
        done: list[int] = []
        rig.driver.launch(stream, lambda: done.append(1))
        assert not done
        gate.open()
        second.check()
        assert done


@pytest.mark.parametrize("end", ENDINGS)
@pytest.mark.parametrize("kinds", [("full",), FULL_AND_WINDOW, ((4, 0),)])
def test_what_is_never_computed_leaves_the_tree_with_its_users(end: Callable[[KVCache], None], kinds: tuple[Kind, ...]) -> None:
    """Blocks that others have committed after them leave too. Requests that matched any of them can only be closed."""
    with Rig(small(24, kinds=kinds), engine=False) as rig:
        rig_tokens = toks(0, 12)
        first = rig.start()
        assert first.cache.resize(6)
        first.cache.commit(rig_tokens[:6])
        assert first.cache.resize(12, 6)
        first.cache.commit_ahead(rig_tokens[6:])
        second = rig.start([*rig_tokens, 50])
        assert second.cache.num_committed_tokens == 12
        assert second.cache.resize(16)
        second.cache.commit(toks(50, 54))
        third = rig.request([*rig_tokens, *toks(50, 54)])
        assert third.cache.num_committed_tokens == 16
        unaffected = rig.start(rig_tokens[:4])
        end(first.cache)
        assert rig.probe(rig_tokens) in (4, 6)
        with pytest.raises(PageDataLostError, match="published ahead"):
            second.cache.resize(17)
        with pytest.raises(PageDataLostError, match="published ahead"):
            third.resume()
        assert unaffected.cache.resize(5)
        rig.manager.check_invariants()
        second.close()
        third.close()
        if first.cache.status != KVCache.Status.CLOSED:
            assert (first.cache.num_committed_tokens, first.cache.history_length) == (6, 6)
            assert first.cache.committed_tokens == rig_tokens[:6]


@pytest.mark.parametrize("end", [take_back_by_suspend, take_back_by_resize])
def test_what_was_taken_back_can_be_committed_again(end: Callable[[KVCache], None]) -> None:
    """A block that the history cuts keeps its tokens up to the history, digests included."""
    tokens = mixed(94, 107)
    with Rig(small(16)) as rig:
        request = rig.start()
        assert request.advance(tokens[:6])
        assert request.cache.resize(13, 6)
        request.cache.commit_ahead(tokens[6:])
        end(request.cache)
        assert request.cache.committed_tokens == tokens[:6]
        assert request.cache.is_active or request.resume()
        assert request.cache.resize(13)
        request.cache.commit_ahead(tokens[6:])
        queue(request, tokens)
        request.cache.history_length = 13
        request.close()
        again = rig.start(tokens)
        assert len(again.tokens) == 13
        again.check()


def test_a_handle_that_is_dropped_takes_back_what_it_published() -> None:
    with Rig(small(16), engine=False) as rig:
        cache = rig.manager.create_kv_cache()
        assert cache.resume(rig.stream)
        assert cache.resize(8)
        cache.commit_ahead(toks(0, 8))
        user = rig.start(toks(0, 8))
        del cache
        with pytest.warns(ResourceWarning):
            rig.create()
        assert rig.probe(toks(0, 8)) == 0
        with pytest.raises(PageDataLostError):
            user.cache.resize(9)


def test_the_slot_of_a_page_that_was_taken_back_is_used_again_by_the_request() -> None:
    """Its page leaves the window, and no other request uses it: no cached page has to be dropped for that slot."""
    with Rig(small(3, kinds=[(4, 0)]), engine=False) as rig:
        cache = scheduled(rig, toks(0, 12)).cache
        assert cache.resize(11, 8)
        cache.stop_committing()
        assert cache.resize(24, 20), cache.last_shortage
        assert rig.probe(toks(0, 8)) == 8, "a cached page was dropped instead"


def test_requests_that_build_on_each_other_are_lost_together() -> None:
    """The second publishes ahead on the first one's blocks, the third uses both; the first is aborted."""
    with Rig(small(16), engine=False) as rig:
        first = scheduled(rig, toks(0, 4))
        second = scheduled(rig, toks(0, 8), toks(0, 8))
        third = rig.start(toks(0, 8))
        assert (second.cache.num_committed_tokens, third.cache.num_committed_tokens) == (8, 8)
        first.close()
        assert rig.probe(toks(0, 8)) == 0
        for request in (second, third):
            with pytest.raises(PageDataLostError):
                request.cache.resize(9)
            request.close()


def test_a_user_is_free_of_the_publisher_once_the_blocks_are_computed() -> None:
    with Rig(small(16)) as rig:
        first = scheduled(rig, toks(0, 12))
        user = rig.start(toks(0, 8))
        queue(first, toks(0, 12))
        first.cache.history_length = 8
        first.close()
        assert user.advance(toks(8, 9))
        user.check()
        user.close()
        assert rig.probe(toks(0, 12)) == 9


@pytest.mark.parametrize("adopts", [False, True])
def test_nothing_is_adopted_for_a_block_whose_step_is_still_to_come(adopts: bool) -> None:
    """Its kernel would write to a page that others read. Neither is an uncomputed block's page adopted by another request."""
    with Rig(small(16)) as rig:
        rig.seed(toks(0, 4))
        first = rig.start()
        first.cache.allow_seq_rebasing = adopts
        assert first.cache.resize(8)
        before = rig.indices(first.cache)
        first.cache.commit_ahead(toks(0, 8))
        assert rig.indices(first.cache) == before
        second = rig.start()
        assert second.advance(toks(0, 8), commit=False)
        own = rig.indices(second.cache)
        second.cache.commit(toks(0, 8))
        assert rig.indices(second.cache)[1] == own[1]
        queue(first, toks(0, 8))
        first.cache.history_length = 8
        assert rig.indices(first.cache) == before
        second.check()


def test_what_a_mistake_would_break_is_refused() -> None:
    """Every call that needs computed tokens raises and changes nothing."""
    with Rig(small(16), engine=False) as rig:
        cache = scheduled(rig, toks(0, 6)).cache
        stream = rig.new_stream()
        for mistake in (
            cache.fork,
            cache.stop_committing,
            lambda: cache.commit([], None, True),
            lambda: setattr(cache, "beam_width", 2),
            lambda: setattr(cache, "cuda_stream", stream),
        ):
            with pytest.raises(LogicError, match="6 tokens are committed, and the history is 0"):
                mistake()
        with pytest.raises(ConfigError, match="capacity"):
            cache.commit_ahead(toks(6, 9))
        cache.history_length = 6
        cache.beam_width = 2
        with pytest.raises(LogicError, match="beam width 2"):
            cache.commit_ahead([7])
        user = scheduled(rig, toks(20, 24))
        other = rig.start(toks(20, 24)).cache
        with pytest.raises(LogicError, match="has not computed yet"):
            other.cuda_stream = stream
        user.cache.history_length = 4
        other.cuda_stream = stream


@pytest.mark.parametrize("schedule", ["eager", "threads", "random"])
@pytest.mark.parametrize("length", [8, 10])
@pytest.mark.parametrize("by", ["history", "resize", "commit"])
def test_a_snapshot_is_made_when_all_is_computed(schedule: str, length: int, by: str) -> None:
    """There is no snapshot after only a part of the tokens, whose state no longer exists. Until then a recurrent model matches
    nothing."""
    tokens = mixed(95, 95 + length)
    with Rig(hybrid(6, 24, kinds=FULL_AND_WINDOW), schedule, 3) as rig:
        request = scheduled(rig, tokens)
        queue(request, tokens)
        request.cache.history_length = 4
        assert rig.probe(tokens) == 0
        if by == "history":
            request.cache.history_length = length
        elif by == "resize":
            assert request.cache.resize(length + 9, length)
        else:
            assert request.cache.resize(length + 1)
            tokens = [*tokens, 7]
            request.write([7])
            request.cache.commit([7])
        assert rig.probe(tokens) == len(tokens)
        reused = rig.start([*tokens, 8])
        assert reused.tokens == tokens
        assert reused.advance([8])
        assert request.cache.resize(len(tokens) + 1, len(tokens))
        request.write([9])
        reused.check()
        request.check()


def test_what_is_never_computed_leaves_no_snapshot() -> None:
    """The state is that of the history, from which the request continues."""
    with Rig(hybrid(6, 24)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 4))
        assert request.cache.resize(12, 4)
        request.cache.commit_ahead(toks(4, 12))
        request.suspend()
        assert rig.probe(toks(0, 12)) == 4
        assert request.resume()
        assert request.advance(toks(20, 24))
        request.check()


@pytest.mark.parametrize("call", ["copy", "record_event"])
def test_a_refused_copy_of_the_state_makes_no_snapshot(call: str) -> None:
    """The history stays where it was; the same call makes the snapshot later."""
    with Rig(hybrid(6, 24)) as rig:
        request = scheduled(rig, toks(0, 10))
        queue(request, toks(0, 10))
        rig.driver.fail(call)
        with pytest.raises(CuError):
            request.cache.history_length = 10
        assert (request.cache.history_length, rig.probe(toks(0, 10))) == (0, 0)
        request.cache.history_length = 10
        assert rig.probe(toks(0, 10)) == 10


def test_a_miss_inside_an_uncomputed_block_is_explained() -> None:
    with Rig(small(16), engine=False) as rig:
        request = scheduled(rig, toks(0, 8))
        report = rig.manager.explain_miss(None, toks(0, 6))
        assert (report.cause.name, report.num_tokens, report.position) == ("UNCOMPUTED", 4, 4)
        assert "not computed yet" in str(report)
        request.cache.history_length = 8


def test_a_fork_counts_on_the_same_blocks() -> None:
    with Rig(small(16), engine=False) as rig:
        first = scheduled(rig, toks(0, 4))
        user = rig.start(toks(0, 4))
        twin = rig.own(user.cache.fork())
        first.close()
        for cache in (twin, user.cache):
            with pytest.raises(PageDataLostError):
                cache.prefetch(GPU) if cache is twin else cache.resize(5)


def test_tokens_that_fill_no_block_may_be_committed_ahead() -> None:
    """`close` publishes the computed part of the tail."""
    with Rig(small(16)) as rig:
        request = scheduled(rig, toks(0, 3))
        queue(request, toks(0, 3))
        assert request.cache.resize(4, 2)
        request.close()
        assert rig.probe(toks(0, 3)) == 2


@pytest.mark.parametrize("by", ["history", "commit"])
def test_a_refused_device_call_computes_nothing(by: str) -> None:
    """The end of the step cannot be recorded: the blocks stay uncomputed, and the same call works later."""
    with Rig(small(16)) as rig:
        request = scheduled(rig, toks(0, 8))
        queue(request, toks(0, 8))
        assert request.cache.resize(12)
        for refused in (True, False):
            if refused:
                rig.driver.fail("record_event")
            try:
                if by == "history":
                    request.cache.history_length = 8
                else:
                    request.cache.commit(toks(8, 12))
            except CuError:
                assert refused
                assert (request.cache.history_length, request.cache.num_committed_tokens) == (0, 8)
                assert rig.probe(toks(0, 7)) == 4
            else:
                assert not refused
        assert rig.probe(toks(0, 7)) == 7
        rig.driver.synchronize()
        request.cache.close()
