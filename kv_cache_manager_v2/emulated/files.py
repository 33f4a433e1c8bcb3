"""The emulated driver's file transfers, by the handles of their gates."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

from kv_cache_manager_v2.device.checksums import FileChecksums
from kv_cache_manager_v2.device.driver import GATE_PENDING
from kv_cache_manager_v2.emulated.address_space import AddressSpace
from kv_cache_manager_v2.emulated.faults import EFFECT_SHORT, FaultPlan
from kv_cache_manager_v2.emulated.schedules import Schedule
from kv_cache_manager_v2.emulated.streams import StreamQueue
from kv_cache_manager_v2.emulated.transfers import EmulatedTransfer, TransferStart, TransferWait
from kv_cache_manager_v2.errors import LogicError


class FileTransfers:
    """Every transfer whose gate has not been released."""

    def __init__(self, schedule: Schedule, space: AddressSpace, failures: FaultPlan, hangs: FaultPlan, numbers: count[int]) -> None:
        self.by_gate: dict[int, EmulatedTransfer] = {}  # by gate handle; handles are never reused
        self.checksums: dict[int, FileChecksums] = {}  # by file descriptor
        self._schedule = schedule
        self._space = space
        self._failures = failures
        self._hangs = hangs
        self._numbers: Iterator[int] = numbers  # of all handles of the device

    def transfer(self, call: str, gate: int) -> EmulatedTransfer:
        """The transfer of a gate."""
        found = self.by_gate.get(gate)
        if found is None:
            raise LogicError(f"{call}: no gate {gate}: never returned by a file transfer, or released")
        return found

    def submit(
        self, call: str, queue: StreamQueue, fd: int, offsets: list[int], addresses: list[int], nbytes: int, gates: list[int]
    ) -> None:
        """Queue transfers on the stream, and append their gates. After an exception, `gates` has those of the queued transfers."""
        self._check(call, fd, offsets, addresses, nbytes)
        transfers: list[EmulatedTransfer] = []
        refusal: BaseException | None = None
        checksums = self.checksums.get(fd)
        for i in range(len(offsets)):
            transfer = self._schedule.new_transfer(fd, offsets[i], addresses[i], nbytes, call == "write_file", self._space)
            transfer.checksums = checksums
            if self._failures.armed or self._hangs.armed:
                refusal = self._inject_faults(call, transfer)
                if refusal is not None:
                    break
            transfers.append(transfer)
        if transfers:
            self._queue(queue, transfers, gates)
        if refusal is not None:
            raise refusal

    def _check(self, call: str, fd: int, offsets: list[int], addresses: list[int], nbytes: int) -> None:
        if nbytes < 0:
            raise LogicError(f"{call}: a negative size, {nbytes} bytes")
        if len(offsets) != len(addresses):
            raise LogicError(f"{call}: {len(offsets)} offsets but {len(addresses)} addresses")
        if offsets and (fd < 0 or min(offsets) < 0):
            raise LogicError(f"{call}: file descriptor {fd} and offset {min(offsets)} must not be negative")
        if offsets and nbytes > 0:
            self._space.check_hosts(call, addresses, nbytes)

    def _inject_faults(self, call: str, transfer: EmulatedTransfer) -> BaseException | None:
        """Mark the transfer with its injected faults; returns an exception if the call should raise instead."""
        with self._schedule.lock:
            fault = self._failures.next(call)
            hanging = self._hangs.next(call)
        if fault is not None:
            if fault.raises():
                return fault.error()
            transfer.short = fault.effect == EFFECT_SHORT
            transfer.broken = not transfer.short
        transfer.hold = hanging.gate if hanging is not None else None
        return None

    def _queue(self, queue: StreamQueue, transfers: list[EmulatedTransfer], gates: list[int]) -> None:
        made: list[int] = []
        start = TransferStart(self._schedule, transfers)
        try:
            for transfer in transfers:
                made.append(next(self._numbers))
                self.by_gate[made[-1]] = transfer
            if queue.direct:
                for transfer in transfers:
                    self._schedule.start(transfer)
                    self._schedule.advance()
            else:
                self._schedule.submit(queue, start)
            gates += made
        except BaseException:  # refused or interrupted: transfers that were not queued get no gate
            with self._schedule.lock:
                queued = start in queue.pending
            for i in range(len(made)):
                if not queued and not transfers[i].submitted:
                    self.by_gate.pop(made[i], None)
                elif made[i] not in gates:
                    gates.append(made[i])
            raise

    def wait(self, queue: StreamQueue, gates: list[int]) -> None:
        """Make the stream wait until all of the gates are open."""
        transfers = [self.transfer("wait_gate", gate) for gate in gates]
        if queue.direct:
            transfers = [transfer for transfer in transfers if transfer.state == GATE_PENDING]
        if transfers:
            wait = TransferWait(transfers)
            try:
                wait.register()
                self._schedule.submit(queue, wait)
            except BaseException:
                with self._schedule.lock:
                    wait.passed = wait not in queue.pending  # a wait that was not queued must not block the release of its gates
                raise

    def watch(self, gates: list[int], changed: deque[int]) -> bool:
        for gate in gates:
            self.transfer("watch_gates", gate).watch(gate, changed)
        return True

    def release(self, gate: int) -> None:
        """Free a gate that is open and that no queued work waits for."""
        transfer = self.transfer("release_gate", gate)
        if transfer.state == GATE_PENDING:
            raise LogicError(f"release_gate: gate {gate} is still closed: {transfer.describe()}; wait until it opens")
        if transfer.awaited():
            raise LogicError(f"release_gate: queued work still waits for gate {gate}: {transfer.describe()}")
        del self.by_gate[gate]

    def leaks(self) -> list[str]:
        """The gates that were not released, one text each."""
        return [f"gate {handle} of the {transfer.describe()}" for handle, transfer in self.by_gate.items()]
