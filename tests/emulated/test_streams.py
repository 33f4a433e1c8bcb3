"""Streams, events and gates of the emulated device, on all three schedules."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.emulated.driver import DEFAULT_STREAM, EmulatedDriver
from kv_cache_manager_v2.errors import ConfigError, CuError, LogicError
from kv_cache_manager_v2.ids import Stream
from tests.support.device_rig import SCHEDULES, SLOT_BYTES, DeviceRig, rig

# A program: (kind, stream, first operand, second operand); an event is recorded after each step, numbered like it.
Step = tuple[str, int, int, int]

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


@every_schedule
def test_work_of_one_stream_runs_in_order(schedule: str) -> None:
    """A copy reads what the copy before it on the same stream wrote."""
    with rig(schedule) as r:
        r.fill(r.host.address(0), 7)
        stream = r.streams[0]
        r.driver.copy(stream, r.device.address(0), r.host.address(0), SLOT_BYTES)
        r.driver.copy(stream, r.device.address(1), r.device.address(0), SLOT_BYTES)
        r.driver.copy(stream, r.host.address(1), r.device.address(1), SLOT_BYTES)
        r.driver.synchronize()
        assert r.value(r.host.address(1)) == 7
        assert r.driver.copies_made == 3
        assert r.driver.bytes_copied == 3 * SLOT_BYTES


@every_schedule
def test_nothing_behind_a_gate_runs_until_it_opens(schedule: str) -> None:
    """A closed gate holds its own stream and those that wait for it, and no other."""
    with rig(schedule) as r:
        first, second, third = r.streams
        ran: list[int] = []
        gate = r.driver.gate(first)
        r.driver.launch(first, lambda: ran.append(1))
        event = r.driver.create_event()
        r.driver.record_event(event, first)
        r.driver.wait_event(second, event)
        r.driver.launch(second, lambda: ran.append(2))
        r.driver.launch(third, lambda: ran.append(3))
        other = r.driver.create_event()
        r.driver.record_event(other, third)
        r.driver.synchronize_event(other)
        assert ran == [3]
        assert not r.driver.query_event(event)
        assert not r.is_over(second)
        gate.open()
        gate.open()  # a second time changes nothing
        r.driver.synchronize()
        assert ran == [3, 1, 2]
        r.driver.destroy_event(event)
        r.driver.destroy_event(other)


@every_schedule
def test_order_waits_for_one_stream_and_raises_its_errors(schedule: str) -> None:
    """Work queued on the stream so far, and what that waits for; the work of other streams goes on pending."""
    with rig(schedule) as r:
        first, second, third = r.streams
        gate = r.driver.gate(third)
        r.fill(r.host.address(0), 7)
        r.driver.copy(first, r.device.address(0), r.host.address(0), SLOT_BYTES)
        event = r.driver.create_event()
        r.driver.record_event(event, first)
        r.driver.wait_event(second, event)
        r.driver.copy(second, r.host.address(1), r.device.address(0), SLOT_BYTES)
        r.driver.order(second)
        assert r.value(r.host.address(1)) == 7
        assert not r.is_over(third)
        r.driver.launch(first, lambda: [].pop())
        with pytest.raises(CuError, match="pop from empty list"):
            r.driver.order(first)
        r.driver.order(first)
        with pytest.raises(LogicError, match="no stream 12345"):
            r.driver.order(Stream(12345))
        gate.open()
        r.driver.destroy_event(event)


@every_schedule
def test_synchronize_names_what_can_never_run(schedule: str) -> None:
    """With a gate closed, waiting for the device is an error that names the streams and the gate, and changes nothing."""
    with rig(schedule, stall_s=0.05) as r:
        gate = r.driver.gate(r.streams[0])
        event = r.driver.create_event()
        r.driver.record_event(event, r.streams[0])
        r.driver.wait_event(r.streams[1], event)
        r.driver.launch(r.streams[1], lambda: None)
        with pytest.raises(LogicError, match=rf"stream {r.streams[0]}: 1 operations pending.*gate \d+ on stream {r.streams[0]}"):
            r.driver.synchronize()
        with pytest.raises(LogicError, match=rf"stream {r.streams[1]}: 2 operations pending"):
            r.driver.synchronize_event(event)
        gate.open()
        r.driver.synchronize_event(event)
        r.driver.destroy_event(event)


@every_schedule
def test_an_event_is_complete_until_it_is_recorded(schedule: str) -> None:
    """A fresh event is complete, waiting for it is a no-op; recording it again moves the mark."""
    with rig(schedule) as r:
        event = r.driver.create_event()
        assert r.driver.query_event(event)
        r.driver.synchronize_event(event)
        r.driver.wait_event(r.streams[0], event)
        gate = r.driver.gate(r.streams[0])
        r.driver.record_event(event, r.streams[0])
        assert not r.driver.query_event(event)
        r.driver.record_event(event, r.streams[1])
        assert r.driver.query_event(event)
        gate.open()
        r.driver.destroy_event(event)


@every_schedule
def test_a_wait_takes_the_record_of_its_own_time(schedule: str) -> None:
    """Recording the event anew after the wait was queued does not change what the wait waits for."""
    with rig(schedule) as r:
        event = r.driver.create_event()
        gate = r.driver.gate(r.streams[0])
        r.driver.record_event(event, r.streams[0])
        r.driver.wait_event(r.streams[1], event)
        r.driver.record_event(event, r.streams[2])
        ran: list[int] = []
        r.driver.launch(r.streams[1], lambda: ran.append(1))
        assert not r.is_over(r.streams[1])
        assert not ran
        r.driver.destroy_event(event)  # the wait stays good
        gate.open()
        r.driver.synchronize()
        assert ran == [1]


@every_schedule
def test_the_source_of_a_copy_is_read_when_it_runs(schedule: str) -> None:
    """The bytes are those at run time, but the lists of addresses are the caller's to overwrite at once."""
    with rig(schedule) as r:
        r.fill(r.host.address(0), 1)
        r.fill(r.host.address(1), 2)
        gate = r.driver.gate(r.streams[0])
        destinations = [r.device.address(0), r.device.address(1)]
        sources = [r.host.address(0), r.host.address(1)]
        r.driver.copy_batch(r.streams[0], destinations, sources, SLOT_BYTES)
        destinations[:] = [0, 0]
        sources.clear()
        r.fill(r.host.address(0), 9)
        gate.open()
        r.driver.synchronize()
        assert r.value(r.device.address(0)) == 9
        assert r.value(r.device.address(1)) == 2


