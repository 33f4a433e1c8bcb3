"""How fast pages move between tiers, compared with plain loops over the same bytes.

On the compiled build only: C moves the bytes in both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final, TypedDict

from bench.builds import ROOT, run_worker

MODES: Final = """\
Emulated device, one move after the other, each waited for; paired with a plain loop of one thread over the same bytes.
 memory        compared with memmove between memory of the same tiers; neither finds its bytes in the processor's caches
 file cached   with checksums, compared with pwrite or pread of the same file: buffered, no fsync, all of it in the page cache
 file no sums  the same, without checksums
 file cold     with checksums, compared with pread: buffered, the file dropped from the page cache before each
 file synced   with checksums, compared with pwrite and fdatasync: buffered, until it is on the device
share: median of the pairs' own ratios; more: what a move takes longer than its loop, for small batches a fixed cost"""


class CopyRow(TypedDict):
    pair: str  # "GPU to host"
    mode: str  # one of MODES
    page: int  # bytes
    batch: int  # pages
    pairs: int  # moves measured, each with its plain loop
    rate: float  # GB/s through the engine
    plain: float  # GB/s of the plain loop
    share: float  # median of the pairs' ratios
    more: float  # s; median of the pairs' differences


def measure_copies(quick: bool) -> list[CopyRow]:
    directory = ROOT / "build" / "bench"
    directory.mkdir(parents=True, exist_ok=True)
    arguments = ["--directory", str(directory), *(["--quick"] if quick else [])]
    rows: list[CopyRow] = json.loads(run_worker("compiled", "bench.copies_worker", arguments))
    return rows


def copies_table(rows: Sequence[CopyRow]) -> str:
    if not rows:
        return "no rows: nothing was copied"
    lines = [MODES, f"{'mode':<12}  {'tiers':<12}  {'page':>8}  {'pages':>5}  {'GB/s':>6}  {'plain':>6}  share  {'more':>9}  moves"]
    for row in sorted(rows, key=lambda row: (row["mode"], row["pair"], row["page"], row["batch"])):
        lines.append(
            f"{row['mode']:<12}  {row['pair']:<12}  {row['page'] >> 10:>4} KiB  {row['batch']:>5}  {row['rate']:>6.2f}  "
            f"{row['plain']:>6.2f}  {row['share']:>5.0%}  {row['more'] * 1e6:>6.0f} us  {row['pairs']:>5}"
        )
    return "\n".join(lines)
