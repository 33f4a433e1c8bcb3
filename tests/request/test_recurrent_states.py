"""Recurrent layers: live states, snapshots at commits, and matches that end where a snapshot is.

Unless said otherwise: 32 tokens a block, a full layer and a recurrent one.
"""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import ConfigError, LogicError
from tests.support import inside
from tests.support.engine import Token
from tests.support.rig import KIB, MIB, Rig, attention, hybrid, mixed, model, ssm, toks


def rig_of(partial: bool = True, window: int | None = None, attention_layers: bool = True) -> Rig:
    layers = [attention(0, 8 * KIB, window=window)] if attention_layers else []
    return Rig(model([*layers, ssm(1, 24 * KIB)], gpu=8 * MIB, partial=partial))


def other(beg: int, end: int) -> list[Token]:
    """Tokens that no prompt of these tests has at the same place."""
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


def snapshot_stats(rig: Rig) -> list[tuple[int, ...]]:
    return [
        (
            delta.iter_snapshot_lookups,
            delta.iter_snapshot_hits,
            delta.iter_snapshot_misses,
            delta.iter_reused_tokens,
            delta.iter_unreused_tokens,
            delta.iter_aligned_snapshot_hits,
            delta.iter_unaligned_snapshot_hits,
        )
        for delta in rig.manager.get_and_reset_ssm_snapshot_iteration_stats().values()
    ]


@pytest.mark.parametrize(
    ("stored", "query", "numbers"),
    [
        (0, 48, (1, 0, 1, 0, 48, 0, 0)),
        (32, 48, (1, 1, 0, 32, 16, 1, 0)),
        (48, 64, (1, 1, 0, 48, 16, 0, 1)),
    ],
)
def test_snapshot_lookups_are_counted(stored: int, query: int, numbers: tuple[int, ...]) -> None:
    """Miss, aligned hit, unaligned hit: lookups, hits, misses, reused and unreused tokens, aligned and unaligned; the id is
    dirty until
    its counts are committed, and a second reading is empty. The hint of the prompt's length enters nowhere."""
    with rig_of() as rig:
        if stored:
            rig.seed(toks(0, stored))
        rig.manager.get_and_reset_ssm_snapshot_iteration_stats()
        cache = rig.manager.create_kv_cache(None, toks(0, query), 101, expected_prompt_length=query + 17)
        assert rig.manager.get_dirty_stats_kv_cache_ids() == {101}
        cache.commit_pending_stats()
        assert rig.manager.get_dirty_stats_kv_cache_ids() == set()
        assert snapshot_stats(rig) == [numbers]
        assert snapshot_stats(rig) == []
        cache.close()


def test_discarded_counts_leave_nothing() -> None:
    """discard_pending_stats clears the dirty mark and the counts."""
    with rig_of() as rig:
        cache = rig.create(toks(0, 48), id=101)
        assert rig.manager.get_dirty_stats_kv_cache_ids() == {101}
        cache.discard_pending_stats()
        assert rig.manager.get_dirty_stats_kv_cache_ids() == set()
        assert snapshot_stats(rig) == []


def test_the_first_resume_of_a_hit_copies_the_snapshot() -> None:
    """One block copied on the device, and more than 0 bytes, under the recurrent life cycle."""
    with rig_of() as rig:
        rig.seed(toks(0, 32))
        rig.manager.get_and_reset_iteration_stats()
        request = rig.start(toks(0, 40))
        assert len(request.tokens) == 32
        request.cache.commit_pending_stats()
        delta = {int(group): stats for group, stats in rig.manager.get_and_reset_iteration_stats().items()}[int(rig.group(1))]
        assert delta.iter_intra_device_copy_blocks == 1
        assert delta.iter_intra_device_copy_bytes > 0
        request.check()


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


def test_each_commit_makes_an_endpoint() -> None:
    """Committed at 96 and at 128: both are reusable, 96 still after 128 was."""
    with rig_of() as rig:
        request = rig.start()
        assert request.advance(toks(0, 96))
        assert rig.probe(toks(0, 96)) == 96
        assert request.advance(toks(96, 128))
        request.close()
        assert rig.reused(toks(0, 128)) == 128
        assert rig.reused(toks(0, 96)) == 96


def test_a_reused_state_is_the_right_one() -> None:
    """The state at 128 tokens is restored, and 10 more are decoded on it."""
    with rig_of() as rig:
        rig.seed(toks(0, 128))
        request = rig.start(toks(0, 128))
        assert len(request.tokens) == 128
        request.check()
        for position in range(128, 138):
            assert request.advance(toks(position, position + 1))
        request.check()


