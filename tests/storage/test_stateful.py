"""The hierarchy against its model: random calls, byte-exact contents, any interleaving of streams, faults of the device."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_cache_manager_v2.errors import KVCacheError
from kv_cache_manager_v2.ids import NULL_POINT
from kv_cache_manager_v2.layout.sizing import LevelSizing
from kv_cache_manager_v2.storage.page import Page
from tests.storage.model import Entry, Model
from tests.support.storage_rig import GRAIN, FakeBlock, StorageRig, resize_level

numbers = st.integers(0, 1 << 20)


class HierarchyMachine(RuleBasedStateMachine):
    """Rules draw a number and take it modulo what there is to choose from."""

    def __init__(self) -> None:
        super().__init__()
        self.rig: StorageRig | None = None
        self.directory = tempfile.TemporaryDirectory()
        self.values = 0
        self.faulty = False  # a file transfer may have been made to fail: bytes of pages marked as lost are not looked at

    @initialize(
        tiers=st.sampled_from(["g", "gh", "gd", "ghd", "ghh", "gdd"]),
        schedule=st.sampled_from(["eager", "random"]),
        seed=st.integers(0, 1000),
        counts=st.lists(st.sampled_from([0, 1, 2, 2, 3, 3, 4, 5]), min_size=6, max_size=6),
        groups=st.integers(1, 2),
        inclusive=st.booleans(),
    )
    def start(self, tiers: str, schedule: str, seed: int, counts: list[int], groups: int, inclusive: bool) -> None:
        slots = [[counts[2 * level + group] + (1 if level == 0 else 0) for group in range(groups)] for level in range(len(tiers))]
        sizes = [(24,), (9, 16)][:groups]
        self.rig = StorageRig(slots, tiers, sizes, schedule, seed, self.directory.name, exclusive=not inclusive)
        self.model = Model(slots, [tier == "d" for tier in tiers])
        self.model.kept = self.kept_slots
        self.model.inclusive = inclusive
        self.block = FakeBlock("tree")
        self.partial = FakeBlock("a block to which a request still writes")
        self.partial.final = False

    def kept_slots(self, level: int, group: int) -> int:
        """Slots that their pages have left, and that a file transfer may still write to."""
        hierarchy = self.rig_().hierarchy
        cell = hierarchy.cells[group][level]
        return len(cell.kept) + len(hierarchy.in_flight.kept_slots(cell))

    def rig_(self) -> StorageRig:
        assert self.rig is not None
        return self.rig

    # --- choosing

    def pick(self, number: int, which: Sequence[Entry]) -> Entry | None:
        """None if there is nothing to choose: the rule then does nothing, which costs less than giving the example up."""
        return which[number % len(which)] if which else None

    def all(self, locked: bool = False, held: bool = False, idle: bool = False, gpu: bool = False) -> list[Entry]:
        return [
            e
            for e in self.model.entries
            if (not locked or e.locks) and (not held or e.holds) and (not idle or not e.locks) and (not gpu or e.level == 0)
        ]

    def busy(self) -> list[Entry]:
        return [entry for entry in self.model.entries if entry.page.transfers > 0]

    def room(self, target: int, need: list[int], load: list[Entry]) -> tuple[int, int] | None:
        """The model's answer. Pages in flight are not evicted, but they are waited for before anything is refused."""
        short = self.model.make_room(target, need, load, self.busy())
        group_wants = [need[g] + sum(1 for e in load if e.group == g) for g in range(self.model.groups)]
        in_flight = self.rig_().hierarchy.transfers_in_flight > 0
        if short is not None and in_flight and group_wants[short[0]] <= self.model.slots[target][short[0]]:
            self.synchronize()
            short = self.model.make_room(target, need, load, [])
        return short

    def changed(self, entry: Entry, locks: int = 0, holds: int = 0, owned: bool | None = None) -> None:
        """What a call has changed of a page."""
        entry.locks += locks
        entry.holds += holds
        entry.owned = entry.owned if owned is None else owned
        self.model.settle(entry)

    # --- one page

    @rule(life_cycle=numbers)
    def new_locked(self, life_cycle: int) -> None:
        self.new(life_cycle, 35)

    def new(self, life_cycle: int, priority: int) -> Entry | None:
        rig = self.rig_()
        life_cycle %= rig.layout.num_life_cycles
        group = rig.layout.pool_group_of[life_cycle]
        need = [0] * self.model.groups
        need[group] = 1
        short = self.room(0, need, [])
        shortage = rig.hierarchy.acquire(need, [])
        self.compare_shortage(short, shortage)
        if shortage is not None:
            return None
        page = rig.hierarchy.new_page(life_cycle, priority)
        rig.pages.append(page)
        self.values += 1
        rig.stamp(page, self.values)
        entry = Entry(page, group, priority, self.values)
        self.model.entries.append(entry)
        return entry

    @rule(life_cycle=numbers, priority=st.sampled_from([10, 35, 35, 35, 90]), count=st.integers(1, 6))
    def new_cached(self, life_cycle: int, priority: int, count: int) -> None:
        for _ in range(count):
            entry = self.new(life_cycle, priority)
            if entry is not None:
                self.rig_().hierarchy.adopt(entry.page, self.block, 4)
                entry.owned = True
                self.rig_().hierarchy.unlock(entry.page, self.rig_().timeline.record(self.rig_().stream))
                entry.locks = 0
                self.model.settle(entry)

    @rule(life_cycle=numbers, count=st.integers(1, 6), owned=st.booleans())
    def new_held(self, life_cycle: int, count: int, owned: bool) -> None:
        for _ in range(count):
            entry = self.new(life_cycle, 35)
            if entry is not None:
                if owned:
                    self.rig_().hierarchy.adopt(entry.page, self.block, 4)
                    entry.owned = True
                self.rig_().hierarchy.hold_locked(entry.page, self.rig_().timeline.record(self.rig_().stream))
                entry.locks = 0
                entry.holds = 1
                self.model.settle(entry)

    @rule(bits=numbers)
    def hold_some(self, bits: int) -> None:
        for i, entry in enumerate(self.all()):
            if bits >> i & 1:
                self.rig_().hierarchy.hold(entry.page)
                entry.holds += 1
                self.model.settle(entry)

    def compare_shortage(self, short: tuple[int, int] | None, shortage: object) -> None:
        found = None if shortage is None else (getattr(shortage, "pool_group"), getattr(shortage, "missing"))  # noqa: B009
        assert found == short
        if self.model.inclusive:
            self.synchronize_model()

    @rule(number=numbers)
    def adopt(self, number: int) -> None:
        if entry := self.pick(number, [e for e in self.model.entries if not e.owned and not e.page.lost]):
            self.rig_().hierarchy.adopt(entry.page, self.block if number % 3 else self.partial, 4)
            self.changed(entry, owned=True)

    @rule(number=numbers)
    def rewrite(self, number: int) -> None:
        """A request writes to a page of its own, as it does to the tail of its last block."""
        private = [e for e in self.all(locked=True) if e.page.owner is not self.block and not e.page.lost]
        if entry := self.pick(number, private):
            self.values += 1
            entry.value = self.values
            self.rig_().stamp(entry.page, self.values)

    @rule(number=numbers, other=numbers)
    def overwrite(self, number: int, other: int) -> None:
        entry = self.pick(number, [e for e in self.all(gpu=True, idle=True) if not e.holds])
        source = self.pick(
            other, [e for e in self.all(gpu=True) if entry is not None and e is not entry and e.group == entry.group]
        )
        if entry is None or source is None:
            return
        if self.rig_().hierarchy.overwrite(entry.page, source.page, self.rig_().stream):
            entry.value = source.value
            queue = self.model.queues[0, entry.group]
            queue.remove(entry)
            self.model.settle(entry)

    @rule(number=numbers)
    def unlock(self, number: int) -> None:
        if entry := self.pick(number, self.all(locked=True)):
            self.rig_().hierarchy.unlock(entry.page, self.rig_().timeline.record(self.rig_().stream))
            self.changed(entry, locks=-1)

    @rule(number=numbers)
    def hold_locked(self, number: int) -> None:
        if entry := self.pick(number, self.all(locked=True)):
            self.rig_().hierarchy.hold_locked(entry.page, self.rig_().timeline.record(self.rig_().stream))
            self.changed(entry, locks=-1, holds=1)

    @rule(number=numbers)
    def lock_held(self, number: int) -> None:
        if entry := self.pick(number, self.all(held=True, gpu=True)):
            self.rig_().hierarchy.lock_held(entry.page)
            self.changed(entry, locks=1, holds=-1)

    @rule(bits=numbers)
    def suspend(self, bits: int) -> None:
        """Locks become holds, as when requests are preempted."""
        for i, entry in enumerate(self.all(locked=True)):
            if bits >> i & 1 or i > 3:
                while entry.locks:
                    self.rig_().hierarchy.hold_locked(entry.page, self.rig_().timeline.record(self.rig_().stream))
                    entry.locks -= 1
                    entry.holds += 1
                    self.model.settle(entry)

    @rule(number=numbers)
    def lock(self, number: int) -> None:
        if entry := self.pick(number, self.all(gpu=True)):
            self.rig_().hierarchy.lock(entry.page)
            self.changed(entry, locks=1)

    @rule(number=numbers)
    def hold(self, number: int) -> None:
        if entry := self.pick(number, self.all()):
            self.rig_().hierarchy.hold(entry.page)
            self.changed(entry, holds=1)

    @rule(number=numbers)
    def release(self, number: int) -> None:
        if entry := self.pick(number, self.all(held=True)):
            self.rig_().hierarchy.release(entry.page)
            self.changed(entry, holds=-1)

    @rule(number=numbers)
    def unlist(self, number: int) -> None:
        if entry := self.pick(number, [e for e in self.model.entries if e.owned]):
            self.rig_().hierarchy.unlist(entry.page)
            self.changed(entry, owned=False)

    @rule(number=numbers)
    def discard(self, number: int) -> None:
        entry = self.pick(number, [e for e in self.model.entries if e.owned and not e.locks and not e.holds])
        if entry is None:
            return
        self.rig_().hierarchy.drop(entry.page)
        self.model.remove(entry)
        self.model.dropped += 1

    # --- making room

    @rule(bits=numbers, need=st.lists(st.integers(0, 3), min_size=2, max_size=2))
    def load(self, bits: int, need: list[int]) -> None:
        load = [e for i, e in enumerate(self.all(held=True)) if bits >> i & 1]
        need = need[: self.model.groups]
        short = self.room(0, need, load)
        shortage = self.rig_().hierarchy.acquire(need, [e.page for e in load])
        self.compare_shortage(short, shortage)
        if shortage is None:
            assert all(e.page.level == 0 for e in load)
            assert all(self.rig_().hierarchy.free(0, g) >= need[g] for g in range(self.model.groups))

    @rule(given_bits=numbers, held_bits=numbers, need=st.lists(st.integers(0, 3), min_size=2, max_size=2))
    def trade(self, given_bits: int, held_bits: int, need: list[int]) -> None:
        """What is planned for the time after giving up locks is what then happens."""
        rig = self.rig_()
        need = need[: self.model.groups]
        given = [e for i, e in enumerate(self.all(locked=True)) if given_bits >> i & 1]
        held = [e for i, e in enumerate(self.all(locked=True)) if held_bits >> i & 1 and e not in given]
        self.synchronize()
        given = [e for e in given if not e.gone]
        foreseen = rig.hierarchy.planner.plan_trade(need, [e.page for e in given], [e.page for e in held])
        point = rig.timeline.record(rig.stream)
        for entry in given + held:
            if entry in held:
                rig.hierarchy.hold_locked(entry.page, point)
                entry.holds += 1
            else:
                rig.hierarchy.unlock(entry.page, point)
            entry.locks -= 1
            self.model.settle(entry)
        short = self.room(0, need, [])
        self.compare_shortage(short, foreseen)
        self.compare_shortage(short, rig.hierarchy.acquire(need, []))

    @rule(number=numbers, priority=st.sampled_from([10, 35, 90]))
    def raise_priority(self, number: int, priority: int) -> None:
        entry = self.pick(number, self.all())
        if entry is None:
            return
        self.rig_().hierarchy.raise_priority(entry.page, priority)
        if priority > entry.priority:
            queue = self.model.queues[entry.level, entry.group]
            if entry in queue:
                queue.remove(entry)
            entry.priority = priority
            self.model.settle(entry)

    @rule(bits=numbers, level=numbers)
    def prefetch(self, bits: int, level: int) -> None:
        level %= self.model.last + 1
        load = [e for i, e in enumerate(self.all(held=True)) if bits >> i & 1 and e.level >= level]
        there = [e for e in load if e.level == level]
        short = self.room(level, [0] * self.model.groups, load)
        shortage = self.rig_().hierarchy.prefetch([e.page for e in load], level)
        self.compare_shortage(short, shortage)
        if shortage is None:
            for entry in load:
                queue = self.model.queues[level, entry.group]
                if entry in queue:
                    queue.remove(entry)
                    self.model.settle(entry)
            assert all(e.page.level == level for e in there)

    @rule(number=numbers, count=st.integers(1, 3))
    def use_again(self, number: int, count: int) -> None:
        """Requests come for cached pages of colder levels, and end."""
        for step in range(count):
            entry = self.pick(number + step, [e for e in self.all() if e.level > 0 and e.owned])
            if entry is None:
                return
            rig = self.rig_()
            rig.hierarchy.hold(entry.page)
            self.changed(entry, holds=1)
            short = self.room(0, [0] * self.model.groups, [entry])
            shortage = rig.hierarchy.acquire([0] * self.model.groups, [entry.page])
            self.compare_shortage(short, shortage)
            if shortage is None:
                rig.hierarchy.lock_held(entry.page)
                self.changed(entry, locks=1, holds=-1)
                rig.hierarchy.unlock(entry.page, rig.timeline.record(rig.stream))
                self.changed(entry, locks=-1)
            else:
                rig.hierarchy.release(entry.page)
                self.changed(entry, holds=-1)

    @rule(number=numbers)
    def copy(self, number: int) -> None:
        rig = self.rig_()
        entry = self.pick(number, self.all())
        if entry is None:
            return
        if entry.page.lost:
            assert rig.hierarchy.try_copy(entry.page, 35, rig.stream) is None
            return
        need = [1 if group == entry.group else 0 for group in range(self.model.groups)]
        levels = range(entry.level, self.model.last + 1)
        expected = [level for level in levels if self.model.free(level, entry.group) > 0]
        for level in levels:
            cached = any(not e.holds for e in self.model.queues[level, entry.group])
            spared = [entry, *self.busy()]
            if not expected and cached and self.model.make_room(level, need, [], spared, False) is None:
                expected.append(level)
        copy = rig.hierarchy.try_copy(entry.page, 35, rig.stream)
        if self.model.inclusive:
            self.synchronize_model()
        if copy is None:
            assert not expected
            return
        assert copy.level == expected[0] or self.model.inclusive
        rig.pages.append(copy)
        made = Entry(copy, entry.group, 35, entry.value)
        made.locks = 0
        made.holds = 1
        rig.hierarchy.hold(copy)
        made.level = copy.level
        self.model.entries.append(made)
        rig.hierarchy.adopt(copy, self.block, 2)
        made.owned = True
        rig.hierarchy.release(copy)
        made.holds = 0
        self.model.settle(made)

    @rule(number=numbers, other=numbers)
    def take_over(self, number: int, other: int) -> None:
        cold = self.pick(number, [e for e in self.all() if e.level > 0])
        if cold is None:
            return
        mine = [e for e in self.all(gpu=True, locked=True) if e.group == cold.group and not e.owned and not e.page.lost]
        ours = self.pick(other, mine)
        if ours is None:
            return
        self.rig_().hierarchy.take_over(cold.page, ours.page)
        if cold in self.model.queues[cold.level, cold.group]:
            self.model.queues[cold.level, cold.group].remove(cold)
        self.model.remove(ours)
        cold.level = 0
        cold.locks += ours.locks
        cold.holds += ours.holds
        cold.value = ours.value
        self.model.settle(cold)

    # --- sizes

    @rule(level=numbers, counts=st.lists(st.integers(0, 6), min_size=2, max_size=2))
    def resize(self, level: int, counts: list[int]) -> None:
        rig = self.rig_()
        level %= self.model.last + 1
        counts = [count + (1 if level == 0 else 0) for count in counts[: self.model.groups]]
        sizing = LevelSizing(rig.tier_configs[level].tier, 1, 64 << 20, GRAIN[rig.tier_configs[level].tier])
        sizing.slots = counts
        self.synchronize()
        result = resize_level(rig.hierarchy, level, sizing)
        need = [max(0, old - new) for old, new in zip(self.model.slots[level], counts, strict=True)]
        if "locked" in result.reason:
            assert any(e.locks and e.level == level for e in self.model.entries)
            return
        short = self.model.make_room(level, need, [], [])
        assert (short is None) == bool(result)
        if self.model.inclusive:
            self.synchronize_model()
        if short is None:
            self.model.slots[level] = counts
        else:
            assert short == (result.pool_group, result.missing)

    # --- time and faults

    @rule()
    def settle(self) -> None:
        self.rig_().hierarchy.settle()
        self.forget_lost()

    @rule()
    def synchronize(self) -> None:
        self.rig_().driver.synchronize()
        self.rig_().hierarchy.settle()
        self.forget_lost()

    def forget_lost(self) -> None:
        """A page whose file transfer was made to fail left its owner; a droppable one is gone."""
        assert self.faulty or not any(e.page.lost for e in self.model.entries)
        for entry in list(self.model.entries):
            if entry.page.lost and entry.owned:
                entry.owned = False
                self.model.settle(entry)

    @rule(
        call=st.sampled_from(["copy_batch", "record_event", "wait_event", "read_file", "read_file", "write_file", "write_file"]),
        nth=st.sampled_from([1, 1, 2, 3]),
        bits=numbers,
        need=st.lists(st.integers(0, 2), min_size=2, max_size=2),
    )
    def load_with_fault(self, call: str, nth: int, bits: int, need: list[int]) -> None:
        """After any failure no page is lost but by a file transfer, and all structures agree."""
        rig = self.rig_()
        load = [e.page for i, e in enumerate(self.all(held=True)) if bits >> i & 1]
        self.faulty = self.faulty or call in ("read_file", "write_file")
        rig.driver.fail(call, nth)
        with contextlib.suppress(KVCacheError):
            rig.hierarchy.acquire(need[: self.model.groups], load)
        rig.driver.heal()
        self.synchronize_model()

    @rule(number=numbers, level=numbers)
    def load_from_disk_with_fault(self, number: int, level: int) -> None:
        """One read of one page fails; the page may be moved on before the failure is noticed."""
        rig = self.rig_()
        entry = self.pick(number, [e for e in self.all() if self.model.disk[e.level]])
        if entry is None:
            return
        self.faulty = True
        rig.hierarchy.hold(entry.page)
        entry.holds += 1
        rig.driver.fail("read_file", 1 + number % 2)
        rig.hierarchy.prefetch([entry.page], level % (entry.level + 1))
        rig.driver.heal()
        rig.hierarchy.acquire([0] * self.model.groups, [entry.page])
        self.synchronize_model()

    @rule(life_cycle=numbers, call=st.sampled_from(["write_file", "copy_batch", "record_event"]))
    def new_with_fault(self, life_cycle: int, call: str) -> None:
        """What is offloaded to make room is lost on the way, or stays where it was."""
        rig = self.rig_()
        life_cycle %= rig.layout.num_life_cycles
        need = [0] * self.model.groups
        need[rig.layout.pool_group_of[life_cycle]] = self.model.slots[0][rig.layout.pool_group_of[life_cycle]] // 2 + 1
        self.faulty = self.faulty or call == "write_file"
        rig.driver.fail(call)
        with contextlib.suppress(KVCacheError):
            rig.hierarchy.acquire(need, [])
        rig.driver.heal()
        self.synchronize_model()

    def synchronize_model(self) -> None:
        """After a fault: take levels and queues from the hierarchy, having seen that no page that is needed is gone."""
        rig = self.rig_()
        by_page: dict[int, Entry] = {id(e.page): e for e in self.model.entries}
        for entry in list(self.model.entries):
            if not entry.page.alive():
                assert not entry.locks
                assert not entry.holds
                self.model.entries.remove(entry)
                self.model.dropped += 0 if entry.page.lost else 1
            else:
                entry.level = entry.page.level
                entry.owned = entry.page.owner is not None
        for (level, group), queue in self.model.queues.items():
            pages: list[Page] = rig.order(level, group)
            queue[:] = [by_page[id(page)] for page in pages]

    # --- what always holds

    @invariant()
    @precondition(lambda self: self.rig is not None)
    def agrees(self) -> None:
        rig = self.rig_()
        rig.check()
        for entry in self.model.entries:
            page = entry.page
            assert page.alive()
            assert (page.level, page.holds, page.locks) == (entry.level, entry.holds, entry.locks)
        for page in rig.pages:
            if not any(entry.page is page for entry in self.model.entries):
                assert not page.alive()
        for (level, group), queue in self.model.queues.items():
            assert rig.order(level, group) == [entry.page for entry in queue], f"order of level {level}, group {group}"
            assert rig.hierarchy.free(level, group) == max(0, self.model.free(level, group))

    @rule()
    def contents(self) -> None:
        self.synchronize()
        for entry in self.model.entries:
            if not entry.page.lost:
                self.rig_().expect(entry.page, entry.value)

    def teardown(self) -> None:
        if self.rig is None:
            return
        self.contents()
        assert sum(self.rig.counters.pages_dropped(level) for level in range(self.model.last + 1)) == self.model.dropped
        for entry in list(self.model.entries):
            page = entry.page
            while entry.locks:
                self.rig.hierarchy.unlock(page, NULL_POINT)
                entry.locks -= 1
            while entry.holds:
                self.rig.hierarchy.release(page)
                entry.holds -= 1
            if page.alive():
                self.rig.hierarchy.unlist(page)
        self.rig.driver.synchronize()
        self.rig.hierarchy.settle()
        for level in range(self.model.last + 1):
            for group in range(self.model.groups):
                assert self.rig.hierarchy.free(level, group) == self.rig.hierarchy.total(level, group)
        self.rig.close()
        self.directory.cleanup()


TestHierarchyMachine = HierarchyMachine.TestCase
TestHierarchyMachine.settings = settings(max_examples=60, stateful_step_count=50)
TestHierarchyMachine = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")(TestHierarchyMachine)
