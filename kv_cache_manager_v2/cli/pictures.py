"""Draws pictures with matplotlib (the `plot` extra). Colours are those of Okabe and Ito, which the colour-blind can tell apart.

matplotlib is imported when a picture is drawn, and for the file alone: no window is opened.
"""

from __future__ import annotations

import io
from argparse import Namespace
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kv_cache_manager_v2.cli.recording import DROPPED, Recorder, Sample
from kv_cache_manager_v2.cli.streams import OutputError, ReportOutput

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
FATE_COLORS: Final = {("gpu", "host"): ORANGE, ("gpu", "disk"): VERMILION, ("host", "disk"): GREEN}  # of pages that moved
LINES: Final = ("-", "--", "-.")  # by level: colours are never the only difference
OVER_TIME: Final = "requests admitted"
HATCHES: Final = ("", "//", "..", "xx")


def require_matplotlib() -> None:
    """Raise OutputError if no picture can be drawn."""
    if find_spec("matplotlib") is None:
        raise OutputError("--plot needs matplotlib: pip install 'kv-cache-manager-v2[plot]'")


def open_outputs(files: ExitStack, options: Namespace) -> tuple[ReportOutput, ReportOutput | None]:
    """Open the outputs of the report and of the picture, which is None without --plot. Raises OutputError before any work."""
    report = files.enter_context(ReportOutput(options.output, options.trace))
    if options.plot is None:
        return report, None
    require_matplotlib()
    return report, files.enter_context(ReportOutput(options.plot, options.trace, "--plot"))


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


def draw_replay(report: dict[str, Any], recorder: Recorder, page_bytes: float | None, path: str) -> bytes:
    """Four views of a replay on one page, in the format that the file's name says.

    `page_bytes` are the bytes of a page of the model; without, pages are counted.
    """
    figure = new_figure(12, 8)
    (hits, occupancy), (moves, ages) = figure.subplots(2, 2)
    tiers: list[str] = list(report["blocks"])
    samples = recorder.samples
    before = [Sample(0, [0] * len(tiers), 0, [0.0] * len(tiers), [[0] * len(tiers) for _tier in tiers]), *samples[:-1]]
    requests = [sample.admitted for sample in samples]
    _draw_hits(hits, tiers, requests, before, samples)
    for level, name in enumerate(tiers):
        occupied = [100 * sample.occupied[level] for sample in samples]
        occupancy.plot(requests, occupied, color=TIER_COLORS[name], linewidth=2, linestyle=LINES[level], label=name)
    _finish(occupancy, "Slots that have a page", "% of the slots", OVER_TIME, "lower right")
    occupancy.set_ylim(0, 105)
    _draw_moves(moves, tiers, requests, before, samples, page_bytes)
    _draw_ages(ages, recorder)
    blocks = ", ".join(f"{name} {count:,}" for name, count in report["blocks"].items())
    hit = f"{100 * report['whole']['hit_ratio']:.1f} % of prompt tokens found"
    figure.suptitle(f"{Path(report['trace']).name}, {report['layers']}, blocks: {blocks}. {hit}", x=0.01, ha="left", fontsize=13)
    return saved(figure, path)


def _draw_hits(axes: Axes, tiers: list[str], requests: list[int], before: list[Sample], samples: list[Sample]) -> None:
    """Prompt tokens of each interval by where they were found."""
    shares: list[list[float]] = []
    for level in range(len(tiers)):
        found = [now.hit_tokens[level] - then.hit_tokens[level] for then, now in zip(before, samples, strict=True)]
        shares.append([float(tokens) for tokens in found])
    computed = [now.computed_tokens - then.computed_tokens for then, now in zip(before, samples, strict=True)]
    totals = [max(1.0, sum(row)) for row in zip(computed, *shares, strict=True)]
    shares = [[100 * max(0.0, tokens) / total for tokens, total in zip(row, totals, strict=True)] for row in shares]
    areas = axes.stackplot(requests, *shares, labels=tiers, colors=[TIER_COLORS[name] for name in tiers], alpha=0.85)
    for area, hatch in zip(areas, HATCHES, strict=False):
        area.set_hatch(hatch)
        area.set_edgecolor("white")
        area.set_linewidth(0)
    top = max(max(sum(row) for row in zip(*shares, strict=True)), 1.0)
    axes.set_ylim(0, min(130.0, 1.25 * top))
    _finish(axes, "Prompt tokens found, by tier", "% of the prompt tokens of an interval", OVER_TIME)


def _draw_moves(
    axes: Axes, tiers: list[str], requests: list[int], before: list[Sample], samples: list[Sample], page_bytes: float | None
) -> None:
    """Pages moved between two tiers, for each request of an interval."""
    unit = 1 if page_bytes is None else page_bytes / (1 << 20)
    for source, source_name in enumerate(tiers):
        for target, target_name in enumerate(tiers):
            if source == target or samples[-1].pages_moved[source][target] == 0:
                continue
            rates = [
                unit * (now.pages_moved[source][target] - then.pages_moved[source][target]) / (now.admitted - then.admitted)
                for then, now in zip(before, samples, strict=True)
            ]
            line = "-" if target > source else "--"
            color = TIER_COLORS[tiers[max(source, target)]]
            axes.plot(requests, rates, color=color, linewidth=2, linestyle=line, label=f"{source_name} to {target_name}")
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the legend
    _finish(axes, "Moved between tiers", "pages per request" if page_bytes is None else "MiB per request", OVER_TIME)


def _draw_ages(axes: Axes, recorder: Recorder) -> None:
    """Evicted pages by the requests since their last use, in steps of powers of two."""
    steps = max((len(counts) for counts in recorder.ages.values()), default=1)
    first = min((step for counts in recorder.ages.values() for step in range(len(counts)) if counts[step]), default=0)
    width = 0.8 / max(1, len(recorder.ages))
    colors = {**{f"{source} to {target}": color for (source, target), color in FATE_COLORS.items()}, DROPPED: GREY}
    for number, (fate, counts) in enumerate(sorted(recorder.ages.items(), key=lambda item: list(colors).index(item[0]))):
        positions = [step - 0.4 + (number + 0.5) * width for step in range(len(counts))]
        axes.bar(positions, counts, width, color=colors[fate], hatch=HATCHES[number], edgecolor="white", label=fate)
    labels = ["0" if step == 0 else f"{1 << (step - 1):,}" for step in range(steps)]
    axes.set_xticks(range(steps), labels)
    axes.set_xlim(first - 0.6, steps - 0.4)
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])  # room for the legend
    _finish(axes, "Evictions by age", "pages", "requests since the last use of the block: at least")


def _finish(axes: Axes, title: str, unit: str, across: str, place: str = "upper left") -> None:
    """Titles, a grid, and a legend if something is drawn."""
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(unit)
    axes.set_xlabel(across)
    axes.yaxis.set_major_formatter(lambda value, _position: f"{value:,g}")
    axes.grid(visible=True, axis="y", color="#DDDDDD")
    if across == OVER_TIME:
        axes.xaxis.set_major_formatter(lambda value, _position: f"{value:,g}")
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc=place, ncols=2, framealpha=0.9, edgecolor="white")
    else:
        axes.text(0.5, 0.5, "nothing", transform=axes.transAxes, ha="center", color=GREY)
