"""The engine whose workload is short and always the same, so that each call of its device can be refused in turn.

Rule: an act names its request, does nothing where an earlier refusal left it without what it needs, and checks what it sees as the
hunt does. A call of one request that is refused is made once more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from kv_cache_manager_v2 import ExternalGpuTierConfig, KVCacheManagerConfig, MakeRoom, PageDataLostError, Stream, Transfer
from tests.hunt.base import SCOPES, Found
from tests.hunt.hunter import Hunter
from tests.hunt.memory import Buffer, GroupMemory, Step, Text
from tests.hunt.requests import Request
from tests.hunt.setups import MIB, Group, Setup, draw, manager_config
from tests.support.drivers import RefusingDevice

T = TypeVar("T")

SLOT: Final = 256 << 10
FULL: Final = Group(None, 0, False, 1, 1, SLOT)
WINDOW: Final = Group(6, 1, False, 1, 1, SLOT)
STATE: Final = Group(None, 0, True, 1, 1, SLOT)
MODELS: Final[dict[str, list[Group]]] = {
    "full": [FULL],
    "full+window": [FULL, WINDOW],
    "two pools": [FULL, replace(WINDOW, slot_bytes=2 * SLOT)],
    "hybrid": [FULL, STATE],
    "scratch": [FULL, Group(4, 0, False, 2, 1, SLOT)],
    "external": [FULL],
}
AGAIN: Final = frozenset(
    (
        *("resize", "resume", "commit", "suspend", "close", "create_kv_cache", "prefetch", "fork", "adjust"),
        *("plan_committed_block_drop", "stop_committing", "drop"),
    )
)


def compact(model: str, schedule: str) -> Setup:
    """A manager with every tier: 8 slots of the GPU for each layer group, half as many of the host, as many of the disk."""
    groups = MODELS[model]
    pools = len({group.slot_bytes for group in groups})
    fixed: dict[str, object] = {
        "groups": groups,
        "gpu": 2 * MIB * len(groups),
        "host": 4 * sum(group.slot_bytes for group in groups),
        "disk": 2 * MIB * pools,
        "exclusive_host": model == "two pools",
        "exclusive_disk": model == "hybrid",
        "admission": "all",
        "tokens_per_block": 4,
        "min_snapshot": STATE in groups,
        "scratch_rewind": 0 if model == "scratch" else None,
        "partial": True,
        "backoff": 0,
        "max_util": 1.0,
        "vocabulary": 1000,
        "handles_return": False,
        "views": True,
        "events": True,
        "own_streams": 0.3,
        "miss_history": 5,
        "text_only": False,
    }
    return draw(6, schedule, "full" if model == "external" else model, False, **fixed)


class Worker(Transfer):
    """Owns the pages of an external tier. Each of its calls is counted as one of the device."""

    def __init__(self, device: RefusingDevice, pages: int) -> None:
        self.device = device
        self.memory = bytearray(pages * SLOT)
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.memory))

    def copy_pages(self, stream: Stream, pool_group: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self._queue(
            "copy_pages",
            stream,
            [self.address + SLOT * page for page in sources],
            [self.address + SLOT * page for page in destinations],
            SLOT,
        )

    def to_memory(
        self,
        stream: Stream,
        pool_group: int,
        pool: int,
        pages: Sequence[int],
        offset: int,
        num_bytes: int,
        addresses: Sequence[int],
    ) -> None:
        self._queue("to_memory", stream, [self.address + SLOT * page + offset for page in pages], addresses, num_bytes)

    def from_memory(
        self,
        stream: Stream,
        pool_group: int,
        pool: int,
        pages: Sequence[int],
        offset: int,
        num_bytes: int,
        addresses: Sequence[int],
    ) -> None:
        self._queue("from_memory", stream, addresses, [self.address + SLOT * page + offset for page in pages], num_bytes)

    def _queue(self, name: str, stream: Stream, sources: Sequence[int], targets: Sequence[int], num_bytes: int) -> None:
        refusal = self.device.count(f"transfer.{name}") if self.device.counting else None
        if refusal is not None:
            raise refusal()
        pairs = list(zip(sources, targets, strict=True))

        def kernel() -> None:
            for source, target in pairs:
                ctypes.memmove(target, source, num_bytes)

        self.device.inner.launch(stream, kernel)


class CountedEngine(Hunter):
    """A hunter that does what it is told, one named request after the other."""

    def __init__(self, setup: Setup, folder: str, device: RefusingDevice, worker: Worker | None) -> None:
        self.worker = worker
        self.subject: Request | None = None
        self.healed_at = 0  # calls of the device before the faults ended
        super().__init__(setup, folder, device)
        self.holding = False

    @staticmethod
    def configuration(setup: Setup, folder: str, worker: Worker | None) -> KVCacheManagerConfig:
        config = manager_config(setup, folder)
        config.hit_curve_rate = 1.0
        if worker is not None:
            config.cache_tiers = [ExternalGpuTierConfig(len(worker.memory) // SLOT, worker), *config.cache_tiers[1:]]
        return config

    def config(self, folder: str) -> KVCacheManagerConfig:
        return self.configuration(self.setup, folder, self.worker)

    def map(self) -> None:
        if self.worker is None:
            return super().map()
        view = memoryview(self.worker.memory)
        buffer = Buffer(view, SLOT, SLOT, self.worker.address, SLOT, self.manager.get_page_index_converter(0, "role 0"))
        self.memory = [GroupMemory(0, FULL, [[buffer]], view)]

    def _expect_memory(self, step: Step) -> None:
        if self.worker is None:
            super()._expect_memory(step)

    # --- how it calls

    def pick(self, wanted: Callable[[Request], bool]) -> Request | None:
        request = self.subject
        return request if request is not None and request in self.open and wanted(request) else None

    def attempt(self, request: Request | None, call: Callable[..., T], *arguments: object) -> T | None:
        answer = super().attempt(request, call, *arguments)
        known = request is None or not request.named
        if self.refused and self.armed and known and getattr(call, "__name__", "") in AGAIN:
            answer = super().attempt(request, call, *arguments)
        return answer

    def on(self, request: Request | None, act: Callable[[], None]) -> None:
        """One of the hunt's operations, on this request."""
        self.between()
        self.subject = request
        if request is not None:
            act()

    def between(self) -> None:
        if self.doomed:
            self.destroy_doomed()

    def usable(self, request: Request | None) -> bool:
        return request is not None and request in self.open and request.active and not request.named and not request.final

    # --- what it does

    def text(self, number: int, length: int) -> list[int]:
        return list(range(1000 * number, 1000 * number + length))

    def begin(self, prompt: list[int], scope: int = 0, resume: bool = True, stream: int | None = None) -> Request | None:
        """A request for this prompt, on the GPU. `stream`: which of the engine's."""
        self.between()
        number = next(self.numbers)
        cache = self.attempt(None, self.manager.create_kv_cache, SCOPES[scope], prompt[:-1], number)
        if cache is None:
            return None
        found = cache.num_committed_tokens
        text = Text(len(self.memory), 1000 + scope)
        text.extend(prompt[:found])
        request = Request(cache, number, scope, text)
        request.prompt = prompt[found:]
        self.open.append(request)
        self.expect_lengths(request, "created,")
        if stream is not None:
            request.stream = self.streams[stream]
        if resume:
            self._resume(request)
        return request

    def grow(self, request: Request | None, count: int | None = None, commit: bool = True) -> None:
        """Compute and commit this many tokens; None: the prompt."""
        if not self.usable(request):
            return
        assert request is not None
        self.between()
        number = len(request.prompt) if count is None else count
        history = request.written if self.setup.scratch_rewind is not None else None
        if number and self._resize(request, request.written + number, history):
            self.step(request, number)
            if commit:
                self.commit_all(request)

    def commit_all(self, request: Request | None) -> None:
        if not self.usable(request) or request is None or not request.committing or request.width > 1:
            return
        tokens = request.texts[0].tokens[request.committed : request.written]
        if not tokens:
            return
        self.attempt(request, request.cache.commit, tokens)
        if not self.refused and not request.named:
            request.committed = request.written
            request.history = max(request.history, request.committed)
            self.expect_lengths(request, "committed,")

    def cached(self, *texts: list[int]) -> None:
        """Requests that come, compute their prompts and end."""
        for text in texts:
            request = self.begin(text)
            self.grow(request)
            self.close_now(request)

    def suspend_now(self, request: Request | None) -> None:
        self.on(request, self.suspend)

    def close_now(self, request: Request | None) -> None:
        if request is not None and request in self.open:
            self._close(request)

    def resume_now(self, request: Request | None) -> None:
        self.on(request, self.resume)
        if self.usable(request) and request is not None:
            self.step(request, 0)

    def ahead_of(self, request: Request | None, count: int, follow: bool, confirm: bool = True) -> None:
        """Commit ahead, let another request match it, compute, confirm."""
        if not self.usable(request) or request is None or not (request.written == request.committed == request.history):
            return
        tokens = self.text(900 + request.number % 50, count)
        request.prompt = [*tokens, *request.prompt]
        if not self._resize(request, request.written + count, None):
            return
        self.attempt(request, request.cache.commit_ahead, tokens)
        if self.refused:
            return
        request.committed += count
        self.expect_lengths(request, "committed ahead,")
        if not confirm:
            self._suspend(request)
            if not request.active:
                request.committed = request.history
            return self.close_now(request) if request.active else self.expect_lengths(request, "taken back,")
        follower = self._follow(request, tokens) if follow else None
        self.step(request, count)
        if not self._resize(request, None, request.written):
            self.close_now(request)  # what it has committed ahead is taken back
        if follower is not None:
            self.resume_now(follower)

    def whole(self, chosen: Sequence[Request | None], count: int, ending: str, policy: MakeRoom | None = None) -> None:
        """A step as one object, which ends in one of its ways."""
        part = [r for r in chosen if r is not None and self.usable(r) and r.committing and r.width == 1]
        part = [r for r in part if r.written == r.committed == r.history]
        if not part:
            return
        before = [r.committed for r in part]
        taken: list[Request] = []

        def run() -> bool:
            with self.manager.step([r.cache for r in part], count, None, policy) as step:
                self._note_suspended()
                taken[:] = [part[position] for position in step.positions]
                step.slots_to_write(0)
                step.slots_to_read(0)
                if all(r.row >= 0 for r in taken):
                    step.rows(self.tables)
                if {id(cache) for cache in step.short} & {id(cache) for cache in step.caches}:
                    raise Found("a cache without pages takes part in a step")
                if any(cache.is_active for cache in step.suspended):
                    raise Found("a suspended cache of a step is active")
                tokens = [self.text(800 + r.number % 50, count) for r in taken]
                for r, new in zip(taken, tokens, strict=True):
                    r.capacity = r.written + count
                    r.prompt = [*new, *r.prompt]
                if ending == "ahead":
                    step.commit_ahead(tokens)
                for r in taken:
                    self.step(r, count)
                if ending == "commit":
                    step.commit(tokens)
                elif ending == "advance":
                    step.advance()
            return True

        self.of_several(lambda: super(CountedEngine, self).attempt(None, run))
        self._note_suspended()
        for r, was in zip(part, before, strict=True):
            self.take_over(r, was, count)
            if not self.refused and r in taken and ending != "advance" and r.committed != was + count:
                raise Found(f"{r} took part in a step that has committed nothing")

    def of_several(self, call: Callable[[], object]) -> None:
        """A call of several requests: a loss in it is one of theirs, whose next call names it."""
        try:
            call()
        except Found as found:
            if not isinstance(found.__cause__, PageDataLostError) or not self.disturbed:
                raise

    def take_over(self, r: Request, was: int, count: int) -> None:
        """Lengths after a call of several requests, which may have ended halfway."""
        cache = r.cache
        if cache.num_committed_tokens not in (was, was + count) or cache.num_committed_tokens > r.written:
            raise Found(f"{r} has {cache.num_committed_tokens} committed tokens after a step; it had {was}, and {count} were new")
        r.committed, r.history, r.capacity = cache.num_committed_tokens, cache.history_length, cache.capacity

    # --- the end

    def end(self) -> None:
        assert self.refusing is not None
        self.healed_at = self.refusing.calls
        super().end()

    def serve_again(self) -> None:
        """More prompts than the GPU and the host hold, then the first ones again: each tier serves, each byte is read back."""
        prompts = [self.text(700 + number, 13) for number in range(5)]
        for prompt in (*prompts, *prompts[:2]):
            request = self.begin(prompt)
            if request is None or not request.active:
                self.settled()
                self.resume_now(request)
            if request is None or not request.active:
                raise Found(f"a lone request is refused after all is healed: {request and request.cache.last_shortage}")
            self.step(request, 0)
            if request.prompt:
                length = len(prompt)
                history = request.written if self.setup.scratch_rewind is not None else None
                self._expect_room(request.cache, request.cache.resize, length, history)
                request.capacity, request.history = length, request.history if history is None else history
                self.step(request, len(request.prompt))
                self.commit_all(request)
            self._close(request)
