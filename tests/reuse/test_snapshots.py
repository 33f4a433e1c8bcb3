"""Recurrent state: a hit needs the state of exactly that length, and every request needs a state of its own."""

from __future__ import annotations

import pytest

from tests.support import inside
from tests.support.engine import Token
from tests.support.models import GRAIN, KIB, MIB, attention, hybrid, model, ssm
from tests.support.rig import Rig, toks


def rig_of(partial: bool = True) -> Rig:
    """32 tokens a block, a full layer and a recurrent one."""
    return Rig(model([attention(0, 8 * KIB), ssm(1, 24 * KIB)], gpu=8 * MIB, partial=partial))


def other(beg: int, end: int) -> list[Token]:
    """Tokens that no prompt of these tests has at the same position."""
    return toks(100_000 + beg, 100_000 + end)


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
    """Each commit's end is an endpoint of its own as long as no later one lies in the same block: the longest one within the prompt
    is reused, with its own state."""
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


@pytest.mark.parametrize("first", [33, 40, 48, 63])
def test_a_snapshot_survives_the_block_that_covers_it(first: int) -> None:
    """A partial block with a snapshot is replaced by the full one of a longer prompt: both endpoints are reusable, with their
    states."""
    with Rig(hybrid(8, 16, tokens_per_block=32)) as rig:
        rig.seed(toks(0, first))
        assert rig.extend(toks(0, 96)) == first
        assert rig.reused(toks(0, first)) == first
        assert rig.reused(toks(0, 96)) == 96
        assert inside.coverage(rig.manager, toks(0, 96), rig.group(1)) == [0, first - 32, 32]
        for length in (first, 96):
            again = rig.start(toks(0, length))
            again.check()
            again.close()


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


def test_depth_without_snapshots() -> None:
    """A prompt of 48 reuses 32, but 48 by the attention layers; one of 64 reuses 64 by both."""
    with rig_of() as rig:
        rig.seed(toks(0, 64), chunk=32)
        assert inside.depths(rig.manager, toks(0, 48))[:2] == (32, 48)
        assert inside.depths(rig.manager, toks(0, 64))[:2] == (64, 64)


def test_divergence_depth() -> None:
    """64 of 64; a sibling that diverges at 64 reports 64 of 96; a prompt of 48 reports 48 with 32 reused; an unrelated one 0."""
    with rig_of() as rig:
        rig.seed(toks(0, 64), chunk=32)
        assert inside.depths(rig.manager, toks(0, 64)).divergence == 64
        sibling = inside.depths(rig.manager, [*toks(0, 64), *other(64, 96)])
        assert (sibling.divergence, sibling.lookup) == (64, 96)
        short = inside.depths(rig.manager, toks(0, 48))
        assert (short.reused, short.divergence) == (32, 48)
        assert inside.depths(rig.manager, other(0, 64))[:3] == (0, 0, 0)


def test_a_branch_needs_a_snapshot_where_it_leaves() -> None:
    """A snapshot only at 96: a sibling that leaves at 64 reuses nothing; after a commit at 64, the next one reuses 64."""
    with rig_of() as rig:
        rig.seed(toks(0, 96))
        sibling = [*toks(0, 64), *other(64, 96)]
        assert inside.depths(rig.manager, sibling)[:3:2] == (0, 64)
        request = rig.start(sibling)
        assert request.tokens == []
        assert request.advance(sibling[:64])
        assert request.advance(sibling[64:])
        request.close()
        third = [*toks(0, 64), *other(500, 532)]
        assert rig.reused(third) == 64
        again = rig.start(third)
        again.check()


def test_snapshots_inside_one_block() -> None:
    """Turns of 10, 20 and 25 tokens in one block reuse 0, 10 and 20; then 25 is reusable, with the right state."""
    with rig_of() as rig:
        assert [rig.extend(toks(0, length)) for length in (10, 20, 25)] == [0, 10, 20]
        request = rig.start(toks(0, 25))
        assert len(request.tokens) == 25
        request.check()
        assert request.advance(toks(25, 40))
        request.check()


def test_forks_inside_one_block() -> None:
    """With a snapshot at 20: a fork at 15 reuses 0, one at 25 reuses 20, one that goes on to 32 reuses 20, and its own fork at
    40 then 32."""
    with rig_of() as rig:
        rig.seed(toks(0, 20))
        assert rig.reused([*toks(0, 15), *other(15, 25)]) == 0
        assert rig.reused([*toks(0, 20), *other(20, 25)]) == 20
        aligned = [*toks(0, 20), *other(20, 32)]
        assert rig.extend(aligned) == 20
        assert rig.extend([*aligned, *other(700, 708)]) == 32


@pytest.mark.parametrize("partial", [True, False])
def test_a_snapshot_inside_a_block(partial: bool) -> None:
    """A snapshot at 48, 16 tokens into its block: a longer prompt gets 32 without partial reuse and 48 with it; exactly 48 gets
    48."""
    with rig_of(partial) as rig:
        request = rig.start()
        assert request.advance(toks(0, 32))
        assert request.advance(toks(32, 48))
        request.close()
        assert rig.reused(toks(0, 64)) == (48 if partial else 32)
        assert rig.reused(toks(0, 48)) == 48
        assert inside.coverage(rig.manager, toks(0, 48), rig.group(1)) == [32, 16]
        again = rig.start(toks(0, 48))
        again.check()
