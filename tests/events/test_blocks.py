"""What a tree's blocks make the manager say: coverage, layer groups, removal, re-adding, moves, multimodal keys."""

from __future__ import annotations

import os
import subprocess
import sys

from kv_cache_manager_v2.events.manager import KVCacheEventManager
from kv_cache_manager_v2.events.records import MmKey
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.keys import ReuseScope, sequence_to_blockchain_keys
from tests.events.helpers import block_at, brief, events_of, relocate, stored, stored_tokens
from tests.support.tree_rig import FULL, SSM, Cache, Token, digest, toks, window

A, B = digest(1), digest(2)


def chain(tokens: list[Token], size: int, scope: ReuseScope | None = None) -> list[str]:
    """The hashes of a prompt's blocks, as the default algorithm gives them."""
    return [key.hex() for _part, key in sequence_to_blockchain_keys(size, scope, tokens)][1:]


def make(size: int, *kinds: tuple[str, int, int], offset: int | None = None) -> tuple[KVCacheEventManager, Cache]:
    manager = KVCacheEventManager(1000, mm_token_id_offset=offset)
    return manager, Cache(size, *kinds, listener=manager)


class TestCoverage:
    def test_only_whole_pages_are_announced(self) -> None:
        """A page of group 0 covers both tokens, one of group 1 only the first: group 0 alone; group 1 later."""
        manager, cache = make(2, FULL, window(8))
        block = block_at(cache, None, [1, 2])
        cache.give(block, 0, 2)
        cache.give(block, 1, 1)
        events = events_of(manager)
        names = chain([1, 2], 2)
        assert brief(events) == [("stored", 0, names)]
        assert stored_tokens(events[0]) == [[1, 2]]
        assert events_of(manager) == []
        cache.give(block, 1, 2)
        assert brief(events_of(manager)) == [("stored", 1, names)]

    def test_a_group_that_was_never_announced_goes_silently(self) -> None:
        """Removing what covered only a part says nothing."""
        manager, cache = make(2, window(8), window(8))
        block = block_at(cache, None, [1, 2])
        cache.give(block, 0, 2)
        cache.give(block, 1, 1)
        events_of(manager)
        cache.lose(block, 1)
        assert events_of(manager) == []
        cache.lose(block, 0)
        assert brief(events_of(manager)) == [("removed", 0, chain([1, 2], 2))]

    def test_a_partial_block_is_announced_as_it_is(self) -> None:
        """Six tokens in a block of eight: announced with six tokens; the longer block that takes its place follows."""
        manager, cache = make(8, FULL)
        cache.store(toks(0, 6))
        events = events_of(manager)
        assert stored_tokens(events[0]) == [toks(0, 6)]
        cache.store(toks(0, 8))
        short, whole = chain(toks(0, 6), 8)[0], chain(toks(0, 8), 8)[0]
        assert brief(events_of(manager)) == [("removed", 0, [short]), ("stored", 0, [whole])]

    def test_pages_that_move_to_a_longer_block_cover_too_little(self) -> None:
        """A group whose page only comes over from the replaced block is not announced for the longer one."""
        manager, cache = make(8, FULL, window(64))
        cache.store(toks(0, 6))
        events_of(manager)
        cache.store(toks(0, 8), without=[1])
        short, whole = chain(toks(0, 6), 8)[0], chain(toks(0, 8), 8)[0]
        assert brief(events_of(manager)) == [("removed", 0, [short]), ("removed", 1, [short]), ("stored", 0, [whole])]

    def test_a_snapshot_is_announced_at_the_blocks_end_only(self) -> None:
        """A recurrent state is good at one position; inside the block it says nothing of the whole of it."""
        manager, cache = make(4, FULL, SSM)
        [block] = cache.store(toks(0, 4), snapshots=False)
        cache.give(block, 1, 2)
        assert brief(events_of(manager)) == [("stored", 0, chain(toks(0, 4), 4))]
        cache.give(block, 1, 4)
        assert brief(events_of(manager)) == [("stored", 1, chain(toks(0, 4), 4))]

    def test_nothing_happens_in_a_covered_partial_commit(self) -> None:
        """Six of eight tokens under a longer block are silent; after clear they are a block with a name of its own."""
        tokens: list[Token] = [A, 1001, 1002, 1003, 1004, 1005, 7, 8]
        manager, cache = make(8, FULL, offset=1000)
        cache.store(tokens)
        keys = stored(events_of(manager)[0]).blocks[0].mm_keys
        cache.store(tokens[:6])
        assert events_of(manager) == []
        cache.tree.clear()
        cache.store(tokens[:6])
        removed, added = events_of(manager)
        assert brief([removed, added]) == [("removed", 0, chain(tokens, 8)), ("stored", 0, chain(tokens[:6], 8))]
        assert stored(added).blocks[0].mm_keys == keys == [(A, 0)]


