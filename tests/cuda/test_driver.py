"""What the CUDA driver promises as a `Driver`, on a real GPU or on the stand-in.

A stream is held by a launched function that waits for us. On a real GPU all such functions share one thread, so a test holds at
most one stream, and takes its memory before.
"""

from __future__ import annotations

import logging
import threading

import pytest

from kv_cache_manager_v2.device.driver import GATE_DONE, GATE_FAILED, GATE_PENDING
from kv_cache_manager_v2.errors import CuError, HostRegistrationError, LogicError
from kv_cache_manager_v2.extras.cuda import CudaDriver
from kv_cache_manager_v2.ids import Stream
from tests.extras.helpers import DeviceBuffer, HostBuffer, TemporaryFile, hold, pattern


def wait_until_open(driver: CudaDriver, stream: Stream, gate: int) -> int:
    """Let a stream wait for a gate and the host for the stream; how the transfer ended."""
    driver.wait_gate(stream, gate)
    driver.synchronize()
    return driver.poll_gate(gate)


class TestMemory:
    def test_bytes_go_to_the_device_and_back(self, driver: CudaDriver) -> None:
        """A copy in each direction, in stream order; the range crosses from one chunk to the next."""
        host, device = HostBuffer(driver, 8192), DeviceBuffer(driver, 2)
        stream = driver.create_stream()
        host.write(pattern(3000))
        middle = device.address + device.granule - 1500
        driver.copy(stream, middle, host.address, 3000)
        driver.copy(stream, host.address + 4096, middle, 3000)
        driver.synchronize()
        assert host.read(3000, at=4096) == pattern(3000)
        driver.destroy_stream(stream)
        device.close()
        host.close()

    def test_a_chunk_keeps_its_bytes_when_it_is_mapped_elsewhere(self, driver: CudaDriver) -> None:
        """Physical memory and addresses are two things."""
        host, granule = HostBuffer(driver, 4096), driver.granularity()
        stream = driver.create_stream()
        base = driver.reserve(2 * granule)
        chunk = driver.create_chunk(granule)
        driver.map_chunk(base, granule, chunk)
        driver.set_access(base, granule)
        host.write(pattern(100))
        driver.copy(stream, base, host.address, 100)
        driver.synchronize()
        driver.unmap(base, granule)
        driver.map_chunk(base + granule, granule, chunk)
        driver.set_access(base + granule, granule)
        driver.copy(stream, host.address + 1000, base + granule, 100)
        driver.synchronize()
        assert host.read(100, at=1000) == pattern(100)
        driver.unmap(base + granule, granule)
        driver.destroy_chunk(chunk)
        driver.release_reservation(base, 2 * granule)
        driver.destroy_stream(stream)
        host.close()

    def test_giving_back_what_is_not_held_is_refused(self, driver: CudaDriver) -> None:
        """A second time, half a range, a range with something in it: LogicError, and nothing happened."""
        granule = driver.granularity()
        base, chunk = driver.reserve(2 * granule), driver.create_chunk(granule)
        driver.map_chunk(base, granule, chunk)
        with pytest.raises(LogicError, match="still has a chunk mapped"):
            driver.release_reservation(base, 2 * granule)
        driver.unmap(base, granule)
        with pytest.raises(LogicError, match="is unknown"):
            driver.unmap(base, granule)
        with pytest.raises(LogicError, match="free all of it"):
            driver.release_reservation(base, granule)
        driver.destroy_chunk(chunk)
        with pytest.raises(LogicError, match="is unknown"):
            driver.destroy_chunk(chunk)
        driver.release_reservation(base, 2 * granule)

    def test_host_memory_registered_twice_is_refused(self, driver: CudaDriver) -> None:
        """The error names the size and what the driver said."""
        host = HostBuffer(driver, 4096)
        with pytest.raises(HostRegistrationError, match=r"4096 bytes .*ALREADY_REGISTERED.*RLIMIT_MEMLOCK"):
            driver.host_register(host.address, 4096)
        host.close()

    def test_a_chunk_that_is_no_multiple_of_the_granularity_is_an_error(self, driver: CudaDriver) -> None:
        """The driver's own refusal, with its code and the call."""
        with pytest.raises(CuError, match="cuMemCreate failed: CUDA_ERROR_INVALID_VALUE") as caught:
            driver.create_chunk(driver.granularity() + 1)
        assert (caught.value.error_code, caught.value.call) == (1, "cuMemCreate")


