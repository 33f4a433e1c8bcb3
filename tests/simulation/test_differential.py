"""The two builds do the same: one seed, one trace, wherever it runs. And the quick paths do what the long ones do.

The trace is a checksum over every outcome, length and page index of a run, in order, and over the counters at its end. Beside the
other build, it is compared with an interpreter that hashes strings otherwise: nothing may depend on the order of a set.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kv_cache_manager_v2 import BACKEND
from tests.conftest import ROOT, package_directory
from tests.simulation.calls import Calls, LongCalls
from tests.simulation.setups import SHAPES, draw
from tests.simulation.simulator import Simulation, simulate

OPERATIONS = 1000
SEEDS = range(300, 300 + len(SHAPES))

PROGRAM = f"""
import logging, sys
logging.disable(logging.CRITICAL)
sys.path.append({str(ROOT)!r})
from tests.simulation.simulator import simulate
print(*[simulate(seed, {OPERATIONS}).checksum() for seed in range({SEEDS.start}, {SEEDS.stop})])
"""


def traces_of(build: str, hash_seed: str) -> list[int]:
    """The traces of a build of the package under test, made by an interpreter of its own."""
    variables = {"PYTHONPATH": str(package_directory()), "KVCM_BACKEND": build, "PYTHONHASHSEED": hash_seed}
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr[-4000:]
    return [int(trace) for trace in done.stdout.split()]


@pytest.fixture(scope="module")
def traces() -> list[int]:
    return [simulate(seed, OPERATIONS).checksum() for seed in SEEDS]


def test_a_run_does_not_depend_on_how_the_interpreter_hashes(traces: list[int]) -> None:
    assert traces_of(BACKEND, "4711") == traces


@pytest.mark.skipif(BACKEND != "compiled", reason="the compiled build is compared, with the sources beside it")
def test_the_interpreted_build_leaves_the_same_trace(traces: list[int]) -> None:
    assert traces_of("interpreted", "0") == traces


def trace_with(calls: Calls, seed: int, directory: Path) -> int:
    """On a device that does at once what it is told: how often the two ways ask it something may differ, and on the others that
    decides which slot is free first."""
    setup = dataclasses.replace(draw(seed, str(directory)), schedule="eager")
    return Simulation(setup, calls).run(OPERATIONS).checksum()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_long_way_leaves_the_same_trace(seed: int, tmp_path: Path) -> None:
    """Quick paths, of the decode step and of the batch calls, change nothing but the time that they take."""
    quick, long = tmp_path / "quick", tmp_path / "long"
    quick.mkdir()
    long.mkdir()
    assert trace_with(Calls(), seed, quick) == trace_with(LongCalls(), seed, long)
