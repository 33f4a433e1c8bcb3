"""File transfers: order, gates, hanging, and the pool of I/O threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.device.driver import GATE_DONE, GATE_FAILED, GATE_LATE, GATE_PENDING, GATE_TIMED_OUT
from kv_cache_manager_v2.device.file_transfers import Transfer, TransferPool
from kv_cache_manager_v2.errors import ConfigError, LogicError
from tests.support.device_rig import SCHEDULES, SLOT_BYTES, rig

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)

TIMEOUTS = {"eager": 20.0, "random": 20.0, "threads": 0.02}


@every_schedule
def test_a_transfer_starts_after_the_work_before_it(schedule: str) -> None:
    """What is queued on the stream before a write is in the file; the stream itself goes on without waiting."""
    with rig(schedule) as r:
        stream = r.streams[0]
        r.fill(r.device.address(0), 3)
        gate = r.driver.gate(stream)
        r.driver.copy(stream, r.host.address(0), r.device.address(0), SLOT_BYTES)
        written = r.driver.write_file(stream, r.disk.fd, r.disk.address(4), r.host.address(0), SLOT_BYTES)
        for _i in range(20):
            assert r.driver.poll_gate(written) == GATE_PENDING
        gate.open()
        r.driver.synchronize()
        assert r.driver.poll_gate(written) == GATE_DONE
        assert r.file_value(4) == 3
        assert (r.driver.transfers_made, r.driver.bytes_transferred) == (1, SLOT_BYTES)
        r.driver.release_gate(written)


@every_schedule
def test_a_stream_waits_at_the_gate_of_a_transfer(schedule: str) -> None:
    """Work queued after `wait_gate` reads what the transfer brought, on this and on any other stream; without it, it overtakes."""
    with rig(schedule) as r:
        r.file_fill(2, 77)
        held = r.driver.hang("read_file")
        read = r.driver.read_file(r.streams[0], r.disk.fd, r.disk.address(2), r.host.address(0), SLOT_BYTES)
        for stream in r.streams[:2]:
            r.driver.wait_gate(stream, read)
            r.driver.copy(stream, r.device.address(stream), r.host.address(0), SLOT_BYTES)
        r.finish(r.streams[2])
        assert not r.is_over(r.streams[0])
        assert not r.is_over(r.streams[1])
        held.open()
        r.driver.synchronize()
        assert [r.value(r.device.address(stream)) for stream in r.streams[:2]] == [77, 77]
        r.driver.release_gate(read)


@every_schedule
def test_many_ranges_in_one_call_are_as_many_transfers(schedule: str) -> None:
    """Each has a gate of its own and fails alone; a stream that waits for all goes on when all are open, however they ended."""
    with rig(schedule) as r:
        stream = r.streams[0]
        hosts = [r.host.address(i) for i in range(6)]
        offsets = [r.disk.address(i) for i in (3, 1, 0, 5, 2, 4)]
        for i in range(6):
            r.fill(hosts[i], 10 + i)
        written: list[int] = []
        r.driver.write_files(stream, r.disk.fd, offsets, hosts, SLOT_BYTES, written)
        r.driver.wait_gates(stream, written)
        r.driver.synchronize()
        assert [r.file_value(slot) for slot in (3, 1, 0, 5, 2, 4)] == [10, 11, 12, 13, 14, 15]
        r.driver.fail("read_file", 2)
        held = r.driver.hang("read_file", 5)
        read: list[int] = []
        r.driver.read_files(stream, r.disk.fd, [r.disk.address(i) for i in range(6)], hosts, SLOT_BYTES, read)
        r.driver.wait_gates(stream, read)
        ran: list[int] = []
        r.driver.launch(stream, lambda: ran.append(1))
        assert not r.is_over(stream)
        assert not ran
        held.open()
        r.driver.synchronize()
        assert ran == [1]
        assert [r.driver.poll_gate(gate) for gate in read] == [GATE_DONE, GATE_FAILED, *[GATE_DONE] * 4]
        assert [r.value(hosts[i]) for i in (0, 2, 3, 4, 5)] == [12, 14, 10, 15, 13]
        for gate in [*written, *read]:
            r.driver.release_gate(gate)


@every_schedule
def test_many_ranges_are_checked_before_any_is_queued(schedule: str) -> None:
    """One range outside registered host memory, or lists of unequal length: no gate, no transfer. No range at all is a no-op."""
    with rig(schedule) as r:
        gates: list[int] = []
        for addresses in ([r.host.address(0), 4096], [r.host.address(0)]):
            with pytest.raises(LogicError, match=r"not registered host memory|2 offsets but 1 addresses"):
                r.driver.write_files(r.streams[0], r.disk.fd, [0, SLOT_BYTES], addresses, SLOT_BYTES, gates)
        r.driver.write_files(r.streams[0], r.disk.fd, [], [], SLOT_BYTES, gates)
        r.driver.wait_gates(r.streams[0], gates)
        r.driver.synchronize()
        assert not gates
        assert r.driver.transfers_made == r.driver.gates_live == 0


@every_schedule
def test_a_hanging_transfer_times_out_and_nothing_else_does(schedule: str) -> None:
    """The gate opens as timed out, so no stream hangs; it is late for ever once the transfer has ended, and never done."""
    with rig(schedule, transfer_timeout=TIMEOUTS[schedule]) as r:
        r.file_fill(0, 1)
        r.file_fill(1, 2)
        held = r.driver.hang("read_file")
        stream = r.streams[0]
        start = r.driver.gate(stream)
        first = r.driver.read_file(stream, r.disk.fd, r.disk.address(0), r.host.address(0), SLOT_BYTES)
        second = r.driver.read_file(stream, r.disk.fd, r.disk.address(1), r.host.address(1), SLOT_BYTES)
        changed: deque[int] = deque()
        assert r.driver.watch_gates([first, second], changed)
        start.open()
        r.driver.wait_gate(stream, first)
        ran: list[int] = []
        r.driver.launch(stream, lambda: ran.append(1))
        r.driver.synchronize()
        assert ran == [1]
        assert r.driver.poll_gate(first) == GATE_TIMED_OUT
        assert "still running after" in r.driver.gate_error(first)
        assert r.driver.poll_gate(second) == GATE_DONE
        assert r.value(r.host.address(0)) == 0
        held.open()
        while r.driver.poll_gate(first) == GATE_TIMED_OUT:
            pass
        assert r.driver.poll_gate(first) == GATE_LATE
        assert "ended after its time limit" in r.driver.gate_error(first)
        assert r.value(r.host.address(0)) == 1
        assert sorted(changed) == [first, first, second], "a change of a gate was not reported"
        for gate in (first, second):
            r.driver.release_gate(gate)


@every_schedule
def test_what_hangs_does_not_keep_the_device_from_closing(schedule: str) -> None:
    """A transfer whose gate was never released is dropped when the device is closed."""
    with rig(schedule, transfer_timeout=TIMEOUTS[schedule]) as r:
        r.driver.hang("write_file", times=None)
        gate = r.driver.write_file(r.streams[0], r.disk.fd, 0, r.host.address(0), SLOT_BYTES)
        r.driver.synchronize()
        assert r.driver.poll_gate(gate) == GATE_TIMED_OUT
        r.driver.release_gate(gate)


@every_schedule
def test_gates_are_released_only_when_no_transfer_needs_them(schedule: str) -> None:
    """Forgetting a closed gate, or one that queued work still waits for, is an error; so is using a forgotten one."""
    with rig(schedule) as r:
        held = r.driver.hang("read_file")
        read = r.driver.read_file(r.streams[0], r.disk.fd, 0, r.host.address(0), SLOT_BYTES)
        with pytest.raises(LogicError, match="still closed"):
            r.driver.release_gate(read)
        block = r.driver.gate(r.streams[1])
        r.driver.wait_gate(r.streams[1], read)
        held.open()
        while r.driver.poll_gate(read) == GATE_PENDING:
            pass
        with pytest.raises(LogicError, match="queued work still waits"):
            r.driver.release_gate(read)
        block.open()
        r.driver.synchronize()
        r.driver.release_gate(read)
        assert r.driver.gates_live == 0
        with pytest.raises(LogicError, match=f"no gate {read}"):
            r.driver.poll_gate(read)
        with pytest.raises(LogicError, match=f"no gate {read}"):
            r.driver.wait_gate(r.streams[0], read)


def test_impossible_ranges_are_refused_at_once() -> None:
    with rig("eager") as r:
        with pytest.raises(LogicError, match="file descriptor -1"):
            r.driver.read_file(r.streams[0], -1, 0, r.host.address(0), 1)
        with pytest.raises(LogicError, match="offset -5"):
            r.driver.read_file(r.streams[0], r.disk.fd, -5, r.host.address(0), 1)
        with pytest.raises(LogicError, match="negative size"):
            r.driver.write_file(r.streams[0], r.disk.fd, 0, r.host.address(0), -1)
        empty = r.driver.write_file(r.streams[0], r.disk.fd, 0, 0, 0)
        assert r.driver.poll_gate(empty) == GATE_DONE
        r.driver.release_gate(empty)


@given(st.sampled_from(SCHEDULES), st.integers(0, 1000), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7)), max_size=12))
def test_bytes_survive_the_way_to_disk_and_back(schedule: str, seed: int, moves: list[tuple[int, int]]) -> None:
    """Device to host to file to host to device, on random streams, in stream and gate order: every byte arrives."""
    with rig(schedule, seed) as r:
        gates: list[int] = []
        for i, (stream_number, slot) in enumerate(moves):
            stream = r.streams[stream_number]
            if gates:
                r.driver.wait_gate(stream, gates[-1])
            r.driver.launch(stream, lambda slot=slot, i=i: r.fill(r.device.address(slot), 100 + i))  # type: ignore[misc]
            r.driver.copy(stream, r.host.address(slot), r.device.address(slot), SLOT_BYTES)
            gates.append(r.driver.write_file(stream, r.disk.fd, r.disk.address(slot), r.host.address(slot), SLOT_BYTES))
            r.driver.wait_gate(stream, gates[-1])
            gates.append(r.driver.read_file(stream, r.disk.fd, r.disk.address(slot), r.host.address(8 + slot), SLOT_BYTES))
            r.driver.wait_gate(stream, gates[-1])
            r.driver.copy(stream, r.device.address(8 + slot), r.host.address(8 + slot), SLOT_BYTES)
        r.driver.synchronize()
        for slot in range(8):
            writers = [i for i, move in enumerate(moves) if move[1] == slot]
            expected = 100 + writers[-1] if writers else 0
            assert r.value(r.device.address(8 + slot)) == expected
        for gate in gates:
            assert r.driver.poll_gate(gate) == GATE_DONE
            r.driver.release_gate(gate)


# --- the pool by itself


class Scripted(Transfer):
    """A transfer that does what the test says, on the pool's thread."""

    def __init__(self, log: list[str], name: str, block: threading.Event | None = None, error: str = "") -> None:
        super().__init__(0, 0, 0, 0, False)
        self.log = log
        self.name = name
        self.block = block
        self.result = error
        self.started = threading.Event()
        self.gate_opened = threading.Event()
        self.opened_count = 0

    def perform(self) -> str:
        self.log.append(self.name)
        self.started.set()
        if self.block is not None:
            self.block.wait(10)
        if self.result == "raise":
            raise ValueError("broken transfer")
        return self.result

    def opened(self) -> None:
        self.opened_count += 1
        self.gate_opened.set()


