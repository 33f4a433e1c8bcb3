"""Event records: values, and the JSON that they become."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.events.manager import KVCacheEventManager
from kv_cache_manager_v2.events.records import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventDiff,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    UniqueToken,
    serialize_events,
)
from tests.events.helpers import events_of, unique

DIGEST = bytes(range(32))


def block(block_hash: int | str = 7, *tokens: int | str, mm_keys: Any = ()) -> KVCacheStoredBlockData:
    return KVCacheStoredBlockData(block_hash, unique(*(tokens or (1, 2))), 0, 35, mm_keys)


VALUES: list[object] = [
    UniqueToken(5),
    UniqueToken(DIGEST.hex()),
    KVCacheEventDiff(3, 5),
    block("ab", 1, 2, DIGEST.hex()),
    block(2**64 - 1, 1, mm_keys=[(DIGEST, 0)]),
    block(3, 1, mm_keys=[(DIGEST, 4, "item-a")]),
    block(3, 1, mm_keys=[(DIGEST, 4, "item-a", True)]),
    KVCacheCreatedData([2, 3]),
    KVCacheStoredData(None, [block(1), block(2)]),
    KVCacheRemovedData([1, 2]),
    KVCacheUpdatedData(1, KVCacheEventDiff(0, 1), None),
    KVCacheEvent(4, KVCacheRemovedData(["aa"]), 128, "v2_sha256", 2, 1),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_values_survive_pickling_equal(value: object, protocol: int) -> None:
    """Every type crosses processes and compares by value."""
    again = pickle.loads(pickle.dumps(value, protocol))
    assert again == value
    assert type(again) is type(value)
    assert repr(again) == repr(value)


def test_values_differ_by_content() -> None:
    """Equality looks at every field."""
    assert len({repr(value) for value in VALUES}) == len(VALUES)
    for index, value in enumerate(VALUES):
        assert [other == value for other in VALUES] == [other == index for other in range(len(VALUES))]
    base = block(1, 1, 2)
    assert base == block(1, 1, 2)
    assert hash(base) == hash(block(1, 1, 2))
    assert base != block(1, 1, 3)
    assert base != KVCacheStoredBlockData(1, unique(1, 2), 1, 35)
    assert base != KVCacheStoredBlockData(1, unique(1, 2), 0, 36)
    assert base != KVCacheStoredBlockData(1, unique(1, 2), 0, 35, [(DIGEST, 0)])


def test_records_are_frozen() -> None:
    """Records that a reader has do not change."""
    for value, name in [(UniqueToken(5), "token_id"), (block(), "block_hash"), (KVCacheRemovedData([1]), "block_hashes")]:
        with pytest.raises(AttributeError):
            setattr(value, name, 1)


def test_diff_is_old_then_new() -> None:
    """Diff(3, 5): 3 became 5."""
    diff = KVCacheEventDiff(3, 5)
    assert (diff.old_value, diff.new_value) == (3, 5)


def test_updated_needs_both_differences() -> None:
    """None must be said, not forgotten."""
    kind: Any = KVCacheUpdatedData
    with pytest.raises(TypeError):
        kind(7)
    with pytest.raises(TypeError):
        kind(7, KVCacheEventDiff(0, 1))


def test_tokens_are_unpacked_when_read() -> None:
    """A digest is read as its hexadecimal form; packed and listed tokens make equal blocks."""
    listed = block(1, 5, DIGEST.hex(), 6)
    packed = KVCacheStoredBlockData(1, listed.packed_tokens, 0, 35)
    assert packed == listed
    assert packed.tokens == [UniqueToken(5), UniqueToken(DIGEST.hex()), UniqueToken(6)]
    assert packed.packed_tokens == b"\x05\0\0\0" + b"\0\0\0\x80" + DIGEST + b"\x06\0\0\0"
    assert packed.cache_salt is None


@pytest.mark.parametrize("fields", [(1.5, 0), (None, 0), (b"a", 0), (1, "a"), (1, None)], ids=repr)
def test_a_token_of_a_wrong_class_is_refused(fields: tuple[Any, Any]) -> None:
    """A token id is an integer or a string, an extra id an integer."""
    with pytest.raises(ConfigError, match="token_"):
        KVCacheStoredBlockData(1, [UniqueToken(*fields)], 0, 35)


def test_created_stored_removed_in_json() -> None:
    """The dictionaries that consumers parse: type names in every record, ids 0, 1, 2, algorithm and window."""
    manager = KVCacheEventManager(10, window_size=128, attention_dp_rank=3, hash_algo="v2_sha256")
    manager.add_created_event([4, 8])
    manager.add_stored_event(None, [block("aa", 1, DIGEST.hex(), mm_keys=[(DIGEST, 0, "item")])], 1)
    manager.add_removed_event(name for name in ["aa"])
    common = {"window_size": 128, "attention_dp_rank": 3, "hash_algo": "v2_sha256"}
    expected = [
        {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [4, 8]}, **common},
        {
            "event_id": 1,
            "data": {
                "type": "stored",
                "parent_hash": None,
                "blocks": [
                    {
                        "type": "stored_block",
                        "block_hash": "aa",
                        "tokens": [
                            {"type": "unique_token", "token_id": 1, "token_extra_id": 0},
                            {"type": "unique_token", "token_id": DIGEST.hex(), "token_extra_id": 0},
                        ],
                        "cache_level": 0,
                        "priority": 35,
                        "mm_keys": [{"type": "mm_key", "hash": DIGEST.hex(), "start_offset": 0, "uuid": "item"}],
                    }
                ],
            },
            "layer_group_id": 1,
            **common,
        },
        {"event_id": 2, "data": {"type": "removed", "block_hashes": ["aa"]}, **common},
    ]
    result = serialize_events(events_of(manager))
    assert result == expected
    assert json.loads(json.dumps(result)) == expected


def test_updated_in_json() -> None:
    """Both differences, new value beside old; None for what did not change; optional fields left out where not given."""
    manager = KVCacheEventManager(10, hash_algo="v1_block_key")
    manager.add_updated_event(17, KVCacheEventDiff(0, 1), KVCacheEventDiff(35, 50))
    manager.add_updated_event(17, None, KVCacheEventDiff(50, 35))
    manager.add_updated_event(17)
    level = {"type": "event_diff", "new_value": 1, "old_value": 0}
    priority = {"type": "event_diff", "new_value": 50, "old_value": 35}
    back = {"type": "event_diff", "new_value": 35, "old_value": 50}
    common = {"window_size": 0, "hash_algo": "v1_block_key"}
    assert serialize_events(events_of(manager)) == [
        {"event_id": 0, "data": {"type": "updated", "block_hash": 17, "cache_level": level, "priority": priority}, **common},
        {"event_id": 1, "data": {"type": "updated", "block_hash": 17, "cache_level": None, "priority": back}, **common},
    ]
    bare = KVCacheEvent(5, KVCacheRemovedData([1]), 64)
    assert bare.to_dict() == {"event_id": 5, "data": {"type": "removed", "block_hashes": [1]}, "window_size": 64}
