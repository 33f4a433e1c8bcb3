"""The options that several tools share: the trace, the model's layers, the tiers and the report."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Final

from kv_cache_manager_v2 import CacheTier
from kv_cache_manager_v2.cli.capacity import TierBlocks, blocks_of_gib
from kv_cache_manager_v2.cli.layers import DEFAULT_SINKS, DEFAULT_WINDOW, PRESETS, Layers, make_layers
from kv_cache_manager_v2.cli.pictures import FORMATS
from kv_cache_manager_v2.cli.streams import tell
from kv_cache_manager_v2.cli.trace_lines import AUTO, CSV, MOONCAKE
from kv_cache_manager_v2.cli.traces import Trace, read_trace

MAX_INTEGER: Final = 1 << 48  # largest value of an option: sizes computed from larger ones could overflow
MAX_BLOCKS: Final = 1 << 40  # most blocks of a tier
TIERS: Final = (("gpu", CacheTier.GPU_MEM), ("host", CacheTier.HOST_MEM), ("disk", CacheTier.DISK))


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the trace and how it is read."""
    parser.add_argument("trace", metavar="TRACE", help="trace file; .gz is unpacked; - is standard input")
    parser.add_argument(
        "--trace-format",
        choices=[AUTO, MOONCAKE, CSV],
        default=AUTO,
        help="format of the trace: JSON lines of Mooncake's form, or comma-separated values with the columns input_length and "
        "hash_ids (words separated by spaces) and optionally timestamp, output_length, session, last (default: by its first line)",
    )
    parser.add_argument(
        "--trace-block-size",
        type=positive,
        metavar="N",
        help="tokens per hash id of the trace (default: found from the lengths and the numbers of ids)",
    )
    parser.add_argument(
        "--tokens-per-block", type=positive, default=32, metavar="N", help="tokens per block of the cache (default: %(default)s)"
    )
    parser.add_argument("--max-records", type=positive, metavar="N", help="use the first N requests only")
    parser.add_argument(
        "--skip-bad-lines", action="store_true", help="count and report malformed lines instead of stopping at the first"
    )


def add_layer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about the model's layers."""
    parser.add_argument(
        "--layers",
        choices=PRESETS,
        default="full",
        help="kinds of layers: full attention only, full attention and a sliding window, a window with sinks only, or full "
        "attention and recurrent layers (default: %(default)s)",
    )
    parser.add_argument(
        "--window", type=positive, metavar="N", help=f"tokens that a windowed layer sees (default: {DEFAULT_WINDOW})"
    )
    parser.add_argument(
        "--sinks",
        type=natural,
        metavar="N",
        help=f"leading tokens that the layers of window-sinks always see (default: {DEFAULT_SINKS})",
    )
    parser.add_argument(
        "--snapshot-every",
        type=positive,
        metavar="N",
        help="with full+ssm: commit, which takes a snapshot of the recurrent state, at each multiple of N tokens and at the end of "
        "the prompt (default: the tokens per hash id). A hit ends at a snapshot. A block keeps its last snapshot only, "
        "so all snapshots are kept if N is a multiple of --tokens-per-block",
    )


def add_tier_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the tiers."""
    for name, tier in TIERS:
        size = parser.add_mutually_exclusive_group()
        meaning = (
            "blocks that the GPU holds"
            if tier is CacheTier.GPU_MEM
            else f"blocks that the {name} tier holds (default: no such tier)"
        )
        size.add_argument(f"--{name}-blocks", type=positive, metavar="N", help=meaning)
        size.add_argument(
            f"--{name}-gib",
            type=positive_number,
            metavar="X",
            help="size in GiB of the model's KV instead; needs --bytes-per-token",
        )
    parser.add_argument("--bytes-per-token", type=positive, metavar="N", help="bytes of the model's KV per token, for sizes in GiB")


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add where the report goes."""
    parser.add_argument("--output", metavar="FILE", help="file for the report, instead of standard output")
    parser.set_defaults(parser=parser)


def read_trace_of(options: argparse.Namespace) -> Trace:
    """The trace that the options name."""
    return read_trace(
        options.trace,
        options.trace_block_size,
        trace_format=options.trace_format,
        skip_bad_lines=options.skip_bad_lines,
        max_records=options.max_records,
    )


