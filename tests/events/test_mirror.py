"""The contract of the stream: a snapshot, and the events after it, always equal what the tree holds.

Rule: after every step the stream is flushed and one mirror follows it event by event, a second one begins anew from a snapshot,
and both must show exactly the pages that cover their blocks, each on its level. The mirror itself raises if anything is stored
twice, removed twice, or changed before it was stored.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_cache_manager_v2 import CacheLevel, EventMirror, EventSnapshot, KVCache, KVCacheEventManager, ReuseScope
from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.events.records import (
    KVCacheEvent,
    KVCacheEventDiff,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
)
from tests.events.helpers import events_of, mirror_contents, tree_contents, unique
from tests.support.models import GRAIN, Kind, small
from tests.support.rig import Rig
from tests.support.tree_rig import FULL, Cache, Token, toks


class TestMirror:
    def stored(self, event_id: int, parent: str | None, *names: str, group: int = 0, level: int = 0) -> KVCacheEvent:
        blocks = [KVCacheStoredBlockData(name, unique(1), level, 35) for name in names]
        return KVCacheEvent(event_id, KVCacheStoredData(parent, blocks), 0, None, None, group)

    def removed(self, event_id: int, *names: str, group: int = 0) -> KVCacheEvent:
        return KVCacheEvent(event_id, KVCacheRemovedData(list(names)), 0, None, None, group)

    def moved(self, event_id: int, name: str, old: int, new: int, group: int = 0) -> KVCacheEvent:
        return KVCacheEvent(event_id, KVCacheUpdatedData(name, KVCacheEventDiff(old, new), None), 0, None, None, group)

    def test_it_follows(self) -> None:
        """Stored, moved, removed, by layer group; the prefix that a group has."""
        mirror = EventMirror()
        assert mirror.apply([self.stored(0, None, "a", "b"), self.stored(1, "a", "b", group=1), self.moved(2, "b", 0, 1)])
        assert mirror_contents(mirror) == {("a", 0): 0, ("b", 0): 1, ("b", 1): 0}
        assert mirror.blocks["b"].parent_hash == "a"
        assert [mirror.num_cached(["a", "b", "c"], group) for group in (0, 1)] == [2, 0]
        assert mirror.apply([self.removed(3, "a", "b")])
        assert mirror_contents(mirror) == {("b", 1): 0}

    def test_a_gap_is_reported(self) -> None:
        """Nothing from the gap on is taken in; a new snapshot helps, and what it contains is skipped."""
        mirror = EventMirror()
        assert not mirror.apply([self.stored(0, None, "a"), self.stored(2, None, "c")])
        assert mirror_contents(mirror) == {("a", 0): 0}
        assert not mirror.apply([self.removed(3, "a")])
        mirror.reset(EventSnapshot([self.stored(-1, None, "c")], 3))
        assert mirror.apply([self.stored(2, None, "c"), self.removed(3, "c")])
        assert mirror.blocks == {}

    @pytest.mark.parametrize("field", ["event_id", "layer_group_id", "data", "blocks"])
    def test_what_is_no_event_is_refused(self, field: str) -> None:
        """Events come from another process: nothing of a malformed batch, or snapshot, is taken in."""
        mirror = EventMirror()
        mirror.apply([self.stored(0, None, "a")])
        event = self.stored(1, "a", "b")
        wrong: Any = "surprise"
        if field == "blocks":
            event = replace(event, data=KVCacheStoredData("a", [wrong]))
        else:
            event = replace(event, **{field: wrong})
        with pytest.raises(ConfigError, match="surprise"):
            mirror.apply([event])
        with pytest.raises(ConfigError, match="surprise"):
            mirror.reset(EventSnapshot([self.stored(-1, None, "x"), event], 5))
        with pytest.raises(LogicError, match="twice"):
            mirror.reset(EventSnapshot([self.stored(-1, None, "x"), self.stored(-1, None, "x")], 5))
        assert (mirror_contents(mirror), mirror.next_event_id) == ({("a", 0): 0}, 1)

    @pytest.mark.parametrize("wrong", ["twice", "unknown", "again", "early", "level", "parent", "half removed", "removed twice"])
    def test_contradictions_are_errors(self, wrong: str) -> None:
        """What cannot follow from what is known is never taken in silently, nor is the half of an event that can."""
        mirror = EventMirror()
        mirror.apply([self.stored(0, None, "a"), self.stored(1, None, "b"), self.removed(2, "b")])
        half = replace(self.removed(3, "a"), data=KVCacheRemovedData(["a", "b"]))
        twice = replace(self.removed(3, "a"), data=KVCacheRemovedData(["a", "a"]))
        event = {
            "twice": self.stored(3, None, "a"),
            "unknown": self.removed(3, "a", group=1),
            "again": self.removed(3, "b"),
            "early": self.moved(3, "c", 0, 1),
            "level": self.moved(3, "a", 1, 0),
            "parent": self.stored(3, "b", "a", group=1),
            "half removed": half,
            "removed twice": twice,
        }[wrong]
        with pytest.raises(LogicError, match="event 3"):
            mirror.apply([event])
        assert (mirror_contents(mirror), mirror.next_event_id) == ({("a", 0): 0}, 3)

    def test_a_snapshot_ends_what_is_pending(self) -> None:
        """What is stored after a snapshot is never added to an event that the snapshot contains."""
        manager = KVCacheEventManager(100, hash_algo="v2_blake3")
        cache = Cache(2, FULL, listener=manager)
        cache.store(toks(0, 2))
        mirror = EventMirror(manager.snapshot_events())
        cache.store(toks(0, 4))
        manager.flush_iteration_events()
        events = manager.get_latest_events(0)
        assert [event.event_id for event in events] == [0, 1]
        assert mirror.apply(events)
        assert len(mirror.blocks) == 2

    def test_a_reader_that_lost_events_recovers(self) -> None:
        """With room for two events a reader misses some, sees it, and is right again after a snapshot."""
        manager = KVCacheEventManager(2, hash_algo="v2_blake3")
        cache = Cache(2, FULL, listener=manager)
        mirror = EventMirror()
        for number in range(8):
            cache.store([number, number])
        events = events_of(manager)
        assert not mirror.apply(events)
        assert manager.num_dropped_events == 6
        mirror.reset(manager.snapshot_events())
        assert len(mirror.blocks) == 8
        cache.tree.clear()
        assert mirror.apply(events_of(manager))
        assert mirror.blocks == {}


def prompt(kind: int, length: int, turn: int) -> list[int]:
    """One of a few texts, cut, with another id at one place: prompts share, diverge, continue and repeat each other."""
    text = [kind * 100 + position for position in range(length)]
    if turn < length:
        text[turn] = 50
    return text


PROMPTS = st.builds(prompt, st.integers(0, 1), st.integers(1, 16), st.sampled_from([3, 6, 9, 99, 99, 99]))
SCOPES = [ReuseScope(), ReuseScope(salt=1)]


class StreamMachine(RuleBasedStateMachine):
    """A manager in use, its stream, and two mirrors."""

    kinds: tuple[Kind, ...] = ("full", (6, 0))
    host_slots = 12
    disk_slots = 0
    schedule = "eager"

    @initialize(seed=st.integers(0, 3))
    def start(self, seed: int) -> None:
        self.directory = tempfile.mkdtemp()
        config = small(
            12,
            kinds=self.kinds,
            host_slots=self.host_slots,
            disk=(self.directory, self.disk_slots) if self.disk_slots else None,
            tokens_per_block=4,
        )
        self.events = KVCacheEventManager(1 << 20, hash_algo="v2_blake3")
        self.rig = Rig(config, self.schedule, seed, engine=False, events=self.events)
        self.mirror = EventMirror()
        self.caches: list[tuple[KVCache, list[Token]]] = []

    def grow(self, cache: KVCache, tokens: list[Token], is_end: bool = False) -> None:
        """Commit up to these tokens, if there is room."""
        done = cache.num_committed_tokens
        if len(tokens) > done and cache.resize(max(len(tokens), cache.capacity), done):
            cache.commit(tokens[done:], None, is_end)

    @rule(tokens=PROMPTS, scope=st.sampled_from(SCOPES), ahead=st.booleans())
    def serve(self, tokens: list[Token], scope: ReuseScope, ahead: bool) -> None:
        """A whole request: reuse, commit, publish the tail, close. Without `ahead` it does not look for what it could reuse."""
        cache = self.rig.create(list(tokens) if ahead else None, scope)
        if cache.resume(self.rig.stream):
            self.grow(cache, list(tokens))
            cache.stop_committing()
        cache.close()

    @precondition(lambda self: len(self.caches) < 3)
    @rule(tokens=PROMPTS, split=st.integers(0, 14))
    def open(self, tokens: list[Token], split: int) -> None:
        """A request that stays: it has committed up to `split`."""
        cache = self.rig.create(list(tokens))
        if cache.resume(self.rig.stream):
            self.grow(cache, list(tokens[:split]))
        self.caches.append((cache, list(tokens)))

    @precondition(lambda self: self.caches)
    @rule(which=st.integers(0, 2), is_end=st.booleans())
    def go_on(self, which: int, is_end: bool) -> None:
        cache, tokens = self.caches[which % len(self.caches)]
        if not cache.is_active and not cache.resume(self.rig.stream):
            return
        if cache.num_committed_tokens < len(tokens):
            self.grow(cache, tokens, is_end)

    @precondition(lambda self: self.caches)
    @rule(which=st.integers(0, 2), level=st.integers(0, 1))
    def pause(self, which: int, level: int) -> None:
        cache, _tokens = self.caches[which % len(self.caches)]
        if cache.is_active:
            cache.suspend()
        else:
            cache.prefetch(CacheLevel(level))

    @precondition(lambda self: self.caches)
    @rule(which=st.integers(0, 2))
    def close(self, which: int) -> None:
        cache, _tokens = self.caches.pop(which % len(self.caches))
        cache.close()

    @rule(slots=st.integers(4, 16), tokens=PROMPTS)
    def press(self, slots: int, tokens: list[Token]) -> None:
        """Take slots for something else: pages move down and drop. Then compute a prompt without looking for it."""
        cache = self.rig.create()
        if cache.resume(self.rig.stream):
            while slots > 0 and not cache.resize(4 * slots):
                slots -= 1
        cache.close()
        self.serve(tokens, SCOPES[0], False)

    @rule(quota=st.sampled_from([GRAIN // 2, GRAIN]))
    def resize_host(self, quota: int) -> None:
        for cache, _tokens in self.caches:
            if cache.is_active:
                cache.suspend()
        self.rig.manager.resize(CacheLevel(1), quota)

    @precondition(lambda self: not self.caches)
    @rule()
    def clear(self) -> None:
        self.rig.manager.clear_reusable_blocks()

    @invariant()
    def mirrors_agree(self) -> None:
        snapshot = self.events.snapshot_events()
        fresh = EventMirror(snapshot)
        assert self.mirror.apply(events_of(self.events))
        assert self.mirror.next_event_id == snapshot.next_event_id
        held = tree_contents(self.rig.manager)
        assert mirror_contents(self.mirror) == held
        assert mirror_contents(fresh) == held
        for name, block in fresh.blocks.items():
            assert self.mirror.blocks[name].parent_hash == block.parent_hash

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for cache, _tokens in self.caches:
            cache.close()
        with self.rig:
            pass
        assert self.mirror.apply(events_of(self.events))
        assert self.mirror.blocks == {}
        shutil.rmtree(self.directory)


class RecurrentMachine(StreamMachine):
    """With snapshots, which are copies taken at the end of each commit."""

    kinds: tuple[Kind, ...] = ("full", "ssm")


class DiskMachine(StreamMachine):
    """Two windows over three levels, with transfers that end when the schedule says."""

    kinds: tuple[Kind, ...] = ((6, 4), (3, 0))
    host_slots = 6
    disk_slots = 24
    schedule = "random"


TestStream = pytest.mark.slow(StreamMachine.TestCase)
TestStream.settings = settings(max_examples=40, stateful_step_count=30)
TestRecurrentStream = pytest.mark.slow(RecurrentMachine.TestCase)
TestRecurrentStream.settings = settings(max_examples=25, stateful_step_count=30)
TestDiskStream = pytest.mark.slow(DiskMachine.TestCase)
TestDiskStream.settings = settings(max_examples=25, stateful_step_count=30)
