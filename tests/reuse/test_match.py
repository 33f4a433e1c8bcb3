"""The longest reusable prefix, by example: windows, snapshots, coverage, back-off, siblings, scopes, keys."""

from __future__ import annotations

import numpy as np
import pytest

from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.keys import ReuseScope, sequence_to_blockchain_keys
from kv_cache_manager_v2.reuse.match import Match, match, match_keys
from kv_cache_manager_v2.reuse.tokens import pack, pack_unchecked
from tests.support.tree_rig import EMPTY_SCOPE, FULL, SSM, Cache, Token, digest, toks, window


def lengths(found: Match) -> tuple[int, int, int, int]:
    return (found.num_tokens, found.before_hybrid, found.divergence, found.num_lookup_tokens)


class TestIdentity:
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
