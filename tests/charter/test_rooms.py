"""What CONTRIBUTING.md promises of the source tree, checked on the sources themselves."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import FrameType

import pytest

from kv_cache_manager_v2.build import COMPILED
from setup_mypyc import INTERPRETED as INTERPRETED_FILES
from tests.support.models import small
from tests.support.rig import Rig, toks

PACKAGE = "kv_cache_manager_v2"
ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ROOT / PACKAGE
CHARTER = (ROOT / "CONTRIBUTING.md").read_text()

PUBLIC = 10  # the row whose modules form one room
INTERPRETED = 11  # the row of what is never compiled
TOP = INTERPRETED + 1  # what shows names of all rooms

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
MAX_STOPS = 10


def table_of_rooms() -> dict[str, int]:
    """The row of each room, as the table in CONTRIBUTING.md says."""
    rows: dict[str, int] = {}
    for row, names in re.findall(r"^\| (\d+) \| ((?:`\w+` ?)+)\|", CHARTER, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            assert name not in rows, f"{name} is in two rows"
            rows[name] = int(row)
    return rows


ROWS = table_of_rooms()


def modules() -> list[str]:
    return sorted(path.relative_to(SOURCES).with_suffix("").as_posix() for path in SOURCES.rglob("*.py"))


def top(module: str) -> str:
    """The folder or top-level module. `module` is relative to the package, with slashes or dots."""
    return module.replace("/", ".").split(".")[0]


def row(module: str) -> int:
    name = top(module)
    shows_all = name == "" or (name.startswith("_") and name not in ROWS) or name[:1].isupper()  # a name of the package itself
    return TOP if shows_all else ROWS[name]


def room(module: str) -> str:
    return "public" if row(module) == PUBLIC else top(module)


def parse(module: str) -> ast.Module:
    return ast.parse((SOURCES / f"{module}.py").read_text())


def imports(module: str) -> list[tuple[int, str, str]]:
    """Imports of the package's own modules, wherever they are in the file: (line, module relative to the package, name)."""
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


def test_the_table_names_exactly_the_rooms_that_exist() -> None:
    """A new folder or top-level module has a row; a removed one has none."""
    there = {top(module) for module in modules()}
    assert set(ROWS) == {name for name in there if not name.startswith("_") or name == "__main__"}
    assert set(ROWS.values()) == set(range(TOP))


@pytest.mark.parametrize("module", modules())
def test_imports_only_from_its_own_room_or_rows_above(module: str) -> None:
    """A module imports from its own room or from rows above, and never a private name of another module."""
    wrong: list[str] = []
    for line, source, name in imports(module):
        target = source or name  # from the package itself: a module of it, or a public name
        private = (
            name.startswith("_") and not name.startswith("__") and module != "__init__"
        )  # the package shows the reference's own
        if row(module) < TOP and (row(target) > row(module) or (row(target) == row(module) and room(target) != room(module))):
            allowed = row(module) == INTERPRETED and (row(target) == TOP or room(target) == "cli")
            if not allowed:
                wrong.append(f"{module}.py:{line} imports {name or source} from {source or PACKAGE}")
        if private:
            wrong.append(f"{module}.py:{line} imports the private name {name} from {source or PACKAGE}")
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


@pytest.mark.parametrize("module", [module for module in modules() if row(module) != INTERPRETED])
def test_compiled_code_avoids_what_compiles_badly(module: str) -> None:
    """No `_` as a loop variable or target (it would be boxed), no weak references, no `__getattr__` of a compiled module."""
    wrong: list[str] = []
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.Name) and node.id == "_" and isinstance(node.ctx, ast.Store):
            wrong.append(f"{module}.py:{node.lineno} assigns to _")
        if isinstance(node, ast.Import) and any(alias.name == "weakref" for alias in node.names):
            wrong.append(f"{module}.py:{node.lineno} imports weakref")
    names = {node.name for node in parse(module).body if isinstance(node, ast.FunctionDef)}
    if "__getattr__" in names and f"{module}.py" not in INTERPRETED_FILES:
        wrong.append(f"{module}.py has a __getattr__ of its own: a compiled one crashes when it is imported")
    assert not wrong


def test_the_charter_names_files_that_exist() -> None:
    """Every path in CONTRIBUTING.md is one of the repository, or of the package."""
    paths = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|pyi|md))`", CHARTER))
    assert len(paths) > 8
    assert [path for path in sorted(paths) if not (ROOT / path).exists() and not (SOURCES / path).exists()] == []


# --- the drawings


def drawing(title: str) -> list[str]:
    found = re.search(rf"^## {title}\n.*?^```\n(.*?)^```", CHARTER, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1).splitlines()


def stops(title: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The rooms of a drawing in the order of their boxes, and its stops: (file, function)."""
    rooms: list[str] = []
    inside: list[str] = []
    found: list[tuple[str, str]] = []
    for line in drawing(title):
        head = re.search(r"\+- ([^-]+?) -+\+", line)
        stop = re.search(r"\| (\w+\.py) +([\w.]+) ", line)
        if head is not None:
            rooms.append(head.group(1))
            inside.append(head.group(1))
        elif re.search(r"\+-+\+", line):
            inside.pop()
        elif stop is not None:
            folder = inside[-1] if inside[-1].endswith("/") else ""
            found.append((folder + stop.group(1), stop.group(2)))
    assert not inside
    return rooms, found


def functions(module: str) -> set[str]:
    """Functions, and methods as Class.method."""
    names: set[str] = set()
    for node in parse(module).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.update(f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef))
    return names


@pytest.mark.parametrize("title", ["The walk of a capacity", "The walk of a page"])
def test_a_walk_enters_each_room_once_and_each_stop_exists(title: str) -> None:
    """At most ten stops, each a function of the file that it names; boxes are drawn straight."""
    rooms, found = stops(title)
    assert 2 <= len(rooms) == len(set(rooms))
    assert 2 <= len(found) <= MAX_STOPS
    assert len(set(found)) == len(found)
    for path, name in found:
        assert name in functions(path.removesuffix(".py")), f"{path} has no {name}"
    assert len({len(line) for line in drawing(title) if line[0] in "+|"}) == 1


class Passed:
    """As a context: the functions of the package that are called, in the order of their first calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []  # (file, function without its class)

    def __enter__(self) -> Passed:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parts:
            call = (path.name, frame.f_code.co_name)
            if call not in self.calls:
                self.calls.append(call)

    def in_order(self, found: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Those of the stops that were passed, in the order in which they were."""
        wanted = [(path.rpartition("/")[2], name.rpartition(".")[2]) for path, name in found]
        return [found[wanted.index(call)] for call in self.calls if call in wanted]


@pytest.mark.skipif(COMPILED, reason="compiled functions are not seen by a profiler")
def test_the_walks_are_what_runs(tmp_path: Path) -> None:
    """A growth that evicts to disk, and a resume from there, pass the stops of the drawings in their order."""
    _rooms, capacity = stops("The walk of a capacity")
    _rooms, page = stops("The walk of a page")
    with Rig(small(8, disk=(str(tmp_path), 16))) as rig:
        first = rig.start()
        assert first.advance(toks(0, 32), commit=False)
        first.suspend()
        second = rig.start()
        with Passed() as down:
            assert second.cache.resize(16)
        second.close()
        with Passed() as back:
            assert first.resume()
        first.check()
    assert down.in_order(capacity) == capacity
    assert down.in_order(page) == [stop for stop in page if stop[1] != "resume"]
    assert ("driver.py", "read_files") in back.calls
    assert set(back.in_order(page)) == {stop for stop in page if stop[1] not in ("resize", "Driver.write_files")}
