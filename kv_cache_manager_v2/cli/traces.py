"""Request traces: the requests to a serving system, one per line.

Every line is validated as it is read. A malformed line raises an error with its number and the reason, or is counted and reported
if the caller asks for that.

The Mooncake format is JSON lines with `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`: one id for
every block of the prompt, of which the last may be partial. Equal ids mean equal tokens.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
import zlib
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

STDIN: Final = "-"
MOONCAKE_FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceError(Exception):
    """A trace cannot be read. The text names the file and, if known, the line."""


@dataclass(frozen=True)
class TraceRecord:
    """One request. `block_ids` are the ids of the prompt's blocks, in the trace's block size; the last may be partial."""

    input_length: int  # prompt tokens, at least 1
    output_length: int  # generated tokens
    block_ids: list[int]


@dataclass(frozen=True)
class BadLine:
    """A line that was skipped."""

    number: int  # from 1
    reason: str


@dataclass(frozen=True)
class Trace:
    """The requests in the order of the file, and the skipped lines."""

    records: list[TraceRecord]
    bad_lines: list[BadLine]


def read_trace(path: str, block_size: int, *, skip_bad_lines: bool = False, max_records: int | None = None) -> Trace:
    """Read a Mooncake-format trace: a file, a `.gz` file, or standard input for `-`.

    Stops after `max_records` valid lines. Raises TraceError for a file that cannot be read or has no requests, and for the first
    malformed line unless `skip_bad_lines`.
    """
    records: list[TraceRecord] = []
    bad_lines: list[BadLine] = []
    with closing(_lines(path)) as lines:
        for number, line in enumerate(lines, start=1):
            if max_records is not None and len(records) >= max_records:
                break
            if not line.strip():
                continue
            record = parse_mooncake(line, block_size)
            if isinstance(record, TraceRecord):
                records.append(record)
            elif skip_bad_lines:
                bad_lines.append(BadLine(number, record))
            else:
                raise TraceError(f"{path}, line {number}: {record} (--skip-bad-lines skips such lines)")
    if not records:
        skipped = (
            f" ({len(bad_lines)} malformed lines, the first is line {bad_lines[0].number}: {bad_lines[0].reason})"
            if bad_lines
            else ""
        )
        raise TraceError(f"{path}: no requests in this trace{skipped}")
    return Trace(records, bad_lines)


def parse_mooncake(line: bytes, block_size: int) -> TraceRecord | str:
    """The request of one line, or an error message."""
    try:
        fields = json.loads(line, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:  # the text of the exception would contain a misleading "line 1"
        return f"not JSON: {error.msg} at column {error.colno}"
    except ValueError as error:  # not UTF-8, or NaN
        return f"not JSON: {error}"
    except RecursionError:
        return "not JSON: nested too deeply"
    if not isinstance(fields, dict):
        return f"expected an object, found {_kind(fields)}"
    missing = [name for name in MOONCAKE_FIELDS if name not in fields]
    if missing:
        return f"field {missing[0]!r} is missing"
    timestamp = fields["timestamp"]
    if isinstance(timestamp, bool) or not isinstance(timestamp, (int, float)):
        return f"timestamp is {_kind(timestamp)}, not a number of milliseconds"
    if isinstance(timestamp, float) and not math.isfinite(timestamp):
        return f"timestamp is {_kind(timestamp)}, which is not finite"
    for name, least in (("input_length", 1), ("output_length", 0)):
        value = fields[name]
        if isinstance(value, bool) or not isinstance(value, int):
            return f"{name} is {_kind(value)}, not an integer"
        if value < least:
            return f"{name} is {value}, but must be at least {least}"
    block_ids = fields["hash_ids"]
    if not isinstance(block_ids, list):
        return f"hash_ids is {_kind(block_ids)}, not an array"
    for position, block_id in enumerate(block_ids):
        if isinstance(block_id, bool) or not isinstance(block_id, int):
            return f"hash_ids[{position}] is {_kind(block_id)}, not an integer"
    needed = -(-fields["input_length"] // block_size)
    if len(block_ids) != needed:
        return (
            f"hash_ids has {len(block_ids)} entries, but input_length {fields['input_length']} makes {needed} blocks of "
            f"{block_size} tokens (is --trace-block-size right?)"
        )
    return TraceRecord(fields["input_length"], fields["output_length"], block_ids)


def _refuse_constant(name: str) -> object:
    """Called for NaN and infinities, which Python reads though JSON has none."""
    raise ValueError(f"{name} is no number of JSON")


def _lines(path: str) -> Generator[bytes, None, None]:
    """The lines of the trace. Turns read errors into TraceError."""
    try:
        if path == STDIN:
            if sys.stdin is None:
                raise TraceError("standard input is closed")
            yield from sys.stdin.buffer
        elif path.endswith(".gz"):
            with gzip.open(path, "rb") as packed:
                yield from packed
        else:
            with Path(path).open("rb") as plain:
                yield from plain
    except (OSError, EOFError, zlib.error) as error:  # a gzip file may be cut short or corrupt
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _kind(value: object) -> str:
    """The name of a JSON value's type, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the string {value[:40]!r}"
    return "an array" if isinstance(value, list) else "an object"
