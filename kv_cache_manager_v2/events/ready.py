"""Events that wait for a reader: published by a flush, taken by any thread."""

from __future__ import annotations

import threading
import time
from typing import Final

from kv_cache_manager_v2.device.waiters import LONGEST_SLEEP_S, Waiters
from kv_cache_manager_v2.events.records import KVCacheEvent


class ReadyEvents:
    """The events of all flushes that no reader has taken, oldest first."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self._lock: Final = threading.Lock()  # guards the list
        self._readers: Final = Waiters()
        self._events: list[KVCacheEvent] = []

    def publish(self, events: list[KVCacheEvent], capacity: int) -> None:
        """Add events and wake the readers. The oldest events beyond the capacity are dropped."""
        with self._lock:
            self._events.extend(events)
            self.drop_oldest(self._events, capacity)
            if self._events:
                self._readers.wake_all()

    def drop_oldest(self, events: list[KVCacheEvent], capacity: int) -> None:
        """Drop the oldest events of a list beyond the capacity, and count them."""
        excess = len(events) - capacity
        if excess > 0:
            del events[:excess]
            self.num_dropped += excess

    def take(self, timeout_s: float) -> list[KVCacheEvent]:
        """Take all events; wait for one if there is none. [] after the timeout without one."""
        end = time.monotonic() + timeout_s
        while True:
            with self._lock:
                left = end - time.monotonic()
                if self._events or left <= 0.0:
                    events = self._events
                    self._events = []
                    return events
                ticket = self._readers.enter()
            self._readers.sleep(ticket, min(left, LONGEST_SLEEP_S))
