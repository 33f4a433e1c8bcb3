"""Beam search and forks: several continuations that share history blocks.

A further beam reads BAD where it shares beam 0's page; the engine here reads those through beam 0. Each beam has tokens of its own.
"""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import BAD_PAGE_INDEX, BeamIndex, ConfigError, KVCache, KVCacheError, OutOfPagesError
from tests.support.engine import Engine, Token
from tests.support.models import GRAIN, Kind, hybrid, model, small, ssm
from tests.support.rig import Request, Rig, toks


def engine_of(rig: Rig) -> Engine:
    assert rig.engine is not None
    return rig.engine


def row(rig: Rig, request: Request, beam: int, layer: int = 0) -> list[int]:
    return list(request.cache.get_aggregated_page_indices(rig.group(layer), BeamIndex(beam)))


class Search:
    """A request with several beams, and their tokens."""

    def __init__(self, rig: Rig, prompt: list[Token], width: int) -> None:
        self.rig = rig
        self.request = rig.start(prompt)
        rest = prompt[len(self.request.tokens) :]
        if rest:
            assert self.request.advance(rest)
        self.request.cache.beam_width = width
        self.width = width
        self.texts = [list(prompt) for _ in range(width)]

    def check(self) -> None:
        for beam in range(self.width):
            engine_of(self.rig).check(self.request.cache, self.texts[beam], beam)
        self.rig.settle()

    def step(self, count: int, tag: int) -> bool:
        """Append different tokens to each beam."""
        cache = self.request.cache
        length = len(self.texts[0])
        if not cache.resize(length + count, length):
            return False
        for beam in range(self.width):
            new = toks(1000 * tag + 100 * beam, 1000 * tag + 100 * beam + count)
            engine_of(self.rig).step(cache, new, self.texts[beam], beam)
            self.texts[beam] += new
        cache.history_length = length + count
        return True


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("prompt", [4, 6, 8, 9, 3, 1])
def test_widening(prompt: int, width: int) -> None:
    """Full history blocks are shared (BAD for the others), the partial tail is copied for each beam, growth takes pages per beam;
    bytes are right for every beam."""
    with Rig(small(32)) as rig:
        search = Search(rig, toks(0, prompt), width)
        full, partial = prompt // 4, prompt % 4 != 0
        used = rig.counts().unavailable
        assert used == full + (width if partial else 0)
        for beam in range(1, width):
            assert row(rig, search.request, beam)[:full] == [BAD_PAGE_INDEX] * full
        search.check()
        assert search.step(8 - prompt % 4, 1)
        new_blocks = 2
        assert rig.counts().unavailable == full + width * new_blocks
        tables = [row(rig, search.request, beam) for beam in range(width)]
        for beam in range(width):
            assert len(tables[beam]) == search.request.cache.num_blocks
            assert BAD_PAGE_INDEX not in tables[beam][full:]
        own = [slot for table in tables for slot in table[full:]]
        assert len(set(own)) == len(own)
        search.check()
        assert search.step(3, 2)
        search.check()


@pytest.mark.parametrize("kinds", [["full"], ["full", (8, 0)], [(6, 4)]])
@pytest.mark.parametrize("winner", [0, 1, 2])
def test_committing_one_beam(kinds: list[Kind], winner: int) -> None:
    """The beams converge: the winner's tokens are committed block by block; its pages become the request's, the others are freed,
    and another request reuses them with the winner's bytes."""
    with Rig(small(64, kinds=kinds)) as rig:
        search = Search(rig, toks(0, 6), 3)
        assert search.step(3, 1)
        assert search.step(5, 2)
        search.check()
        text = search.texts[winner]
        cache = search.request.cache
        cache.commit(text[6:12], [winner] * 6)
        assert cache.num_committed_tokens == 12
        assert cache.committed_tokens == text[:12]
        for beam in (1, 2):
            assert row(rig, search.request, beam)[:3] == [BAD_PAGE_INDEX] * 3
        engine_of(rig).check(cache, text[:12])
        rig.settle()
        cache.close()
        again = rig.start(text)
        assert len(again.tokens) == 12
        engine_of(rig).check(again.cache, text[:12])


