"""The README's promise to a first-time user: the first example runs as it stands, and prints what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT, package_directory


def first_example() -> tuple[str, list[str]]:
    """The first Python block of the README, and the lines that it says the example prints."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"```python\n(.*?)```\n\nIt prints\n\n((?:    [^\n]*\n)+)", text, re.DOTALL)
    assert found is not None, "the README has an example and says what it prints"
    return found.group(1), [line[4:] for line in found.group(2).splitlines()]


def test_the_first_example_is_short() -> None:
    """Under 25 lines, and without a GPU."""
    code, printed = first_example()
    assert len(code.splitlines()) < 25
    assert "EmulatedDriver" in code
    assert printed


def test_the_first_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    """Pasted into a file of its own, run by an interpreter that has the package and nothing of this repository."""
    code, printed = first_example()
    script = tmp_path / "first.py"
    script.write_text(code)
    environment = {"PYTHONPATH": str(package_directory()), "PATH": "/usr/bin:/bin", "PYTHONWARNINGS": "error"}
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == printed
    assert result.stderr == ""


def test_the_first_example_is_well_typed(tmp_path: Path) -> None:
    """A strict type checker that sees the package as a user does, by its stubs, has nothing to say about the example."""
    script = tmp_path / "first.py"
    script.write_text(first_example()[0])
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(tmp_path / "cache"), str(script)]
    environment = {"MYPYPATH": str(package_directory()), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
