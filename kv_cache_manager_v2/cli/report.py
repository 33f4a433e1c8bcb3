"""The report of a replay, as a table and as JSON.

The JSON keys are an interface: keys may be added, but not renamed. Counts are tokens, blocks or pages. Ratios are from 0 to 1.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kv_cache_manager_v2.cli.capacity import Capacity
from kv_cache_manager_v2.cli.layers import Layers
from kv_cache_manager_v2.cli.serving import Outcome
from kv_cache_manager_v2.cli.traces import Trace
from kv_cache_manager_v2.cli.work import ModelShape, work_rows, work_saved

REPORTED_BAD_LINES: Final = 10  # most skipped lines that are listed


@dataclass(frozen=True)
class Settings:
    """The options of a replay that are part of its report."""

    trace: str
    tokens_per_block: int
    layers: Layers
    concurrency: int
    decode: bool
    verify: bool
    seed: int
    exclusive: bool
    disk_admission: str
    policy: str
    hints_right: float | None  # None without hints
    build: str  # "compiled" or "interpreted"
    shape: ModelShape | None  # for the work in FLOPs


def hit_summary(hit_tokens: Sequence[int], total_tokens: Sequence[int]) -> dict[str, Any]:
    """Hit tokens, total tokens and their ratio over some requests."""
    hits, total = sum(hit_tokens), sum(total_tokens)
    return {"hit_tokens": hits, "total_tokens": total, "hit_ratio": hits / total if total else 0.0}


def make_report(settings: Settings, trace: Trace, capacity: Capacity, outcome: Outcome, wall_seconds: float) -> dict[str, Any]:
    """The result as a JSON object. The last half leaves out the first `requests // 2` requests."""
    totals = [record.input_length for record in trace.records]
    hits = outcome.hit_tokens
    half = len(totals) // 2
    names = capacity.tier_names
    report: dict[str, Any] = {
        **trace_of(trace, settings.trace),
        "tokens_per_block": settings.tokens_per_block,
        **layers_of(settings.layers),
        "blocks": dict(zip(names, capacity.num_blocks, strict=True)),
        "pages": dict(zip(names, capacity.num_pages, strict=True)),
        "states": capacity.num_states,
        "concurrency": settings.concurrency,
        "decode": settings.decode,
        "verify": settings.verify,
        "seed": settings.seed,
        "exclusive": settings.exclusive,
        "disk_admission": settings.disk_admission,
        "policy": settings.policy,
        "hints_right": settings.hints_right,
        "requests": len(totals),
        "skipped_requests": len(outcome.skipped),
        **bad_lines_of(trace),
        "whole": hit_summary(hits, totals),
        "last_half": hit_summary(hits[half:], totals[half:]),
        "work_saved": {
            "whole": work_saved(settings.layers, settings.shape, hits, totals),
            "last_half": work_saved(settings.layers, settings.shape, hits[half:], totals[half:]),
        },
        "hit_tokens_by_tier": dict(zip(names, outcome.hit_tokens_by_level, strict=True)),
        "hits_by_life_cycle": {
            kind: dict(zip(names, row, strict=True)) for kind, row in zip(settings.layers.names, outcome.hit_pages, strict=True)
        },
        "computed_tokens": outcome.computed_tokens,
        "generated_tokens": outcome.generated_tokens,
        "pages_moved": {name: dict(zip(names, row, strict=True)) for name, row in zip(names, outcome.pages_moved, strict=True)},
        "pages_returned": dict(zip(names, outcome.pages_returned, strict=True)),
        "pages_dropped": sum(outcome.pages_dropped),
        "pages_dropped_by_tier": dict(zip(names, outcome.pages_dropped, strict=True)),
        "suspensions": outcome.suspensions,
        "restarts": outcome.restarts,
        "wall_seconds": round(wall_seconds, 3),
        "requests_per_second": round(len(totals) / wall_seconds, 1) if wall_seconds > 0 else 0.0,
        "build": settings.build,
    }
    if settings.verify:
        report["pages_checked"] = outcome.pages_checked
        report["page_mismatches"] = outcome.num_mismatches
        report["page_mismatch_examples"] = outcome.mismatches
    return report


def layers_of(layers: Layers) -> dict[str, Any]:
    """The preset and its options, as keys of a report."""
    return {
        "layers": layers.preset,
        "window": layers.window,
        "sinks": layers.sinks,
        "snapshot_every": layers.snapshot_every,
        "snapshots_by_prompt": layers.snapshots_by_prompt,
    }


def trace_of(trace: Trace, name: str) -> dict[str, Any]:
    """What the trace is, as keys of a report."""
    return {
        "trace": name,
        "trace_format": trace.trace_format,
        "trace_block_size": trace.block_size,
        "trace_taken_for": trace.description,
    }


def bad_lines_of(trace: Trace) -> dict[str, Any]:
    """The skipped lines of the trace, as keys of a report."""
    reasons = [{"line": bad.number, "reason": bad.reason} for bad in trace.bad_lines[:REPORTED_BAD_LINES]]
    return {"bad_lines": len(trace.bad_lines), "bad_line_reasons": reasons}


def to_json(report: dict[str, Any]) -> str:
    """The report as indented JSON text."""
    return json.dumps(report, indent=2) + "\n"


def to_table(report: dict[str, Any]) -> str:
    """The report as a table of two columns, a blank line between groups."""
    rows: list[tuple[str, str]] = [
        ("trace", str(report["trace"])),
        ("trace taken for", str(report["trace_taken_for"])),
        ("tokens per block", number(report["tokens_per_block"])),
        ("layers", layers_text(report)),
        ("blocks", ", ".join(f"{name} {number(count)}" for name, count in report["blocks"].items())),
        *([] if report["states"] is None else [("slots of recurrent states", number(report["states"]))]),
        ("requests open at once", number(report["concurrency"])),
        ("eviction policy", _policy(report)),
        ("", ""),
        ("requests", number(report["requests"])),
        ("requests that cannot fit", number(report["skipped_requests"])),
        ("malformed lines skipped", number(report["bad_lines"])),
        *[(f"  line {bad['line']}", bad["reason"]) for bad in report["bad_line_reasons"]],
        ("", ""),
        ("hit tokens, whole trace", _hits(report["whole"])),
        ("hit tokens, last half of requests", _hits(report["last_half"])),
        *[(f"  found on {name}", number(count)) for name, count in report["hit_tokens_by_tier"].items()],
        *[
            (f"  pages of {kind} layers, on {name}", number(count))
            for kind, row in report["hits_by_life_cycle"].items()
            for name, count in row.items()
        ],
        ("prompt tokens computed", number(report["computed_tokens"])),
        *work_rows("whole trace", report["work_saved"]["whole"]),
        *work_rows("last half of requests", report["work_saved"]["last_half"]),
    ]
    if report["decode"]:
        rows.append(("tokens generated", number(report["generated_tokens"])))
    rows.append(("", ""))
    for source, row in report["pages_moved"].items():
        rows += [(f"pages moved {source} to {target}", number(count)) for target, count in row.items() if count or source != target]
    rows += [
        (f"pages returned to clean copies on {name}", number(count)) for name, count in report["pages_returned"].items() if count
    ]
    rows += [(f"pages dropped from {name}", number(count)) for name, count in report["pages_dropped_by_tier"].items()]
    rows += [("suspensions", number(report["suspensions"])), ("restarts", number(report["restarts"]))]
    if report["verify"]:
        rows += [
            ("pages checked", number(report["pages_checked"])),
            ("pages with wrong contents", number(report["page_mismatches"])),
        ]
        rows += [("", example) for example in report["page_mismatch_examples"]]
    rows += [
        ("", ""),
        ("seconds", f"{report['wall_seconds']:.2f}"),
        ("requests per second", f"{report['requests_per_second']:,.0f}"),
        ("build", str(report["build"])),
    ]
    return to_columns(rows)


def _policy(report: dict[str, Any]) -> str:
    right = report["hints_right"]
    return str(report["policy"]) if right is None else f"{report['policy']}, {right:.0%} of them right"


def to_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Labels and values in two columns."""
    width = max(len(label) for label, _value in rows)
    return "".join(f"{label:<{width}}  {value}".rstrip() + "\n" for label, value in rows)


def layers_text(report: dict[str, Any]) -> str:
    """The preset and its options."""
    text: str = report["layers"]
    if report["window"] is not None:
        text += f", window of {number(report['window'])} tokens"
        if report["sinks"]:
            text += f" and {number(report['sinks'])} sinks"
    if report["snapshots_by_prompt"]:
        text += ", snapshots by prompt"
    if report["snapshot_every"] is not None:
        text += f", snapshot every {number(report['snapshot_every'])} tokens"
    return text


def number(value: int) -> str:
    return f"{value:,}"


def _hits(summary: dict[str, Any]) -> str:
    return f"{number(summary['hit_tokens'])} of {number(summary['total_tokens'])} ({100 * summary['hit_ratio']:.2f} %)"
