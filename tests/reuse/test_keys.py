"""Block keys: pinned vectors of both hashes, the framing, and scopes that never share."""

from __future__ import annotations

import copy
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.reuse.keys import ReuseScope, make_block_keys, sequence_to_blockchain_keys
from kv_cache_manager_v2.reuse.tokens import MmItemContext, pack
from tests.support.tree_rig import Token, toks

D = bytes(range(32))
ONE_TO_SIX: list[Token] = toks(1, 7)
WITH_DIGEST: list[Token] = [1, D, 1002, 1003, 4, 5]

SHA256_VECTORS: list[tuple[ReuseScope, str, list[Token], list[str]]] = [
    (
        ReuseScope(),
        "00",
        ONE_TO_SIX,
        [
            "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
            "e432228522a304ab556d66e6e40979ad05575f28b19b554264dd3c6277aaf073",
            "7fabfb79be197b116ecec3a823a33b6cf1597e2d2a662f43165da8d2c118116d",
        ],
    ),
    (
        ReuseScope(salt=123),
        "027b00000000000000",
        ONE_TO_SIX,
        [
            "18027f2ef4cd39023cc5922cea2d0efe3f026bac9f19b3d3f27c561f37f4279b",
            "937fe4b3be3255ef678804615952c55a3912a483d031e796a7faaea4d36db9ec",
            "8034a44865445bc6b9ccc1e7d28ff79db3f7f2d0a678ffee07fc95c5b347c893",
        ],
    ),
    (
        ReuseScope(lora_id=123),
        "017b00000000000000",
        ONE_TO_SIX,
        [
            "3221b5f8e8a964b3317a00d2ff932f54e1e10b93b34e7b44eb86e85c8cde8cdd",
            "3a77e660ec765b1352afa4bd35e8e689a1a8d3590f45b2e72dafeb82c79cc32e",
            "5d07e3ccf7d618bbbec25836610c864c27fc820bedae7e374b757675b81b327a",
        ],
    ),
    (
        ReuseScope(7, 11),
        "0307000000000000000b00000000000000",
        ONE_TO_SIX,
        [
            "9e22dbfea623bd030eb7ae4a0d71a7a6beb3cbf25797bcc31ddd0acc5513d3a3",
            "a437786a903f9fd414443493bfbdd3f94abcf6a76666b349cc1eab3ed7ecb79c",
            "5d76a05e1f29b4b67e8261c6312f420b6136edd5d90de2ba21c033460eab32cf",
        ],
    ),
    (
        ReuseScope(lora_id=0),
        "010000000000000000",
        toks(1, 5),
        [
            "a536aa3cede6ea3c1f3e0357c3c60e0f216a8c89b853df13b29daa8f85065dfb",
            "544b0fe6275e28affc701393619e07a24e56dcf8cb84d9fa5e2d4ec597e94c64",
        ],
    ),
    (
        ReuseScope(salt=0),
        "020000000000000000",
        toks(1, 5),
        [
            "4322fd2bc0a137d1375b37b3b2e2b4715b3d3dd7ca9682438d4fea0f8437fad3",
            "295dada74ffa2e30efafd8719e40adc1266175d00504474bc4453e412c4a5001",
        ],
    ),
    (
        ReuseScope(salt=(1 << 63) + 5),
        "020500000000000080",
        toks(1, 5),
        [
            "9deabc75d324a57f60bda457b4b0ffa7b98ccf4aa11e3787b0efcdb1afed4c59",
            "e8a4a37dc43df2bb8cb1c00f2a573542ac55361e20127b8922da6eefc730567e",
        ],
    ),
    (
        ReuseScope(salt=(1 << 64) - 1),
        "02ffffffffffffffff",
        toks(1, 5),
        [
            "b2cf65b90288fa2b93e532214343121851bb8db63b059aeeb1188ca646b50a51",
            "fdd7927aa55dee819194cbb35ee141dfaa7659f087975c8b9c2d6c8de5c3f85b",
        ],
    ),
    (
        ReuseScope(),
        "00",
        WITH_DIGEST,
        [
            "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
            "e337ad9978f56c86e96fa3aa596144e5fa7054c647415c26ba9d09b25dafb551",
            "ef5f3fa8ed6807dce65c6fab6e700fad3668f17f0128412b04d2cf4dd31884bd",
        ],
    ),
]

