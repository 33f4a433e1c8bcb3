"""The hunt with interrupts: KeyboardInterrupt at random instants inside of the manager's calls.

Rule: after an interrupt the manager works, or says that it is poisoned; a call that was interrupted has happened or not. No later
call hangs, and no byte is wrong. The engine closes the request whose call was interrupted.

Three sources. A timer's signal. Calls of the driver, which are carried out and then interrupted: any of them can be chosen, and a
finding comes again. The same for the places of the package at which a signal can be handled, on the interpreted build.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

import kv_cache_manager_v2
from kv_cache_manager_v2 import CacheStatus, EmulatedDriver, KVCacheError, LogicError
from kv_cache_manager_v2.emulated.streams import CallOperation
from tests.hunt import memory
from tests.hunt.base import Found
from tests.hunt.hunter import Hunter
from tests.hunt.requests import Request
from tests.hunt.setups import Setup
from tests.support.drivers import refusing_device

T = TypeVar("T")

PACKAGE: Final = str(Path(kv_cache_manager_v2.__file__).parent)
KERNELS: Final = memory.__file__
DEVICE: Final = str(Path(PACKAGE) / "emulated")


class Restart(Exception):
    """The operation under way was interrupted, and what it left is tidied up."""


class Poisoned(Exception):
    """The manager says that it is broken."""


class Source:
    """Where interrupts come from: armed before a call, disarmed after it."""

    def arm(self) -> None:
        """From here on an interrupt may come."""

    def disarm(self) -> None:
        """None comes until then."""

    def release(self) -> None:
        """None comes any more."""
        self.disarm()

    def describe(self) -> str:
        """Where the interrupts came, for the report of a finding."""
        return ""


class Timer(Source):
    """A signal after some microseconds, drawn anew for each call; only in some of the calls."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw
        self.inside = False
        self.places: list[str] = []
        self.before = signal.signal(signal.SIGALRM, self._strike)

    def _strike(self, _number: int, frame: FrameType | None) -> None:
        if not self.inside:
            return
        if _runs_a_kernel(frame):
            signal.setitimer(signal.ITIMER_REAL, 5e-5)  # a kernel runs on the device, which no interrupt of the host reaches
            return
        self.inside = False
        self.places.append(_place_of(frame))
        raise KeyboardInterrupt

    def arm(self) -> None:
        after = self.draw()
        if after > 0:
            self.inside = True
            signal.setitimer(signal.ITIMER_REAL, after)

    def disarm(self) -> None:
        self.inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def release(self) -> None:
        self.disarm()
        signal.signal(signal.SIGALRM, self.before)

    def describe(self) -> str:
        return f"; interrupted {len(self.places)} times, at last {', '.join(self.places[-3:])}"


