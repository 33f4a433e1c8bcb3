"""File transfers of the emulated device, gates for tests, and the stream operations that start transfers or wait for gates."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kv_cache_manager_v2.device.driver import GATE_PENDING
from kv_cache_manager_v2.device.file_transfers import Transfer, move_file_range
from kv_cache_manager_v2.emulated.address_space import AddressSpace
from kv_cache_manager_v2.emulated.streams import Operation, StreamQueue


class TransferScheduler(ABC):
    """Starts transfers, and is notified when a test opens a gate. Implemented by the schedules."""

    @abstractmethod
    def start(self, transfer: EmulatedTransfer) -> None:
        """Let the transfer run, after those started before it. A second call does nothing."""

    @abstractmethod
    def changed(self) -> None:
        """A test has opened a gate."""


class EmulatedGate:
    """A barrier for tests: it holds back the work of a stream, or a file transfer, until `open()`."""

    def __init__(self, name: str, scheduler: TransferScheduler) -> None:
        self.name = name
        self.is_open = False
        self._scheduler = scheduler

    def open(self) -> None:
        """Let the work run. A second call does nothing; any thread may call it."""
        if not self.is_open:
            self.is_open = True
            self._scheduler.changed()


class EmulatedTransfer(Transfer):
    """A file transfer that can be made to fail or to hang."""

    def __init__(self, fd: int, offset: int, address: int, nbytes: int, writes: bool, space: AddressSpace) -> None:
        super().__init__(fd, offset, address, nbytes, writes)
        self.space = space
        self.short = False  # injected fault: end after half of the bytes
        self.broken = False  # injected fault: end with EIO
        self.hold: EmulatedGate | None = None  # injected fault: hang until this is opened
        self.waits: list[TransferWait] = []  # every operation queued to wait for the gate

    def awaited(self) -> bool:
        """Whether queued work waits for the gate, even if it is open."""
        return any(not wait.passed for wait in self.waits)

    def held(self) -> bool:
        return self.hold is not None and not self.hold.is_open

    def perform(self) -> str:
        call = "write_file" if self.writes else "read_file"
        nbytes = self.nbytes
        if nbytes > 0:
            self.space.check_host(f"{call}, when it ran", self.address, nbytes)
        if not (self.broken or self.short):
            return super().perform()
        if self.writes and self.checksums is not None:
            self.checksums.invalidate(self.offset, nbytes)
        # As on a real device, a failing transfer moves some of the bytes.
        error = move_file_range(self.fd, self.offset, self.address, nbytes // 2, self.writes)
        if self.broken:
            return f"injected: input/output error (errno 5) of {nbytes} bytes"
        return error or f"injected: short by {nbytes - nbytes // 2} of {nbytes} bytes"


class HoldOperation(Operation):
    """Waits for a gate that a test opens."""

    def __init__(self, gate: EmulatedGate) -> None:
        self.gate = gate

    def instant(self) -> bool:
        return True

    def blocked(self) -> bool:
        return not self.gate.is_open

    def run(self, queue: StreamQueue, steps: int) -> bool:
        return True

    def describe(self) -> str:
        return f"waits for {self.gate.name}, which is closed"


class TransferStart(Operation):
    """Starts file transfers in order, once the work queued before them is complete. The stream does not wait for them."""

    def __init__(self, scheduler: TransferScheduler, transfers: list[EmulatedTransfer]) -> None:
        self.scheduler = scheduler
        self.transfers = transfers

    def instant(self) -> bool:
        return True

    def run(self, queue: StreamQueue, steps: int) -> bool:
        for transfer in self.transfers:
            self.scheduler.start(transfer)
        return True

    def describe(self) -> str:
        more = f" and {len(self.transfers) - 1} more" if len(self.transfers) > 1 else ""
        return f"starts the {self.transfers[0].describe()}{more}"


class TransferWait(Operation):
    """Waits until the gates of some file transfers are open."""

    def __init__(self, transfers: list[EmulatedTransfer]) -> None:
        self.transfers = transfers
        self.passed = False
        self._open = 0  # how many of the first transfers' gates are known to be open

    def register(self) -> None:
        """Enter this wait in the transfers, so that their gates are not released before it."""
        for transfer in self.transfers:
            transfer.waits.append(self)

    def blocked(self) -> bool:
        known = self._open  # a local copy: several threads may ask at once
        while known < len(self.transfers) and self.transfers[known].state != GATE_PENDING:
            known += 1
        self._open = known
        return known < len(self.transfers)

    def instant(self) -> bool:
        return True

    def run(self, queue: StreamQueue, steps: int) -> bool:
        self.passed = True
        return True

    def describe(self) -> str:
        left = max(1, len(self.transfers) - self._open)
        more = f" and {left - 1} more" if left > 1 else ""
        return f"waits for the gate of the {self.transfers[len(self.transfers) - left].describe()}{more}"