@every_schedule
def test_one_byte_and_empty_copies(schedule: str) -> None:
    """A copy of one byte works in each direction; no tasks, or no bytes, are a no-op; a negative size is an error."""
    with rig(schedule) as r:
        device, host = r.device.address(3) + 1, r.host.address(3) + 3
        for destination, source in ((device, host), (host, device), (device, device + 8), (host, host + 8)):
            r.driver.write_bytes(destination, b"a")
            r.driver.write_bytes(source, b"b")
            r.driver.copy_batch(r.streams[0], [destination], [source], 1)
            r.driver.synchronize()
            assert r.driver.read_bytes(destination, 1) == b"b"
            r.driver.write_bytes(source, b"c")
            r.driver.copy(r.streams[0], destination, source, 1)
            r.driver.synchronize()
            assert r.driver.read_bytes(destination, 1) == b"c"
        before = r.driver.copies_made
        r.driver.copy_batch(r.streams[0], [], [], 17)
        r.driver.copy(r.streams[0], device, host, 0)
        r.driver.synchronize()
        assert r.driver.copies_made == before
        with pytest.raises(LogicError, match="negative"):
            r.driver.copy(r.streams[0], device, host, -1)
        with pytest.raises(LogicError, match="1 destinations but 2 sources"):
            r.driver.copy_batch(r.streams[0], [device], [host, host], 1)


@every_schedule
def test_destroyed_streams_and_events_are_refused(schedule: str) -> None:
    """A handle that was destroyed or never given out is an error that says so; work queued before still runs."""
    with rig(schedule) as r:
        stream = r.driver.create_stream()
        gate = r.driver.gate(stream)
        ran: list[int] = []
        r.driver.launch(stream, lambda: ran.append(1))
        r.driver.destroy_stream(stream)
        with pytest.raises(LogicError, match=f"no stream {stream}"):
            r.driver.launch(stream, lambda: None)
        with pytest.raises(LogicError, match=f"no stream {stream}"):
            r.driver.destroy_stream(stream)
        gate.open()
        r.driver.synchronize()
        assert ran == [1]
        event = r.driver.create_event()
        r.driver.destroy_event(event)
        with pytest.raises(LogicError, match=f"query_event: no event {event}"):
            r.driver.query_event(event)
        with pytest.raises(LogicError, match=f"wait_event: no event {event}"):
            r.driver.wait_event(r.streams[0], event)
        with pytest.raises(LogicError, match="default stream"):
            r.driver.destroy_stream(DEFAULT_STREAM)