class TestGroups:
    def test_two_blocks_of_two_groups_give_two_events(self) -> None:
        """One event a group, with both blocks, no parent."""
        manager, cache = make(2, FULL, window(8))
        cache.store(toks(0, 4))
        events = events_of(manager)
        names = chain(toks(0, 4), 2)
        assert brief(events) == [("stored", 0, names), ("stored", 1, names)]
        assert [stored(event).parent_hash for event in events] == [None, None]

    def test_groups_are_removed_one_by_one(self) -> None:
        """Group 0, then group 1; a repetition is silent."""
        manager, cache = make(2, window(8), window(8))
        block = block_at(cache, None, [1, 2])
        cache.tree.pin(block)
        for group in (0, 1):
            cache.give(block, group, 2)
        [name] = chain([1, 2], 2)
        events_of(manager)
        cache.lose(block, 0)
        manager.page_removed(block, 0)
        assert brief(events_of(manager)) == [("removed", 0, [name])]
        cache.lose(block, 1)
        manager.page_removed(block, 1)
        assert brief(events_of(manager)) == [("removed", 1, [name])]

    def test_the_whole_block_goes_for_the_groups_left(self) -> None:
        """After group 0 went, the removal of the block names group 1 only; being told twice is silent."""
        manager, cache = make(2, window(8), window(8))
        [block] = cache.store([1, 2])
        names = chain([1, 2], 2)
        cache.lose(block, 0)
        events_of(manager)
        manager.block_removed(block)
        manager.block_removed(block)
        assert brief(events_of(manager)) == [("removed", 1, names)]

    def test_readding_a_group(self) -> None:
        """Removed, stored and removed again on groups 0, 0 and 1."""
        manager, cache = make(2, window(8), window(8))
        [block] = cache.store([1, 2])
        names = chain([1, 2], 2)
        events_of(manager)
        cache.lose(block, 0)
        cache.give(block, 0, 2)
        cache.lose(block, 1)
        assert brief(events_of(manager)) == [("removed", 0, names), ("stored", 0, names), ("removed", 1, names)]

    def test_readding_after_all_groups_went(self) -> None:
        """A block that stays for an open request may lose every page, and get new ones."""
        manager, cache = make(2, window(8))
        [block] = cache.store([1, 2])
        cache.tree.pin(block)
        cache.lose(block)
        cache.give(block, 0, 2)
        names = chain([1, 2], 2)
        assert brief(events_of(manager)) == [("stored", 0, names), ("removed", 0, names), ("stored", 0, names)]

    def test_a_block_that_came_and_went_between_flushes(self) -> None:
        """Stored, removed, and stored again as another object: said in that order."""
        manager, cache = make(2, FULL)
        names = chain(toks(0, 4), 2)
        for _turn in range(2):
            cache.store(toks(0, 4))
            cache.tree.clear()
        assert brief(events_of(manager)) == [("stored", 0, names), ("removed", 0, names)] * 2

    def test_removal_of_a_subtree_names_what_was_announced(self) -> None:
        """If full attention loses a block, it and its announced descendants are removed, each once."""
        manager, cache = make(2, FULL, window(8))
        path = cache.store(toks(0, 8))
        cache.lose(path[2], 1)
        cache.lose(path[1], 0)
        cache.tree.clear()
        events = events_of(manager)[2:]
        gone: dict[int, list[object]] = {0: [], 1: []}
        for kind, group, names in brief(events):
            assert kind == "removed"
            gone[group] += names
        names = chain(toks(0, 8), 2)
        assert sorted(map(str, gone[0])) == sorted(names)
        assert sorted(map(str, gone[1])) == sorted(names)
        assert gone[1][0] == names[2]

    def test_the_childs_parent_hash_is_the_real_one(self) -> None:
        """Also where the parent was never announced, or is gone by the time of the flush."""
        manager, cache = make(2, window(2))
        path = cache.store(toks(0, 4), without=[0])
        cache.give(path[1], 0, 2)
        cache.tree.clear()
        events = events_of(manager)
        names = chain(toks(0, 4), 2)
        assert stored(events[0]).parent_hash == names[0]
        assert brief(events) == [("stored", 0, names[1:]), ("removed", 0, names[1:])]

    def test_many_groups(self) -> None:
        """States of more groups than fit a machine word."""
        kinds = [window(8)] * 9
        manager, cache = make(2, *kinds)
        [block] = cache.store([1, 2])
        relocate(block, 8, 2)
        cache.lose(block, 7)
        names = chain([1, 2], 2)
        assert brief(events_of(manager))[9:] == [("updated", 8, (names[0], 0, 2)), ("removed", 7, names)]
        levels = {event.layer_group_id: stored(event).blocks[0].cache_level for event in manager.snapshot_events().events}
        assert levels == {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 0, 6: 0, 8: 2}


