"""Many requests at once: in-flight batching under pressure, reuse between requests, coverage that only grows."""

from __future__ import annotations

import random

import pytest

from kv_cache_manager_v2 import GpuCacheTierConfig, HostCacheTierConfig
from tests.support import inside
from tests.support.engine import Token
from tests.support.rig import KIB, MIB, Request, Rig, attention, mixed, model, toks


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
        self.parked: list[Job] = []
        self.interval = interval  # steps between two arrivals
        self.chunk = chunk  # tokens of prompt a step
        self.suspensions = 0
        self.finished = 0

    def run(self, limit: int) -> None:
        step = 0
        while self.waiting or self.running or self.parked:
            self.resume_parked()
            if self.waiting and not self.parked and step % self.interval == 0:
                self.admit(self.waiting[0])
            for job in list(self.running):
                if job in self.running:
                    self.advance(job)
            step += 1
            assert step < limit, (
                f"no end in sight: {len(self.waiting)} waiting, {len(self.running)} running, {len(self.parked)} parked"
            )

    def admit(self, job: Job) -> None:
        request = self.rig.request(job.tokens[: job.prompt - 1])
        if not request.resume():
            request.close()
            return
        job.request = request
        self.waiting.pop(0)
        self.running.append(job)

    def resume_parked(self) -> None:
        while self.parked and self.request(self.parked[-1]).resume():
            self.running.append(self.parked.pop())

    def advance(self, job: Job) -> None:
        request = self.request(job)
        size = min(self.chunk, job.prompt - job.done) if job.done < job.prompt else 1
        while not request.advance(job.tokens[job.done : job.done + size]):
            shortage = request.cache.last_shortage
            assert shortage is not None
            assert not shortage.permanent
            victim = self.running.pop()
            self.request(victim).suspend()
            self.parked.append(victim)
            self.suspensions += 1
            if victim is job:
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


def test_layers_of_different_block_lengths() -> None:
    """128 tokens a block with a layer of 64: 163 of prompt and 97 decoded, then all 260 are reused."""
    layers = [attention(0, 16 * KIB, 16 * KIB), attention(1, 8 * KIB, 8 * KIB, override=64)]
    with Rig(model(layers, tokens_per_block=128)) as rig:
        tokens = mixed(0, 260)
        request = rig.start(tokens[:163])
        assert request.advance(tokens[:163])
        for position in range(163, 260):
            assert request.advance(tokens[position : position + 1])
        request.check()
        request.close()
        again = rig.start([*tokens, *toks(5000, 5079)])
        assert len(again.tokens) == 260
        assert again.advance(toks(5000, 5079))
        again.check()


# --- coverage of pages: a conversation's endpoints survive its longer and shorter turns (32 tokens a block, window 16 and full)


def conversation() -> Rig:
    return Rig(model([attention(0, 4 * KIB), attention(1, 4 * KIB, window=16)], min_snapshot=True))


@pytest.mark.parametrize("by", ["commit", "reuse"])
def test_a_wider_page_takes_the_place_of_a_narrower_one(by: str) -> None:
    """An endpoint's page of 8 tokens is superseded by one of 16, then of 32: the old ones leave the tree though still held."""
    with conversation() as rig:
        tokens = toks(0, 32)
        rig.extend(tokens[:8])
        holder = rig.create(tokens[:8])
        (block,) = inside.tree_blocks(rig.manager, tokens)
        old = inside.page_of(block, 1)
        assert old is not None
        for length in (16, 32):
            if by == "commit":
                rig.seed(tokens[:length])
            else:
                assert rig.extend(tokens[:length]) == length // 2
            assert inside.coverage(rig.manager, tokens, 1) == [length]
            assert old.owner is None
            assert old.alive()
        assert holder.num_committed_tokens == 8
        holder.close()
        assert not old.alive()
        assert rig.probe(tokens) == 32


@pytest.mark.parametrize("order", ["short first", "long first"])
def test_a_rewind_endpoint_survives_the_longer_turn(order: str) -> None:
    """The endpoint at 80 survives the one at 160, made before or after it: the full layer's page covers 32 there, the window's
    16."""
    with conversation() as rig:
        tokens = toks(0, 160)
        for length in (80, 160) if order == "short first" else (160, 80):
            request = rig.start(tokens[:length])
            rest = tokens[len(request.tokens) : length]
            assert not rest or request.advance(rest)
            request.check()
            request.close()
        assert rig.probe(tokens) == 160
        assert rig.probe(tokens[:80] + toks(900, 950)) == 80
        assert inside.coverage(rig.manager, tokens, 0)[2] == 32
        assert inside.coverage(rig.manager, tokens, 1)[2] == 16
        again = rig.start(tokens[:80] + toks(900, 950))
        again.check()
        assert again.advance(toks(900, 950))
        again.check()


def test_a_stale_page_never_limits_a_match() -> None:
    """Window of one token at an exact boundary: the window page that covers 16 of a block's tokens does not limit a match of 96."""
    with Rig(model([attention(0, 4 * KIB), attention(1, 4 * KIB, window=1)], min_snapshot=True)) as rig:
        tokens = toks(0, 96)
        rig.extend(tokens[:80])
        assert rig.extend(tokens) == 80
        assert rig.probe(tokens) == 96
        assert inside.coverage(rig.manager, tokens, 0) == [32, 32, 32]
        again = rig.start(tokens)
        again.check()


def test_backoff_looks_at_the_windows_again() -> None:
    """Window 33, back-off 1: 96 goes to 95, where block 1 is needed again, of which the window page has 16 tokens: 48 are
    reused."""
    with Rig(model([attention(0, 4 * KIB), attention(1, 4 * KIB, window=33)], min_snapshot=True, backoff=1)) as rig:
        tokens = toks(0, 96)
        rig.seed(tokens[:48])
        rig.seed(tokens)
        assert inside.coverage(rig.manager, tokens, 1) == [32, 16, 32]
        assert rig.probe(tokens) == 48


def test_coverage_only_grows() -> None:
    """An endpoint's page covers 16, then 24 tokens of a block, and never 16 again."""
    with conversation() as rig:
        tokens = toks(0, 88)
        seen = []
        for length in (80, 88, 80):
            rig.extend(tokens[:length])
            seen.append(inside.coverage(rig.manager, tokens, 1)[2])
        assert seen == [16, 24, 24]
