"""The timeline: points, waits and merges, against a naive model of what each point covers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.device.timeline import SEQUENCE_BITS, Timeline
from kv_cache_manager_v2.emulated.driver import EmulatedDriver
from kv_cache_manager_v2.errors import CuError, LogicError
from kv_cache_manager_v2.ids import NULL_POINT, Point, Stream
from tests.support.device_rig import SCHEDULES, DeviceRig, rig


def closed_rig_timeline(r: DeviceRig, timeline: Timeline) -> None:
    timeline.check_invariants()
    timeline.close()
    timeline.close()
    assert r.driver.events_live == 0


@contextmanager
def timed(schedule: str) -> Iterator[tuple[DeviceRig, Timeline]]:
    """A rig with a timeline, which is closed after the test."""
    with rig(schedule) as r:
        timeline = Timeline(r.driver)
        yield r, timeline
        closed_rig_timeline(r, timeline)


def test_the_null_point_is_over_everywhere() -> None:
    """Asking, waiting, merging and synchronizing with no point at all are no-ops."""
    with timed("eager") as (r, timeline):
        gate = r.driver.gate(r.streams[0])
        point = timeline.record(r.streams[0])
        assert timeline.done(NULL_POINT)
        timeline.wait(r.streams[1], NULL_POINT)
        timeline.synchronize(NULL_POINT)
        assert timeline.merge(NULL_POINT, NULL_POINT) == NULL_POINT
        assert timeline.merge(NULL_POINT, point) == point
        assert timeline.merge(point, NULL_POINT) == point
        gate.open()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_point_is_over_when_the_work_before_it_is(schedule: str) -> None:
    """Points of one stream count up, become over in order, and stay over."""
    with timed(schedule) as (r, timeline):
        stream = r.streams[0]
        before = timeline.record(stream)
        timeline.synchronize(before)
        gate = r.driver.gate(stream)
        first, second = timeline.record(stream), timeline.record(stream)
        assert before < first < second
        assert before >> SEQUENCE_BITS == second >> SEQUENCE_BITS
        assert timeline.done(before)
        for _i in range(10):
            assert not timeline.done(first)
            assert not timeline.done(second)
        gate.open()
        timeline.synchronize(second)
        assert timeline.done(first)
        assert timeline.done(second)
        assert timeline.events_outstanding == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stream_waits_for_a_point_of_another(schedule: str) -> None:
    """`wait` orders the streams; on the same stream and for what is over it queues nothing, and once is enough."""
    with timed(schedule) as (r, timeline):
        first, second, third = r.streams
        gate = r.driver.gate(first)
        early, late = timeline.record(first), timeline.record(first)
        timeline.wait(first, late)
        timeline.wait(second, late)
        ran: list[int] = []
        r.driver.launch(second, lambda: ran.append(2))
        r.driver.launch(third, lambda: ran.append(3))
        r.finish(third)
        assert ran == [3]
        r.driver.fail("wait_event", times=None)  # none of these reaches the driver:
        timeline.wait(second, late)
        timeline.wait(second, early)
        timeline.wait(first, early)
        timeline.wait(third, NULL_POINT)
        with pytest.raises(CuError, match="wait_event"):
            timeline.wait(third, early)
        r.driver.heal()
        gate.open()
        timeline.synchronize(late)
        r.driver.fail("wait_event", times=None)
        timeline.wait(third, late)
        r.driver.heal()
        r.driver.synchronize()
        assert ran == [3, 2]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_merging(schedule: str) -> None:
    """Over ones vanish, one stream gives the larger point, two streams a join that is over when both are."""
    with timed(schedule) as (r, timeline):
        a, b, c = r.streams
        over = timeline.record(c)
        timeline.synchronize(over)
        gate_a, gate_b = r.driver.gate(a), r.driver.gate(b)
        a1, a2, b1 = timeline.record(a), timeline.record(a), timeline.record(b)
        assert timeline.merge(a1, over) == a1
        assert timeline.merge(over, a1) == a1
        assert timeline.merge(a1, a2) == timeline.merge(a2, a1) == a2
        assert timeline.merge(a1, a1) == a1
        both = timeline.merge(a2, b1)
        assert timeline.merge(a2, b1) == both
        assert timeline.merge(both, both) == both
        gate_c = r.driver.gate(c)
        c1 = timeline.record(c)
        three = timeline.merge(both, c1)
        assert timeline.merge(three, a1) != NULL_POINT
        ran: list[int] = []
        waiter = r.driver.create_stream()
        timeline.wait(waiter, both)
        r.driver.launch(waiter, lambda: ran.append(1))
        gate_a.open()
        timeline.synchronize(a2)
        assert not timeline.done(both)
        assert not timeline.done(three)
        assert not r.is_over(waiter)
        gate_b.open()
        timeline.synchronize(both)
        assert timeline.done(both)
        assert not timeline.done(three)
        assert timeline.merge(both, three) == three
        gate_c.open()
        timeline.synchronize(three)
        assert timeline.merge(both, three) == NULL_POINT
        r.driver.synchronize()
        assert ran == [1]
        assert timeline.joins_outstanding <= 1
        timeline.forget(waiter)
        r.driver.destroy_stream(waiter)


def test_a_join_of_joins_keeps_the_larger_point_of_each_stream() -> None:
    """Whichever of two joins comes first, their join is over only when the later point of the shared stream is."""
    for swapped in (False, True):
        with rig("eager") as r:
            timeline = Timeline(r.driver)
            a, b, c = r.streams
            gates = [r.driver.gate(a), r.driver.gate(b), r.driver.gate(c)]
            early = timeline.record(a)
            gates.append(r.driver.gate(a))
            late, beside, third = timeline.record(a), timeline.record(b), timeline.record(c)
            wide, narrow = timeline.merge(late, beside), timeline.merge(early, third)
            both = timeline.merge(narrow, wide) if swapped else timeline.merge(wide, narrow)
            for gate in gates[:3]:
                gate.open()
            assert timeline.done(narrow)
            assert not timeline.done(both)
            gates[3].open()
            assert timeline.done(both)
            closed_rig_timeline(r, timeline)


def test_a_join_delays_no_stream() -> None:
    """Two joins do not wait for one another, as they would if a stream of ours did the joining."""
    with timed("eager") as (r, timeline):
        others = [r.driver.create_stream() for _i in range(2)]
        gates = [r.driver.gate(stream) for stream in [*r.streams[:2], *others]]
        points = [timeline.record(stream) for stream in [*r.streams[:2], *others]]
        slow = timeline.merge(points[0], points[1])
        quick = timeline.merge(points[2], points[3])
        gates[2].open()
        gates[3].open()
        assert timeline.done(quick)
        assert not timeline.done(slow)
        gates[0].open()
        gates[1].open()
        for stream in others:
            timeline.forget(stream)
            r.driver.destroy_stream(stream)


def test_events_are_recycled() -> None:
    """On a device that keeps up, any number of points costs a few events, with and without queries."""
    with timed("eager") as (r, timeline):
        for _i in range(1000):
            timeline.record(r.streams[0])
        assert r.driver.events_live <= 64
        point = timeline.record(r.streams[1])
        for _i in range(1000):
            assert timeline.done(point)
            point = timeline.record(r.streams[1])
        assert r.driver.events_live <= 66


def test_everything_is_bounded() -> None:
    """At the limit of outstanding events and of joins the host waits for the oldest; with the device stuck that is an error."""
    for seed in range(5):
        with rig("random", seed) as r:
            timeline = Timeline(r.driver, most_outstanding=32)
            for i in range(500):
                r.driver.launch(r.streams[i % 3], lambda: None)
                point = timeline.record(r.streams[i % 3])
                timeline.merge(point, timeline.merge(timeline.record(r.streams[(i + 1) % 3]), point))
                timeline.check_invariants()
                assert timeline.events_outstanding <= 3 * 33
                assert timeline.joins_outstanding <= 35  # the host waits when the next point is recorded
            closed_rig_timeline(r, timeline)
    with rig("eager") as r:
        timeline = Timeline(r.driver, most_outstanding=32)
        gate = r.driver.gate(r.streams[0])
        for _i in range(32):
            timeline.record(r.streams[0])
        with pytest.raises(LogicError, match="would never end"):
            timeline.record(r.streams[0])
        timeline.check_invariants()
        gate.open()
        timeline.record(r.streams[0])
        closed_rig_timeline(r, timeline)


def test_a_refused_call_changes_nothing() -> None:
    """A record that the driver refuses loses no event; a query that it refuses answers not done."""
    with timed("eager") as (r, timeline):
        r.driver.fail("create_event")
        with pytest.raises(CuError, match="create_event"):
            timeline.record(r.streams[0])
        r.driver.fail("record_event")
        with pytest.raises(CuError, match="record_event"):
            timeline.record(r.streams[0])
        assert r.driver.events_live == 1
        with pytest.raises(LogicError, match="no stream 99"):
            timeline.record(Stream(99))
        timeline.check_invariants()
        point = timeline.record(r.streams[0])
        assert r.driver.events_live == 1
        r.driver.fail("query_event")
        assert not timeline.done(point)
        assert timeline.done(point)


def test_points_that_were_never_recorded_are_refused() -> None:
    with rig("eager") as r:
        timeline = Timeline(r.driver)
        gate = r.driver.gate(r.streams[0])
        point = timeline.record(r.streams[0])
        for wrong in (Point(point + 1), Point(point + (5 << SEQUENCE_BITS)), Point(3)):
            with pytest.raises(LogicError):
                timeline.done(wrong)
            with pytest.raises(LogicError):
                timeline.wait(r.streams[1], wrong)
        gate.open()
        closed_rig_timeline(r, timeline)
        with pytest.raises(LogicError, match="closed"):
            timeline.record(r.streams[0])


# --- against a naive model


class Model:
    """Each point as the set of (stream, number of launches before it) that it covers."""

    def __init__(self) -> None:
        self.launched = [0, 0, 0]
        self.finished = [0, 0, 0]
        self.covers: dict[Point, list[int]] = {NULL_POINT: [0, 0, 0]}

    def over(self, point: Point) -> bool:
        return all(need <= have for need, have in zip(self.covers[point], self.finished, strict=True))


operations = st.lists(
    st.tuples(
        st.sampled_from(("launch", "record", "wait", "merge", "done", "hold", "open")), st.integers(0, 2), st.integers(0, 99)
    ),
    max_size=60,
)


@given(st.sampled_from(("eager", "random")), st.integers(0, 1000), operations)
def test_points_cover_what_a_naive_model_says(schedule: str, seed: int, steps: list[tuple[str, int, int]]) -> None:
    """Whenever a point is over, all the work that it covers has run; once everything has run, every point is over;
    and work behind a wait never runs before what the point covers."""
    with rig(schedule, seed) as r:
        timeline = Timeline(r.driver, most_outstanding=1000)
        model = Model()
        points: list[Point] = [NULL_POINT]
        must: list[list[int]] = [[0, 0, 0] for _i in range(3)]  # by stream: what has to be finished before its next launch runs
        gates = []

        def launch(stream: int) -> None:
            need = must[stream].copy()

            def ran() -> None:
                assert all(a <= b for a, b in zip(need, model.finished, strict=True)), "work overtook what it waits for"
                model.finished[stream] += 1

            model.launched[stream] += 1
            r.driver.launch(r.streams[stream], ran)

        for kind, stream, pick in steps:
            point = points[pick % len(points)]
            if kind == "launch":
                launch(stream)
            elif kind == "record":
                recorded = timeline.record(r.streams[stream])
                covered = must[stream].copy()
                covered[stream] = model.launched[stream]
                model.covers[recorded] = covered
                points.append(recorded)
            elif kind == "wait":
                timeline.wait(r.streams[stream], point)
                must[stream] = [max(a, b) for a, b in zip(must[stream], model.covers[point], strict=True)]
            elif kind == "merge":
                second = points[stream % len(points)]
                merged = timeline.merge(point, second)
                if merged != NULL_POINT and merged not in (point, second):
                    union = [max(a, b) for a, b in zip(model.covers[point], model.covers[second], strict=True)]
                    model.covers[merged] = union
                    points.append(merged)
            elif kind == "done":
                if timeline.done(point):
                    assert model.over(point)
                    assert timeline.done(point)
            elif kind == "hold":
                gates.append(r.driver.gate(r.streams[stream]))
            elif gates:
                gates.pop(pick % len(gates)).open()
            timeline.check_invariants()
        for gate in gates:
            gate.open()
        r.driver.synchronize()
        assert model.finished == model.launched
        for point in points:
            assert timeline.done(point)
        assert timeline.joins_outstanding == 0
        closed_rig_timeline(r, timeline)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_hand_over_waits_for_the_last_user(schedule: str) -> None:
    """The next owner's stream, told to wait for the previous owner's point, is not over before the gate opens."""
    driver = EmulatedDriver(schedule)
    timeline = Timeline(driver)
    producer, consumer = driver.create_stream(), driver.create_stream()
    gate = driver.gate(producer)
    released = timeline.record(producer)
    timeline.wait(consumer, released)
    taken = timeline.record(consumer)
    for _i in range(20):
        assert not timeline.done(taken)
    gate.open()
    timeline.synchronize(taken)
    assert timeline.done(released)
    timeline.close()
    driver.destroy_stream(producer)
    driver.destroy_stream(consumer)
    driver.close()
