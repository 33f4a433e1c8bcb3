"""The simulated engine of the A/B run: a closed loop of steps around the real manager.

A step is: *schedule* (create and resume what was admitted, resize everything by what the step computes), the GPU, *update* (commit,
statistics, close what is finished). The GPU's 11.5 ms pass on a clock of the simulation and are not slept: the manager's time is
measured and added to them, nothing overlaps. So the same requests take the same steps on both builds, and a run takes minutes.

Rule: only calls of the manager are on the clock. What the loops around them cost is measured with caches that do nothing, and
subtracted.
"""

from __future__ import annotations

import statistics
from array import array
from collections import deque
from typing import Final

from bench.conversations import Turn, Workload
from bench.work import now
from kv_cache_manager_v2 import KVCache, KVCacheManager, Stream

GPU_STEP_S: Final = 0.0115
STEP_TOKENS: Final = 8192  # prompt tokens computed in one step, all requests together


class Request:
    """A turn being served."""

    def __init__(self, turn: Turn, now: float) -> None:
        self.turn = turn
        self.arrived = now  # s on the simulation's clock, as are the two below
        self.last_token = 0.0
        self.cache: KVCache | None = None  # from its admission on
        self.length = 0  # tokens whose keys and values are computed
        self.drawn = 0  # tokens of the answer that were drawn
        self.chunk: array[int] | list[int] = []  # what the present step computes

    def remaining_prompt(self) -> int:
        return len(self.turn.prompt) - self.length

    def answered(self) -> bool:
        return self.drawn == len(self.turn.answer)

    def opened(self) -> KVCache:
        cache = self.cache
        assert cache is not None
        return cache


class Figures:
    """What a run measured, in seconds."""

    def __init__(self) -> None:
        self.schedule: list[float] = []  # by step
        self.update: list[float] = []  # by step
        self.first_token: list[float] = []  # by request
        self.between_tokens: list[float] = []  # a sample: of every 16th token
        self.clock = 0.0  # of the simulation
        self.requests = 0
        self.reused = 0  # prompt tokens
        self.preempted = 0


class Engine:
    """Serves `num_open` requests at a time."""

    def __init__(self, manager: KVCacheManager, stream: Stream, workload: Workload, num_open: int) -> None:
        self.manager = manager
        self.stream = stream
        self.workload = workload
        self.figures = Figures()
        self.waiting: deque[Request] = deque(Request(workload.follow(None), 0.0) for _i in range(num_open))
        self.running: list[Request] = []  # oldest first
        self.loop_cost = calibrate()

    def serve(self, requests: int) -> Figures:
        """Go on until so many requests were answered."""
        while self.figures.requests < requests:
            self.step()
        for request in [*self.running, *self.waiting]:
            if request.cache is not None:
                request.cache.close()
        return self.figures

    def step(self) -> None:
        figures = self.figures
        growing = self._cut_chunks()
        start = now()
        self._grow(growing)
        self._admit()
        figures.schedule.append(max(0.0, now() - start - self.loop_cost * len(growing)))
        committing, closing = self._outcome()
        start = now()
        for cache, chunk in committing:
            cache.commit(chunk)
        for cache in closing:
            cache.commit_pending_stats()
            cache.close()
        self.manager.get_and_reset_iteration_stats()
        figures.update.append(max(0.0, now() - start - self.loop_cost * (len(committing) + len(closing))))
        figures.clock += figures.schedule[-1] + GPU_STEP_S + figures.update[-1]
        self._account()

    def _cut_chunks(self) -> list[tuple[KVCache, int]]:
        """Decide what each running request computes in this step: the token drawn last, or more of its prompt.

        Returns the capacities that they need, in the order of `running`.
        """
        budget = STEP_TOKENS
        growing: list[tuple[KVCache, int]] = []
        for request in self.running:
            budget -= self._cut(request, budget)
            growing.append((request.opened(), request.length + len(request.chunk)))
        return growing

    def _cut(self, request: Request, budget: int) -> int:
        """Take up to `budget` prompt tokens; a request past its prompt computes the token drawn last. Returns what was taken."""
        left = request.remaining_prompt()
        if left <= 0:
            request.chunk = [request.turn.answer[request.drawn - 1]]
            return 0
        some = min(left, max(budget, 0))
        request.chunk = request.turn.prompt[request.length : request.length + some]
        return some

    def _grow(self, growing: list[tuple[KVCache, int]]) -> None:
        """Room for the step of every running request; where there is none, the youngest makes way."""
        done = grow_all(growing, 0)
        while done < len(growing):
            growing.pop()
            self._preempt(self.running.pop())
            done = grow_all(growing, done)

    def _preempt(self, request: Request) -> None:
        request.opened().suspend()
        request.chunk = []
        self.waiting.appendleft(request)
        self.figures.preempted += 1

    def _admit(self) -> None:
        """Start or go on with waiting requests, first come first served, as far as the step's tokens and the memory reach."""
        budget = STEP_TOKENS - sum([len(request.chunk) for request in self.running if len(request.chunk) > 1])
        while self.waiting and budget > 0:
            request = self.waiting[0]
            cache = request.cache
            if cache is None:  # the last token's output is wanted, so it is not looked up
                cache = request.cache = self.manager.create_kv_cache(None, request.turn.prompt[:-1])
                request.length = cache.num_committed_tokens
                self.figures.reused += request.length
            if not cache.resume(self.stream):
                return
            taken = self._cut(request, budget)
            if not cache.resize(request.length + len(request.chunk)):
                cache.suspend()
                return
            budget -= taken
            self.running.append(self.waiting.popleft())

    def _outcome(self) -> tuple[list[tuple[KVCache, object]], list[KVCache]]:
        """What the step computed, to be committed, and the caches whose answer that ends."""
        committing: list[tuple[KVCache, object]] = []
        closing: list[KVCache] = []
        for request in self.running:
            if request.chunk:
                committing.append((request.opened(), request.chunk))
                request.length += len(request.chunk)
                if request.remaining_prompt() <= 0:
                    request.drawn += 1
                    if request.answered():
                        closing.append(request.opened())
        return committing, closing

    def _account(self) -> None:
        """Note the times of the tokens that the step drew; answered requests are followed by their next turns."""
        figures = self.figures
        clock = figures.clock
        for request in self.running:
            if request.drawn == 0 or not request.chunk:
                continue
            if request.drawn == 1:
                figures.first_token.append(clock - request.arrived)
            elif request.drawn % 16 == 0:
                figures.between_tokens.append(clock - request.last_token)
            request.last_token = clock
            if request.answered():
                figures.requests += 1
                self.waiting.append(Request(self.workload.follow(request.turn), clock))
        self.running = [request for request in self.running if not request.answered()]


def grow_all(growing: list[tuple[KVCache, int]], beg: int) -> int:
    """Resize from position `beg` on; the position of the first that was refused."""
    for position, (cache, capacity) in enumerate(growing[beg:], beg):
        if not cache.resize(capacity):
            return position
    return len(growing)


def calibrate(requests: int = 1000) -> float:
    """Seconds that a loop over pairs costs for each without the manager's calls, counting as `grow_all` does."""
    pairs = [(object(), number) for number in range(1, requests + 1)]
    samples: list[float] = []
    for _i in range(15):
        start = now()
        for done, (_cache, capacity) in enumerate(pairs):  # noqa: B007
            if not capacity:
                raise AssertionError
        samples.append((now() - start) / requests)
    return statistics.median(samples)
