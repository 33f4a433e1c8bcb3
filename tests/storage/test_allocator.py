"""Slots: ids, readiness, shrinking."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.emulated.driver import EmulatedDriver
from kv_cache_manager_v2.errors import LogicError, OutOfPagesError
from kv_cache_manager_v2.ids import NULL_POINT, SlotId
from kv_cache_manager_v2.storage.allocator import SlotAllocator


class Device:
    def __init__(self) -> None:
        self.driver = EmulatedDriver()
        self.timeline = Timeline(self.driver)
        self.stream = self.driver.create_stream()

    def close(self) -> None:
        self.timeline.close()
        self.driver.destroy_stream(self.stream)
        self.driver.close()


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.close()


def test_ids_start_at_zero_and_count_up(device: Device) -> None:
    slots = SlotAllocator(device.timeline, 3)
    assert [slots.allocate() for _ in range(3)] == [(0, NULL_POINT), (1, NULL_POINT), (2, NULL_POINT)]
    with pytest.raises(OutOfPagesError):
        slots.allocate()
    slots.check_invariants()


def test_recycling_keeps_the_id(device: Device) -> None:
    slots = SlotAllocator(device.timeline, 3)
    for _ in range(2):
        slots.allocate()
    slots.release(SlotId(0), NULL_POINT)
    assert slots.allocate()[0] == 0
    assert slots.issued == 2


def test_ready_before_fresh_before_pending(device: Device) -> None:
    """A slot still busy is taken last, and its new owner is told what to wait for."""
    slots = SlotAllocator(device.timeline, 3)
    for _ in range(2):
        slots.allocate()
    gate = device.driver.gate(device.stream)
    point = device.timeline.record(device.stream)
    slots.release(SlotId(0), point)
    slots.release(SlotId(1), NULL_POINT)
    assert slots.free == 3
    assert slots.allocate() == (1, NULL_POINT)
    assert slots.allocate() == (2, NULL_POINT)
    assert slots.allocate() == (0, point)
    gate.open()


def test_pending_slot_becomes_ready(device: Device) -> None:
    slots = SlotAllocator(device.timeline, 2)
    slots.allocate()
    gate = device.driver.gate(device.stream)
    slots.release(SlotId(0), device.timeline.record(device.stream))
    gate.open()
    device.driver.synchronize()
    assert slots.allocate() == (0, NULL_POINT)


def test_one_slow_user_does_not_hide_ready_slots(device: Device) -> None:
    slots = SlotAllocator(device.timeline, 2)
    other = device.driver.create_stream()
    for _ in range(2):
        slots.allocate()
    gate = device.driver.gate(device.stream)
    slots.release(SlotId(0), device.timeline.record(device.stream))
    slots.release(SlotId(1), device.timeline.record(other))
    assert slots.allocate() == (1, NULL_POINT)
    gate.open()
    device.timeline.forget(other)
    device.driver.destroy_stream(other)


@pytest.mark.parametrize("slot", [-1, 1, 7])
def test_release_of_a_slot_that_is_not_taken(device: Device, slot: int) -> None:
    slots = SlotAllocator(device.timeline, 8)
    slots.allocate()
    slots.allocate()
    slots.release(SlotId(1), NULL_POINT)
    with pytest.raises(LogicError, match=f"slot {slot} "):
        slots.release(SlotId(slot), NULL_POINT)
    slots.check_invariants()
    assert slots.free == 7


def test_shrink_above_the_high_water_mark(device: Device) -> None:
    slots = SlotAllocator(device.timeline, 184064)
    for _ in range(2048):
        slots.allocate()
    for slot in range(2048):
        slots.release(SlotId(slot), NULL_POINT)
    slots.prepare_shrink(122624)
    slots.finish_shrink()
    assert (slots.capacity, slots.free, slots.issued) == (122624, 122624, 2048)
    slots.check_invariants()


def test_shrink_with_low_slots_in_use(device: Device) -> None:
    slots = SlotAllocator(device.timeline, 16)
    for _ in range(16):
        slots.allocate()
    for slot in range(8, 16):
        slots.release(SlotId(slot), NULL_POINT)
    slots.prepare_shrink(8)
    assert slots.free == 0
    slots.check_invariants()
    slots.finish_shrink()
    assert (slots.capacity, slots.free, slots.issued, slots.num_taken()) == (8, 0, 8, 8)
    slots.check_invariants()


def test_shrink_is_refused_while_a_high_slot_is_taken(device: Device) -> None:
    slots = SlotAllocator(device.timeline, 4)
    for _ in range(4):
        slots.allocate()
    slots.release(SlotId(3), NULL_POINT)
    slots.prepare_shrink(2)
    with pytest.raises(LogicError, match="1 slots"):
        slots.finish_shrink()
    slots.abort_shrink()
    assert (slots.capacity, slots.free) == (4, 1)
    slots.check_invariants()


def test_release_during_a_shrink_sets_aside(device: Device) -> None:
    slots = SlotAllocator(device.timeline, 4)
    for _ in range(4):
        slots.allocate()
    slots.prepare_shrink(2)
    slots.release(SlotId(3), NULL_POINT)
    slots.release(SlotId(0), NULL_POINT)
    assert slots.free == 1
    slots.check_invariants()
    slots.release(SlotId(2), NULL_POINT)
    slots.finish_shrink()
    assert (slots.capacity, slots.free, slots.issued) == (2, 1, 2)
    with pytest.raises(LogicError):
        slots.prepare_shrink(3)
    slots.expand(5)
    assert slots.free == 4
    slots.check_invariants()


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "late", "shrink", "grow"]), st.integers(0, 7)), max_size=60))
def test_like_a_set(steps: list[tuple[str, int]]) -> None:
    """Against a set of taken ids: no id twice, none beyond the capacity, counts exact."""
    device = Device()
    slots = SlotAllocator(device.timeline, 5)
    taken: list[SlotId] = []
    for what, number in steps:
        if what == "take" and slots.free > 0:
            slot, _point = slots.allocate()
            assert slot not in taken
            assert slot < slots.capacity
            taken.append(slot)
        elif what in ("give", "late") and taken:
            slot = taken.pop(number % len(taken))
            slots.release(slot, NULL_POINT if what == "give" else device.timeline.record(device.stream))
        elif what == "grow":
            slots.expand(slots.capacity + number)
        elif what == "shrink":
            target = min(number, slots.capacity)
            slots.prepare_shrink(target)
            if any(slot >= target for slot in taken):
                with pytest.raises(LogicError):
                    slots.finish_shrink()
                slots.abort_shrink()
            else:
                slots.finish_shrink()
                assert slots.capacity == target
        assert slots.free == slots.capacity - len(taken)
        assert slots.num_taken() == len(taken)
        slots.check_invariants()
    device.close()
