"""The hashes by which events name blocks: pinned values, scopes, and what digests do to the older kind."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.events.hashes import short_hash, v1_block_hash
from kv_cache_manager_v2.events.manager import KVCacheEventManager
from kv_cache_manager_v2.events.records import KVCacheEventDiff, serialize_events
from kv_cache_manager_v2.reuse.keys import ReuseScope, sequence_to_blockchain_keys
from kv_cache_manager_v2.reuse.tokens import pack
from tests.events.helpers import brief, events_of, stored
from tests.support.models import small
from tests.support.rig import Rig
from tests.support.tree_rig import EMPTY_SCOPE, FULL, Cache, Token, digest, toks

# [1, 2, 3, 4] and then [5, 6], in blocks of 4
V1_PINNED = [
    (ReuseScope(), 924206229973855, 6875034662206558884),
    (ReuseScope(salt=123), 6280297290684427985, 18177682803760873588),
    (ReuseScope(lora_id=123), 15718075209399076427, 5695801730729461276),
    (ReuseScope(lora_id=11, salt=22), 6759136561504209697, 1163329116613750920),
]
SCOPES = [ReuseScope(*pair) for pair in [(None, None), (123, None), (None, 123), (123, 456), (456, 123), (0, None), (None, 0)]]


def told(algorithm: str, tokens: list[Token], scope: ReuseScope = EMPTY_SCOPE, size: int = 4) -> list[int | str]:
    """The hashes of a prompt's blocks, as the stream gives them."""
    manager = KVCacheEventManager(1000, hash_algo=algorithm)
    cache = Cache(size, FULL, listener=manager)
    cache.store(tokens, scope)
    events = events_of(manager)
    assert [event.hash_algo for event in events] == [manager.hash_algo]
    assert stored(events[0]).parent_hash is None
    return [block.block_hash for block in stored(events[0]).blocks]


@pytest.mark.parametrize(("scope", "first", "second"), V1_PINNED)
def test_v1_values_are_pinned(scope: ReuseScope, first: int, second: int) -> None:
    """The helper and the stream give the values of the older hasher; salt and LoRA enter through the scope."""
    assert v1_block_hash([1, 2, 3, 4], None, scope.lora_id, scope.salt) == first
    assert v1_block_hash([5, 6], first, scope.lora_id, scope.salt) == second
    assert told("v1_block_key", toks(1, 7), scope) == [first, second]
    assert told("auto", toks(1, 7), scope) == [first, second]


