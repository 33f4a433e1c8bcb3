"""The suite's ground rules: which build is under test, how hypothesis draws, what needs a GPU.

Rule: a run that names its build (`--expect-build`) tests the package unpacked under build/, as it is in the wheel, and refuses
anything else. Without the option the package is whatever PYTHONPATH names, usually the sources.
"""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

import kv_cache_manager_v2.ids
from kv_cache_manager_v2.build import COMPILED, VERSION, cuda_problem

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "kv_cache_manager_v2"

hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=50, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "nightly",
    deadline=None,
    max_examples=1000,
    stateful_step_count=200,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile(os.environ.get("KVCM_HYPOTHESIS", "ci"))


def package_directory() -> Path:
    """The directory that holds the package under test."""
    return Path(kv_cache_manager_v2.ids.__file__).resolve().parent.parent


def wrong_build(expected: str) -> str:
    """Why the package under test is not the build that was asked for, or the empty string."""
    found = "compiled" if COMPILED else "pure"
    where = package_directory()
    if found == expected and where == ROOT / "build" / expected:
        return ""
    return (
        f"--expect-build={expected}, but the package under test is the {found} build in {where}. "
        f"Run `make test-{expected}`, or set PYTHONPATH={ROOT / 'build' / expected} and call the pytest script itself."
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--expect-build", choices=("pure", "compiled"), help="refuse to test any other build than this one")


def pytest_configure(config: pytest.Config) -> None:
    expected = config.getoption("--expect-build")
    if expected is not None:
        problem = wrong_build(expected)
    else:
        left = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / PACKAGE).rglob("*.so"))
        problem = f"compiled modules lie beside the sources, which they would shadow; remove them: {' '.join(left)}" if left else ""
    if problem:
        pytest.exit(problem, returncode=pytest.ExitCode.USAGE_ERROR)


def pytest_report_header(config: pytest.Config) -> str:
    return f"{PACKAGE} {VERSION}, {'compiled' if COMPILED else 'interpreted'}, from {package_directory()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("cuda") is not None]
    if not on_gpu:
        return
    problem = cuda_problem()
    if problem:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device: {problem}"))


@pytest.fixture(scope="session")
def tested_build(request: pytest.FixtureRequest) -> str:
    """ "pure" or "compiled", where the run names its build; tests of what lies in the wheel are skipped elsewhere."""
    expected: str | None = request.config.getoption("--expect-build")
    if expected is None:
        pytest.skip("runs under `make test-pure` and `make test-compiled`, which build the wheel")
    return expected
