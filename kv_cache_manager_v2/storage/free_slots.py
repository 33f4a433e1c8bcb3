"""Free slots in the order of their release, each with the end of its last use.

They are in packed arrays. A list of numbers would be traversed by every full garbage collection, in the middle of a serving step.
"""

from __future__ import annotations

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i64

from kv_cache_manager_v2.ids import Point, SlotId

COMPACT_FROM: Final = 256  # unused entries at the front before the rest is moved: at most one move per slot, on average


class FreeSlots:
    """A queue from which slots near its front are taken. Operations are O(1) amortised. Positions count from the oldest slot."""

    def __init__(self) -> None:
        self._slots: vec[i64] = vec[i64]()
        self._points: vec[i64] = vec[i64]()  # by position in `_slots`
        self._beg = 0  # the valid part of both
        self._end = 0

    def __len__(self) -> int:
        return self._end - self._beg

    def push(self, slot: SlotId, point: Point) -> None:
        """Append a slot whose last use ends at `point`."""
        end = self._end
        if end < len(self._slots):
            self._slots[end] = slot
            self._points[end] = point
        else:
            slots = append(self._slots, slot)
            self._points = append(self._points, point)
            self._slots = slots
        self._end = end + 1

    def slot(self, index: int) -> SlotId:
        return SlotId(self._slots[self._beg + index])

    def point(self, index: int) -> Point:
        return Point(self._points[self._beg + index])

    def take(self, index: int) -> SlotId:
        """Remove a slot; the oldest one gets its position."""
        beg = self._beg
        slot = SlotId(self._slots[beg + index])
        if index > 0:
            self._slots[beg + index] = self._slots[beg]
            self._points[beg + index] = self._points[beg]
        beg += 1
        if beg == self._end:
            if beg >= COMPACT_FROM:
                self.clear()
                return slot
            beg = 0
            self._end = 0
        elif beg >= COMPACT_FROM and beg * 2 > self._end:
            self._slots = self._slots[beg : self._end]
            self._points = self._points[beg : self._end]
            self._end -= beg
            beg = 0
        self._beg = beg
        return slot

    def clear(self) -> None:
        """Remove all slots."""
        self._slots = vec[i64]()
        self._points = vec[i64]()
        self._beg = 0
        self._end = 0

    def check_invariants(self) -> None:
        assert len(self._slots) == len(self._points), "a slot without its point"
        assert 0 <= self._beg <= self._end <= len(self._slots), f"slots {self._beg} to {self._end} of {len(self._slots)} wait"
        assert self._beg == 0 or self._beg < self._end, "an empty queue has unused entries"
