"""Streams whose handle comes back: no order follows from a handle, and nothing is kept for a stream that is gone."""

from __future__ import annotations

from typing import Any

import pytest

from kv_cache_manager_v2.device.timeline import SEQUENCE_BITS, Timeline
from kv_cache_manager_v2.emulated.driver import EmulatedDriver
from kv_cache_manager_v2.ids import NULL_POINT
from kv_cache_manager_v2.request.call import Call
from tests.support.device_rig import SCHEDULES
from tests.support.drivers import returning_device
from tests.support.models import small
from tests.support.rig import Rig

EVERY_DEVICE = pytest.mark.parametrize(
    ("schedule", "identifies"), [(schedule, identifies) for schedule in SCHEDULES for identifies in (False, True)]
)


class Scene:
    """A device that gives destroyed streams' handles out again, and its timeline."""

    def __init__(self, schedule: str, identifies: bool) -> None:
        self.emulated = EmulatedDriver(schedule, stall_timeout_s=0.05)
        self.driver: Any = returning_device(self.emulated, identifies)
        self.timeline = Timeline(self.driver)
        self.order: list[str] = []

    def launch(self, stream: int, name: str) -> None:
        self.driver.launch(stream, lambda: self.order.append(name))

    def finish(self, stream: int) -> None:
        """Wait for what is queued on this stream, and for nothing else."""
        event = self.driver.create_event()
        self.driver.record_event(event, stream)
        self.driver.synchronize_event(event)
        self.driver.destroy_event(event)

    def close(self) -> None:
        self.emulated.synchronize()
        self.timeline.check_invariants()
        self.timeline.close()
        for stream in list(self.driver.real):
            self.driver.destroy_stream(stream)
        self.emulated.close()


@EVERY_DEVICE
def test_a_new_stream_waits_for_the_work_of_the_one_that_had_its_handle(schedule: str, identifies: bool) -> None:
    scene = Scene(schedule, identifies)
    old = scene.driver.create_stream()
    gate = scene.emulated.gate(scene.driver.real[old])
    scene.launch(old, "old")
    point = scene.timeline.record(old)
    scene.driver.destroy_stream(old)
    new = scene.driver.create_stream()
    assert new == old
    scene.timeline.record(new)
    scene.timeline.wait(new, point)
    scene.launch(new, "new")
    gate.open()
    scene.emulated.synchronize()
    assert scene.order == ["old", "new"]
    scene.close()


@EVERY_DEVICE
def test_a_new_stream_has_not_waited_for_what_the_old_one_has(schedule: str, identifies: bool) -> None:
    scene = Scene(schedule, identifies)
    writer, old = scene.driver.create_stream(), scene.driver.create_stream()
    gate = scene.emulated.gate(scene.driver.real[writer])
    scene.launch(writer, "writer")
    point = scene.timeline.record(writer)
    scene.timeline.wait(old, point)
    scene.driver.destroy_stream(old)
    new = scene.driver.create_stream()
    assert new == old
    scene.timeline.wait(new, point)
    scene.launch(new, "new")
    gate.open()
    scene.emulated.synchronize()
    assert scene.order == ["writer", "new"]
    scene.close()


@EVERY_DEVICE
def test_points_of_two_streams_with_one_handle_are_over_each_for_itself(schedule: str, identifies: bool) -> None:
    """A later point of the same handle covers nothing of the stream before: neither in `done` nor in `merge`."""
    scene = Scene(schedule, identifies)
    old = scene.driver.create_stream()
    gate = scene.emulated.gate(scene.driver.real[old])
    before = scene.timeline.record(old)
    scene.driver.destroy_stream(old)
    new = scene.driver.create_stream()
    scene.launch(new, "new")
    after = scene.timeline.record(new)
    both = scene.timeline.merge(before, after)
    scene.timeline.synchronize(after)  # the new stream's work does not wait for the old one's
    assert scene.order == ["new"]
    assert scene.timeline.done(after)
    assert not scene.timeline.done(before)
    assert not scene.timeline.done(both)
    gate.open()
    scene.timeline.synchronize(both)
    assert scene.timeline.done(before)
    scene.close()


@EVERY_DEVICE
def test_a_new_stream_is_not_delayed_by_the_one_that_had_its_handle(schedule: str, identifies: bool) -> None:
    scene = Scene(schedule, identifies)
    old = scene.driver.create_stream()
    gate = scene.emulated.gate(scene.driver.real[old])
    for _i in range(40):
        scene.timeline.record(old)
    scene.driver.destroy_stream(old)
    new = scene.driver.create_stream()
    for _i in range(40):
        scene.timeline.record(new)
    scene.launch(new, "new")
    scene.finish(new)
    assert scene.order == ["new"]
    gate.open()
    scene.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stream_that_is_known_to_be_the_same_waits_for_itself_without_the_device(schedule: str) -> None:
    """True of an engine's stream on a driver that tells streams apart, and of the timeline's own on every driver."""
    for identifies in (False, True):
        scene = Scene(schedule, identifies)
        streams = [scene.timeline.create_stream()] + ([scene.driver.create_stream()] if identifies else [])
        for stream in streams:
            gate = scene.emulated.gate(scene.driver.real[stream])
            points = [scene.timeline.record(stream) for _i in range(3)]
            assert len({point >> SEQUENCE_BITS for point in points}) == 1
            scene.emulated.fail("wait_event", times=None)
            scene.timeline.wait(stream, points[1])
            scene.emulated.heal()
            gate.open()
        scene.emulated.synchronize()
        scene.timeline.destroy_stream(streams[0])
        scene.close()


