"""A synthetic trace and two oracles that know nothing of the package: an infinite cache and an LRU list of blocks."""

from __future__ import annotations

import json
import os
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kv_cache_manager_v2 import ids


@dataclass(frozen=True)
class Prompt:
    """One request of the synthetic trace: its length in tokens and the ids of its blocks."""

    length: int
    ids: tuple[int, ...]
    output: int


def make_prompts(seed: int, count: int, block_size: int, *, whole_blocks: bool = False) -> list[Prompt]:
    """Conversations that grow turn by turn over a few shared beginnings; equal ids always follow the same id.

    With `whole_blocks` every length is a multiple of the block size.
    """
    chooser = random.Random(seed)
    next_id = 0
    child_of: dict[tuple[int, ...], int] = {}
    histories: list[tuple[int, ...]] = [(), ()]
    prompts = []
    for _number in range(count):
        ids = list(chooser.choice(histories))
        for _block in range(chooser.randint(1, 4)):
            key = (*ids, chooser.randint(0, 2))  # up to three ways to go on
            if key not in child_of:
                child_of[key] = next_id
                next_id += 1
            ids.append(child_of[key])
        last = block_size if whole_blocks else chooser.randint(1, block_size)
        prompts.append(Prompt((len(ids) - 1) * block_size + last, tuple(ids), chooser.randint(0, 5)))
        if len(ids) < 9:  # so none is longer than 12 blocks
            histories.append(tuple(ids))
    return prompts


def write_trace(path: Path, prompts: Sequence[Prompt]) -> str:
    """The prompts as a Mooncake-format file; returns its name."""
    with path.open("w") as lines:
        for number, prompt in enumerate(prompts):
            fields = {
                "timestamp": 10 * number,
                "input_length": prompt.length,
                "output_length": prompt.output,
                "hash_ids": prompt.ids,
            }
            lines.write(json.dumps(fields) + "\n")
    return str(path)


def child_environment() -> dict[str, str]:
    """For a program started elsewhere than in the root: it imports the package that this process tests."""
    return {**os.environ, "PYTHONPATH": str(Path(ids.__file__).resolve().parent.parent)}


def infinite_cache_hits(prompts: Sequence[Prompt], block_size: int) -> list[int]:
    """For each prompt the longest prefix that it has in common with any earlier one, in tokens."""
    hits = []
    for number, prompt in enumerate(prompts):
        hits.append(max((common_tokens(prompt, earlier, block_size) for earlier in prompts[:number]), default=0))
    return hits


def common_tokens(left: Prompt, right: Prompt, block_size: int) -> int:
    """How many tokens two prompts begin with in common."""
    common = 0
    for ordinal, (a, b) in enumerate(zip(left.ids, right.ids, strict=False)):
        if a != b:
            break
        common = min((ordinal + 1) * block_size, left.length, right.length)
    return common


def lru_cache_hits(prompts: Sequence[Prompt], block_size: int, tokens_per_block: int, capacity: int) -> list[int]:
    """Hits of one LRU list of `capacity` blocks; a request's blocks become the most recent ones, its first block above all.

    A partial block is known by how many of its tokens it has; a longer one of the same beginning takes its place.
    """
    recency: OrderedDict[tuple[int, ...], int] = OrderedDict()  # path of (id, part) words -> tokens known; least recent first
    hits = []
    for prompt in prompts:
        path: list[int] = []
        blocks: list[tuple[tuple[int, ...], int]] = []
        for beg in range(0, prompt.length, tokens_per_block):
            end = min(beg + tokens_per_block, prompt.length)
            ids = prompt.ids[beg // block_size : -(-end // block_size)]
            path += [beg % block_size, *ids]
            blocks.append((tuple(path), end - beg))
        assert len(blocks) <= capacity
        hit = 0
        for key, num_tokens in blocks:
            known = min(recency.get(key, 0), num_tokens)
            hit += known
            if known < tokens_per_block:
                break
        hits.append(hit)
        for key, num_tokens in reversed(blocks):
            recency[key] = max(recency.pop(key, 0), num_tokens)
        while len(recency) > capacity:
            recency.popitem(last=False)
    return hits
