"""What the schedulers serve: requests of random tokens, with the prefixes that they share.

Rule: the same seed gives the same requests on every machine and build.
"""

from __future__ import annotations

import random
from typing import NamedTuple


class Arrival(NamedTuple):
    """A request."""

    step: int  # in which it comes
    prompt: list[int]
    new_tokens: int
    priority: int = 0  # a lower one is served first


class Tokens:
    """Random token ids."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def take(self, count: int) -> list[int]:
        return [self.rng.randrange(50000) for _ in range(count)]

    def between(self, low: int, high: int) -> int:
        return self.rng.randrange(low, high)


def small(kind: str) -> list[Arrival]:
    """About a hundred requests. `kind` is one of SMALL."""
    tokens = Tokens(SMALL.index(kind))
    if kind == "cold":
        return [Arrival(0, tokens.take(tokens.between(10, 300)), tokens.between(2, 80)) for _ in range(100)]
    if kind == "shared heads":
        heads = [tokens.take(200) for _ in range(4)]
        return [
            Arrival(tokens.between(0, 40), heads[i % 4] + tokens.take(tokens.between(5, 120)), tokens.between(2, 60), i % 3)
            for i in range(120)
        ]
    if kind == "equal prompts":  # computed side by side
        prompts = [tokens.take((64, 65, 80, 100, 111)[i % 5]) for i in range(20)]
        return [Arrival(tokens.between(0, 12), prompt, 50, i % 3) for prompt in prompts for i in range(4)]
    long = [Arrival(2 * i, tokens.take(tokens.between(900, 2500)), 20) for i in range(12)]
    return long + [Arrival(0, tokens.take(30), 90) for _ in range(20)]


SMALL = ("cold", "shared heads", "equal prompts", "long prompts")


def large() -> list[Arrival]:
    """1,310 requests, up to a thousand at a time: shared heads, equal prompts and long ones."""
    tokens = Tokens(3)
    heads = [tokens.take(160) for _ in range(20)]
    work = [
        Arrival(i // 120, heads[tokens.between(0, 20)] + tokens.take(tokens.between(2, 60)), tokens.between(8, 48))
        for i in range(1000)
    ]
    for i in range(60):
        prompt = tokens.take((64, 65, 79, 80, 96, 100)[i % 6])
        work += [Arrival(tokens.between(0, 10), prompt, 32) for _ in range(5)]
    return work + [Arrival(3 * i, tokens.take(tokens.between(700, 1500)), 10) for i in range(10)]


def decode(requests: int) -> list[Arrival]:
    """Prompts of 1,024 tokens that are all answered at the same time, without an end."""
    tokens = Tokens(1)
    return [Arrival(0, tokens.take(1024), 100_000) for _ in range(requests)]


def serve(requests: int) -> list[Arrival]:
    """Eight requests come in each step: one of 16 heads of 2,048 tokens, 64 to 255 tokens of their own, as many to answer."""
    tokens = Tokens(1)
    heads = [tokens.take(2048) for _ in range(16)]
    return [
        Arrival(i // 8, heads[tokens.between(0, 16)] + tokens.take(tokens.between(64, 256)), tokens.between(64, 192))
        for i in range(requests)
    ]


def pressure(requests: int) -> list[Arrival]:
    """Sixteen requests come in each step, with longer answers than there is room for."""
    tokens = Tokens(1)
    heads = [tokens.take(512) for _ in range(16)]
    return [
        Arrival(i // 16, heads[tokens.between(0, 16)] + tokens.take(tokens.between(16, 64)), tokens.between(128, 384))
        for i in range(requests)
    ]


def chunks(requests: int) -> list[Arrival]:
    """Prompts of 24,576 tokens, in parts, beside short requests. Eight prompts share 16,384 tokens each."""
    tokens = Tokens(1)
    heads = [tokens.take(16384) for _ in range(8)]
    short = [Arrival(0, tokens.take(64), 600) for _ in range(200)]
    return short + [Arrival(4 * i, heads[i % 8] + tokens.take(8192), 32) for i in range(requests)]
