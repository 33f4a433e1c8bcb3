"""The public interface as type checkers see it: a small engine that uses every public name, with plain ints, passes strictly."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kv_cache_manager_v2
from tests.conftest import package_directory
from tests.packaging.typed_engine import main

SCRIPT = Path(__file__).parent / "typed_engine.py"


def test_the_engine_uses_every_public_name() -> None:
    """Else a type checker would not see it."""
    tree = ast.parse(SCRIPT.read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(kv_cache_manager_v2.__all__) <= used


def test_the_engine_runs(tmp_path: Path) -> None:
    """What type checkers accept works."""
    main(str(tmp_path))


def test_mypy_has_nothing_to_say(tmp_path: Path) -> None:
    """mypy --strict, which sees the package by its stubs."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(tmp_path / "cache"), str(SCRIPT)]
    environment = {"MYPYPATH": str(package_directory()), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("pyright") is None, reason="pyright is not installed: pip install pyright (needs node)"
)
def test_pyright_has_nothing_to_say(tmp_path: Path) -> None:
    """The type checker of another editor, in its strict mode."""
    script = tmp_path / "engine.py"
    script.write_text("# pyright: strict, reportPrivateUsage=false\n" + SCRIPT.read_text())
    environment = {**os.environ, "PYTHONPATH": str(package_directory())}
    (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{package_directory()}"]}}')
    command = [sys.executable, "-m", "pyright", str(script)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
