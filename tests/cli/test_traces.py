"""Reading traces: what is accepted, and that everything else is named with its line."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest

from kv_cache_manager_v2.cli.traces import BadLine, TraceError, TraceRecord, parse_mooncake, read_trace

GOOD = {"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [5, 6, 7]}


def line(**changes: object) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def test_a_record_keeps_lengths_and_ids() -> None:
    assert parse_mooncake(line(), 4) == TraceRecord(9, 2, [5, 6, 7])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"timestamp": 0, "input_length" 9}', "not JSON: Expecting ':' delimiter at column 33"),
        (b"{", "not JSON"),
        (b"\xff{}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1, 2]", "expected an object, found an array"),
        (b"null", "expected an object, found null"),
        (line(input_length="9"), "input_length is the string '9', not an integer"),
        (line(input_length=9.5), "input_length is the number 9.5, not an integer"),
        (line(input_length=True), "input_length is the boolean true, not an integer"),
        (line(input_length=0, hash_ids=[]), "input_length is 0, but must be at least 1"),
        (line(output_length=-1), "output_length is -1, but must be at least 0"),
        (line(output_length=None), "output_length is null, not an integer"),
        (line(timestamp="now"), "timestamp is the string 'now', not a number"),
        (line(timestamp=math.nan), "not JSON: NaN is no number of JSON"),
        (line(timestamp=-math.inf), "not JSON: -Infinity is no number of JSON"),
        (line(hash_ids=[1, math.nan, 3]), "not JSON: NaN is no number of JSON"),
        (line(timestamp=7).replace(b"7", b"1e999"), "timestamp is the number inf, which is not finite"),
        (line(hash_ids={"a": 1}), "hash_ids is an object, not an array"),
        (line(hash_ids=[1, "2", 3]), "hash_ids[1] is the string '2', not an integer"),
        (line(hash_ids=[1, 2]), "hash_ids has 2 entries, but input_length 9 makes 3 blocks of 4 tokens"),
        (line(hash_ids=[1, 2, 3, 4]), "hash_ids has 4 entries"),
        (b'{"timestamp": 0, "input_length": 9, "output_length": 2}', "field 'hash_ids' is missing"),
    ],
)
def test_a_malformed_line_is_told_from_a_good_one(text: bytes, reason: str) -> None:
    found = parse_mooncake(text, 4)
    assert isinstance(found, str)
    assert reason in found


def test_reading_stops_at_the_first_malformed_line_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line() + b"\n\n" + line(input_length="x") + b"\n" + b"{\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 3: input_length is the string 'x'"):
        read_trace(str(path), 4)


def test_malformed_lines_are_counted_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line() + b"\n[]\n" + line() + b"\n7")
    trace = read_trace(str(path), 4, skip_bad_lines=True)
    assert len(trace.records) == 2
    assert trace.bad_lines == [
        BadLine(2, "expected an object, found an array"),
        BadLine(4, "expected an object, found the number 7"),
    ]


def test_max_records_counts_good_lines_and_reads_no_further(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line() + b"\n[]\n" + line() + b"\n{ broken\n")
    trace = read_trace(str(path), 4, skip_bad_lines=True, max_records=2)
    assert (len(trace.records), len(trace.bad_lines)) == (2, 1)


def test_a_gzip_file_is_unpacked_and_a_broken_one_reported(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    packed = gzip.compress(line() + b"\n")
    path.write_bytes(packed)
    assert len(read_trace(str(path), 4).records) == 1
    path.write_bytes(packed[:-6])
    with pytest.raises(TraceError, match=r"trace\.jsonl\.gz: "):
        read_trace(str(path), 4)


@pytest.mark.parametrize("text", [b"", b"\n \n"])
def test_a_trace_without_requests_is_an_error(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(text)
    with pytest.raises(TraceError, match="no requests in this trace"):
        read_trace(str(path), 4)


def test_a_missing_file_or_a_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(str(tmp_path / "none"), 4)
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(str(tmp_path), 4)
