"""Launched functions that raise: the error waits for a call that waits for the work, and no other call meets it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kv_cache_manager_v2.emulated.driver import EmulatedDriver
from kv_cache_manager_v2.errors import ConfigError, CuError
from tests.support.device_rig import SCHEDULES, SLOT_BYTES, rig

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def raising(error: BaseException) -> Callable[[], None]:
    def kernel() -> None:
        raise error

    return kernel


@every_schedule
@pytest.mark.parametrize("held", [False, True])
def test_a_kernels_error_is_reported_once_to_the_call_that_waits(schedule: str, held: bool) -> None:
    """As one of our errors, with the cause; whatever else is called before goes its way, and so does the stream."""
    with rig(schedule) as r:
        stream = r.streams[0]
        gate = r.driver.gate(stream) if held else None
        cause = ValueError("kernel fault")
        ran: list[int] = []
        r.driver.launch(stream, raising(cause))
        r.driver.launch(stream, lambda: ran.append(1))
        if gate is not None:
            gate.open()
        for slot in range(8):
            r.driver.copy(r.streams[1], r.device.address(slot), r.host.address(slot), SLOT_BYTES)
            event = r.driver.create_event()
            r.driver.record_event(event, r.streams[1])
            r.driver.query_event(event)
            r.driver.wait_event(r.streams[2], event)
            r.driver.destroy_event(event)
        with pytest.raises(CuError, match=f"launched on stream {stream} raised ValueError: kernel fault") as caught:
            r.driver.synchronize()
        assert caught.value.__cause__ is cause
        assert caught.value.call == "launch"
        r.driver.synchronize()
        assert ran == [1]


@every_schedule
def test_an_event_reports_what_failed_before_it_on_its_stream(schedule: str) -> None:
    with rig(schedule) as r:
        first, second = r.streams[:2]
        early, late, other = (r.driver.create_event() for _i in range(3))
        r.driver.record_event(early, first)
        r.driver.launch(first, raising(ValueError("kernel fault")))
        r.driver.record_event(late, first)
        r.driver.record_event(other, second)
        r.driver.synchronize_event(early)
        r.driver.synchronize_event(other)
        with pytest.raises(CuError, match="kernel fault"):
            r.driver.synchronize_event(late)
        r.driver.synchronize_event(late)
        r.driver.synchronize()
        for event in (early, late, other):
            r.driver.destroy_event(event)


@every_schedule
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), ConfigError("ours")], ids=lambda e: type(e).__name__)
def test_errors_of_ours_and_interruptions_are_reported_as_they_are(schedule: str, error: BaseException) -> None:
    with rig(schedule) as r:
        ran: list[int] = []
        r.driver.launch(r.streams[0], raising(error))
        r.driver.launch(r.streams[0], lambda: ran.append(1))
        with pytest.raises(type(error)):
            r.driver.synchronize()
        r.driver.synchronize()
        assert ran == [1]


@every_schedule
def test_errors_that_no_call_waited_for_are_reported_when_the_device_is_closed(schedule: str) -> None:
    """Also those of a stream that is destroyed; of several errors the first is raised, and everything is freed."""
    driver = EmulatedDriver(schedule)
    stream = driver.create_stream()
    for number in range(3):
        driver.launch(stream, raising(ValueError(f"fault {number}")))
    driver.destroy_stream(stream)
    with pytest.raises(CuError, match="fault 0"):
        driver.close()
    driver.close()
    assert driver.leaks() == []
