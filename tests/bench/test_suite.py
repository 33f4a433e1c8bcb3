"""The suite runs: every operation does its work, and a worker measures the build that it was started for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kv_cache_manager_v2.build
from bench.against import WATCHED, Pairs, measure_one
from bench.builds import BUILD_VARIABLE, BUILDS, ROOT, WorkerFailedError, environment
from bench.catalogue import OPERATIONS
from bench.growth_axes import AXES, growth_operation
from bench.machine import describe
from kv_cache_manager_v2.backend import BACKEND

PACKAGE_PARENT = Path(kv_cache_manager_v2.build.__file__).resolve().parent.parent
BUILD = "compiled" if BACKEND == "compiled" else "pure"


@pytest.mark.parametrize("title", list(OPERATIONS))
def test_every_operation_runs(title: str) -> None:
    """Two runs at the sizes of a quick benchmark; the operations check their own results."""
    operation = OPERATIONS[title]
    work = operation.work(operation.setting(True))
    assert work.timed() > 0
    assert work.timed() > 0
    work.close()


@pytest.mark.parametrize(("axis", "title"), [(axis, title) for axis in AXES for title in AXES[axis].curves])
def test_every_curve_names_an_operation_and_a_field(axis: str, title: str) -> None:
    """Only the axis' own field differs between two points of a curve."""
    first, second = AXES[axis].values[:2]
    one = vars(growth_operation(title, f"{axis}={first}").setting(False))
    two = vars(growth_operation(title, f"{axis}={second}").setting(False))
    assert [name for name in one if one[name] != two[name]] == [AXES[axis].field]


def test_two_arms_differ_in_the_build_only() -> None:
    """The environments of two workers: one variable."""
    one, two = (environment(build) for build in BUILDS)
    assert {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)} == {BUILD_VARIABLE}
    assert (one[BUILD_VARIABLE], two[BUILD_VARIABLE]) == ("compiled", "interpreted")


def worker(expected: str, output: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(PACKAGE_PARENT), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "bench.worker", "probe", "--quick", "--values=2", "--output", str(output)],
        env={**os.environ, "PYTHONPATH": path, BUILD_VARIABLE: expected},
        cwd=PACKAGE_PARENT,
        capture_output=True,
        text=True,
    )


def test_a_worker_measures_the_build_it_was_started_for(tmp_path: Path) -> None:
    done = worker(BACKEND, tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "out.json").read_text())["benchmarks"][0]["runs"]
    assert [len(run["values"]) for run in runs] == [2]


def test_a_worker_refuses_to_be_started_without_a_build(tmp_path: Path) -> None:
    done = worker("auto", tmp_path / "out.json")
    assert done.returncode != 0
    assert f"KVCM_BACKEND is auto, but the package runs {BACKEND}" in done.stderr
    assert not (tmp_path / "out.json").exists()


def test_a_result_names_no_path_of_the_machine() -> None:
    """Cores, processor, versions and commit; nothing that names the user or the machine."""
    machine = describe()
    assert {"cpu", "cores", "python", "commit", "mypyc"} <= machine.keys()
    assert not [value for value in machine.values() if isinstance(value, str) and "/" in value]


def test_pairs_compare_like_with_like(tmp_path: Path) -> None:
    """A checkout beside itself: both arms measure, and the figure is the median of the ratios."""
    pairs = Pairs("probe", [1.0, 2.0, 6.0], [1.0, 4.0, 2.0])
    assert pairs.ratios() == [1.0, 0.5, 3.0]
    assert pairs.ratio() == 1.0
    assert set(WATCHED) <= set(OPERATIONS)
    with pytest.raises(WorkerFailedError, match="no such operation"):
        measure_one(ROOT, BUILD, "no such operation", tmp_path / "out.json")