@pytest.mark.parametrize("partial", [True, False])
def test_several_commits(partial: bool) -> None:
    """Commits at 32 and 64: prompts of 32, 48, 64 and 96 reuse 32, 32, 64 and 64."""
    with rig_of(partial) as rig:
        rig.seed(toks(0, 64), chunk=32)
        assert [rig.reused(toks(0, length)) for length in (32, 48, 64, 96)] == [32, 32, 64, 64]


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


@pytest.mark.parametrize("partial", [True, False])
def test_depths_are_ordered(partial: bool) -> None:
    """reused <= depth without snapshots <= divergence <= lookup, for every length from 1 to 128."""
    with rig_of(partial) as rig:
        rig.seed(toks(0, 112), chunk=28)
        for length in range(1, 129):
            found = inside.depths(rig.manager, toks(0, length))
            assert found.reused <= found.before_hybrid <= found.divergence <= found.lookup == length


def test_a_branch_needs_a_snapshot_where_it_leaves() -> None:
    """A snapshot only at 96: a sibling that leaves at 64 reuses nothing; once somebody committed at 64, the next one reuses 64."""
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


def test_is_end_moves_pages() -> None:
    """The tail's attention page and the state become the tree's own: same slots, nothing copied, no slot more."""
    with rig_of() as rig:
        request = rig.start()
        assert request.cache.resize(48, 48)
        tail = rig.indices(request.cache)[1]
        state = request.cache.get_ssm_block_base_index(rig.group(1))
        free = [rig.counts(group=group).free for group in range(2)]
        rig_engine = rig.engine
        assert rig_engine is not None
        rig_engine.step(request.cache, toks(0, 48), [])
        request.tokens = toks(0, 48)
        request.cache.commit(toks(0, 48), None, True)
        assert [rig.counts(group=group).free for group in range(2)] == free
        assert rig.manager.movement.pages_moved(0, 0) == 0
        last = inside.tree_blocks(rig.manager, toks(0, 48))[1]
        pages = [inside.page_of(last, rig.group(layer)) for layer in range(2)]
        assert [page.slot for page in pages if page is not None] == [tail, state]
        assert [page.coverage for page in pages if page is not None] == [16, 16]
        with pytest.raises(LogicError, match="stop_committing"):
            request.cache.commit([1])
        request.close()
        again = rig.start(toks(0, 48))
        assert len(again.tokens) == 48
        again.check()


def test_an_endpoint_moves_to_the_block_that_covers_it() -> None:
    """The endpoint at 48 survives the extension to 96, whose full block takes the place of the partial one."""
    with rig_of() as rig:
        rig.seed(toks(0, 48))
        assert rig.extend(toks(0, 96)) == 48
        assert rig.reused(toks(0, 48)) == 48
        assert rig.reused(toks(0, 96)) == 96
        assert inside.coverage(rig.manager, toks(0, 96), rig.group(1)) == [0, 16, 32]
        for length in (48, 96):
            rig.start(toks(0, length)).check()


def test_a_commit_matches_the_history() -> None:
    """The state stands at the history: committing 32 at history 48 is refused with nothing committed; 32 at 32, and 48 at 48,
    are fine."""
    with rig_of() as rig:
        cache = rig.create()
        assert cache.resume(rig.stream)
        assert cache.resize(64, 48)
        with pytest.raises(AssertionError):
            cache.commit(toks(0, 32))
        assert (cache.num_committed_tokens, cache.history_length) == (0, 48)
        cache.commit(toks(0, 48))
        assert cache.num_committed_tokens == 48
        second = rig.create()
        assert second.resume(rig.stream)
        assert second.resize(64, 32)
        second.commit(other(0, 32))
        assert second.num_committed_tokens == 32


def test_configuration() -> None:
    """Recurrent layers need commit_min_snapshot, and allow partial reuse or not."""
    with pytest.raises(AssertionError, match="commit_min_snapshot") as refused:
        model([attention(0, KIB), ssm(1, KIB)], min_snapshot=False)
    assert isinstance(refused.value, ConfigError)
    for partial in (True, False):
        assert model([attention(0, KIB), ssm(1, KIB)], min_snapshot=True, partial=partial).enable_partial_reuse is partial


@pytest.mark.parametrize("attention_layers", [True, False])
def test_a_suspended_cache_commits_on_after_its_snapshot_is_gone(attention_layers: bool) -> None:
    """100 other requests evict the snapshot of a suspended cache, which nobody holds: probes get shorter, and its next commit
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
