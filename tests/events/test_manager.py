"""What a whole manager's life makes the stream say: commit, reuse, scopes, clearing, resizing, tiers, transfers that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_cache_manager_v2 import (
    CacheListener,
    EventMirror,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheEvent,
    KVCacheEventManager,
    PageDataLostError,
    ReuseScope,
    gen_multimodal_cache_key_tokens,
)
from kv_cache_manager_v2.events.manager import MAX_UUIDS
from kv_cache_manager_v2.events.records import BlockHash
from tests.events.helpers import brief, events_of, mirror_contents, stored, stored_tokens, tree_contents
from tests.events.test_blocks import A, chain
from tests.support.models import MIB, attention, model, small
from tests.support.rig import GPU, Rig, toks
from tests.support.tree_rig import FULL, Cache, Token, digest


def names_in(events: list[KVCacheEvent], kind: str, group: int | None) -> list[BlockHash]:
    return [name for got, of, names in brief(events) if (got, of) == (kind, group) for name in names]


def test_a_committed_run_is_one_event() -> None:
    """Eight tokens in blocks of four: one event, the key chain; later the same hashes are updated."""
    events = KVCacheEventManager(100)
    with Rig(small(8, host_slots=8), events=events) as rig:
        request = rig.start()
        assert request.advance(toks(0, 8))
        first = events_of(events)
        assert brief(first) == [("stored", 0, chain(toks(0, 8), 4))]
        assert stored_tokens(first[0]) == [toks(0, 4), toks(4, 8)]
        request.close()
        assert events_of(events) == []
        rig.take(8)
        moved = brief(events_of(events))
        assert sorted(moved) == sorted(("updated", 0, (name, 0, 1)) for name in chain(toks(0, 8), 4))


def test_decode_steps_continue_the_chain() -> None:
    """Block after block of one request within an iteration is one event; the next iteration's names its parent."""
    events = KVCacheEventManager(100)
    with Rig(small(8), events=events) as rig:
        request = rig.start()
        for position in range(9):
            assert request.advance([position])
        [event] = events_of(events)
        names = chain(toks(0, 12), 4)
        assert brief([event]) == [("stored", 0, names[:2])]
        for position in range(9, 12):
            assert request.advance([position])
        [event] = events_of(events)
        assert brief([event]) == [("stored", 0, names[2:])]
        assert stored(event).parent_hash == names[1]


def test_reuse_is_no_new_store() -> None:
    """A prompt that reuses two blocks announces the third alone, its parent the second."""
    events = KVCacheEventManager(100)
    with Rig(small(8), events=events) as rig:
        rig.seed(toks(0, 8))
        events_of(events)
        rig.extend(toks(0, 12))
        [event] = events_of(events)
        names = chain(toks(0, 12), 4)
        assert brief([event]) == [("stored", 0, names[2:])]
        assert stored(event).parent_hash == names[1]
        twin = rig.start()  # the same tokens once more, computed: what is there is adopted
        assert twin.advance(toks(0, 12))
        twin.suspend()
        assert twin.resume()
        twin.close()
        assert events_of(events) == []


def test_uuids_of_items_reach_the_keys() -> None:
    """The front end's own name of an item, however long, stands beside its digest; it survives removal and re-adding."""
    events = KVCacheEventManager(100, mm_token_id_offset=1000)
    with Rig(small(8), events=events, engine=False) as rig:
        uuid = "item-" * 205
        tokens = gen_multimodal_cache_key_tokens(1000, A, 6, 0, uuid)
        for named in (True, False):
            cache = rig.create()
            assert cache.resume(rig.stream)
            assert cache.resize(8)
            cache.commit([5, *tokens] if named else [5, A, *tokens[1:]])
            cache.commit([6])
            cache.close()
            blocks = [block for event in events_of(events) if brief([event])[0][0] == "stored" for block in stored(event).blocks]
            assert [block.mm_keys for block in blocks] == [[(A, 0, uuid)], [(A, 3, uuid)]]
            assert [block.tokens[1].token_id for block in blocks] == [A.hex(), 1004]
            rig.manager.clear_reusable_blocks()
        assert events_of(events)


