"""Events that wait for a reader: published by a flush, taken by any thread."""

from __future__ import annotations

import threading
import time
from typing import Final

from kv_cache_manager_v2.events.records import KVCacheEvent

_LONGEST_WAIT_S: Final = 3600.0  # a condition variable needs a finite timeout; readers wait again after it


class ReadyEvents:
    """The events of all flushes that no reader has taken, oldest first."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self._readers: Final = threading.Condition()  # guards the list
        self._events: list[KVCacheEvent] = []

    def publish(self, events: list[KVCacheEvent], capacity: int) -> None:
        """Add events and wake the readers. The oldest events beyond the capacity are dropped."""
        with self._readers:
            self._events.extend(events)
            self.drop_oldest(self._events, capacity)
            if self._events:
                self._readers.notify_all()

    def drop_oldest(self, events: list[KVCacheEvent], capacity: int) -> None:
        """Drop the oldest events of a list beyond the capacity, and count them."""
        excess = len(events) - capacity
        if excess > 0:
            del events[:excess]
            self.num_dropped += excess

    def take(self, timeout_s: float) -> list[KVCacheEvent]:
        """Take all events; wait for one if there is none. [] after the timeout without one."""
        with self._readers:
            left = timeout_s
            end = time.monotonic() + left
            while not self._events and left > 0.0:
                self._readers.wait(min(left, _LONGEST_WAIT_S))
                left = end - time.monotonic()
            events = self._events
            self._events = []
            return events
