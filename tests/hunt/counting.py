"""Every driver call of a workload refused in turn: once, twice, for ever, alone and with a second one, with any exception.

Rule: the calls that the manager makes of its device are counted, from its construction on; each number is a point of injection.
What must hold afterwards is what the engine checks at its end: bytes, counts, service, shutdown.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final, NamedTuple

from kv_cache_manager_v2 import EmulatedDriver, KVCacheManager
from tests.hunt.base import Found
from tests.hunt.chapters import Chapters, Workload
from tests.hunt.counted import Worker, compact
from tests.hunt.setups import Setup
from tests.support.drivers import REFUSALS, RefusingDevice, Strange, refusing_device

FOREVER: Final = 1 << 40
TIMES: Final = (1, 2, FOREVER)
NEXT: Final = 3  # so many calls after each point are refused with it
PAGES: Final = 8  # of the external tier


class Injection(NamedTuple):
    """One point: which call fails, how often, with what; `end`: counted from the shutdown on."""

    number: int
    times: int
    error: int  # index in `REFUSALS`
    end: bool = False

    def describe(self) -> str:
        often = "for ever" if self.times == FOREVER else f"{self.times} times"
        where = "of the shutdown" if self.end else "of the workload"
        return f"call {self.number} {where} refused {often} with {type(REFUSALS[self.error]()).__name__}"


class Result(NamedTuple):
    names: list[str]  # of the calls up to the healing
    end_names: list[str]  # of those of the shutdown
    outcomes: dict[str, int]


def run(workload: Workload, folder: str, injections: list[Injection]) -> Result:
    """The workload with these refusals. Raises Found."""
    setup = compact(workload.model, workload.schedule)
    device = refusing_device(EmulatedDriver(setup.schedule, setup.seed, setup.transfer_timeout))
    for injection in injections:
        order = (injection.number, injection.number + injection.times, REFUSALS[injection.error])
        (device.orders_at_end if injection.end else device.orders).append(order)
    words = " and ".join(injection.describe() for injection in injections)
    try:
        engine = _construct(setup, workload, folder, device, injections)
        engine.follow([workload.chapter])
    except Found as found:
        device.counting = False  # what the finding leaves can be torn down
        name = ", ".join(name for _number, name in device.refused[:3])
        raise Found(f"{workload.describe()}, {words} ({name or 'never reached'}): {found}") from found
    return Result(device.names[: engine.healed_at], device.names[device.end_at :], dict(engine.outcomes))


def _construct(setup: Setup, workload: Workload, folder: str, device: RefusingDevice, injections: list[Injection]) -> Chapters:
    """The manager; where its construction is refused, nothing is left and the next one succeeds."""
    device.counting = True
    worker = Worker(device, PAGES) if workload.model == "external" else None
    if device.orders and min(first for first, _end, _error in device.orders) < _calls_of_construction(setup, workload, folder):
        try:
            KVCacheManager(Chapters.configuration(setup, folder, worker), driver=device).shutdown()
        except (MemoryError, RuntimeError, KeyboardInterrupt, Strange) as error:
            if not device.refused:
                raise Found(f"a construction fails without a fault: {error}") from error
        device.heal()  # what it could not free is freed by a later manager of the device, or the device says so when it closes
    engine = Chapters(setup, folder, device, worker)
    engine.tolerated = (*engine.tolerated, *(type(REFUSALS[injection.error]()) for injection in injections))
    engine.armed = engine.disturbed = bool(device.orders)
    return engine


_construction: dict[str, int] = {}


def _calls_of_construction(setup: Setup, workload: Workload, folder: str) -> int:
    if workload.model not in _construction:
        device = refusing_device(EmulatedDriver())
        device.counting = True
        worker = Worker(device, PAGES) if workload.model == "external" else None
        manager = KVCacheManager(Chapters.configuration(setup, folder, worker), driver=device)
        _construction[workload.model] = device.calls
        manager.shutdown()
    return _construction[workload.model]


def alone(plain: Result) -> Iterator[list[Injection]]:
    """Each point, each number of times, with three of the four exceptions in turn."""
    for end, names in ((False, plain.names), (True, plain.end_names)):
        for number in range(len(names)):
            for turn, times in enumerate(TIMES):
                yield [Injection(number, times, (number + turn) % len(REFUSALS), end)]


def together(plain: Result) -> Iterator[list[Injection]]:
    """Each point with each of the next calls, and with the next call of each kind."""
    names = plain.names
    for first in range(len(names)):
        seconds = list(range(first + 1, min(len(names), first + 1 + NEXT)))
        kinds = {names[number] for number in seconds}
        for number in range(first + 1 + NEXT, len(names)):
            if names[number] not in kinds:
                kinds.add(names[number])
                seconds.append(number)
        for second in seconds:
            turn = first + second
            error = turn % len(REFUSALS)
            yield [Injection(first, 1 + turn % 2, error), Injection(second, TIMES[turn % 3], (error + second) % len(REFUSALS))]


def sample(workload: Workload, folder: str, count: int, seed: int) -> list[list[Injection]]:
    """Some of the cases."""
    plain = run(workload, folder, [])
    cases = [*alone(plain), *together(plain)]
    return random.Random(f"{seed} {workload.describe()}").sample(cases, min(count, len(cases)))
