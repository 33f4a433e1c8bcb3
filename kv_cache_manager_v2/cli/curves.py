"""Computes the hit curve of a trace for a model's layers, and the bound that no order of eviction exceeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd, log, sqrt
from typing import Final

from kv_cache_manager_v2.cli.layers import Layers
from kv_cache_manager_v2.cli.trace_lines import TraceRecord
from kv_cache_manager_v2.planning.best_possible import BestCache, NextUses
from kv_cache_manager_v2.planning.hit_curve import HitCurve
from kv_cache_manager_v2.planning.lru_curve import LruCurve
from kv_cache_manager_v2.planning.page_cache import LayerMix, PageCache
from kv_cache_manager_v2.planning.prefix_tree import PrefixTree

UNLIMITED: Final = 1 << 48  # blocks
MAX_UNITS: Final = 1 << 26  # of all prompts: their paths take a few GiB then


class PlanSizeError(Exception):
    """The paths of a trace's prompts do not fit in memory."""


@dataclass(frozen=True)
class Units:
    """The lengths of the trace's ids and of the cache's blocks, in a common unit."""

    units_per_id: int
    units_per_block: int
    blocks_per_unit: int
    tokens: int  # of one unit

    @staticmethod
    def of(trace_block_size: int, tokens_per_block: int, *, whole_blocks: bool = False) -> Units:
        """The longest unit: an id if that is whole blocks. With `whole_blocks`, a unit is not longer than a block."""
        if trace_block_size % tokens_per_block == 0 and not whole_blocks:
            return Units(1, 1, trace_block_size // tokens_per_block, trace_block_size)
        common = gcd(trace_block_size, tokens_per_block)
        return Units(trace_block_size // common, tokens_per_block // common, 1, common)


class Requests:
    """The requests of a trace as paths of prefixes. The first `num_uncounted` only fill the cache."""

    def __init__(self, records: Sequence[TraceRecord], units: Units, num_uncounted: int) -> None:
        total = sum(-(-record.input_length // units.tokens) for record in records)
        if total > MAX_UNITS:
            raise PlanSizeError(
                f"the prompts have {total:,} parts of {units.tokens} tokens, the longest that ids and blocks are made of, and "
                f"{MAX_UNITS:,} is the most; choose another --tokens-per-block, or use less of the trace with --max-records"
            )
        tree = PrefixTree(units.units_per_id)
        self.units = units
        self.lengths = [record.input_length for record in records]
        self.num_uncounted = num_uncounted
        self.paths = [tree.path(record.block_ids, -(-record.input_length // units.tokens)) for record in records]
        self.num_prefixes = tree.size

    @property
    def counted_tokens(self) -> int:
        return sum(self.lengths[self.num_uncounted :])

    def named_tokens(self, request: int) -> int:
        """Tokens of the prompt that have an id."""
        return min(self.lengths[request], len(self.paths[request]) * self.units.tokens)


def exact_curve(requests: Requests, tokens_per_block: int) -> HitCurve:
    """The curve of full attention, at every size."""
    units = requests.units
    curve = LruCurve(len(requests.paths), tokens_per_block, units.blocks_per_unit, units.units_per_block)
    for request, path in enumerate(requests.paths):
        curve.add(path, requests.num_prefixes, requests.lengths[request], request >= requests.num_uncounted)
    return curve.curve()


def simulated_curve(
    requests: Requests, layers: Layers, tokens_per_block: int, num_sizes: int, progress: Callable[[int], None]
) -> HitCurve:
    """The curve of several kinds of layers, simulated at `num_sizes` sizes up to what the trace can use.

    After the first few, each size lies in the widest gap of what is known. A size that finds less than a smaller one counts as
    much as that one: the curve only rises.
    """
    windowed = next((kind for kind in layers.kinds if kind.window is not None), None)
    mix = LayerMix(
        any(kind.window is None and not kind.recurrent for kind in layers.kinds),
        None if windowed is None else windowed.window,
        0 if windowed is None else windowed.sinks,
        layers.snapshot_every,
    )

    def simulate(size: int) -> tuple[int, int]:
        cache = PageCache(mix, requests.num_prefixes, tokens_per_block, requests.units.units_per_block, size)
        hits = [max(0, cache.run(path, requests.named_tokens(number))) for number, path in enumerate(requests.paths)]
        return sum(hits[requests.num_uncounted :]), -(-cache.most_used // mix.num_kinds)

    ceiling, most = simulate(UNLIMITED)
    hits = {0: 0, most: ceiling}
    for size in spread(most, min(5, num_sizes))[:-1]:
        hits[size] = simulate(size)[0]
        progress(len(hits) - 1)
    while len(hits) <= num_sizes:
        gaps = [(_uncertainty(hits, left, right), left, right) for left, right in pairwise(sorted(hits)) if right - left > 1]
        worst, left, right = max(gaps, default=(0.0, 0, 0))
        if worst <= 0:
            break
        middle = min(right - 1, max(left + 1, round(sqrt(left * right))))
        hits[middle] = simulate(middle)[0]
        progress(len(hits) - 1)
    sizes = sorted(hits)
    return HitCurve(sizes, list(accumulate((hits[size] for size in sizes), max)), requests.counted_tokens, False)


def _uncertainty(hits: dict[int, int], left: int, right: int) -> float:
    """How much of the curve lies between two neighbouring sizes: their hits apart, times their logarithms apart."""
    return (hits[right] - hits[left]) * log(right / max(left, 1))


def best_at(requests: Requests, sizes: Sequence[int], progress: Callable[[int], None]) -> list[int]:
    """The most hit tokens of full attention at each of the sizes in blocks, for any order of eviction."""
    uses = NextUses(requests.paths, requests.num_prefixes)
    found: list[int] = []
    for size in sizes:
        found.append(_best(requests, uses, size))
        progress(len(found))
    return found


def _best(requests: Requests, uses: NextUses, size: int) -> int:
    """In whole units, rounded up: at least what any order finds."""
    units = requests.units
    cache = BestCache(uses, -(-size * units.units_per_block // units.blocks_per_unit))
    hits = [min(cache.run(number) * units.tokens, requests.named_tokens(number)) for number in range(len(requests.paths))]
    return sum(hits[requests.num_uncounted :])


def spread(largest: int, count: int, decades: float = 3.0) -> list[int]:
    """At most `count` sizes up to `largest`, evenly on a logarithmic scale over so many powers of ten."""
    steps = max(1, count - 1)
    sizes = {max(1, round(largest * 10 ** (-decades * step / steps))) for step in range(count)}
    return sorted(sizes)
