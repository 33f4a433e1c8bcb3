"""The longest reusable prefix, by example: windows, snapshots, coverage, back-off, siblings, scopes, keys."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.keys import ReuseScope, sequence_to_blockchain_keys
from kv_cache_manager_v2.reuse.match import Match, first_new_block_key, match, match_keys
from kv_cache_manager_v2.reuse.tokens import pack, pack_unchecked
from tests.reuse.helpers import EMPTY_SCOPE, FULL, SSM, Cache, Token, digest, toks, window


def lengths(found: Match) -> tuple[int, int, int, int]:
    return (found.num_tokens, found.before_hybrid, found.divergence, found.num_lookup_tokens)


class TestFullAttention:
    def test_nothing_known(self) -> None:
        """No root, no block, no token: nothing to reuse."""
        cache = Cache(4, FULL)
        assert lengths(cache.match(toks(0, 8))) == (0, 0, 0, 8)
        cache.tree.root(EMPTY_SCOPE)
        assert lengths(cache.match(toks(0, 8))) == (0, 0, 0, 8)
        cache.store(toks(0, 8))
        assert lengths(cache.match([])) == (0, 0, 0, 0)
        assert cache.match(toks(0, 8)).blocks == cache.store(toks(0, 8))

    def test_partial_switch(self) -> None:
        """With partial matching a block may be shared in part, without it only as a whole."""
        cache = Cache(4, FULL)
        path = cache.store(toks(0, 12))
        assert cache.probe(toks(0, 10), partial=False) == 8
        found = cache.match(toks(0, 10), partial=True)
        assert (found.num_tokens, found.blocks) == (10, path)

    def test_whole_prompt_cached(self) -> None:
        """All of it, or all but the last token."""
        cache = Cache(4, FULL)
        cache.store(toks(0, 8))
        for partial, expected in ((True, 7), (False, 4)):
            assert cache.probe(toks(0, 8), partial) == 8
            assert cache.probe(toks(0, 7), partial) == expected
        cache.store(toks(0, 12))
        assert cache.probe(toks(0, 12)) == 12
        assert cache.tree.num_blocks == 3

    def test_prompt_shorter_than_a_block(self) -> None:
        """Without partial matching it matches nothing, and matching makes no node."""
        cache = Cache(64, FULL)
        cache.store(toks(0, 64))
        assert cache.probe(toks(0, 63), partial=False) == 0
        assert cache.probe(toks(0, 63), partial=True) == 63
        assert cache.tree.num_blocks == 1

    def test_a_stored_partial_block_matches_its_exact_remainder(self) -> None:
        """Even without partial matching; a longer or shorter prompt needs the switch."""
        cache = Cache(4, FULL)
        cache.store(toks(0, 6))
        assert [cache.probe(toks(0, n), partial=False) for n in (4, 5, 6, 7)] == [4, 4, 6, 4]
        assert [cache.probe(toks(0, n), partial=True) for n in (4, 5, 6, 7)] == [4, 5, 6, 6]

    def test_prompt_longer_than_what_is_stored(self) -> None:
        """The rest is new."""
        cache = Cache(4, FULL)
        cache.store(toks(0, 8))
        assert lengths(cache.match([*toks(0, 8), *toks(50, 60)])) == (8, 8, 8, 18)
        assert lengths(cache.match([*toks(0, 6), *toks(50, 60)])) == (6, 6, 6, 16)

    def test_short_coverage_cuts(self) -> None:
        """A page that covers a part of its block ends the match there."""
        cache = Cache(4, FULL)
        path = cache.store(toks(0, 4))
        middle, _how = cache.tree.insert(path[0], pack(toks(4, 8)).data, 4)
        cache.give(middle, 0, 3)
        tail, _how = cache.tree.insert(middle, pack(toks(8, 12)).data, 4)
        cache.give(tail, 0, 4)
        assert lengths(cache.match(toks(0, 12))) == (7, 7, 12, 12)


class TestBackoff:
    def test_back_off_counts_from_the_longest_common_path(self) -> None:
        """It may end inside a block, and never goes below zero."""
        cache = Cache(8, FULL)
        cache.store(toks(0, 32))
        for partial in (True, False):
            assert cache.probe(toks(0, 32), partial, backoff=3) == 29
            assert cache.probe(toks(0, 2), partial, backoff=3) == 0
            assert [cache.probe(toks(0, 32), partial, backoff) for backoff in (1, 8, 9, 31, 32, 100)] == [31, 24, 23, 1, 0, 0]
        assert cache.match(toks(0, 32), backoff=3).divergence == 32

    def test_back_off_with_snapshots(self) -> None:
        """The last snapshot at or below the shorter length; never another position's state."""
        cache = Cache(4, FULL, SSM)
        path = cache.store(toks(0, 12))
        for block in path[:2]:
            cache.give(block, 1, 4)
        assert cache.probe(toks(0, 12)) == 12
        assert cache.probe(toks(0, 12), backoff=1) == 8

    def test_back_off_makes_a_stale_block_needed(self) -> None:
        """One token less and a block re-enters the window, with what its page covers."""
        cache = Cache(32, FULL, window(33))
        path = cache.store(toks(0, 96), without=[1])
        cache.give(path[0], 1, 32)
        cache.give(path[1], 1, 16)
        cache.give(path[2], 1, 32)
        assert cache.probe(toks(0, 96)) == 96
        assert cache.probe(toks(0, 96), backoff=1) == 48


