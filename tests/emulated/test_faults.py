"""Ordered faults: the n-th call of a kind fails, once, a few times or for ever, with the type of the real thing."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2.device.driver import GATE_DONE, GATE_FAILED, Driver
from kv_cache_manager_v2.device.os_memory import PAGE_BYTES, map_range, unmap_range
from kv_cache_manager_v2.emulated.driver import GRANULARITY, EmulatedDriver
from kv_cache_manager_v2.emulated.faults import CALLS
from kv_cache_manager_v2.errors import ConfigError, CuError, HostRegistrationError, KVCacheError, LogicError, OutOfMemoryError
from kv_cache_manager_v2.ids import Stream
from tests.support.device_rig import SCHEDULES, SLOT_BYTES, rig


def outcomes(driver: EmulatedDriver, count: int) -> list[bool]:
    """Which of so many calls of create_event fail."""
    failed = []
    for _i in range(count):
        try:
            driver.destroy_event(driver.create_event())
            failed.append(False)
        except CuError:
            failed.append(True)
    return failed


def test_the_nth_call_fails_and_as_many_as_asked() -> None:
    """nth counts from the next call; times is how many fail from there; None is for ever; `heal` forgets all."""
    driver = EmulatedDriver()
    driver.fail("create_event")
    assert outcomes(driver, 3) == [True, False, False]
    driver.fail("create_event", nth=2, times=2)
    assert outcomes(driver, 5) == [False, True, True, False, False]
    driver.fail("create_event", nth=3, times=None)
    assert outcomes(driver, 5) == [False, False, True, True, True]
    driver.heal()
    assert outcomes(driver, 2) == [False, False]
    driver.fail("create_event", nth=1)
    driver.fail("create_event", nth=3)  # each order counts all calls by itself
    assert outcomes(driver, 4) == [True, False, True, False]
    driver.close()


def test_a_wrong_order_is_refused() -> None:
    driver = EmulatedDriver()
    with pytest.raises(ConfigError, match=r"'cpoy'.*copy_batch"):
        driver.fail("cpoy")
    with pytest.raises(ConfigError, match="nth is 0"):
        driver.fail("copy", nth=0)
    with pytest.raises(ConfigError, match="times is 0"):
        driver.fail("copy", times=0)
    with pytest.raises(ConfigError, match="'short' for a file transfer"):
        driver.fail("copy", effect="short")
    with pytest.raises(ConfigError, match=r"'copy'.*read_file, write_file"):
        driver.hang("copy")
    driver.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_refused_calls_change_nothing_and_have_their_types(schedule: str) -> None:
    """Allocations raise OutOfMemoryError, registration HostRegistrationError, the rest CuError; the next attempt works."""
    driver = EmulatedDriver(schedule)
    driver.fail("reserve")
    with pytest.raises(OutOfMemoryError, match="reserve: injected"):
        driver.reserve(GRANULARITY)
    base = driver.reserve(GRANULARITY)
    driver.fail("create_chunk")
    with pytest.raises(OutOfMemoryError, match="create_chunk: injected"):
        driver.create_chunk(GRANULARITY)
    assert driver.chunks_live == 0
    chunk = driver.create_chunk(GRANULARITY)
    driver.fail("map_chunk")
    with pytest.raises(CuError, match="map_chunk: injected"):
        driver.map_chunk(base, GRANULARITY, chunk)
    assert driver.mapped_bytes == 0
    driver.map_chunk(base, GRANULARITY, chunk)
    driver.fail("set_access")
    with pytest.raises(CuError, match="set_access: injected"):
        driver.set_access(base, GRANULARITY)
    driver.set_access(base, GRANULARITY)
    memory = map_range(PAGE_BYTES)
    driver.fail("host_register")
    with pytest.raises(HostRegistrationError, match="host_register: injected"):
        driver.host_register(memory, PAGE_BYTES)
    assert driver.registered_bytes == 0
    driver.write_bytes(base, b"ab")
    stream = driver.create_stream()
    for call in ("copy", "copy_batch", "launch", "record_event", "wait_event", "query_event", "synchronize_event", "synchronize"):
        driver.fail(call)
    with pytest.raises(CuError) as caught:
        driver.copy(stream, base, base + 1, 1)
    assert (caught.value.call, caught.value.error_code) == ("copy", 999)
    with pytest.raises(CuError, match="copy_batch"):
        driver.copy_batch(stream, [base], [base + 1], 1)
    with pytest.raises(CuError, match="launch"):
        driver.launch(stream, lambda: None)
    event = driver.create_event()
    with pytest.raises(CuError, match="record_event"):
        driver.record_event(event, stream)
    with pytest.raises(CuError, match="wait_event"):
        driver.wait_event(stream, event)
    with pytest.raises(CuError, match="query_event"):
        driver.query_event(event)
    with pytest.raises(CuError, match="synchronize_event"):
        driver.synchronize_event(event)
    with pytest.raises(CuError, match="synchronize"):
        driver.synchronize()
    driver.synchronize()
    assert driver.read_bytes(base, 2) == b"ab"
    assert driver.copies_made == 0
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    driver.unmap(base, GRANULARITY)
    driver.destroy_chunk(chunk)
    driver.release_reservation(base, GRANULARITY)
    driver.close()
    unmap_range(memory, PAGE_BYTES)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("effect", ["error", "short"])
def test_a_failed_read_touches_its_own_gate_only(schedule: str, effect: str) -> None:
    """EIO and a short count surface at the gate of exactly the transfer they hit; the gate opens, and the next try works."""
    with rig(schedule) as r:
        for slot in range(3):
            r.file_fill(slot, 10 + slot)
        r.driver.fail("read_file", nth=2, effect=effect)
        gates = [
            r.driver.read_file(r.streams[0], r.disk.fd, r.disk.address(slot), r.host.address(slot), SLOT_BYTES) for slot in range(3)
        ]
        for gate in gates:
            r.driver.wait_gate(r.streams[0], gate)
        r.driver.synchronize()
        assert [r.driver.poll_gate(gate) for gate in gates] == [GATE_DONE, GATE_FAILED, GATE_DONE]
        assert [r.value(r.host.address(slot)) for slot in (0, 2)] == [10, 12]
        assert r.value(r.host.address(1)) != 11
        text = r.driver.gate_error(gates[1])
        assert f"read of {SLOT_BYTES} bytes at offset {SLOT_BYTES} of file descriptor {r.disk.fd}" in text
        assert ("input/output error" if effect == "error" else f"short by {SLOT_BYTES // 2}") in text
        assert r.driver.gate_error(gates[0]) == ""
        again = r.driver.read_file(r.streams[0], r.disk.fd, r.disk.address(1), r.host.address(1), SLOT_BYTES)
        r.driver.synchronize()
        assert r.driver.poll_gate(again) == GATE_DONE
        assert r.value(r.host.address(1)) == 11
        for gate in [*gates, again]:
            r.driver.release_gate(gate)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_failed_write_surfaces_at_its_gate(schedule: str) -> None:
    with rig(schedule) as r:
        r.fill(r.host.address(0), 5)
        r.driver.fail("write_file", times=None)
        gates = [r.driver.write_file(Stream(0), r.disk.fd, r.disk.address(i), r.host.address(0), SLOT_BYTES) for i in range(2)]
        r.driver.synchronize()
        assert [r.driver.poll_gate(gate) for gate in gates] == [GATE_FAILED] * 2
        assert r.file_value(0) != 5
        for gate in gates:
            r.driver.release_gate(gate)


def test_a_real_short_read_is_an_error() -> None:
    """Reading past the end of a file is a short read: never zeros taken for data."""
    with rig("eager") as r:
        gate = r.driver.read_file(Stream(0), r.disk.fd, 15 * SLOT_BYTES + 100, r.host.address(0), SLOT_BYTES)
        assert r.driver.poll_gate(gate) == GATE_FAILED
        assert "short by 100 of 512 bytes" in r.driver.gate_error(gate)
        bad = r.driver.read_file(Stream(0), 10_000, 0, r.host.address(0), SLOT_BYTES)
        assert r.driver.poll_gate(bad) == GATE_FAILED
        assert "errno 9" in r.driver.gate_error(bad)
        r.driver.release_gate(gate)
        r.driver.release_gate(bad)


class Foreign(BaseException):
    """A class that the package has never heard of."""


def test_every_call_of_the_seam_can_be_told_to_fail() -> None:
    """All but those that make no call of the device; the calls for many files or gates count as the call for one."""
    seam = {name for name in dir(Driver) if not name.startswith("_") and callable(getattr(Driver, name))}
    assert set(CALLS) == seam - {"describe", "granularity", "protect_file", "unprotect_file", "watch_gates"} - {
        "read_files",
        "write_files",
        "wait_gates",
    }


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt("given"), Foreign, MemoryError()], ids=repr)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_fails_with_the_exception_that_was_ordered(call: str, error: BaseException | type[BaseException] | None) -> None:
    """Before anything is changed, as often as ordered; the same call then works."""
    with rig("eager") as r:
        driver = EmulatedDriver()
        stream = driver.create_stream()
        event, range_address = driver.create_event(), driver.reserve(2 * GRANULARITY)
        chunk, spare = driver.create_chunk(GRANULARITY), driver.create_chunk(GRANULARITY)
        driver.map_chunk(range_address, GRANULARITY, chunk)
        host, fresh = map_range(PAGE_BYTES), map_range(PAGE_BYTES)
        driver.host_register(host, PAGE_BYTES)
        gate = driver.read_file(stream, r.disk.fd, 0, host, 0)
        empty = driver.reserve(GRANULARITY)
        arguments: dict[str, tuple[object, ...]] = {
            "reserve": (GRANULARITY,),
            "release_reservation": (empty, GRANULARITY),
            "create_chunk": (GRANULARITY,),
            "destroy_chunk": (spare,),
            "map_chunk": (range_address + GRANULARITY, GRANULARITY, spare),
            "unmap": (range_address, GRANULARITY),
            "set_access": (range_address, GRANULARITY),
            "host_register": (fresh, PAGE_BYTES),
            "host_unregister": (host, PAGE_BYTES),
            "destroy_stream": (stream,),
            "destroy_event": (event,),
            "record_event": (event, stream),
            "order": (stream,),
            "wait_event": (stream, event),
            "query_event": (event,),
            "synchronize_event": (event,),
            "copy": (stream, host, host, 1),
            "copy_batch": (stream, [host], [host], 1),
            "launch": (stream, lambda: None),
            "read_file": (stream, r.disk.fd, 0, host, 1),
            "write_file": (stream, r.disk.fd, 0, host, 1),
            "wait_gate": (stream, gate),
            "poll_gate": (gate,),
            "gate_error": (gate,),
            "release_gate": (gate,),
        }
        given = arguments.get(call, ())
        expected: type[BaseException] = KVCacheError
        if error is not None:
            expected = error if isinstance(error, type) else type(error)
        before = driver.leaks()
        if error is not None or call not in ("read_file", "write_file"):
            driver.fail(call, times=2, error=error)
            for _i in range(2):
                with pytest.raises(expected):
                    getattr(driver, call)(*given)
            assert driver.leaks() == before
            driver.check_invariants()
        if call != "close":
            getattr(driver, call)(*given)
        driver.heal()
        abandon(driver)
        for address in (host, fresh):
            unmap_range(address, PAGE_BYTES)


def abandon(driver: EmulatedDriver) -> None:
    """The device is closed with what the test allocated and did not free."""
    with pytest.raises(LogicError, match="not freed"):
        driver.close()


def test_a_refused_transfer_among_many_leaves_those_before_it() -> None:
    """The gates of the ones that were queued are known to the caller, and no others."""
    with rig("eager") as r:
        gates: list[int] = []
        addresses = [r.host.address(slot) for slot in range(4)]
        offsets = [r.disk.address(slot) for slot in range(4)]
        r.driver.fail("write_file", nth=3, error=RuntimeError)
        with pytest.raises(RuntimeError, match="injected"):
            r.driver.write_files(r.streams[0], r.disk.fd, offsets, addresses, SLOT_BYTES, gates)
        assert len(gates) == r.driver.gates_live == 2
        for gate in gates:
            assert r.driver.poll_gate(gate) == GATE_DONE
            r.driver.release_gate(gate)


def test_an_order_that_raises_no_exception_is_refused() -> None:
    driver = EmulatedDriver()
    with pytest.raises(ConfigError, match="must be an exception"):
        driver.fail("copy", error=int)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no other effect"):
        driver.fail("read_file", effect="short", error=OSError)
    driver.close()
