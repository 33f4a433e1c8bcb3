"""What one request takes and finds: counted once, when it is settled, and never if it was undone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_cache_manager_v2 import (
    ConfigError,
    KVCacheIterationStatsDelta,
    KVCacheStatsDelta,
    LayerGroupId,
    introspection,
)
from tests.statistics.helpers import blocks, forget, iteration, open_cache, request, rig_of, seed, suspended_cache
from tests.support.models import GRAIN, KIB, MIB, Kind, attention, model
from tests.support.rig import Rig, toks


def test_context_then_generation() -> None:
    """8 tokens of prompt: 2 taken, 2 new, 2 missed; the next block is one of generation, which cannot be missed."""
    with rig_of(blocks(8)) as rig:
        cache = open_cache(rig, toks(0, 8))
        assert cache.resize(8)
        cache.commit(toks(0, 8))
        assert cache.commit_pending_stats() == request(2, 2)
        delta = iteration(rig)
        assert (delta.iter_alloc_total_blocks, delta.iter_alloc_new_blocks, delta.iter_missed_blocks) == (2, 2, 2)
        assert delta.iter_gen_alloc_blocks == 0
        assert cache.resize(9)
        assert cache.commit_pending_stats() == request(1, 0)
        delta = iteration(rig)
        assert (delta.iter_alloc_total_blocks, delta.iter_gen_alloc_blocks, delta.iter_missed_blocks) == (1, 1, 0)


@pytest.mark.parametrize(("expected", "generated"), [(None, 1), (8, 1), (9, 0), (0, 1), (12, 0)])
def test_expected_prompt_length_says_where_generation_begins(expected: int | None, generated: int) -> None:
    """By default the length of the tokens given; the history before the growing call counts."""
    with rig_of(blocks(8)) as rig:
        cache = open_cache(rig, toks(0, 8), expected=expected)
        assert cache.resize(8)
        cache.commit(toks(0, 8))
        cache.commit_pending_stats()
        forget(rig)
        assert cache.resize(12)
        cache.commit_pending_stats()
        delta = iteration(rig)
        assert (delta.iter_gen_alloc_blocks, delta.iter_missed_blocks) == (generated, 1 - generated)


def test_without_tokens_nothing_is_generation() -> None:
    """No tokens given and no length expected: every block is missed."""
    with rig_of(blocks(8)) as rig:
        cache = open_cache(rig)
        for end in (4, 8, 12):
            assert cache.resize(end, end)
        assert cache.commit_pending_stats() == request(3, 3)
    with rig_of(blocks(8)) as rig, pytest.raises(ConfigError, match="expected_prompt_length is -1"):
        suspended_cache(rig, None, None, -1)


# --- undone


def test_reverted_generation_reports_nothing() -> None:
    """Growth that is taken back before it was committed has never been; a later real one counts once."""
    with rig_of(blocks(8)) as rig:
        cache = open_cache(rig, toks(0, 8), id=3)
        assert cache.resize(8)
        cache.commit(toks(0, 8))
        cache.commit_pending_stats()
        forget(rig)
        assert cache.resize(16)
        assert rig.manager.get_dirty_stats_kv_cache_ids() == {3}
        assert cache.resize(8)
        assert rig.manager.get_dirty_stats_kv_cache_ids() == set()
        assert cache.commit_pending_stats() == request(0, 0)
        assert rig.manager.get_and_reset_iteration_stats() == {}
        assert cache.resize(9)
        assert cache.commit_pending_stats() == request(1, 0)
        assert iteration(rig).iter_gen_alloc_blocks == 1


def test_an_allocation_that_waits_is_counted_when_it_is_committed() -> None:
    """Over several readings nothing is seen of it; then it counts, once."""
    with rig_of(blocks(8)) as rig:
        cache = open_cache(rig, toks(0, 8), id=9)
        assert cache.resize(8)
        for _iteration in range(3):
            assert rig.manager.get_and_reset_iteration_stats() == {}
            assert rig.manager.get_committed_stats().empty
            assert rig.manager.get_dirty_stats_kv_cache_ids() == {9}
        assert cache.commit_pending_stats() == request(2, 2)
        assert cache.commit_pending_stats().empty
        assert iteration(rig).iter_alloc_total_blocks == 2
        assert rig.manager.get_and_reset_iteration_stats() == {}
        assert rig.manager.get_committed_stats() == request(2, 2)


def test_what_is_committed_is_never_undone_and_regrowth_counts_again() -> None:
    """3 blocks committed; shrinking to 1 takes nothing back; 4 again are 3 more; shrinking to 2 takes back just those above."""
    with rig_of(blocks(8)) as rig:
        cache = open_cache(rig)
        assert cache.resize(12)
        assert cache.commit_pending_stats() == request(3, 3)
        assert cache.resize(4)
        assert cache.commit_pending_stats().empty
        assert cache.resize(16)
        assert cache.resize(8)
        assert cache.commit_pending_stats() == request(1, 1)
        assert rig.manager.get_committed_stats() == request(4, 4)


@pytest.mark.parametrize("shrink_to", [8, 12, 16, 20])
def test_undoing_tells_missed_from_generated_blocks(shrink_to: int) -> None:
    """Pending blocks 0..2 are missed, 3..5 are of generation: shrinking takes back each as what it was."""
    with rig_of(blocks(8)) as rig:
        cache = open_cache(rig, expected=8)
        assert cache.resize(12)
        cache.commit(toks(0, 8))
        assert cache.resize(24)
        assert cache.resize(shrink_to)
        left = shrink_to // 4
        missed = min(left, 3)
        assert cache.commit_pending_stats() == request(left, missed)
        assert iteration(rig).iter_gen_alloc_blocks == left - missed


@pytest.mark.parametrize("kinds", [("full",), ((8, 4),), ((4, 0),), ("full", (8, 4)), ((8, 8), (16, 0))])
@pytest.mark.parametrize("keep", [12, 20, 32])
def test_undoing_is_exact_with_windows_and_sinks(kinds: tuple[Kind, ...], keep: int) -> None:
    """A prompt whose windows leave gaps, grown to 40 and cut back: what is left counted is what growing to that length counts."""

    def counted(grow_to: int, shrink_to: int) -> tuple[KVCacheStatsDelta, list[KVCacheIterationStatsDelta]]:
        with rig_of(blocks(64, kinds)) as rig:
            cache = open_cache(rig, expected=8)
            assert cache.resize(12, 12)
            assert cache.resize(grow_to)
            assert cache.resize(shrink_to)
            delta = cache.commit_pending_stats()
            return delta, list(rig.manager.get_and_reset_iteration_stats().values())

    assert counted(40, keep) == counted(keep, keep)


def test_discarded_counts_are_gone_and_later_shrinking_takes_nothing_back() -> None:
    with rig_of(blocks(8)) as rig:
        cache = open_cache(rig, id=1)
        assert cache.resize(8)
        cache.discard_pending_stats()
        assert rig.manager.get_dirty_stats_kv_cache_ids() == set()
        assert cache.resize(4)
        assert cache.commit_pending_stats().empty
        assert cache.resize(8)
        assert cache.commit_pending_stats() == request(1, 1)


def test_closing_drops_what_is_pending() -> None:
    """A closed cache is never dirty, and its counts are nowhere."""
    with rig_of(blocks(8)) as rig:
        cache = open_cache(rig, toks(0, 8), id=1)
        assert cache.resize(8)
        cache.close()
        assert rig.manager.get_dirty_stats_kv_cache_ids() == set()
        assert cache.commit_pending_stats().empty
        assert rig.manager.get_committed_stats().empty
        assert rig.manager.get_and_reset_iteration_stats() == {}


# --- reuse


def test_full_and_partial_reuse() -> None:
    """10 tokens of a 9-token entry: 2 whole blocks and a part; the part is copied, which takes one block and misses none."""
    with rig_of(blocks(8)) as rig:
        seed(rig, 0, 9)
        cache = open_cache(rig, toks(0, 10))
        assert cache.num_committed_tokens == 9
        assert cache.resize(10)
        assert cache.commit_pending_stats() == request(1, 0, 3)
        delta = iteration(rig)
        assert (delta.iter_full_reused_blocks, delta.iter_partial_reused_blocks, delta.iter_reused_blocks) == (2, 1, 3)
        assert (delta.iter_intra_device_copy_blocks, delta.iter_intra_device_copy_bytes) == (1, GRAIN)
        assert delta.iter_cache_hit_rate == 1.0


@pytest.mark.parametrize(("partial", "tokens", "reused"), [(False, 8, 2), (True, 9, 3)])
def test_partial_reuse_off_and_on(partial: bool, tokens: int, reused: int) -> None:
    """12 cached tokens and a prompt that differs in the tenth: 8 tokens without partial reuse, 9 with it."""
    with rig_of(blocks(8, partial=partial)) as rig:
        seed(rig, 0, 12)
        cache = open_cache(rig, [*toks(0, 9), 99, 98])
        assert cache.num_committed_tokens == tokens
        assert cache.resize(11)
        delta = cache.commit_pending_stats()
        assert delta == request(1, 0 if partial else 1, reused)
        assert iteration(rig).iter_intra_device_copy_blocks == (1 if partial else 0)


def test_a_window_counts_what_it_holds() -> None:
    """Window 8, 15 of 16 tokens matched: only the last two blocks are held, 1 whole and 1 in part; 1 copied."""
    with rig_of(blocks(16, [(8, 0)])) as rig:
        seed(rig, 0, 16)
        cache = open_cache(rig, toks(0, 15))
        assert cache.num_committed_tokens == 15
        assert cache.resize(16)
        assert cache.commit_pending_stats() == request(1, 0, 2)
        delta = iteration(rig)
        assert (delta.iter_full_reused_blocks, delta.iter_partial_reused_blocks) == (1, 1)
        assert delta.iter_intra_device_copy_blocks == 1


def test_a_tail_that_left_the_tree_before_it_was_copied_is_missed() -> None:
    """The partly matched block loses its place in the tree between creation and first resume: its copy counts as missed."""
    with rig_of(blocks(8)) as rig:
        seed(rig, 0, 9)
        cache = suspended_cache(rig, toks(0, 9))
        other = open_cache(rig, toks(0, 8))
        assert other.resize(12)
        other.commit(toks(8, 12))  # a longer sibling takes the block's place
        other.commit_pending_stats()
        forget(rig)
        assert cache.resume(rig.stream)
        delta = cache.commit_pending_stats()
        assert (delta.alloc_total_blocks, delta.reused_blocks) == (1, 3)
        assert delta.missed_blocks == 1


# --- when blocks are offered for reuse: the engine's policy, seen through the committed length


# --- off, and by request


def test_statistics_off_count_nothing() -> None:
    """Growth, reuse, copies, suspensions, movement: every reading is zero, and no id becomes dirty."""
    with rig_of(blocks(4, host=4, stats=False)) as rig:
        seed(rig, 0, 9)
        cache = open_cache(rig, toks(0, 10), id=5)
        assert cache.resize(12)
        cache.suspend()
        hog = open_cache(rig)
        assert hog.resize(16)
        hog.close()
        assert cache.resume(rig.stream)
        assert rig.manager.get_dirty_stats_kv_cache_ids() == set()
        assert cache.commit_pending_stats() == KVCacheStatsDelta()
        assert rig.manager.get_committed_stats() == KVCacheStatsDelta()
        assert rig.manager.get_and_reset_iteration_stats() == {}
        assert rig.manager.get_and_reset_iteration_reused_blocks_by_level() == {}
        assert rig.manager.get_and_reset_iteration_cached_tokens_by_level() == [0, 0]
        assert rig.manager.get_and_reset_iteration_suspend_resume_stats() == (0, 0)
        rig.manager.record_request_suspended()
        rig.manager.record_request_resumed()
        assert rig.manager.get_and_reset_iteration_suspend_resume_stats() == (0, 0)
        assert rig.manager.movement.pages_moved(0, 1) > 0, "pages moved all the same"


@pytest.mark.parametrize("enabled", [False, True])
def test_request_statistics_by_request(enabled: bool) -> None:
    """enable_request_stats gives the request's delta although the manager counts nothing, which has a switch of its own."""
    with rig_of(blocks(8, stats=enabled)) as rig:
        seed(rig, 0, 8)
        cache = open_cache(rig, toks(0, 8), request_stats=True)
        assert cache.resize(12)
        before = rig.manager.get_committed_stats()
        assert cache.commit_pending_stats() == request(1, 0, 2)
        after = rig.manager.get_committed_stats()
        after.subtract(before)
        assert after == (request(1, 0, 2) if enabled else request(0, 0))
        assert (rig.manager.get_and_reset_iteration_stats() != {}) == enabled


