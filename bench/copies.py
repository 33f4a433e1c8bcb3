"""How fast pages move between tiers, beside plain loops over the same bytes.

On the compiled build only: C moves the bytes in both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypedDict

from bench.builds import ROOT, run_worker


class CopyRow(TypedDict):
    pair: str  # "GPU to host"; files with their mode
    page: int  # bytes
    batch: int  # pages
    rate: float  # GB/s through the engine
    plain: float  # GB/s of memcpy, or of one thread reading or writing a file in order


def measure_copies(quick: bool) -> list[CopyRow]:
    directory = ROOT / "build" / "bench"
    directory.mkdir(parents=True, exist_ok=True)
    arguments = ["--directory", str(directory), *(["--quick"] if quick else [])]
    rows: list[CopyRow] = json.loads(run_worker("compiled", "bench.copies_worker", arguments))
    return rows


def copies_table(rows: Sequence[CopyRow]) -> str:
    if not rows:
        return "no rows: nothing was copied"
    lines = [f"{'tiers':<22}  {'page':>9}  {'pages':>6}  {'GB/s':>7}  {'plain':>7}  share"]
    for row in sorted(rows, key=lambda row: (row["pair"], row["page"], row["batch"])):
        lines.append(
            f"{row['pair']:<22}  {row['page'] >> 10:>5} KiB  {row['batch']:>6}  {row['rate']:>7.2f}  {row['plain']:>7.2f}  "
            f"{row['rate'] / row['plain']:>5.0%}"
        )
    return "\n".join(lines)