def _runs_a_kernel(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == KERNELS or isinstance(frame.f_locals.get("self"), CallOperation):
            return True
        frame = frame.f_back
    return False


def _place_of(frame: FrameType | None) -> str:
    """The innermost functions under way. Compiled ones have no frame."""
    names: list[str] = []
    while frame is not None and len(names) < 4:
        names.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(names)


class Places(Source):
    """The places of these numbers at which a signal can be handled, in the package but not in the emulated device.

    The interpreter handles signals at the start of a Python function and after a call of a C function. Counted over all calls.
    """

    def __init__(self, numbers: list[int]) -> None:
        self.count = 0
        self.numbers = sorted(numbers, reverse=True)
        self.places: list[str] = []

    def arm(self) -> None:
        sys.setprofile(self._pass)

    def disarm(self) -> None:
        sys.setprofile(None)

    def describe(self) -> str:
        return f"; interrupted at {', '.join(self.places)}"

    def _pass(self, frame: FrameType, event: str, _argument: Any) -> None:
        name = frame.f_code.co_filename
        if event not in ("call", "c_return") or not name.startswith(PACKAGE) or name.startswith(DEVICE):
            return
        if frame.f_code.co_name == "__del__":
            return  # what a finaliser raises, Python itself only reports
        self.count += 1
        if self.numbers and self.count >= self.numbers[-1]:
            self.numbers.pop()
            self.places.append(f"{name.removeprefix(PACKAGE)}:{frame.f_lineno} {frame.f_code.co_name}")
            sys.setprofile(None)  # armed again with the next call
            raise KeyboardInterrupt


class Calls(Source):
    """Calls of the driver, by number: each is carried out, and the interrupt comes before it returns."""

    def __init__(self, numbers: list[int], setup: Setup) -> None:
        self.device = refusing_device(EmulatedDriver(setup.schedule, setup.seed, setup.transfer_timeout))
        self.device.after = True
        self.device.orders = [(number, number + 1, KeyboardInterrupt) for number in numbers]

    def arm(self) -> None:
        self.device.counting = True

    def disarm(self) -> None:
        self.device.counting = False

    def describe(self) -> str:
        return f"; interrupted {len(self.device.refused)} times, at last after {self.device.refused[-3:]}"


class InterruptedHunter(Hunter):
    """The engine, with interrupts in what `attempt` calls."""

    def __init__(self, setup: Setup, folder: str, source: Source) -> None:
        super().__init__(setup, folder, source.device if isinstance(source, Calls) else None)
        self.source = source
        self.interrupting = True
        self.wary = True
        self.actions = {name: self._restarting(action) for name, action in self.actions.items()}

    def _restarting(self, action: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                action()
            except Restart:
                self.outcomes["interrupted"] += 1

        return run

    def attempt(self, request: Request | None, call: Callable[..., T], *arguments: object) -> T | None:
        if not self.interrupting:
            return super().attempt(request, call, *arguments)
        try:
            try:
                self.source.arm()
                found = super().attempt(request, call, *arguments)
            finally:
                self.source.disarm()
        except KeyboardInterrupt:
            self.interrupted = True
            self._tidy(request)
            raise Restart from None
        except Found as error:
            self._end_if_poisoned(error)
            raise
        return found

    def _end_if_poisoned(self, error: BaseException) -> None:
        """A manager that says why it is broken has done its duty."""
        reason = self.manager.poison_reason() if hasattr(self.manager, "poison_reason") else None
        if reason is not None:
            raise Poisoned(str(reason)) from error

    def _tidy(self, request: Request | None) -> None:
        """Close the request whose call was interrupted, and those whose lengths a call for several may have changed."""
        self.interrupting = False
        try:
            self.manager.check_invariants()
            for other in list(self.open):
                if other is request or other.cache.status == CacheStatus.CLOSED or not other.agrees():
                    self._close(other)
            self.map()
        except (KVCacheError, AssertionError) as error:
            self._end_if_poisoned(error)
            raise Found(f"after an interrupt: {type(error).__name__}: {error}") from error
        finally:
            self.interrupting = True

    def end(self) -> None:
        self.interrupting = False
        self.source.disarm()
        super().end()

    def close_device(self) -> None:
        """The manager cannot know of an object that a driver's call has made, if the interrupt came before the call returned."""
        left = [leak for leak in self.device.leaks() if not leak.startswith(("event", "stream", "chunk"))]
        if left:
            raise Found(f"left on the device: {left}")
        with contextlib.suppress(LogicError):
            self.device.close()


def _bury(hunter: InterruptedHunter) -> None:
    """A poisoned manager can be shut down, whatever is open."""
    hunter.let_go()
    for request in hunter.open:
        request.views = []
    try:
        for request in hunter.open[::2]:  # the others are closed by the shutdown
            request.cache.close()
        hunter.manager.shutdown()
        for request in hunter.open:
            request.cache.close()
    except (KVCacheError, AssertionError) as error:
        raise Found(f"a poisoned manager cannot be shut down: {error}") from error


def follow(hunter: Hunter, operations: int) -> None:
    """Run a hunt. With interrupts, a manager that says that it is poisoned ends it early and must still shut down."""
    if not isinstance(hunter, InterruptedHunter):
        return hunter.run(operations)
    try:
        hunter.run(operations)
    except Poisoned:
        hunter.outcomes["poisoned"] += 1
        _bury(hunter)
    except Found as found:
        raise Found(f"{found}{hunter.source.describe()}") from found
    finally:
        hunter.source.release()
