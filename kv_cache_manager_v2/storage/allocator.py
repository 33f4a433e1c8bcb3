"""Slots of one pool group on one level: which are free, which are taken, and when a free one may be touched.

Rule: a free slot carries the point at which its last user is done; whoever takes it waits for that point before writing. A slot
whose point has passed is preferred to one never used, and one never used to one still busy.

Issued ids are 0 .. issued-1. Each of them is taken, ready, pending, or (while shrinking) set aside.
"""

from __future__ import annotations

from typing import Final

from kv_cache_manager_v2.device.timeline import SEQUENCE_BITS, Timeline
from kv_cache_manager_v2.errors import LogicError, OutOfPagesError
from kv_cache_manager_v2.ids import NO_SLOT, NULL_POINT, Point, SlotId
from kv_cache_manager_v2.storage.page import Page

PROBED_PENDING: Final = 4  # pending slots asked for readiness per allocation: bounds the cost, and one slow user blocks nobody


class SlotAllocator:
    """Hands out slot ids; every operation is O(1) but for those of shrinking."""

    def __init__(self, timeline: Timeline, capacity: int) -> None:
        self._timeline = timeline
        self.capacity = capacity  # slots that the arenas behind can hold
        self.free = capacity  # slots that `allocate` can hand out now
        self.issued = 0  # ids ever issued: the high-water mark
        self.pages: list[Page | None] = []  # by slot id below `issued`: who has it; None if free or set aside
        self._target = capacity  # no id at or above it is issued; below `capacity` only while shrinking
        self._ready: list[SlotId] = []  # free, last user known to be done; a stack, so that low ids are reused
        self._pending_slots: list[SlotId] = []  # free, last user perhaps still running, in order of release ...
        self._pending_points: list[Point] = []  # ... and when it is done
        self._pending_beg = 0  # first valid position of the two lists
        self._aside_slots: list[SlotId] = []  # free ids at or above the target of a pending shrink
        self._aside_points: list[Point] = []
        self._unbound = Page(-1, -1, -1, NO_SLOT, 0, NULL_POINT)  # stands for the owner until `bind`

    def allocate(self) -> tuple[SlotId, Point]:
        """A slot and the point that its new owner must wait for before touching it. Raises OutOfPagesError if none is free."""
        if self.free <= 0:
            raise OutOfPagesError(f"none of {self._target} slots is free; make room before allocating")
        self.free -= 1
        if self._ready:
            slot = self._ready.pop()
            self.pages[slot] = self._unbound
            return slot, NULL_POINT
        pending = len(self._pending_slots) - self._pending_beg
        if pending > 0:
            index = self._first_done()
            if index >= 0:
                slot, _point = self._take_pending(index)
                return slot, NULL_POINT
        if self.issued < self._target:
            slot = SlotId(self.issued)
            self.issued += 1
            self.pages.append(self._unbound)
            return slot, NULL_POINT
        return self._take_pending(self._pending_beg)

    def bind(self, slot: SlotId, page: Page) -> None:
        """Note the page that lives in an allocated slot."""
        assert self.pages[slot] is not None, "a page was bound to a free slot"
        self.pages[slot] = page

    def release(self, slot: SlotId, point: Point) -> None:
        """Take a slot back; `point` is the end of its last use. Raises LogicError if the slot is not taken."""
        if not 0 <= slot < self.issued or self.pages[slot] is None:
            raise LogicError(f"slot {slot} is not taken ({self.issued} ids issued): it was released twice or never allocated")
        self.pages[slot] = None
        if slot >= self._target:
            self._aside_slots.append(slot)
            self._aside_points.append(point)
            return
        self.free += 1
        if point == NULL_POINT:
            self._ready.append(slot)
        else:
            self._pending_slots.append(slot)
            self._pending_points.append(point)

    def _first_done(self) -> int:
        """Position of a pending slot whose last user is done, among the first few; -1 if there is none."""
        beg = self._pending_beg
        end = min(len(self._pending_slots), beg + PROBED_PENDING)
        asked = -1  # the stream just found busy: its later points are not over either
        for index in range(beg, end):
            point = self._pending_points[index]
            if point >> SEQUENCE_BITS == asked:
                continue
            if self._timeline.done(point):
                return index
            if point >> SEQUENCE_BITS > 0:
                asked = point >> SEQUENCE_BITS
        return -1

    def _take_pending(self, index: int) -> tuple[SlotId, Point]:
        beg = self._pending_beg
        slot = self._pending_slots[index]
        point = self._pending_points[index]
        if index != beg:
            self._pending_slots[index] = self._pending_slots[beg]
            self._pending_points[index] = self._pending_points[beg]
        beg += 1
        if beg == len(self._pending_slots):
            self._pending_slots.clear()
            self._pending_points.clear()
            beg = 0
        elif beg >= 256 and beg * 2 > len(self._pending_slots):
            del self._pending_slots[:beg]
            del self._pending_points[:beg]
            beg = 0
        self._pending_beg = beg
        self.pages[slot] = self._unbound
        return slot, point

    # --- resizing

    def expand(self, capacity: int) -> None:
        """More slots; the arenas have grown already. Raises LogicError during a shrink."""
        if self.shrinking() or capacity < self.capacity:
            raise LogicError(f"cannot expand {self.capacity} slots to {capacity} (shrinking: {self.shrinking()})")
        self.free += capacity - self.capacity
        self.capacity = capacity
        self._target = capacity

    def shrinking(self) -> bool:
        return self._target != self.capacity

    def prepare_shrink(self, capacity: int) -> None:
        """From now on issue no id at or above `capacity`; free ones above are set aside. O(free slots)."""
        if self.shrinking() or not 0 <= capacity <= self.capacity:
            raise LogicError(f"cannot shrink {self.capacity} slots to {capacity} (shrinking: {self.shrinking()})")
        self._target = capacity
        ready = self._ready
        self._ready = []
        for slot in ready:
            if slot < capacity:
                self._ready.append(slot)
            else:
                self._aside_slots.append(slot)
                self._aside_points.append(NULL_POINT)
        slots = self._pending_slots[self._pending_beg :]
        points = self._pending_points[self._pending_beg :]
        self._pending_slots = []
        self._pending_points = []
        self._pending_beg = 0
        for index in range(len(slots)):
            if slots[index] < capacity:
                self._pending_slots.append(slots[index])
                self._pending_points.append(points[index])
            else:
                self._aside_slots.append(slots[index])
                self._aside_points.append(points[index])
        self.free = len(self._ready) + len(self._pending_slots) + max(capacity - self.issued, 0)

    def blocking(self) -> list[Page]:
        """Pages whose slots a pending shrink would cut off, by slot id. O(slots cut off)."""
        found: list[Page] = []
        for slot in range(self._target, self.issued):
            page = self.pages[slot]
            if page is not None:
                found.append(page)
        return found

    def abort_shrink(self) -> None:
        """Undo `prepare_shrink`."""
        self._pending_slots.extend(self._aside_slots)
        self._pending_points.extend(self._aside_points)
        self._aside_slots.clear()
        self._aside_points.clear()
        self._target = self.capacity
        self.free = self._num_recycled() + self.capacity - self.issued

    def finish_shrink(self) -> None:
        """Forget the ids above the target; the host waits for their last users. Raises LogicError if one is still taken."""
        cut = max(0, self.issued - self._target)
        if len(self._aside_slots) != cut:
            raise LogicError(
                f"{cut - len(self._aside_slots)} slots at or above {self._target} are still taken; move their pages first"
            )
        last = NULL_POINT
        for point in self._aside_points:
            if point != last:
                self._timeline.synchronize(point)
                last = point
        self._aside_slots.clear()
        self._aside_points.clear()
        self.issued = min(self.issued, self._target)
        del self.pages[self.issued :]
        self.capacity = self._target

    def synchronize(self) -> None:
        """Block the host until the last user of every free slot is done. O(free slots)."""
        last = NULL_POINT
        for index in range(self._pending_beg, len(self._pending_points)):
            point = self._pending_points[index]
            if point != last:
                self._timeline.synchronize(point)
                last = point

    # --- checks

    def num_taken(self) -> int:
        """Slots that somebody has, by subtraction. O(1)."""
        return self.issued - self._num_recycled() - len(self._aside_slots)

    def _num_recycled(self) -> int:
        return len(self._ready) + len(self._pending_slots) - self._pending_beg

    def check_invariants(self) -> None:
        """Every issued id is in exactly one place, and `free` counts what can be handed out. O(issued)."""
        assert len(self.pages) == self.issued, f"{len(self.pages)} owners for {self.issued} issued ids"
        assert self.issued <= self.capacity, f"{self.issued} ids issued of {self.capacity} slots"
        seen = bytearray(self.issued)
        pending = self._pending_slots[self._pending_beg :]
        for slot in self._ready + pending + self._aside_slots:
            assert seen[slot] == 0, f"slot {slot} is free twice"
            assert self.pages[slot] is None, f"slot {slot} is free and taken"
            seen[slot] = 1
        taken = 0
        for page in self.pages:
            if page is not None:
                taken += 1
        assert taken + len(self._ready) + len(pending) + len(self._aside_slots) == self.issued, "a slot id is nowhere"
        assert self.free == self._num_recycled() + max(self._target - self.issued, 0), f"free count {self.free} is wrong"
        for slot in self._ready + pending:
            assert slot < self._target, f"slot {slot} may not be issued any more"
        for slot in self._aside_slots:
            assert slot >= self._target, f"slot {slot} was set aside for nothing"
        assert len(self._pending_slots) == len(self._pending_points), "a pending slot without its point"
        assert len(self._aside_slots) == len(self._aside_points), "a slot set aside without its point"
