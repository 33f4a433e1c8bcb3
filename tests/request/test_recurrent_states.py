"""Recurrent layers: live states, snapshots at commits, and matches that end where a snapshot is.

Unless said otherwise: 32 tokens a block, a full layer and a recurrent one.
"""

from __future__ import annotations

import dataclasses

import pytest

from kv_cache_manager_v2 import LogicError, commit_batch
from tests.support import inside
from tests.support.engine import Token
from tests.support.models import KIB, MIB, attention, hybrid, model, ssm
from tests.support.rig import Rig, mixed, toks


def rig_of(partial: bool = True, window: int | None = None, attention_layers: bool = True) -> Rig:
    layers = [attention(0, 8 * KIB, window=window)] if attention_layers else []
    return Rig(model([*layers, ssm(1, 24 * KIB)], gpu=8 * MIB, partial=partial))


def other(beg: int, end: int) -> list[Token]:
    """Tokens that differ from every prompt of these tests at each position."""
    return toks(100_000 + beg, 100_000 + end)


def test_suspend_and_resume_keep_the_state() -> None:
    """The state's slot is valid again after a resume, and its bytes are unchanged."""
    with rig_of() as rig:
        request = rig.start()
        assert request.advance(toks(0, 40))
        slot = request.cache.get_ssm_block_base_index(rig.group(1))
        assert slot >= 0
        request.suspend()
        assert request.cache.get_ssm_block_base_index(rig.group(1)) == -1
        assert request.resume()
        assert request.cache.get_ssm_block_base_index(rig.group(1)) == slot
        request.check()


def test_nothing_committed_nothing_reused() -> None:
    """A request that only ran leaves no snapshot."""
    with rig_of() as rig:
        request = rig.start()
        assert request.advance(toks(0, 64), commit=False)
        request.cache.stop_committing()
        request.close()
        assert rig.reused(toks(0, 64)) == 0


def test_a_snapshot_of_one_token_of_a_block_can_be_reused() -> None:
    """Its block is copied, since the request writes to its own one."""
    with Rig(hybrid(8, 16)) as rig:
        assert rig.start().advance(toks(0, 5))
        assert rig.probe(toks(0, 6)) == 5


@pytest.mark.parametrize("schedule", ["eager", "random"])
@pytest.mark.parametrize("window", [None, 40])
def test_prefill_and_decode(schedule: str, window: int | None) -> None:
    """63 tokens of prompt and 52 decoded, every byte and state checked."""
    with Rig(model([attention(0, 8 * KIB, window=window), ssm(1, 24 * KIB, KIB)], gpu=8 * MIB), schedule, 3) as rig:
        tokens = mixed(0, 115)
        request = rig.start(tokens[:62])
        request.prefill(tokens[:63], 20)
        for position in range(63, 115):
            assert request.advance(tokens[position : position + 1])
        request.check()


@pytest.mark.parametrize("attention_layers", [True, False])
def test_a_suspended_cache_commits_on_after_its_snapshot_is_gone(attention_layers: bool) -> None:
    """100 other requests evict the snapshot of a suspended cache, which does not hold it: probes get shorter, and its next commit
    works."""
    if attention_layers:
        config = hybrid(4, 16, tokens_per_block=32, host_slots=20)
    else:
        config = model([ssm(0, 512 * KIB)], gpu=2 * MIB, max_util=1.0)
    with Rig(config) as rig:
        request = rig.start()
        assert request.advance(toks(0, 32))
        request.suspend()
        for tag in range(100):
            rig.seed(other(tag * 100, tag * 100 + 32))
        if not attention_layers:
            assert rig.probe(toks(0, 32)) == 0
        assert request.resume()
        assert request.advance(toks(32, 64))
        request.check()
        request.close()
        assert rig.probe(toks(0, 64)) == 64
        again = rig.start(toks(0, 64))
        again.check()


