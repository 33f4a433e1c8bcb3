"""The queue: order, merging, capacity, windows, readers in other threads, and ranks that publish together."""

from __future__ import annotations

import threading
from queue import Queue
from typing import Any

import pytest

from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.events.manager import MAX_RECORDS, KVCacheEventManager
from kv_cache_manager_v2.events.records import KVCacheEvent, KVCacheEventDiff, KVCacheRemovedData, KVCacheStoredBlockData
from tests.events.helpers import brief, events_of, stored, unique
from tests.support.tree_rig import FULL, Cache, toks, window

WAIT = 30.0  # seconds after which a test fails if a thread has not ended


def record(name: int) -> KVCacheStoredBlockData:
    return KVCacheStoredBlockData(name, unique(name), 0, 35)


class TestQueue:
    def test_all_calls_drain_once(self) -> None:
        """Created, stored, removed (any iterable) and updated come out once; then a read gives nothing at once."""
        manager = KVCacheEventManager(10)
        manager.add_created_event([1])
        manager.add_stored_event(None, [record(1)])
        manager.add_removed_event(name for name in [5, 6])
        manager.add_updated_event(1, KVCacheEventDiff(0, 1))
        assert manager.get_latest_events(0) == []
        manager.flush_iteration_events()
        events = manager.get_latest_events(0)
        assert [kind for kind, *_rest in brief(events)] == ["created", "stored", "removed", "updated"]
        assert [event.event_id for event in events] == [0, 1, 2, 3]
        assert manager.get_latest_events(0) == []
        assert manager.get_latest_events(-1) == []
        manager.flush_iteration_events()
        assert manager.get_latest_events(0) == []

    def test_stored_events_merge_along_a_chain(self) -> None:
        """A child of the last block stored joins its event; anything else begins a new one."""
        manager = KVCacheEventManager(10)
        manager.add_stored_event(None, [record(1)])
        manager.add_stored_event(1, [record(2), record(3)])
        manager.add_stored_event(3, [record(4)])
        manager.add_stored_event(3, [record(5)])
        assert brief(events_of(manager)) == [("stored", None, [1, 2, 3, 4]), ("stored", None, [5])]
        manager.add_stored_event(5, [record(6)])
        assert brief(events_of(manager)) == [("stored", None, [6])]

    def test_groups_merge_by_themselves(self) -> None:
        """Interleaved chains of two layer groups give two events."""
        manager = KVCacheEventManager(10)
        for name in (1, 2, 3):
            for group in (0, 1):
                manager.add_stored_event(name - 1 or None, [record(name)], group)
        assert brief(events_of(manager)) == [("stored", 0, [1, 2, 3]), ("stored", 1, [1, 2, 3])]

    def test_another_event_of_the_group_ends_the_chain(self) -> None:
        """What follows an update or a removal is a new event; other groups' updates do not matter."""
        manager = KVCacheEventManager(10)
        manager.add_stored_event(None, [record(1)], 0)
        manager.add_updated_event(1, KVCacheEventDiff(0, 1), None, 1)
        manager.add_stored_event(1, [record(2)], 0)
        manager.add_updated_event(1, KVCacheEventDiff(0, 1), None, 0)
        manager.add_stored_event(2, [record(3)], 0)
        assert [kind for kind, *_rest in brief(events_of(manager))] == ["stored", "updated", "updated", "stored"]

    def test_removals_wait_and_come_first(self) -> None:
        """Pending removals merge per group, and are told before whatever is not a removal."""
        manager = KVCacheEventManager(10)
        manager.add_stored_event(None, [record(1)], 0)
        for name, group in [(7, 1), (8, 0), (9, 1)]:
            manager.add_removed_event(name, group)
        manager.add_stored_event(1, [record(2)], 0)
        manager.add_removed_event([3])
        manager.add_updated_event(2, KVCacheEventDiff(0, 1), None, 0)
        assert brief(events_of(manager)) == [
            ("stored", 0, [1]),
            ("removed", 1, [7, 9]),
            ("removed", 0, [8]),
            ("stored", 0, [2]),
            ("removed", None, [3]),
            ("updated", 0, (2, 0, 1)),
        ]

    def test_unknown_keys_are_ignored(self) -> None:
        """Bytes name announced blocks; others, of any length, do nothing."""
        manager = KVCacheEventManager(10)
        for key in (b"", b"x", bytes(32), bytes(64)):
            manager.add_removed_event(key)
            manager.add_removed_event([key, key])
            manager.add_updated_event(key, KVCacheEventDiff(0, 1))
        assert events_of(manager) == []

    def test_keys_name_announced_blocks(self) -> None:
        """Removed by its key a block is removed for every group, once; the cache's own removal says no more."""
        manager = KVCacheEventManager(10, hash_algo="v2_blake3")
        cache = Cache(2, FULL, window(8), listener=manager)
        first, second = cache.store(toks(0, 4))
        events_of(manager)
        manager.add_updated_event(second.block_key(), None, KVCacheEventDiff(1, 2), 1)
        manager.add_removed_event(second.block_key(), 0)
        manager.add_updated_event(second.block_key(), KVCacheEventDiff(0, 1), None, 0)
        manager.add_removed_event([second.block_key(), first.block_key()])
        names = [first.block_key().hex(), second.block_key().hex()]
        assert [event[:2] for event in brief_kinds(events_of(manager))] == [
            ("updated", 1),
            ("removed", 0),
            ("removed", 1),
        ]
        cache.tree.clear()
        cache.store(toks(0, 2))
        assert brief(events_of(manager)) == [("stored", 0, names[:1]), ("stored", 1, names[:1])]
        manager.add_removed_event(bytes.fromhex(names[0]))
        assert brief(events_of(manager)) == [("removed", 0, names[:1]), ("removed", 1, names[:1])]

    def test_an_update_without_difference_is_none(self) -> None:
        manager = KVCacheEventManager(10)
        manager.add_updated_event(1)
        assert events_of(manager) == []


