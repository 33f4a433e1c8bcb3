"""Threads and streams: requests of different threads share the manager; what one stream does is ordered for another.

Waits are bounded by a watchdog: a hang is a failure, not a stuck suite.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kv_cache_manager_v2 import GPU_LEVEL, KVCache
from tests.support import inside
from tests.support.models import MIB, attention, model, small
from tests.support.rig import GPU, Rig, toks

WATCHDOG_S = 60


def run_all(jobs: list[Callable[[], None]]) -> None:
    """Run each job on a thread of its own; raise what any of them raised, or that one hangs."""
    failures: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WATCHDOG_S)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if failures:
        raise failures[0]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_no_lock_order_against_the_interpreter() -> None:
    """One thread serves requests whose priority callback runs Python; another toggles lengths, drops caches and plans without
    closing them, and reads statistics: nothing hangs, the callbacks ran, plans were made."""
    with Rig(small(64, kinds=["full", (8, 0)])) as rig:
        manager = rig.manager
        asked: list[int] = []
        plans: list[bool] = []

        def priority(ordinal: int, life_cycle: object) -> int:
            asked.append(ordinal)
            return 40

        def serve() -> None:
            stream = rig.stream
            for number in range(150):
                tokens = toks(number * 50, number * 50 + 12)
                cache = manager.create_kv_cache(None, tokens, number, priority)
                if cache.resume(stream) and cache.resize(12):
                    cache.commit(tokens[cache.num_committed_tokens :])
                    cache.suspend()
                cache.close()

        def meddle() -> None:
            cache = manager.create_kv_cache(None, None, 1_000_000)
            assert cache.resume(rig.stream)
            for number in range(250):
                cache.capacity = 4 + number % 8
                cache.history_length = min(4, cache.capacity)
            for _ in range(50):
                del cache
                cache = manager.create_kv_cache()
            for number in range(100):
                request = manager.create_kv_cache()
                if request.resume(rig.stream) and request.resize(8):
                    request.commit(toks(800_000 + number * 10, 800_008 + number * 10))
                    request.stop_committing()
                    plan = request.plan_committed_block_drop()
                    plans.append(plan is not None)
                    del plan
                request.close()
                manager.get_storage_statistics()
                manager.get_quota(GPU)
                manager.is_stats_excluded(number)
                manager.get_and_reset_iteration_stats()
            cache.close()

        run_all([serve, meddle])
        assert asked
        assert any(plans)
        rig.create().close()
        manager.check_invariants()


def test_probes_only_read() -> None:
    """8 threads probe an empty tree, 500 times each: all 0, nothing made; then probes while the quota is resized 50 times."""
    with Rig(model([attention(0, 64 << 10)], tokens_per_block=4, gpu=8 * MIB), engine=False) as rig:
        answers: list[int] = []
        before = (inside.num_tree_blocks(rig.manager), inside.num_roots(rig.manager), inside.all_counts(rig.manager))

        def probe() -> None:
            for _ in range(500):
                answers.append(rig.probe(toks(0, 32)))

        run_all([probe] * 8)
        assert answers == [0] * 4000
        assert (inside.num_tree_blocks(rig.manager), inside.num_roots(rig.manager), inside.all_counts(rig.manager)) == before
        cache = rig.open()
        assert cache.resize(32)
        cache.commit(toks(0, 32))
        cache.close()
        answers.clear()

        def resize() -> None:
            for turn in range(50):
                assert rig.manager.resize(GPU_LEVEL, (4 if turn % 2 else 8) * MIB)

        run_all([probe, probe, resize])
        assert answers == [32] * 1000


def test_shared_pages_are_read_from_many_threads() -> None:
    """256 blocks shared by 8 caches, a reader thread each: the same indices every time, and all structures agree afterwards."""
    with Rig(small(64, tokens_per_block=4), engine=False) as rig:
        blocks = 60
        first = rig.open()
        assert first.resize(4 * blocks)
        first.commit(toks(0, 4 * blocks))
        first.close()
        caches = [rig.create(toks(0, 4 * blocks)) for _ in range(8)]
        for cache in caches:
            assert cache.resume(rig.stream)
        expected = rig.indices(caches[0])
        group = rig.group(0)

        def read(cache: KVCache) -> Callable[[], None]:
            def job() -> None:
                for turn in range(300):
                    assert list(cache.get_aggregated_page_indices(group)) == expected
                    if turn % 50 == 0:
                        cache.suspend()
                        assert cache.resume()

            return job

        run_all([read(cache) for cache in caches])
        rig.manager.check_invariants()
        for cache in caches:
            cache.close()
        assert rig.counts().unavailable == 0


def test_threads_serve_their_own_requests() -> None:
    """8 threads, a request each at a time, under pressure: every request gets its tokens cached, and the invariants hold."""
    with Rig(small(32), engine=False) as rig:
        streams = [rig.new_stream() for _ in range(8)]

        def serve(index: int) -> Callable[[], None]:
            def job() -> None:
                for turn in range(40):
                    tokens = toks(1000 * index + 10 * turn, 1000 * index + 10 * turn + 10)
                    cache = rig.manager.create_kv_cache(None, tokens)
                    if cache.resume(streams[index]) and cache.resize(10):
                        cache.commit(tokens[cache.num_committed_tokens :])
                        assert cache.committed_tokens == tokens
                    cache.close()

            return job

        run_all([serve(index) for index in range(8)])
        rig.manager.check_invariants()
        assert rig.manager.num_open_caches == 0


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("where", ["gpu", "host"])
def test_one_event_covers_all_that_resume_queued(where: str, seed: int) -> None:
    """A partly matched block is copied when the request is admitted. What another stream writes to the copy after an event that was
    recorded behind resume() is never overwritten by it, in any legal order."""
    with Rig(small(4, host_slots=8), "random", seed) as rig:
        rig.seed(toks(0, 6))
        if where == "host":
            rig.take(4).close()
            assert inside.pages_by_level(rig.manager, toks(0, 6)) == [1, 1]
        request = rig.request(toks(0, 6))
        gate = rig.driver.gate(rig.stream)
        assert request.resume()
        event = rig.driver.create_event()
        rig.driver.record_event(event, rig.stream)
        receiver = rig.new_stream()
        rig.driver.wait_event(receiver, event)
        assert rig.engine is not None
        plane = rig.engine.planes[0]
        page = rig.indices(request.cache)[1]
        rig.driver.launch(receiver, lambda: plane.memory[page].fill(7))
        gate.open()
        rig.driver.synchronize()
        assert (plane.memory[page] == 7).all()
        rig.driver.destroy_event(event)
