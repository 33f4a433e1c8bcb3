"""The base of the hunting engine: what it counts, how it calls the manager, and which errors a fault explains.

Rule: what is refused has changed nothing; an error that no fault explains ends the hunt with `Found`.
"""

from __future__ import annotations

import gc
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import Final, TypeVar

from kv_cache_manager_v2 import (
    CacheStatus,
    ConfigError,
    CorruptedError,
    CuError,
    Driver,
    EmulatedDriver,
    EventMirror,
    KVCacheEventManager,
    KVCacheManager,
    KVCacheManagerConfig,
    LogicError,
    OutOfMemoryError,
    PageDataLostError,
    ReuseScope,
)
from kv_cache_manager_v2.emulated.transfers import EmulatedGate
from tests.hunt.memory import GroupMemory, map_memory
from tests.hunt.requests import Request
from tests.hunt.setups import Setup, manager_config
from tests.support.drivers import RefusingDevice, ReturningDevice, returning_device

T = TypeVar("T")

MAX_OPEN: Final = 10
MAX_BLOCKS: Final = 12  # of a request
SCOPES: Final = (None, ReuseScope(1, None), ReuseScope(None, 7))


class Found(AssertionError):
    """Something is wrong."""


class Quiet(logging.Handler):
    """Keeps what was logged: a line that names a request tells of its loss."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Base:
    """What every operation needs: the manager, the counts, one way to call."""

    def __init__(self, setup: Setup, folder: str, refusing: RefusingDevice | None = None) -> None:
        """`refusing`: the device of the manager, where calls are to be refused one by one; the engine's own calls go around it."""
        self.setup = setup
        self.rng = random.Random(f"operations {setup.seed} {setup.schedule}")
        self.device = EmulatedDriver(setup.schedule, setup.seed, setup.transfer_timeout) if refusing is None else refusing.inner
        self.own: Driver = returning_device(self.device) if setup.handles_return else self.device
        self.driver: Driver = self.own if refusing is None else refusing
        self.refusing = refusing
        self.tolerated: tuple[type[BaseException], ...] = (CuError, OutOfMemoryError)
        self.listener = KVCacheEventManager(1 << 16) if setup.events else None
        self.mirror = EventMirror()
        self.log = Quiet()
        self.logger = logging.getLogger("kv_cache_manager_v2")
        self.logger_before = self.logger.handlers, self.logger.propagate
        self.logger.handlers, self.logger.propagate = [self.log], False
        self.manager = KVCacheManager(self.config(folder), self.listener, driver=self.driver)
        self.tpb = setup.tokens_per_block
        self.memory: list[GroupMemory] = []
        self.map()
        self.ssm = next((m.index for m in self.memory if m.group.ssm), None)
        self.open: list[Request] = []
        self.ended: list[Request] = []  # closed; mismatches of kernels that still run may come
        self.plans: list[object] = []
        self.streams = [self.own.create_stream() for _ in range(2)]
        self.doomed: list[int] = []  # streams to be destroyed once the manager was called again
        self.numbers = itertools.count(1_000_000)
        self.operations = 0
        self.alone = True  # no other thread calls the manager
        self.lenient = False  # lengths that a refused call has changed are taken over
        self.trace: list[str] | None = None  # what was called, for who looks into a finding
        self.outcomes: Counter[str] = Counter()
        self.refused = False  # the latest call
        self.armed = False
        self.disturbed = False  # ever
        self.interrupted = False  # ever: an interrupted step takes back what it has committed ahead, from others too
        self.holding = setup.schedule != "threads"  # whose streams are late anyway
        self.wary = False  # of pages without memory, of which this process would die
        self.heal_at = 0
        self.hangs: list[EmulatedGate] = []
        self.held: list[tuple[int, EmulatedGate]] = []  # blocked streams, and the operation at which they go on
        self.prompts = [[self._tokens(MAX_BLOCKS * self.tpb) for _ in range(4)] for _ in SCOPES]

    def config(self, folder: str) -> KVCacheManagerConfig:
        return manager_config(self.setup, folder)

    def _tokens(self, count: int) -> list[int]:
        vocabulary = self.setup.vocabulary
        draw = self.rng.random
        return [int(draw() * vocabulary) for _ in range(count)]

    def map(self) -> None:
        self.memory = map_memory(self.manager, self.setup.groups, self.setup.scratch_rewind is not None)

    # --- calls

    def attempt(self, request: Request | None, call: Callable[..., T], *arguments: object) -> T | None:
        """The answer of one public call, or None where an error that a fault explains came instead; then nothing has changed."""
        self.operations += 1
        self.refused = True
        if self.trace is not None:
            self.trace.append(f"{self.operations}: {request} {getattr(call, '__qualname__', call)} {arguments}")
        try:
            answer = call(*arguments)
            self.refused = False
            return answer
        except PageDataLostError as error:
            if not self.disturbed and not (self.interrupted and "took them back" in str(error)):
                raise Found(f"a loss without a fault: {error}") from error
            if request is None:
                raise Found(f"a loss that concerns no request is raised: {error}") from error
            request.named = request.named or str(error) or "named"
            self.outcomes["named"] += 1
        except self.tolerated as error:
            if not self.armed:
                raise Found(f"an error without a fault: {type(error).__name__}: {error}") from error
            self.outcomes[f"refused {type(error).__name__}"] += 1
            self.note(f"refused: {error}")
        except (CorruptedError, ConfigError) as error:
            raise Found(f"{type(error).__name__}: {error}") from error
        except LogicError as error:
            hanging = (self.hangs or self.held) and "gate" in str(error)
            self.note(f"refused: {error}")
            self.let_go()
            waiting = self.armed and request is None and self.manager.num_open_caches != len(self.open)
            if not hanging and not waiting:
                raise Found(f"LogicError: {error}") from error
            self.outcomes["stuck by a hanging transfer" if hanging else "a dropped handle cannot be closed yet"] += 1
        if request is not None and request.cache.status != CacheStatus.CLOSED:
            self.expect_lengths(request, "after an error")
        return None

    def note(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.operations}: {text}")

    def expect_lengths(self, request: Request, when: str) -> None:
        if not request.agrees():
            cache = request.cache
            if self.lenient and self.armed:
                request.committed, request.history = cache.num_committed_tokens, cache.history_length
                request.capacity = cache.capacity
                return
            raise Found(f"{when} {request} has {cache.num_committed_tokens}, {cache.history_length}, {cache.capacity}")

    def device_call(self, call: Callable[..., T], *arguments: object) -> T:
        """A call of the engine's own; where a fault was ordered for it, the faults end."""
        for _i in range(100):
            try:
                return call(*arguments)
            except (CuError, OutOfMemoryError):
                if not self.armed:
                    raise
                self.heal()
        raise Found("the device does not heal")

    def collect(self) -> None:
        """A handle that was dropped may still hang on the frames of an exception that the engine has seen."""
        if self.manager.num_open_caches != len(self.open):
            gc.collect()

    def pick(self, wanted: Callable[[Request], bool]) -> Request | None:
        found = [request for request in self.open if wanted(request)]
        return found[int(self.rng.random() * len(found))] if found else None

    def heal(self) -> None:
        self.note("healed")
        self.device.heal()
        if self.refusing is not None:
            self.refusing.heal()
        for gate in self.hangs:
            gate.open()
        self.hangs = []
        self.armed = False

    # --- streams

    def hold(self, stream: int) -> None:
        """Block a stream for some operations: what is queued on it runs late."""
        self.note(f"stream {stream} is blocked")
        gate = self.device.gate(self.own.real[stream] if isinstance(self.own, ReturningDevice) else stream)
        self.held.append((self.operations + self.rng.randrange(1, 60), gate))

    def let_go(self, now: int | None = None) -> None:
        """Blocked streams go on: all of them, or those whose time has come."""
        for _until, gate in self.held:
            if now is None or _until <= now:
                gate.open()
        self.held = [] if now is None else [(until, gate) for until, gate in self.held if until > now]

    def give_stream(self, request: Request) -> int:
        """A stream for a request that has none now."""
        if request.stream is None:
            if self.rng.random() < self.setup.own_streams:
                request.stream = self.device_call(self.own.create_stream)
                request.owns_stream = True
            else:
                request.stream = self.rng.choice(self.streams)
                request.owns_stream = False
        return request.stream

    def drop_stream(self, request: Request, late: bool = False) -> None:
        """The request no longer uses its stream; one of its own is destroyed, at once or once the manager was called again."""
        gone = [request.stream] if request.owns_stream else []
        for stream in (*gone, request.spare_stream):
            if stream is not None and late:
                self.doomed.append(stream)
            elif stream is not None:
                self.device_call(self.own.destroy_stream, stream)
        request.spare_stream = None
        request.stream = None
        request.owns_stream = False

    def destroy_doomed(self) -> None:
        if self.manager.num_open_caches == len(self.open):
            for stream in self.doomed:
                self.device_call(self.own.destroy_stream, stream)
            self.doomed = []
