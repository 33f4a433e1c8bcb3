"""Partial reuse and the shape of the tree."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import ReuseScope
from tests.support import inside
from tests.support.models import KIB, attention, model, small
from tests.support.rig import Rig, toks


@pytest.mark.parametrize("lengths", [(80, 88, 80), (65, 96, 70, 88), (88, 80, 72), (70, 71, 72, 73), (96, 65)])
def test_coverage_only_grows(lengths: tuple[int, ...]) -> None:
    """Turns of one conversation: the window page at block 2 covers the longest turn so far, never less; each turn's end stays
    reusable."""
    with Rig(model([attention(0, 4 * KIB), attention(1, 4 * KIB, window=16)], min_snapshot=True)) as rig:
        best = 0
        for length in lengths:
            rig.extend(toks(0, length))
            best = max(best, length - 64)
            assert inside.coverage(rig.manager, toks(0, 96), 1)[2] == best
            assert rig.probe(toks(0, length)) == length
        for length in lengths:
            assert rig.probe(toks(0, length) + toks(900, 910)) == length


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("stored", [12, 10, 9, 3])
def test_partial_reuse_switch(stored: int, partial: bool) -> None:
    """Off: whole blocks, and a partial block only by a query that ends with it. On: every common token."""
    with Rig(small(8, partial=partial)) as rig:
        rig.seed(toks(0, stored))
        for query in range(14):
            common = min(stored, query)
            exact = query == stored
            assert rig.reused(toks(0, query)) == (common if partial or exact else common // 4 * 4)
            other = rig.reused(toks(0, query) + toks(500, 504))
            assert other == (common if partial else common // 4 * 4)


@pytest.mark.parametrize("shared", [1, 5, 7, 9, 11])
def test_a_partly_reused_block_is_copied_once(shared: int) -> None:
    """Whole blocks are shared, the partly matched one is a private slot filled by one copy per life cycle; the source keeps its
    bytes."""
    with Rig(small(16, kinds=["full", (64, 0)] if shared > 8 else ["full"])) as rig:
        groups = len(rig.manager.layer_grouping)
        rig.seed(toks(0, 12))
        path = inside.tree_blocks(rig.manager, toks(0, 12))
        request = rig.request(toks(0, shared))
        assert len(request.tokens) == shared
        before = rig.manager.movement.pages_moved(0, 0)
        assert request.resume()
        assert rig.manager.movement.pages_moved(0, 0) == before + groups
        full = shared // 4
        for group in range(groups):
            slots = rig.indices(request.cache, group)
            pages = [inside.page_of(block, group) for block in path]
            theirs = [page.slot for page in pages if page is not None]
            assert slots[:full] == theirs[:full]
            assert slots[full] not in theirs
        assert request.advance(toks(700, 706))
        request.suspend()
        assert request.resume()
        assert rig.manager.movement.pages_moved(0, 0) == before + groups
        request.check()
        whole = rig.start(toks(0, 12))
        assert len(whole.tokens) == 12
        whole.check()


@pytest.mark.parametrize("step", [4, 3, 1, 7])
def test_a_superseded_block_does_not_come_back(tmp_path: object, step: int) -> None:
    """A partial block grows to a full one: one node of 8 tokens stays, whatever registers blocks again; its first tokens still
    match."""
    config = small(4, kinds=["full"], tokens_per_block=8, host_slots=4, disk=(str(tmp_path), 4), min_snapshot=True)
    with Rig(config) as rig:
        request = rig.start()
        for beg in range(0, 8, step):
            assert request.advance(toks(beg, min(8, beg + step)))
            assert inside.num_tree_blocks(rig.manager) == 1
        other = rig.start(toks(0, 4))
        assert len(other.tokens) == 4
        other.close()
        request.suspend()
        for _ in range(3):
            rig.take(4).close()  # offloads it; the resume onloads it
            assert request.resume()
            request.suspend()
        (block,) = inside.tree_blocks(rig.manager, toks(0, 8))
        assert (block.num_tokens, inside.num_tree_blocks(rig.manager)) == (8, 1)
        assert request.resume()
        request.check()
        request.close()
        assert rig.reused(toks(0, 4)) == 4
        assert inside.num_tree_blocks(rig.manager) == 1


@pytest.mark.parametrize("wait_for_commit", [False, True])
@pytest.mark.parametrize("kinds", [["full"], ["full", (8, 0)], [(8, 4)]])
def test_identical_blocks_are_shared(kinds: list[str | tuple[int, int]], wait_for_commit: bool) -> None:
    """Two requests compute the same prompt: the one that commits second adopts the first one's pages, keeps right bytes, and frees
    its own."""
    with Rig(small(32, kinds=kinds)) as rig:
        one, two = rig.start(), rig.start()
        prompt = toks(0, 10)
        for request in (one, two):
            assert request.cache.resize(10, 0)
            request.write(prompt)
            if not wait_for_commit:
                request.cache.commit(prompt)
        if wait_for_commit:
            one.cache.commit(prompt)
            two.cache.commit(prompt)
        for layer in range(len(kinds)):
            mine, theirs = rig.indices(one.cache, layer), rig.indices(two.cache, layer)
            assert mine[:2] == theirs[:2]
            assert mine[2] != theirs[2]
        assert one.advance(toks(50, 60))
        assert two.advance(toks(70, 80))
        one.check()
        two.check()


@pytest.mark.parametrize("path", ["commit", "create"])
def test_a_request_that_shares_a_block_waits_for_its_writer(path: str) -> None:
    """A commit is publication order only: the first request's stream stands at a gate before it writes. Another that adopts its
    block, or matches it, does not get past that on its own stream before the gate opens, and then reads the right bytes."""
    with Rig(small(32, host_slots=8)) as rig:
        gate = rig.driver.gate(rig.stream)
        first = rig.start()
        assert first.advance(toks(0, 8))
        stream = rig.new_stream()
        second = rig.start(toks(0, 8) if path == "create" else None, stream=stream)
        passed: list[int] = []
        if path == "commit":
            assert second.cache.resize(8)
            second.write(toks(0, 8))
            rig.driver.launch(stream, lambda: passed.append(0))
            assert passed == [0]
            second.cache.commit(toks(0, 8))
        assert rig.indices(first.cache) == rig.indices(second.cache)
        rig.driver.launch(stream, lambda: passed.append(1))
        assert 1 not in passed
        gate.open()
        assert 1 in passed
        second.check()
        assert second.advance(toks(50, 55))
        second.check()


@pytest.mark.parametrize("seed", range(8))
def test_a_colder_identical_page_takes_over_the_slot(seed: int) -> None:
    """The block that was committed first has moved to the host. A request that commits it again keeps its own GPU slot and bytes,
    the page gives up its host slot, nothing is copied, and all later users read right bytes."""
    with Rig(small(4, host_slots=4), "random", seed) as rig:
        rig.seed(toks(0, 8))
        hog = rig.take(4)
        assert inside.pages_by_level(rig.manager, toks(0, 8)) == [1, 1]
        hog.close()
        request = rig.start(stream=rig.new_stream())
        assert request.cache.resize(8)
        slots = rig.indices(request.cache)
        request.write(toks(0, 8))
        copied = [rig.manager.movement.pages_moved(a, b) for a in (0, 1) for b in (0, 1)]
        request.cache.commit(toks(0, 8))
        assert rig.indices(request.cache) == slots
        assert inside.pages_by_level(rig.manager, toks(0, 8)) == [0, 0]
        assert rig.counts(1).free == 4
        assert [rig.manager.movement.pages_moved(a, b) for a in (0, 1) for b in (0, 1)] == copied
        reader = rig.start(toks(0, 8), stream=rig.new_stream())
        assert len(reader.tokens) == 8
        assert rig.indices(reader.cache) == slots
        reader.check()
        request.check()


@pytest.mark.parametrize("seeded", [(), (1,), (1, 3), (1, 2, 3, 4)])
def test_roots_without_children(seeded: tuple[int, ...]) -> None:
    """Scopes that were looked up but never committed to leave nothing to clear: clear returns at once, twice, and starts afresh."""
    with Rig(small(16, tokens_per_block=2)) as rig:
        for lora in (1, 2, 3, 4):
            if lora in seeded:
                rig.seed(toks(0, 4), ReuseScope(lora))
            else:
                idle = rig.start(toks(0, 4), ReuseScope(lora))
                assert idle.cache.resize(3)
                idle.close()
        rig.manager.clear_reusable_blocks()
        rig.manager.clear_reusable_blocks()
        assert (inside.num_tree_blocks(rig.manager), inside.num_roots(rig.manager)) == (0, 0)
        rig.seed(toks(0, 2), ReuseScope(5))
        assert rig.reused(toks(0, 2), ReuseScope(5)) == 2
        assert inside.num_roots(rig.manager) == 1


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("backoff", [0, 1, 3, 7, 8, 9, 31, 32, 40])
def test_backoff_never_goes_below_zero(backoff: int, partial: bool) -> None:
    """What matches is the common beginning less the back-off, never less than nothing; probe and create agree; commits are
    whole."""
    with Rig(small(8, tokens_per_block=8, backoff=backoff, partial=partial)) as rig:
        rig.seed(toks(0, 32))
        assert inside.coverage(rig.manager, toks(0, 32), 0) == [8] * 4
        for length in (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32):
            common = length if partial else length // 8 * 8
            assert rig.reused(toks(0, length)) == max(0, common - backoff), length
        assert rig.reused(toks(0, 50)) == 32 - min(backoff, 32)


@pytest.mark.parametrize("length", [1, 31, 62, 63])
def test_no_empty_nodes(length: int) -> None:
    """Partial reuse off: part of a cached block matches nothing, and leaves no node behind; eviction empties the tree."""
    with Rig(small(4, tokens_per_block=64, partial=False)) as rig:
        rig.seed(toks(0, 64))
        cache = rig.create(toks(0, length))
        assert cache.num_committed_tokens == 0
        assert cache.resume(rig.stream)
        cache.close()
        assert inside.num_tree_blocks(rig.manager) == 1
        rig.take(4).close()
        assert inside.num_tree_blocks(rig.manager) == 0


@pytest.mark.parametrize("partial", [True, False])
def test_whole_prompt_cached(partial: bool) -> None:
    """A full hit, a hit but for the last token, then on from there: one chain, no second copy of a block."""
    with Rig(small(16, partial=partial)) as rig:
        rig.seed(toks(0, 8))
        whole = rig.start(toks(0, 8))
        assert len(whole.tokens) == 8
        whole.close()
        request = rig.start(toks(0, 7))
        assert len(request.tokens) == (7 if partial else 4)
        assert request.advance(toks(len(request.tokens), 8))
        assert request.advance(toks(8, 12))
        request.check()
        request.close()
        assert rig.reused(toks(0, 12)) == 12
        assert inside.num_tree_blocks(rig.manager) == 3


def conversation() -> Rig:
    return Rig(model([attention(0, 4 * KIB), attention(1, 4 * KIB, window=16)], min_snapshot=True))


@pytest.mark.parametrize("by", ["commit", "reuse"])
def test_a_wider_page_takes_the_place_of_a_narrower_one(by: str) -> None:
    """An endpoint's page of 8 tokens is superseded by one of 16, then of 32: the old ones leave the tree though still held."""
    with conversation() as rig:
        tokens = toks(0, 32)
        rig.extend(tokens[:8])
        holder = rig.create(tokens[:8])
        (block,) = inside.tree_blocks(rig.manager, tokens)
        old = inside.page_of(block, 1)
        assert old is not None
        for length in (16, 32):
            if by == "commit":
                rig.seed(tokens[:length])
            else:
                assert rig.extend(tokens[:length]) == length // 2
            assert inside.coverage(rig.manager, tokens, 1) == [length]
            assert old.owner is None
            assert old.alive()
        assert holder.num_committed_tokens == 8
        holder.close()
        assert not old.alive()
        assert rig.probe(tokens) == 32