@pytest.mark.parametrize("length", [48, 64, 33, 5])
def test_the_final_commit_moves(length: int) -> None:
    """`commit(..., is_end=True)` moves the live tail and the live state into the tree: no copy, no further slot."""
    with Rig(hybrid(8, 16, tokens_per_block=32)) as rig:
        request = rig.start()
        assert request.cache.resize(length, 0)
        slots = rig.indices(request.cache)
        state = request.cache.get_ssm_block_base_index(rig.group(1))
        free = [rig.counts(group=group).free for group in range(2)]
        request.write(toks(0, length))
        request.cache.commit(toks(0, length), None, True)
        with pytest.raises(LogicError, match="stop_committing"):
            request.cache.commit([1])
        request.close()
        assert [rig.counts(group=group).free for group in range(2)] == free
        assert rig.manager.movement.pages_moved(0, 0) == 0
        path = inside.tree_blocks(rig.manager, toks(0, length))
        pages = [inside.page_of(block, rig.group(0)) for block in path]
        assert [page.slot for page in pages if page is not None] == slots
        assert sum(page.coverage for page in pages if page is not None) == length
        snapshot = inside.page_of(path[-1], rig.group(1))
        assert snapshot is not None
        assert (snapshot.slot, snapshot.coverage) == (state, (length - 1) % 32 + 1)
        again = rig.start(toks(0, length))
        assert len(again.tokens) == length
        again.check()


@pytest.mark.parametrize(("capacity", "history", "count", "fine"), [(64, 32, 32, True), (64, 48, 32, False), (48, 48, 48, True)])
def test_commit_not_aligned_with_the_history(capacity: int, history: int, count: int, fine: bool) -> None:
    """The state at another length cannot become the snapshot: the commit is refused, nothing is committed, and the cache still
    closes."""
    with Rig(hybrid(8, 16, tokens_per_block=32)) as rig:
        request = rig.start()
        cache = request.cache
        assert cache.resize(capacity, history)
        if fine:
            cache.commit(toks(0, count))
        else:
            with pytest.raises(AssertionError):
                cache.commit(toks(0, count))
        assert cache.num_committed_tokens == (count if fine else 0)
        assert cache.history_length == history
        cache.close()
        assert rig.counts().unavailable == 0


def test_a_request_without_tokens_needs_a_state() -> None:
    """Two state slots, one used by a request without tokens: the third request has a shortage in the pool group of the states."""
    with Rig(hybrid(2, 16)) as rig:
        idle, busy, third = rig.start(), rig.start(), rig.request()
        assert busy.advance(toks(0, 6))
        assert idle.cache.get_ssm_block_base_index(rig.group(1)) >= 0
        assert third.resume() is False
        shortage = third.cache.last_shortage
        assert shortage is not None
        assert shortage.pool_group == 1
        idle.close()
        assert third.resume()


@pytest.mark.parametrize("seed", range(4))
def test_states_move_between_tiers(seed: int) -> None:
    """More requests than states: suspended ones' states go to the host and come back, under any legal order of the streams."""
    with Rig(hybrid(2, 8, host_slots=16), "random", seed) as rig:
        requests = []
        for tag in range(4):
            request = rig.start(stream=rig.new_stream())
            assert request.advance(toks(100 * tag, 100 * tag + 6))
            request.suspend()
            requests.append(request)
        for turn in range(2):
            for tag, request in enumerate(requests):
                assert request.resume()
                assert request.advance(toks(100 * tag + 6 + turn, 100 * tag + 7 + turn))
                request.suspend()
        for request in requests:
            assert request.resume()
            request.check()
            request.close()


def test_a_hit_runs_where_one_state_is_all_there_is() -> None:
    """The level can never hold both the snapshot and the live state: the request takes the snapshot's page out of the tree."""
    with Rig(hybrid(1, 8, host_slots=8)) as rig:
        rig.seed(toks(0, 8))
        request = rig.request(toks(0, 8))
        assert len(request.tokens) == 8
        assert request.resume(), request.cache.last_shortage
        request.check()
        assert request.advance(toks(8, 11))
        request.check()
        request.close()
        again = rig.start(toks(0, 11))
        assert len(again.tokens) == 11
        again.check()


@pytest.mark.parametrize("history", [0, 3, 6, 8])
def test_a_commit_advances_a_history_that_is_behind_it(history: int) -> None:
    """With and without snapshots, a commit advances a history that is shorter than the new length."""
    with Rig(hybrid(8, 16, kinds=("full", (6, 0)))) as rig:
        request = rig.start()
        assert request.cache.resize(history, 0)
        request.write(toks(0, history))
        assert request.cache.resize(8, history)
        request.write(toks(history, 8))
        request.cache.commit(toks(0, 8))
        assert request.cache.history_length == 8
        request.close()
        reused = rig.start(toks(0, 9))
        assert len(reused.tokens) == 8
        reused.check()


