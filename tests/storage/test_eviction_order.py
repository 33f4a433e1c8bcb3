"""The order of eviction, and the accounting of slots."""

from __future__ import annotations

import random

import pytest

from kv_cache_manager_v2 import KVCache
from tests.support import inside
from tests.support.models import Kind, small
from tests.support.rig import Request, Rig, toks


@pytest.mark.parametrize("taken", [1, 2, 3])
@pytest.mark.parametrize("how", ["active", "suspended", "chunks", "reused"])
def test_tail_first(how: str, taken: int) -> None:
    """3 slots hold a chain of 3 blocks: each block taken by another costs the deepest one, so that what is left is reachable."""
    with Rig(small(3)) as rig:
        request = rig.start()
        for beg in range(0, 12, 4 if how == "chunks" else 12):
            assert request.advance(toks(beg, beg + (4 if how == "chunks" else 12)))
        if how == "suspended":
            request.suspend()
        request.close()
        if how == "reused":
            rig.start(toks(0, 8)).close()  # used again in part: the deepest block is still the first to go
            rig.start(toks(0, 12)).close()
        rig.take(taken)
        assert rig.probe(toks(0, 12)) == 12 - 4 * taken
        assert inside.num_tree_blocks(rig.manager) == 3 - taken


@pytest.mark.parametrize("how", ["one step", "chunks", "late commit", "suspended"])
def test_pages_out_of_the_window_go_first(how: str) -> None:
    """Full and window layers share a pool of 8 slots: two evictions take the window's stale pages, whichever way they were freed,
    and the endpoint stays; a third one costs it."""
    with Rig(small(8, kinds=["full", (8, 0)])) as rig:
        request = rig.start()
        for beg in range(0, 16, 16 if how == "one step" else 4):
            size = 16 if how == "one step" else 4
            assert request.advance(toks(beg, beg + size), commit=how != "late commit")
        if how == "late commit":
            request.cache.commit(toks(0, 16))
        if how == "suspended":
            request.suspend()
        request.close()
        assert rig.counts() == (8, 0, 8, 0)
        hog = rig.take(1)
        assert rig.probe(toks(0, 16)) == 16
        assert inside.coverage(rig.manager, toks(0, 16), 1) == [0, 0, 4, 4]
        assert inside.coverage(rig.manager, toks(0, 16), 0) == [4] * 4
        assert hog.cache.resize(8)
        assert rig.probe(toks(0, 16)) < 16


@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_uncommitted_slots_displace_nothing(length: int) -> None:
    """Uncommitted pages are freed at close, and never enter the eviction order."""
    with Rig(small(4)) as rig:
        rig.seed(toks(0, 8))
        for _ in range(5):
            request = rig.start()
            assert request.cache.resize(length)
            request.cache.stop_committing()
            request.close()
            assert rig.counts() == (4, 2, 2, 0)
            assert rig.probe(toks(0, 8)) == 8


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("priorities", [(90, 10), (36, 35), (100, 0), (1, 0)])
def test_priority_before_recency(priorities: tuple[int, int], swapped: bool) -> None:
    """2 slots, each with a block of its own priority: the lower one goes first, whichever is older."""
    high, low = toks(0, 4), toks(100, 104)

    with Rig(small(2)) as rig:
        order = [(high, priorities[0]), (low, priorities[1])]
        for tokens, priority in reversed(order) if swapped else order:
            rig.seed(tokens, priority=lambda ordinal, life_cycle, value=priority: value)  # type: ignore[misc]
        rig.take(1)
        assert (rig.probe(high), rig.probe(low)) == (4, 0)


def test_recency_among_equals() -> None:
    """Of equal priority the least recently used goes first; using it again makes it the youngest."""
    with Rig(small(3)) as rig:
        for beg in (0, 100, 200):
            rig.seed(toks(beg, beg + 4))
        rig.start(toks(0, 4)).close()
        rig.take(1)
        assert [rig.probe(toks(beg, beg + 4)) for beg in (0, 100, 200)] == [4, 0, 4]


def test_a_reused_page_takes_the_larger_priority() -> None:
    """Held by a request of another priority, a page keeps the larger of its own and the callback's."""
    with Rig(small(2)) as rig:
        rig.seed(toks(0, 4), priority=lambda ordinal, life_cycle: 10)
        rig.seed(toks(100, 104), priority=lambda ordinal, life_cycle: 20)
        raised = rig.start(toks(0, 4), priority=lambda ordinal, life_cycle: 30)
        raised.close()
        rig.take(1)
        assert (rig.probe(toks(0, 4)), rig.probe(toks(100, 104))) == (4, 0)