def reference_v1(tokens: list[int], parent: int, lora: int | None, salt: int | None) -> int:
    """The same, written plainly on 64-bit numbers."""
    wide = (1 << 64) - 1

    def mix64(value: int, seed: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & wide
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & wide
        value ^= value >> 31
        return seed ^ ((value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & wide)

    seed = len(tokens) ^ ((parent * 0xBF58476D1CE4E5B9) & wide)
    if parent == 0 and salt is not None:
        seed = mix64(salt, seed)
    for token in tokens:
        value = token
        for _round in range(2):
            value = (((value >> 16) ^ value) * 0x45D9F3B) & 0xFFFFFFFF
        value = (value ^ (value >> 16)) + 0x9E3779B9 & 0xFFFFFFFF
        seed ^= (value + (seed << 6) + (seed >> 2)) & wide
    return seed if lora is None else mix64(lora, seed)


def test_v1_of_long_blocks_and_large_numbers() -> None:
    """The arithmetic in halves agrees with the plain one over the whole range of ids, salts and LoRA ids."""
    parent = 0
    for turn in range(40):
        ids = [(turn * 2654435761 + n * 40503) % (1 << 31) for n in range(turn % 7 + 1)] + [(1 << 31) - 1]
        lora = None if turn % 3 else (1 << 64) - 1 - turn
        salt = None if turn % 2 else (1 << 63) + turn
        expected = reference_v1(ids, parent, lora, salt)
        assert v1_block_hash(ids, parent or None, lora, salt) == expected
        parent = expected


def test_v1_payload_of_two_blocks() -> None:
    """Eight tokens in blocks of four: the stored event of the older manager, field by field, two blocks in one event."""
    manager = KVCacheEventManager(10, window_size=64, hash_algo="v1_block_key")
    cache = Cache(4, FULL, listener=manager)
    cache.store(toks(0, 8))
    first = reference_v1([0, 1, 2, 3], 0, None, None)
    hashes = [first, reference_v1([4, 5, 6, 7], first, None, None)]
    blocks = [
        {
            "type": "stored_block",
            "block_hash": hashes[number],
            "tokens": [{"type": "unique_token", "token_id": 4 * number + place, "token_extra_id": 0} for place in range(4)],
            "cache_level": 0,
            "priority": 35,
            "mm_keys": [],
        }
        for number in range(2)
    ]
    assert serialize_events(events_of(manager)) == [
        {
            "event_id": 0,
            "data": {"type": "stored", "parent_hash": None, "blocks": blocks},
            "window_size": 64,
            "hash_algo": "v1_block_key",
            "layer_group_id": 0,
        }
    ]


def test_v1_root_is_a_place_not_a_number() -> None:
    """The salt enters the first block; a parent whose hash happens to be 0 is a parent all the same."""
    assert v1_block_hash([1], 0, None, 5) != v1_block_hash([1], None, None, 5)
    assert v1_block_hash([1], 0, None, 5) == v1_block_hash([1], 0)


def test_v1_helper_refuses_digests() -> None:
    """What v1 cannot hash is an error, not another hash."""
    with pytest.raises(ConfigError, match="digest"):
        v1_block_hash([1, digest(3)])  # type: ignore[list-item]  # the point of the test


@pytest.mark.parametrize("algorithm", ["v2_sha256", "v2_blake3", "v2_sha256_64", "v2_blake3_64"])
def test_v2_hashes_are_the_key_chain(algorithm: str) -> None:
    """The chained keys in hexadecimal, or their first 8 bytes, whatever hash the tree's own keys have."""
    tokens: list[Token] = [1, digest(9), 3, 4, 5, 6]
    for scope in SCOPES:
        chain = [key for _part, key in sequence_to_blockchain_keys(4, scope, tokens, algorithm.split("_")[1])][1:]
        expected = [short_hash(key) if algorithm.endswith("_64") else key.hex() for key in chain]
        assert told(algorithm, tokens, scope) == expected
        assert all(isinstance(name, str) or 0 <= name < 1 << 64 for name in expected)


@pytest.mark.parametrize("algorithm", ["v1_block_key", "v2_sha256", "v2_sha256_64", "v2_blake3", "v2_blake3_64"])
def test_scopes_never_share_hashes(algorithm: str) -> None:
    """None, LoRA 123, salt 123, and two numbers either way round; zero is not None. v1 mixes LoRA and salt alike."""
    names = [told(algorithm, toks(1, 5), scope)[0] for scope in SCOPES]
    assert len(set(names)) == len(SCOPES)
    assert len({told(algorithm, toks(1, 5), ReuseScope(lora_id=lora))[0] for lora in (11, 99)}) == 2


def test_short_hash_is_unsigned_and_big_endian() -> None:
    """The first 8 bytes: 80 00 ... is 2**63, ff ... is 2**64 - 1."""
    assert short_hash(b"\x80" + bytes(31)) == 1 << 63
    assert short_hash(b"\xff" * 32) == (1 << 64) - 1
    assert short_hash(bytes(7) + b"\x01" + b"\xff" * 24) == 1


def test_known_sha256_key() -> None:
    """One pinned value of the chain: tokens 1 to 4 under the empty scope."""
    assert told("v2_sha256", toks(1, 5)) == ["e432228522a304ab556d66e6e40979ad05575f28b19b554264dd3c6277aaf073"]
    assert told("v2_blake3", toks(1, 5)) == ["133c9e2c7b7a372167d83b80df805360137e47d1ffbe62e8b5969295c8168d2a"]


def test_unknown_algorithm_is_refused() -> None:
    """A value error that names what there is."""
    with pytest.raises(ValueError, match=r"Unsupported V2 KV cache event hash algorithm 'md5'.*v2_blake3_64"):
        KVCacheEventManager(1, hash_algo="md5")


def test_removal_names_what_was_stored() -> None:
    """64-bit forms match between stored and removed."""
    for algorithm in ("v1_block_key", "v2_sha256_64", "v2_blake3_64"):
        manager = KVCacheEventManager(10, hash_algo=algorithm)
        cache = Cache(2, FULL, listener=manager)
        cache.store([1, 2])
        cache.tree.clear()
        first, second = brief(events_of(manager))
        assert (first[0], second[0]) == ("stored", "removed")
        assert first[2] == second[2]
        assert isinstance(first[2][0], int)


def test_v1_of_a_child_after_its_parent_went() -> None:
    """A child needs its parent's hash even if the parent was not hashed before it was removed."""
    manager = KVCacheEventManager(10, hash_algo="v1_block_key")
    cache = Cache(4, FULL, listener=manager)
    path = cache.store(toks(1, 7), without=[0])
    cache.give(path[1], 0, 2)
    cache.tree.clear()
    events = events_of(manager)
    assert brief(events) == [("stored", 0, [6875034662206558884]), ("removed", 0, [6875034662206558884])]
    assert stored(events[0]).parent_hash == 924206229973855


def test_v1_falls_back_after_a_digest(caplog: pytest.LogCaptureFixture) -> None:
    """A block with a digest and every descendant get the 64-bit SHA-256 form; one warning a manager."""
    tokens: list[Token] = [1, 2, digest(5), 3, 4, 5]
    manager = KVCacheEventManager(100, hash_algo="v1_block_key")
    cache = Cache(2, FULL, listener=manager)
    with caplog.at_level(logging.WARNING):
        cache.store(tokens)
        cache.store([9, digest(6)])
        events = events_of(manager)
    keys = [key for _part, key in sequence_to_blockchain_keys(2, None, tokens, "sha256")][1:]
    first = v1_block_hash([1, 2])
    assert [block.block_hash for block in stored(events[0]).blocks] == [first, short_hash(keys[1]), short_hash(keys[2])]
    assert len([record for record in caplog.records if "cannot hash" in record.getMessage()]) == 1


def test_the_trees_own_keys_are_computed_once() -> None:
    """Where the stream publishes the tree's own keys, either side uses what the other has computed."""
    manager = KVCacheEventManager(100, hash_algo="v2_blake3")
    cache = Cache(2, FULL, listener=manager)
    path = cache.store(toks(0, 6))
    asked = path[1].block_key()
    assert [block.key is None for block in path] == [False, False, True]
    events_of(manager)
    assert path[1].key is asked
    assert [block.key.hex() for block in path if block.key] == told("v2_blake3", toks(0, 6), size=2)
    other = KVCacheEventManager(100, hash_algo="v2_sha256")
    cache = Cache(2, FULL, listener=other)
    path = cache.store(toks(0, 6))
    events_of(other)
    assert [block.key for block in path] == [None, None, None]


def test_nothing_is_hashed_before_the_flush() -> None:
    """Commit takes notes only."""
    manager = KVCacheEventManager(100, hash_algo="v2_blake3")
    cache = Cache(2, FULL, listener=manager)
    path = cache.store(toks(0, 6))
    assert [block.key for block in path] == [None, None, None]
    assert pack(toks(0, 2)).data == path[0].tokens


@pytest.mark.parametrize("block_key_hash", ["blake3", "sha256"])
def test_events_name_blocks_by_the_managers_keys(block_key_hash: str) -> None:
    """Without `hash_algo` a key of the manager and the name in an event are the same, and the one finds the other."""
    events = KVCacheEventManager(100)
    with Rig(dataclasses.replace(small(4), block_key_hash=block_key_hash), events=events) as rig:
        key = rig.manager.probe_first_new_block_key(None, toks(0, 4))
        assert key is not None
        rig.seed(toks(0, 4))
        assert events.hash_algo == f"v2_{block_key_hash}"
        assert brief(events_of(events)) == [("stored", 0, [key.hex()])]
        events.add_updated_event(key, KVCacheEventDiff(0, 1), None, 0)
        assert brief(events_of(events)) == [("updated", 0, (key.hex(), 0, 1))]


def test_an_unknown_key_of_another_hash_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """Where manager and events were given different hashes, one warning says which; unknown keys are ignored."""
    events = KVCacheEventManager(100, hash_algo="v2_sha256")
    with Rig(small(4), events=events) as rig:
        key = rig.manager.probe_first_new_block_key(None, toks(0, 4))
        assert key is not None
        rig.seed(toks(0, 4))
        events_of(events)
        for _ in range(2):
            events.add_removed_event(key)
            events.add_updated_event(key, KVCacheEventDiff(0, 1))
        assert events_of(events) == []
    [line] = [record.getMessage() for record in caplog.records if "set both to one hash" in record.getMessage()]
    assert "sha256 keys (hash_algo='v2_sha256'), the manager uses blake3" in line


def test_one_default_event_manager_for_managers_of_two_hashes_is_refused() -> None:
    """What it has said so far would be named differently from what follows."""
    events = KVCacheEventManager(100)
    with Rig(small(4), events=events) as rig:
        rig.seed(toks(0, 4))
        events_of(events)
    with Rig(small(4), events=events):
        pass  # as an engine does that builds its manager again
    with pytest.raises(ConfigError, match="give each manager its own event manager"):
        Rig(dataclasses.replace(small(4), block_key_hash="sha256"), events=events)