class TestMoves:
    def test_a_move_is_an_update(self) -> None:
        """Old and new level, priority absent; a page that covers a part only moves silently."""
        manager, cache = make(2, FULL, window(8))
        block = block_at(cache, None, [1, 2])
        cache.give(block, 0, 2)
        cache.give(block, 1, 1)
        relocate(block, 0, 1)
        relocate(block, 1, 1)
        relocate(block, 0, 2)
        [name] = chain([1, 2], 2)
        assert brief(events_of(manager)) == [("stored", 0, [name]), ("updated", 0, (name, 0, 1)), ("updated", 0, (name, 1, 2))]

    def test_a_move_within_a_level_is_none(self) -> None:
        """Only a new level is news."""
        manager, cache = make(2, FULL)
        [block] = cache.store([1, 2])
        events_of(manager)
        relocate(block, 0, 0)
        assert events_of(manager) == []

    def test_removed_precedes_updated(self) -> None:
        """Remove X, then move Y: said in that order."""
        manager, cache = make(2, FULL)
        [x] = cache.store([1, 2])
        [y] = cache.store([3, 4])
        events_of(manager)
        cache.lose(x)
        relocate(y, 0, 1)
        assert brief(events_of(manager)) == [("removed", 0, chain([1, 2], 2)), ("updated", 0, (chain([3, 4], 2)[0], 0, 1))]

    def test_every_event_has_its_groups_window(self) -> None:
        """Windows 8 and 16: separate stored events with levels 1 and 0; moves and removals carry the window of their group."""
        manager = KVCacheEventManager(100, window_size_by_layer_group={0: 8, 1: 16})
        cache = Cache(2, window(8), window(16), listener=manager)
        block = block_at(cache, None, [1, 2])
        cache.tree.install(block, cache.keeper.new_page(0, 1), 2)
        cache.give(block, 1, 2)
        relocate(block, 0, 0)
        cache.lose(block, 1)
        cache.lose(block, 0)
        events = events_of(manager)
        assert [(event.layer_group_id, event.window_size) for event in events] == [(0, 8), (1, 16), (0, 8), (1, 16), (0, 8)]
        assert [stored(event).blocks[0].cache_level for event in events[:2]] == [1, 0]
        assert [event.event_id for event in events] == [0, 1, 2, 3, 4]

    def test_level_and_priority_are_those_of_the_page(self) -> None:
        """Stored says where the page lies and what its priority is."""
        manager, cache = make(2, FULL)
        block = block_at(cache, None, [1, 2])
        page = cache.keeper.new_page(0, 1)
        page.priority = 77
        cache.tree.install(block, page, 2)
        [data] = stored(events_of(manager)[0]).blocks
        assert (data.cache_level, data.priority, data.cache_salt) == (1, 77, None)
        [again] = manager.snapshot_events().events
        assert stored(again).blocks == [data]


def mm_keys(manager: KVCacheEventManager) -> list[list[MmKey]]:
    """Of every block stored since the last flush."""
    return [block.mm_keys for event in events_of(manager) for block in stored(event).blocks]


