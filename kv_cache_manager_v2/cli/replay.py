"""`kvcm replay`: runs a request trace through the manager on the emulated device, and reports how much of it the cache saved.

Every mistake that is visible in the options or the files is reported before the replay starts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import ExitStack, suppress
from typing import Any, Final

from kv_cache_manager_v2 import CacheTier
from kv_cache_manager_v2.build import COMPILED
from kv_cache_manager_v2.cli import options as shared
from kv_cache_manager_v2.cli.capacity import TierBlocks, plan_capacity
from kv_cache_manager_v2.cli.contents import FINGERPRINT_BYTES, token_source
from kv_cache_manager_v2.cli.hints import add_policy_options, expectations
from kv_cache_manager_v2.cli.pictures import FORMATS, draw_replay, open_outputs
from kv_cache_manager_v2.cli.progress import progress_bar
from kv_cache_manager_v2.cli.recording import Recorder
from kv_cache_manager_v2.cli.report import Settings, make_report, to_json, to_table
from kv_cache_manager_v2.cli.serving import Engine
from kv_cache_manager_v2.cli.streams import ReportOutput
from kv_cache_manager_v2.cli.traces import STDIN, Trace
from kv_cache_manager_v2.cli.work import model_shape
from kv_cache_manager_v2.errors import KVCacheError
from kv_cache_manager_v2.eviction.admission import ADMISSIONS

DESCRIPTION: Final = """\
Replays a request trace through the KV-cache manager on the emulated device (no GPU is used): each prompt is looked up, its missing
tokens are given pages, and the whole prompt is committed for later requests. Reports the tokens found in the cache, over the
whole trace and over its last half of requests, by tier; the pages moved and dropped; suspensions; and the time it took."""
EPILOG: Final = """\
Sizes are given in blocks, or in GiB with --bytes-per-token; a block has a page of each kind of layers, and a recurrent state takes
as much as one page. Where several tiers cannot all be exact, some come out slightly
larger, and the report says what was provided. Without --gpu-blocks and --gpu-gib, the GPU tier is as large as the
trace can ever use, which shows the most that any cache could find. A request that does not fit an empty cache is counted
as skipped, and as a miss. Exit status: 0, or 1 if --verify found a page with wrong contents, or 2 for a mistake in the
options or the trace."""


def add_parser(tools: argparse._SubParsersAction[Any]) -> None:
    """Add this tool and its options to the command."""
    parser = tools.add_parser("replay", help="replay a request trace through the manager", description=DESCRIPTION, epilog=EPILOG)
    shared.add_trace_options(parser)
    shared.add_layer_options(parser)
    shared.add_tier_options(parser)
    parser.add_argument(
        "--disk-path",
        default=tempfile.gettempdir(),
        metavar="DIR",
        help="directory of the disk tier's files (default: %(default)s)",
    )
    parser.add_argument(
        "--disk-admission",
        choices=list(ADMISSIONS),
        default="all",
        help="which cached pages the disk tier takes; the others are dropped (default: %(default)s)",
    )
    copies = parser.add_mutually_exclusive_group()
    copies.add_argument(
        "--inclusive",
        dest="exclusive",
        action="store_false",
        default=False,
        help="pages that are loaded leave clean copies on the tier that they come from (the default)",
    )
    copies.add_argument("--exclusive", action="store_true", help="each page is on one tier only")
    parser.add_argument(
        "--concurrency",
        type=shared.positive,
        default=1,
        metavar="N",
        help="most requests open at once (default: %(default)s)",
    )
    add_policy_options(parser)
    parser.add_argument("--decode", action="store_true", help="also generate output_length tokens for each request, one at a time")
    parser.add_argument(
        "--verify", action="store_true", help="write a fingerprint of its tokens to each page and compare it at each reuse"
    )
    parser.add_argument(
        "--seed", type=shared.natural, default=0, metavar="N", help="seed of the generated tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help=f"draw hits, occupied slots, moved bytes and evictions over time to a file: {', '.join(FORMATS)}",
    )
    parser.add_argument(
        "--snapshots",
        choices=["every", "prompt"],
        default="every",
        help="with full+ssm: take snapshots of the recurrent state at each --snapshot-every tokens, or by prompt: at its last "
        "block boundary and where it leaves the prompts before it, as cache.prefill_end() says (default: %(default)s)",
    )
    parser.add_argument(
        "--state-slots",
        type=shared.positive,
        metavar="N",
        help="with full+ssm: slots for recurrent states alone, beside those of --gpu-blocks; the GPU is the only tier then",
    )
    parser.add_argument(
        "--model-shape",
        type=model_shape,
        metavar="P,W,L",
        help="report the work saved in FLOPs too: parameters that a token uses, heads times the elements of a head, and layers of "
        "each kind, such as 8e9,4096,32 or, with two kinds, 8e9,4096,8+24",
    )
    parser.add_argument("--format", choices=["table", "json"], default="table", help="format of the report (default: %(default)s)")
    shared.add_report_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> bool:
    """Replay the trace and write the report. Returns False if a page had wrong contents."""
    _check_options(options)
    with ExitStack() as files:
        output, picture = open_outputs(files, options)
        return _replay(options, output, picture)


def _replay(options: argparse.Namespace, output: ReportOutput, picture: ReportOutput | None) -> bool:
    """Replay the trace with validated options and open outputs."""
    started = time.perf_counter()
    trace = shared.read_trace_of(options)
    layers = shared.layers_of(options, trace.block_size)
    if options.snapshots == "prompt":
        layers = layers.with_snapshots_by_prompt()
    shared.note_lost_snapshots(layers, options.tokens_per_block)
    concurrency = min(options.concurrency, len(trace.records))
    capacity = plan_capacity(
        _tiers(options, trace, concurrency),
        options.tokens_per_block,
        _stamp_bytes(options, trace),
        options.disk_path,
        layers,
        options.state_slots,
        options.exclusive,
        options.disk_admission,
    )
    source = token_source(trace.block_size, options.seed)
    recorder = None if picture is None else Recorder(len(trace.records), capacity.tier_names, options.tokens_per_block)
    capacity.config.eviction_policy = options.policy
    right = 1.0 if options.hints_right is None else options.hints_right
    engine = Engine(
        capacity,
        source,
        concurrency=concurrency,
        decode=options.decode,
        verify=options.verify,
        recorder=recorder,
        expects=expectations(trace.records, right, options.seed) if options.policy == "hints" else [],
    )
    try:
        with progress_bar("replay", len(trace.records)) as progress:
            outcome = engine.run(trace.records, progress)
    except BaseException:
        with suppress(KVCacheError):  # report the first error
            engine.close()
        raise
    engine.close()
    settings = Settings(
        "standard input" if options.trace == STDIN else options.trace,
        options.tokens_per_block,
        layers,
        concurrency,
        options.decode,
        options.verify,
        options.seed,
        options.exclusive,
        options.disk_admission,
        options.policy,
        right if options.policy == "hints" else None,
        "compiled" if COMPILED else "interpreted",
        options.model_shape,
    )
    report = make_report(settings, trace, capacity, outcome, time.perf_counter() - started)
    if picture is not None and recorder is not None:
        block_bytes = None if options.bytes_per_token is None else options.bytes_per_token * options.tokens_per_block
        page_bytes = None if block_bytes is None else block_bytes / len(layers.kinds)
        picture.write_bytes(draw_replay(report, recorder, page_bytes, options.plot))
    output.write(to_json(report) if options.format == "json" else to_table(report))
    return outcome.num_mismatches == 0


def _check_options(options: argparse.Namespace) -> None:
    """Check what argparse cannot; an error ends the program with a message."""
    parser: argparse.ArgumentParser = options.parser
    shared.check_tiers(options)
    if options.hints_right is not None and options.policy != "hints":
        parser.error("--hints-right has no effect without --policy hints")
    in_gib = any(getattr(options, f"{name}_gib") is not None for name, _tier in shared.TIERS)
    if options.bytes_per_token is not None and not in_gib and options.plot is None:
        parser.error("--bytes-per-token has no effect without --gpu-gib, --host-gib, --disk-gib or --plot")
    wants_disk = options.disk_blocks is not None or options.disk_gib is not None
    if wants_disk and not os.path.isdir(options.disk_path):
        parser.error(f"--disk-path {options.disk_path}: no such directory")
    shared.check_plot(options)
    _check_states(options)
    if options.model_shape is not None and len(options.model_shape.layers) != len(shared.layers_of(options, 1).kinds):
        kinds = "+".join(shared.layers_of(options, 1).names)
        parser.error(f"--model-shape has layers of {len(options.model_shape.layers)} kinds; --layers {options.layers} has {kinds}")
    shared.layers_of(options, 1)  # only which options go together: the trace has not been read


def _check_states(options: argparse.Namespace) -> None:
    """Check the options of recurrent states."""
    parser: argparse.ArgumentParser = options.parser
    by_prompt = options.snapshots == "prompt"
    for option, given in (("--snapshots prompt", by_prompt), ("--state-slots", options.state_slots is not None)):
        if given and options.layers != "full+ssm":
            parser.error(f"{option} has no effect with --layers {options.layers}; choose --layers full+ssm")
    if by_prompt and options.snapshot_every is not None:
        parser.error("--snapshot-every has no effect with --snapshots prompt")
    if options.state_slots is not None:
        colder = [
            f"--{name}-{unit}" for name in ("host", "disk") for unit in ("blocks", "gib") if getattr(options, f"{name}_{unit}")
        ]
        for option in [*colder, "--plot"] if options.plot is not None else colder:
            parser.error(f"{option} cannot be combined with --state-slots, which has the GPU as the only tier")


def _tiers(options: argparse.Namespace, trace: Trace, concurrency: int) -> list[TierBlocks]:
    """The tiers with their numbers of blocks, warm to cold; without a size of the GPU tier, it has enough for the trace."""
    tiers = shared.tiers_of(options)
    if not tiers or tiers[0].tier is not CacheTier.GPU_MEM:
        tiers.insert(0, TierBlocks(CacheTier.GPU_MEM, _enough_blocks(options, trace, concurrency)))
    return tiers


def _stamp_bytes(options: argparse.Namespace, trace: Trace) -> int:
    """Bytes of a block's fingerprints with --verify. No block has more tokens than the longest request."""
    if not options.verify:
        return 0
    longest = max(record.input_length + record.output_length for record in trace.records)
    tokens_per_block: int = options.tokens_per_block
    return FINGERPRINT_BYTES * min(tokens_per_block, longest)


def _enough_blocks(options: argparse.Namespace, trace: Trace, concurrency: int) -> int:
    """A number of blocks that is always enough for the trace.

    It is the number of distinct prefixes of trace blocks, in cache blocks, plus the private last blocks of open requests.
    """
    tokens_per_block: int = options.tokens_per_block
    trace_block_size = trace.block_size
    prefixes: dict[tuple[int, int], int] = {}  # (number of the preceding prefix, block id) -> number of this prefix, from 1
    longest = generated = unnamed = 0  # tokens; unnamed: of last blocks that have no id
    for record in trace.records:
        prefix = 0
        for block_id in record.block_ids:
            prefix = prefixes.setdefault((prefix, block_id), len(prefixes) + 1)
        output_length = record.output_length if options.decode else 0
        generated += output_length
        unnamed += max(0, record.input_length - len(record.block_ids) * trace_block_size)
        longest = max(longest, record.input_length + output_length)
    per_prefix = -(-trace_block_size // tokens_per_block) + (trace_block_size % tokens_per_block != 0)
    private = concurrency * (longest // tokens_per_block + 2)
    return len(prefixes) * per_prefix + (generated + unnamed) // tokens_per_block + 2 * len(trace.records) + private
