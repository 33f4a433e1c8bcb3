"""Reading traces: what is accepted, and that everything else is named with its line."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from kv_cache_manager_v2.cli.trace_lines import MooncakeLines, TraceRecord
from kv_cache_manager_v2.cli.traces import BadLine, TraceError, read_trace

GOOD = {"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [5, 6, 7]}


def line(**changes: object) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def test_a_record_keeps_lengths_ids_and_session() -> None:
    assert MooncakeLines().parse(line()) == TraceRecord(9, 2, [5, 6, 7])
    assert MooncakeLines().parse(line(session="a", last=True, more=1)) == TraceRecord(9, 2, [5, 6, 7], 0, "a", True)


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
        (line(timestamp=8).replace(b"8", b"1e999"), "timestamp is the number inf, which is not finite"),
        (line(hash_ids={"a": 1}), "hash_ids is an object, not an array"),
        (line(hash_ids=[1, "2", 3]), "hash_ids[1] is the string '2', not an integer"),
        (line(session=[1]), "session is an array, not an integer or a string"),
        (line(last=1), "last is the number 1, not a boolean"),
        (b'{"timestamp": 0, "input_length": 9, "output_length": 2}', "field 'hash_ids' is missing"),
    ],
)
def test_a_malformed_line_is_told_from_a_good_one(text: bytes, reason: str) -> None:
    found = MooncakeLines().parse(text)
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


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory() -> None:
    with pytest.raises(TraceError, match=r"/dev/zero, line 1: longer than 64 MiB"):
        read_trace("/dev/zero", 4)


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


def written(path: Path, rows: Sequence[tuple[int, int]]) -> str:
    """A trace whose requests have (input length, number of ids)."""
    path.write_text("".join(line(input_length=length, hash_ids=list(range(count))).decode() + "\n" for length, count in rows))
    return str(path)


@pytest.mark.parametrize(
    ("rows", "size", "taken_for"),
    [
        ([(6758, 14), (700, 2)], 512, "ids of 512 tokens, the last id may be a partly filled block"),
        ([(1023, 15), (65, 1), (20, 0)], 64, "ids of 64 tokens, partly filled last blocks have no id"),
        ([(1000, 2), (1500, 3)], 512, "ids of 512 tokens, the last id may be a partly filled block"),
        ([(40, 4), (30, 3), (99, 9), (19, 1)], 10, "ids of 10 tokens, partly filled last blocks have no id"),
        ([(64, 2), (32, 1), (640, 20)], 32, "ids of 32 tokens, full blocks only"),
    ],
)
def test_the_tokens_of_an_id_are_found_from_the_lengths(
    tmp_path: Path, rows: Sequence[tuple[int, int]], size: int, taken_for: str
) -> None:
    trace = read_trace(written(tmp_path / "trace", rows))
    assert trace.block_size == size
    assert trace.description == f"mooncake, {taken_for}"


@pytest.mark.parametrize(
    ("rows", "size", "reason"),
    [
        ([(100, 10)], None, "an id may stand for 10 to 11 tokens: --trace-block-size gives"),
        ([(6758, 14), (6758, 15)], None, "line 2: hash_ids has 15 entries for input_length 6758, which fits no number of tokens"),
        ([(9, 3), (9, 1)], 4, "line 2: hash_ids has 1 entries, but input_length 9 makes 3 blocks of 4 tokens"),
        ([(9, 4)], 4, "line 1: hash_ids has 4 entries"),
    ],
)
def test_ids_that_fit_no_length_are_refused(tmp_path: Path, rows: Sequence[tuple[int, int]], size: int | None, reason: str) -> None:
    path = written(tmp_path / "trace", rows)
    with pytest.raises(TraceError, match=reason):
        read_trace(path, size)


def test_requests_with_and_without_a_partial_last_id_are_told(tmp_path: Path) -> None:
    """Where the size is given, the two may be mixed. Requests of one session are counted once."""
    path = tmp_path / "trace"
    path.write_bytes(line(session=1) + b"\n" + line(hash_ids=[1, 2], session=1) + b"\n" + line(hash_ids=[1, 2], session=2))
    expected = "mooncake, ids of 4 tokens, partly filled last blocks have no id in 2 of 3 requests, 2 sessions"
    assert read_trace(str(path), 4).description == expected


def test_a_csv_of_ones_own_has_named_columns(tmp_path: Path) -> None:
    """In any order; ids are words, and columns of other names are ignored."""
    path = tmp_path / "trace.csv"
    path.write_text(
        '\ufeffhash_ids, input_length,note,session,last,timestamp\r\na b c,9,"x, y",s1,,1.5\r\n\r\na b d,10,,s1,true,2\r\n',
        encoding="utf-8",
    )
    trace = read_trace(str(path))
    assert trace.records == [TraceRecord(9, 0, [0, 1, 2], 1.5, "s1", False), TraceRecord(10, 0, [0, 1, 3], 2.0, "s1", True)]
    assert trace.description == "csv, ids of 4 tokens, the last id may be a partly filled block, 1 sessions"


def test_the_example_of_the_documentation_is_read(tmp_path: Path) -> None:
    document = (Path(__file__).resolve().parents[2] / "docs" / "traces.md").read_text()
    found = re.search(r"looks like this:\n\n((?:    .*\n)+)", document)
    assert found is not None
    path = tmp_path / "trace.csv"
    path.write_text(found.group(1))
    trace = read_trace(str(path))
    assert (trace.trace_format, trace.block_size, len(trace.records)) == ("csv", 512, 2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"input_length,ids\n9,1\n", "line 1: the first line has no column 'hash_ids'"),
        (b"input_length,hash_ids\n9\n", "line 2: 1 fields, but 2 columns"),
        (b"input_length,hash_ids\nnine,1\n", "line 2: input_length is 'nine', not an integer"),
        (b"input_length,hash_ids\n0,\n", "line 2: input_length is 0, but must be at least 1"),
        (b"input_length,hash_ids\n,1\n", "line 2: input_length is 0, but must be at least 1"),
        (b"input_length,hash_ids,output_length\n9,1,-1\n", "line 2: output_length is -1, but must be at least 0"),
        (b"input_length,hash_ids,timestamp\n9,1,now\n", "line 2: timestamp is 'now', not a number of milliseconds"),
        (b"input_length,hash_ids,timestamp\n9,1,inf\n", "line 2: timestamp is the number inf, which is not finite"),
        (b"input_length,hash_ids,last\n9,1,maybe\n", "line 2: last is 'maybe', not 0, 1, true or false"),
        (b'input_length,hash_ids\n9,"1\n', "line 2: not CSV"),
        (b"input_length,hash_ids\n\xff,1\n", "line 2: not CSV"),
    ],
)
def test_a_malformed_line_of_a_csv_is_named(tmp_path: Path, text: bytes, reason: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(text)
    with pytest.raises(TraceError, match=reason):
        read_trace(str(path), 9)
