"""Points in the order of streams: record one, wait for one, ask whether it is over.

Rule: a point is one int, (line << 40 | sequence number), and needs no owner: the timeline alone owns the driver's events
and reuses each as soon as it is known to be complete. A *line* is a row of points in the order of one stream, so that the larger
covers the smaller. Line 0 is no stream: NULL_POINT is 0, and its other numbers are *joins*, each of which names one point of each
of several lines; a join is over when all of them are, queues nothing and delays no stream.

A handle is no identity: a device may give the handle of a destroyed stream to the next one. A stream is known to be the same only
if the timeline made it, or if the driver tells streams apart (`IdentifyingDriver`). A stream that cannot be told apart gets a line
for each point, so every wait for it goes to the device. Lines whose points are all over are used again, in whatever stream's order
comes next: nothing is kept for a stream that is gone.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

from kv_cache_manager_v2.device.driver import Driver, IdentifyingDriver
from kv_cache_manager_v2.device.line import NO_EVENT, UNKNOWN, Line
from kv_cache_manager_v2.errors import KVCacheError, LogicError
from kv_cache_manager_v2.ids import NULL_POINT, Point, Stream

SEQUENCE_BITS: Final = 40  # a million records a second last 12 days on one line ...
_SEQUENCE_MASK: Final = (1 << SEQUENCE_BITS) - 1  # ... and point values stay below 2**62, mypyc's unboxed ints
_INDEX_LIMIT: Final = 1 << 22

_POLL_FROM: Final = 16  # outstanding events of a line from which on a record also asks whether the oldest are complete
MOST_OUTSTANDING: Final = 1 << 16  # events of a line, lines, and joins: beyond that the host waits for the oldest
_KEEP_LINES: Final = 256  # so many lines stay with their streams although their points are all over
_LOOK_AT: Final = 2  # lines asked whether they can be used again, for each line that is needed beyond these


_log: Final = logging.getLogger(__name__)


class Timeline:
    """The points of all streams of one driver.

    `record`, `wait`, `done` and `merge` are O(1) amortised for points of streams, and O(streams in the join) for joins. They ask
    the device O(log n) questions to find n events complete, and one to find none. `merge` asks none, and cannot fail.

    An exception that a driver's call raises, of whatever class, goes to the caller and has changed nothing here.
    """

    def __init__(self, driver: Driver, most_outstanding: int = MOST_OUTSTANDING) -> None:
        self._driver = driver
        self._identities: IdentifyingDriver | None = driver if isinstance(driver, IdentifyingDriver) else None
        self._most_outstanding = most_outstanding
        self._lines: list[Line] = [Line(0)]  # by index; index 0 stands for no stream
        self._by_stream: dict[int, Line] = {}  # by the driver's handle: the line of the stream that has it, as far as known
        self._used: deque[Line] = deque()  # every line that is not unused, the one looked at longest ago first
        self._unused: list[Line] = []  # lines without outstanding events and without a stream
        self._last_owned = 0  # identity of the latest stream of `create_stream`
        self._free_events: list[int] = []  # events of ours that mark nothing any more
        self._joins: dict[int, list[Point]] = {}  # number -> points of different lines, not all known to be over
        self._join_count = 0
        self._sweep_at = min(64, most_outstanding)  # live joins at which the finished ones are looked for
        self._last_pair: tuple[Point, Point] = (NULL_POINT, NULL_POINT)  # what was joined last, and the result:
        self._last_join: Point = NULL_POINT  # a batch of pages with the same two points shares one join
        self._closed = False

    # --- the four questions

    def record(self, stream: Stream) -> Point:
        """A point after all work that is queued on the stream now."""
        line = self._line_of(stream)
        if line is not None and len(line.events) - line.head >= _POLL_FROM:
            self._make_room(line)
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
        line.issued += 1
        return Point((line.index << SEQUENCE_BITS) | line.issued)

    def record_or_wait(self, stream: Stream) -> Point:
        """As `record`, for a caller that cannot fail any more, after a device has refused something. Never raises.

        From a stream that takes no mark the host waits for the device. If the device refuses even that, the point is not over
        before the device takes a mark on the stream again, or has been waited for as a whole.
        """
        try:
            return self.record(stream)
        except BaseException as error:  # whatever it is: the caller is ending what failed, and has an error to report already
            refused = f"{type(error).__name__}: {error}"  # not the exception: it and this frame would keep the caller's cache alive
        try:
            self._driver.synchronize()
        except BaseException as error:
            _log.warning("the device marks no point on stream %s (%s) and cannot be waited for (%s)", stream, refused, error)
            return self._owe(stream)
        return NULL_POINT

    def wait(self, stream: Stream, point: Point) -> None:
        """Work queued on the stream from now on runs after the point. Queues nothing if the point is over, or if the stream is
        known to be the one that the point lies on, or to wait for a later point of that one already."""
        if point == NULL_POINT:
            return
        if point >> SEQUENCE_BITS != 0:
            self._wait_line(stream, point)
            return
        if not self.done(point):
            for part in self._joins[point].copy():
                self._wait_line(stream, part)

    def done(self, point: Point) -> bool:
        """Whether everything before the point is complete; once True, always True. Never blocks."""
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
        """A point that is over once both are; NULL_POINT if both are known to be over, the one that is not if only one is."""
        if first == second or self._known_over(second):
            return NULL_POINT if self._known_over(first) else first
        if self._known_over(first):
            return second
        if first >> SEQUENCE_BITS == second >> SEQUENCE_BITS and first >> SEQUENCE_BITS != 0:
            return first if first > second else second
        if self._last_pair == (first, second):
            return self._last_join  # not known to be over, since its parts are not
        return self._join(first, second)

    def synchronize(self, point: Point) -> None:
        """Block the host until the point is over."""
        if self.done(point):
            return
        if point >> SEQUENCE_BITS != 0:
            self._synchronize_line(point)
            return
        for part in self._joins[point].copy():
            self._synchronize_line(part)

    # --- the life of streams

    def create_stream(self) -> Stream:
        """A stream of the driver's whose handle stays the same stream's until `destroy_stream`, so that it is always known."""
        line = self._unused_line()
        stream = self._driver.create_stream()
        self._last_owned -= 1
        self._assign(line, stream, self._last_owned)
        return stream

    def destroy_stream(self, stream: Stream) -> None:
        """Destroy a stream of `create_stream`; work already queued still runs, and its points stay good."""
        self._driver.destroy_stream(stream)
        self.forget(stream)

    def forget(self, stream: Stream) -> None:
        """What has this handle next is another stream. Points recorded so far stay good."""
        line = self._by_stream.pop(stream, None)
        if line is not None:
            line.identity = UNKNOWN
            line.waited = {}

    def close(self) -> None:
        """Destroy all events. Points must not be used any more. If the driver refuses an event the others are destroyed all the
        same, the first refusal is raised, and a further call tries the rest again."""
        self._closed = True
        for line in self._lines:
            self._free_events += [event for event in line.events[line.head :] if event != NO_EVENT]
            line.events = []
            line.head = 0
            line.completed = line.issued
        self._by_stream = {}
        self._joins = {}
        refusal: Exception | None = None
        kept = 0
        while len(self._free_events) > kept:
            try:
                self._driver.destroy_event(self._free_events[kept])
            except Exception as error:
                refusal = error if refusal is None else refusal
                kept += 1
                continue
            del self._free_events[kept]
        if refusal is not None:
            raise refusal

    @property
    def events_outstanding(self) -> int:
        """Events that mark points not known to be over."""
        total = 0
        for line in self._lines:
            total += line.outstanding()
        return total

    @property
    def joins_outstanding(self) -> int:
        return len(self._joins)

    @property
    def lines_made(self) -> int:
        """Lines ever made: bounded by what was outstanding at one time, not by the number of streams."""
        return len(self._lines) - 1

    # --- which stream has which line

    def _identity(self, stream: Stream) -> int:
        identities = self._identities
        return UNKNOWN if identities is None else identities.stream_identity(stream)

    def _line_of(self, stream: Stream) -> Line | None:
        """The line of the stream that has the handle now; None if it has none yet, or cannot be told from those before it."""
        line = self._by_stream.get(stream)
        if line is None or line.identity < 0:
            return line
        identities = self._identities
        if identities is None or identities.stream_identity(stream) != line.identity:
            return None
        return line

    def _assign(self, line: Line, stream: Stream, identity: int) -> None:
        """An unused line, the last of `_unused`, is that of a stream from now on."""
        self._used.append(self._unused.pop())
        line.stream = stream
        line.identity = identity
        if identity != UNKNOWN:
            self._by_stream[stream] = line

    def _unused_line(self) -> Line:
        """A line without outstanding events, the last of `_unused`. Looks for one among those in use before it makes a new one."""
        if not self._unused and len(self._used) >= _KEEP_LINES:
            self._look_for_unused()
        if not self._unused:
            index = len(self._lines)
            if index >= _INDEX_LIMIT:
                raise LogicError(f"more than {_INDEX_LIMIT} streams in use at one time")
            line = Line(index)
            self._lines.append(line)
            self._unused.append(line)
        return self._unused[-1]

    def _look_for_unused(self) -> None:
        """Take the lines whose points are all over from their streams, of those looked at longest ago."""
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
        return self._driver.create_event()

    def _line(self, index: int) -> Line:
        if not 0 < index < len(self._lines):
            raise LogicError(f"line {index} of a point was never given out")
        return self._lines[index]

    def _poll(self, line: Line) -> None:
        """Reuse the leading events that are complete."""
        if line.head < len(line.events) and line.events[line.head] == NO_EVENT:
            self._mark_late(line)
        line.poll(self._driver, self._free_events)

    def _make_room(self, line: Line) -> None:
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
        if event == NO_EVENT:  # no stream can wait for what has no mark, so the host does
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
                raise LogicError(f"point {number} of stream {line.stream} is still open after the driver waited for its event")

    def _synchronize_event(self, line: Line, event: int) -> None:
        """Block the host until an event of the line is complete."""
        if event == NO_EVENT:
            self._driver.synchronize()
            line.advance(len(line.events), self._free_events)
        else:
            self._driver.synchronize_event(event)
            line.advance(line.events.index(event, line.head) + 1, self._free_events)  # also where the device refuses to say so
        self._poll(line)

    # --- points that the device has refused to mark

    def _owe(self, stream: Stream) -> Point:
        """A point on a line of its own without an event."""
        known = self._line_of(stream)
        line = Line(len(self._lines))
        line.stream = stream
        line.identity = known.identity if known is not None else self._identity(stream)
        line.issued = 1
        line.events.append(NO_EVENT)
        self._lines.append(line)
        self._used.append(line)
        return Point((line.index << SEQUENCE_BITS) | line.issued)

    def _mark_late(self, line: Line) -> None:
        """Mark an owed point now, if the device takes a mark and the stream is known to be the same. Later is on the safe side."""
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

    def _known_over(self, point: Point) -> bool:
        """Whether the point is known to be over, without a question to the device."""
        index = point >> SEQUENCE_BITS
        number = point & _SEQUENCE_MASK
        if index != 0:
            line = self._line(index)
            line.check(number)
            return number <= line.completed
        if number == 0:
            return True
        return all(self._known_over(part) for part in self._parts(number))

    def _parts(self, number: int) -> list[Point]:
        """The points of a join; none if it is known to be over."""
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
                if part > clock.get(index, 0) and not self._known_over(part):
                    clock[index] = part
        self._join_count += 1
        join = Point(self._join_count)
        self._joins[join] = list(clock.values())
        self._last_pair = (first, second)
        self._last_join = join
        return join

    def _sweep(self) -> None:
        """Drop finished joins; the next sweep comes when as many have been added, so a join costs O(1) sweeps."""
        for number in list(self._joins):
            self._join_done(number)
        if len(self._joins) >= self._most_outstanding:
            self.synchronize(Point(next(iter(self._joins))))
        self._sweep_at = min(self._most_outstanding, max(64, 2 * len(self._joins)))

    # --- the books

    def check_invariants(self) -> None:
        seen: set[int] = set(self._free_events)
        assert len(seen) == len(self._free_events), "an event is free twice"
        for i in range(len(self._lines)):
            line = self._lines[i]
            assert line.index == i
            assert 0 <= line.head <= len(line.events)
            assert line.completed + line.outstanding() == line.issued, (i, line.completed, line.issued)
            for event in line.events[line.head :]:
                assert event == NO_EVENT or event not in seen, f"event {event} marks two points, or is free"
                seen.add(event)
            for index, number in line.waited.items():
                assert 0 < number <= self._lines[index].issued
        for stream, line in self._by_stream.items():
            assert line.stream == stream
            assert line.identity != UNKNOWN
            assert self._lines[line.index] is line
        indices = {line.index for line in self._used} | {line.index for line in self._unused}
        assert len(indices) == len(self._used) + len(self._unused) == len(self._lines) - 1, "a line is nowhere, or twice"
        for line in self._unused:
            assert line.outstanding() == 0
            assert self._by_stream.get(line.stream) is not line
        for number, parts in self._joins.items():
            assert 0 < number <= self._join_count
            assert len({part >> SEQUENCE_BITS for part in parts}) == len(parts), "a join has two points of one line"
            assert all(part >> SEQUENCE_BITS for part in parts), "a join of joins"
