"""Checksums of files: every bit counts, a failed write cannot be read, and a resize keeps the sums of the slots that stay."""

from __future__ import annotations

import ctypes
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_cache_manager_v2.device.arenas import DiskArena
from kv_cache_manager_v2.device.checksums import EXTENT_BYTES, FileChecksums
from kv_cache_manager_v2.device.driver import GATE_DONE, GATE_FAILED, Driver
from kv_cache_manager_v2.device.file_transfers import move_file_range
from kv_cache_manager_v2.emulated.driver import EmulatedDriver
from kv_cache_manager_v2.ids import Stream
from tests.support.device_rig import SLOT_BYTES, DeviceRig, rig
from tests.support.inside import flip

ODD = 2 * EXTENT_BYTES + 513  # three extents, the last one short
SLOTS = 3


class CheckedFile:
    """A disk arena with checksums, and as much memory as two of its slots."""

    def __init__(self, slot_bytes: int, path: str) -> None:
        self.slot_bytes = slot_bytes
        self.arena = DiskArena(slot_bytes, path)
        self.arena.protect(EmulatedDriver())
        self.arena.resize(SLOTS)
        assert self.arena.checksums is not None
        self.sums: FileChecksums = self.arena.checksums
        self.buffer = ctypes.create_string_buffer(2 * slot_bytes)
        self.address = ctypes.addressof(self.buffer)

    def move(self, slot: int, writes: bool, beg: int = 0, nbytes: int = -1) -> str:
        """Move a part of a slot between the file and the same part of the memory."""
        size = self.slot_bytes if nbytes < 0 else nbytes
        return self.sums.move(move_file_range, self.arena.fd, self.arena.address(slot) + beg, self.address + beg, size, writes)

    def fill(self, slot: int) -> bytes:
        """Write random bytes to a slot."""
        data = random.Random(slot).randbytes(self.slot_bytes)
        ctypes.memmove(self.address, data, self.slot_bytes)
        assert self.move(slot, True) == ""
        return data

    def flip(self, slot: int, bit: int) -> None:
        flip(self.arena.fd, self.arena.address(slot) * 8 + bit)


@pytest.fixture(params=[1, 96, EXTENT_BYTES, ODD])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckedFile]:
    made = CheckedFile(request.param, str(tmp_path))
    yield made
    made.arena.close()


def test_bytes_come_back_and_no_flipped_bit_does(file: CheckedFile) -> None:
    """The first and the last bit of each extent, and some between; the neighbours can still be read."""
    data = [file.fill(slot) for slot in range(SLOTS)]
    bits = [0, 8 * file.slot_bytes - 1]
    bits += [bit for extent in range(EXTENT_BYTES, file.slot_bytes, EXTENT_BYTES) for bit in (8 * extent - 1, 8 * extent)]
    bits += [random.Random(i).randrange(8 * file.slot_bytes) for i in range(20)]
    for bit in bits:
        file.flip(1, bit)
        error = file.move(1, False)
        assert "damaged" in error, f"bit {bit}"
        file.flip(1, bit)
    for slot in range(SLOTS):
        assert file.move(slot, False) == ""
        assert file.buffer.raw[: file.slot_bytes] == data[slot]


def test_the_error_names_the_range_and_both_sums(tmp_path: Path) -> None:
    file = CheckedFile(ODD, str(tmp_path))
    file.fill(1)
    file.flip(1, 8 * EXTENT_BYTES)
    beg = ODD + EXTENT_BYTES
    error = file.move(1, False)
    assert error.startswith(f"bytes {beg} to {beg + EXTENT_BYTES} of the file are damaged")
    sums = [word.strip(",") for word in error.split() if word.startswith("0x")]
    assert len(set(sums)) == 2
    file.arena.close()


def test_a_slot_moves_whole_one_way_and_in_extents_the_other(tmp_path: Path) -> None:
    """Memory that takes files directly moves a slot at once, staging an extent at a time."""
    file = CheckedFile(ODD, str(tmp_path))
    data = file.fill(1)
    ctypes.memset(file.address, 0, ODD)
    for beg in range(0, ODD, EXTENT_BYTES):
        assert file.move(1, False, beg, min(EXTENT_BYTES, ODD - beg)) == ""
    assert file.buffer.raw[:ODD] == data
    for beg in range(0, ODD, EXTENT_BYTES):
        assert file.move(2, True, beg, min(EXTENT_BYTES, ODD - beg)) == ""
    assert file.move(2, False) == ""
    file.arena.close()


@pytest.mark.parametrize(("beg", "nbytes"), [(1, EXTENT_BYTES), (0, EXTENT_BYTES - 1), (EXTENT_BYTES, 2), (0, 10 * ODD)])
def test_a_range_that_cannot_be_checked_is_not_moved(tmp_path: Path, beg: int, nbytes: int) -> None:
    """Neither a part of an extent nor bytes beyond the last slot."""
    file = CheckedFile(ODD, str(tmp_path))
    file.fill(0)
    before = file.buffer.raw
    for writes in (False, True):
        assert "no checksum" in file.move(0, writes, beg, nbytes)
    assert file.buffer.raw == before
    assert file.move(0, False) == ""
    file.arena.close()


