"""`kvcm plan`: says how much memory a trace needs for how many hits, from its block ids alone.

Every mistake that is visible in the options or the files is reported before the work starts.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from typing import Any, Final

from kv_cache_manager_v2.build import COMPILED
from kv_cache_manager_v2.cli import options as shared
from kv_cache_manager_v2.cli.capacity import blocks_of_gib
from kv_cache_manager_v2.cli.curves import Requests, Units, best_at, exact_curve, simulated_curve, spread
from kv_cache_manager_v2.cli.layers import FULL, Layers
from kv_cache_manager_v2.cli.pictures import FORMATS, draw_plan, open_outputs
from kv_cache_manager_v2.cli.plan_report import Plan, make_report, to_table
from kv_cache_manager_v2.cli.progress import progress_bar
from kv_cache_manager_v2.cli.report import to_json
from kv_cache_manager_v2.cli.streams import tell
from kv_cache_manager_v2.cli.terminal_plot import require_rich, to_bars
from kv_cache_manager_v2.cli.traces import STDIN
from kv_cache_manager_v2.planning.hit_curve import HitCurve

LRU: Final = "lru"
BEST: Final = "best"
DESCRIPTION: Final = """\
Says which share of a trace's prompt tokens a cache would find, for every size of its memory: least-recently-used eviction, one
request after the other. Marks the sizes that reach 50, 80, 90 and 95 % of what an unlimited cache finds (the ceiling), and the
knee, after which more memory pays less than on average up to the ceiling. Answers how much memory a hit ratio needs, and what a
budget finds."""
EPILOG: Final = """\
With full attention the curve is exact at every size. With other layers it is simulated at --points sizes, and interpolated
between them, since what such a request computes depends on what it finds. Colder tiers hold what has left the warmer ones, as in
kvcm replay --exclusive, so tiers together find what one tier of their total size finds; inclusive ones find less. A request longer
than the cache finds its first blocks in the exact curve; kvcm replay skips it. Sizes are given in blocks, or in GiB with
--bytes-per-token, as in kvcm replay."""


def add_parser(tools: argparse._SubParsersAction[Any]) -> None:
    """Add this tool and its options to the command."""
    parser = tools.add_parser("plan", help="how much memory a trace needs", description=DESCRIPTION, epilog=EPILOG)
    shared.add_trace_options(parser)
    shared.add_layer_options(parser)
    shared.add_tier_options(parser)
    for name, _tier in shared.TIERS:
        parser.add_argument(
            f"--{name}-cost", type=shared.positive_number, metavar="X", help=f"cost of a GiB on the {name} tier, in any currency"
        )
    parser.add_argument(
        "--target-hit", type=_ratios, default=[], metavar="R,...", help="hit ratios from 0 to 1: the size that each needs"
    )
    parser.add_argument(
        "--budget-gib", type=shared.numbers, default=[], metavar="X,...", help="sizes in GiB: the hit ratio that each gives"
    )
    parser.add_argument(
        "--policies",
        type=_policies,
        default=[LRU],
        metavar="P,...",
        help="lru, or lru,best: also the most that any order of eviction can find, which takes longer (default: lru)",
    )
    parser.add_argument(
        "--warm-up",
        type=_share,
        default=0.5,
        metavar="X",
        help="share of the requests, the first ones, that fill the cache and are not counted (default: %(default)s)",
    )
    parser.add_argument(
        "--points",
        type=_points,
        default=40,
        metavar="N",
        help="sizes in the curve that is reported or drawn (default: %(default)s)",
    )
    parser.add_argument("--plot", metavar="FILE", help=f"draw the curve to a file: {', '.join(FORMATS)}")
    parser.add_argument(
        "--format",
        choices=["table", "json", "bars"],
        default="table",
        help="format of the report; bars is a chart for the terminal (default: %(default)s)",
    )
    shared.add_report_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> bool:
    """Compute the curve and write the report."""
    _check_options(options)
    with ExitStack() as files:
        output, picture = open_outputs(files, options)
        if options.format == "bars":
            require_rich()
        report = _plan(options)
        if picture is not None:
            picture.write_bytes(draw_plan(report, options.plot))
        if options.format == "bars":
            output.write(to_bars(report, colors=options.output is None))
        else:
            output.write(to_json(report) if options.format == "json" else to_table(report))
    return True


def _check_options(options: argparse.Namespace) -> None:
    """Check what argparse cannot; an error ends the program with a message."""
    parser: argparse.ArgumentParser = options.parser
    shared.check_tiers(options)
    costs = [f"--{name}-cost" for name, _tier in shared.TIERS if getattr(options, f"{name}_cost") is not None]
    if options.bytes_per_token is None:
        for option in ["--budget-gib"] * bool(options.budget_gib) + costs:
            parser.error(f"{option} needs --bytes-per-token")
    for gib in options.budget_gib:
        shared.check_gib(options, "--budget-gib", gib)
    for name, _tier in shared.TIERS[1:]:
        given = getattr(options, f"{name}_blocks") is not None or getattr(options, f"{name}_gib") is not None
        if given and options.gpu_blocks is None and options.gpu_gib is None:
            parser.error(
                f"--{name}-blocks and --{name}-gib need --gpu-blocks or --gpu-gib: the tiers are filled from the warmest on"
            )
    shared.check_plot(options)
    layers = shared.layers_of(options, 1)  # only which options go together: the trace has not been read
    if BEST in options.policies and layers != FULL:
        parser.error(f"--policies {BEST} is known for --layers full only")


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    """The report, from validated options."""
    trace = shared.read_trace_of(options)
    layers = shared.layers_of(options, trace.block_size)
    shared.note_lost_snapshots(layers, options.tokens_per_block)
    started = time.perf_counter()
    units = Units.of(trace.block_size, options.tokens_per_block, whole_blocks=layers != FULL)
    if layers.snapshot_every is not None and units.units_per_block > 1:
        tell(
            f"kvcm: note: states within a block are not simulated, and blocks of {options.tokens_per_block} tokens are not ids of "
            f"{trace.block_size}: the hit ratios may be a few percent too low; give --tokens-per-block a divisor of that"
        )
    requests = Requests(trace.records, units, int(len(trace.records) * options.warm_up))
    curve = _curve(options, layers, requests)
    seconds = time.perf_counter() - started
    sizes = spread(curve.ceiling_size, options.points) if curve.exact else curve.sizes[1:]
    best: list[int] = []
    if BEST in options.policies:
        with progress_bar("best possible", len(sizes)) as progress:
            best = best_at(requests, sizes, progress)
    plan = Plan(
        "standard input" if options.trace == STDIN else options.trace,
        trace,
        options.tokens_per_block,
        layers,
        requests.num_uncounted,
        curve,
        sizes,
        best,
        options.bytes_per_token,
        options.target_hit,
        {gib: blocks_of_gib(gib, options.bytes_per_token, options.tokens_per_block) for gib in options.budget_gib},
        shared.tiers_of(options),
        {name: cost for name, _tier in shared.TIERS if (cost := getattr(options, f"{name}_cost")) is not None},
        sorted(-(-record.input_length // options.tokens_per_block) for record in trace.records),
        seconds,
        "compiled" if COMPILED else "interpreted",
    )
    return make_report(plan)


def _curve(options: argparse.Namespace, layers: Layers, requests: Requests) -> HitCurve:
    if layers == FULL:
        return exact_curve(requests, options.tokens_per_block)
    with progress_bar("plan", options.points) as progress:
        return simulated_curve(requests, layers, options.tokens_per_block, options.points, progress)


def _ratios(text: str) -> list[float]:
    """Parse ratios with commas between them, for argparse."""
    ratios = shared.numbers(text)
    for ratio in ratios:
        if ratio > 1:
            raise argparse.ArgumentTypeError(f"{ratio:g} is no ratio from 0 to 1")
    return ratios


def _share(text: str) -> float:
    """Parse a share that leaves something to count, for argparse."""
    value = shared.number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0 and below 1")
    return value


def _points(text: str) -> int:
    """Parse a number of sizes, for argparse."""
    value = shared.positive(text)
    if not 2 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"{value} is not from 2 to 1000")
    return value


def _policies(text: str) -> list[str]:
    """Parse names of policies with commas between them, for argparse."""
    names = text.split(",")
    for name in names:
        if name not in (LRU, BEST):
            raise argparse.ArgumentTypeError(f"{name[:40]!r} is no policy: the policies are {LRU} and {BEST}")
    return names
