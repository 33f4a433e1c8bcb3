"""What an engine could tell the cache at the end of each request of a trace: whether its conversation goes on.

The truth is the trace's `last` field if it has sessions. Otherwise a request's conversation goes on if a later request begins with
its blocks: more exactly, if this request was the last user of the deepest block that the later one knows. The first block is left
out, since all conversations may share it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

from kv_cache_manager_v2.cli import options as shared
from kv_cache_manager_v2.cli.trace_lines import TraceRecord
from kv_cache_manager_v2.eviction.choose import POLICIES
from kv_cache_manager_v2.eviction.policy import END, MORE


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose what is evicted first."""
    parser.add_argument(
        "--policy",
        choices=list(POLICIES),
        default="lru",
        help="what is evicted first: the least recently used; by hints whether conversations go on, taken from the trace; or what "
        "was learnt about conversations (default: %(default)s)",
    )
    parser.add_argument(
        "--hints-right",
        type=shared.share,
        default=None,
        metavar="SHARE",
        help="with --policy hints: the probability that a hint is right (default: 1)",
    )


def expectations(records: Sequence[TraceRecord], right: float, seed: int) -> list[str]:
    """ "more" or "end" for each request, right with this probability."""
    chance = random.Random(seed)
    over = [record.last for record in records] if any(record.last for record in records) else _over(records)
    return [END if ends != (chance.random() > right) else MORE for ends in over]


def _over(records: Sequence[TraceRecord]) -> list[bool]:
    """Whether no later request continues each request."""
    users: dict[int, int] = {}  # block id -> the latest request that uses it
    over = [True] * len(records)
    for index, record in enumerate(records):
        known, depth = -1, 0
        for block_id in record.block_ids:
            if block_id not in users:
                break
            known = users[block_id]
            depth += 1
        if depth > 1:
            over[known] = False
        users.update(dict.fromkeys(record.block_ids, index))
    return over
