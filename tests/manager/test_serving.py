"""Many requests at once: in-flight batching under pressure, reuse between requests, coverage that only grows."""

from __future__ import annotations

import random

import pytest

from kv_cache_manager_v2 import GpuCacheTierConfig, HostCacheTierConfig
from tests.support.engine import Token
from tests.support.models import KIB, MIB, attention, model
from tests.support.rig import Request, Rig, mixed, toks


class Job:
    """A request to serve: a prompt, and tokens to generate."""

    def __init__(self, number: int, prompt: int, length: int) -> None:
        self.tokens: list[Token] = mixed(number * 100_000, number * 100_000 + length)
        self.prompt = prompt
        self.request: Request | None = None

    @property
    def done(self) -> int:
        return len(self.request.tokens) if self.request is not None else 0


class Server:
    """In-flight batching: on a shortage the newest request is suspended, and the last suspended is the first to be resumed."""

    def __init__(self, rig: Rig, jobs: list[Job], interval: int, chunk: int) -> None:
        self.rig = rig
        self.waiting = jobs
        self.running: list[Job] = []
        self.suspended: list[Job] = []
        self.interval = interval  # steps between two arrivals
        self.chunk = chunk  # tokens of prompt a step
        self.suspensions = 0
        self.finished = 0

    def run(self, limit: int) -> None:
        step = 0
        while self.waiting or self.running or self.suspended:
            self.resume_suspended()
            if self.waiting and not self.suspended and step % self.interval == 0:
                self.admit(self.waiting[0])
            for job in list(self.running):
                if job in self.running:
                    self.advance(job)
            step += 1
            assert step < limit, (
                f"no end in sight: {len(self.waiting)} waiting, {len(self.running)} running, {len(self.suspended)} suspended"
            )

    def admit(self, job: Job) -> None:
        request = self.rig.request(job.tokens[: job.prompt - 1])
        if not request.resume():
            request.close()
            return
        job.request = request
        self.waiting.pop(0)
        self.running.append(job)

    def resume_suspended(self) -> None:
        while self.suspended and self.request(self.suspended[-1]).resume():
            self.running.append(self.suspended.pop())

    def advance(self, job: Job) -> None:
        request = self.request(job)
        size = min(self.chunk, job.prompt - job.done) if job.done < job.prompt else 1
        while not request.advance(job.tokens[job.done : job.done + size]):
            shortage = request.cache.last_shortage
            assert shortage is not None
            assert not shortage.permanent
            last = self.running.pop()
            self.request(last).suspend()
            self.suspended.append(last)
            self.suspensions += 1
            if last is job:
                return
        if job.done == len(job.tokens):
            request.close()
            self.running.remove(job)
            self.finished += 1

    def request(self, job: Job) -> Request:
        assert job.request is not None
        return job.request


@pytest.mark.parametrize(
    ("requests", "average", "interval", "tokens_per_block", "gpu_mib", "schedule"),
    [
        (20, 100, 1, 32, 2, "random"),
        (20, 100, 4, 32, 2, "random"),
        (24, 100, 32, 64, 4, "random"),
        (10, 400, 1, 32, 4, "eager"),
        (10, 400, 4, 128, 4, "eager"),
    ],
)
def test_inflight_batching(requests: int, average: int, interval: int, tokens_per_block: int, gpu_mib: int, schedule: str) -> None:
    """Suspending the last and resuming it first, every request finishes, and every byte of its history is right at every step."""
    rng = random.Random(requests * average + interval)
    layers = [attention(0, tokens_per_block * 1024), attention(1, tokens_per_block * 1024, window=96, sink=16)]
    tiers = [GpuCacheTierConfig(gpu_mib * MIB), HostCacheTierConfig(64 * MIB)]
    with Rig(model(layers, tokens_per_block=tokens_per_block, tiers=tiers), schedule, requests) as rig:
        jobs = []
        for number in range(requests):
            length = rng.randint(average // 2, average * 3 // 2)
            jobs.append(Job(number, length * 3 // 4, length))
        server = Server(rig, jobs, interval, 48)
        server.run(20_000)
        assert server.finished == requests
        if interval == 1:
            assert server.suspensions > 0


def test_a_second_pass_hits_everything() -> None:
    """20 sequences of 1000 tokens, twice: the second pass reuses all but nothing."""
    layers = [attention(0, 4 * KIB, 4 * KIB), attention(1, 4 * KIB, 4 * KIB, window=128)]
    with Rig(model(layers, gpu=32 * MIB)) as rig:
        sequences = [toks(n * 10_000, n * 10_000 + 1000) for n in range(20)]
        for tokens in sequences:
            assert rig.extend(tokens) == 0
        for tokens in sequences:
            assert rig.extend(tokens) == 1000
