"""`kvcm replay`: runs a request trace through the manager on the emulated device, and reports how much of it the cache saved.

Every mistake that is visible in the options or the files is reported before the replay starts.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from contextlib import suppress
from typing import Any, Final

from kv_cache_manager_v2 import CacheTier
from kv_cache_manager_v2.build import COMPILED
from kv_cache_manager_v2.cli.capacity import TierBlocks, blocks_of_gib, plan_capacity
from kv_cache_manager_v2.cli.contents import FINGERPRINT_BYTES, token_source
from kv_cache_manager_v2.cli.layers import DEFAULT_SINKS, DEFAULT_WINDOW, PRESETS, Layers, make_layers
from kv_cache_manager_v2.cli.progress import progress_bar
from kv_cache_manager_v2.cli.report import Settings, make_report, to_json, to_table
from kv_cache_manager_v2.cli.serving import Engine
from kv_cache_manager_v2.cli.streams import ReportOutput, tell
from kv_cache_manager_v2.cli.traces import STDIN, Trace, read_trace
from kv_cache_manager_v2.errors import KVCacheError

MAX_INTEGER: Final = 1 << 48  # largest value of an option: sizes computed from larger ones could overflow
MAX_BLOCKS: Final = 1 << 40  # most blocks of a tier
TIERS: Final = (("gpu", CacheTier.GPU_MEM), ("host", CacheTier.HOST_MEM), ("disk", CacheTier.DISK))
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
    parser.add_argument("trace", metavar="TRACE", help="trace file; .gz is unpacked; - is standard input")
    parser.add_argument(
        "--trace-format", choices=["mooncake"], default="mooncake", help="format of the trace (default: %(default)s)"
    )
    parser.add_argument(
        "--trace-block-size",
        type=_positive,
        default=512,
        metavar="N",
        help="tokens per hash id of the trace (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens-per-block", type=_positive, default=32, metavar="N", help="tokens per block of the cache (default: %(default)s)"
    )
    _add_layer_options(parser)
    for name, tier in TIERS:
        size = parser.add_mutually_exclusive_group()
        meaning = (
            "blocks that the GPU holds"
            if tier is CacheTier.GPU_MEM
            else f"blocks that the {name} tier holds (default: no such tier)"
        )
        size.add_argument(f"--{name}-blocks", type=_positive, metavar="N", help=meaning)
        size.add_argument(
            f"--{name}-gib", type=_gib, metavar="X", help="size in GiB of the model's KV instead; needs --bytes-per-token"
        )
    parser.add_argument(
        "--bytes-per-token", type=_positive, metavar="N", help="bytes of the model's KV per token, for the --*-gib options"
    )
    parser.add_argument(
        "--disk-path",
        default=tempfile.gettempdir(),
        metavar="DIR",
        help="directory of the disk tier's files (default: %(default)s)",
    )
    parser.add_argument(
        "--concurrency",
        type=_positive,
        default=1,
        metavar="N",
        help="most requests open at once (default: %(default)s)",
    )
    parser.add_argument("--decode", action="store_true", help="also generate output_length tokens for each request, one at a time")
    parser.add_argument(
        "--verify", action="store_true", help="write a fingerprint of its tokens to each page and compare it at each reuse"
    )
    parser.add_argument("--max-records", type=_positive, metavar="N", help="replay the first N requests only")
    parser.add_argument(
        "--skip-bad-lines", action="store_true", help="count and report malformed lines instead of stopping at the first"
    )
    parser.add_argument("--seed", type=_natural, default=0, metavar="N", help="seed of the generated tokens (default: %(default)s)")
    parser.add_argument("--format", choices=["table", "json"], default="table", help="format of the report (default: %(default)s)")
    parser.add_argument("--output", metavar="FILE", help="file for the report, instead of standard output")
    parser.set_defaults(parser=parser)


def _add_layer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about the model's layers."""
    parser.add_argument(
        "--layers",
        choices=PRESETS,
        default="full",
        help="kinds of layers: full attention only, full attention and a sliding window, a window with sinks only, or full "
        "attention and recurrent layers (default: %(default)s)",
    )
    parser.add_argument(
        "--window", type=_positive, metavar="N", help=f"tokens that a windowed layer sees (default: {DEFAULT_WINDOW})"
    )
    parser.add_argument(
        "--sinks",
        type=_natural,
        metavar="N",
        help=f"leading tokens that the layers of window-sinks always see (default: {DEFAULT_SINKS})",
    )
    parser.add_argument(
        "--snapshot-every",
        type=_positive,
        metavar="N",
        help="with full+ssm: commit, which takes a snapshot of the recurrent state, at each multiple of N tokens and at the end of "
        "the prompt (default: --trace-block-size). A hit ends at a snapshot. A block of the cache keeps only its last snapshot, so "
        "all snapshots are kept if N is a multiple of --tokens-per-block",
    )


def run(options: argparse.Namespace) -> bool:
    """Replay the trace and write the report. Returns False if a page had wrong contents."""
    _check_options(options)
    layers = _layers(options)
    with ReportOutput(options.output, options.trace) as output:
        return _replay(options, layers, output)


