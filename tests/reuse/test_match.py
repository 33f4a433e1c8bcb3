"""The longest reusable prefix, by example: windows, snapshots, coverage, back-off, siblings, scopes, keys."""

from __future__ import annotations

import numpy as np
import pytest

from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.keys import ReuseScope, sequence_to_blockchain_keys
from kv_cache_manager_v2.reuse.match import Match, first_new_block_key, match, match_keys
from kv_cache_manager_v2.reuse.tokens import pack, pack_unchecked
from tests.support.tree_rig import EMPTY_SCOPE, FULL, SSM, Cache, Token, digest, toks, window


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
        """A path without its sinks has no match that ends after them."""
        cache = Cache(4, FULL, window(4, sink_blocks=1))
        path = cache.store(toks(0, 16), without=[1])
        for block in path[1:]:
            cache.give(block, 1, 4)
        assert cache.probe(toks(0, 16)) == 0
        cache.give(path[0], 1, 4)
        assert cache.probe(toks(0, 16)) == 16


class TestIdentity:
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


class TestKeys:
    def key(self, tokens: list[Token], ordinal: int, scope: ReuseScope = EMPTY_SCOPE) -> bytes:
        return list(sequence_to_blockchain_keys(4, scope, tokens))[ordinal + 1][1]

    def first_new(self, cache: Cache, tokens: list[Token], backoff: int = 0) -> bytes | None:
        found = cache.match(tokens, backoff=backoff)
        return first_new_block_key(cache.tree, EMPTY_SCOPE, pack(tokens), found)

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
    """A probe is read-only: no pin, no page call, no node, not even for an unknown scope."""
    cache = Cache(4, FULL, window(4))
    path: list[Block] = cache.store(toks(0, 12))
    before = (cache.tree.num_blocks, len(cache.keeper.adopted), len(cache.tree.roots()), [block.pins for block in path])
    for n in range(14):
        cache.probe(toks(0, n))
        cache.probe(toks(0, n), scope=ReuseScope(n))
    assert before == (cache.tree.num_blocks, len(cache.keeper.adopted), len(cache.tree.roots()), [block.pins for block in path])
    assert cache.keeper.unlisted == cache.keeper.dropped == []
