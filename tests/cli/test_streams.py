"""What a user sees of `kvcm` where a standard stream is closed, a report cannot be written, or numbers are odd."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kv_cache_manager_v2.cli.main import main
from tests.cli.helpers import Prompt, child_environment, make_prompts, write_trace
from tests.cli.test_replay import BLOCK, replay

DEVICE_FULL = Path("/dev/full")  # takes nothing: every write fails


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return write_trace(tmp_path / "trace", make_prompts(3, 10, BLOCK))


def run(redirect: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`kvcm` in a process of its own, with a redirection of the shell."""
    command = shlex.join([sys.executable, "-m", "kv_cache_manager_v2", *arguments])
    return subprocess.run(
        ["sh", "-c", f"{command} {redirect}"], capture_output=True, text=True, timeout=120, env=child_environment(), check=False
    )


@pytest.mark.parametrize(
    ("redirect", "status", "said"),
    [
        (">&-", 2, "standard output is closed"),
        ("2>&-", 0, ""),
        ("<&-", 0, ""),
        ("<&- 2>&-", 0, ""),
        ("<&- >&- 2>&-", 2, ""),
        pytest.param(">/dev/full", 2, "No space left", marks=pytest.mark.skipif(not DEVICE_FULL.exists(), reason="no /dev/full")),
        ("| true", 0, ""),
    ],
)
def test_a_closed_or_full_stream_is_a_report_or_one_line(trace: str, redirect: str, status: int, said: str) -> None:
    """No traceback, nothing of Python's at its exit; the report wherever standard output is open."""
    done = run(redirect, "replay", trace, "--trace-block-size", str(BLOCK))
    assert done.returncode == status
    assert said in done.stderr
    assert done.stderr.count("\n") <= 1
    assert "hit tokens" in done.stdout or ">" in redirect.replace("2>&-", "") or "|" in redirect


def test_a_closed_standard_input_is_no_trace(tmp_path: Path) -> None:
    done = run("<&-", "replay", "-")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvcm: error: standard input is closed\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["replay", "--help"]])
