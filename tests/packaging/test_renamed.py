"""Old module paths go on working for one release."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from kv_cache_manager_v2.renamed import RENAMED


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_an_old_path_shows_the_names_of_the_new_one(old: str) -> None:
    """An import by the old path gives the same objects, and one warning that names the new path."""
    sys.modules.pop(f"kv_cache_manager_v2.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"is now kv_cache_manager_v2.{RENAMED[old]}"):
        module = importlib.import_module(f"kv_cache_manager_v2.{old}")
    new = importlib.import_module(f"kv_cache_manager_v2.{RENAMED[old]}")
    public = [name for name in vars(new) if not name.startswith("_")]
    assert public
    assert all(getattr(module, name) is getattr(new, name) for name in public)


def test_current_paths_say_nothing() -> None:
    """The package itself uses no old path."""
    script = "import kv_cache_manager_v2, kv_cache_manager_v2.introspection, kv_cache_manager_v2.cli.main"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_module_is_unknown() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("kv_cache_manager_v2.no_such_module")
