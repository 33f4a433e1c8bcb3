"""Modules that moved: an import by the old path works for one release, with a DeprecationWarning.

An old path is removed in the release after the one that moved it. Python asks this finder last, so imports of current paths cost
nothing more.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final, cast

PACKAGE: Final = "kv_cache_manager_v2"

# old path -> new path, both below the package
RENAMED: Final = {
    "counters": "statistics",
    "device.default": "default_device",
    "event_blocks": "events.blocks",
    "event_hashes": "events.hashes",
    "event_mirror": "events.mirror",
    "event_records": "events.records",
    "layout.aggregation": "disagg.aggregation",
    "layout.explaining": "layout.explain",
    "page_matching": "disagg.page_matching",
    "page_table": "disagg.page_table",
    "reuse.misses": "reuse.explain",
}


class RenamedModules:
    """Finder and loader of the old paths. The module of an old path has the names of the new one."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _dot, name = fullname.partition(".")
        if package != PACKAGE or name not in RENAMED:
            return None
        return ModuleSpec(fullname, cast(Loader, self), origin=f"{PACKAGE}.{RENAMED[name]}")

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new = f"{PACKAGE}.{RENAMED[old.removeprefix(f'{PACKAGE}.')]}"
        warnings.warn(f"{old} is now {new}; the next release removes the old path", DeprecationWarning, stacklevel=2)
        for name, value in vars(importlib.import_module(new)).items():
            if not name.startswith("__"):
                setattr(module, name, value)


def find_old_paths() -> None:
    """Register the finder. Python asks it for modules of the package that no other finder has."""
    sys.meta_path.append(RenamedModules())