def test_uuids_are_bounded() -> None:
    """Items are forgotten, the oldest first, beyond a maximum; without an offset none is kept."""
    events = KVCacheEventManager(10, mm_token_id_offset=1000)
    for number in range(MAX_UUIDS + 1):
        events.item_named(digest(number), "x")
    cache = Cache(2, FULL, listener=events)
    cache.store([digest(0), digest(1)])
    [block] = stored(events_of(events)[0]).blocks
    assert block.mm_keys == [(digest(0), 0), (digest(1), 0, "x")]


def test_clear_removes_exactly_what_was_stored() -> None:
    """Every stored hash once, of each group, and nothing else."""
    events = KVCacheEventManager(1000)
    with Rig(small(16, kinds=["full", (8, 0)]), events=events) as rig:
        for salt in (None, 5):
            rig.seed(toks(0, 22), ReuseScope(salt=salt))
            rig.seed([*toks(0, 8), *toks(50, 60)], ReuseScope(salt=salt))
        before = events_of(events)
        rig.manager.clear_reusable_blocks()
        after = events_of(events)
        for group in (0, 1):
            held = names_in(before, "stored", group)
            for name in names_in(before, "removed", group):
                held.remove(name)
            assert sorted(map(str, held)) == sorted(map(str, names_in(after, "removed", group)))
        assert {kind for kind, *_rest in brief(after)} == {"removed"}


def two_groups(gpu: int, host: int = 0) -> Rig:
    """Blocks of 8 tokens, a window of 8 beside full attention, slots of 2 MiB in one pool group."""
    tiers = [GpuCacheTierConfig(gpu), *([HostCacheTierConfig(host)] if host else [])]
    layers = [attention(0, 2 * MIB, window=8), attention(1, 2 * MIB)]
    events = KVCacheEventManager(1000, hash_algo="v2_blake3")
    return Rig(model(layers, tokens_per_block=8, tiers=tiers, max_util=1.0), events=events)


def listener_of(rig: Rig) -> KVCacheEventManager:
    found: CacheListener | None = rig.manager.event_manager
    assert isinstance(found, KVCacheEventManager)
    return found


def test_shrinking_the_gpu_removes_each_dropped_page_once() -> None:
    """24 to 8 MiB without another tier: what is dropped of each group is removed, once, and the mirror agrees."""
    with two_groups(24 * MIB) as rig:
        rig.seed(toks(0, 48))
        events = listener_of(rig)
        before = events_of(events)
        mirror = EventMirror()
        mirror.apply(before)
        assert rig.manager.resize(GPU, 8 * MIB)
        after = events_of(events)
        assert {kind for kind, *_rest in brief(after)} == {"removed"}
        for group in (0, 1):
            gone = names_in(after, "removed", group)
            assert gone
            assert len(gone) == len(set(gone))
            assert set(gone) <= set(names_in(before, "stored", group))
        assert mirror.apply(after)
        assert mirror_contents(mirror) == tree_contents(rig.manager)


def test_shrinking_the_gpu_beside_a_host_tier_updates() -> None:
    """32 to 12 MiB with 32 MiB of host memory: both groups move from 0 to 1, hashes known, nothing removed."""
    with two_groups(32 * MIB, 32 * MIB) as rig:
        rig.seed(toks(0, 64))
        events = listener_of(rig)
        known = {
            group: set(names_in(events_of_kept, "stored", group)) for events_of_kept in [events_of(events)] for group in (0, 1)
        }
        assert rig.manager.resize(GPU, 12 * MIB)
        moved = brief(events_of(events))
        assert {kind for kind, *_rest in moved} == {"updated"}
        for group in (0, 1):
            changes = [change for _kind, of, change in moved if of == group]
            assert changes
            assert all(change[0] in known[group] and change[1:] == (0, 1) for change in changes)
            assert len({change[0] for change in changes}) == len(changes)


