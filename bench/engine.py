"""The simulated engine of the A/B run: a closed loop of steps around the real manager.

A step is: *schedule* (pages for the step of all running requests, in one batch call; create, resume and resize what is admitted),
the GPU, *update* (commit, in one batch call, and statistics), *close* (what is answered). The GPU's 11.5 ms pass on a clock of the
simulation and are not slept: the manager's time is measured and added to them, nothing overlaps. So the same requests take the same
steps on both builds, and a run takes minutes.

Rule: only calls of the manager are on the clock. What the loop around those of one request costs is measured with caches that do
nothing, and subtracted.
"""

from __future__ import annotations

import statistics
from array import array
from collections import deque
from typing import Final, SupportsIndex

from bench.conversations import Turn, Workload
from bench.work import now
from kv_cache_manager_v2 import KVCache, KVCacheManager, Stream, Tokens, commit_batch, resize_batch

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
        self.some = 0  # tokens that the present step computes
        self.looked_up = turn.prompt[:-1]  # the last token's output is wanted

    def remaining_prompt(self) -> int:
        return len(self.turn.prompt) - self.length

    def cut(self, budget: int) -> int:
        """Take up to `budget` prompt tokens; a request past its prompt computes the token drawn last. Returns what was taken."""
        left = self.remaining_prompt()
        self.some = 1 if left <= 0 else min(left, max(budget, 0))
        return self.some if left > 0 else 0

    def computed(self) -> array[int] | int:
        """The tokens of the present step."""
        if self.remaining_prompt() <= 0:
            return self.turn.answer[self.drawn - 1]
        return self.turn.prompt[self.length : self.length + self.some]

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
        self.close: list[float] = []  # by step
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
        caches, capacities, budget = self._cut_chunks()
        admitted = len(self.running)
        start = now()
        self._grow(caches, capacities)
        self._admit(budget)
        admitted = len(self.running) - admitted
        figures.schedule.append(self._without_loop(now() - start, admitted))
        caches, chunks, closing = self._outcome()
        start = now()
        commit_batch(caches, chunks)
        for cache in closing:
            cache.commit_pending_stats()
        self.manager.get_and_reset_iteration_stats()
        figures.update.append(self._without_loop(now() - start, len(closing)))
        start = now()
        for cache in closing:
            cache.close()
        figures.close.append(self._without_loop(now() - start, len(closing)))
        figures.clock += figures.schedule[-1] + GPU_STEP_S + figures.update[-1] + figures.close[-1]
        self._account()

    def _without_loop(self, seconds: float, turns: int) -> float:
        return max(0.0, seconds - self.loop_cost * max(0, turns))

    def _cut_chunks(self) -> tuple[list[KVCache], list[int], int]:
        """Decide what each running request computes in this step: the token drawn last, or more of its prompt.

        Returns the caches and the capacities that they need, in the order of `running`, and the prompt tokens left for others.
        """
        budget = STEP_TOKENS
        for request in self.running:
            budget -= request.cut(budget)
        return [request.opened() for request in self.running], [request.length + request.some for request in self.running], budget

    def _grow(self, caches: list[KVCache], capacities: list[int]) -> None:
        """Allocate pages for the step of every running request. On a shortage the youngest is suspended."""
        done = resize_batch(caches, capacities)
        while done < len(caches):
            caches.pop()
            capacities.pop()
            self._preempt(self.running.pop())
            done += resize_batch(caches[done:], capacities[done:])

    def _preempt(self, request: Request) -> None:
        request.opened().suspend()
        request.some = 0
        self.waiting.appendleft(request)
        self.figures.preempted += 1

    def _admit(self, budget: int) -> None:
        """Start or go on with waiting requests, first come first served, as far as the step's tokens and the memory reach."""
        while self.waiting and budget > 0:
            request = self.waiting[0]
            cache = request.cache
            if cache is None:
                cache = request.cache = self.manager.create_kv_cache(None, request.looked_up)
                request.length = cache.num_committed_tokens
                self.figures.reused += request.length
            if not cache.resume(self.stream):
                return
            taken = request.cut(budget)
            if not cache.resize(request.length + request.some):
                cache.suspend()
                request.some = 0
                return
            budget -= taken
            self.running.append(self.waiting.popleft())

    def _outcome(self) -> tuple[list[KVCache], list[SupportsIndex | Tokens], list[KVCache]]:
        """What the step computed, to be committed, and the caches whose answer that ends."""
        caches: list[KVCache] = []
        chunks: list[SupportsIndex | Tokens] = []
        closing: list[KVCache] = []
        for request in self.running:
            if request.some:
                caches.append(request.opened())
                chunks.append(request.computed())
                request.length += request.some
                if request.remaining_prompt() <= 0:
                    request.drawn += 1
                    if request.answered():
                        closing.append(request.opened())
        return caches, chunks, closing

    def _account(self) -> None:
        """Record the times of the tokens that the step drew. Answered requests are followed by their next turns."""
        figures = self.figures
        clock = figures.clock
        for request in self.running:
            if request.drawn == 0 or not request.some:
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


def calibrate(requests: int = 1000) -> float:
    """Seconds that a loop over caches costs for each of them without the manager's calls."""
    caches = [object()] * requests
    samples: list[float] = []
    for _i in range(15):
        start = now()
        for cache in caches:
            if cache is None:
                raise AssertionError
        samples.append((now() - start) / requests)
    return statistics.median(samples)
