"""Sliding windows: what an endpoint needs, to the token."""

from __future__ import annotations

import pytest

from tests.support import inside
from tests.support.models import KIB, Kind, attention, model, small
from tests.support.rig import Rig, toks


@pytest.mark.parametrize(("length", "blocks"), [(128, [0, 0, 32, 32]), (96, [0, 32, 32]), (95, [0, 32, 31]), (127, [0, 0, 32, 31])])
def test_min_snapshot_keeps_the_window_only(length: int, blocks: list[int]) -> None:
    """32 tokens a block, window 64: the endpoint is reusable, its beginning is not, and only the blocks that it needs have
    pages."""
    with Rig(model([attention(0, 4 * KIB, window=64)], min_snapshot=True)) as rig:
        rig.seed(toks(0, length))
        assert inside.coverage(rig.manager, toks(0, length), 0) == blocks
        assert rig.reused(toks(0, length)) == length
        if length == 128:
            assert rig.reused(toks(0, 96)) == 0
        again = rig.start(toks(0, length))
        assert again.advance(toks(500, 520))
        again.check()


@pytest.mark.parametrize("tail", [127, 126, 100])
def test_an_unaligned_endpoint(tail: int) -> None:
    """128 tokens a block, full and window 128, 255 tokens: block 0 is stale there, block 1's 127 tokens suffice; if it covered one
    less, the endpoint would have to be shorter, where block 0 is needed again."""
    with Rig(model([attention(0, 8 * KIB), attention(1, 8 * KIB, window=128)], tokens_per_block=128)) as rig:
        tokens = toks(0, 256)
        rig.seed(tokens[: 128 + tail])
        query = [*tokens[:255], 9999]
        assert rig.probe(query) == 128 + tail
        again = rig.start(query)
        again.check()


def test_without_the_page_before() -> None:
    """The window page of block 0 is gone: 255 is still reusable, since only W - 1 tokens are needed; nothing shorter is."""
    with Rig(model([attention(0, 8 * KIB), attention(1, 8 * KIB, window=128)], tokens_per_block=128, min_snapshot=True)) as rig:
        tokens = toks(0, 255)
        rig.seed(tokens)
        assert inside.coverage(rig.manager, tokens, 1) == [0, 127]
        assert rig.probe([*tokens, 9999]) == 255
        assert rig.probe(tokens[:254]) == 0
        again = rig.start([*tokens, 9999])
        again.check()


@pytest.mark.parametrize(("window", "sink", "length"), [(8, 5, 32), (8, 4, 32), (8, 1, 33), (5, 12, 40), (1, 9, 16), (64, 3, 40)])
def test_sinks_are_never_stale(window: int, sink: int, length: int) -> None:
    """The blocks that hold sink tokens stay live whatever the history, the rest follows the window; bytes are right throughout."""
    with Rig(small(32, kinds=[(window, sink)])) as rig:
        request = rig.start()
        sinks = -(-sink // 4)
        for beg in range(0, length, 3):
            assert request.advance(toks(beg, min(beg + 3, length)))
            history = len(request.tokens)
            count = request.cache.num_blocks
            live = [block for block in range(count) if block < sinks or (block + 1) * 4 > history + 1 - window]
            assert rig.blocks_mapped(request.cache) == live
        request.check()
        if (window, sink, length) == (8, 5, 32):
            assert rig.blocks_mapped(request.cache) == [0, 1, 6, 7]


@pytest.mark.parametrize("kinds", [["full", (8, 0)], [(8, 0)], ["full", (5, 4)], ["full", (9, 0), (4, 0)]])
@pytest.mark.parametrize("late", [5, 12, 24])
def test_late_commits_publish_what_waited(kinds: list[Kind], late: int) -> None:
    """History runs ahead of the commits: pages out of the window wait, may sink meanwhile, and are published when their block is
    committed, so that every endpoint that could be reused with prompt commits can be."""
    with Rig(small(64, kinds=kinds, host_slots=64)) as rig:
        request = rig.start()
        tokens = toks(0, 48)
        for beg in range(0, 48, 4):
            assert request.advance(tokens[beg : beg + 4], commit=False)
            if beg % 12 == 8:
                request.suspend()
                assert request.resume()
        for beg in range(0, 48, late):
            request.cache.commit(tokens[beg : beg + late])
        request.check()
        request.close()
        for length in range(49):
            assert rig.probe(tokens[:length]) == length
        again = rig.start(tokens[:30])
        again.check()


def test_pages_waiting_for_a_commit_are_given_up_when_committing_stops() -> None:
    """Held only for a late commit: stop_committing frees them."""
    with Rig(small(16, kinds=[(8, 0)])) as rig:
        request = rig.start()
        for beg in range(0, 32, 4):
            assert request.advance(toks(beg, beg + 4), commit=False)
        assert rig.counts().free == 16 - 8
        request.cache.stop_committing()
        assert rig.counts().free == 16 - 2
        request.check()


def test_growth_uses_what_the_window_gives_up() -> None:
    """A window that slides needs no more slots than it has: a request runs for ever on its floor."""
    with Rig(small(3, kinds=[(8, 0)])) as rig:
        request = rig.start()
        request.cache.stop_committing()
        for beg in range(0, 100, 4):
            assert request.advance(toks(beg, beg + 4), commit=False)
        request.check()


@pytest.mark.parametrize(("first", "second"), [(80, 96), (33, 64), (1, 32), (95, 96), (64, 96)])
def test_window_of_one_token(first: int, second: int) -> None:
    """The input token is the whole window: a stale window page that covers part of a block never limits a match."""
    with Rig(model([attention(0, 4 * KIB), attention(1, 4 * KIB, window=1)], min_snapshot=True)) as rig:
        rig.extend(toks(0, first))
        assert rig.extend(toks(0, second)) == first
        assert rig.probe(toks(0, second)) == second
        again = rig.start(toks(0, second))
        assert again.advance(toks(700, 705))
        again.check()
