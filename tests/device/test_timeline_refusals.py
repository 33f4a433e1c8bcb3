"""The timeline on a device that refuses calls: an exception of any class changes nothing, and no event is lost."""

from __future__ import annotations

from typing import Any

import pytest

from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.emulated.driver import EmulatedDriver
from kv_cache_manager_v2.errors import CuError, LogicError
from kv_cache_manager_v2.ids import Point
from tests.support.drivers import refusing_device


class Foreign(BaseException):
    """A class that the package has never heard of."""


ERRORS = (CuError("refused", 1, "a call"), RuntimeError("foreign"), MemoryError(), KeyboardInterrupt(), Foreign())


def workload(timeline: Timeline, streams: list[int], gates: list[Any]) -> None:
    """Every call of the timeline, with points that are over and others that are not."""
    a, b, c = streams
    points = [timeline.record(a), timeline.record(b)]
    timeline.wait(c, points[0])
    timeline.wait(c, timeline.merge(points[0], points[1]))
    for _i in range(20):
        points.append(timeline.record(a))
    own = timeline.create_stream()
    timeline.wait(own, points[-1])
    points.append(timeline.record(own))
    timeline.merge(points[-1], points[-2])
    timeline.destroy_stream(own)
    for gate in gates:
        gate.open()
    for point in points:
        timeline.done(point)
    timeline.synchronize(timeline.merge(points[-1], points[1]))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_exception_at_any_call_leaves_the_timeline_whole(error: BaseException, after: bool) -> None:
    """Each driver call in turn raises, before or after its work; then all structures agree, and all events can be destroyed."""
    skip = 0
    reached = True
    while reached:
        emulated = EmulatedDriver("eager")
        driver = refusing_device(emulated, identifies=True)
        timeline = Timeline(driver)
        streams = [emulated.create_stream() for _i in range(3)]
        gates = [emulated.gate(stream) for stream in streams[:2]]
        driver.refuse(error, skip, after=after)
        try:
            workload(timeline, streams, gates)
        except type(error):
            pass
        reached = bool(driver.refused)
        driver.refuse(None)
        timeline.check_invariants()
        for gate in gates:
            gate.open()
        emulated.synchronize()
        for stream in streams:
            assert timeline.done(timeline.record(stream))
        timeline.check_invariants()
        timeline.close()
        lost = 1 if after else 0  # an event or stream whose handle never came back to its owner
        assert emulated.events_live <= lost
        assert emulated.streams_live <= 3 + 1
        skip += 1
    assert skip > 40


def test_closing_goes_on_after_a_refused_event() -> None:
    """The others are destroyed all the same; the next call destroys what was refused."""
    emulated = EmulatedDriver("eager")
    driver = refusing_device(emulated, identifies=True)
    timeline = Timeline(driver)
    gate = emulated.gate(0)
    for _i in range(10):
        timeline.record(0)
    gate.open()
    for times in (2, 1):
        driver.refuse(CuError("refused", 1, "destroy_event"), times=times)
        with pytest.raises(CuError):
            timeline.close()
        assert emulated.events_live == times
    driver.refuse(None)
    timeline.close()
    assert emulated.events_live == 0
    with pytest.raises(LogicError, match="closed"):
        timeline.record(0)


def owed_point(timeline: Timeline, driver: Any, stream: int) -> Point:
    """The end of a stream on a device that refuses everything."""
    driver.refuse(KeyboardInterrupt(), times=2)
    point = timeline.record_or_wait(stream)
    driver.refuse(None)
    return point


def test_work_that_cannot_be_marked_is_never_taken_to_be_over() -> None:
    """A device that takes no mark and cannot be waited for: the point is over once it takes one again, on the same stream."""
    emulated = EmulatedDriver("eager")
    driver = refusing_device(emulated, identifies=True)
    timeline = Timeline(driver)
    stream, other = emulated.create_stream(), emulated.create_stream()
    gate = emulated.gate(stream)
    point = owed_point(timeline, driver, stream)
    both = timeline.merge(point, timeline.record(other))
    timeline.check_invariants()
    assert not timeline.done(point)
    timeline.wait(other, point)
    assert not timeline.done(timeline.record(other))
    gate.open()
    assert timeline.done(point)
    assert timeline.done(both)
    timeline.check_invariants()
    timeline.close()
    assert emulated.events_live == 0


def test_work_of_a_stream_that_is_gone_is_over_when_the_device_was_waited_for() -> None:
    emulated = EmulatedDriver("eager")
    driver = refusing_device(emulated, identifies=True)
    timeline = Timeline(driver)
    stream = emulated.create_stream()
    gate = emulated.gate(stream)
    point = owed_point(timeline, driver, stream)
    emulated.destroy_stream(stream)
    gate.open()
    assert not timeline.done(point)
    timeline.synchronize(point)
    assert timeline.done(point)
    timeline.check_invariants()
    timeline.close()


def test_the_host_waits_for_a_stream_that_takes_no_mark() -> None:
    emulated = EmulatedDriver("threads")
    driver = refusing_device(emulated, identifies=True)
    timeline = Timeline(driver)
    ran: list[int] = []
    emulated.launch(0, lambda: ran.append(1))
    driver.refuse(CuError("refused", 1, "record_event"))
    assert timeline.done(timeline.record_or_wait(0))
    assert ran == [1]
    timeline.close()
    emulated.close()


def test_a_point_that_the_host_waited_for_is_over_where_the_device_refuses_to_say_so() -> None:
    """The wait is the answer: a refused question after it is no error of the caller's."""
    driver = EmulatedDriver("eager")
    timeline = Timeline(driver)
    stream = driver.create_stream()
    gate = driver.gate(stream)
    first, second = timeline.record(stream), timeline.record(stream)
    gate.open()
    driver.fail("query_event", 1, None)
    timeline.synchronize(second)
    assert timeline.done(first)
    assert timeline.done(second)
    driver.heal()
    timeline.check_invariants()
    driver.destroy_stream(stream)
    timeline.close()
    driver.close()
