"""Waits of the host for points, during which other threads use the timeline.

`Timeline.synchronize` needs the manager's lock, because events of complete points are reused. A wait here has a stream and an event
of its own: the stream waits for the points, and the event marks that it has.
"""

from __future__ import annotations

from threading import get_ident

from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.ids import Point, Stream


class HostWait:
    """A wait for some points."""

    def __init__(self, driver: Driver, stream: Stream, event: int) -> None:
        self._driver = driver
        self.stream = stream
        self.event = event
        self.thread = 0  # the thread that waits
        self.complete = False

    def block(self) -> None:
        """Block until the points are complete. Uses only the driver, so the caller needs no lock. Raises the device's errors."""
        self._driver.synchronize_event(self.event)
        self.complete = True


class HostWaits:
    """The waits of one timeline. All calls but `HostWait.block` need the manager's lock."""

    def __init__(self, driver: Driver, timeline: Timeline) -> None:
        self._driver = driver
        self._timeline = timeline
        self._streams: list[Stream] = []  # of all waits ever made
        self._events: list[int] = []
        self._idle: list[HostWait] = []
        self._begun: list[HostWait] = []

    def begin(self, points: list[Point]) -> HostWait:
        """Begin a wait for these points. `HostWait.block` and then `end` follow."""
        if not self._idle:
            if len(self._streams) == len(self._events):
                self._streams.append(self._timeline.create_stream())
            self._events.append(self._driver.create_event())
            self._idle.append(HostWait(self._driver, self._streams[-1], self._events[-1]))
        wait = self._idle[-1]
        for point in points:
            self._timeline.wait(wait.stream, point)
        self._driver.record_event(wait.event, wait.stream)
        wait.complete = False
        wait.thread = get_ident()
        self._begun.append(wait)
        self._idle.pop()
        return wait

    def end(self, wait: HostWait) -> None:
        """End a wait. If it was interrupted, its stream and event are not used again."""
        self._begun = [other for other in self._begun if other.thread != wait.thread]  # also one whose end was interrupted
        if wait.complete:
            self._idle.append(wait)

    def others_wait(self) -> bool:
        """Whether another thread is between `begin` and `end`."""
        for wait in self._begun:  # noqa: SIM110 (as a loop: any() would make a generator)
            if wait.thread != get_ident():
                return True
        return False

    def close(self) -> None:
        """Destroy the streams and events. Raises what the driver raises; another call then destroys the rest."""
        self._idle = []
        while self._events:
            self._driver.destroy_event(self._events[-1])
            self._events.pop()
        while self._streams:
            self._timeline.destroy_stream(self._streams[-1])
            self._streams.pop()
