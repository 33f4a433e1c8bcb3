"""`kvcm plan`: it agrees with replays of the real manager, answers what is asked, and refuses mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kv_cache_manager_v2.cli.main import main
from tests.cli.helpers import Prompt, make_prompts, write_trace
from tests.cli.test_layers import arguments_of
from tests.cli.test_replay import BLOCK, replay


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return write_trace(tmp_path / "trace", make_prompts(3, 100, BLOCK, whole_blocks=True))


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Run the command in JSON and return its report."""
    assert main(["plan", *map(str, arguments), "--format", "json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def sizes_of(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report["sizes"]}


@pytest.mark.parametrize(
    ("preset", "window", "sinks", "every", "tolerance"),
    [
        ("full", None, None, None, 0.0),
        ("full+window", 20, None, None, 0.0),
        ("full+window", 100, None, None, 0.005),
        ("window-sinks", 40, 5, None, 0.0),
        ("full+ssm", None, None, None, 0.02),
    ],
)
def test_it_agrees_with_replays_of_the_manager(
    capsys: pytest.CaptureFixture[str],
    trace: str,
    preset: str,
    window: int | None,
    sinks: int | None,
    every: int | None,
    tolerance: float,
) -> None:
    """Exactly, but for caches of a few prompts: there it matters that a request's own copies take slots for a while."""
    options = [*arguments_of(preset, window, sinks, every), "--tokens-per-block", "16"]
    report = plan(capsys, trace, *options, "--points", 4)
    assert report["exact"] == (preset == "full")
    for point in report["curve"]:
        if point["blocks"] > 24:  # the longest prompt
            found = replay(capsys, trace, *options, "--gpu-blocks", point["blocks"])["last_half"]["hit_ratio"]
            assert abs(point["hit_ratio"] - found) <= tolerance, point["blocks"]
    unlimited = replay(capsys, trace, *options)["last_half"]
    assert report["ceiling_hit_ratio"] == unlimited["hit_ratio"]
    assert report["counted_tokens"] == unlimited["total_tokens"]


def test_it_says_how_many_requests_a_replay_would_skip(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    """Those that are longer than the cache."""
    report = plan(capsys, trace, "--tokens-per-block", "16", "--points", 40)
    skipped = [point["requests_that_cannot_fit"] for point in report["curve"]]
    assert skipped[0] > skipped[-1] == 0
    point = next(point for point in report["curve"] if point["blocks"] > 12)
    found = replay(capsys, trace, "--tokens-per-block", "16", "--gpu-blocks", point["blocks"])
    assert found["skipped_requests"] == point["requests_that_cannot_fit"]
    assert main(["plan", trace, "--tokens-per-block", "16", "--target-hit", "0.01"]) == 0
    assert "cannot fit" in capsys.readouterr().out


def test_states_within_blocks_are_a_note(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    assert main(["plan", trace, "--tokens-per-block", "64", "--layers", "full+ssm", "--snapshot-every", "64", "--points", "2"]) == 0
    assert capsys.readouterr().err.startswith("kvcm: note: states within a block are not simulated, and blocks of 64 tokens")


@pytest.mark.parametrize("options", [["--tokens-per-block", "7"], ["--layers", "full+window", "--tokens-per-block", "1"]])
def test_paths_that_do_not_fit_in_memory_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str]
) -> None:
    """A block that divides no id, or small blocks of layers that are simulated, make long paths."""
    huge = 1 << 40
    path = write_trace(tmp_path / "huge", [Prompt(huge, (1,), 0)])
    assert main(["plan", path, "--trace-block-size", str(huge), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvcm: error: the prompts have 1,099,511,627,776 parts of 1 tokens")
    assert error.count("\n") == 1


def test_marks_targets_and_budgets_are_on_the_curve(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    options = ["--tokens-per-block", 8, "--bytes-per-token", 1 << 20, "--warm-up", 0.25]
    report = plan(capsys, trace, *options, "--target-hit", "0.25,0.99", "--budget-gib", "0.5,1")
    ceiling = report["ceiling_hit_ratio"]
    rows = sizes_of(report)
    assert list(rows) == [
        *(f"{percent} % of the ceiling" for percent in (50, 80, 90, 95)),
        *("knee", "ceiling", "target 25 %", "target 99 %", "budget 0.5 GiB", "budget 1 GiB"),
    ]
    for name, least in [("50 % of the ceiling", 0.5 * ceiling), ("95 % of the ceiling", 0.95 * ceiling), ("target 25 %", 0.25)]:
        blocks = rows[name]["blocks"]
        tiers = plan(capsys, trace, *options, "--gpu-blocks", blocks - 1, "--host-blocks", 1)["tiers"]
        assert tiers[0]["hit_ratio"] < least <= tiers[1]["hit_ratio_so_far"] == rows[name]["hit_ratio"]
        assert rows[name]["tokens"] == 8 * blocks
        assert rows[name]["gib"] == 8 * blocks / 1024
    assert rows["ceiling"]["hit_ratio"] == ceiling
    assert rows["target 99 %"]["blocks"] is None
    assert [rows[f"budget {gib} GiB"]["blocks"] for gib in ("0.5", "1")] == [64, 128]
    assert report["requests_not_counted"] == 25


def test_tiers_together_find_what_one_tier_of_their_size_finds(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    """And cost what their GiB cost."""
    tiers = ["--gpu-blocks", 28, "--host-gib", 0.5, "--bytes-per-token", 1 << 20, "--gpu-cost", 4, "--host-cost", 1.5]
    report = plan(capsys, trace, "--tokens-per-block", 16, *tiers)
    gpu, host = report["tiers"]
    real = replay(capsys, trace, "--tokens-per-block", 16, "--gpu-blocks", 28, "--host-blocks", 32, "--exclusive")
    assert (gpu["blocks"], host["blocks"], gpu["gib"], host["gib"]) == (28, 32, 0.4375, 0.5)
    assert host["hit_ratio_so_far"] == real["last_half"]["hit_ratio"] == pytest.approx(gpu["hit_ratio"] + host["hit_ratio"])
    assert (gpu["cost"], host["cost"], host["cost_so_far"]) == (1.75, 0.75, 2.5)
    ceiling = sizes_of(report)["ceiling"]
    assert ceiling["cost"] == {"gpu": 4 * ceiling["gib"], "host": 1.5 * ceiling["gib"]}


def test_no_order_of_eviction_finds_less_than_the_best(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    report = plan(capsys, trace, "--tokens-per-block", 32, "--policies", "lru,best", "--points", 6, "--warm-up", 0)
    points = [(point["hit_ratio"], point["best_hit_ratio"]) for point in report["curve"]]
    assert all(lru <= best <= report["ceiling_hit_ratio"] for lru, best in points)
    assert any(lru < best for lru, best in points)


def test_the_table_has_what_was_asked(capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path) -> None:
    output = tmp_path / "report"
    asked = ["--target-hit", "0.3,1", "--policies", "lru,best", "--gpu-blocks", "30", "--output", str(output)]
    assert main(["plan", trace, "--tokens-per-block", "16", *asked]) == 0
    assert capsys.readouterr().out == ""
    text = output.read_text()
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert rows["target 100 %"].endswith(rows["ceiling"].split("  ")[-1].strip())
    assert "not reached: the ceiling is" in rows["target 100 %"]
    assert rows["memory"].split() == ["memory", "blocks", "tokens", "hit", "ratio"]
    assert rows["gpu"].split()[1] == "30"
    assert "best possible" in text
    assert "cost" not in text


def test_bars_show_each_size_of_the_curve(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    pytest.importorskip("rich")
    assert main(["plan", trace, "--points", "5", "--format", "bars", "--policies", "lru,best"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["blocks", "hit", "ratio", "best", "possible"]
    assert [line.count("█") > 0 for line in lines[-2:]] == [True] * 2
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--target-hit", "1.5"], "1.5 is no ratio from 0 to 1"),
        (["--target-hit", "0.2,x"], "'x' is not a number"),
        (["--target-hit", ""], "'' is not a number"),
        (["--budget-gib", "5"], "--budget-gib needs --bytes-per-token"),
        (["--budget-gib", "1e-12", "--bytes-per-token", "8"], "--budget-gib 1e-12 is less than one block"),
        (["--budget-gib", "1e300", "--bytes-per-token", "8"], "--budget-gib 1e+300 is more than"),
        (["--host-cost", "2"], "--host-cost needs --bytes-per-token"),
        (["--host-blocks", "2"], "--host-blocks and --host-gib need --gpu-blocks or --gpu-gib"),
        (["--gpu-gib", "2"], "--gpu-gib needs --bytes-per-token"),
        (["--warm-up", "1"], "1 is not at least 0 and below 1"),
        (["--warm-up", "nan"], "nan is not finite"),
        (["--points", "1"], "1 is not from 2 to 1000"),
        (["--policies", "fifo"], "'fifo' is no policy: the policies are lru and best"),
        (["--policies", "best", "--layers", "full+ssm"], "--policies best is known for --layers full only"),
        (["--window", "5"], "--window has no effect with --layers full"),
        (["--plot", "curve.jpg"], "--plot curve.jpg: the name must end with .png, .svg, .pdf"),
        (["--plot", "a.png", "--output", "./a.png"], "--plot a.png: this is the file of --output"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str], options: list[str], reason: str) -> None:
    assert main(["plan", "/no/such/trace", *options]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert reason in captured.err
