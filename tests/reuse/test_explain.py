"""Explanations of misses: each cause by a small example, at the tree and through a whole manager."""

from __future__ import annotations

import dataclasses

import pytest

from kv_cache_manager_v2 import CacheTier, ConfigError, MissCause, MissReport, ReuseScope
from kv_cache_manager_v2.reuse.explain import MissHistory, explain
from kv_cache_manager_v2.reuse.tokens import pack
from tests.support.models import small
from tests.support.rig import Rig
from tests.support.storage_rig import make_cell
from tests.support.tree_rig import EMPTY_SCOPE, FULL, SSM, Cache, Notes, Token, digest, toks, window

TIERS = [CacheTier.GPU_MEM, CacheTier.HOST_MEM]


class Asked:
    """A tree with a history of drops, and explanations of matches."""

    def __init__(self, size: int, *kinds: tuple[str, int, int], limit: int = 100) -> None:
        self.notes = Notes()
        self.history = MissHistory(limit, self.notes)
        self.cache = Cache(size, *kinds, listener=self.history)

    def ask(
        self,
        tokens: list[Token],
        partial: bool = True,
        backoff: int = 0,
        scope: ReuseScope = EMPTY_SCOPE,
        remembers: bool = True,
    ) -> MissReport:
        history = self.history if remembers else None
        report = explain(self.cache.tree, scope, pack(tokens), partial, backoff, history, TIERS)
        assert report.num_tokens == self.cache.probe(tokens, partial, backoff, scope)
        assert report.num_lookup_tokens == len(tokens)
        assert str(report).startswith(f"{report.num_tokens} of {len(tokens)} tokens")
        return report


def test_nothing_missed() -> None:
    asked = Asked(4, FULL)
    asked.cache.store(toks(0, 8))
    report = asked.ask(toks(0, 6))
    assert report.cause == MissCause.NOTHING_MISSED
    assert str(report) == "6 of 6 tokens are reusable"


def test_never_stored() -> None:
    """The next block is not cached; without a history it may also have been dropped, and the sentence says so."""
    asked = Asked(4, FULL)
    asked.cache.store(toks(0, 8))
    report = asked.ask(toks(0, 12))
    assert (report.cause, report.position, report.num_tokens) == (MissCause.NEVER_STORED, 8, 8)
    assert "dropped before the latest 100 drops" in str(report)
    report = asked.ask(toks(50, 60), remembers=False)
    assert (report.cause, report.position) == (MissCause.NEVER_STORED, 0)
    assert "miss_history=0" in str(report)


def test_dropped_says_when_and_from_where() -> None:
    """The first missing block, the logical time, and the level on which its page lay."""
    asked = Asked(4, FULL)
    path = asked.cache.store(toks(0, 12))
    page = path[1].pages[0]
    assert page is not None
    page.cell = make_cell(1)
    asked.cache.lose(path[1])
    assert asked.ask(toks(0, 12), remembers=False).cause == MissCause.NEVER_STORED
    asked.cache.store(toks(100, 108))
    report = asked.ask(toks(0, 12))
    assert (report.cause, report.position, report.num_tokens) == (MissCause.DROPPED, 4, 4)
    assert (report.dropped_at, report.now, report.level, report.tier) == (3, 5, 1, CacheTier.HOST_MEM)
    assert "dropped from level 1 (HOST_MEM) 2 new blocks ago" in str(report)
    asked.cache.store(toks(0, 8))
    assert asked.ask(toks(0, 12)).position == 8
    assert len(asked.history) == 2


def test_cleared() -> None:
    """Clearing is told apart from eviction."""
    asked = Asked(4, FULL)
    asked.cache.store(toks(0, 8))
    asked.cache.tree.clear()
    report = asked.ask(toks(0, 8))
    assert (report.cause, report.level) == (MissCause.DROPPED, None)
    assert "the cache was cleared 0 new blocks ago" in str(report)


def test_a_dropped_partial_block_is_remembered() -> None:
    """Its key is that of fewer tokens; the longest such block counts."""
    asked = Asked(8, FULL)
    path = asked.cache.store(toks(0, 14))
    asked.cache.lose(path[1])
    report = asked.ask(toks(0, 16))
    assert (report.cause, report.position) == (MissCause.DROPPED, 8)


def test_replaced_blocks_are_no_drops() -> None:
    """A partial block whose place a longer one took was not lost."""
    asked = Asked(8, FULL)
    asked.cache.store(toks(0, 4))
    asked.cache.store(toks(0, 8))
    assert len(asked.history) == 0