BLAKE3_BLOCK_0: list[tuple[ReuseScope, list[Token], str]] = [
    (ReuseScope(), ONE_TO_SIX, "133c9e2c7b7a372167d83b80df805360137e47d1ffbe62e8b5969295c8168d2a"),
    (ReuseScope(salt=123), ONE_TO_SIX, "fae68b31e98ffc978ed13500c19e700c364f1b7d4288d6073d8f51e215c661e5"),
    (ReuseScope(lora_id=123), ONE_TO_SIX, "3251d7d6cc0619c639c3e31c154ffebfd41938fc24f87084fff7c46a4cb1b98d"),
    (ReuseScope(7, 11), ONE_TO_SIX, "bd8af4687818b520ce8e5054b7da5b233e12a24490d4a7f94ab4d26b006e6499"),
    (ReuseScope(salt=(1 << 63) + 5), toks(1, 5), "0c033d9159027be08d2b6b0c041030a3d5de5e6de36cf8edb00f4d4f9d0c0204"),
    (ReuseScope(), WITH_DIGEST, "4fb798023710d62049b9a5188bc49ea4cbb0b21b748fe7535c4ec0678ca3d3f9"),
]


@pytest.mark.parametrize(("scope", "scope_hex", "tokens", "expected"), SHA256_VECTORS)
def test_sha256_vectors(scope: ReuseScope, scope_hex: str, tokens: list[Token], expected: list[str]) -> None:
    """Scope bytes, root key and chain, as any engine computes them."""
    assert scope.data.hex() == scope_hex
    chain = list(sequence_to_blockchain_keys(4, scope, tokens, "sha256"))
    assert [key.hex() for _part, key in chain] == expected
    assert [part for part, _key in chain] == [[], tokens[:4], *([tokens[4:]] if tokens[4:] else [])]


@pytest.mark.parametrize(("scope", "tokens", "expected"), BLAKE3_BLOCK_0)
def test_blake3_vectors(scope: ReuseScope, tokens: list[Token], expected: str) -> None:
    """BLAKE3 is the default; the mark before a digest is hashed too."""
    chain = list(sequence_to_blockchain_keys(4, scope, tokens))
    assert chain[1][1].hex() == expected


def test_blake3_root_and_no_scope() -> None:
    """No scope is the empty scope; an empty prompt has a root key only."""
    [root] = sequence_to_blockchain_keys(4, None, [])
    assert root == ([], bytes.fromhex("2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"))


def test_front_end_ids_change_no_key() -> None:
    """A digest with an id of the front end keys like the bare digest."""
    with_id: list[int | MmItemContext] = [1, MmItemContext(D, "frontend-h-a"), 1002, 1003, 4, 5]
    for name in ("blake3", "sha256"):
        assert list(sequence_to_blockchain_keys(4, None, with_id, name)) == list(
            sequence_to_blockchain_keys(4, None, WITH_DIGEST, name)
        )


@pytest.mark.parametrize("with_digests", [False, True])
def test_framing_token_by_token(with_digests: bool) -> None:
    """A key is the hash of the parent's key and each token in turn: ids as 4 bytes, digests raw (SHA-256) or marked (BLAKE3)."""
    tokens: list[Token] = toks(0, 258)
    if with_digests:
        for i in (0, 5, 6, 128, 257):
            tokens[i] = bytes([i % 256]) * 32
    for name, mark in (("sha256", b""), ("blake3", b"\x00\x00\x00\x80")):
        keys = make_block_keys(name)
        parent = keys.digest(b"\0")
        for part, key in itertools.islice(sequence_to_blockchain_keys(16, None, tokens, name), 1, None):
            framed = [mark + token if isinstance(token, bytes) else token.to_bytes(4, "little") for token in part]
            assert key == keys.digest(parent + b"".join(framed))
            parent = key


def test_a_digest_that_imitates_ids_has_a_key_of_its_own() -> None:
    """By default no two blocks share a key, whatever the bytes of a digest; with SHA-256, as other systems frame it, they can."""
    imitation = b"".join(n.to_bytes(4, "little") for n in range(1, 9))
    prompts: list[list[Token]] = [
        [*toks(1, 9), imitation],
        [imitation, *toks(1, 9)],
        [imitation, imitation],
        toks(1, 9) + toks(1, 9),
    ]
    keys = [list(sequence_to_blockchain_keys(16, None, tokens))[1][1] for tokens in prompts]
    assert len(set(keys)) == len(prompts)
    assert len({list(sequence_to_blockchain_keys(16, None, tokens, "sha256"))[1][1] for tokens in prompts}) == 1