def test_a_take_over_is_a_move_to_the_gpu() -> None:
    """An identical block computed again: its page on the host takes our GPU slot, which is an update from 1 to 0."""
    events = KVCacheEventManager(100)
    with Rig(small(4, host_slots=8), events=events) as rig:
        rig.seed(toks(0, 8))
        rig.take(4).close()
        names = chain(toks(0, 8), 4)
        assert sorted(brief(events_of(events))[1:]) == sorted(("updated", 0, (name, 0, 1)) for name in names)
        twin = rig.start()
        assert twin.advance(toks(0, 8))
        assert brief(events_of(events)) == [("updated", 0, (name, 1, 0)) for name in names]


def test_compaction_is_silent() -> None:
    """Pages that move within a level, as when it shrinks, are not reported."""
    with two_groups(32 * MIB) as rig:
        rig.seed(toks(0, 16))
        rig.seed(toks(100, 132))
        events = listener_of(rig)
        mirror = EventMirror()
        mirror.apply(events_of(events))
        assert rig.manager.resize(GPU, 14 * MIB)
        result = rig.manager.last_resize
        assert result is not None
        assert result.compacted > 0
        after = events_of(events)
        assert {kind for kind, *_rest in brief(after)} <= {"removed"}
        assert mirror.apply(after)
        assert mirror_contents(mirror) == tree_contents(rig.manager)


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_built_on_a_load_in_flight_waits_for_it(tmp_path: Path, fails: bool) -> None:
    """A block committed while a file load that it depends on is in flight is announced when that went well, else never."""
    events = KVCacheEventManager(1000, hash_algo="v2_blake3")
    with Rig(small(4, disk=(str(tmp_path), 4)), events=events, engine=False) as rig:
        put_on_disk(rig, toks(0, 8))
        mirror = EventMirror()
        assert mirror.apply(events_of(events))
        assert sorted(mirror_contents(mirror).values()) == [1, 1]
        gate = rig.driver.hang("read_file")
        if fails:
            rig.driver.fail("read_file")
        cache = rig.create(toks(0, 12))
        assert cache.num_committed_tokens == 8
        assert cache.resume(rig.stream)
        assert cache.resize(12)
        cache.commit(toks(8, 12))
        during = events_of(events)
        assert {kind for kind, *_rest in brief(during)} == {"updated"}
        assert mirror.apply(during)
        gate.open()
        rig.driver.synchronize()
        if fails:
            with pytest.raises(PageDataLostError):
                cache.close()
        cache.close()
        assert rig.probe(toks(0, 12)) == (0 if fails else 12)
        after = events_of(events)
        assert {kind for kind, *_rest in brief(after)} == {"removed" if fails else "stored"}
        assert mirror.apply(after)
        assert mirror_contents(mirror) == tree_contents(rig.manager)


def put_on_disk(rig: Rig, tokens: list[Token]) -> None:
    """Cache tokens, then use all of the GPU for something else."""
    for wanted in (tokens, None):
        cache = rig.create()
        assert cache.resume(rig.stream)
        assert cache.resize(len(tokens) if wanted else rig.counts().total * rig.tokens_per_block)
        if wanted:
            cache.commit(wanted)
        cache.close()
    rig.settle()


def test_shutdown_removes_everything() -> None:
    """The end of a manager is the end of what it announced."""
    events = KVCacheEventManager(100, hash_algo="v2_blake3")
    mirror = EventMirror()
    with Rig(small(8), events=events) as rig:
        rig.seed(toks(0, 16))
        assert mirror.apply(events_of(events))
        assert len(mirror.blocks) == 4
    assert mirror.apply(events_of(events))
    assert mirror.blocks == {}


@pytest.mark.parametrize("algorithm", ["v1_block_key", "v2_sha256", "v2_blake3"])
def test_listening_changes_nothing(algorithm: str) -> None:
    """Reuse and slots are the same with and without a listener."""
    seen = []
    for events in (None, KVCacheEventManager(10, hash_algo=algorithm)):
        with Rig(small(12, kinds=["full", (8, 0)], host_slots=8), events=events) as rig:
            for turn in range(6):
                rig.extend([*toks(0, 4 * (turn % 3)), *toks(100 * turn, 100 * turn + 9)])
            seen.append((rig.counts(), rig.counts(1), rig.probe(toks(0, 8)), rig.manager.movement.pages_moved(0, 1)))
    assert seen[0] == seen[1]
    assert seen[0][3] > 0
