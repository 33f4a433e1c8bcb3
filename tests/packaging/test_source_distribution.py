"""The source distribution: all that is needed to build either wheel from it, and nothing that a build left behind."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

from tests.packaging.helpers import ROOT

NEEDED = (
    "pyproject.toml",
    "setup_mypyc.py",
    "generated_c.py",
    "spare_objects.h",
    "LICENSE",
    "README.md",
    "CHANGELOG.md",
    "Makefile",
    "kv_cache_manager_v2/py.typed",
    "kv_cache_manager_v2/layout/life_cycle.py",
    "stubs/kv_cache_manager_v2-stubs/errors.pyi",
    "stubs/blake3/__init__.pyi",
    "stubs/xxhash/__init__.pyi",
    "tests/conftest.py",
)


def test_source_distribution_is_complete_and_clean(tested_build: str, tmp_path: Path) -> None:
    """The back end, its inputs, the stubs and the tests are in it; compiled modules, C code and caches are not."""
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        names = [Path(*Path(name).parts[1:]).as_posix() for name in content.getnames()]
    assert [name for name in NEEDED if name not in names] == []
    made = [name for name in names if name.endswith((".so", ".c", ".h", ".o", ".pyc")) or "cache/" in name]
    assert made == ["spare_objects.h"], "the one that is written by hand"