def test_the_pool_starts_in_submission_order_and_runs_in_parallel() -> None:
    """Two threads: the first two start, the third only when one of them ends; at most two ever run at once."""
    pool = TransferPool(threads=2)
    log: list[str] = []
    blocks = [threading.Event() for _i in range(3)]
    transfers = [Scripted(log, f"t{i}", blocks[i]) for i in range(3)]
    for transfer in transfers:
        pool.submit(transfer)
    assert transfers[0].started.wait(10)
    assert transfers[1].started.wait(10)
    assert not transfers[2].started.is_set()
    assert pool.outstanding() == 3
    assert not pool.wait_idle(0.0)
    blocks[1].set()
    assert transfers[2].started.wait(10)
    blocks[0].set()
    blocks[2].set()
    assert pool.wait_idle(10)
    assert sorted(log[:2]) == ["t0", "t1"]
    assert log[2] == "t2"
    assert [transfer.state for transfer in transfers] == [GATE_DONE] * 3
    assert pool.close(10)
    assert [transfer.opened_count for transfer in transfers] == [1, 1, 1]
    with pytest.raises(LogicError, match="closed"):
        pool.submit(Scripted(log, "late"))


def test_one_thread_keeps_the_order_of_many() -> None:
    pool = TransferPool(threads=1)
    log: list[str] = []
    for i in range(20):
        pool.submit(Scripted(log, f"{i:02}"))
    assert pool.close(10)
    assert log == [f"{i:02}" for i in range(20)]


