"""Rows, tables and records of the benchmark suite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.results import Row, as_json, percentile, readable, table, write

MACHINE: dict[str, object] = {"cpu": "some", "cores": 2}


def both() -> Row:
    return Row("probe", "prompt", {"compiled": [1e-6, 3e-6, 2e-6], "pure": [9e-6, 8e-6, 8e-6]})


def test_a_table_over_no_rows_says_so() -> None:
    """Nothing measured is a sentence, not an error and not an empty table."""
    assert table([]) == "no rows: nothing was measured"
    assert as_json([], MACHINE) == {"machine": MACHINE, "figures": {}}


def test_a_row_has_median_p90_and_ratio() -> None:
    """The ratio is interpreted by compiled, of the medians."""
    assert both().median("compiled") == 2e-6
    assert both().p90("compiled") == 3e-6
    assert both().ratio() == pytest.approx(4.0)
    line = table([both()]).splitlines()[1]
    assert line.split() == ["probe", "2.00", "us", "3.00", "us", "8.00", "us", "9.00", "us", "4.0", "prompt"]


def test_a_row_of_one_build_has_no_ratio() -> None:
    row = Row("probe", "prompt", {"compiled": [1e-6]})
    assert row.ratio() is None
    assert table([row]).splitlines()[1].split() == ["probe", "1.00", "us", "1.00", "us", "-", "-", "-", "prompt"]


def test_percentile_is_a_value_that_was_measured() -> None:
    """The smallest value that the share of the values does not exceed."""
    values = [float(number) for number in range(10, 0, -1)]
    assert percentile(values, 0.9) == 9.0
    assert percentile(values, 0.5) == 5.0
    assert percentile([4.0], 0.9) == 4.0


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.50 s"), (2e-3, "2.00 ms"), (3.14e-6, "3.14 us"), (5e-8, "50.0 ns")])
def test_times_are_printed_in_their_own_unit(seconds: float, text: str) -> None:
    assert " ".join(readable(seconds).split()) == text


def test_a_record_is_json_with_machine_and_builds(tmp_path: Path) -> None:
    path = tmp_path / "results" / "micro.json"
    write(path, as_json([both()], MACHINE, quick=True))
    record = json.loads(path.read_text())
    assert record["machine"] == MACHINE
    assert record["quick"] is True
    assert record["figures"]["probe"] == {
        "per": "prompt",
        "compiled": {"median_s": 2e-6, "p90_s": 3e-6, "values": 3},
        "interpreted": {"median_s": 8e-6, "p90_s": 9e-6, "values": 3},
        "ratio": 4.0,
    }
