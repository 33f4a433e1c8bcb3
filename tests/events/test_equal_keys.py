"""Two blocks with one key: with SHA-256 a digest enters a key as the bytes that eight ids would have."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from kv_cache_manager_v2 import EventMirror, KVCacheEventManager, KVCacheManagerConfig, sequence_to_blockchain_keys
from tests.events.helpers import events_of, mirror_contents, relocate
from tests.support.engine import Token
from tests.support.models import small
from tests.support.rig import Rig
from tests.support.tree_rig import FULL, Cache, window

IDS: list[Token] = list(range(1, 9))
DIGEST: list[Token] = [b"".join(n.to_bytes(4, "little") for n in range(1, 9))]


@pytest.mark.parametrize("order", [(IDS, DIGEST), (DIGEST, IDS)], ids=["digest last", "ids last"])
@pytest.mark.parametrize("probe_first", [True, False])
def test_blocks_of_equal_keys_come_and_go_beside_each_other(order: tuple[list[Token], list[Token]], probe_first: bool) -> None:
    """Probing by keys keeps an index of them; a second block of the same key neither breaks the eviction of the first nor is it
    mixed up with it by a match of tokens."""
    config = dataclasses.replace(small(8, tokens_per_block=8), block_key_hash="sha256")
    with Rig(config) as rig:
        if probe_first:
            assert rig.manager.probe_reuse_by_keys(None, []) == 0
        for tokens in order:
            rig.seed(tokens)
        assert rig.manager.probe_reuse_by_keys(None, []) == 0
        rig.settle()
        assert [rig.probe(tokens) for tokens in order] == [len(tokens) for tokens in order]
        rig.take(8).close()  # evicts both
        rig.settle()
        assert [rig.probe(tokens) for tokens in order] == [0, 0]


def manager_config(hash_name: str, slots: int = 8) -> KVCacheManagerConfig:
    return dataclasses.replace(small(slots, tokens_per_block=9), block_key_hash=hash_name)


def imitations() -> list[list[Token]]:
    """Prompts of one block of nine tokens and one of a single token; with SHA-256 both prompts have the same keys."""
    ids: list[Token] = list(range(1, 9))
    digest = DIGEST[0]
    return [[*ids, digest, 77], [digest, *ids, 77]]


def low(_ordinal: int, _life_cycle: object) -> int:
    return 10


def high(_ordinal: int, _life_cycle: object) -> int:
    return 90


@pytest.mark.parametrize("hash_name", ["blake3", "sha256"])
@pytest.mark.parametrize("first_dropped", [0, 1])
def test_what_is_cached_is_found_by_key(hash_name: str, first_dropped: int) -> None:
    """A prompt is found by its keys exactly when it is found by its tokens, also while another of the same keys comes and goes."""
    prompts = imitations()
    keys = [[key for _part, key in sequence_to_blockchain_keys(9, None, tokens, hash_name)][1:] for tokens in prompts]
    assert (keys[0] == keys[1]) == (hash_name == "sha256")
    with Rig(manager_config(hash_name, 4)) as rig:
        for index, tokens in enumerate(prompts):
            rig.seed(tokens, priority=low if index == first_dropped else high)
            assert rig.manager.probe_reuse_by_keys(None, keys[index]) == rig.probe(tokens) == 10
        rig.take(2).close()
        left = 1 - first_dropped
        assert rig.probe(prompts[first_dropped]) == 0
        assert rig.manager.probe_reuse_by_keys(None, keys[left]) == rig.probe(prompts[left]) == 10


@pytest.mark.parametrize("algorithm", ["v2_sha256", "v2_sha256_64", "v2_blake3", "v2_blake3_64", "v1_block_key"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_stream_with_equal_names_can_be_read(algorithm: str, order: tuple[int, ...]) -> None:
    """Blocks of one name are announced one at a time: a mirror and a snapshot hold the name as long as any of them is cached."""
    imitation = bytes(32)
    prompts: list[list[Token]] = [[0, 0, imitation, 0, 5], [0, 0, 0, imitation, 5], [0, imitation, 0, 0, 5]]
    events = KVCacheEventManager(1000, hash_algo=algorithm)
    cache = Cache(4, FULL, window(64), listener=events, block_key_hash="sha256" if "blake3" not in algorithm else "blake3")
    mirror = EventMirror()

    def follow(cached: int) -> None:
        assert mirror.apply(events_of(events))
        expected = cached if "blake3" in algorithm else min(cached, 1)
        names = {name for name, block in mirror.blocks.items() if block.parent_hash is None}
        assert len(names) == expected
        assert all(set(mirror.blocks[name].levels) == {0, 1} for name in names)
        assert mirror_contents(EventMirror(events.snapshot_events())) == mirror_contents(mirror)

    paths = [cache.store(tokens) for tokens in prompts]
    follow(3)
    for gone, index in enumerate(order):
        relocate(paths[index][0], 0, 1)
        cache.lose(paths[index][0])
        follow(2 - gone)
    assert mirror.blocks == {}