class TestCopies:
    @pytest.mark.parametrize("legacy", [False, True], ids=["own stream", "legacy default stream"])
    def test_a_batch_moves_every_pair(self, driver: CudaDriver, legacy: bool) -> None:
        """64 scattered copies, each way, on a stream of ours and on the engine's default stream 0."""
        host, device = HostBuffer(driver, 64 * 1000 * 2), DeviceBuffer(driver, 1)
        stream = Stream(0) if legacy else driver.create_stream()
        host.write(pattern(64 * 1000))
        there = [device.address + 2048 * (i * 7 % 64) for i in range(64)]
        driver.copy_batch(stream, there, [host.address + 1000 * i for i in range(64)], 1000)
        driver.copy_batch(stream, [host.address + 64000 + 1000 * i for i in range(64)], there, 1000)
        driver.synchronize()
        assert host.read(64000, at=64000) == pattern(64000)
        if not legacy:
            driver.destroy_stream(stream)
        device.close()
        host.close()

    def test_empty_copies_do_nothing(self, driver: CudaDriver) -> None:
        """No pairs, or no bytes: not even the addresses are looked at."""
        driver.copy_batch(Stream(0), [], [], 100)
        driver.copy_batch(Stream(0), [1], [2], 0)
        driver.copy(Stream(0), 1, 2, 0)
        driver.synchronize()

    def test_a_batch_needs_as_many_sources_as_destinations(self, driver: CudaDriver) -> None:
        """Refused before anything is queued."""
        with pytest.raises(LogicError, match="2 destinations and 1 sources"):
            driver.copy_batch(Stream(0), [1, 2], [3], 100)

    def test_the_source_is_read_when_the_copy_runs(self, driver: CudaDriver) -> None:
        """What is written after queueing and before running is what is copied."""
        host, device = HostBuffer(driver, 8192), DeviceBuffer(driver, 1)
        stream = driver.create_stream()
        go = threading.Event()
        host.write(b"old")
        hold(driver, stream, go)
        driver.copy_batch(stream, [device.address], [host.address], 3)
        driver.copy(stream, host.address + 4096, device.address, 3)
        host.write(b"new")
        go.set()
        driver.synchronize()
        assert host.read(3, at=4096) == b"new"
        driver.destroy_stream(stream)
        device.close()
        host.close()


