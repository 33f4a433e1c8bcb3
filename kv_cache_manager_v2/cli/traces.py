"""Request traces: the requests to a serving system, one per line of a file.

Every line is validated as it is read. A malformed line raises an error with its number and the reason, or is counted and reported
if the caller asks for that. `trace_lines` has the formats, `trace_blocks` the number of tokens that an id stands for.
"""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from kv_cache_manager_v2.cli.trace_blocks import BlockSizes
from kv_cache_manager_v2.cli.trace_lines import AUTO, TraceRecord, line_parser

STDIN: Final = "-"
MAX_LINE_BYTES: Final = 64 << 20  # of one request: millions of ids


class TraceError(Exception):
    """A trace cannot be read. The text names the file and, if known, the line."""


@dataclass(frozen=True)
class BadLine:
    """A line that was skipped."""

    number: int  # from 1
    reason: str


@dataclass(frozen=True)
class Trace:
    """The requests in the order of the file, the skipped lines, and what the file was taken for."""

    records: list[TraceRecord]
    bad_lines: list[BadLine]
    trace_format: str
    block_size: int  # tokens that an id stands for

    @property
    def description(self) -> str:
        """What the file was taken for, in one line."""
        size, total = self.block_size, len(self.records)
        sessions = len({record.session for record in self.records if record.session is not None})
        partial = sum(len(record.block_ids) * size > record.input_length for record in self.records)
        left_out = sum(len(record.block_ids) * size < record.input_length for record in self.records)
        if left_out and partial:
            tails = f"partly filled last blocks have no id in {left_out:,} of {total:,} requests"
        elif left_out:
            tails = "partly filled last blocks have no id"
        else:
            tails = "the last id may be a partly filled block" if partial else "full blocks only"
        return f"{self.trace_format}, ids of {size:,} tokens, {tails}" + (f", {sessions:,} sessions" if sessions else "")


def read_trace(
    path: str,
    block_size: int | None = None,
    *,
    trace_format: str = AUTO,
    skip_bad_lines: bool = False,
    max_records: int | None = None,
) -> Trace:
    """Read a trace: a file, a `.gz` file, or standard input for `-`.

    `block_size` is the number of tokens that an id stands for; None finds it from the lengths and the numbers of ids. Stops after
    `max_records` valid lines. Raises TraceError for a file that cannot be read or has no requests, for the first malformed line
    unless `skip_bad_lines`, and if several block sizes are possible.
    """
    records: list[TraceRecord] = []
    bad_lines: list[BadLine] = []
    sizes = BlockSizes(block_size)
    parser = None
    with closing(_lines(path)) as lines:
        for number, line in enumerate(lines, start=1):
            if max_records is not None and len(records) >= max_records:
                break
            if not line.strip():
                continue
            if parser is None:
                parser = line_parser(trace_format, line)
            record = parser.parse(line)
            if record is None:
                continue
            reason = record if isinstance(record, str) else sizes.narrow(record)
            if isinstance(record, TraceRecord) and reason is None:
                records.append(record)
            elif skip_bad_lines:
                bad_lines.append(BadLine(number, str(reason)))
            else:
                raise TraceError(f"{path}, line {number}: {reason} (--skip-bad-lines skips such lines)")
    if parser is None or not records:
        skipped = (
            f" ({len(bad_lines)} malformed lines, the first is line {bad_lines[0].number}: {bad_lines[0].reason})"
            if bad_lines
            else ""
        )
        raise TraceError(f"{path}: no requests in this trace{skipped}")
    size = sizes.size()
    if isinstance(size, str):
        raise TraceError(f"{path}: {size}")
    return Trace(records, bad_lines, parser.trace_format, size)


def _lines(path: str) -> Generator[bytes, None, None]:
    """The lines of the trace. Turns read errors into TraceError."""
    try:
        if path == STDIN:
            if sys.stdin is None:
                raise TraceError("standard input is closed")
            yield from _split(path, sys.stdin.buffer)
        elif path.endswith(".gz"):
            with gzip.open(path, "rb") as packed:
                yield from _split(path, packed)
        else:
            with Path(path).open("rb") as plain:
                yield from _split(path, plain)
    except (OSError, EOFError, zlib.error) as error:  # a gzip file may be cut short or corrupt
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _split(path: str, source: BinaryIO | gzip.GzipFile) -> Generator[bytes, None, None]:
    """The lines of a file. A line without an end would fill the memory: one that is too long raises TraceError."""
    number = 0
    while line := source.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(f"{path}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB; write one request a line")
        yield line
