"""Recurrent state: a hit needs the state of exactly that length, and every request needs a state of its own."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import ConfigError
from tests.support import inside
from tests.support.rig import GRAIN, KIB, MIB, Rig, attention, hybrid, model, ssm, toks


@pytest.mark.parametrize("kept", ["left", "right", "none"])
def test_a_page_of_another_life_cycle_keeps_its_block(kept: str) -> None:
    """Two windowed life cycles; a block's page of one is evicted: it stays while the other's is there, else it goes, its empty
    parents
    with it, and the root."""
    with Rig(model([attention(0, 512 * KIB, window=4), attention(1, MIB, window=5)], tokens_per_block=4, gpu=16 * MIB)) as rig:
        rig.seed(toks(0, 8), priority=lambda ordinal, life_cycle: 50)
        path = inside.tree_blocks(rig.manager, toks(0, 8))
        assert len(path) == 2
        for group in (0, 1) if kept == "none" else ((1,) if kept == "left" else (0,)):
            pages = [inside.page_of(block, group) for block in path]
            for page in reversed(pages):
                assert page is not None
                inside.drop(rig.manager, page)
        if kept == "none":
            assert (inside.num_tree_blocks(rig.manager), inside.num_roots(rig.manager)) == (0, 0)
        else:
            assert (inside.num_tree_blocks(rig.manager), inside.num_roots(rig.manager)) == (2, 1)
        assert rig.probe(toks(0, 8)) == 0


@pytest.mark.parametrize("length", [8, 6, 4])
def test_an_attention_hit_without_a_state(length: int) -> None:
    """The snapshot is gone, the attention pages are there: nothing is reusable, which the attention layers alone would not say."""
    with Rig(hybrid(2, 16)) as rig:
        rig.seed(toks(0, length))
        assert rig.reused(toks(0, length)) == length
        busy = [rig.start(), rig.start()]  # both states
        assert inside.depths(rig.manager, toks(0, length)) == (0, length, length, length)
        for request in busy:
            request.close()
        assert rig.extend(toks(0, length)) == 0
        assert rig.reused(toks(0, length)) == length


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("step", [4, 3, 8, 5])
def test_snapshots_of_several_commits(step: int, partial: bool) -> None:
    """Each commit's end is an endpoint of its own as long as no later one lies in the same block: the longest one within the
    prompt is
    reused, with its own state."""
    with Rig(hybrid(16, 32, partial=partial)) as rig:
        request = rig.start()
        ends = []
        for beg in range(0, 24, step):
            assert request.advance(toks(beg, min(beg + step, 24)))
            ends.append(len(request.tokens))
        request.close()
        last = {(end - 1) // 4: end for end in ends}  # by block: the widest snapshot
        for length in range(25):
            usable = [end for end in last.values() if reach_of(end, partial) <= length]
            assert rig.reused(toks(0, length)) == max(usable, default=0), length
        for end in last.values():
            again = rig.start(toks(0, reach_of(end, partial)))
            assert len(again.tokens) == end
            again.check()
            again.close()


def reach_of(end: int, partial: bool) -> int:
    """The shortest prompt that finds the snapshot at `end`: with partial reuse off, whole blocks match (4 tokens each)."""
    return end if partial else (end + 3) // 4 * 4


@pytest.mark.parametrize("partial", [True, False])
def test_as_listed(partial: bool) -> None:
    """32 tokens a block, commits of 32 and 32: prompts of 32, 48 and 96 reuse 32, 32 and 64."""
    with Rig(hybrid(8, 16, tokens_per_block=32, partial=partial)) as rig:
        rig.seed(toks(0, 64), chunk=32)
        assert [rig.reused(toks(0, length)) for length in (32, 48, 96)] == [32, 32, 64]
        if partial:
            assert inside.depths(rig.manager, toks(0, 48)).before_hybrid == 48
            assert inside.depths(rig.manager, toks(0, 64)).before_hybrid == 64


@pytest.mark.parametrize("partial", [True, False])
def test_unaligned_snapshot_and_the_partial_switch(partial: bool) -> None:
    """Commits of 32 and 16: a prompt of 64 reuses 32, or 48 with partial reuse; one of exactly 48 always reuses 48."""
    with Rig(hybrid(8, 16, tokens_per_block=32, partial=partial)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 32))
        assert request.advance(toks(32, 48))
        request.close()
        assert rig.reused(toks(0, 64)) == (48 if partial else 32)
        assert rig.reused(toks(0, 48)) == 48


@pytest.mark.parametrize("first", [33, 40, 48, 63])
def test_a_snapshot_survives_the_block_that_covers_it(first: int) -> None:
    """A partial block with a snapshot is replaced by the full one of a longer prompt: both endpoints are reusable, with their
    states."""
    with Rig(hybrid(8, 16, tokens_per_block=32)) as rig:
        rig.seed(toks(0, first))
        assert rig.extend(toks(0, 96)) == first
        assert rig.reused(toks(0, first)) == first
        assert rig.reused(toks(0, 96)) == 96
        for length in (first, 96):
            again = rig.start(toks(0, length))
            again.check()
            again.close()


@pytest.mark.parametrize(("capacity", "history", "count", "fine"), [(64, 32, 32, True), (64, 48, 32, False), (48, 48, 48, True)])
def test_commit_not_aligned_with_the_history(capacity: int, history: int, count: int, fine: bool) -> None:
    """A state that stands elsewhere is no snapshot: refused, nothing committed, and the cache still closes."""
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


@pytest.mark.parametrize("kinds", [[], ["full"], [(8, 0)]])
def test_min_snapshot_is_required(kinds: list[str | tuple[int, int]]) -> None:
    """Any recurrent layer without commit_min_snapshot is a configuration error; with it partial reuse is free to choose."""
    layers = [
        *[attention(number, KIB, window=kind[0] if isinstance(kind, tuple) else None) for number, kind in enumerate(kinds)],
        ssm(9, KIB),
    ]
    with pytest.raises(ConfigError, match="commit_min_snapshot"):
        model(layers, min_snapshot=False)
    for partial in (True, False):
        model(layers, min_snapshot=True, partial=partial)


@pytest.mark.parametrize("length", [48, 64, 33, 5])
def test_the_final_commit_moves(length: int) -> None:
    """commit(..., is_end=True): the live tail and the live state are the tree's, no slot more, no copy."""
    with Rig(hybrid(8, 16, tokens_per_block=32)) as rig:
        request = rig.start()
        assert request.cache.resize(length, 0)
        slots = rig.indices(request.cache)
        state = request.cache.get_ssm_block_base_index(rig.group(1))
        free = [rig.counts(group=group).free for group in range(2)]
        request.write(toks(0, length))
        request.cache.commit(toks(0, length), None, True)
        request.close()
        assert [rig.counts(group=group).free for group in range(2)] == free
        assert rig.manager.movement.pages_moved(0, 0) == 0
        path = inside.tree_blocks(rig.manager, toks(0, length))
        pages = [inside.page_of(block, rig.group(0)) for block in path]
        assert [page.slot for page in pages if page is not None] == slots
        snapshot = inside.page_of(path[-1], rig.group(1))
        assert snapshot is not None
        assert (snapshot.slot, snapshot.coverage) == (state, (length - 1) % 32 + 1)
        again = rig.start(toks(0, length))
        assert len(again.tokens) == length
        again.check()


