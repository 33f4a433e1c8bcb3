"""File transfers of the emulated device, the gates that tests hold, and the operations that start and await transfers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kv_cache_manager_v2.device.driver import GATE_PENDING
from kv_cache_manager_v2.device.file_transfers import Transfer, move_file_range
from kv_cache_manager_v2.emulated.address_space import AddressSpace
from kv_cache_manager_v2.emulated.streams import Operation, StreamQueue


class GateKeeper(ABC):
    """What starts transfers, and is told that a gate has opened: a schedule."""

    @abstractmethod
    def start(self, transfer: EmulatedTransfer) -> None:
        """The transfer may start, after those that were started before. A second call does nothing."""

    @abstractmethod
    def changed(self) -> None:
        """A gate has opened from outside."""


class EmulatedGate:
    """A door in a stream, or before a file transfer: nothing after it runs until `open()`."""

    def __init__(self, name: str, keeper: GateKeeper) -> None:
        self.name = name
        self.is_open = False
        self._keeper = keeper

    def open(self) -> None:
        """Let what waits go on; a second call does nothing. Any thread may call it."""
        if not self.is_open:
            self.is_open = True
            self._keeper.changed()


class EmulatedTransfer(Transfer):
    """A file transfer that can be told to fail or to hang."""

    def __init__(self, fd: int, offset: int, address: int, nbytes: int, writes: bool, space: AddressSpace) -> None:
        super().__init__(fd, offset, address, nbytes, writes)
        self.space = space
        self.short = False  # an ordered fault: end after half of the bytes
        self.broken = False  # an ordered fault: end with EIO
        self.hold: EmulatedGate | None = None  # an ordered fault: do not end before this opens
        self.waits: list[TransferWait] = []  # every operation that was queued to wait for the gate
        self.started = False  # the schedule has it

    def awaited(self) -> bool:
        """Whether queued work still waits for the gate, open or not."""
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
        # what a device does before it fails: some of the work
        error = move_file_range(self.fd, self.offset, self.address, nbytes // 2, self.writes)
        if self.broken:
            return f"injected: input/output error (errno 5) of {nbytes} bytes"
        return error or f"injected: short by {nbytes - nbytes // 2} of {nbytes} bytes"


class HoldOperation(Operation):
    """Waits for a gate that the test opens."""

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
    """Everything before some file transfers is complete: they may start, in this order. The stream goes on at once."""

    def __init__(self, keeper: GateKeeper, transfers: list[EmulatedTransfer]) -> None:
        self.keeper = keeper
        self.transfers = transfers

    def instant(self) -> bool:
        return True

    def run(self, queue: StreamQueue, steps: int) -> bool:
        for transfer in self.transfers:
            self.keeper.start(transfer)
        return True

    def describe(self) -> str:
        more = f" and {len(self.transfers) - 1} more" if len(self.transfers) > 1 else ""
        return f"starts the {self.transfers[0].describe()}{more}"


class TransferWait(Operation):
    """Waits until the gates of some file transfers open."""

    def __init__(self, transfers: list[EmulatedTransfer]) -> None:
        self.transfers = transfers
        self.passed = False
        self._open = 0  # so many from the front are known to be open

    def note(self) -> None:
        """Tell the transfers that queued work waits for them."""
        for transfer in self.transfers:
            transfer.waits.append(self)

    def blocked(self) -> bool:
        known = self._open  # several threads may look at once
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
