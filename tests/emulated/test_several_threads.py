"""The emulated device under several threads, under interruptions, without threads, and after a fork."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest

from kv_cache_manager_v2.build import COMPILED
from kv_cache_manager_v2.emulated.driver import EmulatedDriver
from kv_cache_manager_v2.errors import LogicError, OutOfMemoryError
from tests.support.device_rig import SCHEDULES, SLOT_BYTES, DeviceRig, rig
from tests.support.interrupts import interruptions

DEVICE = ("kv_cache_manager_v2/emulated/", "device/file_transfers.py", "device/waiters.py")
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


@contextmanager
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@every_schedule
def test_streams_of_several_threads(schedule: str) -> None:
    """Each thread drives a stream of its own, with every kind of work; each stream's order holds and every byte arrives."""
    errors: list[BaseException] = []

    def drive(r: DeviceRig, number: int) -> None:
        try:
            stream = r.driver.create_stream()
            order: list[int] = []
            for i in range(60):
                device, host = r.device.address(number), r.host.address(number)
                r.driver.write_bytes(host, bytes([i]) * SLOT_BYTES)
                r.driver.copy(stream, device, host, SLOT_BYTES)
                r.driver.launch(stream, lambda i=i: order.append(i))  # type: ignore[misc]
                gate = r.driver.write_file(stream, r.disk.fd, r.disk.address(number), host, SLOT_BYTES)
                r.driver.wait_gate(stream, gate)
                event = r.driver.create_event()
                r.driver.record_event(event, stream)
                r.driver.synchronize_event(event)
                assert order[-1] == i
                assert r.value(device) == i
                assert r.file_value(number) == i
                r.driver.destroy_event(event)
                r.driver.release_gate(gate)
            r.driver.destroy_stream(stream)
        except BaseException as error:
            errors.append(error)

    with quick_switches(), rig(schedule) as r:
        threads = [threading.Thread(target=drive, args=(r, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []


@every_schedule
def test_a_thread_waits_for_work_that_runs_on_another(schedule: str) -> None:
    """A kernel that waits for its host thread keeps no other thread from the device, and a wait for it ends when it does."""
    with rig(schedule) as r:
        began, may_end = threading.Event(), threading.Event()

        def kernel() -> None:
            began.set()
            assert may_end.wait(10)

        def drive() -> None:
            r.driver.launch(r.streams[0], kernel)
            r.driver.synchronize()

        thread = threading.Thread(target=drive)
        thread.start()
        assert began.wait(10)
        ran: list[int] = []
        r.driver.launch(r.streams[0], lambda: ran.append(2))
        r.driver.launch(r.streams[1], lambda: ran.append(1))
        r.finish(r.streams[1])
        assert ran == [1]
        may_end.set()
        r.finish(r.streams[0])
        assert ran == [1, 2]
        thread.join()


# --- without threads


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_thread_that_cannot_be_had_refuses_the_call_and_nothing_else(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call raises with nothing queued; once threads can be had again, the same call works."""
    started = [0]
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        started[0] += 1
        if started[0] >= nth:
            raise RuntimeError("can't start new thread")
        real(thread)

    with rig("threads") as r:
        monkeypatch.setattr(threading.Thread, "start", start)
        ran: list[int] = []
        refused: list[int] = []
        for number, stream in enumerate(r.streams):
            try:
                r.driver.launch(stream, lambda number=number: ran.append(number))  # type: ignore[misc]
            except OutOfMemoryError:
                refused.append(number)
        assert refused == list(range(nth - 1, 3))
        r.driver.check_invariants()
        monkeypatch.undo()
        for number in refused:
            r.driver.launch(r.streams[number], lambda number=number: ran.append(number))  # type: ignore[misc]
        r.driver.synchronize()
        assert sorted(ran) == [0, 1, 2]


def test_a_file_transfer_whose_stream_gets_no_thread_leaves_no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with rig("threads") as r:
        monkeypatch.setattr(threading.Thread, "start", start)
        gates: list[int] = []
        with pytest.raises(OutOfMemoryError, match="cannot start a thread"):
            r.driver.read_files(r.streams[0], r.disk.fd, [0, 0], [r.host.address(0), r.host.address(1)], SLOT_BYTES, gates)
        assert gates == []
        assert r.driver.gates_live == 0
        monkeypatch.undo()


# --- interruptions


def calls(r: DeviceRig, order: list[int]) -> None:
    """Something of everything, with work that waits for other work."""
    a, b, _c = r.streams
    event = r.driver.create_event()
    r.driver.launch(a, lambda: order.append(1))
    for slot in range(4):
        r.driver.copy(a, r.device.address(slot), r.host.address(slot), SLOT_BYTES)
    r.driver.record_event(event, a)
    r.driver.wait_event(b, event)
    r.driver.launch(b, lambda: order.append(2))
    gate = r.driver.write_file(b, r.disk.fd, r.disk.address(0), r.host.address(0), SLOT_BYTES)
    r.driver.wait_gate(b, gate)
    r.driver.launch(b, lambda: order.append(3))
    r.driver.synchronize_event(event)
    r.driver.synchronize()


@every_schedule
def test_an_interruption_at_any_place_kills_no_stream(schedule: str) -> None:
    """Whatever was queued still runs, in order and once, and later work too."""
    if COMPILED:
        pytest.skip("compiled code handles signals only where it calls interpreted code")
    for interrupter in interruptions(DEVICE, dense=41, stride=7):
        with rig(schedule, seed=interrupter.nth) as r:
            order: list[int] = []
            error = interrupter.run(partial(calls, r, order))
            assert isinstance(error, KeyboardInterrupt) == interrupter.reached, error
            r.driver.synchronize()
            assert order == sorted(set(order)), f"{interrupter.where}: {order}"
            for stream in r.streams:
                r.driver.launch(stream, lambda order=order: order.append(9))  # type: ignore[misc]
            r.driver.synchronize()
            assert order.count(9) == 3, f"{interrupter.where}: {order}"
            for event in list(range(1, 200)):
                _destroy(r.driver, event)


def _destroy(driver: EmulatedDriver, handle: int) -> None:
    """What an interrupted call may have made and not returned."""
    for call in (driver.destroy_event, driver.release_gate):
        with suppress(LogicError):
            call(handle)


# --- another process


def in_child(check: Any) -> int:
    """Run a check in a child process; its exit status, 0 if it returned."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            check()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@every_schedule
def test_a_forked_child_is_refused_and_may_close_the_device(schedule: str) -> None:
    """Every call says why; closing touches nothing of the parent's, whose pending work then goes on."""
    with rig(schedule) as r:
        stream = r.streams[0]
        gate = r.driver.gate(stream)
        r.fill(r.host.address(0), 7)
        r.driver.copy(stream, r.device.address(0), r.host.address(0), SLOT_BYTES)
        event = r.driver.create_event()

        def check() -> None:
            for call, arguments in (
                ("create_stream", ()),
                ("record_event", (event, stream)),
                ("query_event", (event,)),
                ("copy", (stream, r.device.address(0), r.host.address(0), 8)),
                ("write_file", (stream, r.disk.fd, 0, r.host.address(0), 8)),
                ("synchronize", ()),
                ("unmap", (r.device.address(0), 8)),
                ("poll_gate", (5,)),
                ("destroy_stream", (stream,)),
            ):
                with pytest.raises(LogicError, match=r"os\.fork"):
                    getattr(r.driver, call)(*arguments)
            r.driver.close()

        assert in_child(check) == 0
        r.driver.destroy_event(event)
        r.let_go(gate)
        assert r.value(r.device.address(0)) == 7
