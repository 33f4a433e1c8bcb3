"""File transfers of the CUDA driver where only the stand-in can show them: what hangs, fails, or comes late."""

from __future__ import annotations

import os
import threading
from collections import deque

import pytest

from kv_cache_manager_v2.device.checksums import FileChecksums
from kv_cache_manager_v2.device.driver import GATE_DONE, GATE_FAILED, GATE_LATE, GATE_PENDING, GATE_TIMED_OUT
from kv_cache_manager_v2.device.file_transfers import move_file_range
from kv_cache_manager_v2.errors import (
    CuError,
    LogicError,
)
from kv_cache_manager_v2.extras.cuda import CudaDriver
from kv_cache_manager_v2.ids import Stream
from tests.extras.conftest import Make
from tests.extras.cuda_standin import StandIn
from tests.extras.cuda_standin_types import CUresult
from tests.extras.helpers import DeviceBuffer, HostBuffer, TemporaryFile, hold, pattern


def poll_until(driver: CudaDriver, gate: int, state: int) -> None:
    """Ask until a gate has a state; the suite's own time limit ends a wait in vain."""
    pause = threading.Event()
    while driver.poll_gate(gate) != state:
        pause.wait(0.001)


class TestTransfers:
    def test_without_memory_operations_the_host_waits(self, make: Make) -> None:
        """`wait_gate` returns when the gate is open; what is queued afterwards sees the bytes."""
        scene, driver = make(StandIn(memory_operations=False))
        host, device, file = HostBuffer(driver, 8192), DeviceBuffer(driver, 1), TemporaryFile(pattern(100))
        gate = driver.read_file(Stream(0), file.fd, 0, host.address, 100)
        driver.wait_gate(Stream(0), gate)
        assert driver.poll_gate(gate) == GATE_DONE
        driver.copy(Stream(0), device.address, host.address, 100)
        driver.copy(Stream(0), host.address + 4096, device.address, 100)
        driver.synchronize()
        assert host.read(100, at=4096) == pattern(100)
        assert scene.calls["cuStreamWaitValue32"] == 0
        assert "the host waits for files" in driver.describe()
        driver.release_gate(gate)
        file.close()
        device.close()
        host.close()

    def test_a_transfer_that_hangs_opens_its_gate_as_timed_out(self, make: Make) -> None:
        """The stream goes on, others are served, and when it ends after all it is late, not done."""
        stuck, calls = threading.Event(), list[int]()

        def move(fd: int, offset: int, address: int, nbytes: int, writes: bool) -> str:
            calls.append(offset)
            if offset == 0:
                stuck.wait(30.0)
            return ""

        _scene, driver = make(transfer_timeout=0.01, io_threads=1, move=move)
        stream, event = driver.create_stream(), driver.create_event()
        start, changed = threading.Event(), deque[int]()
        hold(driver, stream, start)
        gate = driver.read_file(stream, 0, 0, 0, 8)
        assert driver.watch_gates([gate], changed)
        start.set()
        driver.wait_gate(stream, gate)
        driver.record_event(event, stream)
        driver.synchronize_event(event)
        assert driver.poll_gate(gate) == GATE_TIMED_OUT
        assert "still running after 0.01 s" in driver.gate_error(gate)
        assert list(changed) == [gate]
        other = driver.read_file(stream, 0, 100, 0, 8)
        driver.synchronize()
        assert driver.poll_gate(other) == GATE_DONE
        stuck.set()
        poll_until(driver, gate, GATE_LATE)
        assert list(changed) == [gate, gate]
        assert "after its time limit" in driver.gate_error(gate)
        assert calls == [0, 100]
        for one in (gate, other):
            driver.release_gate(one)
        driver.destroy_event(event)
        driver.destroy_stream(stream)

    def test_transfers_that_become_ready_together_start_in_submission_order(self, make: Make) -> None:
        """Over several streams, one thread: the order of the calls is the order of the starts."""
        started: list[int] = []

        def move(fd: int, offset: int, address: int, nbytes: int, writes: bool) -> str:
            started.append(offset)
            return ""

        _scene, driver = make(io_threads=1, move=move)
        streams, go, mark = [driver.create_stream() for _i in range(3)], threading.Event(), driver.create_event()
        hold(driver, streams[0], go)
        driver.record_event(mark, streams[0])
        for stream in streams[1:]:
            driver.wait_event(stream, mark)
        gates = [driver.read_file(streams[0], 0, i, 0, 1) for i in range(20)]
        assert driver.poll_gate(gates[0]) == GATE_PENDING
        assert started == []
        go.set()
        driver.synchronize()
        assert started == list(range(20))
        for gate in gates:
            driver.release_gate(gate)
        driver.destroy_event(mark)
        for stream in streams:
            driver.destroy_stream(stream)

    def test_many_ranges_in_one_call(self, make: Make) -> None:
        """They start in their order when the stream has come to them, each has its gate, and one event stands for all of them."""
        started: list[int] = []

        def move(fd: int, offset: int, address: int, nbytes: int, writes: bool) -> str:
            started.append(offset)
            return "no such block" if offset == 7 else ""

        scene, driver = make(io_threads=1, move=move)
        stream, go, gates = driver.create_stream(), threading.Event(), [-1]
        hold(driver, stream, go)
        records = scene.calls["cuEventRecord"]
        driver.write_files(stream, 0, list(range(20)), [0] * 20, 1, gates)
        assert scene.calls["cuEventRecord"] == records + 1
        assert started == []
        driver.wait_gates(stream, gates[1:])
        go.set()
        driver.synchronize()
        assert started == list(range(20))
        assert [driver.poll_gate(gate) for gate in gates[1:]] == [GATE_FAILED if i == 7 else GATE_DONE for i in range(20)]
        for gate in gates[1:]:
            driver.release_gate(gate)
        driver.destroy_stream(stream)

    def test_many_ranges_are_queued_or_none(self, make: Make) -> None:
        """A record that fails, and lists of unequal length: no gate, no event."""
        scene, driver = make(move=lambda fd, offset, address, nbytes, writes: "")
        gates: list[int] = []
        with pytest.raises(LogicError, match="2 file offsets and 1 addresses"):
            driver.read_files(Stream(0), 0, [0, 1], [0], 1, gates)
        scene.fail("cuEventRecord", CUresult.CUDA_ERROR_NOT_PERMITTED)
        with pytest.raises(CuError):
            driver.read_files(Stream(0), 0, [0, 1], [0, 0], 1, gates)
        driver.read_files(Stream(0), 0, [], [], 1, gates)
        assert gates == []

    def test_damaged_bytes_fail_their_gate(self, make: Make) -> None:
        """The function that moves the bytes may be the engine's own; the sums are made and compared around it."""
        moved: list[bool] = []

        def move(fd: int, offset: int, address: int, nbytes: int, writes: bool) -> str:
            moved.append(writes)
            return move_file_range(fd, offset, address, nbytes, writes)

        _scene, driver = make(move=move)
        host, file = HostBuffer(driver, 8192), TemporaryFile(bytes(200))
        host.write(pattern(200))
        checksums = FileChecksums(100)
        checksums.resize(2)
        assert driver.protect_file(file.fd, checksums)
        gates: list[int] = []
        driver.write_files(Stream(0), file.fd, [0, 100], [host.address, host.address + 100], 100, gates)
        driver.synchronize()
        os.pwrite(file.fd, bytes([pattern(200)[150] ^ 1]), 150)
        driver.read_files(Stream(0), file.fd, [0, 100], [host.address, host.address + 100], 100, gates)
        driver.synchronize()
        assert [driver.poll_gate(gate) for gate in gates] == [GATE_DONE, GATE_DONE, GATE_DONE, GATE_FAILED]
        assert "offset 100" in driver.gate_error(gates[3])
        assert "bytes 100 to 200 of the file are damaged" in driver.gate_error(gates[3])
        assert moved == [True, True, False, False]
        driver.unprotect_file(file.fd)
        gates.append(driver.read_file(Stream(0), file.fd, 100, host.address, 100))
        driver.synchronize()
        assert driver.poll_gate(gates[4]) == GATE_DONE
        for gate in gates:
            driver.release_gate(gate)
        file.close()
        host.close()

    def test_a_device_that_fails_before_a_transfer_fails_its_gate(self, make: Make) -> None:
        """The file is not touched, the gate opens, and the error says what the device said."""
        moved: list[int] = []

        def move(fd: int, offset: int, address: int, nbytes: int, writes: bool) -> str:
            moved.append(offset)
            return ""

        scene, driver = make(move=move)
        scene.fail("cuEventQuery", CUresult.CUDA_ERROR_NOT_PERMITTED)
        gate = driver.write_file(Stream(0), 0, 0, 0, 1)
        driver.synchronize()
        assert driver.poll_gate(gate) == GATE_FAILED
        assert "the device failed: cuEventQuery failed: CUDA_ERROR_NOT_PERMITTED" in driver.gate_error(gate)
        assert moved == []
        driver.release_gate(gate)

    def test_more_gates_than_one_block_of_words(self, make: Make) -> None:
        """The pool of gate words grows and comes back."""
        scene, driver = make(move=lambda fd, offset, address, nbytes, writes: "")
        for _round in range(2):
            gates = [driver.read_file(Stream(0), 0, 0, 0, 1) for _i in range(5000)]
            driver.synchronize()
            assert {driver.poll_gate(gate) for gate in gates} == {GATE_DONE}
            assert scene.calls["cuMemHostAlloc"] == 2
            for gate in gates:
                driver.release_gate(gate)