def brief_kinds(events: list[KVCacheEvent]) -> list[tuple[str, int | None]]:
    names = {"KVCacheStoredData": "stored", "KVCacheRemovedData": "removed", "KVCacheUpdatedData": "updated"}
    return [(names[type(event.data).__name__], event.layer_group_id) for event in events]


class TestCapacity:
    def test_the_oldest_are_dropped(self) -> None:
        """Merged first, then trimmed; ids keep counting, so a reader sees the gap, and the counter says how many."""
        manager = KVCacheEventManager(2)
        manager.add_created_event([1])
        manager.add_stored_event(None, [record(1)])
        manager.add_removed_event(["a"])
        manager.add_removed_event(["b"])
        events = events_of(manager)
        assert [event.event_id for event in events] == [1, 2]
        assert brief(events)[1] == ("removed", None, ["a", "b"])
        assert manager.num_dropped_events == 1
        manager.add_created_event([1])
        assert [event.event_id for event in events_of(manager)] == [3]

    def test_what_waits_for_a_reader_counts(self) -> None:
        """The maximum holds over several flushes."""
        manager = KVCacheEventManager(3)
        for _turn in range(4):
            manager.add_created_event([1], [0, 1])
            manager.flush_iteration_events()
        assert [event.event_id for event in manager.get_latest_events(0)] == [5, 6, 7]
        assert manager.num_dropped_events == 5

    @pytest.mark.parametrize("most", [0, -1])
    def test_zero_turns_events_off(self, most: int) -> None:
        """Nothing is kept or queued, and nothing waits for what cannot come."""
        manager = KVCacheEventManager(most)
        cache = Cache(2, FULL, listener=manager)
        [block] = cache.store([1, 2])
        manager.add_created_event([1])
        manager.add_stored_event(None, [record(1)])
        manager.add_removed_event([1])
        manager.add_updated_event(1, KVCacheEventDiff(0, 1))
        assert events_of(manager) == []
        assert manager.get_latest_events() == []
        assert block.event_state is None
        assert manager.num_dropped_events == 0
        with pytest.raises(LogicError, match="turned off"):
            manager.snapshot_events()

    def test_without_flush_nothing_grows_for_ever(self) -> None:
        """Events without a flush are bounded, like events without a reader."""
        manager = KVCacheEventManager(4)
        cache = Cache(2, FULL, listener=manager)
        for number in range(20):
            cache.store([number, number])
            cache.tree.clear()
            manager.snapshot_events()
        events = events_of(manager)
        assert [event.event_id for event in events] == [36, 37, 38, 39]
        assert manager.num_dropped_events == 36

    def test_records_without_a_flush_are_bounded(self) -> None:
        """An engine that listens and never flushes keeps a bounded number of notes, then of events."""
        manager = KVCacheEventManager(4)
        cache = Cache(2, FULL, listener=manager)
        [block] = cache.store([1, 2])
        for turn in range(MAX_RECORDS + 9):
            manager.page_moved(block, 0, turn % 2, (turn + 1) % 2)
        assert manager.num_dropped_events == MAX_RECORDS - 4
        assert [event.event_id for event in events_of(manager)] == list(range(MAX_RECORDS + 6, MAX_RECORDS + 10))