class TestWindows:
    def test_middle_pages_may_be_gone(self) -> None:
        """Only what is in the window at the match's end is needed."""
        cache = Cache(4, window(8))
        path = cache.store(toks(0, 16))
        for block in path[:2]:
            cache.lose(block)
        assert cache.probe(toks(0, 15)) == 15
        assert cache.probe(toks(0, 11)) == 0

    def test_out_of_window_pages_dropped_at_commit(self) -> None:
        """The endpoint is reusable, an earlier one is not."""
        cache = Cache(32, window(64))
        path = cache.store(toks(0, 128))
        for block in path[:2]:
            cache.lose(block)
        assert cache.probe(toks(0, 128)) == 128
        assert cache.probe(toks(0, 96)) == 0

    def test_unaligned_endpoint(self) -> None:
        """W - 1 tokens of history are needed, not W."""
        cache = Cache(128, FULL, window(128))
        first, second = cache.store(toks(0, 255))
        cache.lose(first, 1)
        query = [*toks(0, 255), 999]
        assert cache.probe(query) == 255
        page = second.pages[1]
        assert page is not None
        cache.tree.drop_page(page)
        cache.give(second, 1, 126)
        assert cache.probe(query) < 255

    @pytest.mark.parametrize("history", [37, 38, 39, 32])
    def test_window_smaller_than_a_block(self, history: int) -> None:
        """At 38 tokens of history blocks 0 and 1 are live, at 39 only block 1; at 32 block 0 is."""
        for missing in (0, 1):
            cache = Cache(32, window(8))
            path = cache.store(toks(0, 64))
            cache.lose(path[missing])
            live = {37: (0, 1), 38: (0, 1), 39: (1,), 32: (0,)}[history]
            assert (cache.probe(toks(0, history)) == history) == (missing not in live)

    def test_window_of_one_token_needs_no_history_at_a_boundary(self) -> None:
        """The input token is the whole window, so a short page of the last block limits nothing there."""
        cache = Cache(32, FULL, window(1))
        path = cache.store(toks(0, 96), without=[1])
        cache.give(path[2], 1, 16)
        assert cache.probe(toks(0, 96)) == 96
        assert cache.probe(toks(0, 95)) == 80
        bare = Cache(32, FULL, window(1))
        bare.store(toks(0, 96), without=[1])
        assert [bare.probe(toks(0, n)) for n in (96, 95, 64, 31)] == [96, 64, 64, 0]

    def test_sinks_are_always_needed(self) -> None:
        """A path without its sinks has no endpoint at all behind them."""
        cache = Cache(4, FULL, window(4, sink_blocks=1))
        path = cache.store(toks(0, 16), without=[1])
        for block in path[1:]:
            cache.give(block, 1, 4)
        assert cache.probe(toks(0, 16)) == 0
        cache.give(path[0], 1, 4)
        assert cache.probe(toks(0, 16)) == 16

    def test_best_sibling_not_first_sibling(self) -> None:
        """The prompt's own last block has lost its window page; another branch still serves the shared part."""
        cache = Cache(8, FULL, window(8))
        first = cache.store([*toks(0, 12), 1, 1, 1, 1])
        second = cache.store([*toks(0, 12), 2, 2, 2, 2])
        cache.lose(second[1], 1)
        found = cache.match([*toks(0, 12), 2, 2, 2, 2])
        assert (found.num_tokens, found.blocks) == (12, first)
        assert found.divergence == 16

    def test_coverage_of_a_conversation_only_grows(self) -> None:
        """Turns of 80, 88 and again 80 tokens: both endpoints stay reusable."""
        cache = Cache(32, FULL, window(16))
        windows = []
        for length in (80, 88, 80):
            path = cache.store(toks(0, length))
            last = cache.match(toks(0, length)).blocks[2]
            page = last.pages[1]
            assert page is not None
            windows.append(page.coverage)
            assert len(path) >= 2
        assert windows == [16, 24, 24]
        assert cache.probe([*toks(0, 80), 999]) == 80
        assert cache.probe([*toks(0, 88), 999]) == 88


