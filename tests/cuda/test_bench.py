"""The benchmark of the device runs: every figure is there and positive."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from kv_cache_manager_v2.build import cuda_problem
from kv_cache_manager_v2.extras.cuda import CudaDriver

BENCH = Path(__file__).resolve().parents[2] / "bench" / "device_costs.py"


@pytest.fixture
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("device_costs", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_figures_are_measured(driver: CudaDriver, bench: ModuleType) -> None:
    """Calls, copies of four page sizes in three directions, files of four page sizes both ways, one latency."""
    rows = bench.measure(driver, rounds=1, nbytes=4 << 20, calls=10)
    assert len(rows) == 4 + 12 + 8 + 1
    assert len({row.what for row in rows}) == len(rows)
    assert all(row.value > 0 for row in rows)


def test_without_a_gpu_it_says_so(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1 and the reason, no table."""
    if not cuda_problem():
        pytest.skip("there is a GPU")
    assert bench.main([]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no CUDA device can be initialised" in captured.err