def test_a_block_of_several_beams_is_refused() -> None:
    """The manager cannot mix beams in a block: refused with the block named, nothing changed; one beam for each block is fine."""
    with Rig(small(64)) as rig:
        search = Search(rig, toks(0, 4), 2)
        assert search.step(8, 1)
        cache = search.request.cache
        before = (cache.num_committed_tokens, rig.counts(), [row(rig, search.request, beam) for beam in (0, 1)])
        for indices in ([0, 0, 1, 1], [0, 1, 1, 1], [0] * 3 + [1]):
            with pytest.raises(KVCacheError, match="block 1"):
                cache.commit(search.texts[0][4:8], indices)
        for wrong in ([0, 0, 0, 2], [0, 0, 0, -1], [0, 0, 0]):
            with pytest.raises(KVCacheError):
                cache.commit(search.texts[0][4:8], wrong)
        assert (cache.num_committed_tokens, rig.counts(), [row(rig, search.request, beam) for beam in (0, 1)]) == before
        cache.commit([*search.texts[1][4:8], *search.texts[0][8:12]], [1] * 4 + [0] * 4)
        assert cache.num_committed_tokens == 12
        mixed = [*toks(0, 4), *search.texts[1][4:8], *search.texts[0][8:12]]
        engine_of(rig).check(cache, mixed)


@pytest.mark.parametrize("keep", [1, 2])
def test_narrowing(keep: int) -> None:
    """The pages of the last beams are freed. The other beams keep their bytes and continue."""
    with Rig(small(64)) as rig:
        search = Search(rig, toks(0, 6), 3)
        assert search.step(5, 1)
        used = rig.counts().unavailable
        search.request.cache.beam_width = keep
        search.width = keep
        assert rig.counts().unavailable == used - (3 - keep) * 2
        search.check()
        assert search.step(4, 2)
        search.check()


@pytest.mark.parametrize("seed", range(3))
def test_states_are_copied_per_beam(seed: int) -> None:
    """Recurrent layers: after widening, every beam has its own state, under any order of the streams."""
    with Rig(hybrid(8, 32), "random", seed) as rig:
        search = Search(rig, toks(0, 6), 3)
        search.check()
        slots = {search.request.cache.get_ssm_block_base_index(rig.group(1), BeamIndex(beam)) for beam in range(3)}
        assert len(slots) == 3
        assert search.step(3, 1)
        assert search.step(4, 2)
        search.check()
        search.request.suspend()
        assert search.request.resume()
        search.check()


@pytest.mark.parametrize("host_slots", [0, 40])
def test_beams_survive_a_suspension(host_slots: int) -> None:
    """The pages of all beams are held, offloaded if needed, and loaded again."""
    with Rig(small(16, host_slots=host_slots)) as rig:
        search = Search(rig, toks(0, 6), 3)
        assert search.step(5, 1)
        search.request.suspend()
        if host_slots:
            rig.take(16).close()
        assert search.request.resume()
        search.check()


def test_a_width_that_does_not_fit() -> None:
    """No room for the copies: raises, nothing changed. Widths below 1, and widening a suspended cache, are misuse."""
    with Rig(small(4)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 10))
        with pytest.raises(OutOfPagesError):
            request.cache.beam_width = 3
        assert (request.cache.beam_width, rig.counts().unavailable) == (1, 3)
        for width in (0, -1):
            with pytest.raises(KVCacheError):
                request.cache.beam_width = width
        with pytest.raises(ConfigError, match="it must be at most 4"):  # at once, also where no page is needed yet
            rig.open().beam_width = 1 << 40
        request.suspend()
        with pytest.raises(KVCacheError):
            request.cache.beam_width = 2
        request.cache.beam_width = 1  # no change
        assert request.resume()
        request.cache.beam_width = 2
        request.check()


# --- forks


