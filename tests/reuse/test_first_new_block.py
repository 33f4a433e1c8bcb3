"""The key of the first block that a prompt would add, and probes by keys: what a router asks before it decides."""

from __future__ import annotations

import numpy as np
import pytest

from kv_cache_manager_v2 import ReuseScope, Tokens, sequence_to_blockchain_keys
from tests.support import inside
from tests.support.engine import Token
from tests.support.models import Kind, small
from tests.support.rig import Rig, toks


def chain(tokens: list[Token], scope: ReuseScope | None = None) -> list[bytes]:
    """Keys of the blocks of 4."""
    return [key for _, key in sequence_to_blockchain_keys(4, scope, tokens)][1:]


def first_new(rig: Rig, tokens: Tokens, scope: ReuseScope | None = None) -> bytes | None:
    return rig.manager.probe_first_new_block_key(scope, tokens)


def other(length: int) -> list[Token]:
    return toks(900_000, 900_000 + length)


@pytest.mark.parametrize("kinds", [["full"], [(4, 0)], ["full", (4, 0)]])
def test_the_probe_names_the_block_that_is_stored_first(kinds: list[Kind]) -> None:
    """Before the commit the first block; then the first one after the cached ones; None for a prompt that fills no new block."""
    with Rig(small(32, kinds=kinds)) as rig:
        tokens = toks(0, 16)
        assert first_new(rig, tokens) == chain(tokens)[0]
        request = rig.start(tokens)
        assert first_new(rig, tokens) == chain(tokens)[0]
        assert request.advance(tokens[:8])
        assert first_new(rig, tokens) == chain(tokens)[2]
        assert first_new(rig, tokens[:8]) is None
        assert first_new(rig, tokens[:11]) is None
        assert first_new(rig, []) is None
        request.close()
        stored = inside.tree_blocks(rig.manager, tokens[:8])
        assert [block.block_key() for block in stored] == chain(tokens)[:2]


@pytest.mark.parametrize("backoff", [0, 1, 4, 5, 16])
@pytest.mark.parametrize("shared", range(12))
def test_the_querys_own_chain(shared: int, backoff: int) -> None:
    """16 tokens cached; a prompt of 16 that shares some: the key of block reusable // 4 of the prompt's own chain, back-off or
    not."""
    with Rig(small(16, backoff=backoff)) as rig:
        assert first_new(rig, toks(0, 3)) is None
        rig.seed(toks(0, 16))
        query = [*toks(0, shared), *other(16 - shared)]
        reusable = rig.probe(query)
        assert reusable == max(0, shared - backoff)
        assert first_new(rig, query) == chain(query)[reusable // 4]


def test_a_hole_in_the_window() -> None:
    """Full and window 4: block 1 is there, but its window page is not. 4 tokens are reusable, and block 1 is the first new one."""
    with Rig(small(16, kinds=["full", (4, 0)])) as rig:
        rig.seed(toks(0, 8))
        block = inside.tree_blocks(rig.manager, toks(0, 8))[1]
        inside.drop(rig.manager, inside.page_of(block, rig.group(1)))
        query = [*toks(0, 8), *other(8)]
        assert rig.probe(query) == 4
        assert first_new(rig, query) == chain(query)[1]
        assert first_new(rig, query) == block.block_key()


def test_duplicates_collide_until_one_commits() -> None:
    """Two prompts about to compute the same block have the same key; once one is committed they diverge."""
    with Rig(small(32)) as rig:
        one, two = [*toks(0, 8), *other(4)], [*toks(0, 8), *toks(50, 54)]
        assert first_new(rig, one) == first_new(rig, two)
        rig.seed(toks(0, 8))
        assert first_new(rig, one) != first_new(rig, two)
        rig.manager.clear_reusable_blocks()
        assert first_new(rig, one) == first_new(rig, two) == chain(one)[0]


def test_scopes_and_forms() -> None:
    """Scopes have chains of their own; digests and views of int32 are the same tokens."""
    with Rig(small(32)) as rig:
        tokens = toks(0, 8)
        rig.seed(tokens[:4], ReuseScope(1))
        assert first_new(rig, tokens, ReuseScope(1)) == chain(tokens, ReuseScope(1))[1]
        assert first_new(rig, tokens, ReuseScope(2)) == chain(tokens, ReuseScope(2))[0]
        assert first_new(rig, np.arange(16, dtype=np.int32)[:8], ReuseScope(1)) == chain(tokens, ReuseScope(1))[1]
        picture: list[Token] = [bytes(32), *toks(1, 8)]
        assert first_new(rig, picture) == chain(picture)[0]
        rig.seed(picture[:4])
        assert first_new(rig, picture) == chain(picture)[1]


# --- probes by keys


def test_probe_by_keys() -> None:
    """A full chain equals the match; 2 keys are 8 tokens; a wrong scope or no keys 0; an unknown key stops; a partial tail counts
    its own tokens; a removed subtree leaves the deepest survivor."""
    with Rig(small(32)) as rig:
        tokens = toks(0, 14)
        rig.seed(tokens)
        keys = chain(tokens)
        assert len(keys) == 4
        probe = rig.manager.probe_reuse_by_keys
        assert probe(None, keys) == rig.probe(tokens) == 14
        assert [probe(None, keys[:count]) for count in range(5)] == [0, 4, 8, 12, 14]
        assert probe(ReuseScope(1), keys) == 0
        assert probe(None, [keys[0], bytes(32), keys[2]]) == 4
        assert probe(None, keys[1:]) == 0
        assert [block.block_key() for block in inside.tree_blocks(rig.manager, tokens)] == keys
        third = inside.tree_blocks(rig.manager, tokens)[2]
        inside.drop(rig.manager, inside.page_of(third, rig.group(0)))
        assert probe(None, keys) == 8
