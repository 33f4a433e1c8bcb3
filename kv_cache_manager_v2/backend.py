"""Which build of the package this process runs. It is chosen once, before any other module of the package is imported.

A compiled wheel has the sources beside the compiled modules. KVCM_BACKEND selects what is imported: "compiled", "interpreted", or
"auto" (the default), which means compiled if that can be loaded. The reference's variable, TLLM_KV_CACHE_MANAGER_V2_BACKEND, is
read if KVCM_BACKEND is not set. Its values "cpp" and "python" mean compiled and interpreted. A process never has both builds. This
file and the package's `__init__` are never compiled.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Final

from kv_cache_manager_v2.errors import ConfigError

PACKAGE: Final = "kv_cache_manager_v2"
LIBRARY: Final[str] = f"{PACKAGE}__mypyc"  # the extension module that has the code of all compiled modules
VARIABLES: Final[tuple[str, ...]] = ("KVCM_BACKEND", "TLLM_KV_CACHE_MANAGER_V2_BACKEND")  # the first one that is set is read
COMPILED: Final = "compiled"
INTERPRETED: Final = "interpreted"
AUTO: Final = "auto"
VALUES: Final[dict[str, str]] = {COMPILED: COMPILED, INTERPRETED: INTERPRETED, AUTO: AUTO, "cpp": COMPILED, "python": INTERPRETED}

_FOLDER: Final = Path(__file__).absolute().parent  # not resolved: an installer may link to files that lie elsewhere


class _LoadError(Exception):
    """The compiled modules cannot be loaded. The text names the file and the reason."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file


class _BuildFinder:
    """Records which build this process has. On the interpreted build, it finds the package's modules only as sources."""

    def __init__(self, build: str) -> None:
        self.build = build

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if self.build == COMPILED or path is None or not fullname.startswith(f"{PACKAGE}."):
            return None
        for folder in path:
            spec = FileFinder(folder, (SourceFileLoader, SOURCE_SUFFIXES)).find_spec(fullname)
            if spec is not None:
                return spec
            compiled = _extension(Path(folder, fullname.rpartition(".")[2]))
            if compiled is not None:
                raise ImportError(f"{compiled} has no source beside it, which the interpreted build needs; reinstall {PACKAGE}")
        return None


def _extension(stem: Path) -> Path | None:
    """The extension module at this path without suffix that this interpreter can load; None if there is none."""
    for suffix in EXTENSION_SUFFIXES:
        file = stem.with_name(stem.name + suffix)
        if file.is_file():
            return file
    return None


def _wanted() -> tuple[str, str]:
    """What the environment asks for, and the setting as a message shows it. Raises ConfigError for an unknown value."""
    for variable in VARIABLES:
        value = os.environ.get(variable, "")
        if value in VALUES:
            return VALUES[value], f"{variable}={value}"
        if value:
            raise ConfigError(f"{variable}={value!r}: must be one of {', '.join(map(repr, VALUES))}, or unset")
    return AUTO, f"{VARIABLES[0]}={AUTO}"


def _compiled_files() -> list[Path]:
    """The compiled modules in this folder, for any interpreter version."""
    return [*sorted(_FOLDER.parent.glob(f"{LIBRARY}.*")), *sorted(_FOLDER.glob("*.so"))]


def _load_compiled() -> None:
    """Import every compiled module. Raises _LoadError if one cannot be loaded, and leaves none of them in `sys.modules`."""
    file = _extension(_FOLDER.parent / LIBRARY)
    if file is None:
        others = [each.name for each in _compiled_files()]
        there = f"; {others[0]} is for another one" if others else " and no other compiled module: it is the interpreted package"
        expected = _FOLDER.parent / (LIBRARY + EXTENSION_SUFFIXES[0])
        raise _LoadError(expected, f"there is no such file, which this interpreter needs{there}")
    name = LIBRARY
    try:
        library = importlib.import_module(LIBRARY)
        if library.__file__ is None or not file.samefile(library.__file__):
            raise _LoadError(file, f"{library.__file__} is loaded in its place; remove one of the two from the path")
        names = [name.removeprefix("init_").replace("___", ".") for name in dir(library) if name.startswith("init_")]
        for name in names:  # all of them first: Python would import the source in place of a missing one
            stem = _FOLDER.parent / name.replace(".", "/")
            if _extension(stem) is None and _extension(stem / "__init__") is None:
                raise _LoadError(stem.with_name(stem.name + EXTENSION_SUFFIXES[0]), "there is no such file")
        for name in names:
            importlib.import_module(name)
    except Exception as error:
        _forget_modules()
        if isinstance(error, _LoadError):
            raise
        raise _LoadError(file, f"{name} cannot be imported: {error}") from error


def _forget_modules() -> None:
    """Remove what was imported before an error, so that a later import finds the sources."""
    package = vars(sys.modules[PACKAGE])
    for name in list(sys.modules):
        if name == LIBRARY or (name.startswith(f"{PACKAGE}.") and name not in (__name__, ConfigError.__module__)):
            del sys.modules[name]
            package.pop(name.removeprefix(f"{PACKAGE}."), None)  # `from package import module` reads the attribute first


def _choose() -> str:
    """Import the compiled modules, or have every later import find the sources. Returns which of the two.

    Raises ImportError if the compiled build is asked for and cannot be loaded, or if this process has the other build already.
    """
    build, setting = _wanted()
    before = [str(vars(finder)["build"]) for finder in sys.meta_path if type(finder).__name__ == _BuildFinder.__name__]
    if before and build not in (AUTO, before[0]):
        raise ImportError(f"{setting}: this process has imported the {before[0]} build; use another process", name=PACKAGE)
    if before:
        build = before[0]
    elif build == AUTO and not _compiled_files():
        build = INTERPRETED
    if build != INTERPRETED:
        try:
            _load_compiled()
            build = COMPILED
        except _LoadError as error:
            remedy = f"reinstall {PACKAGE} for this interpreter, with a C compiler at hand, or set {VARIABLES[0]}={INTERPRETED}"
            if build == COMPILED:
                problem = f"{setting}: the compiled build cannot be loaded. {error}. Remedy: {remedy}"
                raise ImportError(problem, name=PACKAGE, path=str(error.file)) from error
            warnings.warn(f"{PACKAGE} runs interpreted. {error}. Remedy: {remedy}", RuntimeWarning, stacklevel=2)
            build = INTERPRETED
    if not before:
        sys.meta_path.insert(0, _BuildFinder(build))
    return build


BACKEND: Final[str] = _choose()  # "compiled" or "interpreted": the build that this process runs
