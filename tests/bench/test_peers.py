"""Beside others: what cannot be measured is said, what was is compared with the fastest of theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.builds import ROOT
from bench.peers import best, comparison, read_figures
from bench.results import Row

RECORDS: list[dict[str, object]] = [
    {"name": "insert cold 8k prompt (1 node)", "median": 80.0, "unit": "us", "backend": "python"},
    {"name": "insert cold 8k prompt (1 node)", "median": 70.0, "unit": "us", "backend": "rust"},
    {"name": "insert cold 8k prompt (1 node)", "median": 1.0, "unit": "tokens", "backend": "none"},
    {"name": "decode step, 1000 reqs: allocate_slots only", "median": 8.0, "unit": "ms/step", "groups": "full+swa1024"},
]


def test_only_times_are_read() -> None:
    """In seconds; a figure in another unit is none of ours."""
    assert [round(figure.seconds, 9) for figure in read_figures(RECORDS)] == [80e-6, 70e-6, 8e-3]


def test_the_fastest_back_end_is_the_one_to_beat() -> None:
    figures = read_figures(RECORDS)
    fastest = best(figures, "insert cold", "full")
    assert fastest is not None
    assert fastest.backend == "rust"
    assert best(figures, "decode step", "full") is None
    assert best(figures, "", "full") is None


def test_the_comparison_says_how_many_times_longer_they_take() -> None:
    ours = {"commit cold": Row("commit cold", "prompt", {"compiled": [35e-6]})}
    line = comparison(ours, [], read_figures(RECORDS)).splitlines()[1]
    assert line.split() == ["commit", "cold", "35.00", "us", "-", "-", "70.00", "us", "2.0"]
    assert comparison({}, [], []) == "no rows: nothing was measured"


def test_without_the_scripts_it_says_so_and_ends_cleanly(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.peers", "--scripts", str(tmp_path / "none")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bench-peers: SKIPPED")