class TestMultimodal:
    PROMPT = (A, 1001, 1002, 7, 8, 1003, 1004, 9, 1004, 1005, 1006, B)

    def test_keys_cross_blocks(self) -> None:
        """Offset 1000: the digest is position 0; a run is named by its first position, in every block anew."""
        manager, cache = make(3, FULL, offset=1000)
        cache.store(list(self.PROMPT))
        assert mm_keys(manager) == [[(A, 0)], [(A, 3)], [(A, 4), (A, 4)], [(A, 5), (B, 0)]]

    def test_text_between_keeps_the_item(self) -> None:
        """A block of text alone has no keys, and does not end the item."""
        manager, cache = make(2, FULL, offset=1000)
        cache.store([A, 1001, 5, 6, 7, 1002])
        assert mm_keys(manager) == [[(A, 0)], [], [(A, 2)]]

    def test_ancestors_need_not_be_announced(self) -> None:
        """Pages that cover a part only, or none at all, hide nothing of the item."""
        manager, cache = make(2, window(8), offset=1000)
        path: list[Block] = []
        parts: list[list[Token]] = [[A, 1001], [1002, 5], [1003, 1004]]
        for part in parts:
            path.append(block_at(cache, path[-1] if path else None, part))
        cache.give(path[0], 0, 1)
        cache.give(path[2], 0, 2)
        assert mm_keys(manager) == [[(A, 3)]]

    def test_removal_and_readding_change_nothing(self) -> None:
        """The keys of a group that comes back are the same, also when the block before it has left meanwhile."""
        manager, cache = make(2, window(8), window(8), offset=1000)
        path = cache.store([A, 1001, 1002, 1003])
        assert mm_keys(manager) == [[(A, 0)], [(A, 2)]] * 2
        cache.lose(path[0], 0)
        cache.lose(path[0], 1)
        cache.lose(path[1], 0)
        cache.give(path[1], 0, 2)
        events = [event for event in events_of(manager) if brief([event])[0][0] == "stored"]
        assert [block.mm_keys for event in events for block in stored(event).blocks] == [[(A, 2)]]

    def test_uuids_stay_with_their_item(self) -> None:
        """A uuid of a kilobyte stands in every key of its item, also after one group went and came back."""
        manager, cache = make(2, window(8), window(8), offset=1000)
        uuid = "u" * 1024
        manager.item_named(A, uuid)
        path = cache.store([A, 1001, 1002, B])
        assert mm_keys(manager) == [[(A, 0, uuid)], [(A, 2, uuid), (B, 0)]] * 2
        cache.lose(path[1], 0)
        cache.give(path[1], 0, 2)
        removed, added = events_of(manager)
        assert stored(added).blocks[0].mm_keys == [(A, 2, uuid), (B, 0)]
        assert brief([removed])[0][:2] == ("removed", 0)

    def test_without_offset_the_token_is_shown(self) -> None:
        """No offset, no keys: a digest is a token, in hexadecimal."""
        manager, cache = make(2, FULL)
        cache.store([A, 1001])
        events = events_of(manager)
        assert stored_tokens(events[0]) == [[A.hex(), 1001]]
        assert stored(events[0]).blocks[0].mm_keys == []

    def test_the_offset_itself_is_text(self) -> None:
        """Position j of an item is id offset + j, and position 0 is the digest: the offset itself never occurs in an item."""
        manager, cache = make(4, FULL, offset=1000)
        cache.store([A, 1000, 1001, 999])
        cache.store([1001, 1002, 1003, 1004])
        assert mm_keys(manager) == [[(A, 0), (A, 1)], []]


DEEP_CHAIN = """
import sys
from kv_cache_manager_v2 import KVCacheEventManager
from tests.support.tree_rig import Cache, toks, window
events = KVCacheEventManager(1 << 20, hash_algo="v2_blake3")
cache = Cache(2, window(4), listener=events)
for turn in range(2):
    path = cache.store(toks(0, 6000))
    for block in reversed(path):
        cache.keeper.lose(block.pages[0])
    del path, block
    assert cache.tree.num_blocks == 0
    if turn == 0:
        events.flush_iteration_events()
        assert len(events.get_latest_events(0)) == 2
del cache, events
"""


def test_a_deep_chain_is_freed_link_by_link() -> None:
    """Three thousand blocks that leave from the last one up, flushed or not: freeing what was noted leaves memory intact."""
    environment = {**os.environ, "PYTHONMALLOC": "debug", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", DEEP_CHAIN], env=environment, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr[-2000:]