def test_whatever_a_transfer_raises_its_gate_opens() -> None:
    pool = TransferPool(threads=1)
    transfers = [Scripted([], "a", error="bad disk"), Scripted([], "b", error="raise"), Scripted([], "c")]
    for transfer in transfers:
        pool.submit(transfer)
    assert pool.close(10)
    assert [transfer.state for transfer in transfers] == [GATE_FAILED, GATE_FAILED, GATE_DONE]
    assert "bad disk" in transfers[0].error
    assert "ValueError: broken transfer" in transfers[1].error


def test_a_hung_thread_is_replaced_and_a_dead_file_system_fails_at_once() -> None:
    """One thread: a transfer that times out does not stop the next; when the replacement hangs too, the rest fails unstarted."""
    pool = TransferPool(threads=1, timeout_s=0.01)
    log: list[str] = []
    block = threading.Event()
    first, second = Scripted(log, "first", block), Scripted(log, "second", block)
    pool.submit(first)
    assert first.gate_opened.wait(10)
    assert first.state == GATE_TIMED_OUT
    assert first.running()
    quick = Scripted(log, "quick")
    pool.submit(quick)
    assert quick.gate_opened.wait(10)
    assert quick.state == GATE_DONE
    pool.submit(second)
    assert second.gate_opened.wait(10)
    third = Scripted(log, "third")
    pool.submit(third)
    assert third.gate_opened.wait(10)
    assert third.state == GATE_FAILED
    assert "all of 2 I/O threads hang" in third.error
    assert log == ["first", "quick", "second"]
    block.set()
    assert pool.close(10)
    assert [first.state, second.state] == [GATE_LATE, GATE_LATE]
    assert [t.opened_count for t in (first, second, third)] == [1, 1, 1]


