"""The emulated device's address space: which memory may be used, and which call is wrong when it may not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.device.driver import GATE_FAILED
from kv_cache_manager_v2.device.os_memory import PAGE_BYTES, format_bytes, map_range, unmap_range
from kv_cache_manager_v2.emulated.address_space import RangeSet
from kv_cache_manager_v2.emulated.driver import GRANULARITY, EmulatedDriver
from kv_cache_manager_v2.errors import LogicError
from kv_cache_manager_v2.ids import Stream
from tests.support.device_rig import SCHEDULES, SLOT_BYTES, rig

STREAM = Stream(0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_outside_mapped_memory_are_refused(schedule: str) -> None:
    """A copy that leaves the mapped range by one byte, on either side, is refused with the address and its owner."""
    driver = EmulatedDriver(schedule)
    base = driver.reserve(2 * GRANULARITY)
    chunk = driver.create_chunk(GRANULARITY)
    driver.map_chunk(base, GRANULARITY, chunk)
    with pytest.raises(LogicError, match=f"destination .*{base:#x}.*reservation #1"):
        driver.copy(STREAM, base, base, 1)  # mapped, but without access
    driver.set_access(base, GRANULARITY)
    driver.copy(STREAM, base, base + GRANULARITY - 1, 1)
    with pytest.raises(LogicError, match=f"source .*{base + GRANULARITY - 1:#x}.*2.0 MiB of 4.0 MiB mapped"):
        driver.copy(STREAM, base, base + GRANULARITY - 1, 2)
    with pytest.raises(LogicError, match="belongs to nothing known"):
        driver.copy(STREAM, base - 1, base, 1)
    with pytest.raises(LogicError, match=f"copy_batch: source .*{base + GRANULARITY:#x}"):
        driver.copy_batch(STREAM, [base, base], [base, base + GRANULARITY], 1)
    with pytest.raises(LogicError, match="read_bytes"):
        driver.read_bytes(base + GRANULARITY, 1)
    with pytest.raises(LogicError, match="write_bytes"):
        driver.write_bytes(base - 1, b"ab")
    driver.check_invariants()
    driver.synchronize()
    driver.unmap(base, GRANULARITY)
    with pytest.raises(LogicError, match=r"0 B of 4\.0 MiB mapped"):
        driver.copy(STREAM, base, base, 1)
    driver.release_reservation(base, 2 * GRANULARITY)
    with pytest.raises(LogicError, match="belonged to a freed reservation #1"):
        driver.copy(STREAM, base, base, 1)
    driver.destroy_chunk(chunk)
    driver.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_taken_away_under_queued_work_is_an_error(schedule: str) -> None:
    """A copy is checked again when it runs: memory that was unmapped meanwhile is an error, not a crash."""
    with rig(schedule) as r:
        gate = r.driver.gate(r.streams[0])
        r.driver.copy(r.streams[0], r.device.address(0), r.device.address(1), SLOT_BYTES)
        r.device.resize(0)
        with pytest.raises(LogicError, match="copy, when it ran: destination"):
            r.let_go(gate)
        r.driver.synchronize()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_taken_away_under_a_file_transfer_is_an_error(schedule: str) -> None:
    """The gate opens as failed, and the next call says whose memory was gone."""
    with rig(schedule) as r:
        gate = r.driver.gate(r.streams[0])
        read = r.driver.read_file(r.streams[0], r.disk.fd, 0, r.host.address(0), SLOT_BYTES)
        r.host.resize(0)
        with pytest.raises(LogicError, match=r"read_file, when it ran: .*belonged to an unregistered host range"):
            r.let_go(gate)
        r.driver.synchronize()
        assert r.driver.poll_gate(read) == GATE_FAILED
        r.driver.release_gate(read)


def test_unregistered_host_memory_is_refused() -> None:
    """Host memory may be copied or transferred only between registration and its undoing."""
    driver = EmulatedDriver()
    address = map_range(2 * PAGE_BYTES)
    with pytest.raises(LogicError, match="nor registered host memory"):
        driver.copy(STREAM, address, address, 1)
    driver.host_register(address, PAGE_BYTES)
    driver.copy(STREAM, address, address + 1, 1)
    with pytest.raises(LogicError, match="belongs to host range"):
        driver.copy(STREAM, address, address + PAGE_BYTES - 1, 2)
    with pytest.raises(LogicError, match="registered already"):
        driver.host_register(address, 2 * PAGE_BYTES)
    with pytest.raises(LogicError, match="is not a registered range"):
        driver.host_unregister(address, 2 * PAGE_BYTES)
    driver.host_unregister(address, PAGE_BYTES)
    with pytest.raises(LogicError, match="belonged to an unregistered host range"):
        driver.copy(STREAM, address, address, 1)
    driver.close()
    unmap_range(address, 2 * PAGE_BYTES)


def test_device_memory_is_no_target_of_files() -> None:
    """A file transfer reaches registered host memory only; a device address is refused when it is submitted."""
    with rig("eager") as r:
        with pytest.raises(LogicError, match=r"read_file: .*not registered host memory.*device reservation"):
            r.driver.read_file(r.streams[0], r.disk.fd, 0, r.device.address(0), SLOT_BYTES)
        with pytest.raises(LogicError, match="is device memory"):
            r.driver.host_register(r.device.base, PAGE_BYTES)


def test_mapping_mistakes_are_refused_and_change_nothing() -> None:
    """Chunks: exact sizes, aligned places inside one reservation, one place at a time, and nothing is freed while it is in use."""
    driver = EmulatedDriver()
    base = driver.reserve(2 * GRANULARITY)
    chunk, other = driver.create_chunk(GRANULARITY), driver.create_chunk(GRANULARITY)
    assert base % GRANULARITY == 0
    for nbytes in (0, -GRANULARITY, GRANULARITY + 1):
        with pytest.raises(LogicError, match="multiple of the granularity"):
            driver.reserve(nbytes)
        with pytest.raises(LogicError, match="multiple of the granularity"):
            driver.create_chunk(nbytes)
    with pytest.raises(LogicError, match=f"has {GRANULARITY} bytes, not {2 * GRANULARITY}"):
        driver.map_chunk(base, 2 * GRANULARITY, chunk)
    with pytest.raises(LogicError, match="not an aligned part"):
        driver.map_chunk(base + PAGE_BYTES, GRANULARITY, chunk)
    with pytest.raises(LogicError, match="not an aligned part"):
        driver.map_chunk(base + 2 * GRANULARITY, GRANULARITY, chunk)
    driver.map_chunk(base, GRANULARITY, chunk)
    with pytest.raises(LogicError, match=f"mapped already, at {base:#x}"):
        driver.map_chunk(base + GRANULARITY, GRANULARITY, chunk)
    with pytest.raises(LogicError, match="is mapped already"):
        driver.map_chunk(base, GRANULARITY, other)
    with pytest.raises(LogicError, match="still mapped"):
        driver.destroy_chunk(chunk)
    with pytest.raises(LogicError, match="still mapped"):
        driver.release_reservation(base, 2 * GRANULARITY)
    with pytest.raises(LogicError, match="not exactly one mapped chunk"):
        driver.unmap(base, 2 * GRANULARITY)
    with pytest.raises(LogicError, match="not exactly one mapped chunk"):
        driver.set_access(base + GRANULARITY, GRANULARITY)
    assert (driver.chunks_live, driver.mapped_bytes) == (2, GRANULARITY)
    driver.check_invariants()
    driver.unmap(base, GRANULARITY)
    with pytest.raises(LogicError, match="is not a reservation"):
        driver.release_reservation(base, GRANULARITY)
    driver.release_reservation(base, 2 * GRANULARITY)
    driver.destroy_chunk(chunk)
    with pytest.raises(LogicError, match=f"no chunk {chunk}"):
        driver.destroy_chunk(chunk)
    driver.destroy_chunk(other)
    driver.close()


def test_what_is_not_given_back_is_named_at_the_end() -> None:
    """Closing names every leak: mapping, reservation, chunk, host range, stream, event, gate; and frees the device memory."""
    with rig("eager") as r:
        driver = EmulatedDriver()
        base = driver.reserve(GRANULARITY)
        chunk = driver.create_chunk(GRANULARITY)
        driver.map_chunk(base, GRANULARITY, chunk)
        memory = map_range(PAGE_BYTES)
        driver.host_register(memory, PAGE_BYTES)
        stream = driver.create_stream()
        event = driver.create_event()
        gate = driver.read_file(stream, r.disk.fd, 0, memory, 16)
        with pytest.raises(LogicError) as caught:
            driver.close()
        for text in (
            "7 things not freed",
            f"mapping [{base:#x}",
            "device reservation #1",
            f"chunk {chunk} of",
            f"registered host range [{memory:#x}",
            f"stream {stream}",
            f"event {event}",
            f"gate {gate} of the read of 16 bytes",
        ):
            assert text in str(caught.value)
        driver.close()
        unmap_range(memory, PAGE_BYTES)


def test_a_device_closed_with_stuck_work_says_so() -> None:
    """A gate that the test forgot is named at the end too."""
    driver = EmulatedDriver()
    driver.gate(Stream(0))
    with pytest.raises(LogicError, match=r"can never run.*gate 1 on stream 0"):
        driver.close()


def test_a_new_chunk_is_readable_and_an_unmapped_one_is_gone() -> None:
    """Fresh device memory can be read; a remapped place need not have the old bytes, but it is usable at the same address."""
    driver = EmulatedDriver()
    base = driver.reserve(GRANULARITY)
    for _i in range(2):
        chunk = driver.create_chunk(GRANULARITY)
        driver.map_chunk(base, GRANULARITY, chunk)
        driver.set_access(base, GRANULARITY)
        driver.set_access(base, GRANULARITY)  # twice is harmless
        assert len(driver.read_bytes(base + GRANULARITY - 8, 8)) == 8
        driver.write_bytes(base, b"12345678")
        assert driver.read_bytes(base, 8) == b"12345678"
        driver.unmap(base, GRANULARITY)
        driver.destroy_chunk(chunk)
    driver.release_reservation(base, GRANULARITY)
    driver.close()


def test_a_reservation_of_many_terabytes_costs_nothing() -> None:
    """Address space is not memory: a simulated device may be far larger than this machine."""
    driver = EmulatedDriver()
    base = driver.reserve(8 << 40)
    driver.release_reservation(base, 8 << 40)
    driver.close()


def test_sizes_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 << 20, 5 << 30, 1 << 42)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
        "4.0 TiB",
    ]


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 8)), max_size=30), st.integers(0, 40), st.integers(1, 9)
)
def test_range_sets_agree_with_sets_of_bytes(changes: list[tuple[bool, int, int]], begin: int, length: int) -> None:
    """Adding, removing and asking give what a plain set of addresses gives."""
    ranges, model = RangeSet(), set[int]()
    for adding, start, size in changes:
        span = set(range(start, start + size))
        if adding and not model & span:
            assert not ranges.touches(start, start + size)
            ranges.ranges = ranges.with_range(start, start + size)
            model |= span
        elif not adding and span <= model:
            assert ranges.covers(start, start + size)
            ranges.ranges = ranges.without_range(start, start + size)
            model -= span
        ranges.check_invariants()
    asked = set(range(begin, begin + length))
    assert ranges.covers(begin, begin + length) == (asked <= model)
    assert ranges.touches(begin, begin + length) == bool(asked & model)
