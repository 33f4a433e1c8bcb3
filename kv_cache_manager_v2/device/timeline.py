"""Points in the order of streams: record one, wait for one, ask whether it is over.

Rule: a point is one int, (stream index << 40 | sequence number), and needs no owner: the timeline alone owns the driver's events
and recycles each as soon as it is known to be complete. Points of one stream are ordered, so the larger covers the smaller.
Index 0 is no stream: NULL_POINT is 0, and its other numbers are *joins*, small clocks that name one point of each of several
streams; a join is over when all of them are, queues nothing and delays nobody.

A stream is known by the driver's handle from its first record or wait on. Who destroys a stream calls `forget` first.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.errors import KVCacheError, LogicError
from kv_cache_manager_v2.ids import NULL_POINT, Point, Stream

SEQUENCE_BITS: Final = 40  # a million records a second last 12 days on one stream ...
_SEQUENCE_MASK: Final = (1 << SEQUENCE_BITS) - 1  # ... and point values stay below 2**62, mypyc's unboxed ints
_INDEX_LIMIT: Final = 1 << 22

_POLL_FROM: Final = 16  # outstanding events of a stream from which on a record also looks whether the oldest are complete
MOST_OUTSTANDING: Final = 1 << 16  # events of a stream, and joins: beyond that the host waits for the oldest, so all is bounded
_COMPACT_FROM: Final = 64  # spent events at the front of a list before it is cut


class _Line:
    """What the timeline knows of one stream: events numbered `completed + 1` to `issued` are outstanding."""

    def __init__(self, index: int, stream: Stream) -> None:
        self.index = index
        self.stream = stream  # the driver's handle
        self.issued = 0  # sequence number of the latest record
        self.completed = 0  # all records up to this number are known to be complete
        self.events: list[int] = []  # driver events; the outstanding ones are events[head:], in order
        self.head = 0
        self.waited: dict[int, int] = {}  # other line's index -> largest sequence number this stream was made to wait for


class Timeline:
    """The points of all streams of one driver.

    `record`, `wait`, `done` and `merge` are O(1) amortised for points of streams, and O(streams in the join) for joins. They ask
    the device O(log n) questions to find n events complete, and one to find none.
    """

    def __init__(self, driver: Driver, most_outstanding: int = MOST_OUTSTANDING) -> None:
        self._driver = driver
        self._most_outstanding = most_outstanding
        self._lines: list[_Line] = [_Line(0, Stream(0))]  # by index; index 0 stands for no stream
        self._by_stream: dict[int, _Line] = {}  # by the driver's handle
        self._retired: list[_Line] = []  # lines of forgotten streams, to be used again
        self._free_events: list[int] = []  # events of ours that mark nothing any more
        self._joins: dict[int, list[Point]] = {}  # number -> the points of different streams that are not known to be over
        self._join_count = 0
        self._sweep_at = min(64, most_outstanding)  # live joins at which the finished ones are looked for
        self._last_pair: tuple[Point, Point] = (NULL_POINT, NULL_POINT)  # what was joined last, and the result:
        self._last_join: Point = NULL_POINT  # a batch of pages with the same two points shares one join
        self._closed = False

    # --- the four questions

    def record(self, stream: Stream) -> Point:
        """A point after all work that is queued on the stream now."""
        line = self._by_stream.get(stream)
        if line is not None and len(line.events) - line.head >= _POLL_FROM:
            self._make_room(line)
        event = self._free_events.pop() if self._free_events else self._new_event()
        try:
            self._driver.record_event(event, stream)
        except Exception:
            self._free_events.append(event)
            raise
        if line is None:
            line = self._notice(stream)
        line.events.append(event)
        line.issued += 1
        return Point((line.index << SEQUENCE_BITS) | line.issued)

    def record_or_wait(self, stream: Stream) -> Point:
        """As `record`, after a device has refused something: from a stream that takes no more, the host waits instead."""
        try:
            return self.record(stream)
        except KVCacheError:
            with suppress(KVCacheError):  # a device that refuses even that does no more work
                self._driver.synchronize()
            return NULL_POINT

    def wait(self, stream: Stream, point: Point) -> None:
        """Work queued on the stream from now on runs after the point. Queues nothing if the point is over, lies on the same
        stream, or is covered by an earlier wait of this stream."""
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
        self._check(line, number)
        self._poll(line)
        return number <= line.completed

    def merge(self, first: Point, second: Point) -> Point:
        """A point that is over once both are; NULL_POINT if both are over now, the one that is not if only one is."""
        if self.done(first):
            return NULL_POINT if self.done(second) else second
        if first == second or self.done(second):
            return first
        if first >> SEQUENCE_BITS == second >> SEQUENCE_BITS and first >> SEQUENCE_BITS != 0:
            return first if first > second else second
        if self._last_pair == (first, second):
            return self._last_join  # not over, since its parts are not
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

    def forget(self, stream: Stream) -> None:
        """The stream's handle is about to be destroyed and may come back as another stream's. Points recorded on it stay good."""
        line = self._by_stream.pop(stream, None)
        if line is not None:
            line.waited = {}
            self._retired.append(line)

    def close(self) -> None:
        """Give all events back. Points must not be used any more."""
        if self._closed:
            return
        self._closed = True
        for line in self._lines:
            self._free_events += line.events[line.head :]
            line.events = []
            line.head = 0
            line.completed = line.issued
        self._by_stream = {}
        self._joins = {}
        for event in self._free_events:
            self._driver.destroy_event(event)
        self._free_events = []

    @property
    def events_outstanding(self) -> int:
        """Events that mark points not known to be over."""
        total = 0
        for line in self._lines:
            total += len(line.events) - line.head
        return total

    @property
    def joins_outstanding(self) -> int:
        return len(self._joins)

    # --- lines

    def _notice(self, stream: Stream) -> _Line:
        """The line of a stream that was not known. A forgotten stream's line goes on counting, so its old points stay over."""
        for i in range(len(self._retired)):
            line = self._retired[i]
            self._poll(line)
            if line.completed == line.issued:
                del self._retired[i]
                line.stream = stream
                self._by_stream[stream] = line
                return line
        index = len(self._lines)
        if index >= _INDEX_LIMIT:
            raise LogicError(f"more than {_INDEX_LIMIT} streams in use; destroyed streams must be told to Timeline.forget")
        line = _Line(index, stream)
        self._lines.append(line)
        self._by_stream[stream] = line
        return line

    def _new_event(self) -> int:
        if self._closed:
            raise LogicError("the timeline is closed: no point can be recorded")
        return self._driver.create_event()

    def _line(self, index: int) -> _Line:
        if not 0 < index < len(self._lines):
            raise LogicError(f"stream index {index} of a point was never given out")
        return self._lines[index]

    def _check(self, line: _Line, number: int) -> None:
        if not 0 < number <= line.issued:
            raise LogicError(f"point {number} of stream {line.stream} was never recorded: the latest is {line.issued}")

    def _poll(self, line: _Line) -> None:
        """Recycle the leading events that are complete."""
        events = line.events
        count = len(events)
        head = self._first_pending(events, line.head)
        for index in range(line.head, head):
            self._free_events.append(events[index])
        line.completed += head - line.head
        line.head = head
        if head == count:
            if head > 0:
                events.clear()
                line.head = 0
        elif head >= _COMPACT_FROM and 2 * head >= count:
            del events[:head]
            line.head = 0

    def _first_pending(self, events: list[int], head: int) -> int:
        """Position of the first event from `head` on that is not complete. They complete in order, so steps are doubled as long as
        the answer is yes and then halved: O(log of the events that are) questions to the device, one if none is."""
        pending = len(events)  # this one, and all behind it, are not known to be complete
        step = 1
        while head < pending:
            asked = min(head + step, pending) - 1
            if self._is_complete(events[asked]):
                head = asked + 1
                step *= 2
            else:
                pending = asked
                step = max(1, step // 2)
        return head

    def _is_complete(self, event: int) -> bool:
        """Whether an event is known to be complete. A device that refuses to say is not asked to fail here, in the middle of
        somebody's bookkeeping: the next record, wait or synchronisation reports what is wrong with it."""
        try:
            return self._driver.query_event(event)
        except KVCacheError:
            return False

    def _make_room(self, line: _Line) -> None:
        self._poll(line)
        if len(line.events) - line.head >= self._most_outstanding:
            self._driver.synchronize_event(line.events[line.head])
            self._poll(line)

    def _event_of(self, line: _Line, number: int) -> int:
        return line.events[line.head + number - line.completed - 1]

    def _wait_line(self, stream: Stream, point: Point) -> None:
        index = point >> SEQUENCE_BITS
        number = point & _SEQUENCE_MASK
        line = self._line(index)
        if number <= line.completed:
            return
        self._check(line, number)
        waiter = self._by_stream.get(stream)
        if waiter is line or (waiter is not None and waiter.waited.get(index, 0) >= number):
            return
        self._poll(line)
        if number <= line.completed:
            return
        self._driver.wait_event(stream, self._event_of(line, number))
        if waiter is None:
            waiter = self._notice(stream)
        waiter.waited[index] = number

    def _synchronize_line(self, point: Point) -> None:
        line = self._line(point >> SEQUENCE_BITS)
        number = point & _SEQUENCE_MASK
        if number > line.completed:
            self._driver.synchronize_event(self._event_of(line, number))
            self._poll(line)
            if number > line.completed:
                raise LogicError(f"point {number} of stream {line.stream} is still open after the driver waited for its event")

    # --- joins

    def _join_done(self, number: int) -> bool:
        parts = self._joins.get(number)
        if parts is None:
            if number > self._join_count:
                raise LogicError(f"join {number} was never made: the latest is {self._join_count}")
            return True
        while parts:
            if not self.done(parts[-1]):
                return False
            parts.pop()
        del self._joins[number]
        return True

    def _join(self, first: Point, second: Point) -> Point:
        clock: dict[int, Point] = {}
        for point in (first, second):
            for part in [point] if point >> SEQUENCE_BITS else self._joins[point]:
                index = part >> SEQUENCE_BITS
                if part > clock.get(index, 0) and not self.done(part):
                    clock[index] = part
        if len(self._joins) >= self._sweep_at:
            self._sweep()
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
            assert line.completed + len(line.events) - line.head == line.issued, (i, line.completed, line.issued)
            for event in line.events[line.head :]:
                assert event not in seen, f"event {event} marks two points, or is free"
                seen.add(event)
            for index, number in line.waited.items():
                assert 0 < number <= self._lines[index].issued
        for stream, line in self._by_stream.items():
            assert line.stream == stream
            assert self._lines[line.index] is line
        live = {line.index for line in self._by_stream.values()} | {line.index for line in self._retired}
        assert len(live) == len(self._by_stream) + len(self._retired) == len(self._lines) - 1, "a line is neither known nor retired"
        for number, parts in self._joins.items():
            assert 0 < number <= self._join_count
            assert len({part >> SEQUENCE_BITS for part in parts}) == len(parts), "a join has two points of one stream"
            assert all(part >> SEQUENCE_BITS for part in parts), "a join of joins"
        assert self._closed or len(self._joins) <= self._most_outstanding