@pytest.mark.parametrize("name", ["blake3", "sha256"])
def test_keys_of_prefixes(name: str) -> None:
    """The keys of a block's prefixes are those of blocks of these tokens."""
    keys = make_block_keys(name)
    parent = keys.root_key(ReuseScope())
    sequence = pack([1, D, 1002, D, 4, 5])
    ends = [sequence.byte_offset(n) for n in (1, 2, 4, 6)]
    assert keys.prefix_keys(parent, sequence.data, ends) == [keys.block_key(parent, sequence.data[:end]) for end in ends]
    assert keys.prefix_keys(parent, sequence.data, []) == []


def test_carriers_agree() -> None:
    """List, tuple and arrays give the same chain."""
    expected = list(sequence_to_blockchain_keys(4, None, ONE_TO_SIX))
    for carrier in (tuple(ONE_TO_SIX), np.array(ONE_TO_SIX, np.int32), np.array(ONE_TO_SIX, np.int64)):
        assert list(sequence_to_blockchain_keys(4, None, carrier)) == expected


def test_errors_come_before_the_first_item() -> None:
    """The iterator is lazy, its validation is not."""
    with pytest.raises(ConfigError, match="tokens_per_block is 0"):
        sequence_to_blockchain_keys(0, None, [1])
    with pytest.raises(ConfigError, match="position 0 is -1"):
        sequence_to_blockchain_keys(4, None, [-1])
    with pytest.raises(ConfigError, match="'md5'"):
        sequence_to_blockchain_keys(4, None, [1], "md5")


def test_scopes_are_distinct_also_at_zero() -> None:
    """None is not 0, and the fields cannot be mistaken for one another."""
    scopes = [ReuseScope(lora, salt) for lora, salt in itertools.product([None, 0, 5, 7, 11, 123, 456], repeat=2)]
    assert len({scope.data for scope in scopes}) == len(scopes)
    keys = make_block_keys("blake3")
    assert len({keys.root_key(scope) for scope in scopes}) == len(scopes)
    assert len(set(scopes)) == len(scopes)


@pytest.mark.parametrize("value", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_the_whole_unsigned_range_is_a_scope(value: int) -> None:
    """Values above 2**63 are ordinary."""
    assert list(ReuseScope(value, value)) == [value, value]
    assert ReuseScope(salt=np.uint64(value)) == ReuseScope(salt=value)


@pytest.mark.parametrize("value", [-1, -(1 << 63), 1 << 64, 1.0, b"1"])
def test_no_other_value_is_a_scope(value: Any) -> None:
    """Out of range is refused, not truncated onto another tenant."""
    with pytest.raises(ConfigError, match="salt"):
        ReuseScope(salt=value)  # what an untyped caller may pass
    with pytest.raises(ConfigError, match="lora_id"):
        ReuseScope(value)


def test_scopes_are_values() -> None:
    """Equal, hashable, printable, copied and pickled by value."""
    scope = ReuseScope(7, 11)
    assert scope == ReuseScope(lora_id=7, salt=11)
    assert scope != ReuseScope(11, 7)
    assert scope == (7, 11)
    assert {scope: 1}[ReuseScope(7, 11)] == 1
    assert repr(scope) == "ReuseScope(lora_id=7, salt=11)"
    assert pickle.loads(pickle.dumps(scope)) == scope
    assert copy.deepcopy(scope) == scope == copy.copy(scope)


def test_block_keys_take_packed_tokens() -> None:
    """The chain works on what the tree stores."""
    keys = make_block_keys("sha256")
    key = keys.block_key(keys.root_key(ReuseScope()), pack(WITH_DIGEST[:4]).data)
    assert key.hex() == SHA256_VECTORS[8][3][1]


@pytest.mark.parametrize("name", ["blake3", "sha256"])
def test_a_digest_that_failed_leaves_nothing_for_the_next_one(name: str) -> None:
    keys = make_block_keys(name)
    expected = make_block_keys(name).digest(b"tokens")
    keys.digest(b"others")
    wrong: Any = 3
    with pytest.raises((TypeError, ConfigError)):  # compiled code refuses the argument itself
        keys.digest(wrong)
    assert keys.digest(b"tokens") == expected == keys.digest(b"tokens")


def test_threads_share_keys() -> None:
    """Digests of several threads do not mix."""
    keys = make_block_keys("blake3")
    inputs = [bytes([number]) * 4096 for number in range(4)]
    expected = [make_block_keys("blake3").digest(data) for data in inputs]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(keys.digest, inputs * 200))
    assert found == expected * 200