def test_a_kernel_must_not_wait_for_its_own_device() -> None:
    """A kernel that synchronizes would wait for itself: an error, which the next call raises where the kernel has a thread."""
    for schedule in ("eager", "random", "threads"):
        with rig(schedule) as r:
            gate = r.driver.gate(r.streams[0])
            r.driver.launch(r.streams[0], r.driver.synchronize)
            with pytest.raises(LogicError, match="wait for itself"):
                r.let_go(gate)


def test_eager_runs_on_the_calling_thread_at_once() -> None:
    """On `eager`, work that may run has run when the call returns."""
    with rig("eager") as r:
        threads: list[int] = []
        r.driver.launch(r.streams[0], lambda: threads.append(threading.get_ident()))
        assert threads == [threading.get_ident()]
        gate = r.driver.gate(r.streams[0])
        r.driver.launch(r.streams[0], lambda: threads.append(threading.get_ident()))
        assert len(threads) == 1
        gate.open()
        assert threads == [threading.get_ident()] * 2


def test_who_waits_on_threads_runs_no_code_of_the_engine() -> None:
    """On `threads`, a thread that waits for the device carries out copies at most: a function could wait for that very thread."""
    with rig("threads") as r:
        ran: list[int] = []
        for stream in r.streams:
            for slot in range(8):
                r.driver.copy(stream, r.device.address(slot), r.host.address(slot), SLOT_BYTES)
                r.driver.launch(stream, lambda: ran.append(threading.get_ident()))
        r.finish(r.streams[1])
        r.driver.synchronize()
        assert len(ran) == 24
        assert threading.get_ident() not in ran
        assert r.driver.copies_made == 24


@every_schedule
def test_neighbours_of_a_batch_are_copied_like_others(schedule: str) -> None:
    """Runs of slots on both sides, on one side only, and single slots, up and down: all bytes arrive, and each slot counts once."""
    to, of = [0, 1, 2, 9, 4, 12, 11, 10], [3, 4, 5, 6, 8, 0, 1, 2]
    with rig(schedule) as r:
        for slot in range(16):
            r.fill(r.host.address(slot), 100 + slot)
            r.fill(r.device.address(slot), 200)
        destinations, sources = [r.device.address(slot) for slot in to], [r.host.address(slot) for slot in of]
        r.driver.copy_batch(r.streams[0], destinations, sources, SLOT_BYTES)
        r.driver.synchronize()
        expected = dict.fromkeys(range(16), 200) | {to[i]: 100 + of[i] for i in range(8)}
        assert {slot: r.value(r.device.address(slot)) for slot in range(16)} == expected
        assert (r.driver.copies_made, r.driver.bytes_copied) == (8, 8 * SLOT_BYTES)


def test_threads_run_work_elsewhere_and_streams_at_the_same_time() -> None:
    """On `threads`, two streams that wait for each other's host code both get on: they have threads of their own."""
    with rig("threads") as r:
        meeting = threading.Barrier(2, timeout=10)
        idents: list[int] = []

        def meet() -> None:
            meeting.wait()
            idents.append(threading.get_ident())

        r.driver.launch(r.streams[0], meet)
        r.driver.launch(r.streams[1], meet)
        r.driver.synchronize()
        assert len(set(idents)) == 2
        assert threading.get_ident() not in idents


def test_a_wrong_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'lazy'.*eager, threads, random"):
        EmulatedDriver("lazy")
    with pytest.raises(ConfigError, match="transfer_timeout"):
        EmulatedDriver("eager", transfer_timeout=0)
    assert "random (seed 5)" in EmulatedDriver("random", 5).describe()


# --- programs


@st.composite
def programs(draw: st.DrawFn, ordered: bool) -> list[Step]:
    """Copies among 6 slots on 3 streams, with waits for earlier steps. `ordered`: each step waits for the one before it."""
    count = draw(st.integers(1, 24))
    steps: list[Step] = []
    for i in range(count):
        stream = draw(st.integers(0, 2))
        if ordered and i > 0:
            steps.append(("wait", stream, len(steps) - 1, 0))
        elif not ordered and steps and draw(st.booleans()):
            steps.append(("wait", stream, draw(st.integers(0, len(steps) - 1)), 0))
        steps.append(("copy", stream, draw(st.integers(0, 5)), draw(st.integers(0, 5))))
    return steps


def play(r: DeviceRig, steps: list[Step]) -> list[int]:
    """Queue the program; afterwards the log holds each step's number in the order in which they ran."""
    log: list[int] = []
    events: list[int] = []

    def logger(number: int) -> None:
        log.append(number)

    for number, (kind, stream_number, first, second) in enumerate(steps):
        stream = r.streams[stream_number]
        if kind == "wait":
            r.driver.wait_event(stream, events[first])
        else:
            r.driver.copy(stream, r.device.address(first), r.device.address(second), SLOT_BYTES)

        def ran(step: int = number) -> None:
            logger(step)

        r.driver.launch(stream, ran)
        event = r.driver.create_event()
        r.driver.record_event(event, stream)
        events.append(event)
    r.driver.synchronize()
    for event in events:
        r.driver.destroy_event(event)
    return log


