"""What CONTRIBUTING.md promises of the source tree, checked on the sources themselves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = "kv_cache_manager_v2"
SOURCES = Path(__file__).resolve().parent.parent.parent / PACKAGE

# The floor of a top-level module or folder; whoever is not listed stands on the top floor of compiled code.
FLOORS = {
    "ids": 0,
    "errors": 0,
    "arguments": 0,
    "build": 0,
    "config": 1,
    "listener": 1,
    "guarded_listener": 1,
    "statistics": 1,
    "layout": 2,
    "device": 3,
    "emulated": 3,
    "storage": 4,
    "reuse": 5,
    "request": 6,
}
PUBLIC_FACE = 7
INTERPRETED = {"extras", "cli", "__main__"}  # above everything: nothing compiled may import them by name

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70


def modules() -> list[str]:
    return sorted(path.relative_to(SOURCES).with_suffix("").as_posix() for path in SOURCES.rglob("*.py"))


def floor(module: str) -> int:
    """`module` is relative to the package, with slashes or dots; the package itself is the public face."""
    room = module.replace("/", ".").split(".")[0]
    return PUBLIC_FACE + 1 if room in INTERPRETED else FLOORS.get(room, PUBLIC_FACE)


def parse(module: str) -> ast.Module:
    return ast.parse((SOURCES / f"{module}.py").read_text())


def imports(module: str) -> list[tuple[int, str, str]]:
    """Imports of our own package, wherever they stand in the file: (line, module relative to the package, imported name)."""
    found: list[tuple[int, str, str]] = []
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    found.append((node.lineno, alias.name.removeprefix(PACKAGE).lstrip("."), ""))
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parts = [PACKAGE, *module.split("/")][: -node.level]
                source = ".".join([*parts, source]).rstrip(".")
            if source.split(".")[0] == PACKAGE:
                found.extend((node.lineno, source.removeprefix(PACKAGE).lstrip("."), alias.name) for alias in node.names)
    return found


def test_there_are_modules_on_every_floor() -> None:
    """The checks below look at real files: an empty walk would pass them all."""
    assert {floor(module) for module in modules()} == set(range(PUBLIC_FACE + 2))


@pytest.mark.parametrize("module", modules())
def test_imports_only_from_its_own_floor_or_lower(module: str) -> None:
    """A module imports from its own floor or from lower ones, and never a private name of another module."""
    wrong: list[str] = []
    for line, source, name in imports(module):
        target = source or name  # from the package itself: a module of it, or a name of the public face
        private = name.startswith("_") and not name.startswith("__") and module != "__init__"  # the face shows the reference's own
        if floor(target) > floor(module) or private:
            wrong.append(f"{module}.py:{line} imports {name or source} from {source or PACKAGE}")
    assert not wrong


@pytest.mark.parametrize("module", modules())
def test_files_and_functions_stay_readable(module: str) -> None:
    """A file holds one concept in at most 500 lines, a function at most 70."""
    length = (SOURCES / f"{module}.py").read_text().count("\n")
    assert length <= MAX_FILE_LINES, f"{module}.py has {length} lines"
    long: list[str] = []
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                long.append(f"{node.name} ({lines} lines)")
    assert not long


@pytest.mark.parametrize("module", [module for module in modules() if floor(module) <= PUBLIC_FACE])
def test_compiled_code_avoids_what_compiles_badly(module: str) -> None:
    """No `_` as a loop variable or target (it would be boxed) and no weak references in compiled modules."""
    wrong: list[str] = []
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.Name) and node.id == "_" and isinstance(node.ctx, ast.Store):
            wrong.append(f"{module}.py:{node.lineno} assigns to _")
        if isinstance(node, ast.Import) and any(alias.name == "weakref" for alias in node.names):
            wrong.append(f"{module}.py:{node.lineno} imports weakref")
    assert not wrong