def test_the_history_is_bounded() -> None:
    """The oldest drops are forgotten first; a block that is dropped again becomes the youngest."""
    asked = Asked(2, FULL, limit=2)
    for number in (1, 2, 1, 3):
        [block] = asked.cache.store([number, number])
        asked.cache.lose(block)
    assert len(asked.history) == 2
    causes = [asked.ask([number, number]).cause for number in (1, 2, 3)]
    assert causes == [MissCause.DROPPED, MissCause.NEVER_STORED, MissCause.DROPPED]


def test_a_block_replaced_by_a_longer_one_is_no_drop() -> None:
    asked = Asked(4, FULL)
    [dropped] = asked.cache.store(toks(10, 14))
    asked.cache.lose(dropped)
    asked.cache.store(toks(0, 2))
    asked.cache.store(toks(0, 4))
    assert len(asked.history) == 1


def test_window_hole() -> None:
    """All blocks are there, but one in the last window has lost its page; with a history, when and from where."""
    asked = Asked(4, FULL, window(6))
    path = asked.cache.store(toks(0, 16))
    asked.cache.lose(path[3], 1)
    report = asked.ask(toks(0, 16))
    assert (report.cause, report.position, report.life_cycle, report.num_tokens) == (MissCause.WINDOW_HOLE, 12, 1, 12)
    assert (report.dropped_at, report.level) == (4, 0)
    assert "layer group 1 has no page in its window for the block at 12; dropped from level 0 (GPU_MEM)" in str(report)
    assert asked.ask(toks(0, 16), remembers=False).dropped_at is None


def test_not_covered() -> None:
    """A longer block took the pages of a shorter one: they are good for fewer tokens."""
    asked = Asked(8, FULL, window(64))
    asked.cache.store(toks(0, 6))
    asked.cache.store(toks(0, 8), without=[1])
    report = asked.ask(toks(0, 8))
    assert (report.cause, report.position, report.life_cycle, report.num_tokens) == (MissCause.NOT_COVERED, 0, 1, 6)


def test_no_snapshot() -> None:
    """A recurrent state is reusable only where a commit left a snapshot; a dropped one is remembered."""
    asked = Asked(4, FULL, SSM)
    asked.cache.store(toks(0, 8))
    path = asked.cache.store(toks(0, 16))
    assert asked.ask(toks(0, 15)).num_tokens == 8
    report = asked.ask(toks(0, 15))
    assert (report.cause, report.position, report.life_cycle) == (MissCause.NO_SNAPSHOT, 15, 1)
    assert "no snapshot after token 8, up to 15" in str(report)
    asked.cache.lose(path[3], 1)
    report = asked.ask(toks(0, 16))
    assert (report.cause, report.dropped_at) == (MissCause.NO_SNAPSHOT, 4)


def test_other_scope() -> None:
    """The same tokens are cached for another LoRA id or salt: the one with most of them is named."""
    asked = Asked(4, FULL)
    asked.cache.store(toks(0, 8), ReuseScope(salt=1))
    asked.cache.store(toks(0, 16), ReuseScope(salt=2))
    report = asked.ask(toks(0, 16))
    assert (report.cause, report.position, report.scope) == (MissCause.OTHER_SCOPE, 16, ReuseScope(salt=2))
    assert "tokens up to 16 are cached under ReuseScope(lora_id=None, salt=2)" in str(report)


def test_partial_reuse_off() -> None:
    """A block shares the next tokens, but not all of its own."""
    asked = Asked(4, FULL)
    asked.cache.store(toks(0, 8))
    report = asked.ask([*toks(0, 6), 90, 91], partial=False)
    assert (report.cause, report.position, report.num_tokens) == (MissCause.PARTIAL_REUSE_OFF, 6, 4)
    assert asked.ask([*toks(0, 6), 90, 91]).cause == MissCause.NEVER_STORED


def test_back_off() -> None:
    """All of it is cached; the last tokens are computed again because the configuration says so."""
    asked = Asked(4, FULL)
    asked.cache.store(toks(0, 8))
    report = asked.ask(toks(0, 8), backoff=3)
    assert (report.cause, report.position, report.num_tokens) == (MissCause.BACK_OFF, 8, 5)
    assert asked.ask(toks(0, 8), backoff=100).num_tokens == 0


