"""Draws pictures with matplotlib (the `plot` extra). Colours are those of Okabe and Ito, which the colour-blind can tell apart.

matplotlib is imported when a picture is drawn, and for the file alone: no window is opened.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kv_cache_manager_v2.cli.streams import OutputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS: Final = (".png", ".svg", ".pdf")
BLUE: Final = "#0072B2"
ORANGE: Final = "#E69F00"
GREEN: Final = "#009E73"
VERMILION: Final = "#D55E00"
GREY: Final = "#666666"
TIER_COLORS: Final = {"gpu": BLUE, "host": ORANGE, "disk": GREEN}


def require_matplotlib() -> None:
    """Raise OutputError if no picture can be drawn."""
    if find_spec("matplotlib") is None:
        raise OutputError("--plot needs matplotlib: pip install 'kv-cache-manager-v2[plot]'")


def draw_plan(report: dict[str, Any], path: str) -> bytes:
    """The curve of a plan with its marks, in the format that the file's name says."""
    figure = new_figure(9, 5.5)
    axes: Axes = figure.add_subplot()
    in_gib = report["bytes_per_token"] is not None
    unit = "gib" if in_gib else "blocks"
    points = report["curve"]
    marks = [mark for mark in report["sizes"] if mark["blocks"] and mark[unit] >= points[0][unit]]
    curve = sorted({(point[unit], 100 * point["hit_ratio"]) for point in [*points, *marks]})
    axes.plot(*zip(*curve, strict=True), color=BLUE, linewidth=2, label="least recently used")
    if "best_hit_ratio" in points[0]:
        best = [100 * point["best_hit_ratio"] for point in points]
        axes.plot([point[unit] for point in points], best, color=VERMILION, linewidth=2, linestyle="--", label="best possible")
    ceiling = 100 * report["ceiling_hit_ratio"]
    axes.axhline(ceiling, color=GREY, linewidth=1, linestyle=":", label="ceiling")
    total = 0.0
    for tier in report["tiers"]:
        total += tier[unit]
        color = TIER_COLORS[tier["name"]]
        axes.axvline(total, color=color, linewidth=1.5, linestyle="-.", label=f"up to the {tier['name']} tier")
    axes.set_xscale("log")
    axes.set_xlim(curve[0][0], 5 * curve[-1][0])  # room for the labels
    top = max(1.0, 1.3 * ceiling)
    axes.set_ylim(0, top)
    _label_marks(axes, marks, unit, top)
    axes.xaxis.set_major_formatter(lambda value, _position: f"{value:,g}")
    axes.set_xlabel("GiB of KV cache" if in_gib else f"blocks of {report['tokens_per_block']:,} tokens")
    axes.set_ylabel("prompt tokens found in the cache, %")
    axes.set_title(f"{Path(report['trace']).name}: hit ratio by memory ({report['layers']})", loc="left", fontsize=12)
    axes.grid(visible=True, which="major", color="#DDDDDD")
    axes.legend(loc="upper left", ncols=2, framealpha=1, edgecolor="white")
    return saved(figure, path)


def _label_marks(axes: Axes, marks: list[dict[str, Any]], unit: str, top: float) -> None:
    """A point for each mark, and its name and size to the right, from top to bottom without overlaps."""
    height = top
    for mark in sorted(marks, key=lambda mark: float(mark[unit]), reverse=True):
        size, ratio = mark[unit], 100 * mark["hit_ratio"]
        height = min(height - 0.04 * top, ratio - 0.03 * top)
        digits = 0 if size >= 100 or unit == "blocks" else 2
        axes.plot([size], [ratio], marker="o", color=BLUE, markersize=6)
        axes.annotate(
            f"{mark['name']}: {size:,.{digits}f} {'GiB' if unit == 'gib' else 'blocks'}",
            (size, ratio),
            (1.15 * size, height),
            fontsize=9,
            verticalalignment="center",
            arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "relpos": (0, 0.5)},
        )


def new_figure(width: float, height: float) -> Figure:
    """An empty picture of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def saved(figure: Figure, path: str) -> bytes:
    """The picture as the bytes of a file with this name."""
    data = io.BytesIO()
    figure.savefig(data, format=Path(path).suffix.lower().lstrip("."), dpi=150)
    return data.getvalue()
