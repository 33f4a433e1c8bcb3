"""The build: a PEP 517 back end over setuptools that compiles the package with mypyc.

Rule: one source tree, two builds, chosen by the environment and by nothing else. `pip install .` gives the compiled package,
`KVCM_PURE=1 pip install .` the interpreted one; both wheels carry the sources, `py.typed` and the public stubs. Nothing is ever
written beside the sources: what a build leaves lies under build/.

Environment:
    KVCM_PURE=1     build the interpreted package
    KVCM_OPT=0..3   optimisation level of the C compiler (default 3; 1 compiles faster and runs nearly as fast)
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any, Final

import setuptools
from setuptools import build_meta
from setuptools.command.build_py import build_py

import generated_c

PACKAGE: Final = "kv_cache_manager_v2"
STUBS: Final = Path("stubs") / f"{PACKAGE}-stubs"  # the public modules' .pyi; copied beside their modules in the wheel

# These stay interpreted. Adapters to packages that may be absent or untyped, and the command line: no compiled module imports them
# when it is imported itself. Errors and configuration: users subclass them, and mypyc knows no subclass of a class of its own that
# is not native: isinstance() is False there and a method refuses it. `_introspection`: a compiled module asks its own `__getattr__`
# for `__file__` before its names exist, and crashes. `__init__` and `backend`: they choose the build. None of these files runs in a
# step.
INTERPRETED: Final = (
    "__init__.py",
    "__main__.py",
    "_introspection.py",
    "backend.py",
    "cli/",
    "config.py",
    "errors.py",
    "external_pages.py",
    "layer_config.py",
    "extras/",
)


def compiled_modules(root: Path) -> list[str]:
    """The files of the one mypyc group, as paths relative to `root`, sorted so that the same tree gives the same C code."""
    found: list[str] = []
    for path in (root / PACKAGE).rglob("*.py"):
        if not path.relative_to(root / PACKAGE).as_posix().startswith(INTERPRETED):
            found.append(path.relative_to(root).as_posix())
    return sorted(found)


class BuildWithStubs(build_py):
    """The usual copy of the sources, and each public stub beside its module."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # an editable install shows type checkers the sources themselves
        for stub in sorted(STUBS.rglob("*.pyi")):
            target = Path(self.build_lib) / PACKAGE / stub.relative_to(STUBS)
            if not target.with_suffix(".py").exists():
                raise RuntimeError(f"{stub} describes no module of {PACKAGE}")
            self.copy_file(str(stub), str(target))


def extension_modules(work: Path, opt_level: str) -> list[Any]:
    """Type-check the group and translate it to C under `work`, docstrings included."""
    from mypyc.build import mypycify

    # no site packages: the generated code depends on this tree (stubs/ included) and on mypy alone, not on what is installed
    options = ["--config-file=pyproject.toml", "--no-site-packages", f"--cache-dir={work / 'mypy_cache'}"]
    modules = compiled_modules(Path())
    extensions = mypycify(
        [*options, *modules], opt_level=opt_level, debug_level="0", target_dir=str(work / "c"), group_name=PACKAGE
    )
    if sys.platform.startswith("linux"):
        for extension in extensions:  # inlines calls within the group: 15 % fewer instructions for a decode step inside a block
            extension.extra_compile_args.append("-fno-semantic-interposition")
    generated_c.complete(work / "c" / f"__native_{PACKAGE}.c", Path(), modules, PACKAGE)
    return extensions


class Backend(build_meta._BuildMetaBackend):
    """setuptools' back end, with this module's arguments in the place of a setup script."""

    def __init__(self) -> None:
        super().__init__()
        self.compiling = False  # only while a compiled wheel is built: metadata and source distributions need no compiler

    def run_setup(self, setup_script: str = "setup.py") -> None:
        opt_level = os.environ.get("KVCM_OPT", "3")
        if opt_level not in ("0", "1", "2", "3"):
            raise SystemExit(f"KVCM_OPT={opt_level!r}: must be 0, 1, 2 or 3")
        work = Path("build") / "setup" / (f"compiled-O{opt_level}" if self.compiling else "pure")
        for leftover in work.glob("lib*"):
            shutil.rmtree(leftover)  # else a module that was removed from the tree would come back in the wheel
        work.mkdir(parents=True, exist_ok=True)
        setuptools.setup(
            cmdclass={"build_py": BuildWithStubs},
            ext_modules=extension_modules(work, opt_level) if self.compiling else [],
            options={"build": {"build_base": str(work)}, "egg_info": {"egg_base": str(work)}},
        )

    def build_wheel(
        self,
        wheel_directory: Any,
        config_settings: Any = None,
        metadata_directory: Any = None,
    ) -> str:
        self.compiling = not pure_build()
        try:
            return super().build_wheel(wheel_directory, config_settings, metadata_directory)
        finally:
            self.compiling = False


def pure_build() -> bool:
    """Whether the environment asks for the interpreted package."""
    value = os.environ.get("KVCM_PURE", "0")
    if value not in ("", "0", "1"):
        raise SystemExit(f"KVCM_PURE={value!r}: must be 1 (interpreted) or 0 (compiled, the default)")
    return value == "1"


_backend: Final = Backend()

# The hooks of PEP 517 and PEP 660. An editable install is always interpreted: it runs from the sources.
get_requires_for_build_wheel = _backend.get_requires_for_build_wheel
get_requires_for_build_sdist = _backend.get_requires_for_build_sdist
get_requires_for_build_editable = _backend.get_requires_for_build_editable
prepare_metadata_for_build_wheel = _backend.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _backend.prepare_metadata_for_build_editable
build_wheel = _backend.build_wheel
build_sdist = _backend.build_sdist
build_editable = _backend.build_editable