def test_unsettled() -> None:
    """A block that depends on a load in flight is no miss for long."""
    asked = Asked(4, FULL)
    path = asked.cache.store(toks(0, 8))
    asked.cache.tree.hide(path[1])
    report = asked.ask(toks(0, 8))
    assert (report.cause, report.position, report.num_tokens) == (MissCause.UNSETTLED, 4, 4)


def test_what_is_listened_to_goes_on_to_the_listener() -> None:
    """A history is told first, and tells the event manager everything."""
    asked = Asked(2, FULL, window(8))
    plain = Notes()
    other = Cache(2, FULL, window(8), listener=plain)
    for cache in (asked.cache, other):
        path = cache.store(toks(0, 6))
        page = path[0].pages[0]
        assert page is not None
        path[0].page_relocated(page, 0, 1)
        cache.lose(path[2], 1)
        cache.lose(path[1], 0)
    assert asked.notes.take() == plain.take() != []


class TestManager:
    def test_eviction_is_explained(self) -> None:
        """Through the public face: a block that a GPU of four slots dropped for another request."""
        config = dataclasses.replace(small(4), miss_history=10)
        with Rig(config) as rig:
            rig.seed(toks(0, 16))
            rig.take(2).close()
            report = rig.manager.explain_miss(None, toks(0, 16))
            assert (report.cause, report.num_tokens, report.tier) == (MissCause.DROPPED, 8, CacheTier.GPU_MEM)
            assert "dropped from level 0 (GPU_MEM)" in str(report)

    def test_nothing_is_remembered_by_default(self) -> None:
        """The history is off unless it is asked for; the other causes need none."""
        with Rig(small(4)) as rig:
            rig.seed(toks(0, 16))
            rig.take(2).close()
            report = rig.manager.explain_miss(ReuseScope(salt=7), toks(0, 16))
            assert (report.cause, report.scope) == (MissCause.OTHER_SCOPE, ReuseScope())
            assert rig.manager.explain_miss(None, toks(0, 16)).cause == MissCause.NEVER_STORED

    def test_a_negative_history_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="miss_history"):
            dataclasses.replace(small(4), miss_history=-1)


def test_the_longest_dropped_block_that_the_prompt_holds_is_named() -> None:
    """Of dropped blocks of several lengths, digests among them, the longest that the prompt begins with is named."""
    first, second = digest(1), digest(2)
    prompt: list[Token] = [1, first, 3, second, 5, 6]
    asked = Asked(8, FULL)
    dropped: list[list[Token]] = [[1], [1, first, 3, 7], [1, first, 3], [1, first], [1, first, 3, second, 5, 6, 9], [1, first, 9]]
    for tokens in dropped:
        asked.cache.store(tokens)
        asked.cache.lose(asked.cache.tree.all_blocks()[0])
    assert asked.history.lengths(1000) == sorted({len(pack(tokens).data) for tokens in dropped})
    report = asked.ask(prompt)
    assert (report.cause, report.position) == (MissCause.DROPPED, 0)
    assert report.dropped_at == 3  # [1, first, 3] was the third to come
    assert asked.ask([1, 2]).dropped_at == 1
    assert asked.ask([2]).cause == MissCause.NEVER_STORED


def test_the_history_counts_the_lengths_of_what_it_keeps() -> None:
    """The oldest drops leave it, and the latest drop of a block replaces the one before."""
    asked = Asked(4, FULL, limit=2)

    def drop(*dropped: list[Token]) -> None:
        for tokens in dropped:
            asked.cache.store(tokens)
            asked.cache.lose(asked.cache.tree.all_blocks()[0])

    drop(toks(0, 1), toks(10, 12), toks(10, 12), toks(20, 23))
    assert len(asked.history) == 2
    assert asked.history.lengths(16) == [8, 12]
    assert asked.history.lengths(11) == [8]
    drop(toks(30, 32), toks(40, 42), toks(50, 53), toks(60, 63))
    assert asked.history.lengths(16) == [12]


@pytest.mark.parametrize("size", [64, 512])
def test_what_is_hashed_grows_with_the_lengths_dropped_and_not_with_the_block(size: int) -> None:
    """An explanation looks at the lengths of drops alone, whatever the length of a block."""
    asked = Asked(size, FULL)
    asked.cache.store(toks(0, size))
    asked.cache.lose(asked.cache.tree.all_blocks()[0])
    assert asked.history.lengths(4 * size) == [4 * size]
    assert asked.ask(toks(1000, 1000 + size)).cause == MissCause.NEVER_STORED
    assert asked.ask(toks(0, size)).cause == MissCause.DROPPED
