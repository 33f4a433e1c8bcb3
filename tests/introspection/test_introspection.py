"""What tests and tools may ask about the inside: each answer against what the public face says, or against arithmetic."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import (
    BatchDesc,
    CacheLevel,
    ConfigError,
    KVCacheDesc,
    KVCacheEventManager,
    KVCacheManager,
    OutOfPagesError,
    PageStatus,
    ReuseScope,
    SwaScratchReuseConfig,
    introspection,
)
from kv_cache_manager_v2.listener import CachedBlock, CacheListener
from tests.support import inside
from tests.support.models import KIB, MIB, attention, model, small, ssm
from tests.support.rig import DISK, GPU, HOST, Rig, toks

FULL_AND_WINDOW = ("full", (8, 0))


# --- slots


def test_slot_counts_are_the_public_storage_statistics() -> None:
    """Slot counts of a level and pool group equal the public statistics, and add up."""
    with Rig(small(8, host_slots=4)) as rig:
        rig.seed(toks(0, 12))
        request = rig.start(toks(0, 8))
        assert request.cache.resize(12)
        for level in (GPU, HOST):
            (public,) = introspection.storage_statistics(rig.manager, level)
            counts = introspection.slot_counts(rig.manager, level)
            assert counts == (public.total, public.free, public.evictable, public.unavailable)
            assert counts.total == counts.free + counts.evictable + counts.unavailable
        assert introspection.slot_counts(rig.manager) == (8, 4, 1, 3)
        assert introspection.all_slot_counts(rig.manager) == [introspection.slot_counts(rig.manager, level) for level in (0, 1)]
        assert introspection.storage_utilization(rig.manager) == [3 / 8]
        assert introspection.storage_utilization(rig.manager, HOST) == [0.0]
        with pytest.raises(ConfigError, match="level 2"):
            introspection.storage_utilization(rig.manager, DISK)


# --- requests


def test_active_page_stats_count_a_request_s_pages_by_level() -> None:
    """Pages are counted on the level on which they lie, and none that could be evicted is missing from its queue."""
    with Rig(small(4, host_slots=4)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 12))
        assert introspection.active_page_stats(request.cache) == ([3, 0], [0, 0])
        request.suspend()
        other = rig.take(4)
        assert introspection.active_page_stats(request.cache) == ([0, 3], [0, 0])
        other.close()
        assert request.resume()
        assert introspection.active_page_stats(request.cache) == ([3, 0], [0, 0])


def test_request_pages_and_their_records() -> None:
    """A page's record names its slot and its locks and holds; recurrent life cycles have no page for each block."""
    config = model([attention(0, 4 * KIB), ssm(1, 4 * KIB)], tokens_per_block=4, gpu=8 * MIB)
    with Rig(config) as rig:
        request = rig.start()
        assert request.advance(toks(0, 6))
        pages = introspection.request_pages(request.cache, 0)
        info = introspection.page_info(pages[0])
        assert info is not None
        assert (info.life_cycle, info.level, info.coverage, info.status, info.locks) == (0, 0, 4, PageStatus.LOCKED, 1)
        assert info.slot == rig.indices(request.cache)[0]
        assert info.linked
        last = introspection.page_info(pages[1])
        assert last is not None
        assert not last.linked
        assert introspection.page_info(None) is None
        state = introspection.page_info(introspection.state_page(request.cache))
        assert state is not None
        assert state.slot == request.cache.get_ssm_block_base_index(rig.group(1))
        with pytest.raises(ConfigError, match="life cycle 1 is recurrent"):
            introspection.request_pages(request.cache, 1)


def test_committed_page_is_linked_until_the_tree_loses_it() -> None:
    """True while the tree lists the request's page, False once it does not; None for blocks that are not committed or stale."""
    with Rig(small(16, kinds=FULL_AND_WINDOW)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 18))
        cache = request.cache
        full, window = rig.group(0), rig.group(1)
        assert introspection.committed_page_is_linked(cache, 0, full) is True
        assert introspection.committed_page_is_linked(cache, 0, window) is None, "stale"
        assert introspection.committed_page_is_linked(cache, 3, window) is True
        assert introspection.committed_page_is_linked(cache, 4, full) is False, "a partial block is not in the tree yet"
        assert introspection.committed_page_is_linked(cache, 5, full) is None
        assert introspection.committed_page_is_linked(cache, -1, full) is None
        path = introspection.tree_path(rig.manager, toks(0, 16))
        page = introspection.page_of(path[3], window)
        assert page is not None
        inside.drop(rig.manager, page)
        assert introspection.committed_page_is_linked(cache, 3, window) is False