@pytest.mark.parametrize("identifies", [False, True])
@pytest.mark.parametrize("reused", [False, True])
def test_nothing_is_kept_for_streams_that_are_gone(reused: bool, identifies: bool) -> None:
    """Any number of streams, each used and destroyed without a word to the timeline, costs a bounded number of lines and events."""
    scene = Scene("eager", identifies)
    driver: Any = scene.driver if reused else scene.emulated
    timeline = Timeline(driver)
    common = driver.create_stream()
    for _i in range(5000):
        stream = driver.create_stream()
        timeline.wait(stream, timeline.record(common))
        timeline.merge(timeline.record(stream), timeline.record(common))
        driver.destroy_stream(stream)
    timeline.check_invariants()
    assert timeline.lines_made <= 300
    assert scene.emulated.events_live <= 2000
    assert timeline.joins_outstanding <= 128
    timeline.close()
    driver.destroy_stream(common)
    scene.close()


def test_many_streams_in_flight_make_the_host_wait_for_the_oldest() -> None:
    """A device that never keeps up cannot make the timeline grow beyond its bound."""
    for identifies in (False, True):
        emulated = EmulatedDriver("random", seed=5)
        driver = returning_device(emulated, identifies)
        timeline = Timeline(driver, most_outstanding=300)
        for _i in range(2000):
            stream = driver.create_stream()
            driver.launch(stream, lambda: None)
            timeline.record(stream)
            driver.destroy_stream(stream)
        timeline.check_invariants()
        assert timeline.lines_made <= 302
        emulated.synchronize()
        timeline.close()
        emulated.close()


def test_points_of_a_forgotten_stream_stay_good() -> None:
    scene = Scene("eager", True)
    stream = scene.driver.create_stream()
    gate = scene.emulated.gate(scene.driver.real[stream])
    point = scene.timeline.record(stream)
    scene.timeline.forget(stream)
    scene.timeline.forget(stream)
    later = scene.timeline.record(stream)
    assert later >> SEQUENCE_BITS != point >> SEQUENCE_BITS
    assert not scene.timeline.done(point)
    gate.open()
    assert scene.timeline.done(point)
    assert scene.timeline.merge(point, NULL_POINT) == NULL_POINT
    scene.close()


def test_a_call_asks_once_for_the_identity_of_a_stream() -> None:
    """Until the call ends, a handle means one stream. After it, a stream that got the handle is told apart."""
    scene = Scene("eager", True)
    asked: list[int] = []
    identity = scene.driver.stream_identity

    class Counting(type(scene.driver)):  # type: ignore[misc]  # a class made at run time
        def stream_identity(self, handle: int) -> int:
            asked.append(handle)
            return int(identity(handle))

    scene.driver.__class__ = Counting
    stream = scene.driver.create_stream()
    scene.timeline.record(stream)
    asked.clear()
    scene.timeline.begin_call()
    points = [scene.timeline.record(stream) for _i in range(3)]
    scene.timeline.end_call()
    assert asked == [stream]
    assert len({point >> SEQUENCE_BITS for point in points}) == 1
    scene.driver.destroy_stream(stream)
    assert scene.driver.create_stream() == stream
    scene.timeline.begin_call()
    point = scene.timeline.record(stream)
    scene.timeline.end_call()
    assert point >> SEQUENCE_BITS != points[0] >> SEQUENCE_BITS
    scene.close()


def test_outside_of_calls_a_handle_is_never_trusted() -> None:
    scene = Scene("eager", True)
    old = scene.driver.create_stream()
    scene.timeline.begin_call()
    before = scene.timeline.record(old)
    scene.timeline.record(old)
    scene.timeline.end_call()
    scene.driver.destroy_stream(old)
    assert scene.driver.create_stream() == old
    after = scene.timeline.record(old)
    assert after >> SEQUENCE_BITS != before >> SEQUENCE_BITS
    scene.close()


def test_a_call_of_the_manager_ends_the_trust_in_handles() -> None:
    """Between two calls a stream may be destroyed, and its handle come back."""
    with Rig(small(32), engine=False, wrap=lambda emulated: returning_device(emulated, True)) as rig:
        driver = rig.manager.shared.driver
        timeline = rig.manager.shared.timeline
        old = driver.create_stream()
        with Call(rig.manager.shared, "a call"):
            before = timeline.record(old)
        driver.destroy_stream(old)
        assert driver.create_stream() == old
        assert timeline.record(old) >> SEQUENCE_BITS != before >> SEQUENCE_BITS
        driver.destroy_stream(old)
