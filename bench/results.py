"""Results: what one title measured on each build, the tables, and the JSON files.

Rule: a row has every build or says which is missing; a report over no rows says so.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.builds import BUILDS, NAMES
from bench.machine import summary


@dataclass
class Row:
    """The values of one title: by build, in the unit of `scale`."""

    title: str
    per: str  # what one value is the time of
    values: dict[str, list[float]] = field(default_factory=dict)  # seconds

    def median(self, build: str) -> float:
        return statistics.median(self.values[build])

    def p90(self, build: str) -> float:
        return percentile(self.values[build], 0.9)

    def ratio(self) -> float | None:
        """Interpreted time by compiled time; None without both, or where nothing measurable was done."""
        if any(not self.values.get(build) for build in BUILDS) or self.median("compiled") <= 0:
            return None
        return self.median("pure") / self.median("compiled")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not below this share of the values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def readable(seconds: float) -> str:
    for unit, scale in (("s ", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(seconds) * scale >= 1:
            return f"{seconds * scale:8.2f} {unit}"
    return f"{seconds * 1e9:8.1f} ns"


def table(rows: Sequence[Row]) -> str:
    """Median, p90 and ratio of each row."""
    if not rows:
        return "no rows: nothing was measured"
    width = max(9, *[len(row.title) for row in rows])
    heads = "".join(f"  {NAMES[build] + ' median':>18}  {'p90':>11}" for build in BUILDS)
    lines = [f"{'operation':<{width}}{heads}  {'ratio':>6}  per"]
    for row in rows:
        line = f"{row.title:<{width}}"
        for build in BUILDS:
            if row.values.get(build):
                line += f"  {readable(row.median(build)):>18}  {readable(row.p90(build))}"
            else:
                line += f"  {'-':>18}  {'-':>11}"
        ratio = row.ratio()
        lines.append(line + (f"  {ratio:>6.1f}" if ratio is not None else f"  {'-':>6}") + f"  {row.per}")
    return "\n".join(lines)


def as_json(rows: Sequence[Row], machine: dict[str, object], **more: object) -> dict[str, object]:
    """The record of a run: medians and p90 in seconds, by title and build."""
    figures: dict[str, object] = {}
    for row in rows:
        measured = [build for build in BUILDS if row.values.get(build)]
        figures[row.title] = {
            "per": row.per,
            **{
                NAMES[build]: {"median_s": row.median(build), "p90_s": row.p90(build), "values": len(row.values[build])}
                for build in measured
            },
            "ratio": row.ratio(),
        }
    return {"machine": machine, "figures": figures, **more}


def write(path: Path, record: dict[str, object]) -> None:
    """Write a record as JSON, numbers to four digits, in a stable order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(record), indent=1) + "\n")


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def heading(title: str, machine: dict[str, object]) -> str:
    return f"\n{title}\n{summary(machine)}\n"
