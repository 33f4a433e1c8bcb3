"""The host waits for points while other threads record and complete others."""

from __future__ import annotations

import threading

import pytest

from kv_cache_manager_v2.device.host_wait import HostWaits
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.errors import CuError
from tests.support.device_rig import SCHEDULES, DeviceRig, rig


def closed(r: DeviceRig, timeline: Timeline, waits: HostWaits) -> None:
    waits.close()
    timeline.check_invariants()
    timeline.close()
    assert r.driver.events_live == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_wait_ends_when_its_points_are_complete(schedule: str) -> None:
    """Also if the timeline has reused their events meanwhile. The next wait makes no stream and no event."""
    with rig(schedule) as r:
        timeline = Timeline(r.driver)
        waits = HostWaits(r.driver, timeline)
        for _round in range(3):
            gates = [r.driver.gate(stream) for stream in r.streams[:2]]
            points = [timeline.record(stream) for stream in r.streams[:2]]
            wait = waits.begin(points)
            for gate in gates:
                gate.open()
            for point in points:
                timeline.synchronize(point)
            held = r.driver.gate(r.streams[2])
            others = [timeline.record(r.streams[2]) for _number in range(8)]  # on the events that are free now
            wait.block()
            assert not timeline.done(others[0])
            waits.end(wait)
            held.open()
            timeline.synchronize(others[-1])
        assert r.driver.streams_live == 4
        closed(r, timeline, waits)


def test_waits_of_two_threads_do_not_wait_for_each_other() -> None:
    with rig("threads") as r:
        timeline = Timeline(r.driver)
        waits = HostWaits(r.driver, timeline)
        gate = r.driver.gate(r.streams[0])
        first = waits.begin([timeline.record(r.streams[0])])
        waiting = threading.Thread(target=first.block, daemon=True)
        waiting.start()
        second = waits.begin([timeline.record(r.streams[1])])
        second.block()
        assert waiting.is_alive()
        waits.end(second)
        gate.open()
        waiting.join(60)
        assert first.complete
        closed(r, timeline, waits)


@pytest.mark.parametrize("call", ["create_stream", "create_event", "wait_event", "record_event", "synchronize_event"])
def test_a_refused_wait_can_be_tried_again(call: str) -> None:
    with rig("eager") as r:
        timeline = Timeline(r.driver)
        waits = HostWaits(r.driver, timeline)
        gate = r.driver.gate(r.streams[0])
        points = [timeline.record(r.streams[0])]
        r.driver.fail(call)
        with pytest.raises((CuError, MemoryError)):
            waits.begin(points).block()
        again = waits.begin(points)
        gate.open()
        again.block()
        assert timeline.done(points[0])
        waits.end(again)
        assert not waits.others_wait()
        closed(r, timeline, waits)


@pytest.mark.parametrize("call", ["destroy_event", "destroy_stream"])
def test_a_refused_close_can_be_tried_again(call: str) -> None:
    with rig("eager") as r:
        timeline = Timeline(r.driver)
        waits = HostWaits(r.driver, timeline)
        wait = waits.begin([timeline.record(r.streams[0])])
        wait.block()
        waits.end(wait)
        r.driver.fail(call)
        with pytest.raises(CuError):
            waits.close()
        closed(r, timeline, waits)
        assert r.driver.streams_live == 3
