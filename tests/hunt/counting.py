"""Every driver call of a workload refused in turn: once, twice, for ever, with any exception.

Rule: a script of the hunting engine passes every public call; the calls that the manager makes of its device are counted, and each
number is a point of injection. What must hold afterwards is what the engine checks at its end: bytes, counts, service, shutdown.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final, NamedTuple

from kv_cache_manager_v2 import EmulatedDriver, KVCacheManager
from tests.hunt.base import Found
from tests.hunt.hunter import Hunter
from tests.hunt.setups import Setup, draw, manager_config
from tests.support.drivers import REFUSALS, RefusingDevice, Strange, refusing_device

FOREVER: Final = 1 << 40
TIMES: Final = (1, 2, FOREVER)
SCRIPT: Final = """
create write fill write commit
create create write commit write commit decode fork write widen write converge create write stop plan write batch
suspend prefetch create write commit write write write resume resume move_stream write commit advance rewind disagg
commit own_rows hold_view write ask ask ask statistics drop_handle create write commit fork resume decode suspend
create write write write commit prefetch resume withdraw resize_level resume create write commit grow_and_shrink
adjust resume resume write commit close create write commit write commit decode batch suspend suspend create write
write write commit close clear create write commit check
"""


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
    calls: int  # of the workload
    end_calls: int  # of the shutdown
    names: list[str]
    refused: list[tuple[int, str]]


def workload(model: str) -> Setup:
    """A manager with every tier, small enough that the script moves pages between all of them."""
    fixed: dict[str, object] = {
        "host": 1 << 20,
        "disk": 4 << 20,
        "gpu": (2 << 20) * (2 if model in ("two pools", "hybrid", "hybrid+window") else 1),
        "tokens_per_block": 4,
        "handles_return": False,
        "views": True,
        "events": True,
        "max_util": 1.0,
        "own_streams": 0.3,
    }
    return draw(5, "eager", model, False, **fixed)


def run(setup: Setup, folder: str, injections: list[Injection]) -> Result:
    """The script with these refusals. Raises Found."""
    device = refusing_device(EmulatedDriver(setup.schedule, setup.seed, setup.transfer_timeout))
    for injection in injections:
        order = (injection.number, injection.number + injection.times, REFUSALS[injection.error])
        (device.orders_at_end if injection.end else device.orders).append(order)
    words = " and ".join(injection.describe() for injection in injections)
    try:
        hunter = _construct(setup, folder, device, tuple(type(REFUSALS[injection.error]()) for injection in injections))
        hunter.follow(SCRIPT.split())
    except Found as found:
        device.counting = False  # what the finding leaves can be torn down
        name = ", ".join(name for _number, name in device.refused[:3])
        raise Found(f"{words} ({name or 'never reached'}): {found}") from found
    return Result(device.end_at, device.calls - device.end_at, device.names, device.refused)


def _construct(setup: Setup, folder: str, device: RefusingDevice, kinds: tuple[type[BaseException], ...]) -> Hunter:
    """The manager; where its construction is refused, nothing is left and the next one succeeds."""
    device.counting = True
    if device.orders and device.orders[0][0] < _calls_of_construction(setup, folder):
        try:
            KVCacheManager(manager_config(setup, folder), driver=device).shutdown()
        except (MemoryError, RuntimeError, KeyboardInterrupt, Strange) as error:
            if not device.refused:
                raise Found(f"a construction fails without a fault: {error}") from error
        device.heal()  # what it could not free is freed by a later manager of the device, or the device says so when it closes
    hunter = Hunter(setup, folder, device)
    hunter.tolerated = (*hunter.tolerated, *kinds)
    hunter.armed = hunter.disturbed = bool(device.orders)
    return hunter


_construction: dict[str, int] = {}


def _calls_of_construction(setup: Setup, folder: str) -> int:
    if setup.model not in _construction:
        device = refusing_device(EmulatedDriver())
        device.counting = True
        manager = KVCacheManager(manager_config(setup, folder), driver=device)
        _construction[setup.model] = device.calls
        manager.shutdown()
    return _construction[setup.model]


def every(calls: int, end_calls: int) -> Iterator[list[Injection]]:
    """Each point, each number of times, each exception."""
    for end, count in ((False, calls), (True, end_calls)):
        for number in range(count):
            for times in TIMES:
                for error in range(len(REFUSALS)):
                    yield [Injection(number, times, error, end)]


def pairs(calls: int, count: int, seed: int) -> Iterator[list[Injection]]:
    """A sample of two points together."""
    rng = random.Random(seed)
    kinds = len(REFUSALS)
    for _i in range(count):
        first, second = sorted(rng.sample(range(calls), 2))
        yield [
            Injection(first, rng.choice((1, 2)), rng.randrange(kinds)),
            Injection(second, rng.choice(TIMES), rng.randrange(kinds)),
        ]
