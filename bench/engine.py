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
        self.active = False
        self.length = 0  # tokens whose keys and values are computed
        self.drawn = 0  # tokens of the answer that were drawn
        self.chunk: array[int] | list[int] = []  # what the present step computes

    def remaining_prompt(self) -> int:
        return len(self.turn.prompt) - self.length

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
        grow_loop, commit_loop = self.loop_cost
        self._cut_chunks()
        looped = grow_loop * len(self.running)
        start = now()
        self._grow()
        self._admit()
        figures.schedule.append(max(0.0, now() - start - looped))
        looped = commit_loop * len(self.running)
        start = now()
        finished = self._commit()
        self.manager.get_and_reset_iteration_stats()
        figures.update.append(max(0.0, now() - start - looped))
        figures.clock += figures.schedule[-1] + GPU_STEP_S + figures.update[-1]
        self._account(finished)

    def _cut_chunks(self) -> None:
        """What each running request computes in this step: the token drawn last, or more of its prompt."""
        budget = STEP_TOKENS
        for request in self.running:
            budget -= self._cut(request, budget)

    def _cut(self, request: Request, budget: int) -> int:
        """Take up to `budget` prompt tokens; a request past its prompt computes the token drawn last. Returns what was taken."""
        left = request.remaining_prompt()
        if left <= 0:
            request.chunk = [request.turn.answer[request.drawn - 1]]
            return 0
        some = min(left, max(budget, 0))
        request.chunk = request.turn.prompt[request.length : request.length + some]
        return some

    def _grow(self) -> None:
        """Room for the step of every running request; where there is none, the youngest makes way."""
        running = self.running
        index = 0
        while index < len(running):
            request = running[index]
            chunk = request.chunk
            if chunk and not request.opened().resize(request.length + len(chunk)):
                self._preempt(running.pop())
                continue
            index += 1

    def _preempt(self, request: Request) -> None:
        request.opened().suspend()
        request.active = False
        request.chunk = []
        self.waiting.appendleft(request)
        self.figures.preempted += 1

    def _admit(self) -> None:
        """Start or go on with waiting requests, first come first served, as far as the step's tokens and the memory reach."""
        budget = STEP_TOKENS - sum([len(request.chunk) for request in self.running if request.remaining_prompt() > 0])
        while self.waiting and budget > 0:
            request = self.waiting[0]
            if request.cache is None:
                prompt = request.turn.prompt
                request.cache = self.manager.create_kv_cache(None, prompt[:-1], id=None)
                request.length = request.cache.num_committed_tokens
                self.figures.reused += request.length
            if not request.cache.resume(self.stream):
                return
            taken = self._cut(request, budget)
            if not request.cache.resize(request.length + len(request.chunk)):
                request.cache.suspend()
                return
            budget -= taken
            request.active = True
            self.waiting.popleft()
            self.running.append(request)

    def _commit(self) -> list[Request]:
        """Commit what the step computed, and close what is answered; the requests that drew a token."""
        drew: list[Request] = []
        for request in self.running:
            chunk = request.chunk
            if chunk:
                cache = request.opened()
                cache.commit(chunk)
                request.length += len(chunk)
                if request.remaining_prompt() <= 0:
                    request.drawn += 1
                    drew.append(request)
                    if request.drawn == len(request.turn.answer):
                        cache.commit_pending_stats()
                        cache.close()
                        request.active = False
        return drew

    def _account(self, drew: list[Request]) -> None:
        """Note the times of the tokens; answered requests are followed by their next turns."""
        figures = self.figures
        now = figures.clock
        for request in drew:
            if request.drawn == 1:
                figures.first_token.append(now - request.arrived)
            elif request.drawn % 16 == 0:
                figures.between_tokens.append(now - request.last_token)
            request.last_token = now
            if not request.active:
                figures.requests += 1
                self.waiting.append(Request(self.workload.follow(request.turn), now))
        self.running = [request for request in self.running if request.active]


def calibrate(requests: int = 1000) -> tuple[float, float]:
    """Seconds that the loops of `_grow` and of `_commit` cost for one request without the manager's calls."""
    workload = Workload(0)
    some = [Request(workload.follow(None), 0.0) for _i in range(requests)]
    for request in some:
        request.chunk = [1]
    grow: list[float] = []
    commit: list[float] = []
    for _i in range(15):
        start = now()
        index = 0
        while index < len(some):
            request = some[index]
            chunk = request.chunk
            if chunk and not request.length + len(chunk):
                raise AssertionError
            index += 1
        middle = now()
        for request in some:
            chunk = request.chunk
            if chunk:
                request.length += len(chunk)
                if request.remaining_prompt() <= 0:
                    raise AssertionError
        grow.append((middle - start) / requests)
        commit.append((now() - middle) / requests)
    return statistics.median(grow), statistics.median(commit)