@pytest.mark.parametrize("order", ["short first", "long first"])
def test_a_rewind_endpoint_survives_the_longer_turn(order: str) -> None:
    """The endpoint at 80 survives the one at 160, made before or after it: the full layer's page covers 32 there, the window's
    16."""
    with conversation() as rig:
        tokens = toks(0, 160)
        for length in (80, 160) if order == "short first" else (160, 80):
            request = rig.start(tokens[:length])
            rest = tokens[len(request.tokens) : length]
            assert not rest or request.advance(rest)
            request.check()
            request.close()
        assert rig.probe(tokens) == 160
        assert rig.probe(tokens[:80] + toks(900, 950)) == 80
        assert inside.coverage(rig.manager, tokens, 0)[2] == 32
        assert inside.coverage(rig.manager, tokens, 1)[2] == 16
        again = rig.start(tokens[:80] + toks(900, 950))
        again.check()
        assert again.advance(toks(900, 950))
        again.check()


def test_backoff_looks_at_the_windows_again() -> None:
    """Window 33, back-off 1: 96 goes to 95, where block 1 is needed again, of which the window page has 16 tokens: 48 are
    reused."""
    with Rig(model([attention(0, 4 * KIB), attention(1, 4 * KIB, window=33)], min_snapshot=True, backoff=1)) as rig:
        tokens = toks(0, 96)
        rig.seed(tokens[:48])
        rig.seed(tokens)
        assert inside.coverage(rig.manager, tokens, 1) == [32, 16, 32]
        assert rig.probe(tokens) == 48
