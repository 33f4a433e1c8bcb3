"""What moved between tiers and what was dropped, by any cause: per life cycle, per tier, in blocks and bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_cache_manager_v2 import GPU_LEVEL, LifeCycleId, PageDataLostError, introspection
from tests.statistics.helpers import blocks, forget, iteration, open_cache, rig_of, seed, suspended_cache
from tests.support.models import GRAIN, hybrid, small
from tests.support.rig import DISK, HOST, Rig, toks


def press(rig: Rig, count: int) -> None:
    """Take so many GPU blocks for a moment."""
    cache = open_cache(rig)
    assert cache.resize(count * rig.tokens_per_block)
    cache.close()


# --- drops, by tier


def test_a_drop_without_a_colder_tier_is_the_gpu_s() -> None:
    """One tier: what makes room is dropped from the GPU, and never as a host drop."""
    with rig_of(blocks(2)) as rig:
        seed(rig, 0, 8)
        press(rig, 2)
        delta = iteration(rig)
        assert (delta.iter_gpu_dropped_blocks, delta.iter_host_dropped_blocks, delta.iter_disk_dropped_blocks) == (2, 0, 0)
        assert delta.iter_host_dropped_bytes == 0
        assert delta.iter_offload_blocks == 0


def test_a_drop_from_the_host_is_the_host_s() -> None:
    """Two tiers: the GPU offloads, the host drops."""
    with rig_of(blocks(2, host=2)) as rig:
        seed(rig, 0, 8)
        press(rig, 2)
        assert iteration(rig).iter_offload_blocks == 2
        assert str(rig.manager.movement).startswith("<pages moved between levels {0->1: 2}, dropped {}, lost 0")
        seed(rig, 100, 108)
        press(rig, 2)
        delta = iteration(rig)
        assert (delta.iter_gpu_dropped_blocks, delta.iter_host_dropped_blocks, delta.iter_disk_dropped_blocks) == (0, 2, 0)
        assert delta.iter_host_dropped_bytes == 2 * GRAIN
        assert (delta.iter_offload_blocks, delta.iter_offload_bytes) == (2, 2 * GRAIN)


def test_a_drop_from_the_disk_is_the_disk_s(tmp_path: Path) -> None:
    """Three tiers: the GPU offloads, the host passes on (which is counted nowhere), the disk drops."""
    with rig_of(blocks(2, host=2, disk=(str(tmp_path), 2))) as rig:
        for turn in range(2):
            seed(rig, 100 * turn, 100 * turn + 8)
            press(rig, 2)
            delta = iteration(rig)
            assert (delta.iter_gpu_dropped_blocks, delta.iter_host_dropped_blocks) == (0, 0)
            assert delta.iter_disk_dropped_blocks == 0
            assert delta.iter_offload_blocks == 2
        seed(rig, 900, 908)
        press(rig, 2)
        assert iteration(rig).iter_disk_dropped_blocks == 2
        assert rig.manager.movement.pages_moved(HOST, DISK) == 4


def test_dropped_from_the_host_before_reuse() -> None:
    """Pages p and q are offloaded; p is onloaded again; q is dropped from the host: one block, its bytes. p counts nowhere."""
    with rig_of(blocks(2, host=2)) as rig:
        seed(rig, 0, 4)  # p
        seed(rig, 100, 104)  # q
        press(rig, 2)
        open_cache(rig, toks(0, 4)).close()
        delta = iteration(rig)
        assert (delta.iter_offload_blocks, delta.iter_onboard_blocks, delta.iter_host_dropped_blocks) == (2, 1, 0)
        for beg in (200, 300, 400):  # at the third, q is the oldest page of a full host
            cache = open_cache(rig)
            assert cache.resize(4)
            cache.commit(toks(beg, beg + 4))
            cache.close()
        assert [rig.probe(toks(beg, beg + 4)) for beg in (0, 100, 200, 300, 400)] == [4, 0, 4, 4, 4]
        delta = iteration(rig)
        assert (delta.iter_host_dropped_blocks, delta.iter_host_dropped_bytes) == (1, GRAIN)


# --- both kinds of life cycles


def test_both_kinds_of_life_cycles_move_and_only_attention_is_committed() -> None:
    """Offload, host drop and onboard are recorded for attention and for recurrent state, in blocks and bytes; the committed
    totals know attention only."""
    with Rig(hybrid(2, 4, host_slots=4), engine=False) as rig:
        manager = rig.manager
        attention, state = LifeCycleId(0), LifeCycleId(1)
        size = [sum(item.slot_sizes) for item in manager.get_storage_statistics()]
        bytes_of = [size[group] for group in manager.get_life_cycle_pool_group_indices()]
        cache = open_cache(rig)
        assert cache.resize(8)
        cache.commit(toks(0, 8))  # 2 pages, the live state, and a snapshot of it
        delta = manager.get_and_reset_iteration_stats()[state]
        assert (delta.iter_intra_device_copy_blocks, delta.iter_intra_device_copy_bytes) == (1, bytes_of[1]), "the snapshot"
        cache.suspend()
        hogs = [open_cache(rig), open_cache(rig)]
        assert hogs[0].resize(16)
        moved = manager.get_and_reset_iteration_stats()
        assert (moved[attention].iter_offload_blocks, moved[attention].iter_offload_bytes) == (2, 2 * bytes_of[0])
        assert (moved[state].iter_offload_blocks, moved[state].iter_offload_bytes) == (2, 2 * bytes_of[1])
        for hog in hogs:
            hog.close()
        before = manager.get_committed_stats()
        assert cache.resume(rig.stream)
        moved = manager.get_and_reset_iteration_stats()
        assert (moved[attention].iter_onboard_blocks, moved[attention].iter_onboard_bytes) == (2, 2 * bytes_of[0])
        assert (moved[state].iter_onboard_blocks, moved[state].iter_onboard_bytes) == (1, bytes_of[1])
        for group, count in ((attention, 2), (state, 1)):
            assert moved[group].iter_alloc_total_blocks == moved[group].iter_alloc_new_blocks == count
        after = manager.get_committed_stats()
        after.subtract(before)
        assert (after.alloc_total_blocks, after.alloc_new_blocks, after.missed_blocks) == (2, 2, 0)
        cache.close()


def test_host_drops_of_both_kinds() -> None:
    """More prompts than the host holds: pages and snapshots are dropped there, each counted under its own life cycle."""
    with Rig(hybrid(2, 4, host_slots=2), engine=False) as rig:
        manager = rig.manager
        for turn in range(40):
            cache = open_cache(rig)
            assert cache.resize(8)
            cache.commit(toks(100 * turn, 100 * turn + 8))
            cache.close()
        moved = manager.get_and_reset_iteration_stats()
        for index, delta in moved.items():
            group = introspection.pool_group_index(manager, index)
            slot_bytes = sum(manager.get_storage_statistics(HOST)[group].slot_sizes)
            assert delta.iter_host_dropped_blocks > 0
            assert delta.iter_host_dropped_bytes == delta.iter_host_dropped_blocks * slot_bytes
        assert len(moved) == 2


def test_a_first_resume_counts_its_copies_in_every_life_cycle() -> None:
    """A hit at a snapshot inside a block: the attention page and the state are copied; only attention takes a block for it."""
    with Rig(hybrid(4, 8), engine=False) as rig:
        cache = open_cache(rig)
        assert cache.resize(6)
        cache.commit(toks(0, 6))
        cache.close()
        forget(rig)
        cache = open_cache(rig, toks(0, 6))
        delta = cache.commit_pending_stats()
        assert (delta.alloc_total_blocks, delta.missed_blocks, delta.reused_blocks) == (1, 0, 2)
        moved = rig.manager.get_and_reset_iteration_stats()
        assert [item.iter_intra_device_copy_blocks for item in moved.values()] == [1, 1]
        assert moved[LifeCycleId(1)].iter_alloc_total_blocks == 0


# --- work of the manager


def test_a_resize_of_the_gpu_is_counted() -> None:
    """Shrinking the GPU offloads 2 of 4 pages. Pages that only change their slots are not counted."""
    with rig_of(blocks(4, host=4)) as rig:
        seed(rig, 0, 4)
        seed(rig, 100, 116)
        forget(rig)
        assert rig.manager.resize(GPU_LEVEL, 2 * GRAIN)
        delta = iteration(rig)
        assert (delta.iter_offload_blocks, delta.iter_offload_bytes) == (2, 2 * GRAIN)
        assert delta.iter_intra_device_copy_blocks == 0
        assert rig.manager.get_storage_statistics(HOST)[0].evictable == 3


def test_a_resize_of_the_host_counts_its_drops() -> None:
    with rig_of(blocks(2, host=4)) as rig:
        for turn in range(2):
            seed(rig, 100 * turn, 100 * turn + 8)
            press(rig, 2)
        forget(rig)
        assert rig.manager.resize(HOST, GRAIN)
        assert iteration(rig).iter_host_dropped_blocks == 3


def test_prefetches_are_counted(tmp_path: Path) -> None:
    """From disk to the host: blocks that a prefetch moved; to the GPU: onboarded, and no disk prefetch."""
    with rig_of(blocks(2, host=2, disk=(str(tmp_path), 4))) as rig:
        cache = open_cache(rig)
        assert cache.resize(8)
        cache.suspend()
        for turn in range(1, 4):
            seed(rig, 100 * turn, 100 * turn + 8)
            press(rig, 2)
        assert introspection.active_page_stats(cache)[0] == [0, 0, 2]
        forget(rig)
        assert cache.prefetch(HOST)
        assert rig.manager.get_and_reset_iteration_disk_prefetch_blocks() == 2
        assert rig.manager.get_and_reset_iteration_disk_prefetch_blocks() == 0
        assert iteration(rig).iter_onboard_blocks == 0
        assert cache.prefetch(GPU_LEVEL)
        assert rig.manager.get_and_reset_iteration_disk_prefetch_blocks() == 0
        assert iteration(rig).iter_onboard_blocks == 2


def test_a_prefetch_without_room_counts_nothing() -> None:
    with rig_of(blocks(2, host=4)) as rig:
        cache = open_cache(rig)
        assert cache.resize(8)
        cache.suspend()
        hog = open_cache(rig)
        assert hog.resize(8)
        forget(rig)
        assert not cache.prefetch(GPU_LEVEL)
        assert rig.manager.get_and_reset_iteration_stats() == {}


def test_reading_movement_resets_it_and_the_totals_go_on() -> None:
    """The second reading is empty; the movement table and the committed totals only grow."""
    with rig_of(blocks(2, host=4)) as rig:
        seed(rig, 0, 8)
        totals = []
        for _turn in range(3):
            press(rig, 2)
            open_cache(rig, toks(0, 8)).close()
            assert iteration(rig).iter_onboard_blocks == 2
            assert rig.manager.get_and_reset_iteration_stats() == {}
            totals.append((rig.manager.get_committed_stats().alloc_total_blocks, rig.manager.movement.pages_moved(1, 0)))
        assert totals == [(2, 2), (4, 4), (6, 6)]


def test_a_page_lost_by_a_failed_read_is_counted_as_lost(tmp_path: Path) -> None:
    """Neither a drop nor a hit for ever: the loss has a counter of its own."""
    with rig_of(blocks(2, host=2, disk=(str(tmp_path), 4))) as rig:
        cache = open_cache(rig)
        assert cache.resize(4)
        cache.suspend()
        for turn in range(1, 4):
            seed(rig, 100 * turn, 100 * turn + 8)
            press(rig, 2)
        forget(rig)
        rig.driver.fail("read_file", 1, 1)
        assert cache.prefetch(HOST)
        rig.driver.synchronize()
        with pytest.raises(PageDataLostError):
            cache.resume(rig.stream)
        delta = iteration(rig)
        assert delta.iter_lost_blocks == 1
        assert delta.iter_disk_dropped_blocks == 0
        cache.close()


def test_small_slots_count_in_bytes() -> None:
    """Bytes are blocks times the slot size of the pool group, whatever that is."""
    with Rig(small(4, host_slots=4), engine=False) as rig:
        (stats,) = rig.manager.get_storage_statistics()
        seed(rig, 0, 16)
        press(rig, 3)
        delta = iteration(rig)
        assert delta.iter_offload_bytes == 3 * sum(stats.slot_sizes)


def test_a_cache_created_and_closed_moves_nothing() -> None:
    """Creation only holds: no page moves, nothing is dropped."""
    with rig_of(blocks(2, host=2)) as rig:
        seed(rig, 0, 8)
        press(rig, 2)
        forget(rig)
        suspended_cache(rig, toks(0, 8)).close()
        assert rig.manager.get_and_reset_iteration_stats() == {}