def test_excluded_requests_count_nowhere() -> None:
    """The id 2^64-1 of a padding dummy: its delta is zero, all sums stay as they are, and it is never dirty."""
    dummy = 2**64 - 1
    with rig_of(blocks(8)) as rig:
        rig.manager.mark_stats_excluded(dummy)
        cache = open_cache(rig, toks(0, 8), id=dummy)
        assert cache.resize(8)
        assert rig.manager.get_dirty_stats_kv_cache_ids() == set()
        assert cache.commit_pending_stats().empty
        cache.suspend()
        assert cache.resume(rig.stream)
        assert rig.manager.get_committed_stats().empty
        assert rig.manager.get_and_reset_iteration_stats() == {}
        assert rig.manager.get_and_reset_iteration_suspend_resume_stats() == (0, 0)
        rig.manager.clear_stats_excluded(dummy)
        assert cache.resize(12)
        assert rig.manager.get_dirty_stats_kv_cache_ids() == {dummy}
        assert cache.commit_pending_stats() == request(1, 1)


def test_suspensions_and_resumes() -> None:
    """Counted but for the first resume; what the engine records by other means adds; read once. Reuse counts once."""
    with rig_of(blocks(8)) as rig:
        seed(rig, 0, 8)
        cache = open_cache(rig, toks(0, 8))
        reused = cache.commit_pending_stats().reused_blocks
        assert rig.manager.get_and_reset_iteration_suspend_resume_stats() == (0, 0)
        cache.suspend()
        assert cache.resume(rig.stream)
        rig.manager.record_request_resumed()
        rig.manager.record_request_resumed()
        reused += cache.commit_pending_stats().reused_blocks
        assert reused == 2
        assert rig.manager.get_and_reset_iteration_suspend_resume_stats() == (1, 3)
        assert rig.manager.get_and_reset_iteration_suspend_resume_stats() == (0, 0)


