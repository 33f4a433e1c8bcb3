"""The report of a plan, as a table and as JSON.

The JSON keys are an interface: keys may be added, but not renamed. Sizes are blocks, tokens and GiB. Ratios are from 0 to 1. A row
of `sizes` has `blocks: null` if no size reaches its ratio.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kv_cache_manager_v2.cli.capacity import GIB, TIER_NAMES, TierBlocks
from kv_cache_manager_v2.cli.layers import Layers
from kv_cache_manager_v2.cli.report import bad_lines_of, layers_of, layers_text, number, to_columns, trace_of
from kv_cache_manager_v2.cli.traces import Trace
from kv_cache_manager_v2.planning.hit_curve import HitCurve

SHARES_OF_CEILING: Final = (50, 80, 90, 95)  # percent


@dataclass(frozen=True)
class Plan:
    """A curve, and what was asked about it."""

    trace_name: str
    trace: Trace
    tokens_per_block: int
    layers: Layers
    num_uncounted: int  # requests
    curve: HitCurve
    sizes: list[int]  # of the reported curve, blocks
    best: list[int]  # hit tokens of the best order of eviction at these sizes, or empty
    bytes_per_token: int | None
    target_hits: list[float]
    budgets: dict[float, int]  # GiB -> blocks
    tiers: list[TierBlocks]
    costs: dict[str, float]  # of a GiB, by tier
    lengths: list[int]  # of all prompts, in blocks, ascending
    seconds: float  # to compute the curve
    build: str  # "compiled" or "interpreted"

    def num_longer(self, blocks: int) -> int:
        """Prompts that a cache of so many blocks cannot hold. A replay skips their requests."""
        return len(self.lengths) - bisect_right(self.lengths, blocks)

    def gib(self, blocks: int) -> float | None:
        if self.bytes_per_token is None:
            return None
        return blocks * self.tokens_per_block * self.bytes_per_token / GIB


def make_report(plan: Plan) -> dict[str, Any]:
    """The result as a JSON object."""
    trace, curve = plan.trace, plan.curve
    total = curve.total_tokens
    report: dict[str, Any] = {
        **trace_of(trace, plan.trace_name),
        "tokens_per_block": plan.tokens_per_block,
        **layers_of(plan.layers),
        "bytes_per_token": plan.bytes_per_token,
        "requests": len(trace.records),
        "requests_not_counted": plan.num_uncounted,
        **bad_lines_of(trace),
        "counted_tokens": total,
        "longest_prompt_blocks": plan.lengths[-1],
        "exact": curve.exact,
        "ceiling_hit_ratio": curve.ceiling / total if total else 0.0,
        "sizes": _sizes(plan),
        "tiers": _tiers(plan),
        "curve": [
            {
                "blocks": size,
                "gib": plan.gib(size),
                "hit_ratio": curve.ratio(size),
                "requests_that_cannot_fit": plan.num_longer(size),
            }
            for size in plan.sizes
        ],
        "seconds": round(plan.seconds, 3),
        "build": plan.build,
    }
    for point, hits in zip(report["curve"], plan.best, strict=False):
        point["best_hit_ratio"] = hits / total if total else 0.0
    return report


def _sizes(plan: Plan) -> list[dict[str, Any]]:
    """The marked sizes, and those that were asked for."""
    curve = plan.curve
    rows: list[dict[str, Any]] = []
    for percent in SHARES_OF_CEILING:
        rows.append(_size(plan, f"{percent} % of the ceiling", curve.size_for(-(-curve.ceiling * percent // 100))))
    rows.append(_size(plan, "knee", curve.knee()))
    rows.append(_size(plan, "ceiling", curve.ceiling_size))
    for ratio in plan.target_hits:
        wanted = int(ratio * curve.total_tokens)
        rows.append(_size(plan, f"target {100 * ratio:g} %", curve.size_for(wanted + (wanted < ratio * curve.total_tokens))))
    for gib, blocks in plan.budgets.items():
        rows.append(_size(plan, f"budget {gib:g} GiB", blocks))
    return rows


def _size(plan: Plan, name: str, blocks: int | None) -> dict[str, Any]:
    if blocks is None:
        return {"name": name, "blocks": None, "tokens": None, "gib": None, "hit_ratio": None}
    gib = plan.gib(blocks)
    row: dict[str, Any] = {"name": name, "blocks": blocks, "tokens": blocks * plan.tokens_per_block, "gib": gib}
    row["hit_ratio"] = plan.curve.ratio(blocks)
    row["requests_that_cannot_fit"] = plan.num_longer(blocks)
    if gib is not None and plan.costs:
        row["cost"] = {tier: gib * cost for tier, cost in plan.costs.items()}
    return row


def _tiers(plan: Plan) -> list[dict[str, Any]]:
    """The tiers, each with what it finds of its own and together with the warmer ones."""
    rows: list[dict[str, Any]] = []
    blocks, ratio, cost = 0, 0.0, 0.0
    for tier in plan.tiers:
        name = TIER_NAMES[tier.tier]
        blocks += tier.num_blocks
        gib, before = plan.gib(tier.num_blocks), ratio
        ratio = plan.curve.ratio(blocks)
        row: dict[str, Any] = {"name": name, "blocks": tier.num_blocks, "gib": gib}
        row |= {"hit_ratio": ratio - before, "hit_ratio_so_far": ratio}
        if gib is not None and name in plan.costs:
            cost += gib * plan.costs[name]
            row |= {"cost": gib * plan.costs[name], "cost_so_far": cost}
        rows.append(row)
    return rows


def to_table(report: dict[str, Any]) -> str:
    """The report as tables, a blank line between them."""
    counted = report["requests"] - report["requests_not_counted"]
    curve = "at every size" if report["exact"] else f"simulated at {len(report['curve'])} sizes, interpolated between them"
    text = to_columns(
        [
            ("trace", str(report["trace"])),
            ("trace taken for", str(report["trace_taken_for"])),
            ("tokens per block", number(report["tokens_per_block"])),
            ("layers", layers_text(report)),
            ("requests counted", f"the last {number(counted)} of {number(report['requests'])}"),
            ("prompt tokens counted", number(report["counted_tokens"])),
            ("malformed lines skipped", number(report["bad_lines"])),
            *[(f"  line {bad['line']}", bad["reason"]) for bad in report["bad_line_reasons"]],
            ("longest prompt", f"{number(report['longest_prompt_blocks'])} blocks: what a GPU tier has to hold at least"),
            ("curve", f"{curve}, in {report['seconds']:.2f} seconds ({report['build']})"),
        ]
    )
    tiers = list(next((row["cost"] for row in report["sizes"] if "cost" in row), {}))
    head = ["memory", "blocks", "tokens", "GiB", "hit ratio", "cannot fit", *(f"cost on {tier}" for tier in tiers)]
    rows: list[list[str]] = []
    for row in report["sizes"]:
        if row["blocks"] is None:
            rows.append([row["name"], *["-"] * 3, f"not reached: the ceiling is {_percent(report['ceiling_hit_ratio'])}"])
            continue
        sizes = [number(row["blocks"]), number(row["tokens"]), _decimal(row["gib"])]
        too_long = number(row["requests_that_cannot_fit"]) if row["requests_that_cannot_fit"] else "-"
        rows.append([row["name"], *sizes, _percent(row["hit_ratio"]), too_long, *(_decimal(row["cost"][tier]) for tier in tiers)])
    text += "\n" + grid(head, rows)
    if report["tiers"]:
        head = ["tier", "blocks", "GiB", "hit ratio", "so far", "cost", "so far"]
        rows = []
        for row in report["tiers"]:
            ratios = [_percent(row["hit_ratio"]), _percent(row["hit_ratio_so_far"])]
            costs = [_decimal(row.get("cost")), _decimal(row.get("cost_so_far"))]
            rows.append([row["name"], number(row["blocks"]), _decimal(row["gib"]), *ratios, *costs])
        text += "\n" + grid(head, rows)
    if report["curve"] and "best_hit_ratio" in report["curve"][0]:
        head = ["blocks", "GiB", "least recently used", "best possible"]
        rows = []
        for row in report["curve"]:
            ratios = [_percent(row["hit_ratio"]), _percent(row["best_hit_ratio"])]
            rows.append([number(row["blocks"]), _decimal(row["gib"]), *ratios])
        text += "\n" + grid(head, rows)
    return text


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a line of heads. The first column is aligned left, the others right. Columns without values are left out."""
    used = [at for at in range(len(head)) if at == 0 or any(row[at : at + 1] not in ([], ["-"]) for row in rows)]
    lines = [[head[at] for at in used], *([row[at] for at in used if at < len(row)] for row in rows)]
    widths = [max(len(line[at]) for line in lines if at < len(line)) for at in range(len(used))]
    text = ""
    for line in lines:
        cells = [cell.rjust(width) if at else cell.ljust(width) for at, (cell, width) in enumerate(zip(line, widths, strict=False))]
        text += "  ".join(cells).rstrip() + "\n"
    return text


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.2f} %"


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
