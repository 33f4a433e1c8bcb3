"""The life of a request: created, resumed, suspended, prefetched, moved to another stream, closed or dropped."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kv_cache_manager_v2 import CacheStatus, KVCacheError, introspection
from tests.hunt.base import MAX_BLOCKS, MAX_OPEN, SCOPES, Found
from tests.hunt.memory import Text
from tests.hunt.requests import Request
from tests.hunt.steps import Steps


class RequestLife(Steps):
    """Creation, residency and end of requests."""

    def create(self) -> None:
        if len(self.open) >= MAX_OPEN:
            return self.close()
        rng = self.rng
        scope = int(rng.random() * len(SCOPES))
        base = self.prompts[scope][int(rng.random() * 4)]
        prompt = base[: rng.randrange(1, len(base) + 1)]
        if rng.random() < 0.6:
            prompt = prompt[: (MAX_BLOCKS - 3) * self.tpb] + self._tokens(rng.randrange(1, 2 * self.tpb + 1))
        given: Sequence[int] | None = prompt[:-1]
        form = rng.random()
        if form < 0.3:
            given = array("i", prompt[:-1])
        elif form < 0.4:
            given = None
        number = next(self.numbers)
        priority = None
        if rng.random() < 0.2:
            level = rng.choice((0, 20, 35, 60, 100))
            priority = lambda ordinal, life_cycle: level  # noqa: E731  # the callback's own form
        probed = None
        if given is not None and rng.random() < 0.3 and self.alone and self.manager.num_open_caches == len(self.open):
            probed = self.attempt(None, self.manager.probe_reuse, SCOPES[scope], given)
        cache = self.attempt(None, self.manager.create_kv_cache, SCOPES[scope], given, number, priority)
        if cache is None:
            return
        found = cache.num_committed_tokens
        if probed is not None and probed != found and self.setup.schedule == "eager" and not self.disturbed:
            raise Found(f"a probe said {probed}, the creation reused {found}")
        if found > (0 if given is None else len(given)):
            raise Found(f"{found} tokens reused of {0 if given is None else len(given)}")
        text = Text(len(self.memory), 1000 + scope)
        text.extend(prompt[:found])
        request = Request(cache, number, scope, text)
        request.prompt = prompt[found:]
        self.outcomes["reused" if found else "cold"] += 1
        self.expect_lengths(request, "created,")
        self.open.append(request)
        if rng.random() < 0.8:
            self._resume(request)

    def resume(self) -> None:
        request = self.pick(lambda r: not r.active and not r.named)
        if request is not None:
            self._resume(request)

    def _resume(self, request: Request) -> None:
        before = request.stream
        stream = self.give_stream(request)
        done = self.attempt(request, request.cache.resume, stream)
        if done:
            request.active = True
            self.outcomes["resumed"] += 1
            if self.rng.random() < 0.7:
                self.step(request, 0)
            return
        if done is False and request.cache.last_shortage is None:
            raise Found("resume is refused without a reason")
        self.outcomes["not resumed"] += 1
        if before is None:
            self.drop_stream(request)
        if self.rng.random() < 0.5:
            self.suspend()

    def suspend(self) -> None:
        request = self.pick(lambda r: r.active and not r.named)
        if request is not None:
            self._suspend(request)

    def _suspend(self, request: Request) -> None:
        self.attempt(request, request.cache.suspend)
        if request.cache.is_active:
            return
        request.active = False
        request.views = []
        if self.rng.random() < 0.4:
            self.drop_stream(request)

    def close(self) -> None:
        request = self.pick(lambda r: True)
        if request is not None:
            self._close(request)

    def _close(self, request: Request) -> None:
        request.views = []
        self.attempt(request, request.cache.close)
        if request.cache.status != CacheStatus.CLOSED:
            if not self.armed:
                raise Found("close() did not close")
            return
        self._gone(request)
        self.drop_stream(request)

    def _gone(self, request: Request) -> None:
        self.open.remove(request)
        self.ended.append(request)
        self.outcomes["closed"] += 1
        if len(self.ended) > 64:
            self.judge_ended(False)

    def drop_handle(self) -> None:
        request = self.pick(lambda r: True)
        if request is None:
            return
        request.views = []
        self.open.remove(request)
        self.ended.append(request)
        self.drop_stream(request, late=True)
        del request.cache  # the next public call closes it
        self.outcomes["handle dropped"] += 1

    def judge_ended(self, last: bool) -> None:
        """What was read wrong must have been named to the request: by an error, or by a line that was logged."""
        if any(request.mismatches for request in self.ended) and not last:
            return  # the line may still come
        for request in self.ended:
            self.judge(request)
        self.ended = []

    def judge(self, request: Request) -> None:
        if not request.mismatches:
            return
        name = str(request.number)
        if request.named or any(name in line for line in self.log.lines):
            self.outcomes["wrong bytes that were named"] += 1
            return
        raise Found(f"request {request.number} read wrong bytes and was told nothing: {request.mismatches[0]}")

    def stop(self) -> None:
        request = self.pick(lambda r: r.committing and not r.named)
        if request is not None:
            self.attempt(request, request.cache.stop_committing)
            try:
                request.committing = introspection.is_commit_allowed(request.cache)
            except KVCacheError:
                request.committing = False

    def plan(self) -> None:
        request = self.pick(lambda r: not r.committing and not r.named)
        if request is not None:
            plan = self.attempt(request, request.cache.plan_committed_block_drop)
            if plan is not None:
                request.plans.append(plan)
                self.plans.append(plan)

    def withdraw(self) -> None:
        if not self.plans:
            return
        plan = self.plans.pop(int(self.rng.random() * len(self.plans)))
        if self.rng.random() < 0.7:
            self.attempt(None, plan.drop)  # type: ignore[attr-defined]  # a PlannedDropHandle

    def prefetch(self) -> None:
        request = self.pick(lambda r: not r.active and not r.named)
        if request is not None:
            done = self.attempt(request, request.cache.prefetch, self.rng.randrange(self.setup.tiers))
            if done is False and request.cache.last_shortage is None:
                raise Found("a prefetch is refused without a reason")
            if not request.named:
                self.attempt(request, lambda: request.cache.is_loaded)

    def move_stream(self) -> None:
        request = self.pick(lambda r: r.active and not r.named)
        if request is None:
            return
        old, owned = request.stream, request.owns_stream
        request.stream = None
        request.spare_stream = old if owned else None
        stream = self.give_stream(request)
        fresh = request.owns_stream

        def change() -> bool:
            request.cache.cuda_stream = stream
            return True

        if not self.attempt(request, change):
            request.stream, request.owns_stream = old, owned
            request.spare_stream = stream if fresh else None
        if request.spare_stream is not None:
            self.device_call(self.own.destroy_stream, request.spare_stream)
            request.spare_stream = None