# --- beams and forks


def test_beams_count_each_page() -> None:
    """A 4-token prompt widened to 2: beam 1 has a page in block 1 only; growth counts once a beam."""
    with rig_of(blocks(16)) as rig:
        cache = open_cache(rig, toks(0, 4))
        assert cache.resize(4)
        cache.commit(toks(0, 4))
        assert cache.commit_pending_stats() == request(1, 1)
        cache.beam_width = 2
        assert cache.commit_pending_stats().empty, "full history is shared"
        assert cache.resize(8)
        group = LayerGroupId(0)
        assert list(cache.get_aggregated_page_indices(group, 0, True)) != []
        assert [page >= 0 for page in cache.get_aggregated_page_indices(group, 1)] == [False, True]
        assert cache.commit_pending_stats() == request(2, 0)
        assert iteration(rig).iter_gen_alloc_blocks == 2
        assert cache.resize(12)
        assert cache.resize(8)
        assert cache.commit_pending_stats().empty


def test_widening_counts_its_copies_and_shrinking_takes_back_the_rest() -> None:
    """6 tokens in 16 of capacity, widened to 3: a copy of block 1 and pages of blocks 2, 3 for each further beam."""
    with rig_of(blocks(16)) as rig:
        cache = open_cache(rig)
        assert cache.resize(16)
        cache.commit(toks(0, 6))
        assert cache.commit_pending_stats() == request(4, 4)
        forget(rig)
        cache.beam_width = 3
        assert cache.resize(8)  # all beams give up blocks 2 and 3
        assert cache.commit_pending_stats() == request(2, 0)
        delta = iteration(rig)
        assert (delta.iter_intra_device_copy_blocks, delta.iter_alloc_total_blocks) == (2, 2)
        assert cache.resize(12)
        assert cache.commit_pending_stats() == request(3, 3)