def layers_of(options: argparse.Namespace, trace_block_size: int) -> Layers:
    """The model's layers. An option that the preset does not have ends the program with a message."""
    try:
        return make_layers(options.layers, trace_block_size, options.window, options.sinks, options.snapshot_every)
    except ValueError as error:
        parser: argparse.ArgumentParser = options.parser
        parser.error(str(error))


def note_lost_snapshots(layers: Layers, tokens_per_block: int) -> None:
    """Tell the user if a block would have to keep several snapshots."""
    every = layers.snapshot_every
    if every is not None and every % tokens_per_block != 0:
        tell(
            f"kvcm: note: a block keeps its last snapshot only, so with blocks of {tokens_per_block} tokens some of the "
            f"snapshots at each {every} tokens are replaced; give --snapshot-every a multiple of --tokens-per-block to keep all"
        )


def check_tiers(options: argparse.Namespace) -> None:
    """Check the sizes of the tiers; an error ends the program with a message."""
    parser: argparse.ArgumentParser = options.parser
    in_gib = [name for name, _tier in TIERS if getattr(options, f"{name}_gib") is not None]
    if in_gib and options.bytes_per_token is None:
        parser.error(f"--{in_gib[0]}-gib needs --bytes-per-token")
    for name in in_gib:
        check_gib(options, f"--{name}-gib", getattr(options, f"{name}_gib"))
    for name, _tier in TIERS:
        if (getattr(options, f"{name}_blocks") or 0) > MAX_BLOCKS:
            parser.error(f"--{name}-blocks: more than {MAX_BLOCKS} blocks")


def check_plot(options: argparse.Namespace) -> None:
    """Check the name of a picture; an error ends the program with a message."""
    parser: argparse.ArgumentParser = options.parser
    if options.plot is None:
        return
    if Path(options.plot).suffix.lower() not in FORMATS:
        parser.error(f"--plot {options.plot}: the name must end with {', '.join(FORMATS)}")
    if options.output is not None and os.path.realpath(options.plot) == os.path.realpath(options.output):
        parser.error(f"--plot {options.plot}: this is the file of --output; name another one")


def check_gib(options: argparse.Namespace, option: str, gib: float) -> int:
    """The whole blocks in so many GiB. Fewer than one, or too many, end the program with a message."""
    parser: argparse.ArgumentParser = options.parser
    num_blocks = blocks_of_gib(gib, options.bytes_per_token, options.tokens_per_block)
    if num_blocks == 0:
        parser.error(f"{option} {gib:g} is less than one block")
    if num_blocks > MAX_BLOCKS:
        parser.error(f"{option} {gib:g} is more than {MAX_BLOCKS} blocks")
    return num_blocks


def tiers_of(options: argparse.Namespace) -> list[TierBlocks]:
    """The tiers whose sizes are given, warm to cold."""
    tiers: list[TierBlocks] = []
    for name, tier in TIERS:
        num_blocks = getattr(options, f"{name}_blocks")
        gib = getattr(options, f"{name}_gib")
        if gib is not None:
            num_blocks = blocks_of_gib(gib, options.bytes_per_token, options.tokens_per_block)
        if num_blocks is not None:
            tiers.append(TierBlocks(tier, num_blocks))
    return tiers


def positive(text: str) -> int:
    """Parse an integer of at least 1, for argparse."""
    value = _integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def numbers(text: str) -> list[float]:
    """Parse positive finite numbers with commas between them, for argparse."""
    return [positive_number(part) for part in text.split(",")]


def natural(text: str) -> int:
    """Parse an integer of at least 0, for argparse."""
    value = _integer(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def share(text: str) -> float:
    """Parse a number from 0 to 1, for argparse."""
    value = number(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return value


def positive_number(text: str) -> float:
    """Parse a positive finite number, for argparse."""
    value = number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive size")
    return value


def number(text: str) -> float:
    """Parse a number, for argparse. A number that is not finite is refused."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text[:40]} is not finite")
    return value


def _integer(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not an integer") from None
    if value > MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"{text[:40]} is too large: the most is {MAX_INTEGER}")
    return value
