"""Points in the order of streams: record one, wait for one, query whether it is complete.

A point is one int, (line << 40 | sequence number), and needs no owner. The timeline owns the driver's events and reuses each as
soon as it is known to be complete. A *line* holds points of one stream in order, so a point covers all smaller ones of its line.
Line 0 belongs to no stream. Its number 0 is NULL_POINT; each other number is a *join* of points on several lines. A join is
complete when all its points are; making one queues no work.

A handle does not identify a stream, because a device may reuse the handle of a destroyed one. A stream is known to be the same only
if the timeline created it, or if the driver identifies streams (`IdentifyingDriver`). Otherwise each point gets a line of its own,
and every wait goes to the device. Lines whose points are all complete are reused, so nothing is kept for a destroyed stream.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from typing import Final

from kv_cache_manager_v2.device.driver import Driver, IdentifyingDriver
from kv_cache_manager_v2.device.freeing import Freeing
from kv_cache_manager_v2.device.line import NO_EVENT, UNKNOWN, Line
from kv_cache_manager_v2.errors import KVCacheError, LogicError
from kv_cache_manager_v2.ids import NULL_POINT, Point, Stream

SEQUENCE_BITS: Final = 40  # a million records a second last 12 days on one line ...
_SEQUENCE_MASK: Final = (1 << SEQUENCE_BITS) - 1  # ... and point values stay below 2**62, mypyc's unboxed ints
_INDEX_LIMIT: Final = 1 << 22

_POLL_FROM: Final = 64  # outstanding events of a line from which a record also polls them, with log2 of that many queries
MOST_OUTSTANDING: Final = 1 << 16  # bound on events of a line, on lines and on joins: beyond it the host waits for the oldest
_KEEP_LINES: Final = 256  # lines in use before complete ones are searched for reuse
_LOOK_AT: Final = 2  # lines examined for reuse each time another line is needed


_log: Final = logging.getLogger(__name__)


class Timeline:
    """The points of all streams of one driver.

    `record`, `wait`, `done` and `merge` are O(1) amortised for points of streams, and O(streams in the join) for joins. To find n
    complete events they query the device O(log n) times. `merge` queries nothing and cannot fail.

    Any exception of a driver's call reaches the caller; it has then changed nothing here.
    """

    def __init__(self, driver: Driver, most_outstanding: int = MOST_OUTSTANDING) -> None:
        self._driver = driver
        self._identities: IdentifyingDriver | None = driver if isinstance(driver, IdentifyingDriver) else None
        self._most_outstanding = most_outstanding
        self._poll_from = min(_POLL_FROM, most_outstanding)
        self._lines: list[Line] = [Line(0)]  # by index; index 0 belongs to no stream
        self._by_stream: dict[int, Line] = {}  # by the driver's handle: the line of the latest known stream with it
        self._used: deque[Line] = deque()  # every other line, the least recently examined first
        self._unused: list[Line] = []  # lines without outstanding events and without a stream
        self._last_owned = 0  # identity of the latest stream of `create_stream`
        self._events: list[int] = []  # all that were created and not destroyed
        self._free_events: list[int] = []  # those that mark no point
        self._freeing = Freeing()  # of events
        self._freeing_streams = Freeing()
        self._joins: dict[int, list[Point]] = {}  # number -> points of different lines, not all known to be complete
        self._join_count = 0
        self._sweep_at = min(64, most_outstanding)  # number of joins at which complete ones are removed
        self._last_pair: tuple[Point, Point] = (NULL_POINT, NULL_POINT)  # the latest join's points, and the join:
        self._last_join: Point = NULL_POINT  # pages of a batch with the same two points share one join
        self._in_call = False
        self._identified: Line | None = None  # in a call: the line whose stream was identified last
        self._closed = False

    # --- calls

    def begin_call(self) -> None:
        """From here to `end_call`, no handle passes to another stream: the driver is asked once for the identity of a stream.

        A caller keeps the streams of a call alive until the call returns.
        """
        self._in_call = True
        self._identified = None

    def end_call(self) -> None:
        """End what `begin_call` began."""
        self._in_call = False
        self._identified = None

    # --- points

    def record(self, stream: Stream) -> Point:
        """A point after all work queued on the stream so far."""
        line = self._line_of(stream)
        if line is not None and len(line.events) - line.head >= self._poll_from:
            self._limit_outstanding(line)
        if len(self._joins) >= self._sweep_at:
            self._sweep()
        known = line is not None
        if line is None:
            line = self._unused_line()
        if not self._free_events:
            self._free_events.append(self._new_event())
        event = self._free_events[-1]
        self._driver.record_event(event, stream)
        self._free_events.pop()
        if not known:
            self._assign(line, stream, self._identity(stream))
        line.events.append(event)
        return Point((line.index << SEQUENCE_BITS) | line.issued)

    def record_or_wait(self, stream: Stream) -> Point:
        """As `record`, for a caller that must not fail, such as the release of a reservation. Never raises.

        If the stream's event cannot be recorded, the host waits for the whole device. If that fails too, the point completes once
        a later record on the stream or a later wait for the device succeeds.
        """
        try:
            return self.record(stream)
        except BaseException as error:  # of any class: the caller already has an error to raise
            refused = f"{type(error).__name__}: {error}"  # not the exception: its frames would keep the caller's cache alive
        try:
            self._driver.synchronize()
        except BaseException as error:
            _log.warning("no event can be recorded on stream %s (%s), nor the device waited for (%s)", stream, refused, error)
            return self._unmarked_point(stream)
        return NULL_POINT

    def wait(self, stream: Stream, point: Point) -> None:
        """Make work queued on the stream from now on run after the point.

        Queues nothing if the point is complete, lies on the same stream, or is before one that the stream already waits for.
        """
        if point == NULL_POINT:
            return
        if point >> SEQUENCE_BITS != 0:
            self._wait_line(stream, point)
            return
        if not self.done(point):
            for part in self._joins[point].copy():
                self._wait_line(stream, part)

    def done(self, point: Point) -> bool:
        """Whether the point is complete; once True, always True. Never blocks."""
        if point == NULL_POINT:
            return True
        index = point >> SEQUENCE_BITS
        number = point & _SEQUENCE_MASK
        if index == 0:
            return self._join_done(number)
        line = self._line(index)
        if number <= line.completed:
            return True
        line.check(number)
        self._poll(line)
        return number <= line.completed

    def merge(self, first: Point, second: Point) -> Point:
        """A point that is complete once both are; the other one if one of them is known to be complete."""
        if (
            first >> SEQUENCE_BITS == second >> SEQUENCE_BITS and first >> SEQUENCE_BITS != 0
        ):  # on one line the later one covers both
            later = first if first > second else second
            return NULL_POINT if self._known_complete(later) else later
        if first == second or self._known_complete(second):
            return NULL_POINT if self._known_complete(first) else first
        if self._known_complete(first):
            return second
        if self._last_pair == (first, second):
            return self._last_join  # its points are not known to be complete
        return self._join(first, second)

    def synchronize(self, point: Point) -> None:
        """Block the host until the point is complete."""
        if self.done(point):
            return
        if point >> SEQUENCE_BITS != 0:
            self._synchronize_line(point)
            return
        for part in self._joins[point].copy():
            self._synchronize_line(part)

    # --- streams

    def create_stream(self) -> Stream:
        """Create a stream of the driver. The timeline knows that its handle is not reused before `destroy_stream`."""
        line = self._unused_line()
        stream = self._driver.create_stream()
        self._last_owned -= 1
        self._assign(line, stream, self._last_owned)
        return stream

    def destroy_stream(self, stream: Stream) -> None:
        """Destroy a stream of `create_stream`. Work already queued still runs, and its points stay valid.

        After an interrupt it can be called again.
        """
        self._freeing_streams.free(stream, partial(self._driver.destroy_stream, stream))
        self.forget(stream)

    def forget(self, stream: Stream) -> None:
        """Record that the stream was destroyed, so that its handle may be reused. Its points stay valid."""
        line = self._by_stream.pop(stream, None)
        if line is not None:
            line.identity = UNKNOWN
            line.waited = {}

    def close(self) -> None:
        """Destroy all events; no point may be used afterwards.

        If the driver refuses some of them, the others are destroyed and the first error is raised. Another call tries the rest.
        """
        self._closed = True
        self._free_events = []
        self._by_stream = {}
        self._joins = {}
        for line in self._lines:
            line.completed = line.issued
            line.events = []
            line.head = 0
        refusal: Exception | None = None
        kept = 0
        while len(self._events) > kept:
            event = self._events[kept]
            try:
                self._freeing.free(event, partial(self._driver.destroy_event, event))
            except Exception as error:
                refusal = error if refusal is None else refusal
                kept += 1
                continue
            del self._events[kept]
            self._freeing.done(event)
        if refusal is not None:
            raise refusal

    @property
    def events_outstanding(self) -> int:
        """Events of points that are not known to be complete."""
        total = 0
        for line in self._lines:
            total += line.outstanding()
        return total

    @property
    def joins_outstanding(self) -> int:
        return len(self._joins)

    @property
    def lines_made(self) -> int:
        """Lines ever made. Bounded by the most points outstanding at one time, not by the number of streams."""
        return len(self._lines) - 1

    # --- the line of a stream

    def _identity(self, stream: Stream) -> int:
        identities = self._identities
        return UNKNOWN if identities is None else identities.stream_identity(stream)

    def _line_of(self, stream: Stream) -> Line | None:
        """The line of the present stream with this handle; None if it has no line yet or cannot be identified."""
        line = self._by_stream.get(stream)
        if line is None or line.identity < 0 or line is self._identified:
            return line
        identities = self._identities
        if identities is None or identities.stream_identity(stream) != line.identity:
            return None
        if self._in_call:
            self._identified = line
        return line

    def _assign(self, line: Line, stream: Stream, identity: int) -> None:
        """Give the last line of `_unused` to a stream."""
        del self._unused[-1]  # no call, after which an interrupt could come
        self._used.append(line)
        line.stream = stream
        line.identity = identity
        if identity != UNKNOWN:
            self._by_stream[stream] = line

    def _unused_line(self) -> Line:
        """A line without outstanding events, the last of `_unused`. Reuses a complete line before making a new one."""
        if not self._unused and len(self._used) >= _KEEP_LINES:
            self._look_for_unused()
        if not self._unused:
            index = len(self._lines)
            if index >= _INDEX_LIMIT:
                raise LogicError(f"more than {_INDEX_LIMIT} streams have outstanding work at one time")
            line = Line(index)
            self._lines.append(line)
            self._unused.append(line)
        return self._unused[-1]

    def _look_for_unused(self) -> None:
        """Examine the least recently examined lines, and move those whose points are all complete to `_unused`."""
        for _i in range(_LOOK_AT):
            line = self._used[0]
            self._poll(line)
            current = self._by_stream.get(line.stream) is line
            if line.outstanding() == 0 and not (current and line.identity < 0):
                if current:
                    del self._by_stream[line.stream]
                line.identity = UNKNOWN
                line.waited = {}
                self._unused.append(self._used.popleft())
            else:
                self._used.rotate(-1)
        if not self._unused and len(self._used) >= self._most_outstanding:
            line = self._used[0]
            if line.outstanding() > 0:
                self._synchronize_event(line, line.events[-1])

    # --- lines

    def _new_event(self) -> int:
        if self._closed:
            raise LogicError("the timeline is closed: no point can be recorded")
        event = self._driver.create_event()
        self._events.append(event)
        return event

    def _line(self, index: int) -> Line:
        if not 0 < index < len(self._lines):
            raise LogicError(f"a point names line {index}, which does not exist: it is a point of another timeline")
        return self._lines[index]

    def _poll(self, line: Line) -> None:
        """Find the leading events that are complete, and free them for reuse."""
        if line.head < len(line.events) and line.events[line.head] == NO_EVENT:
            self._mark_late(line)
        line.poll(self._driver, self._free_events)

    def _limit_outstanding(self, line: Line) -> None:
        self._poll(line)
        if line.outstanding() >= self._most_outstanding:
            self._synchronize_event(line, line.events[line.head])

    def _wait_line(self, stream: Stream, point: Point) -> None:
        index = point >> SEQUENCE_BITS
        number = point & _SEQUENCE_MASK
        line = self._line(index)
        if number <= line.completed:
            return
        line.check(number)
        waiter = self._line_of(stream)
        if waiter is not None and (waiter is line or waiter.waited.get(index, 0) >= number):
            return
        self._poll(line)
        if number <= line.completed:
            return
        event = line.event_of(number)
        if event == NO_EVENT:  # a stream cannot wait for a point without an event, so the host does
            self._synchronize_event(line, event)
            return
        identity = UNKNOWN if waiter is not None else self._identity(stream)
        unused = self._unused_line() if identity != UNKNOWN else None
        self._driver.wait_event(stream, event)
        if unused is not None:
            self._assign(unused, stream, identity)
            waiter = unused
        if waiter is not None:
            waiter.waited[index] = number

    def _synchronize_line(self, point: Point) -> None:
        line = self._line(point >> SEQUENCE_BITS)
        number = point & _SEQUENCE_MASK
        if number > line.completed:
            self._synchronize_event(line, line.event_of(number))
            if number > line.completed:
                raise LogicError(f"point {number} of stream {line.stream} is incomplete although the driver waited for its event")

    def _synchronize_event(self, line: Line, event: int) -> None:
        """Block the host until an event of the line is complete."""
        if event == NO_EVENT:
            self._driver.synchronize()
            line.advance(len(line.events), self._free_events)
        else:
            self._driver.synchronize_event(event)
            line.advance(line.events.index(event, line.head) + 1, self._free_events)  # also where the device refuses to say so
        self._poll(line)

    # --- points without an event

    def _unmarked_point(self, stream: Stream) -> Point:
        """A point without an event, on a line of its own."""
        known = self._line_of(stream)
        line = Line(len(self._lines))
        line.stream = stream
        line.identity = known.identity if known is not None else self._identity(stream)
        line.events.append(NO_EVENT)
        self._lines.append(line)
        self._used.append(line)
        return Point((line.index << SEQUENCE_BITS) | line.issued)

    def _mark_late(self, line: Line) -> None:
        """Try to record an event for a point that has none. Only for a stream known to be the same: then later is safe."""
        known = self._line_of(line.stream)
        identity = known.identity if known is not None else self._identity(line.stream)
        if self._closed or identity == UNKNOWN or identity != line.identity:
            return
        try:
            if not self._free_events:
                self._free_events.append(self._new_event())
            self._driver.record_event(self._free_events[-1], line.stream)
        except KVCacheError:
            return
        line.events[line.head] = self._free_events.pop()

    # --- joins

    def _known_complete(self, point: Point) -> bool:
        """Whether the point is known to be complete, without a query to the device."""
        index = point >> SEQUENCE_BITS
        number = point & _SEQUENCE_MASK
        if index != 0:
            line = self._line(index)
            line.check(number)
            return number <= line.completed
        if number == 0:
            return True
        return all(self._known_complete(part) for part in self._parts(number))

    def _parts(self, number: int) -> list[Point]:
        """The points of a join; none if it is known to be complete."""
        if number > self._join_count:
            raise LogicError(f"join {number} was never made: the latest is {self._join_count}")
        return self._joins.get(number, [])

    def _join_done(self, number: int) -> bool:
        parts = self._parts(number)
        while parts:
            if not self.done(parts[-1]):
                return False
            parts.pop()
        self._joins.pop(number, parts)
        return True

    def _join(self, first: Point, second: Point) -> Point:
        clock: dict[int, Point] = {}
        for point in (first, second):
            for part in [point] if point >> SEQUENCE_BITS else self._parts(point):
                index = part >> SEQUENCE_BITS
                if part > clock.get(index, 0) and not self._known_complete(part):
                    clock[index] = part
        self._join_count += 1
        join = Point(self._join_count)
        self._joins[join] = list(clock.values())
        self._last_pair = (first, second)
        self._last_join = join
        return join

    def _sweep(self) -> None:
        """Remove complete joins. The next sweep follows after as many new ones, so each join costs O(1) amortised."""
        for number in list(self._joins):
            self._join_done(number)
        if len(self._joins) >= self._most_outstanding:
            self.synchronize(Point(next(iter(self._joins))))
        self._sweep_at = min(self._most_outstanding, max(64, 2 * len(self._joins)))

    # --- checks

    def check_invariants(self) -> None:
        seen: set[int] = set(self._free_events)
        assert len(seen) == len(self._free_events), "an event is twice among the free ones"
        for i in range(len(self._lines)):
            line = self._lines[i]
            assert line.index == i
            assert 0 <= line.head <= len(line.events)
            assert line.completed + line.outstanding() == line.issued, (i, line.completed, line.issued)
            for event in line.events[line.head :]:
                assert event == NO_EVENT or event not in seen, f"event {event} marks two points, or is also free"
                seen.add(event)
            for index, number in line.waited.items():
                assert 0 < number <= self._lines[index].issued
        for stream, line in self._by_stream.items():
            assert line.stream == stream
            assert line.identity != UNKNOWN
            assert self._lines[line.index] is line
        indices = {line.index for line in self._used} | {line.index for line in self._unused}
        assert len(indices) == len(self._used) + len(self._unused), "a line is listed twice"
        for line in self._lines[1:]:  # an interrupt may have come while a line was in neither list: then it is not used again
            assert line.index in indices or line.outstanding() == 0, "a line with outstanding events is not listed"
        for line in self._unused:
            assert line.outstanding() == 0
            assert self._by_stream.get(line.stream) is not line
        for number, parts in self._joins.items():
            assert 0 < number <= self._join_count
            assert len({part >> SEQUENCE_BITS for part in parts}) == len(parts), "a join has two points of one line"
            assert all(part >> SEQUENCE_BITS for part in parts), "a join of joins"