@pytest.mark.parametrize("redirect", ["| true", ">&-", "2>&-"])
def test_help_survives_its_reader(arguments: list[str], redirect: str) -> None:
    done = run(redirect, *arguments)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_an_output_that_cannot_be_written_is_found_before_the_work(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The trace is not even read."""
    assert main(["replay", "/no/such/trace", "--output", "/proc/kvcm"]) == 2
    assert "--output /proc/kvcm" in capsys.readouterr().err


def test_a_report_file_appears_only_with_a_report(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that fails leaves no new file, and an old one as it was; a report replaces all of the old one."""
    output = tmp_path / "report"
    assert main(["replay", "/no/such/trace", "--output", str(output)]) == 2
    assert not output.exists()
    output.write_text("old " * 10_000)
    assert main(["replay", "/no/such/trace", "--output", str(output)]) == 2
    assert output.read_text() == "old " * 10_000
    options = ["--trace-block-size", str(BLOCK), "--format", "json"]
    assert main(["replay", trace, *options, "--output", str(output)]) == 0
    assert json.loads(output.read_text())["requests"] == 10
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("link", ["", "hard", "symbolic", "standard input"])
def test_a_report_never_replaces_its_trace(trace: str, tmp_path: Path, link: str) -> None:
    """Under whatever name: the mistake is reported before the work, and the trace is as it was."""
    before = Path(trace).read_bytes()
    output = tmp_path / "other name" if link in ("hard", "symbolic") else Path(trace)
    if link == "hard":
        output.hardlink_to(trace)
    elif link == "symbolic":
        output.symlink_to(trace)
    redirect = f"< {shlex.quote(trace)}" if link == "standard input" else ""
    name = "-" if link == "standard input" else trace
    done = run(redirect, "replay", name, "--trace-block-size", str(BLOCK), "--output", str(output))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kvcm: error: --output {output}: this is the trace; name another file\n"
    assert Path(trace).read_bytes() == before


@pytest.mark.skipif(not DEVICE_FULL.exists(), reason="no /dev/full")
@pytest.mark.parametrize("arguments", [["/no/such/trace"], ["/no/such/trace", "--seed", "x"], ["--output", "/dev/full"], []])
def test_an_error_that_cannot_be_written_keeps_its_exit_status(trace: str, arguments: list[str]) -> None:
    """Standard error takes nothing, as the report does: still 2, and not the 1 of a failed check."""
    options = [*arguments, "--trace-block-size", str(BLOCK)]
    done = run(">/dev/full 2>/dev/full", "replay", *(options if "/no/such/trace" in arguments else [trace, *options]))
    assert done.returncode == 2


@pytest.mark.skipif(not DEVICE_FULL.exists(), reason="no /dev/full")
def test_a_full_device_is_named(trace: str) -> None:
    options = ["replay", trace, "--trace-block-size", str(BLOCK)]
    assert run(">/dev/full", *options).stderr == "kvcm: error: standard output: No space left on device\n"
    named = run("", *options, "--output", "/dev/full")
    assert (named.returncode, named.stderr) == (2, "kvcm: error: --output /dev/full: No space left on device\n")


def test_a_file_name_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    """Characters that standard output has not are written as escapes."""
    name = write_trace(tmp_path / "tr\u00e4ce \u2603", make_prompts(3, 10, BLOCK))
    done = subprocess.run(
        [sys.executable, "-m", "kv_cache_manager_v2", "replay", name, "--trace-block-size", str(BLOCK)],
        capture_output=True,
        timeout=120,
        env={**child_environment(), "PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert b"tr\\xe4ce \\u2603" in done.stdout


def test_an_unexpected_error_is_one_line(trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It names the class and how to see more."""

    def fail(*_arguments: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("kv_cache_manager_v2.cli.replay.token_source", fail)
    assert main(["replay", trace, "--trace-block-size", str(BLOCK)]) == 2
    assert capsys.readouterr().err.startswith("kvcm: error: unexpected ZeroDivisionError: division by zero (")
    monkeypatch.setenv("KVCM_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["replay", trace, "--trace-block-size", str(BLOCK)])


@pytest.mark.parametrize(
    "renamed", [lambda n: n * ((1 << 61) - 1), lambda n: -n - 1, lambda n: -n * ((1 << 61) - 1), lambda n: n << 70]
)
def test_any_ids_are_as_good_as_small_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], renamed: Callable[[int], int]
) -> None:
    """Ids that differ by what Python's hashes repeat after, and negative ones, name different blocks."""
    figures = []
    for name in (int, renamed):
        prompts = [Prompt(5 * BLOCK, tuple(name(5 * group + i) for i in range(5)), 1) for group in range(40)]
        report = replay(capsys, write_trace(tmp_path / "t", prompts * 2))
        figures.append((report["whole"]["hit_tokens"], report["blocks"]))
    assert figures[0] == figures[1]
    assert figures[0][0] == 40 * 5 * BLOCK


def test_no_more_requests_are_open_than_the_trace_has(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A concurrency above the trace's length is that length: for the size of the cache, the replay and the report."""
    reports = [replay(capsys, trace, "--concurrency", str(count), "--decode") for count in (10, 11, 1_000_000)]
    for report in reports:
        del report["wall_seconds"], report["requests_per_second"]
    assert reports[0] == reports[1] == reports[2]
    assert reports[0]["concurrency"] == 10


def test_nothing_is_said_of_bytes_that_were_not_given(tmp_path: Path) -> None:
    """The smallest cache that a large window needs is larger than a small trace's; the pages' sizes are the tool's own choice."""
    trace = write_trace(tmp_path / "t", [Prompt(BLOCK + 1, (1, 2), 1)])
    options = ["--trace-block-size", str(BLOCK), "--layers", "full+window", "--window", "131072"]
    done = run("", "replay", trace, *options)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("every", "tokens_per_block", "noted"), [(8, 8, False), (16, 8, False), (8, 16, True), (12, 8, True)])
def test_snapshots_that_a_block_cannot_keep_are_said(
    trace: str, capsys: pytest.CaptureFixture[str], every: int, tokens_per_block: int, noted: bool
) -> None:
    """A block keeps its last snapshot: unless they end with blocks, a note says so."""
    options = ["--trace-block-size", str(BLOCK), "--tokens-per-block", str(tokens_per_block), "--snapshot-every", str(every)]
    assert main(["replay", trace, "--layers", "full+ssm", *options]) == 0
    assert ("a block keeps its last snapshot only" in capsys.readouterr().err) == noted