def test_a_request_without_tokens_needs_a_state() -> None:
    """Two states in all, one of them for a request of no tokens: the third request finds none, and it is the states that are
    short."""
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


@pytest.mark.parametrize("states", [2, 3, 5])
@pytest.mark.parametrize("size", [32, 24])
def test_new_snapshots_push_out_old_ones(states: int, size: int) -> None:
    """Eight commits with few states: the newest endpoints are kept, the whole prompt reuses the last one, the live state is
    never lost."""
    with Rig(hybrid(states, 16, tokens_per_block=32)) as rig:
        request = rig.start()
        for beg in range(0, 8 * size, size):
            assert request.advance(toks(beg, beg + size))
            assert rig.probe(request.tokens) == len(request.tokens)
        request.check()
        assert rig.probe(toks(0, 8 * size + 5)) == 8 * size
        kept = [block for block, covered in enumerate(inside.coverage(rig.manager, toks(0, 8 * size), rig.group(1))) if covered]
        assert len(kept) >= states - (1 if size == 32 else 2)  # one that a wider one of the same block replaced may be missed
        assert max(kept) == (8 * size - 1) // 32
        request.close()
        again = rig.start(toks(0, 8 * size))
        again.check()


@pytest.mark.parametrize("backoff", [1, 3, 4, 5, 8])
def test_backoff_and_snapshots(backoff: int) -> None:
    """Commits at 4, 8 and 12: the answer is the last snapshot at or below what the back-off leaves; never a state of another
    length."""
    with Rig(hybrid(8, 16, backoff=backoff)) as rig:
        rig.seed(toks(0, 12), chunk=4)
        assert rig.reused(toks(0, 12)) == (12 - backoff) // 4 * 4
        assert rig.reused(toks(0, 20)) == (12 - backoff) // 4 * 4
        again = rig.start(toks(0, 12))
        again.check()


def test_a_commit_without_room_for_a_snapshot() -> None:
    """Every state is held: the commit succeeds without a snapshot; nothing of it is half done, and close works."""
    with Rig(hybrid(1, 16, tokens_per_block=32)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 32))
        cache = request.cache
        assert (cache.num_committed_tokens, cache.history_length) == (32, 32)
        assert rig.probe(toks(0, 32)) == 0
        assert inside.depths(rig.manager, toks(0, 32)).before_hybrid == 32
        assert request.advance(toks(32, 40))
        request.check()
        request.close()
        assert rig.counts(group=1) == (1, 1, 0, 0)


def test_a_commit_without_room_for_a_partial_block() -> None:
    """Every block is locked: the partial block's copy is skipped, the full blocks are cached."""
    with Rig(hybrid(4, 2)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 6))
        assert request.cache.num_committed_tokens == 6
        request.check()
        assert rig.probe(toks(0, 6)) in (0, 4)
        request.close()
        assert rig.counts().unavailable == 0


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


def test_a_model_of_states_only() -> None:
    """No attention layer at all: endpoints are where commits were, and nowhere else."""
    with Rig(model([ssm(0, 64 * KIB)], tokens_per_block=4, gpu=GRAIN)) as rig:
        request = rig.start()
        for length in (3, 8, 9):
            assert request.advance(toks(len(request.tokens), length))
        request.close()
        assert [rig.reused(toks(0, length)) for length in (2, 3, 5, 8, 9, 12)] == [0, 3, 3, 8, 9, 9]
        again = rig.start(toks(0, 12))
        again.check()


def test_a_hit_runs_where_one_state_is_all_there_is() -> None:
    """No room for both the snapshot and the live state, and never will be: the request takes the snapshot itself, out of the
    tree."""
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