@given(st.sampled_from(SCHEDULES), st.integers(0, 1000), programs(ordered=False))
def test_every_schedule_is_legal(schedule: str, seed: int, steps: list[Step]) -> None:
    """Whatever overtakes what: streams keep their order, no step runs before the step it waits for, and everything runs."""
    with rig(schedule, seed) as r:
        log = play(r, steps)
        assert sorted(log) == list(range(len(steps)))
        when = {number: i for i, number in enumerate(log)}
        for stream in range(3):
            own = [number for number, step in enumerate(steps) if step[1] == stream]
            assert [when[number] for number in own] == sorted(when[number] for number in own)
        for number, step in enumerate(steps):
            if step[0] == "wait":
                assert when[step[2]] < when[number]


@given(st.sampled_from(SCHEDULES), st.integers(0, 1000), programs(ordered=True))
def test_ordered_copies_give_the_bytes_of_a_sequence(schedule: str, seed: int, steps: list[Step]) -> None:
    """A program whose steps wait for one another leaves the same bytes on every schedule as one thing after the other."""
    with rig(schedule, seed) as r:
        expected = list(range(6))
        for slot in range(6):
            r.fill(r.device.address(slot), slot)
        for kind, _stream, destination, source in steps:
            if kind == "copy":
                expected[destination] = expected[source]
        play(r, steps)
        assert [r.value(r.device.address(slot)) for slot in range(6)] == expected


@given(st.integers(0, 1000), programs(ordered=False))
def test_one_seed_gives_one_run(seed: int, steps: list[Step]) -> None:
    """`random`: the same seed and calls give the same order."""
    logs = []
    for _i in range(2):
        with rig("random", seed) as r:
            logs.append(play(r, steps))
    assert logs[0] == logs[1]


def test_a_missing_wait_shows_under_some_seed() -> None:
    """`random`: a reader on another stream that does not wait sees old bytes under some seed and new ones under another."""
    seen: set[int] = set()
    for seed in range(30):
        with rig("random", seed) as r:
            r.fill(r.host.address(0), 1)
            r.fill(r.device.address(0), 0)
            r.driver.copy(r.streams[0], r.device.address(0), r.host.address(0), SLOT_BYTES)
            r.driver.copy(r.streams[1], r.host.address(1), r.device.address(0), SLOT_BYTES)
            r.driver.synchronize()
            seen.add(r.value(r.host.address(1)))
    assert seen == {0, 1}


def test_copies_of_a_batch_are_unordered() -> None:
    """`random`: two copies of one batch to the same place end either way, since nothing orders them."""
    seen: set[int] = set()
    for seed in range(30):
        with rig("random", seed) as r:
            r.fill(r.host.address(0), 1)
            r.fill(r.host.address(1), 2)
            r.driver.copy_batch(r.streams[0], [r.device.address(0)] * 2, [r.host.address(0), r.host.address(1)], SLOT_BYTES)
            r.driver.synchronize()
            seen.add(r.value(r.device.address(0)))
    assert seen == {1, 2}


def test_polling_alone_completes_work() -> None:
    """`random`: pending work advances whenever the driver is called, so a loop that asks comes to an end."""
    for seed in range(10):
        with rig("random", seed) as r:
            event = r.driver.create_event()
            gates = [r.driver.gate(stream) for stream in r.streams]
            for i in range(15):
                r.driver.copy(r.streams[i % 3], r.device.address(i + 1), r.device.address(i), SLOT_BYTES)
                if i:
                    r.driver.wait_event(r.streams[(i + 1) % 3], event)
                r.driver.record_event(event, r.streams[i % 3])
            for gate in gates:
                gate.open()
            polls = 0
            while not r.driver.query_event(event):
                polls += 1
                assert polls < 10_000
            r.driver.destroy_event(event)


def test_the_default_stream_always_exists() -> None:
    """Stream 0 needs no creation and is no leak."""
    driver = EmulatedDriver()
    ran: list[int] = []
    driver.launch(Stream(0), lambda: ran.append(1))
    assert ran == [1]
    assert driver.streams_live == 0
    driver.close()
    driver.close()
    with pytest.raises(LogicError, match="closed"):
        driver.launch(Stream(0), lambda: None)
