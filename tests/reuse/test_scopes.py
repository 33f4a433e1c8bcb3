"""Who may reuse what: scopes, keys, private tails of partly matched blocks."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from kv_cache_manager_v2 import ConfigError, ReuseScope, Tokens, sequence_to_blockchain_keys
from kv_cache_manager_v2.reuse.keys import KEY_BYTES
from tests.support import inside
from tests.support.rig import Rig, mixed, small, toks

SCOPES = [
    ReuseScope(7, 11),
    ReuseScope(7, 12),
    ReuseScope(8, 11),
    ReuseScope(7, None),
    ReuseScope(None, 11),
    None,
]


@pytest.mark.parametrize("seeded", range(len(SCOPES)))
def test_a_scope_sees_only_its_own_blocks(seeded: int) -> None:
    """What is committed under one of (7,11), (7,12), (8,11), (7,-), (-,11) and none is seen by no other; probe equals create."""
    with Rig(small(8)) as rig:
        rig.seed(toks(0, 8), SCOPES[seeded])
        for number, scope in enumerate(SCOPES):
            assert rig.reused(toks(0, 8), scope) == (8 if number == seeded else 0)


def test_five_scopes_have_five_roots() -> None:
    """Root keys differ between scopes and repeat for equal ones; every block key depends on the scope."""
    scopes = [ReuseScope(), ReuseScope(1), ReuseScope(None, 1), ReuseScope(1, 1), ReuseScope(2, 1)]
    chains = [[key for _, key in sequence_to_blockchain_keys(4, scope, toks(0, 10))] for scope in scopes]
    again = [[key for _, key in sequence_to_blockchain_keys(4, scope, toks(0, 10))] for scope in scopes]
    assert chains == again
    for one, other in permutations(chains, 2):
        assert not set(one) & set(other)
    assert {len(key) for chain in chains for key in chain} == {KEY_BYTES}
    assert [len(chain) for chain in chains] == [4] * 5


@pytest.mark.parametrize("shared", range(1, 14))
def test_a_branch_never_writes_into_what_it_shares(shared: int) -> None:
    """A has 16 tokens; B reuses some of them, commits others behind, writes on: A's blocks keep their bytes and their match."""
    with Rig(small(16)) as rig:
        ours = toks(0, 16)
        rig.seed(ours)
        branch = rig.start(ours[:shared])
        assert len(branch.tokens) == shared
        assert branch.advance(toks(500, 503))
        assert branch.advance(toks(600, 606), commit=False)
        branch.check()
        again = rig.start(ours)
        assert len(again.tokens) == 16
        again.check()
        branch.check()


@pytest.mark.parametrize("form", ["list", "tuple", "int32", "uint32", "int64", "strided"])
def test_arrays_and_lists_are_the_same_tokens(form: str) -> None:
    """An array hashes and matches as the list of its items, in create, commit and probe."""
    ids = list(range(3, 23))
    forms: dict[str, Tokens] = {
        "list": ids,
        "tuple": tuple(ids),
        "int32": np.array(ids, np.int32),
        "uint32": np.array(ids, np.uint32),
        "int64": np.array(ids, np.int64),
        "strided": np.repeat(np.array(ids, np.int32), 3)[::3],
    }
    tokens = forms[form]
    with Rig(small(16)) as rig:
        cache = rig.create(tokens)
        assert cache.resume(rig.stream)
        assert cache.resize(20)
        cache.commit(tokens)
        assert cache.committed_tokens == ids
        cache.close()
        assert rig.manager.probe_reuse(None, tokens) == 20
        assert rig.reused(toks(3, 23)) == 20
        assert rig.create(tokens).num_committed_tokens == 20
    keys = list(sequence_to_blockchain_keys(4, None, tokens))
    assert keys == list(sequence_to_blockchain_keys(4, None, ids))


@pytest.mark.parametrize("digest", [bytes(31), bytes(33)])
def test_digests_have_32_bytes(digest: bytes) -> None:
    """A digest of 31 or 33 bytes is refused wherever tokens come in; nothing changes."""
    with Rig(small(8)) as rig:
        with pytest.raises(ConfigError):
            list(sequence_to_blockchain_keys(4, None, [1, digest]))
        with pytest.raises(ConfigError):
            rig.create([1, digest])
        cache = rig.create()
        assert cache.resume(rig.stream)
        assert cache.resize(4)
        with pytest.raises(ConfigError):
            cache.commit([1, digest])
        assert cache.num_committed_tokens == 0


def test_digests_take_part_in_a_match() -> None:
    """Every 5th token a digest: what was committed matches fully, and a different digest ends the match before it."""
    with Rig(small(8)) as rig:
        tokens = mixed(0, 20, every=5)
        rig.seed(tokens)
        assert rig.reused(tokens) == 20
        other = list(tokens)
        other[9] = bytes(31) + b"\1"
        assert rig.reused(other) == 9
        assert inside.num_tree_blocks(rig.manager) == 5