def test_commits_are_allowed_until_they_stop() -> None:
    with Rig(small(8)) as rig:
        first, second, third = rig.start(), rig.start(), rig.start()
        caches = [first.cache, second.cache, third.cache]
        assert all(introspection.is_commit_allowed(cache) for cache in caches)
        first.cache.stop_committing()
        second.cache.commit([], None, True)
        third.close()
        assert not any(introspection.is_commit_allowed(cache) for cache in caches)


# --- the tree


def test_tree_questions() -> None:
    """Blocks, roots, coverages and levels along a path; all pages are droppable once every request is closed."""
    with Rig(small(4, host_slots=4, kinds=("full",))) as rig:
        rig.seed(toks(0, 10))
        rig.seed(toks(0, 6), ReuseScope(7))
        manager = rig.manager
        assert (introspection.num_tree_blocks(manager), introspection.num_roots(manager)) == (5, 2)
        assert len(introspection.all_tree_blocks(manager)) == 5
        assert introspection.path_coverage(manager, toks(0, 12), 0) == [4, 4, 2]
        assert sum(introspection.path_levels(manager, toks(0, 12))) == 1, "the fifth block pushed one page to the host"
        assert [block.num_tokens for block in introspection.tree_path(manager, toks(0, 6), ReuseScope(7))] == [4, 2]
        assert introspection.tree_path(manager, [99]) == []
        assert introspection.all_tree_pages_droppable(manager)
        cache = rig.create(toks(0, 8))
        assert not introspection.all_tree_pages_droppable(manager)
        cache.close()
        assert introspection.all_tree_pages_droppable(manager)


def test_reuse_match_pages_names_slot_and_coverage() -> None:
    """The matched length and, block by block, the slot and coverage of one life cycle's page; partial blocks only if asked."""
    with Rig(small(32, kinds=FULL_AND_WINDOW, backoff=1)) as rig:
        rig.seed(toks(0, 18))
        manager = rig.manager
        full, window = rig.group(0), rig.group(1)
        tokens, pages = introspection.reuse_match_pages(manager, None, toks(0, 17), full, True)
        assert tokens == 17
        assert [page[1] for page in pages if page is not None] == [4, 4, 4, 4, 2]
        assert len({page[0] for page in pages if page is not None}) == 5
        tokens, pages = introspection.reuse_match_pages(manager, None, toks(0, 17), window)
        assert tokens == 16
        assert [page is not None and page[1] for page in pages] == introspection.path_coverage(manager, toks(0, 16), window)
        assert introspection.reuse_match_depths(manager, None, toks(0, 17)) == (16, 16, 17, 17), "with the manager's back-off"


def test_planned_drops_are_counted_by_page() -> None:
    """Each plan counts once on the window pages of its endpoint, and no more once it is dropped."""
    with Rig(small(32, kinds=FULL_AND_WINDOW)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 16))
        request.cache.stop_committing()
        handle = request.cache.plan_committed_block_drop()
        assert handle is not None
        counts = introspection.reuse_match_planned_drop_counts(rig.manager, None, toks(0, 16), rig.group(1))
        assert counts == [0, 0, 1, 1]
        assert introspection.reuse_match_planned_drop_counts(rig.manager, None, toks(0, 16), rig.group(0)) == [0] * 4
        handle.drop()
        assert introspection.reuse_match_planned_drop_counts(rig.manager, None, toks(0, 16), rig.group(1)) == [0] * 4


# --- staged blocks


class Notes(CacheListener):
    """Writes down which pages were stored, and whether they cover their blocks."""

    def __init__(self) -> None:
        self.stored: list[tuple[list[int | bytes], int, bool]] = []

    def page_stored(self, block: CachedBlock, life_cycle: int, level: int, priority: int, covers_block: bool) -> None:
        self.stored.append((block.token_list(), life_cycle, covers_block))

    def page_removed(self, block: CachedBlock, life_cycle: int) -> None:
        pass

    def block_removed(self, block: CachedBlock) -> None:
        pass

    def page_moved(self, block: CachedBlock, life_cycle: int, source: int, destination: int) -> None:
        pass