@pytest.mark.parametrize("taken", [1, 2, 3, 4])
def test_exactly_what_is_needed_leaves_the_middle_tier(taken: int) -> None:
    """GPU and host of 4 slots each, both full: for every slot taken one page is offloaded and one is dropped, tails first."""
    with Rig(small(4, host_slots=4)) as rig:
        first, second = toks(0, 16), toks(100, 116)
        rig.seed(first)
        rig.seed(second)
        assert inside.pages_by_level(rig.manager, first) == [1] * 4
        moved, dropped = rig.manager.movement.pages_moved(0, 1), rig.manager.movement.pages_dropped(1)
        rig.take(taken)
        assert rig.probe(first) == 16 - 4 * taken
        assert rig.probe(second) == 16
        assert inside.pages_by_level(rig.manager, second) == [0] * (4 - taken) + [1] * taken
        assert rig.manager.movement.pages_moved(0, 1) == moved + taken
        assert rig.manager.movement.pages_dropped(1) == dropped + taken


KINDS: list[list[Kind]] = [["full"], [(8, 0)], ["full", (6, 3)]]


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_accounting_identity(tmp_path: object, kinds: list[Kind], seed: int) -> None:
    """Any mix of calls by requests that share prefixes, all tiers overflowing: in every level and pool group total = free +
    evictable + unavailable, all at least 0; all closed: nothing unavailable; cleared: all free. Every byte is right."""
    rng = random.Random(seed)
    slots = 16
    config = small(slots, kinds=kinds, host_slots=10, disk=(str(tmp_path), slots))
    with Rig(config, "random", seed) as rig:
        prompts = [toks(0, 24), toks(0, 12) + toks(50, 62), toks(0, 10) + toks(70, 84)]
        opened: list[Request] = []

        def check() -> None:
            for total, free, evictable, unavailable in inside.all_counts(rig.manager):
                assert total == free + evictable + unavailable
                assert min(free, evictable, unavailable) >= 0

        for _ in range(120):
            action = rng.randrange(6)
            request = rng.choice(opened) if opened else None
            if action == 0 and len(opened) < 4:
                opened.append(rig.request(rng.choice(prompts)))
            elif request is None:
                continue
            elif action == 1 and not request.cache.is_active:
                request.resume()
            elif action == 2 and request.cache.is_active:
                request.suspend()
            elif action in (3, 4) and request.cache.is_active and len(request.tokens) < 40:
                prompt = rng.choice(prompts)
                done = len(request.tokens)
                more = prompt[done : done + 5] if request.tokens == prompt[:done] else []
                request.advance(more or [rng.randrange(1000, 2000) for _ in range(rng.randrange(1, 6))])
            elif action == 5 and rng.random() < 0.4:
                request.close()
                opened.remove(request)
            check()
        for request in opened:
            request.close()
        rig.settle()
        for counts in inside.all_counts(rig.manager):
            assert counts.unavailable == 0
        rig.manager.clear_reusable_blocks()
        for counts in inside.all_counts(rig.manager):
            assert counts.free == counts.total


@pytest.mark.parametrize("kinds", [["full"], [(4, 16)], ["full", (4, 0)]])
@pytest.mark.parametrize("block", [0, 1, 2, 3])
def test_losing_an_ancestor_frees_its_descendants(kinds: list[Kind], block: int) -> None:
    """A block of a chain is evicted first, by its priority: its descendants cannot match any more, and their slots are freed.
    Blocks before it still match. The same holds for sinks."""
    with Rig(small(9, kinds=kinds)) as rig:
        rig.seed(toks(0, 16), priority=lambda ordinal, life_cycle: 1 if ordinal == block and not _slides(life_cycle) else 50)
        hog = rig.start()
        assert hog.cache.resize(rig.counts().free // len(kinds) * 4)
        assert rig.counts().free == len(kinds) - 1
        rig.take(1)
        assert rig.probe(toks(0, 16)) == 4 * block
        assert inside.num_tree_blocks(rig.manager) == block
        assert rig.counts().evictable == len(kinds) * block


def _slides(life_cycle: object) -> bool:
    """Whether its blocks go stale."""
    stale = getattr(life_cycle, "get_stale_range")(16)  # noqa: B009
    return bool(len(stale))


@pytest.mark.parametrize("window", [5, 8, 9])
def test_a_slot_is_never_owned_twice(window: int) -> None:
    """One request slides through 400 tokens on few slots with a host tier: the counts add up at each step, and no slot has two
    owners."""
    with Rig(small(5, kinds=[(window, 0)], host_slots=4)) as rig:
        request = rig.start()
        for beg in range(0, 400, 4):
            assert request.advance(toks(beg, beg + 4)), beg
            counts = rig.counts()
            assert counts.total == counts.free + counts.evictable + counts.unavailable
            live = [slot for slot in rig.indices(request.cache) if slot >= 0]
            assert len(set(live)) == len(live)
            rig.manager.check_invariants()
        request.check()
        request.close()
        assert rig.counts().unavailable == 0
        assert request.cache.status is KVCache.Status.CLOSED
