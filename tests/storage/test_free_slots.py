"""Free slots in the order of their release, against a list."""

from __future__ import annotations

import gc

from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.ids import Point, SlotId
from kv_cache_manager_v2.storage.free_slots import COMPACT_FROM, FreeSlots


def drain_some(waiting: FreeSlots, model: list[tuple[SlotId, Point]], count: int, near: int) -> None:
    """Take `count` slots, each one of the `near` oldest."""
    for number in range(min(count, len(model))):
        index = min(number % near, len(model) - 1)
        slot = model[index][0]
        model[index] = model[0]
        del model[0]
        assert waiting.take(index) == slot


@given(st.lists(st.tuples(st.integers(0, 3 * COMPACT_FROM), st.integers(0, 3 * COMPACT_FROM), st.integers(1, 4)), max_size=8))
def test_like_a_list(rounds: list[tuple[int, int, int]]) -> None:
    """Slots are taken near the old end, where the oldest takes the free place; over many slots memory is freed on the way."""
    waiting = FreeSlots()
    model: list[tuple[SlotId, Point]] = []
    serial = 0
    for pushed, taken, near in rounds:
        for _ in range(pushed):
            serial += 1
            waiting.push(SlotId(serial), Point(serial << 40 | 7))
            model.append((SlotId(serial), Point(serial << 40 | 7)))
        drain_some(waiting, model, taken, near)
        assert len(waiting) == len(model)
        assert [(waiting.slot(index), waiting.point(index)) for index in range(len(model))] == model
        waiting.check_invariants()
    waiting.clear()
    assert len(waiting) == 0
    waiting.check_invariants()


def test_what_waits_is_nothing_to_the_collector() -> None:
    """A thousand free slots are a few references to walk, to objects that have none themselves."""
    waiting = FreeSlots()
    for slot in range(1000):
        waiting.push(SlotId(slot), Point(slot + 1))
    found = [each for each in gc.get_referents(waiting) if not isinstance(each, type)]
    assert len(found) < 10
    assert not any(gc.is_tracked(each) and each is not waiting.__dict__ for each in found)
