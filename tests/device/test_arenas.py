"""Arenas: addresses, growth and shrinking with contents kept, and roll-back at every step that can fail."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.device.arenas import Arena, ChunkPool, DeviceArena, DiskArena
from kv_cache_manager_v2.device.host_arena import HostArena
from kv_cache_manager_v2.device.os_memory import PAGE_BYTES, available_bytes, map_range, populate_range, unmap_range
from kv_cache_manager_v2.emulated.driver import GRANULARITY, EmulatedDriver
from kv_cache_manager_v2.errors import ConfigError, CuError, HostRegistrationError, LogicError, OutOfMemoryError
from tests.support.device_rig import open_descriptors

RANGE = 4 * PAGE_BYTES  # registration ranges in these tests


def stamp(driver: EmulatedDriver, arena: Arena, slots: range) -> None:
    for slot in slots:
        driver.write_bytes(arena.address(slot), slot.to_bytes(2, "little") * (arena.slot_bytes // 2))


def check_stamps(driver: EmulatedDriver, arena: Arena, slots: range) -> None:
    for slot in slots:
        data = driver.read_bytes(arena.address(slot), arena.slot_bytes // 2 * 2)
        assert data == slot.to_bytes(2, "little") * (arena.slot_bytes // 2), slot


@pytest.fixture
def driver() -> Iterator[EmulatedDriver]:
    """A device that is closed after the test, which raises if anything leaked."""
    made = EmulatedDriver()
    yield made
    made.close()


# --- device


def test_device_slots_grow_and_shrink_in_place(driver: EmulatedDriver) -> None:
    """The base never moves; slots straddle chunks; what is kept keeps its bytes; chunks go round through the pool."""
    pool = ChunkPool(driver, GRANULARITY)
    slot_bytes = GRANULARITY // 3 * 2
    arena = DeviceArena(driver, pool, slot_bytes, 10 * GRANULARITY + 1)
    assert arena.reserved_bytes == 11 * GRANULARITY
    assert (pool.in_use, arena.mapped_bytes) == (0, 0)
    arena.resize(5)
    base = arena.base
    stamp(driver, arena, range(5))
    assert arena.address(4) == base + 4 * slot_bytes
    assert pool.in_use == 4
    arena.resize(9)
    check_stamps(driver, arena, range(5))
    arena.resize(3)
    check_stamps(driver, arena, range(3))
    assert (pool.in_use, pool.spare) == (2, 4)
    arena.check_invariants()
    other = DeviceArena(driver, pool, 16, GRANULARITY)
    other.resize(1)
    assert (pool.in_use, pool.spare, driver.chunks_live) == (3, 3, 6)
    pool.trim()
    assert driver.chunks_live == 3
    assert arena.base == base
    with pytest.raises(LogicError, match="still have 3 chunks of 2097152 bytes"):
        pool.close()
    for each in (arena, other):
        each.close()
        each.close()
        each.check_invariants()
        with pytest.raises(LogicError, match="closed"):
            each.resize(1)
    pool.close()


@pytest.mark.parametrize("call", ["create_chunk", "map_chunk", "set_access"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_failed_growth_pops_back(driver: EmulatedDriver, call: str, nth: int) -> None:
    """Whichever step fails, the arena has its old size and bytes, no chunk is mapped or lost, and the next attempt works."""
    pool = ChunkPool(driver, GRANULARITY)
    arena = DeviceArena(driver, pool, GRANULARITY // 2, 8 * GRANULARITY)
    arena.resize(2)
    stamp(driver, arena, range(2))
    driver.fail(call, nth)
    with pytest.raises(OutOfMemoryError if call == "create_chunk" else CuError, match=call):
        arena.resize(8)
    arena.check_invariants()
    driver.check_invariants()
    assert (arena.num_slots, arena.mapped_bytes, driver.mapped_bytes, pool.in_use) == (2, GRANULARITY, GRANULARITY, 1)
    assert driver.chunks_live == pool.in_use + pool.spare
    check_stamps(driver, arena, range(2))
    arena.resize(8)
    check_stamps(driver, arena, range(2))
    stamp(driver, arena, range(8))
    arena.close()
    pool.close()


def test_a_pool_cannot_outgrow_its_address_space() -> None:
    driver = EmulatedDriver()
    pool = ChunkPool(driver, GRANULARITY)
    arena = DeviceArena(driver, pool, 1 << 20, GRANULARITY)
    with pytest.raises(OutOfMemoryError, match=r"3 slots of 1048576 bytes need 3\.0 MiB, more than the 2\.0 MiB"):
        arena.resize(3)
    with pytest.raises(LogicError, match="-1 slots"):
        arena.resize(-1)
    assert arena.num_slots == 0
    arena.close()
    driver.fail("reserve")
    with pytest.raises(OutOfMemoryError, match="reserve"):
        DeviceArena(driver, pool, 16, GRANULARITY).resize(1)
    with pytest.raises(ConfigError, match="slot_bytes=0"):
        DeviceArena(driver, pool, 0, GRANULARITY)
    with pytest.raises(ConfigError, match="chunk_bytes"):
        ChunkPool(driver, GRANULARITY + 4096)
    pool.close()
    driver.close()


# --- host


@pytest.mark.parametrize(
    ("nbytes", "ranges"),
    [(0, []), (4096, [4096]), (5 * RANGE, [RANGE] * 5), (2 * RANGE + 4096, [RANGE, RANGE, 4096])],
)
def test_host_memory_is_registered_in_exact_ranges(driver: EmulatedDriver, nbytes: int, ranges: list[int]) -> None:
    """Ranges tile the memory from its base without gap or overlap, the last one partial; closing undoes the same ones."""
    arena = HostArena(driver, 4096, RANGE)
    arena.resize(nbytes // 4096)
    assert [size for _address, size in arena.ranges] == ranges
    assert driver.registered_ranges == arena.ranges
    address = arena.base
    for begin, size in arena.ranges:
        assert begin == address
        address += size
    arena.check_invariants()
    arena.close()
    assert driver.registered_ranges == []


@pytest.mark.parametrize("slot_bytes", [1, 512, 4096, 4097, 12288, 20480, 3 * PAGE_BYTES + 8])
def test_no_slot_straddles_two_registered_ranges_where_that_is_possible(driver: EmulatedDriver, slot_bytes: int) -> None:
    """Slots whose common multiple with the page fits in a range lie in one range each, also after growing in steps."""
    arena = HostArena(driver, slot_bytes, 8 * PAGE_BYTES)
    for num_slots in (3, 17, 40, 25, 60):
        arena.resize(num_slots)
        arena.check_invariants()
        if slot_bytes in (1, 512, 4096, 12288, 20480):
            for slot in range(num_slots):
                begin = arena.address(slot)
                assert any(a <= begin and begin + slot_bytes <= a + size for a, size in arena.ranges), slot
    arena.close()


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("before", [0, 1, 6, 8])
def test_refused_registration_gives_everything_back(driver: EmulatedDriver, before: int, nth: int) -> None:
    """The error names size, limit and remedy; the arena keeps its old slots and bytes; a later attempt works."""
    arena = HostArena(driver, PAGE_BYTES, RANGE)
    arena.resize(before)
    stamp(driver, arena, range(before))
    ranges = [size for _address, size in arena.ranges]
    driver.fail("host_register", nth)
    with pytest.raises(HostRegistrationError) as caught:
        arena.resize(20)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = str(caught.value)
    assert f"({20 * PAGE_BYTES} bytes)" in text
    assert ("unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes") in text
    assert "ulimit -l unlimited" in text
    assert "without_tier(CacheTier.HOST_MEM)" in text
    arena.check_invariants()
    assert arena.num_slots == before
    assert [size for _address, size in arena.ranges] == ranges
    assert driver.registered_bytes == before * PAGE_BYTES
    check_stamps(driver, arena, range(before))
    arena.resize(20)
    check_stamps(driver, arena, range(before))
    arena.close()


def test_refused_registration_while_shrinking_keeps_the_old_size(driver: EmulatedDriver) -> None:
    """Shrinking registers the last range anew; if that is refused, nothing has changed. If the old range is refused, too, the arena
    has the slots that are registered, and the memory of the others stays: a later try finds their bytes."""
    arena = HostArena(driver, PAGE_BYTES, RANGE)
    arena.resize(11)
    stamp(driver, arena, range(11))
    driver.fail("host_register")
    with pytest.raises(HostRegistrationError):
        arena.resize(6)
    arena.check_invariants()
    check_stamps(driver, arena, range(11))
    driver.fail("host_register", times=None)
    with pytest.raises(HostRegistrationError):
        arena.resize(6)
    assert (arena.num_slots, arena.registered_bytes) == (4, 4 * PAGE_BYTES)
    arena.check_invariants()
    driver.heal()
    arena.resize(11)
    check_stamps(driver, arena, range(11))
    arena.resize(2)
    arena.close()


@given(st.sampled_from([100, 4096, 4097, 10000]), st.lists(st.integers(0, 60), max_size=10))
def test_host_slots_keep_their_bytes(slot_bytes: int, sizes: list[int]) -> None:
    """After any sequence of sizes, zero included, kept slots have their bytes, and the accounts of memory are exact."""
    driver = EmulatedDriver()
    arena = HostArena(driver, slot_bytes, RANGE, populate_threads=2)
    kept = 0
    for size in sizes:
        arena.resize(size)
        arena.check_invariants()
        check_stamps(driver, arena, range(min(kept, size)))
        stamp(driver, arena, range(size))
        kept = size
        assert driver.registered_ranges == arena.ranges
    arena.close()
    driver.close()


def test_host_memory_that_must_move_keeps_its_bytes(driver: EmulatedDriver) -> None:
    """With another mapping right behind it, the memory moves when it grows: registrations are undone before and made anew."""
    arenas = [HostArena(driver, PAGE_BYTES, RANGE) for _i in range(8)]
    for round_number in range(1, 6):
        for number, arena in enumerate(arenas):
            arena.resize(round_number * 7)
            driver.write_bytes(arena.address(round_number * 7 - 1), bytes([number, round_number]))
            arena.check_invariants()
    for number, arena in enumerate(arenas):
        for round_number in range(1, 6):
            assert driver.read_bytes(arena.address(round_number * 7 - 1), 2) == bytes([number, round_number])
        arena.close()


def test_impossible_host_sizes(driver: EmulatedDriver) -> None:
    """More than the machine can map is a typed error, and leaves nothing behind."""
    arena = HostArena(driver, 1 << 40)
    with pytest.raises(OutOfMemoryError, match="smaller tier"):
        arena.resize(1 << 20)
    assert (arena.num_slots, arena.base) == (0, 0)
    arena.check_invariants()
    with pytest.raises(ConfigError, match="registration_bytes=100"):
        HostArena(driver, 16, 100)
    arena.close()


def test_more_host_memory_than_there_is_gets_refused_not_killed(driver: EmulatedDriver) -> None:
    """Prefaulting more than the system has available is a typed error before a page is touched; growing keeps the old slots."""
    assert available_bytes() > 0
    address = map_range(PAGE_BYTES)
    with pytest.raises(OutOfMemoryError, match=r"1024\.0 TiB.*are available; configure a smaller host tier"):
        populate_range(address, 1 << 50, 1)
    unmap_range(address, PAGE_BYTES)
    arena = HostArena(driver, 1 << 20)
    arena.resize(2)
    stamp(driver, arena, range(2))
    with pytest.raises(OutOfMemoryError, match="configure a smaller host tier"):
        arena.resize(1 << 30)
    arena.check_invariants()
    check_stamps(driver, arena, range(2))
    assert driver.registered_bytes == 2 << 20
    arena.close()


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_prefaulting_leaves_zeros_and_makes_pages_present(threads: int) -> None:
    """Populated memory reads as zeros, whatever the number of threads and regions."""
    nbytes = 10 * PAGE_BYTES
    address = map_range(nbytes)
    populate_range(address, nbytes, threads, part_bytes=3 * PAGE_BYTES)
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(address // PAGE_BYTES * 8)
        present = [entry[7] >> 7 for entry in (pagemap.read(8) for _i in range(10))]
    assert present == [1 if threads else 0] * 10
    driver = EmulatedDriver()
    driver.host_register(address, nbytes)
    assert driver.read_bytes(address, nbytes) == bytes(nbytes)
    driver.host_unregister(address, nbytes)
    driver.close()
    unmap_range(address, nbytes)


# --- disk


@pytest.mark.parametrize("slot_bytes", [4096, 4097, (1 << 20) + 512, 1])
def test_disk_slots_of_any_size(slot_bytes: int, tmp_path: Path) -> None:
    """Odd sizes work; space is there from the start; shrinking gives it back; no name is ever seen in the directory."""
    descriptors = open_descriptors()
    arena = DiskArena(slot_bytes, str(tmp_path))
    assert os.listdir(tmp_path) == []
    arena.resize(10)
    assert os.fstat(arena.fd).st_size == 10 * slot_bytes
    assert os.fstat(arena.fd).st_blocks * 512 >= 10 * slot_bytes
    assert arena.address(3) == 3 * slot_bytes
    for slot in range(10):
        os.pwrite(arena.fd, bytes([slot]) * slot_bytes, arena.address(slot))
    arena.resize(4)
    arena.check_invariants()
    assert os.fstat(arena.fd).st_size == 4 * slot_bytes
    arena.resize(12)
    assert [os.pread(arena.fd, slot_bytes, arena.address(slot)) for slot in range(4)] == [bytes([s]) * slot_bytes for s in range(4)]
    assert os.pread(arena.fd, slot_bytes, arena.address(8)) == bytes(slot_bytes)
    arena.resize(0)
    arena.close()
    arena.check_invariants()
    assert os.listdir(tmp_path) == []
    assert open_descriptors() == descriptors


def test_bad_disk_paths_are_refused_at_construction(tmp_path: Path) -> None:
    """Missing, not a directory, not writable: a ConfigError that names the path and what to do."""
    descriptors = open_descriptors()
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConfigError, match=r"nowhere' does not exist; create"):
        DiskArena(16, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"file' is not a directory"):
        DiskArena(16, str(file))
    with pytest.raises(ConfigError, match="'/proc' cannot hold files"):
        DiskArena(16, "/proc")
    if os.geteuid() != 0:
        locked = tmp_path / "locked"
        locked.mkdir(mode=0o500)
        with pytest.raises(ConfigError, match="make it writable"):
            DiskArena(16, str(locked))
    with pytest.raises(ConfigError, match="slot_bytes=-1"):
        DiskArena(-1, str(tmp_path))
    assert open_descriptors() == descriptors


def test_a_full_disk_is_refused_before_it_is_filled(tmp_path: Path) -> None:
    """Asking for more than is free raises with both figures, and what was there stays."""
    arena = DiskArena(1 << 20, str(tmp_path))
    arena.resize(2)
    os.pwrite(arena.fd, b"kept", 5)
    with pytest.raises(OutOfMemoryError, match=r"no space for 4096.0 TiB.*are free"):
        arena.resize(1 << 32)
    arena.check_invariants()
    assert arena.num_slots == 2
    assert os.pread(arena.fd, 4, 5) == b"kept"
    arena.resize(3)
    arena.close()


def test_a_limit_on_file_sizes_is_a_typed_error(tmp_path: Path) -> None:
    """What only the allocation itself finds out leaves the file as it was."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    arena = DiskArena(PAGE_BYTES, str(tmp_path))
    arena.resize(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 * PAGE_BYTES, hard))
    try:
        with pytest.raises(OutOfMemoryError, match="errno 27"):
            arena.resize(20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    arena.check_invariants()
    assert arena.num_slots == 1
    arena.resize(20)
    arena.close()
