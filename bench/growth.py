"""The growth curves: each operation against each axis, the fitted exponents, and plots where matplotlib is installed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.builds import NAMES, WorkerFailedError
from bench.fit import final_exponent
from bench.growth_axes import AXES
from bench.micro import measure_row
from bench.results import readable

BUILD = "compiled"  # what is deployed; the ratio to the other build is in the table of operations


@dataclass
class Measured:
    """One curve."""

    axis: str
    title: str
    per: str
    expected: float
    sizes: list[int] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)  # seconds

    def exponent(self) -> float | None:
        return final_exponent(self.sizes, self.medians) if len(self.sizes) > 1 else None


def measure_growth(axes: Sequence[str], only: str, quick: bool, say: Callable[[str], None]) -> list[Measured]:
    """All curves of these axes whose titles contain `only`; a quick run takes the two smallest sizes."""
    curves: list[Measured] = []
    for name in axes:
        axis = AXES[name]
        for title, curve in axis.curves.items():
            if only not in title:
                continue
            measured = Measured(name, title, "", curve.expected)
            for size in axis.values[:2] if quick else axis.values:
                arguments = [f"--point={name}={size}", f"--values={2 if quick else 5}"]
                try:
                    row = measure_row(title, arguments, 1, (BUILD,))
                except WorkerFailedError as failure:
                    say(f"{title} at {name}={size}: FAILED\n{failure}")
                    continue
                measured.per = row.per
                measured.sizes.append(size)
                measured.medians.append(statistics.median(row.values[BUILD]))
            say(f"{name}: {title}")
            curves.append(measured)
    return curves


def growth_table(curves: Sequence[Measured]) -> str:
    if not curves:
        return "no curves: nothing was measured"
    lines: list[str] = []
    axis = ""
    for curve in curves:
        if curve.axis != axis:
            axis = curve.axis
            lines.append(f"\nagainst {AXES[axis].label} ({NAMES[BUILD]} build)")
        exponent = curve.exponent()
        points = "  ".join(f"{size:,}:{readable(time)}" for size, time in zip(curve.sizes, curve.medians, strict=True))
        fitted = f"{exponent:+.2f}" if exponent is not None else "  -  "
        lines.append(f"  {curve.title:<40} exponent {fitted} (planned {curve.expected:.0f})  {points}  per {curve.per}")
    return "\n".join(lines)


def growth_json(curves: Sequence[Measured]) -> dict[str, object]:
    return {
        f"{curve.title} against {AXES[curve.axis].label}": {
            "per": curve.per,
            "sizes": curve.sizes,
            "median_s": curve.medians,
            "exponent": curve.exponent(),
            "planned": curve.expected,
        }
        for curve in curves
    }


def plot(curves: Sequence[Measured], directory: Path) -> list[str]:
    """One PNG an axis; the names of the files, or why there are none."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return ["no plots: matplotlib is not installed (pip install '.[bench]')"]
    written: list[str] = []
    directory.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(curve.axis for curve in curves):
        figure, axes = pyplot.subplots(figsize=(8, 5))
        for curve in curves:
            if curve.axis == name and curve.sizes:
                exponent = curve.exponent()
                fitted = f" (n^{exponent:.2f})" if exponent is not None else ""
                axes.loglog(curve.sizes, [1e6 * median for median in curve.medians], marker="o", label=curve.title + fitted)
        axes.set_xlabel(AXES[name].label)
        axes.set_ylabel("median, us")
        axes.grid(True, which="both", alpha=0.3)
        axes.legend(fontsize="small")
        path = directory / f"growth-{name.replace(' ', '-')}.png"
        figure.savefig(path, dpi=110, metadata={"Software": None})
        pyplot.close(figure)
        written.append(path.name)
    return written
