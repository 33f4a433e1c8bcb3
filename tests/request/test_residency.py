"""The levels of a request's pages, in rare situations."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import GPU_LEVEL, KVCache
from tests.support.models import Kind, small
from tests.support.rig import GPU, Rig, toks


@pytest.mark.parametrize("kinds", [("full",), ("full", (8, 0))])
def test_a_match_that_fills_the_gpu_takes_its_last_block_instead_of_copying_it(kinds: tuple[Kind, ...]) -> None:
    """15 cached tokens in 4 slots: the last block and a private copy of it never fit side by side, so it leaves the tree."""
    slots = 4 if len(kinds) == 1 else 7  # the window needs two of its blocks at the end, three on the way
    with Rig(small(slots, kinds=kinds)) as rig:
        rig.seed(toks(0, 15), chunk=4)
        request = rig.start(toks(0, 15))
        assert len(request.tokens) == 15
        assert rig.probe(toks(0, 15)) == 12, "the last block is the request's own now"
        assert request.advance(toks(15, 16))
        request.check()
        request.close()
        assert rig.probe(toks(0, 16)) == 16


def test_a_last_block_that_another_request_holds_is_not_taken() -> None:
    """Two requests matched the same full GPU: neither may take the other's page, and the refusal changes nothing."""
    with Rig(small(4)) as rig:
        rig.seed(toks(0, 15))
        first, second = rig.create(toks(0, 15)), rig.create(toks(0, 15))
        assert first.resume(rig.stream) is False
        assert first.last_shortage is not None
        assert first.last_shortage.permanent
        assert rig.probe(toks(0, 15)) == 15
        second.close()
        assert first.resume(rig.stream)


@pytest.mark.parametrize("seed", range(4))
def test_is_loaded_says_whether_a_resume_would_wait(seed: int, tmp_path: object) -> None:
    """After prefetch(GPU_LEVEL) a cache is loaded once its pages' bytes have arrived; asking never waits for them."""
    with Rig(small(4, host_slots=4, disk=(str(tmp_path), 8)), schedule="random", seed=seed) as rig:
        rig.seed(toks(0, 16))
        rig.seed(toks(100, 116))
        rig.seed(toks(200, 216))
        cache = rig.create(toks(0, 16))
        assert cache.num_committed_tokens == 16
        assert not loaded(cache)
        assert cache.prefetch(GPU_LEVEL)
        rig.driver.synchronize()
        assert loaded(cache)
        assert cache.resume(rig.stream)


def test_pages_are_counted_by_layer_group_and_level(tmp_path: object) -> None:
    """Full attention, a window and a state: what a match needs, where it is; on the GPU after the resume."""
    with Rig(small(16, kinds=("full", (8, 0), "ssm"), host_slots=8, disk=(str(tmp_path), 16))) as rig:
        rig.seed(toks(0, 16))
        assert rig.create(toks(50, 60)).pages_by_level == [[0, 0, 0]] * 3
        cache = rig.create(toks(0, 16))
        assert cache.pages_by_level == [[4, 0, 0], [2, 0, 0], [1, 0, 0]]
        rig.seed(toks(100, 132), chunk=4)  # offloads pages
        counts = cache.pages_by_level
        assert [sum(row) for row in counts] == [4, 2, 1]
        assert sum(row[0] for row in counts) < 7
        assert cache.resume(rig.stream)
        assert cache.pages_by_level == [[4, 0, 0], [2, 0, 0], [1, 0, 0]]


def test_pages_held_until_their_commit_are_not_counted() -> None:
    """They are stale: they lie between the sinks and the window."""
    with Rig(small(16, kinds=["full", (4, 4)]), engine=False) as rig:
        cache = rig.open()
        assert cache.resize(16)
        assert cache.resize(16, 16)
        assert cache.pages_by_level == [[4], [2]]


def loaded(cache: KVCache) -> bool:
    return cache.is_loaded


def test_is_loaded_waits_behind_a_closed_gate() -> None:
    """A page is not loaded while earlier work still writes to its slot."""
    with Rig(small(4, host_slots=4)) as rig:
        rig.seed(toks(0, 16))
        blocker = rig.take(4)
        gate = rig.driver.gate(rig.stream)
        blocker.close()
        cache = rig.create(toks(0, 16))
        assert cache.prefetch(GPU)
        assert not loaded(cache)
        gate.open()
        rig.driver.synchronize()
        assert loaded(cache)


def test_a_wider_snapshot_takes_the_slot_of_the_one_that_it_replaces() -> None:
    """With no free slot, a snapshot at 3 tokens replaces the pages of the one at 2 in the same block, not another prompt's."""
    with Rig(small(12, kinds=("full", "ssm"))) as rig:
        rig.seed(toks(100, 104))
        request = rig.start()
        assert request.advance(toks(0, 2))
        free = rig.counts().free
        waste = rig.take(free - 1)  # every slot left: one more is the state of the taker
        assert request.advance(toks(2, 3))
        assert rig.probe(toks(100, 104)) == 4, "the endpoint of the other prompt is still there"
        assert rig.probe(toks(0, 3)) == 3
        waste.close()
        request.close()


def test_slots_stay_busy_where_the_device_neither_marks_a_stream_nor_waits_for_it() -> None:
    """A kernel of a closed request has not run yet; the next user of its slots runs after it."""
    with Rig(small(4), schedule="eager") as rig:
        request = rig.start()
        assert request.advance(toks(0, 16))
        driver = rig.driver
        ran: list[str] = []
        gate = driver.gate(rig.stream)
        driver.launch(rig.stream, lambda: ran.append("first"))
        driver.fail("record_event", 1, None)
        driver.fail("synchronize", 1, None)
        request.cache.close()
        driver.heal()
        other = driver.create_stream()
        cache = rig.create([])
        assert cache.resume(other)
        assert cache.resize(16)
        driver.launch(other, lambda: ran.append("second"))
        gate.open()
        driver.synchronize()
        assert ran == ["first", "second"]
        cache.close()
        driver.destroy_stream(other)
