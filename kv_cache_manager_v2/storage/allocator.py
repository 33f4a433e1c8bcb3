"""Allocates the slots of one pool group on one level.

A free slot has the point at which its last use ends, and its next user waits for that point before it writes. Slots are allocated
in this order: those whose point is complete, those never used, those still in use.

Ids from 0 to issued - 1 were allocated at some time. Each of them is taken, ready, pending or, while shrinking, set aside. Data by
slot is in packed arrays, which the cyclic collector need not traverse.
"""

from __future__ import annotations

from typing import Final

from librt.vecs import append, pop, vec
from mypy_extensions import i64

from kv_cache_manager_v2.device.timeline import SEQUENCE_BITS, Timeline
from kv_cache_manager_v2.errors import LogicError, OutOfPagesError
from kv_cache_manager_v2.ids import NULL_POINT, Point, SlotId
from kv_cache_manager_v2.storage.free_slots import FreeSlots

PROBED_PENDING: Final = 4  # pending slots examined per allocation: bounds the cost, and skips slow streams


class SlotAllocator:
    """Allocates slot ids. All operations but those of a shrink are O(1)."""

    def __init__(self, timeline: Timeline, capacity: int) -> None:
        self._timeline = timeline
        self.capacity = capacity  # slots that have memory
        self.free = capacity  # slots that `allocate` can return
        self.issued = 0  # ids from 0 on that were ever allocated
        self._taken: vec[bool] = vec[bool]()  # by slot id below `issued`
        self._target = capacity  # bound of the ids to allocate; below `capacity` only while shrinking
        self._ready: vec[i64] = vec[i64]()  # free, with a complete point; a stack, so that low ids are reused
        self._pending = FreeSlots()  # free, with a point that may be incomplete
        self._aside = FreeSlots()  # free ids at or above the target of a pending shrink
        self._lost: set[int] = set()  # taken ids at or above `capacity`, without memory; removed when released

    def allocate(self) -> tuple[SlotId, Point]:
        """A slot, and the point that its user must wait for. Raises OutOfPagesError if no slot is free."""
        if self.free <= 0:
            raise OutOfPagesError(f"none of {self._target} slots is free; evict pages first")
        index = -1
        if len(self._ready) == 0 and len(self._pending) > 0:
            index = self._first_done()  # may raise, as it queries the device: so before anything changes
        if len(self._ready) > 0:
            self._ready, ready = pop(self._ready)
            self._taken[ready] = True
            self.free -= 1
            return SlotId(ready), NULL_POINT
        if index >= 0:
            slot = self._pending.take(index)
            self._taken[slot] = True
            self.free -= 1
            return slot, NULL_POINT
        if self.issued < self._target:
            slot = SlotId(self.issued)
            self._taken = append(self._taken, True)  # first: there may be no memory for it
            self.issued += 1
            self.free -= 1
            return slot, NULL_POINT
        point = self._pending.point(0)
        slot = self._pending.take(0)
        self._taken[slot] = True
        self.free -= 1
        return slot, point

    def release(self, slot: SlotId, point: Point) -> None:
        """Free a slot whose last use ends at `point`. Raises LogicError if the slot is not taken."""
        if not self.taken(slot):
            raise LogicError(f"slot {slot} is not taken ({self.issued} ids issued): it was released twice or never allocated")
        if slot >= self.issued:
            self._lost.discard(slot)
            return
        if slot >= self._target:  # first what there may be no memory for
            self._aside.push(slot, point)
            self._taken[slot] = False
            return
        if point == NULL_POINT:
            self._ready = append(self._ready, slot)
        else:
            self._pending.push(slot, point)
        self._taken[slot] = False
        self.free += 1

    def taken(self, slot: SlotId) -> bool:
        """Whether the slot was allocated and not released since."""
        if 0 <= slot < self.issued:
            return self._taken[slot]
        return slot in self._lost

    def _first_done(self) -> int:
        """Position of a pending slot with a complete point, among the first few; -1 if there is none."""
        pending = self._pending
        asked = -1  # line of an incomplete point: later points of it are incomplete too
        for index in range(min(len(pending), PROBED_PENDING)):
            point = pending.point(index)
            if point >> SEQUENCE_BITS == asked:
                continue
            if self._timeline.done(point):
                return index
            if point >> SEQUENCE_BITS > 0:
                asked = point >> SEQUENCE_BITS
        return -1

    # --- resizing

    def expand(self, capacity: int) -> None:
        """Raise the capacity, after the arenas have grown. Raises LogicError during a shrink."""
        if self.shrinking() or capacity < self.capacity:
            raise LogicError(f"cannot expand {self.capacity} slots to {capacity} (shrinking: {self.shrinking()})")
        for slot in sorted(self._lost):
            if slot < capacity:  # the slot has memory again
                while self.issued < slot:
                    self._ready = append(self._ready, self.issued)
                    self._taken = append(self._taken, False)
                    self.issued += 1
                self._taken = append(self._taken, True)
                self.issued += 1
                self._lost.discard(slot)
        self.capacity = capacity
        self._target = capacity
        self.free = self._num_recycled() + capacity - self.issued

    def lose_from(self, capacity: int) -> None:
        """Lower the capacity to the slots that still have memory. Taken slots above it are removed when they are released."""
        if self.shrinking():
            self.abort_shrink()
        if capacity >= self.capacity:
            return
        self.prepare_shrink(capacity)
        for slot in range(capacity, self.issued):
            if self._taken[slot]:
                self._lost.add(slot)
        self._aside.clear()
        self.issued = min(self.issued, capacity)
        self._taken = self._taken[: self.issued]
        self.capacity = capacity

    def shrinking(self) -> bool:
        return self._target != self.capacity

    def prepare_shrink(self, capacity: int) -> None:
        """Stop allocating ids at or above `capacity`, and set aside the free ones. O(free slots)."""
        if self.shrinking() or not 0 <= capacity <= self.capacity:
            raise LogicError(f"cannot shrink {self.capacity} slots to {capacity} (shrinking: {self.shrinking()})")
        self._target = capacity
        ready = self._ready
        self._ready = vec[i64]()
        for index in range(len(ready)):
            if ready[index] < capacity:
                self._ready = append(self._ready, ready[index])
            else:
                self._aside.push(SlotId(ready[index]), NULL_POINT)
        pending = self._pending
        self._pending = FreeSlots()
        for index in range(len(pending)):
            slot = pending.slot(index)
            waiting = self._pending if slot < capacity else self._aside
            waiting.push(slot, pending.point(index))
        self.free = self._num_recycled() + max(capacity - self.issued, 0)

    def abort_shrink(self) -> None:
        """Allocate ids up to the capacity again."""
        for index in range(len(self._aside)):
            self._pending.push(self._aside.slot(index), self._aside.point(index))
        self._aside.clear()
        self._target = self.capacity
        self.free = self._num_recycled() + self.capacity - self.issued

    def finish_shrink(self) -> None:
        """Remove the ids at or above the target. Raises LogicError if one is taken."""
        cut = max(0, self.issued - self._target)
        if len(self._aside) != cut:
            raise LogicError(f"{cut - len(self._aside)} slots at or above {self._target} are still taken; move their pages first")
        self._aside.clear()
        self.issued = min(self.issued, self._target)
        self._taken = self._taken[: self.issued]
        self.capacity = self._target

    def uses_aside(self) -> list[Point]:
        """Ends of the last uses of free ids at or above the target that are not complete. O(free slots)."""
        return self._incomplete(self._aside)

    def uses(self) -> list[Point]:
        """As `uses_aside`, of all free ids."""
        return self._incomplete(self._pending) + self._incomplete(self._aside)

    def _incomplete(self, slots: FreeSlots) -> list[Point]:
        found: list[Point] = []
        last = NULL_POINT
        for index in range(len(slots)):
            point = slots.point(index)
            if point != last and not self._timeline.done(point):
                found.append(point)
            last = point
        return found

    # --- checks

    def num_taken(self) -> int:
        """The number of taken slots. O(1)."""
        return self.issued - self._num_recycled() - len(self._aside) + len(self._lost)

    def _num_recycled(self) -> int:
        return len(self._ready) + len(self._pending)

    def check_invariants(self) -> None:
        """Assert that every id has exactly one state, and that `free` is right. O(ids)."""
        assert len(self._taken) == self.issued, f"{len(self._taken)} states for {self.issued} ids"
        assert self.issued <= self.capacity, f"{self.issued} ids issued of {self.capacity} slots"
        self._pending.check_invariants()
        self._aside.check_invariants()
        ready = [SlotId(self._ready[index]) for index in range(len(self._ready))]
        pending = [self._pending.slot(index) for index in range(len(self._pending))]
        aside = [self._aside.slot(index) for index in range(len(self._aside))]
        seen = bytearray(self.issued)
        for slot in ready + pending + aside:
            assert seen[slot] == 0, f"slot {slot} is free twice"
            assert not self._taken[slot], f"slot {slot} is free and taken"
            seen[slot] = 1
        taken = sum([1 for slot in range(self.issued) if self._taken[slot]])
        assert taken + len(ready) + len(pending) + len(aside) == self.issued, "a slot id has no state"
        assert self.free == self._num_recycled() + max(self._target - self.issued, 0), f"free count {self.free} is wrong"
        for slot in ready + pending:
            assert slot < self._target, f"slot {slot} is above the target of a shrink, but not set aside"
        for slot in aside:
            assert slot >= self._target, f"slot {slot} is below the target of a shrink, but set aside"
        for number in self._lost:
            assert number >= self.capacity, f"slot {number} has memory, but counts as lost"