def _replay(options: argparse.Namespace, layers: Layers, output: ReportOutput) -> bool:
    """Replay the trace with validated options and an open output."""
    started = time.perf_counter()
    trace = read_trace(
        options.trace, options.trace_block_size, skip_bad_lines=options.skip_bad_lines, max_records=options.max_records
    )
    concurrency = min(options.concurrency, len(trace.records))
    capacity = plan_capacity(
        _tiers(options, trace, concurrency), options.tokens_per_block, _stamp_bytes(options, trace), options.disk_path, layers
    )
    source = token_source(options.trace_block_size, options.seed)
    engine = Engine(capacity, source, concurrency=concurrency, decode=options.decode, verify=options.verify)
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
        options.trace_format,
        options.trace_block_size,
        options.tokens_per_block,
        layers,
        concurrency,
        options.decode,
        options.verify,
        options.seed,
        "compiled" if COMPILED else "interpreted",
    )
    report = make_report(settings, trace, capacity, outcome, time.perf_counter() - started)
    output.write(to_json(report) if options.format == "json" else to_table(report))
    return outcome.num_mismatches == 0


def _check_options(options: argparse.Namespace) -> None:
    """Check what argparse cannot; an error ends the program with a message."""
    parser: argparse.ArgumentParser = options.parser
    in_gib = [name for name, _tier in TIERS if getattr(options, f"{name}_gib") is not None]
    if in_gib and options.bytes_per_token is None:
        parser.error(f"--{in_gib[0]}-gib needs --bytes-per-token")
    if options.bytes_per_token is not None and not in_gib:
        parser.error("--bytes-per-token has no effect without --gpu-gib, --host-gib or --disk-gib")
    for name in in_gib:
        num_blocks = blocks_of_gib(getattr(options, f"{name}_gib"), options.bytes_per_token, options.tokens_per_block)
        if num_blocks == 0:
            parser.error(f"--{name}-gib {getattr(options, f'{name}_gib'):g} is less than one block")
        if num_blocks > MAX_BLOCKS:
            parser.error(f"--{name}-gib {getattr(options, f'{name}_gib'):g} is more than {MAX_BLOCKS} blocks")
    for name, _tier in TIERS:
        if (getattr(options, f"{name}_blocks") or 0) > MAX_BLOCKS:
            parser.error(f"--{name}-blocks: more than {MAX_BLOCKS} blocks")
    wants_disk = options.disk_blocks is not None or options.disk_gib is not None
    if wants_disk and not os.path.isdir(options.disk_path):
        parser.error(f"--disk-path {options.disk_path}: no such directory")


def _layers(options: argparse.Namespace) -> Layers:
    """The model's layers. An option that the preset does not have ends the program with a message."""
    try:
        layers = make_layers(options.layers, options.trace_block_size, options.window, options.sinks, options.snapshot_every)
    except ValueError as error:
        parser: argparse.ArgumentParser = options.parser
        parser.error(str(error))
    every = layers.snapshot_every
    if every is not None and every % options.tokens_per_block != 0:
        tell(
            f"kvcm: note: a block keeps its last snapshot only, so with blocks of {options.tokens_per_block} tokens some of the "
            f"snapshots at each {every} tokens are replaced; give --snapshot-every a multiple of --tokens-per-block to keep all"
        )
    return layers


def _tiers(options: argparse.Namespace, trace: Trace, concurrency: int) -> list[TierBlocks]:
    """The tiers with their numbers of blocks, warm to cold."""
    tiers: list[TierBlocks] = []
    for name, tier in TIERS:
        num_blocks = getattr(options, f"{name}_blocks")
        gib = getattr(options, f"{name}_gib")
        if gib is not None:
            num_blocks = blocks_of_gib(gib, options.bytes_per_token, options.tokens_per_block)
        if num_blocks is None and tier is CacheTier.GPU_MEM:
            num_blocks = _enough_blocks(options, trace, concurrency)
        if num_blocks is not None:
            tiers.append(TierBlocks(tier, num_blocks))
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
    trace_block_size: int = options.trace_block_size
    prefixes: dict[tuple[int, int], int] = {}  # (number of the preceding prefix, block id) -> number of this prefix, from 1
    longest = generated = 0
    for record in trace.records:
        prefix = 0
        for block_id in record.block_ids:
            prefix = prefixes.setdefault((prefix, block_id), len(prefixes) + 1)
        output_length = record.output_length if options.decode else 0
        generated += output_length
        longest = max(longest, record.input_length + output_length)
    per_prefix = -(-trace_block_size // tokens_per_block) + (trace_block_size % tokens_per_block != 0)
    private = concurrency * (longest // tokens_per_block + 2)
    return len(prefixes) * per_prefix + generated // tokens_per_block + 2 * len(trace.records) + private


def _positive(text: str) -> int:
    """Parse an integer of at least 1, for argparse."""
    value = _integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _natural(text: str) -> int:
    """Parse an integer of at least 0, for argparse."""
    value = _integer(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def _integer(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not an integer") from None
    if value > MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"{text[:40]} is too large: the most is {MAX_INTEGER}")
    return value


def _gib(text: str) -> float:
    """Parse a positive finite number, for argparse."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a positive size")
    return value