class TestOrder:
    def test_an_event_is_complete_until_recorded_and_after_its_work(self, driver: CudaDriver) -> None:
        """Recorded after held work it is pending; it completes with that work."""
        stream, event, go = driver.create_stream(), driver.create_event(), threading.Event()
        assert driver.query_event(event)
        hold(driver, stream, go)
        driver.record_event(event, stream)
        assert not driver.query_event(event)
        go.set()
        driver.synchronize_event(event)
        assert driver.query_event(event)
        driver.destroy_event(event)
        driver.destroy_stream(stream)

    def test_a_new_event_is_complete_even_if_an_old_one_was_given_back_pending(self, driver: CudaDriver) -> None:
        """Pooling does not show."""
        stream, event, go = driver.create_stream(), driver.create_event(), threading.Event()
        hold(driver, stream, go)
        driver.record_event(event, stream)
        driver.destroy_event(event)
        fresh = [driver.create_event() for _i in range(4)]
        assert all(driver.query_event(one) for one in fresh)
        go.set()
        driver.synchronize()
        for one in fresh:
            driver.destroy_event(one)
        driver.destroy_stream(stream)

    def test_a_stream_waits_for_an_event_of_another(self, driver: CudaDriver) -> None:
        """The copy on the second stream sees what the first wrote, though it was held."""
        host, device = HostBuffer(driver, 8192), DeviceBuffer(driver, 1)
        first, second, event = driver.create_stream(), driver.create_stream(), driver.create_event()
        done, go = driver.create_event(), threading.Event()
        host.write(pattern(500))
        hold(driver, first, go)
        driver.copy(first, device.address, host.address, 500)
        driver.record_event(event, first)
        driver.wait_event(second, event)
        driver.copy(second, host.address + 4096, device.address, 500)
        driver.record_event(done, second)
        assert not driver.query_event(done)
        go.set()
        driver.synchronize_event(done)
        assert host.read(500, at=4096) == pattern(500)
        for one in (event, done):
            driver.destroy_event(one)
        for stream in (first, second):
            driver.destroy_stream(stream)
        device.close()
        host.close()

    def test_a_stream_without_a_wait_overtakes(self, driver: CudaDriver) -> None:
        """Streams are ordered by events only."""
        first, second, event, go = driver.create_stream(), driver.create_stream(), driver.create_event(), threading.Event()
        hold(driver, first, go)
        driver.record_event(event, second)
        driver.synchronize_event(event)
        go.set()
        driver.destroy_event(event)
        driver.destroy_stream(second)
        driver.destroy_stream(first)

    def test_launched_functions_run_in_order_and_their_errors_are_logged(
        self, driver: CudaDriver, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One that raises neither stops the stream nor hides."""
        stream, seen = driver.create_stream(), list[int]()

        def fail() -> None:
            raise ValueError("from a launched function")

        with caplog.at_level(logging.ERROR):
            for i in range(5):
                driver.launch(stream, lambda i=i: seen.append(i))  # type: ignore[misc]
                if i == 2:
                    driver.launch(stream, fail)
            driver.synchronize()
        assert seen == [0, 1, 2, 3, 4]
        assert "from a launched function" in caplog.text
        driver.destroy_stream(stream)


class TestFiles:
    def test_pages_go_to_a_file_and_back(self, driver: CudaDriver) -> None:
        """32 writes behind the copies that fill their memory, then 32 reads, all in parallel; streams wait at the gates."""
        host, device, file = HostBuffer(driver, 32 * 1000 * 3), DeviceBuffer(driver, 1), TemporaryFile()
        stream = driver.create_stream()
        host.write(pattern(32000))
        driver.copy(stream, device.address, host.address, 32000)
        driver.copy(stream, host.address + 32000, device.address, 32000)
        writes = [driver.write_file(stream, file.fd, 1000 * i, host.address + 32000 + 1000 * i, 1000) for i in range(32)]
        for gate in writes:
            driver.wait_gate(stream, gate)
        reads = [driver.read_file(stream, file.fd, 1000 * i, host.address + 64000 + 1000 * i, 1000) for i in range(32)]
        for gate in reads:
            driver.wait_gate(stream, gate)
        driver.copy(stream, device.address + 32000, host.address + 64000, 32000)
        driver.synchronize()
        assert host.read(32000, at=64000) == pattern(32000)
        assert {driver.poll_gate(gate) for gate in writes + reads} == {GATE_DONE}
        assert driver.gate_error(reads[0]) == ""
        for gate in writes + reads:
            driver.release_gate(gate)
        driver.destroy_stream(stream)
        file.close()
        device.close()
        host.close()

    def test_a_transfer_starts_when_its_stream_has_come_to_it(self, driver: CudaDriver) -> None:
        """While the stream is held the gate is pending, and a stream that waits for it is blocked; other streams' files move."""
        host, file = HostBuffer(driver, 8192), TemporaryFile(pattern(4096))
        held, free, waiting = driver.create_stream(), driver.create_stream(), driver.create_stream()
        event, go = driver.create_event(), threading.Event()
        hold(driver, held, go)
        gate = driver.read_file(held, file.fd, 0, host.address, 4096)
        driver.wait_gate(waiting, gate)
        driver.record_event(event, waiting)
        other = driver.read_file(free, file.fd, 0, host.address + 4096, 4096)
        driver.wait_gate(free, other)
        marker = driver.create_event()
        driver.record_event(marker, free)
        driver.synchronize_event(marker)
        assert driver.poll_gate(other) == GATE_DONE
        assert driver.poll_gate(gate) == GATE_PENDING
        assert not driver.query_event(event)
        with pytest.raises(LogicError, match="pending"):
            driver.release_gate(gate)
        go.set()
        driver.synchronize_event(event)
        assert driver.poll_gate(gate) == GATE_DONE
        assert host.read(4096) == pattern(4096) == host.read(4096, at=4096)
        for one in (gate, other):
            driver.release_gate(one)
        for one in (event, marker):
            driver.destroy_event(one)
        for stream in (held, free, waiting):
            driver.destroy_stream(stream)
        file.close()
        host.close()

    def test_a_short_read_fails_its_gate_and_no_other(self, driver: CudaDriver) -> None:
        """The stream goes on; the error names the file range."""
        host, file, stream = HostBuffer(driver, 8192), TemporaryFile(pattern(4096)), driver.create_stream()
        good = driver.read_file(stream, file.fd, 0, host.address, 4096)
        short = driver.read_file(stream, file.fd, 4000, host.address + 4096, 4096)
        driver.wait_gate(stream, short)
        assert wait_until_open(driver, stream, good) == GATE_DONE
        assert driver.poll_gate(short) == GATE_FAILED
        assert "offset 4000" in driver.gate_error(short)
        assert "short by 4000 of 4096 bytes" in driver.gate_error(short)
        for gate in (good, short):
            driver.release_gate(gate)
        driver.destroy_stream(stream)
        file.close()
        host.close()

    def test_an_error_of_the_file_system_fails_the_gate(self, driver: CudaDriver) -> None:
        """A descriptor that is none: the reason is the system's."""
        host, stream = HostBuffer(driver, 4096), driver.create_stream()
        gate = driver.write_file(stream, 1 << 20, 0, host.address, 4096)
        assert wait_until_open(driver, stream, gate) == GATE_FAILED
        assert "Bad file descriptor" in driver.gate_error(gate)
        driver.release_gate(gate)
        driver.destroy_stream(stream)
        host.close()

    def test_a_released_gate_is_forgotten(self, driver: CudaDriver) -> None:
        """Every later use is an error that names it."""
        host, file, stream = HostBuffer(driver, 4096), TemporaryFile(pattern(10)), driver.create_stream()
        gate = driver.read_file(stream, file.fd, 0, host.address, 10)
        assert wait_until_open(driver, stream, gate) == GATE_DONE
        driver.release_gate(gate)
        for use in (driver.release_gate, driver.poll_gate, driver.gate_error):
            with pytest.raises(LogicError, match=f"gate {gate} does not exist"):
                use(gate)
        with pytest.raises(LogicError, match="does not exist"):
            driver.wait_gate(stream, gate)
        driver.destroy_stream(stream)
        file.close()
        host.close()

    def test_gate_words_come_again(self, driver: CudaDriver) -> None:
        """300 transfers, one after the other, each awaited by a stream: the word of an old gate serves a new, closed one."""
        host, file, stream = HostBuffer(driver, 4096), TemporaryFile(), driver.create_stream()
        for i in range(300):
            host.write(i.to_bytes(4, "little"))
            gate = driver.write_file(stream, file.fd, 0, host.address, 4)
            driver.wait_gate(stream, gate)
            back = driver.read_file(stream, file.fd, 0, host.address + 2048, 4)
            assert wait_until_open(driver, stream, back) == GATE_DONE
            assert host.read(4, at=2048) == i.to_bytes(4, "little")
            driver.release_gate(gate)
            driver.release_gate(back)
        driver.destroy_stream(stream)
        file.close()
        host.close()
