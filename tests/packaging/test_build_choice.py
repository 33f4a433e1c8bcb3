"""A run that names its build tests that build or nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.packaging.helpers import ROOT

PYTEST = Path(sys.executable).with_name("pytest")  # the script: `python -m pytest` would put the root first on the path


def test_wrong_build_is_refused(tested_build: str) -> None:
    """With the other build's package in sight the run stops before any test, and says what to do."""
    other = "compiled" if tested_build == "pure" else "pure"
    pytest_call = [str(PYTEST), "-p", "no:cacheprovider", f"--expect-build={other}", "tests/packaging"]
    done = subprocess.run(pytest_call, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 4
    assert f"--expect-build={other}, but the package under test is the {tested_build} build" in done.stdout + done.stderr
    assert f"make test-{other}" in done.stdout + done.stderr


def test_sources_are_no_build(tested_build: str) -> None:
    """The source tree is not what `pip install` gives, so a run that names its build does not accept it."""
    pytest_call = [str(PYTEST), "-p", "no:cacheprovider", f"--expect-build={tested_build}", "tests/packaging"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(pytest_call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 4
    assert f"the package under test is the pure build in {ROOT}." in done.stdout + done.stderr
