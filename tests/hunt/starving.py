"""The hunt without memory: a limit of the address space makes allocations fail inside of the manager's calls.

Rule: a call that found no memory has changed nothing, or the manager says that it is poisoned; later calls have all memory again.
Each run is a child process, since a build whose runtime cannot report the failure would end the process.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Final, TypeVar

from tests.hunt.base import Found
from tests.hunt.hunter import Hunter
from tests.hunt.interrupts import InterruptedHunter, Source, follow
from tests.hunt.requests import Request
from tests.hunt.setups import draw

T = TypeVar("T")

SIZES: Final = (1 << 20, 1 << 16, 1 << 13, 1 << 11, *range(512, 32, -16))  # of ballast, in bytes with CPython's header
HEADER: Final = 33
NONE_FAILED, FAILED, POISONED, FOUND = 0, 3, 4, 5  # exit statuses of a child
NAMES: Final = {NONE_FAILED: "no call failed", FAILED: "calls failed", POISONED: "poisoned", FOUND: "findings"}
WELL: Final = frozenset(("no call failed", "calls failed", "poisoned"))  # how a child may end
PATIENCE_S: Final = 120  # a child that takes longer hangs


class Starved(Source):
    """So many small objects can be allocated, drawn anew for each call, and nothing else. Sometimes there is no limit."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"starving {seed}")
        self.before = resource.getrlimit(resource.RLIMIT_AS)
        self.ballast: list[bytes] = []

    def arm(self) -> None:
        if self.rng.random() < 0.5:
            return
        left = int(self.rng.random() ** 6 * 2000)
        pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115 (closed at once)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), self.before[1]))
        ballast = self.ballast
        for size in SIZES:
            with contextlib.suppress(MemoryError):
                while True:
                    ballast.append(bytes(size - HEADER))
        for _i in range(min(left, len(ballast))):
            ballast.pop(int(self.rng.random() * len(ballast)))

    def disarm(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self.before)
        self.ballast.clear()


class StarvedHunter(InterruptedHunter):
    """The engine has all the memory that it needs; the calls that it makes of the manager have not."""

    def __init__(self, seed: int, folder: str) -> None:
        setup = draw(seed, "eager", None, False, handles_return=False)
        self.memory_source = Starved(seed)
        super().__init__(setup, folder, Source())
        self.holding = False  # a kernel that runs late would run inside of a call
        self.tolerated = (*self.tolerated, MemoryError)
        self.disturbed = True

    def attempt(self, request: Request | None, call: Callable[..., T], *arguments: object) -> T | None:
        if not self.interrupting:
            return Hunter.attempt(self, request, call, *arguments)
        self.armed = True
        self.heal_at = 1 << 40

        ballast = self.memory_source.ballast

        def starved(*given: object) -> T:
            self.memory_source.arm()
            try:
                return call(*given)
            finally:
                ballast.clear()  # first of all, since this alone needs no memory
                self.memory_source.disarm()

        try:
            return Hunter.attempt(self, request, starved, *arguments)
        except Found as error:
            self._end_if_poisoned(error)
            raise


def run(seed: int, operations: int) -> int:
    """One run in this process; the exit status of the child that makes it."""
    with tempfile.TemporaryDirectory(prefix="kvcm-hunt-") as folder:
        hunter = StarvedHunter(seed, folder)
        try:
            follow(hunter, operations)
        except Found as found:
            print(f"FOUND {found}", flush=True)
            return FOUND
    if hunter.outcomes["poisoned"]:
        return POISONED
    return FAILED if hunter.outcomes["refused MemoryError"] else NONE_FAILED


def child(seed: int, operations: int) -> str:
    """How a child process with this run ends."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = FOUND
        signal.alarm(PATIENCE_S)
        try:
            status = run(seed, operations)
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return NAMES.get(code, f"ended by signal {-code}")


def starve(seed: int, runs: int, operations: int) -> Counter[str]:
    """So many runs, counted by how they ended."""
    return Counter(child(seed + number, operations) for number in range(runs))
