"""The formats of traces: what one line says.

`mooncake` is JSON lines with `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`: an id for every block of
the prompt. The partly filled last block may have an id or none. Equal ids mean equal tokens. `session` (a number or a text) and
`last` (true for the last request of a session) are optional.

`csv` has a first line with the names of its columns: `input_length` and `hash_ids`, and optionally `timestamp`, `output_length`,
`session` and `last` (1 or true). Columns of other names are ignored. The ids are words of any kind, separated by spaces.
"""

from __future__ import annotations

import csv
import json
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final, NoReturn

AUTO: Final = "auto"
MOONCAKE: Final = "mooncake"
CSV: Final = "csv"
MOONCAKE_FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids")
CSV_COLUMNS: Final = ("input_length", "hash_ids")  # that must be there
TRUE_WORDS: Final = {"1": True, "true": True, "0": False, "false": False, "": False}
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class TraceRecord:
    """One request. `block_ids` are the ids of the prompt's blocks; the partly filled last block may have none."""

    input_length: int  # prompt tokens, at least 1
    output_length: int  # generated tokens
    block_ids: list[int]
    timestamp: float = 0.0  # arrival, ms
    session: int | str | None = None  # the conversation that the request belongs to, if the trace says so
    last: bool = False  # the trace says that no request of the session follows


class LineParser(ABC):
    """Reads the lines of one trace, in order."""

    trace_format: str

    @abstractmethod
    def parse(self, line: bytes) -> TraceRecord | str | None:
        """The request of one line, an error message, or None for a line that is neither."""


def line_parser(trace_format: str, first_line: bytes) -> LineParser:
    """The parser of a trace. `auto` takes a first line with the column name `input_length` for CSV, any other for JSON."""
    if trace_format == AUTO:
        names_columns = not first_line.lstrip().startswith(b"{") and b"input_length" in first_line
        trace_format = CSV if names_columns else MOONCAKE
    return CsvLines() if trace_format == CSV else MooncakeLines()


class MooncakeLines(LineParser):
    """JSON lines of Mooncake's form."""

    trace_format = MOONCAKE

    def parse(self, line: bytes) -> TraceRecord | str:
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
        for name in ("input_length", "output_length"):
            value = fields[name]
            if isinstance(value, bool) or not isinstance(value, int):
                return f"{name} is {_kind(value)}, not an integer"
        block_ids = fields["hash_ids"]
        if not isinstance(block_ids, list):
            return f"hash_ids is {_kind(block_ids)}, not an array"
        for position, block_id in enumerate(block_ids):
            if isinstance(block_id, bool) or not isinstance(block_id, int):
                return f"hash_ids[{position}] is {_kind(block_id)}, not an integer"
        session, last = fields.get("session"), fields.get("last", False)
        if isinstance(session, bool) or not isinstance(session, (int, str, type(None))):
            return f"session is {_kind(session)}, not an integer or a string"
        if not isinstance(last, bool):
            return f"last is {_kind(last)}, not a boolean"
        return _record(fields["input_length"], fields["output_length"], block_ids, timestamp, session, last)


class CsvLines(LineParser):
    """Comma-separated values; the first line names the columns. A field may be quoted, but not contain the end of a line."""

    trace_format = CSV

    def __init__(self) -> None:
        self._columns: list[str] = []
        self._number_of: dict[str, int] = {}  # word of an id -> number, in order of first appearance

    def parse(self, line: bytes) -> TraceRecord | str | None:
        try:
            (cells,) = csv.reader([line.removeprefix(BYTE_ORDER_MARK).decode().strip()], strict=True)
        except (ValueError, csv.Error) as error:
            return f"not CSV: {error}"
        cells = [cell.strip() for cell in cells]
        if not self._columns:
            missing = [name for name in CSV_COLUMNS if name not in cells]
            if missing:
                return f"the first line has no column {missing[0]!r}"
            self._columns = cells
            return None
        if len(cells) != len(self._columns):
            return f"{len(cells)} fields, but {len(self._columns)} columns"
        fields = dict(zip(self._columns, cells, strict=True))
        lengths: list[int] = []
        for name in ("input_length", "output_length"):
            text = fields.get(name) or "0"
            try:
                lengths.append(int(text))
            except ValueError:
                return f"{name} is {text[:40]!r}, not an integer"
        text = fields.get("timestamp") or "0"
        try:
            timestamp = float(text)
        except ValueError:
            return f"timestamp is {text[:40]!r}, not a number of milliseconds"
        if not math.isfinite(timestamp):
            return f"timestamp is {_kind(timestamp)}, which is not finite"
        last = TRUE_WORDS.get(fields.get("last", "").lower())
        if last is None:
            return f"last is {fields['last'][:40]!r}, not 0, 1, true or false"
        number_of = self._number_of
        block_ids = [number_of.setdefault(word, len(number_of)) for word in fields["hash_ids"].split()]
        return _record(lengths[0], lengths[1], block_ids, timestamp, fields.get("session") or None, last)


def _record(
    input_length: int, output_length: int, block_ids: list[int], timestamp: float, session: int | str | None, last: bool
) -> TraceRecord | str:
    """The request, or why a value is out of range."""
    for name, value, least in (("input_length", input_length, 1), ("output_length", output_length, 0)):
        if value < least:
            return f"{name} is {value}, but must be at least {least}"
    return TraceRecord(input_length, output_length, block_ids, timestamp, session, last)


def _refuse_constant(name: str) -> NoReturn:
    """Called for NaN and infinities, which Python reads though JSON has none."""
    raise ValueError(f"{name} is no number of JSON")


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
