"""A line: the points of one stream in order, each marked by an event of the driver.

A line can be reused by another stream once all its points are complete. Its numbers go on counting, so an old point stays complete.
The timeline decides which stream uses which line.
"""

from __future__ import annotations

from typing import Final

from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.errors import KVCacheError, LogicError
from kv_cache_manager_v2.ids import Stream

UNKNOWN: Final = 0  # identity of a stream that cannot be told from a later one with the same handle
NO_EVENT: Final = -1  # in place of an event: the device refused to mark this point, see `Timeline.record_or_wait`

_COMPACT_FROM: Final = 64  # completed events at the front of a list before it is shortened


class Line:
    """Points in one stream's order: events numbered `completed + 1` to `issued` are outstanding."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.stream = Stream(0)  # the driver's handle of the latest stream on this line
        self.identity = UNKNOWN  # positive: from the driver; negative: a stream of `Timeline.create_stream`
        self.completed = 0  # all records up to this number are known to be complete
        self.events: list[int] = []  # driver events; the outstanding ones are events[head:], in order
        self.head = 0
        self.waited: dict[int, int] = {}  # index of another line -> largest sequence number that this stream waits for

    @property
    def issued(self) -> int:
        """Sequence number of the latest record. Not stored: an interrupt could come between a new event and its count."""
        return self.completed + len(self.events) - self.head

    def outstanding(self) -> int:
        """Events that are not known to be complete."""
        return len(self.events) - self.head

    def event_of(self, number: int) -> int:
        """The event that marks an outstanding point."""
        return self.events[self.head + number - self.completed - 1]

    def check(self, number: int) -> None:
        """Raise LogicError unless the point was recorded."""
        if not 0 < number <= self.issued:
            raise LogicError(f"point {number} of stream {self.stream} was never recorded: the latest is {self.issued}")

    def poll(self, driver: Driver, free_events: list[int]) -> None:
        """Move the leading complete events to `free_events`."""
        events = self.events
        count = len(events)
        head = self._first_pending(driver)
        self.advance(head, free_events)
        if head == count:
            if head > 0:
                del events[:]  # no call, after which an interrupt could come
                self.head = 0
        elif head >= _COMPACT_FROM and 2 * head >= count:
            del events[:head]
            self.head = 0

    def advance(self, head: int, free_events: list[int]) -> None:
        """Record that the events before position `head` are complete."""
        first = self.head
        self.completed += head - first
        self.head = head
        for index in range(first, head):  # last: an interrupt here leaves events unused, but never in use twice
            event = self.events[index]
            if event != NO_EVENT:
                free_events.append(event)

    def _first_pending(self, driver: Driver) -> int:
        """Position of the first event that is not complete. Events complete in order, so a galloping search finds it.

        Queries the device once if no event is complete, else O(log(complete events)) times.
        """
        head = self.head
        pending = len(self.events)  # this one, and all after it, are not known to be complete
        step = 1
        while head < pending:
            asked = min(head + step, pending) - 1
            if _is_complete(driver, self.events[asked]):
                head = asked + 1
                step *= 2
            else:
                pending = asked
                step = max(1, step // 2)
        return head


def _is_complete(driver: Driver, event: int) -> bool:
    """Whether an event is known to be complete; False if the query fails.

    A failing device raises in the next record, wait or synchronisation instead: the caller here queues no work.
    """
    if event == NO_EVENT:
        return False
    try:
        return driver.query_event(event)
    except KVCacheError:
        return False
