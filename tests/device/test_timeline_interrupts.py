"""Ctrl-C inside of the timeline: no point gets another point's event, and every event is destroyed at the end."""

from __future__ import annotations

from functools import partial

import pytest

from kv_cache_manager_v2 import EmulatedDriver
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.ids import Stream
from tests.support.drivers import refusing_device
from tests.support.interrupts import interpreted, interruptions

FILES = ("device/timeline.py", "device/line.py")


def _work(timeline: Timeline, streams: list[Stream]) -> None:
    """Records, merges, and finds complete events, of several streams."""
    points = [timeline.record(stream) for _round in range(3) for stream in streams]
    joined = timeline.merge(points[0], points[1])
    assert timeline.done(joined)
    for point in points:
        assert timeline.done(point)
    timeline.create_stream()


@interpreted
def test_an_interrupted_timeline_goes_on() -> None:
    for interrupter in interruptions(FILES):
        driver = EmulatedDriver()
        timeline = Timeline(driver)
        streams = [driver.create_stream() for _stream in range(3)]
        for stream in streams:
            timeline.record(stream)
        interrupter.run(partial(_work, timeline, streams))
        timeline.check_invariants()
        for stream in streams:
            before = timeline.record(stream)
            gate = driver.gate(stream)
            after = timeline.record(stream)
            assert timeline.done(before), f"interrupted at {interrupter.where}"
            assert not timeline.done(after), f"interrupted at {interrupter.where}"
            gate.open()
            assert timeline.done(after)
        timeline.check_invariants()
        timeline.close()
        assert not [leak for leak in driver.leaks() if leak.startswith("event")], f"interrupted at {interrupter.where}"
    assert interrupter.nth > 30


def test_an_event_whose_destruction_was_interrupted_does_not_keep_the_timeline_from_closing() -> None:
    """Ctrl-C comes when an event has just been destroyed."""
    emulated = EmulatedDriver()
    driver = refusing_device(emulated, identifies=True)
    timeline = Timeline(driver)
    stream = emulated.create_stream()
    gate = emulated.gate(stream)
    for _record in range(3):
        timeline.record(stream)
    gate.open()
    driver.refuse(KeyboardInterrupt(), 0, after=True)
    with pytest.raises(KeyboardInterrupt):
        timeline.close()
    timeline.close()
    emulated.destroy_stream(stream)
    emulated.close()