class TestSnapshots:
    def test_attention_hit_with_recurrent_miss(self) -> None:
        """Groups are reconciled by intersection; the diagnostic says what attention alone would give."""
        cache = Cache(4, FULL, SSM)
        cache.store(toks(0, 8), snapshots=False)
        assert lengths(cache.match(toks(0, 8))) == (0, 8, 8, 8)

    def test_snapshots_of_several_commits_stay_independent(self) -> None:
        """A later endpoint does not cost an earlier one."""
        cache = Cache(32, FULL, SSM)
        cache.store(toks(0, 32))
        cache.store(toks(0, 64))
        for partial in (False, True):
            assert [cache.probe(toks(0, n), partial) for n in (32, 48, 96)] == [32, 32, 64]
        assert cache.match(toks(0, 48), partial=True).before_hybrid == 48
        assert cache.match(toks(0, 48), partial=False).before_hybrid == 32
        assert cache.match(toks(0, 64), partial=True).before_hybrid == 64

    def test_unaligned_snapshot_and_the_partial_switch(self) -> None:
        """A longer prompt needs the switch to use it, the exact one does not."""
        cache = Cache(32, FULL, SSM)
        cache.store(toks(0, 32))
        path = cache.store(toks(0, 48))
        snapshot = path[1].pages[1]
        assert snapshot is not None
        assert snapshot.coverage == 16
        assert [cache.probe(toks(0, 64), partial) for partial in (False, True)] == [32, 48]
        assert [cache.probe(toks(0, 48), partial) for partial in (False, True)] == [48, 48]

    def test_snapshot_survives_the_full_sibling(self) -> None:
        """The block that continues a partial one keeps its snapshot."""
        cache = Cache(32, FULL, SSM)
        cache.store(toks(0, 48))
        cache.store(toks(0, 96))
        assert cache.probe(toks(0, 48)) == 48
        assert cache.probe(toks(0, 96)) == 96

    def test_several_snapshots_in_one_block(self) -> None:
        """Positions 10, 20, 25: the widest replaces the others, a fork reuses what lies before it."""
        cache = Cache(32, FULL, SSM)
        reused = []
        for position in (10, 20, 25):
            reused.append(cache.probe(toks(0, position)))
            cache.store(toks(0, position))
        assert reused == [0, 10, 20]
        assert cache.probe(toks(0, 25)) == 25
        assert cache.probe(toks(0, 20)) == 0

    def test_forks_inside_a_block(self) -> None:
        """With a snapshot at 20, a fork at 15 reuses nothing, forks at 25 and later reuse 20."""
        cache = Cache(32, FULL, SSM)
        cache.store(toks(0, 20))
        assert cache.probe([*toks(0, 15), *toks(90, 110)]) == 0
        assert cache.probe([*toks(0, 25), *toks(90, 110)]) == 20
        cache.store(toks(0, 32))
        assert cache.probe([*toks(0, 40)]) == 32

    def test_divergence_depth(self) -> None:
        """Where a branch leaves the cached path, whatever can be reused of it."""
        cache = Cache(32, FULL, SSM)
        cache.store(toks(0, 96))
        sibling = [*toks(0, 64), *toks(500, 532)]
        assert lengths(cache.match(sibling)) == (0, 64, 64, 96)
        cache.store(toks(0, 64))
        assert lengths(cache.match(sibling)) == (64, 64, 64, 96)
        assert lengths(cache.match(toks(800, 832))) == (0, 0, 0, 32)

    @pytest.mark.parametrize("length", [16, 32, 48, 64, 96, 128])
    def test_lengths_are_ordered(self, length: int) -> None:
        """reused <= before hybrid pruning <= divergence <= lookup."""
        cache = Cache(32, FULL, window(40), SSM)
        cache.store(toks(0, 32))
        path = cache.store(toks(0, 112))
        cache.lose(path[1], 1)
        found = cache.match(toks(0, length))
        assert list(lengths(found)) == sorted(lengths(found))

    def test_snapshots_only(self) -> None:
        """A model of recurrent layers alone needs nothing but the snapshot."""
        cache = Cache(4, SSM)
        cache.store(toks(0, 8))
        cache.store(toks(0, 14))
        assert [cache.probe(toks(0, n)) for n in (7, 8, 13, 14, 20)] == [0, 8, 8, 14, 14]


