"""Draws the curve of a plan as bars on a terminal, with rich (the `cli` extra)."""

from __future__ import annotations

import io
import shutil
import sys
from importlib.util import find_spec
from typing import Any

from kv_cache_manager_v2.cli.streams import OutputError


def require_rich() -> None:
    """Raise OutputError if no bars can be drawn."""
    if find_spec("rich") is None:
        raise OutputError("--format bars needs rich: pip install 'kv-cache-manager-v2[cli]'")


def to_bars(report: dict[str, Any], *, colors: bool) -> str:
    """A bar for each size of the curve. `colors`: if standard output is a terminal, use them."""
    from rich.bar import Bar
    from rich.console import Console
    from rich.table import Table

    in_gib = report["bytes_per_token"] is not None
    points = report["curve"]
    has_best = "best_hit_ratio" in points[0]
    ceiling: float = report["ceiling_hit_ratio"]
    table = Table(box=None)
    table.add_column("GiB" if in_gib else "blocks", justify="right")
    table.add_column("hit ratio", justify="right")
    table.add_column("", ratio=1)
    if has_best:
        table.add_column("best possible", justify="right")
    for point in points:
        size = f"{point['gib']:,.2f}" if in_gib else f"{point['blocks']:,}"
        bar = Bar(size=ceiling or 1.0, begin=0, end=point["hit_ratio"], color="blue")
        best = [f"{100 * point['best_hit_ratio']:.2f} %"] if has_best else []
        table.add_row(size, f"{100 * point['hit_ratio']:.2f} %", bar, *best)
    text = io.StringIO()
    text.write(f"{report['trace']}: prompt tokens found in the cache\n")
    on_terminal = colors and sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 24)).columns
    console = Console(file=text, width=width, force_terminal=on_terminal, color_system="standard" if on_terminal else None)
    console.print(table)
    return text.getvalue()