class TestWindows:
    def test_each_group_has_its_window(self) -> None:
        """Groups 0 and 1 report 128 and 4096, others and None the default."""
        manager = KVCacheEventManager(10, window_size=77, window_size_by_layer_group={0: 128, 1: 4096})
        manager.add_created_event([2, 3], [0, 1])
        manager.add_created_event([2, 3], [2])
        manager.add_created_event([2, 3])
        events = events_of(manager)
        assert brief(events) == [("created", group, [2, 3]) for group in (0, 1, 2, None)]
        assert [event.window_size for event in events] == [128, 4096, 77, 77]

    def test_the_window_is_that_of_the_moment(self) -> None:
        """An executor that learns the windows later sets them before it says what was created."""
        manager = KVCacheEventManager(10)
        manager.add_created_event([1], [0])
        windows = {0: 64}
        manager.window_size_by_layer_group = windows
        windows[0] = 5
        manager.add_created_event([1], [0])
        assert manager.window_size_by_layer_group == {0: 64}
        assert [event.window_size for event in events_of(manager)] == [0, 64]

    def test_negative_offset_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="mm_token_id_offset is -1"):
            KVCacheEventManager(1, mm_token_id_offset=-1)


class TestReaders:
    def test_a_waiting_reader_wakes_with_the_flush(self) -> None:
        """A read without timeout waits for the first event; the producer is not held up meanwhile."""
        manager = KVCacheEventManager(10)
        results: Queue[list[KVCacheEvent]] = Queue()
        reader = threading.Thread(target=lambda: results.put(manager.get_latest_events()), daemon=True)
        reader.start()
        manager.flush_iteration_events()  # no event: no reader wakes
        manager.add_created_event([1])
        manager.flush_iteration_events()
        events = results.get(timeout=WAIT)
        reader.join(WAIT)
        assert brief(events) == [("created", None, [1])]

    def test_a_reader_with_time_wakes_early(self) -> None:
        """A timeout is a limit, not a delay."""
        manager = KVCacheEventManager(10)
        results: Queue[list[KVCacheEvent]] = Queue()
        reader = threading.Thread(target=lambda: results.put(manager.get_latest_events(WAIT * 4000)), daemon=True)
        reader.start()
        manager.add_created_event([1])
        manager.flush_iteration_events()
        assert brief(results.get(timeout=WAIT)) == [("created", None, [1])]
        reader.join(WAIT)

    def test_a_timeout_without_events_gives_nothing(self) -> None:
        assert KVCacheEventManager(10).get_latest_events(1) == []

    def test_events_reach_one_of_many_readers(self) -> None:
        """Readers share the stream: each event is returned once, to one of them, while blocks come and go."""
        manager = KVCacheEventManager(100_000, hash_algo="v2_blake3")
        cache = Cache(2, FULL, listener=manager)
        taken: Queue[list[KVCacheEvent]] = Queue()
        ended = threading.Event()

        def read() -> None:
            while not ended.is_set():
                taken.put(manager.get_latest_events(5))

        readers = [threading.Thread(target=read, daemon=True) for _reader in range(3)]
        for reader in readers:
            reader.start()
        for number in range(200):
            cache.store([number, number, number])
            if number % 3 == 0:
                cache.tree.clear()
            manager.flush_iteration_events()
        ended.set()
        for reader in readers:
            reader.join(WAIT)
        taken.put(manager.get_latest_events(0))
        events: list[KVCacheEvent] = []
        while not taken.empty():
            events += taken.get()
        assert sorted(event.event_id for event in events) == list(range(len(events)))
        assert manager.num_dropped_events == 0

    def test_flush_and_snapshot_beside_a_writer(self) -> None:
        """Another thread may flush and take snapshots at any time: no note is lost or seen twice."""
        manager = KVCacheEventManager(1 << 20, hash_algo="v2_blake3")
        cache = Cache(2, FULL, listener=manager)
        ended = threading.Event()
        problems: list[BaseException] = []

        def work() -> None:
            try:
                while not ended.is_set():
                    manager.flush_iteration_events()
                    manager.snapshot_events()
            except BaseException as error:
                problems.append(error)

        other = threading.Thread(target=work, daemon=True)
        other.start()
        for number in range(300):
            cache.store([number, number, number, number])
        ended.set()
        other.join(WAIT)
        manager.flush_iteration_events()
        assert not problems
        names = [block.block_hash for event in manager.get_latest_events(0) for block in stored(event).blocks]
        assert len(names) == len(set(names)) == 600