def test_a_fork_counts_what_it_takes_itself() -> None:
    """It reuses nothing from the tree; its private copy of the last block is taken and not missed; its growth is its own."""
    with rig_of(blocks(16)) as rig:
        cache = open_cache(rig, toks(0, 6), id=1)
        assert cache.resize(6)
        cache.commit(toks(0, 6))
        cache.commit_pending_stats()
        forget(rig)
        twin = cache.fork(2)
        rig.own(twin)
        assert twin.commit_pending_stats().empty
        assert twin.resume(rig.stream)
        assert rig.manager.get_dirty_stats_kv_cache_ids() == {2}
        assert twin.commit_pending_stats() == request(1, 0)
        assert iteration(rig).iter_intra_device_copy_blocks == 1
        assert rig.manager.get_and_reset_iteration_suspend_resume_stats() == (0, 0), "the first resume is none"
        assert twin.resize(12)
        assert twin.resize(8)
        assert twin.commit_pending_stats().empty
        assert twin.resize(12)
        assert twin.commit_pending_stats() == request(1, 0)
        assert iteration(rig).iter_gen_alloc_blocks == 1


def test_dummies_do_not_teach_the_rebalancing() -> None:
    """A long warm-up request that is excluded leaves the shares as they are; the same request, counted, does not."""
    layers = [attention(0, 256 * KIB, window=128), attention(1, 512 * KIB)]
    config = replace(
        model(layers, tokens_per_block=4, gpu=256 * MIB, max_util=1.0),
        rebalance_cooldown_secs=0.0,
        rebalance_target_ratio_update_interval=1,
    )
    with Rig(config, engine=False) as rig:
        introspection.set_num_sampled_kv_caches(rig.manager, 2001)
        rig.manager.mark_stats_excluded(7)
        for number, expected in ((7, False), (8, True)):
            cache = open_cache(rig, id=number)
            assert cache.resize(64 * 4, 64 * 4)
            cache.close()
            assert rig.manager.need_adjustment is expected