def test_a_staged_block_is_a_block_of_the_tree() -> None:
    """It has GPU pages of the coverages asked for, a key chained from its parent's, and leaves with its descendants."""
    with Rig(small(8, kinds=FULL_AND_WINDOW)) as rig:
        manager = rig.manager
        before = introspection.all_slot_counts(manager)
        first = introspection.make_test_block(manager, toks(0, 4), [4, 4], None, ReuseScope(5))
        second = introspection.make_test_block(manager, toks(4, 6), [2, 1], first)
        assert rig.probe(toks(0, 6), ReuseScope(5)) == 5
        assert introspection.path_coverage(manager, toks(0, 6), 0) == []
        assert introspection.test_block_key(second) != introspection.test_block_key(first)
        notes = Notes()
        introspection.event_manager_add_stored_block(notes, second)
        introspection.event_manager_add_stored_life_cycle(notes, first, 1)
        assert notes.stored == [([4, 5], 0, True), ([4, 5], 1, False), ([0, 1, 2, 3], 1, True)]
        manager.check_invariants()
        introspection.close_test_block(first)
        introspection.close_test_block(first)
        introspection.close_test_block(second)
        assert (introspection.num_tree_blocks(manager), introspection.num_roots(manager)) == (0, 0)
        assert introspection.all_slot_counts(manager) == before


def test_an_event_manager_is_told_of_staged_blocks() -> None:
    """By block, by page, and of a removal; a page that covers its block in part is not told, and anything else is refused."""
    with Rig(small(8, kinds=FULL_AND_WINDOW)) as rig:
        first = introspection.make_test_block(rig.manager, toks(0, 4), [4, 4])
        second = introspection.make_test_block(rig.manager, toks(4, 6), [2, 1], first)
        events = KVCacheEventManager(100)
        events.add_stored_life_cycle_event_from_block(first, 1)
        events.add_stored_block_event_from_block(second)
        events.add_stored_block_event_from_block(second)
        events.add_removed_life_cycle_event(introspection.test_block_key(second), 0)
        events.add_removed_life_cycle_event(introspection.test_block_key(second), 1)
        events.flush_iteration_events()
        kinds = [(type(event.data).__name__, event.layer_group_id) for event in events.get_latest_events(0)]
        assert kinds == [("KVCacheStoredData", 1), ("KVCacheStoredData", 0), ("KVCacheRemovedData", 0)]
        for wrong in (5, "block", rig.manager):
            with pytest.raises(ConfigError, match="must be a block of the tree"):
                events.add_stored_block_event_from_block(wrong)
        introspection.close_test_block(first)


def test_a_staged_block_may_have_no_page() -> None:
    with Rig(small(8)) as rig:
        block = introspection.make_test_block(rig.manager, [1, 2], [0])
        assert introspection.num_tree_blocks(rig.manager) == 1
        introspection.close_test_block(block)
        assert introspection.num_tree_blocks(rig.manager) == 0


def test_blocks_that_cannot_be_staged_are_refused_and_leave_nothing() -> None:
    """No tokens, too many, a wrong list of coverages, a coverage out of range, a partial parent, a block that is there."""
    with Rig(small(4)) as rig:
        manager = rig.manager
        parent = introspection.make_test_block(manager, toks(0, 4), [4])
        partial = introspection.make_test_block(manager, toks(4, 7), [3], parent)
        before = (introspection.num_tree_blocks(manager), introspection.num_roots(manager))
        make = introspection.make_test_block
        for tokens, coverages, above, match in (
            ([], [0], None, "a block of 0 tokens"),
            (toks(0, 5), [4], None, "a block of 5 tokens"),
            (toks(50, 54), [4, 4], None, "2 coverages for 1"),
            (toks(50, 54), [5], None, "coverage 5"),
            (toks(50, 54), [-1], None, "coverage -1"),
            (toks(50, 54), [4], partial, "has no children"),
            (toks(0, 4), [4], None, "already"),
            (toks(4, 6), [2], parent, "covers"),
        ):
            with pytest.raises(ConfigError, match=match):
                make(manager, tokens, coverages, above)
        with pytest.raises(ValueError, match="already"):
            make(manager, toks(0, 4), [4], None)
        assert (introspection.num_tree_blocks(manager), introspection.num_roots(manager)) == before
        rest = rig.take(4)  # which drops the pages of the test blocks
        with pytest.raises(OutOfPagesError):
            make(manager, toks(60, 64), [4])
        rest.close()
        with pytest.raises(ConfigError, match="left the tree"):
            make(manager, toks(4, 6), [2], parent)
        introspection.close_test_block(partial)
        introspection.close_test_block(parent)


def test_a_parent_whose_page_makes_room_cannot_stay_the_parent() -> None:
    """The child's only room is the parent's page: refused, and both are gone."""
    with Rig(small(1)) as rig:
        parent = introspection.make_test_block(rig.manager, toks(0, 4), [4])
        with pytest.raises(OutOfPagesError, match="too few slots for the test block"):
            introspection.make_test_block(rig.manager, toks(4, 8), [4], parent)
        assert introspection.num_tree_blocks(rig.manager) == 0