class TestRanks:
    def manager(self, rank: int, most: int, gather: Any) -> KVCacheEventManager:
        return KVCacheEventManager(most, attention_dp_rank=rank, attention_dp_gather=gather)

    def test_the_gather_gets_the_local_events(self) -> None:
        """One local event goes in; what comes out on rank 0 is published."""
        seen: list[list[KVCacheEvent]] = []
        other = KVCacheEvent(2, KVCacheRemovedData([1]), 0, "v2_sha256", 1)

        def gather(local: list[KVCacheEvent]) -> list[list[KVCacheEvent]]:
            seen.append(local)
            return [local, [other]]

        manager = self.manager(0, 10, gather)
        manager.add_created_event([1])
        events = events_of(manager)
        assert len(seen) == 1
        assert [event.attention_dp_rank for event in events] == [0, 1]
        assert events == [*seen[0], other]

    def test_rank_zero_publishes_in_rank_order(self) -> None:
        """Ranks [0, 1] with ids [2], [3] (each rank counts for itself)."""
        manager = self.manager(0, 10, lambda local: [[event(2, 0)], [event(3, 1)]])
        published = events_of(manager)
        assert [(entry.attention_dp_rank, entry.event_id) for entry in published] == [(0, 2), (1, 3)]

    def test_other_ranks_publish_nothing(self) -> None:
        """Rank 1 sends its newest events, at most the maximum, and keeps none."""
        sent: list[list[int]] = []

        def gather(local: list[KVCacheEvent]) -> list[list[KVCacheEvent]]:
            sent.append([entry.event_id for entry in local])
            return [[], local]

        manager = self.manager(1, 1, gather)
        for _turn in range(4):
            manager.add_created_event([1])
        assert events_of(manager) == []
        assert sent == [[3]]
        assert manager.num_dropped_events == 3

    def test_rank_zero_trims_each_rank(self) -> None:
        """With a maximum of 1: the newest event of each rank, and room for one a rank."""
        gathered = [[event(1, 0), event(2, 0)], [event(10, 1), event(11, 1)]]
        manager = self.manager(0, 1, lambda local: gathered)
        assert [entry.event_id for entry in events_of(manager)] == [2, 11]
        manager.flush_iteration_events()
        manager.flush_iteration_events()
        assert [entry.event_id for entry in manager.get_latest_events(0)] == [2, 11]

    def test_every_flush_takes_part(self) -> None:
        """The gather is collective: a rank without events joins it too, and no thread waits for a lock meanwhile."""
        calls: list[int] = []

        def gather(local: list[KVCacheEvent]) -> list[list[KVCacheEvent]]:
            calls.append(len(local))
            manager.add_created_event([1])  # would hang if a lock were held
            assert manager.get_latest_events(0) == []
            return [local]

        manager = self.manager(0, 10, gather)
        manager.flush_iteration_events()
        manager.flush_iteration_events()
        assert calls == [0, 1]

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_a_gather_that_raises_loses_nothing(self, error: type[BaseException]) -> None:
        """What it raises is passed on. The events wait for the next flush, before later ones, whatever it did to its list."""
        down = [True]

        def gather(local: list[KVCacheEvent]) -> list[list[KVCacheEvent]]:
            if down[0]:
                local.clear()
                manager.add_created_event([2])
                raise error("the ranks cannot be reached")
            return [local]

        manager = self.manager(0, 10, gather)
        manager.add_created_event([1])
        with pytest.raises(error, match="cannot be reached"):
            manager.flush_iteration_events()
        assert manager.get_latest_events(0) == []
        down[0] = False
        assert [entry.event_id for entry in events_of(manager)] == [0, 1]
        assert manager.num_dropped_events == 0

    def test_a_gather_that_answers_nonsense_loses_nothing(self) -> None:
        """Its answer is read whole before anything is published or counted."""
        answer: list[Any] = [[[event(7, 0), event(8, 0)], None]]
        manager = self.manager(0, 1, lambda local: answer[0] if answer else [local])
        manager.add_created_event([1])
        with pytest.raises(TypeError):
            manager.flush_iteration_events()
        assert (manager.get_latest_events(0), manager.num_dropped_events) == ([], 0)
        answer.clear()
        assert [entry.event_id for entry in events_of(manager)] == [0]

    def test_a_gather_that_is_down_for_long_costs_no_memory(self) -> None:
        """The oldest events are dropped and counted, as without a gather."""

        def gather(local: list[KVCacheEvent]) -> list[list[KVCacheEvent]]:
            sizes.append(len(local))
            raise RuntimeError

        sizes: list[int] = []
        manager = self.manager(0, 3, gather)
        for _turn in range(8):
            manager.add_created_event([1])
            with pytest.raises(RuntimeError):
                manager.flush_iteration_events()
        assert sizes == [1, 2, 3, 3, 3, 3, 3, 3]
        assert manager.num_dropped_events == 5


def event(event_id: int, rank: int) -> KVCacheEvent:
    return KVCacheEvent(event_id, KVCacheRemovedData([1]), 0, "v2_sha256", rank)