class TestIdentity:
    def test_scopes_share_nothing(self) -> None:
        """In no pair of scopes is anything reused, not even one token."""
        scopes = [ReuseScope(lora, salt) for lora, salt in itertools.product([None, 0, 7, 123], repeat=2)]
        cache = Cache(4, FULL)
        for scope in scopes:
            assert cache.probe(toks(0, 4), scope=scope) == 0
            assert cache.probe([0], scope=scope) == 0
            cache.store(toks(0, 4), scope)
            assert cache.probe(toks(0, 4), scope=scope) == 4

    def test_another_item_is_another_prompt(self) -> None:
        """Reuse stops before the first differing digest, however alike they are."""
        cache = Cache(4, FULL)
        near = bytes([1] + [0] * 31)
        cases: list[tuple[list[Token], list[Token], int]] = [
            ([101, digest(1), 1001, 1002, 7], [101, digest(2), 1001, 1002, 7], 1),
            ([102, digest(1), 1001, 7], [102, 5, digest(1), 1001], 1),
            ([103, digest(1), 1001, digest(2)], [103, digest(2), 1001, digest(1)], 1),
            ([104, bytes(32), 7, 8], [104, near, 7, 8], 1),
            ([105, digest(1), 1001, 1002, 7], [105, digest(1), 1001, 1002, 7], 5),
        ]
        for stored, query, expected in cases:
            cache.store(stored)
            assert cache.probe(query) == expected

    def test_ids_that_look_like_a_digest(self) -> None:
        """A buffer whose words spell a stored digest is refused, not matched: no id has bit 31."""
        cache = Cache(16, FULL)
        cache.store([1, digest(3), *toks(5, 11)])
        words = np.frombuffer(pack([1, digest(3), *toks(5, 11)]).data, np.int32)
        assert len(words) == 16
        for size in (2, 5, 12, 16):
            with pytest.raises(ConfigError, match="position 1 is 2147483648"):
                match(cache.tree, EMPTY_SCOPE, pack_unchecked(words[:size]), True, 0)

    def test_ids_out_of_range_are_refused_before_and_behind_the_match(self) -> None:
        """What did not match is checked, with and without a root."""
        cache = Cache(4, FULL)
        bad = np.array([0, 1, 2, 3, 4, -1], np.int32)
        for expected in (0, 4):
            with pytest.raises(ConfigError, match="position 5 is 4294967295"):
                match(cache.tree, EMPTY_SCOPE, pack_unchecked(bad), True, 0)
            assert match(cache.tree, EMPTY_SCOPE, pack_unchecked(bad[:4]), True, 0).num_tokens == expected
            cache.store(toks(0, 4))

    def test_buffers_match_like_lists(self) -> None:
        """Commit with one, probe with another."""
        cache = Cache(4, FULL)
        cache.store(toks(0, 10))
        for carrier in (np.arange(10, dtype=np.int32), np.arange(10, dtype=np.int64), tuple(range(10)), np.arange(20)[::2] // 2):
            assert match(cache.tree, EMPTY_SCOPE, pack(carrier), True, 0).num_tokens == 10


class TestKeys:
    def key(self, tokens: list[Token], ordinal: int, scope: ReuseScope = EMPTY_SCOPE) -> bytes:
        return list(sequence_to_blockchain_keys(4, scope, tokens))[ordinal + 1][1]

    def first_new(self, cache: Cache, tokens: list[Token], backoff: int = 0) -> bytes | None:
        found = cache.match(tokens, backoff=backoff)
        return first_new_block_key(cache.tree, EMPTY_SCOPE, pack(tokens), found)

    def test_no_full_block_would_be_new(self) -> None:
        """A prompt shorter than a block, or wholly cached, adds none."""
        cache = Cache(4, FULL)
        assert self.first_new(cache, toks(0, 3)) is None
        cache.store(toks(0, 8))
        assert self.first_new(cache, toks(0, 8)) is None
        assert self.first_new(cache, toks(0, 11)) is None

    @pytest.mark.parametrize("backoff", [0, 1, 4, 5, 16])
    @pytest.mark.parametrize("shared", [0, 1, 3, 4, 5, 7, 8, 11, 16])
    def test_the_key_is_of_the_prompts_own_chain(self, shared: int, backoff: int) -> None:
        """Never a partly matched block's own key."""
        cache = Cache(4, FULL)
        cache.store(toks(0, 16))
        query = [*toks(0, shared), *toks(100, 120)][:16]
        ordinal = cache.probe(query, backoff=backoff) // 4
        expected = self.key(query, ordinal) if ordinal < 4 else None
        assert self.first_new(cache, query, backoff) == expected

    def test_a_block_without_its_window_page_is_new(self) -> None:
        """The node exists, but a request would have to compute it."""
        cache = Cache(4, FULL, window(4))
        path = cache.store(toks(0, 8))
        cache.lose(path[1], 1)
        query = [*toks(0, 8), *toks(100, 104)]
        assert cache.probe(query) == 4
        assert self.first_new(cache, query) == path[1].block_key() == self.key(query, 1)

    def test_cold_and_after_clear(self) -> None:
        """Equal prompts have equal first keys, before anything is stored and after everything is gone."""
        cache = Cache(4, FULL)
        cold = self.first_new(cache, toks(0, 8))
        path = cache.store(toks(0, 8))
        assert path[0].block_key() == cold
        cache.tree.clear()
        assert self.first_new(cache, toks(0, 8)) == cold == self.key(toks(0, 8), 0)

    def chain(self, tokens: list[Token], scope: ReuseScope = EMPTY_SCOPE) -> list[bytes]:
        return [key for _part, key in sequence_to_blockchain_keys(4, scope, tokens)][1:]

    def by_keys(self, cache: Cache, keys: list[bytes], scope: ReuseScope = EMPTY_SCOPE, backoff: int = 0) -> Match:
        return match_keys(cache.tree, scope, keys, backoff)

    def test_match_by_keys(self) -> None:
        """As the tokens would match, without knowing them; what is unknown ends it."""
        scope = ReuseScope(7, 11)
        cache = Cache(4, FULL, window(6))
        tokens = toks(0, 14)
        path = cache.store(tokens, scope)
        keys = self.chain(tokens, scope)
        found = self.by_keys(cache, keys, scope)
        assert (found.num_tokens, found.divergence, found.blocks) == (14, 14, path)
        assert self.by_keys(cache, keys[:2], scope).num_tokens == 8
        assert self.by_keys(cache, [], scope).num_tokens == 0
        assert self.by_keys(cache, keys).num_tokens == 0
        cache.store(toks(50, 54))
        assert self.by_keys(cache, keys).num_tokens == 0
        assert self.by_keys(cache, [*keys[:2], bytes(32), keys[3]], scope).num_tokens == 8
        assert self.by_keys(cache, keys[1:], scope).num_tokens == 0
        assert self.by_keys(cache, keys, scope, backoff=3).num_tokens == 11
        cache.lose(path[2], 0)
        assert self.by_keys(cache, keys, scope).num_tokens == 8

    def test_match_by_keys_needs_pages_too(self) -> None:
        """Keys say which blocks, not that their pages are there."""
        cache = Cache(4, FULL, SSM)
        path = cache.store(toks(0, 8), snapshots=False)
        keys = self.chain(toks(0, 8))
        found = self.by_keys(cache, keys)
        assert lengths(found) == (0, 8, 8, 8)
        cache.give(path[0], 1, 4)
        assert self.by_keys(cache, keys).num_tokens == 4


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_keys_that_several_blocks_share_lead_to_the_longest_match(order: tuple[int, ...]) -> None:
    """With SHA-256 three prompts have the same keys, and different blocks of them are cached: the longest is found."""
    imitation = bytes(32)
    prompts: list[list[Token]] = [
        [0, 0, imitation, 0, 5, 6, 7, 8, 9],
        [0, 0, 0, imitation, 5, 6, 7, 8, 9, 10, 11, 12],
        [0, imitation, 0, 0, 5],
    ]
    cache = Cache(4, FULL, block_key_hash="sha256")
    for index in order:
        cache.store(prompts[index])
    keys = [key for _part, key in sequence_to_blockchain_keys(4, None, prompts[1], "sha256")][1:]
    assert match_keys(cache.tree, EMPTY_SCOPE, keys, 0).num_tokens == 12
    cache.tree.remove(cache.match(prompts[1]).blocks[0])
    assert match_keys(cache.tree, EMPTY_SCOPE, keys, 0).num_tokens == 8
    assert match_keys(cache.tree, EMPTY_SCOPE, keys[:1], 0).num_tokens == 4


def test_matching_changes_nothing() -> None:
    """A probe is read-only: no pin, no page call, no node, not even for a scope nobody knew."""
    cache = Cache(4, FULL, window(4))
    path: list[Block] = cache.store(toks(0, 12))
    before = (cache.tree.num_blocks, len(cache.keeper.adopted), len(cache.tree.roots()), [block.pins for block in path])
    for n in range(14):
        cache.probe(toks(0, n))
        cache.probe(toks(0, n), scope=ReuseScope(n))
    assert before == (cache.tree.num_blocks, len(cache.keeper.adopted), len(cache.tree.roots()), [block.pins for block in path])
    assert cache.keeper.unlisted == cache.keeper.dropped == []