# --- sizing


def two_groups() -> Rig:
    layers = [attention(0, 768 * KIB, window=128, sink=32), attention(1, 1280 * KIB)]
    return Rig(model(layers, tokens_per_block=32, gpu=128 * MIB), engine=False)


def wants_adjustment(manager: KVCacheManager) -> bool:
    return manager.need_adjustment


def test_a_rebalance_can_be_forced() -> None:
    """The first target is the present share times the skew, normalised; samples and cooldown are as if they were fulfilled."""
    with two_groups() as rig:
        manager = rig.manager
        ratio = introspection.current_gpu_ratio(manager)
        assert sum(ratio) == pytest.approx(1.0)
        assert not wants_adjustment(manager)
        introspection.force_rebalance_precondition(manager, 2.0)
        assert wants_adjustment(manager)
        introspection.set_num_sampled_kv_caches(manager, 0)
        assert not wants_adjustment(manager)
        introspection.set_num_sampled_kv_caches(manager, 10**6)
        assert wants_adjustment(manager)
        introspection.set_last_adjustment_time(manager, manager.tuner.clock())
        assert not wants_adjustment(manager)
        introspection.set_last_adjustment_time(manager, -1e9)
        assert wants_adjustment(manager)
        introspection.set_target_ratio_list_gpu(manager, ratio)
        assert not wants_adjustment(manager)
        introspection.force_rebalance_precondition(manager, 2.0)
        manager.adjust()
        wanted = 2 * ratio[0] / (1 + ratio[0])
        assert introspection.current_gpu_ratio(manager)[0] == pytest.approx(wanted, abs=0.05)
        with pytest.raises(ConfigError, match="2 pool groups"):
            introspection.set_target_ratio_list_gpu(manager, [1.0])


def test_a_rebalance_needs_two_pool_groups() -> None:
    with Rig(small(4)) as rig, pytest.raises(ValueError, match="two pool groups"):
        introspection.force_rebalance_precondition(rig.manager)


def test_grains_and_slots() -> None:
    """157 slots of two pools convert to grains and back to at least as many without using more grains; floors are kept exactly."""
    sizes = [16252928, 4063232]
    grains = introspection.grains_for_slots(157, sizes, 16 * MIB)
    slots, used = introspection.grains_to_slots(grains, sizes, 16 * MIB)
    assert slots >= 157
    assert used <= grains
    assert introspection.grains_for_slots(slots + 1, sizes, 16 * MIB) > grains
    floors = [157, 3907, 157]
    three = [[16252928, 4063232], [1 << 16], [1 << 20, 1 << 18]]
    quota = sum(introspection.grains_for_slots(count, of, 2 * MIB) for count, of in zip(floors, three, strict=True)) * 2 * MIB
    split = introspection.ratio_to_slot_count_list(quota, three, [0.2, 0.5, 0.3], 2 * MIB, floors)
    assert all(got >= floor for got, floor in zip(split, floors, strict=True))


def test_slots_for_a_batch() -> None:
    """By pool group, with this manager's block length and scratch setting or with others."""
    with two_groups() as rig:
        batch = BatchDesc([KVCacheDesc(1024, 0)] * 2)
        assert introspection.compute_slots_for_batch(rig.manager, batch) == [64, 64]
        assert introspection.compute_slots_for_batch(rig.manager, batch, 64) == [32, 32]
        lent = introspection.compute_slots_for_batch(rig.manager, batch, None, SwaScratchReuseConfig(0))
        assert lent[0] <= 64
        assert lent[1] == 64


# --- life cycles


def test_life_cycles_by_kind() -> None:
    config = model([attention(0, 4 * KIB), attention(1, 8 * KIB, window=64), ssm(2, 4 * KIB)], gpu=8 * MIB)
    with Rig(config) as rig:
        manager = rig.manager
        assert introspection.attention_life_cycle_ids(manager) == [0, 1]
        assert introspection.swa_life_cycle_ids(manager) == [1]
        assert introspection.ssm_life_cycle_id(manager) == 2
        assert introspection.life_cycle_pool_group_indices(manager) == [0, 1, 0]
        assert [introspection.pool_group_index(manager, index) for index in range(3)] == [0, 1, 0]
        with pytest.raises(ConfigError, match="level 1"):
            introspection.pool_group_index(manager, 0, CacheLevel(1))
    with Rig(small(4)) as rig:
        assert introspection.ssm_life_cycle_id(rig.manager) is None
