"""Identity: whose tokens these are, and that no two different sequences share a name or a page."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from kv_cache_manager_v2 import (
    ConfigError,
    MmItemContext,
    ReuseScope,
    gen_multimodal_cache_key_tokens,
    sequence_to_blockchain_keys,
)
from tests.support import inside
from tests.support.engine import Token
from tests.support.models import KIB, attention, model, small
from tests.support.rig import Rig, toks

SCOPES = [
    ReuseScope(),
    ReuseScope(0),
    ReuseScope(None, 0),
    ReuseScope(0, 0),
    ReuseScope(7, 11),
    ReuseScope(123, 456),
    ReuseScope(456, 123),
    ReuseScope(123),
    ReuseScope(None, 123),
]


def keys(scope: ReuseScope, tokens: Any, size: int = 4) -> list[bytes]:
    return [key for _, key in sequence_to_blockchain_keys(size, scope, tokens)]


@pytest.mark.parametrize("length", [1, 4, 6])
def test_scopes_never_mix(length: int) -> None:
    """None and 0 differ, fields are not interchangeable; no scope sees another's tokens, in probe or create, not even one of
    them."""
    with Rig(small(64)) as rig:
        for number, scope in enumerate(SCOPES):
            for other in SCOPES[number:]:
                assert rig.reused(toks(0, length), other) == 0
            rig.seed(toks(0, length), scope)
            for other in SCOPES[: number + 1]:
                assert rig.reused(toks(0, length), other) == length
    for one, other in combinations(SCOPES, 2):
        assert one != other
        assert not set(keys(one, toks(0, length))) & set(keys(other, toks(0, length)))


def test_salt_range() -> None:
    """Every unsigned 64-bit salt keeps a namespace of its own."""
    salts = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    with Rig(small(16)) as rig:
        for salt in salts:
            assert rig.reused(toks(0, 4), ReuseScope(None, salt)) == 0
            rig.seed(toks(0, 4), ReuseScope(None, salt))
        assert len({keys(ReuseScope(None, salt), toks(0, 4))[0] for salt in salts}) == len(salts)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_digest_length(size: int) -> None:
    """Only 32 bytes are a digest, for every public call."""
    bad: list[Token] = [1, 2, bytes(size), 3]
    with Rig(small(8)) as rig:
        cache = rig.open()
        assert cache.resize(8)
        calls: list[Callable[[], object]] = [
            lambda: rig.create(bad),
            lambda: rig.probe(bad),
            lambda: cache.commit(bad),
            lambda: keys(ReuseScope(), bad),
            lambda: MmItemContext(bytes(size)),
        ]
        for call in calls:
            with pytest.raises(ConfigError):
                call()
        assert (cache.num_committed_tokens, rig.manager.num_open_caches) == (0, 1)


@pytest.mark.parametrize("token", [-1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, 1 << 64])
@pytest.mark.parametrize("position", [0, 3, 4, 6])
def test_token_range(token: int, position: int) -> None:
    """Ids outside 31 bits are refused with position and value by every call, never wrapped onto another token; 2**31 - 1 is
    fine."""
    bad = list(range(7))
    bad[position] = token
    with Rig(small(8)) as rig:
        rig.seed(toks(0, 7))
        cache = rig.open()
        assert cache.resize(8)
        forms: list[Any] = [bad, tuple(bad)]
        if -(1 << 63) <= token < 1 << 63:
            forms.append(np.array(bad, np.int64))
        if 0 <= token < 1 << 32:
            forms.append(np.array(bad, np.uint32))
        if -(1 << 31) <= token < 1 << 31:
            forms.append(array("i", bad))
        for form in forms:
            for call in (rig.create, cache.commit, lambda tokens: rig.manager.probe_reuse(None, tokens)):
                with pytest.raises(ConfigError, match=str(position)):
                    call(form)
        if position == 0:
            with pytest.raises(ConfigError):
                cache.commit([token])
        assert (cache.num_committed_tokens, rig.manager.num_open_caches) == (0, 1)
        cache.commit([(1 << 31) - 1])
        assert cache.committed_tokens == [(1 << 31) - 1]


def test_same_ids_other_image() -> None:
    """The content is part of the identity: reuse stops before the first item that differs, at another offset, or swapped."""
    one, two = bytes(31) + b"\1", bytes(31) + b"\2"
    with Rig(small(32)) as rig:
        rig.seed([101, one, 1001, 1002, 7])
        assert rig.reused([101, one, 1001, 1002, 7]) == 5
        assert rig.reused([101, two, 1001, 1002, 7]) == 1
        assert rig.reused([101, 102, one, 1001, 1002, 7]) == 1
        images = [one, *toks(1, 4), two, *toks(5, 8)]
        swapped = [two, *toks(1, 4), one, *toks(5, 8)]
        rig.seed(images)
        assert rig.reused(images) == 8
        assert rig.reused(swapped) == 0
        part = rig.start(images[:3])  # the other path that commits: behind a partial match, token by token, at the end
        assert len(part.tokens) == 3
        assert part.advance(images[3:5])
        assert part.advance(swapped[4:5])
        part.cache.stop_committing()
        part.close()
        assert rig.reused([*images[:5], one]) == 6
        assert rig.reused([*images[:5], two]) == 5


def test_items_and_digests_are_the_same() -> None:
    """An MmItemContext is its digest; an item's cache-key tokens begin with the digest, whatever the front end's own id of it."""
    digest = bytes(range(32))
    with Rig(small(16)) as rig:
        tokens = gen_multimodal_cache_key_tokens(1000, digest, 6)
        assert list(tokens) == [digest, 1001, 1002, 1003, 1004, 1005]
        cache = rig.open()
        assert cache.resize(7)
        cache.commit([7, *tokens])
        cache.close()
        assert rig.create([7, MmItemContext(digest, "cat"), *toks(1001, 1006)]).num_committed_tokens == 7
        assert rig.create([7, MmItemContext(digest, "dog"), *toks(1001, 1006)]).num_committed_tokens == 7


@pytest.mark.parametrize("per_cache", [False, True])
def test_text_only_refuses_digests(per_cache: bool) -> None:
    """At create, at commit and at probe, before any state changes; a manager that promises text lets no cache take that back."""
    config = model([attention(0, 4 * KIB)], tokens_per_block=4, text_only=not per_cache)
    with Rig(config) as rig:
        manager = rig.manager
        wanted = True if per_cache else None
        with pytest.raises(ConfigError):
            manager.create_kv_cache(None, [1, bytes(32)], text_only=wanted)
        assert manager.num_open_caches == 0
        cache = manager.create_kv_cache(None, [1], text_only=wanted)
        assert cache.resume(rig.stream)
        assert cache.resize(8)
        cache.commit([1, 2])
        tokens: Any
        for tokens in ([bytes(32)], [3, 4, bytes(32)]):
            with pytest.raises(ConfigError):
                cache.commit(tokens)
            assert cache.num_committed_tokens == 2
        cache.commit([3])
        assert cache.committed_tokens == [1, 2, 3]
        cache.close()
        if not per_cache:
            assert manager.text_only
            with pytest.raises(ConfigError):
                manager.create_kv_cache(None, [1], text_only=False)
            with pytest.raises(ConfigError):
                manager.probe_reuse(None, [bytes(32)])


@pytest.mark.parametrize("committed", ["list", "tuple", "int32", "uint32", "int64", "array", "strided"])
def test_inputs_of_any_form_agree(committed: str) -> None:
    """Committed in one form, found in every other; an empty array is an empty prompt; other element types are refused or
    converted."""
    ids = [0, 1, 5, 70_000, (1 << 31) - 1, 9, 10, 11, 12]
    forms: dict[str, Any] = {
        "list": ids,
        "tuple": tuple(ids),
        "int32": np.array(ids, np.int32),
        "uint32": np.array(ids, np.uint32),
        "int64": np.array(ids, np.int64),
        "array": array("i", ids),
        "strided": np.array([ids, ids], np.int32).T.copy()[:, 0],
    }
    with Rig(small(16)) as rig:
        cache = rig.open()
        assert cache.resize(9)
        cache.commit(forms[committed])
        assert cache.committed_tokens == ids
        cache.close()
        for form in forms.values():
            assert rig.manager.probe_reuse(None, form) == 9
            assert rig.create(form).num_committed_tokens == 9
            assert keys(ReuseScope(), form) == keys(ReuseScope(), ids)
        empties: list[Any] = [[], (), np.array([], np.int32), array("i")]
        for empty in empties:
            assert rig.manager.probe_reuse(None, empty) == 0
            assert rig.create(empty).num_committed_tokens == 0
        for small_form in (np.array(ids[:2], np.int16), np.array(ids[:2], np.uint8)):
            assert rig.manager.probe_reuse(None, small_form) == 2
        wrong: Any
        for wrong in (np.array(ids, np.float32), np.array(ids, np.float64), "text", b"1234", 5, np.array([ids, ids])):
            with pytest.raises(ConfigError):
                rig.manager.probe_reuse(None, wrong)


@pytest.mark.parametrize("name", ["blake3", "sha256"])
def test_keys_are_the_same_in_every_process(name: str) -> None:
    """A cryptographic chain of 32-byte keys, equal in processes with different hash seeds."""
    program = (
        "from kv_cache_manager_v2 import ReuseScope, sequence_to_blockchain_keys as chain\n"
        f"print([key.hex() for _, key in chain(4, ReuseScope(7, 11), list(range(64)), {name!r})])"
    )
    outputs = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
        outputs.add(done.stdout)
    assert len(outputs) == 1
    chain = [key.hex() for _, key in sequence_to_blockchain_keys(4, ReuseScope(7, 11), toks(0, 64), name)]
    assert outputs == {f"{chain}\n"}
    assert len(set(chain)) == 17
    assert {len(key) for key in chain} == {64}


def test_no_hash_decides_a_match() -> None:
    """Tokens are compared, not keys: nothing is hashed to find, commit or reuse a block."""
    with Rig(small(8)) as rig:
        rig.seed(toks(0, 8))
        assert rig.reused(toks(0, 8)) == 8
        assert [block.key for block in inside.tree_blocks(rig.manager, toks(0, 8))] == [None, None]