def test_a_model_of_recurrent_layers_only_may_be_widened() -> None:
    """Each beam needs a state of its own, and there are so many."""
    with Rig(model([ssm(0, GRAIN // 4)], gpu=GRAIN, max_util=1.0), engine=False) as rig:
        cache = rig.open()
        assert cache.resize(8)
        with pytest.raises(ConfigError, match="it must be at most 4"):
            cache.beam_width = 5
        cache.beam_width = 4
        assert len({cache.get_ssm_block_base_index(0, beam) for beam in range(4)}) == 4


@pytest.mark.parametrize("first_closed", ["parent", "child"])
@pytest.mark.parametrize("length", [6, 8, 3, 13])
@pytest.mark.parametrize("kinds", [["full"], ["full", (8, 0)], ["ssm"]])
def test_a_fork_is_a_copy_on_write(kinds: list[Kind], length: int, first_closed: str) -> None:
    """Full blocks are shared and the tail is private: both continue differently, and closing one does not affect the other."""
    config = hybrid(8, 32) if kinds == ["ssm"] else small(32, kinds=kinds)
    with Rig(config) as rig:
        parent = rig.start()
        assert parent.advance(toks(0, length))
        fork = parent.cache.fork()
        child = Request(rig, fork, list(parent.tokens), rig.new_stream())
        assert fork.num_committed_tokens == length
        assert child.resume()
        full = length // 4
        mine, theirs = row(rig, parent, 0), row(rig, child, 0)
        assert mine[:full] == theirs[:full]
        assert not set(mine[full:]) & set(theirs[full:]) - {BAD_PAGE_INDEX}
        assert parent.advance(toks(100, 107))
        assert child.advance(toks(200, 205))
        parent.check()
        child.check()
        (parent if first_closed == "parent" else child).close()
        survivor = child if first_closed == "parent" else parent
        survivor.check()
        assert survivor.advance(toks(300, 304))
        survivor.check()
        survivor.close()


@pytest.mark.parametrize("state", ["suspended", "uncommitted", "ahead"])
def test_forks_of_any_open_request(state: str) -> None:
    """Suspended, with history that was never committed, with capacity past the history: the fork has the history, and the same
    bytes."""
    with Rig(small(32, host_slots=32)) as rig:
        parent = rig.start()
        assert parent.advance(toks(0, 9), commit=state != "uncommitted")
        if state == "suspended":
            parent.suspend()
        if state == "ahead":
            assert parent.cache.resize(20)
        forks = []
        for number in range(3):
            fork = parent.cache.fork(50 + number)
            assert (fork.id, fork.history_length, fork.capacity) == (50 + number, 9, 9)
            forks.append(Request(rig, fork, list(parent.tokens), rig.stream))
        for number, request in enumerate(forks):
            assert request.resume()
            assert request.advance(toks(100 * number + 500, 100 * number + 507))
        for request in forks:
            request.check()
            request.close()
        if state == "suspended":
            assert parent.resume()
        parent.check()


@pytest.mark.parametrize("accepted", [0, 1, 3])
@pytest.mark.parametrize("kinds", [["full"], ["full", (8, 0)]])
def test_speculative_decoding(kinds: list[Kind], accepted: int) -> None:
    """Grow by a tree of drafts, accept a part, rewind: nothing that was rewound stays held, counted or cached."""
    with Rig(small(32, kinds=kinds)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 10))
        for turn in range(8):
            history = len(request.tokens)
            assert request.cache.resize(history + 8, history)
            draft = toks(1000 * (turn + 1), 1000 * (turn + 1) + 8)
            engine_of(rig).step(request.cache, draft, request.tokens)
            request.tokens += draft[: accepted + 1]
            request.cache.commit(draft[: accepted + 1])
            assert request.cache.resize(len(request.tokens))
            mapped = sum(len(rig.blocks_mapped(request.cache, layer)) for layer in range(len(kinds)))
            assert rig.counts().unavailable == mapped
        request.check()
        text = list(request.tokens)
        request.close()
        assert rig.reused([*text, *toks(7000, 7008)]) == len(text)


def two_that_share_a_settled_block(rig: Rig) -> tuple[KVCache, KVCache]:
    """A request with a history of 8 tokens, 6 of them committed, and its fork: blocks of 4, both ACTIVE."""
    parent = rig.open()
    assert parent.resize(8, 8)
    parent.commit([1, 2, 3, 4, 5, 6])
    fork = parent.fork()
    assert fork.resume(rig.stream)
    return parent, fork


@pytest.mark.parametrize("ending", ["stop_committing", "close", "is_end"])
def test_a_fork_widens_what_the_other_published_in_part(ending: str) -> None:
    """Two forks share a history block. One publishes its committed part. When the other commits all of it, the whole block can be
    reused, and what follows too."""
    with Rig(small(16), engine=False) as rig:
        parent, fork = two_that_share_a_settled_block(rig)
        if ending == "stop_committing":
            parent.stop_committing()
        elif ending == "is_end":
            parent.commit([], is_end=True)
        else:
            parent.close()
        assert rig.manager.probe_reuse(None, [1, 2, 3, 4, 5, 6, 7, 8]) == 6
        fork.commit([7, 8])
        assert rig.manager.probe_reuse(None, [1, 2, 3, 4, 5, 6, 7, 8]) == 8
        assert fork.resize(12)
        fork.commit([9, 10, 11, 12])
        assert rig.manager.probe_reuse(None, list(range(1, 13))) == 12
        parent.close()
        fork.close()


def test_a_longer_partial_tail_widens_too() -> None:
    """The other fork stops one token later: the page then covers that many tokens."""
    with Rig(small(16), engine=False) as rig:
        parent, fork = two_that_share_a_settled_block(rig)
        parent.stop_committing()
        fork.commit([7])
        fork.stop_committing()
        assert rig.manager.probe_reuse(None, [1, 2, 3, 4, 5, 6, 7, 8]) == 7
        parent.close()
        fork.close()