def test_no_bytes_need_no_checksum(file: CheckedFile) -> None:
    assert file.move(0, False, 0, 0) == ""
    assert file.move(0, True, 0, 0) == ""


def test_what_was_never_written_cannot_be_read(file: CheckedFile) -> None:
    file.fill(0)
    assert "no checksum" in file.move(1, False)
    assert file.move(0, False) == ""


def test_a_failed_write_cannot_be_read_whatever_it_has_written(file: CheckedFile) -> None:
    """Nothing, a part, or all of the bytes; a write that succeeds makes the slot whole again."""
    data = file.fill(1)
    for done in (0, file.slot_bytes // 2, file.slot_bytes):

        def fail(fd: int, offset: int, address: int, nbytes: int, writes: bool, done: int = done) -> str:
            move_file_range(fd, offset, address, min(done, nbytes), writes)
            return "no space"

        assert file.sums.move(fail, file.arena.fd, file.arena.address(1), file.address, file.slot_bytes, True) == "no space"
        assert "no checksum" in file.move(1, False)
        ctypes.memmove(file.address, data, file.slot_bytes)
        assert file.move(1, True) == ""
        assert file.move(1, False) == ""


def test_a_resize_keeps_the_sums_of_the_slots_that_stay(file: CheckedFile) -> None:
    """Slots that were cut and come back have none, so what lies there cannot be read."""
    for slot in range(SLOTS):
        file.fill(slot)
    file.arena.resize(2)
    file.arena.resize(SLOTS + 2)
    assert [file.move(slot, False) == "" for slot in range(SLOTS + 2)] == [True, True, False, False, False]
    file.fill(SLOTS + 1)
    assert file.move(SLOTS + 1, False) == ""


def protected(r: DeviceRig) -> DiskArena:
    """The rig's disk arena with checksums."""
    arena = DiskArena(SLOT_BYTES, r.disk.path)
    arena.protect(r.driver)
    arena.resize(4)
    return arena


@pytest.mark.parametrize("schedule", ["eager", "random", "threads"])
def test_a_damaged_range_fails_its_gate_only(schedule: str) -> None:
    """On every schedule of the emulated device; a second descriptor of the same number has no sums of the first."""
    with rig(schedule) as r:
        arena = protected(r)
        offsets, hosts = [arena.address(i) for i in range(4)], [r.host.address(i) for i in range(4)]
        gates: list[int] = []
        r.driver.write_files(Stream(0), arena.fd, offsets, hosts, SLOT_BYTES, gates)
        r.driver.synchronize()
        flip(arena.fd, 8 * arena.address(2) + 77)
        r.driver.read_files(Stream(0), arena.fd, offsets, hosts, SLOT_BYTES, gates)
        r.driver.synchronize()
        states = [r.driver.poll_gate(gate) for gate in gates]
        assert states == [GATE_DONE] * 6 + [GATE_FAILED, GATE_DONE]
        text = r.driver.gate_error(gates[6])
        assert f"offset {arena.address(2)} of file descriptor {arena.fd}" in text
        assert "damaged" in text
        fd = arena.fd
        arena.close()
        again = DiskArena(SLOT_BYTES, r.disk.path)
        again.resize(1)
        assert again.fd == fd
        gates.append(r.driver.read_file(Stream(0), again.fd, 0, hosts[0], SLOT_BYTES))
        r.driver.synchronize()
        assert r.driver.poll_gate(gates[-1]) == GATE_DONE
        again.close()
        for gate in gates:
            r.driver.release_gate(gate)


@pytest.mark.parametrize("effect", ["error", "short"])
def test_a_write_that_was_told_to_fail_has_no_sum(effect: str) -> None:
    with rig("eager") as r:
        arena = protected(r)
        gates = [r.driver.write_file(Stream(0), arena.fd, 0, r.host.address(0), SLOT_BYTES)]
        r.driver.fail("write_file", effect=effect)
        gates.append(r.driver.write_file(Stream(0), arena.fd, 0, r.host.address(0), SLOT_BYTES))
        gates.append(r.driver.read_file(Stream(0), arena.fd, 0, r.host.address(1), SLOT_BYTES))
        assert [r.driver.poll_gate(gate) for gate in gates] == [GATE_DONE, GATE_FAILED, GATE_FAILED]
        assert "no checksum" in r.driver.gate_error(gates[2])
        arena.close()
        for gate in gates:
            r.driver.release_gate(gate)


def test_a_driver_that_makes_no_checksums_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that was written before there were any: a warning, and the file works without."""
    calls = [name for name in dir(Driver) if not name.startswith("_") and not name.endswith("protect_file")]
    old = type("Old", (Driver,), {name: lambda _self: "an old device" for name in calls})()
    arena = DiskArena(96, str(tmp_path))
    with caplog.at_level(logging.WARNING):
        arena.protect(old)
    assert arena.checksums is None
    assert "not checked: an old device" in caplog.text
    arena.resize(1)
    arena.close()
