"""Which interpreters `make test-versions` finds, and what it copies for each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.packaging.versions import OLDEST, ROOT, copy_tracked, interpreters


def fake_python(folder: Path, name: str, answer: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return path


def test_each_version_is_found_once_and_only_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that runs wins; a shim that refuses, another implementation, an older version and python3-config are left out."""
    shims, real = tmp_path / "shims", tmp_path / "pyenv" / "versions" / "3.12.1" / "bin"
    fake_python(shims, "python3.12", "exit 127")
    twelve = fake_python(real, "python3.12", "echo cpython 3 12")
    fake_python(shims, "python3.11", "echo pypy 3 11")
    fake_python(shims, "python3.9", "echo cpython 3 9")
    fake_python(shims, "python3.12-config", "echo cpython 3 13")
    monkeypatch.setenv("PATH", f"{shims}:/bin:/usr/bin" if Path("/bin/sh").exists() else str(shims))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    found = interpreters()
    assert found[(3, 12)] == twelve
    assert all(version >= OLDEST for version in found)
    assert all(shims not in path.parents for path in found.values())


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_the_copy_is_the_tracked_tree(tmp_path: Path) -> None:
    copy_tracked(tmp_path)
    assert (tmp_path / "pyproject.toml").is_file()
    assert (tmp_path / "tests" / "packaging" / "versions.py").is_file()
    assert not (tmp_path / "build").exists()
    assert sys.version_info >= OLDEST