def test_a_commit_behind_the_history_is_refused() -> None:
    """The state is that of the history: no snapshot of fewer tokens can be made of it."""
    with Rig(hybrid(8, 16)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 8), commit=False)
        with pytest.raises(LogicError, match="must not exceed 4"):
            request.cache.commit(toks(0, 4))
        request.cache.commit(toks(0, 8))


@pytest.mark.parametrize("at_block_ends", [False, True])
@pytest.mark.parametrize(
    ("length", "backoff", "reused"), [(97, 0, 96), (96, 0, 64), (80, 0, 64), (97, 3, 64), (20, 0, 0), (1, 0, 0)]
)
def test_a_prompt_whose_last_token_must_be_computed_hits(length: int, backoff: int, reused: int, at_block_ends: bool) -> None:
    """Its prefill stops once at a block boundary; the same prompt, with another answer, then reuses all that comes before."""
    config = hybrid(8, 16, tokens_per_block=32, backoff=backoff, kinds=("full", (40, 0)))
    with Rig(dataclasses.replace(config, snapshot_at_block_ends=at_block_ends)) as rig:
        prompt = toks(0, length)
        first = rig.start(prompt[:-1])
        steps = 0
        while len(first.tokens) < length:
            done = len(first.tokens)
            assert first.advance(prompt[done : min(done + 1000, first.cache.prefill_end(length))])
            steps += 1
        assert steps == (2 if reused else 1)
        first.close()
        second = rig.start(prompt[:-1])
        assert len(second.tokens) == reused
        assert second.cache.prefill_end(length) == length
        assert second.advance(prompt[reused:])
        assert second.advance(other(0, 3))
        second.check()


@pytest.mark.parametrize("at_branches", [False, True])
def test_a_third_prompt_reuses_where_the_second_left_the_first(at_branches: bool) -> None:
    """If the second stopped its prefill there, at the last block boundary that both have."""
    config = hybrid(8, 32, tokens_per_block=4)
    with Rig(dataclasses.replace(config, snapshot_at_branches=at_branches, snapshot_at_block_ends=True)) as rig:
        ends: list[list[int]] = []
        for branch in range(3):
            prompt = [*toks(0, 10), *toks(100 * branch + 100, 100 * branch + 111)]
            request = rig.start(prompt)
            ends.append([len(request.tokens)])
            while len(request.tokens) < len(prompt):
                end = request.cache.prefill_end(len(prompt))
                assert request.advance(prompt[len(request.tokens) : end])
                ends[-1].append(end)
            request.close()
        assert ends == [[0, 20, 21], [0, 8, 20, 21] if at_branches else [0, 20, 21], [8, 20, 21] if at_branches else [0, 20, 21]]


def test_without_snapshots_a_prefill_need_not_stop() -> None:
    """Any prefix can be reused then."""
    with Rig(model([attention(0, 8 * KIB)], gpu=8 * MIB), engine=False) as rig:
        assert rig.start().cache.prefill_end(100) == 100


@pytest.mark.parametrize("one_by_one", [False, True])
def test_snapshots_at_block_ends_only(one_by_one: bool) -> None:
    """A decode step copies no state unless it fills a block: what is cached is a whole number of blocks."""
    config = dataclasses.replace(hybrid(8, 16, kinds=("full", (6, 0))), snapshot_at_block_ends=True)
    with Rig(config, "random", 4) as rig:
        request = rig.start()
        copies = []
        for position in range(13):
            assert request.cache.resize(position + 1, position if one_by_one else None)
            request.write(toks(position, position + 1))
            if one_by_one:
                request.cache.commit([position])
            else:
                commit_batch([request.cache], [position])
            assert request.cache.num_committed_tokens == request.cache.history_length == position + 1
            copies.append(rig.manager.movement.pages_moved(0, 0))
            assert rig.probe(toks(0, position + 1)) == (position + 1) // 4 * 4
        assert copies == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
        request.check()
        assert request.advance(toks(13, 14), commit=False)
        assert request.advance(toks(14, 15), commit=False)
        with pytest.raises(LogicError, match="must not exceed 14"):
            request.cache.commit([13])
        request.close()
        again = rig.start(toks(0, 15))
        assert len(again.tokens) == 12
        again.check()