class Watched(Scripted):
    """Keeps the thread that opens its gate until `until` is over."""

    def __init__(self, block: threading.Event, until: Callable[[], None]) -> None:
        super().__init__([], "watched", block)
        self.until = until

    def opened(self) -> None:
        super().opened()
        self.until()


def test_threads_that_hang_together_are_all_replaced() -> None:
    """Three threads hang. The watchdog, kept at the first gate, finds the two others late. It is kept at the last
    gate until three new threads carry out what waited, side by side."""
    pool = TransferPool(threads=3, timeout_s=0.01)
    block, meeting = threading.Event(), threading.Event()
    waiting = [Scripted([], f"waiting {i}", meeting) for i in range(3)]
    started: list[bool] = []

    def let_time_pass() -> None:
        for transfer in hung:
            assert transfer.started.wait(30)
        while time.monotonic() <= max(transfer.deadline_s for transfer in hung):
            meeting.wait(0.001)

    def see_all_start() -> None:
        if not started and all(transfer.state == GATE_TIMED_OUT for transfer in hung):  # else another look comes
            started.extend([transfer.started.wait(5) for transfer in waiting])

    hung = [Watched(block, let_time_pass), Watched(block, see_all_start), Watched(block, see_all_start)]
    pool.submit_all([*hung, *waiting])
    assert hung[2].gate_opened.wait(30)
    meeting.set()
    block.set()
    assert pool.close(10)
    assert started == [True, True, True]


def test_impossible_pools_are_refused() -> None:
    with pytest.raises(ConfigError, match="threads is 0"):
        TransferPool(threads=0)
    with pytest.raises(ConfigError, match="timeout"):
        TransferPool(timeout_s=0.0)
