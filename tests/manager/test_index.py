"""The index of what covers what: nothing in it is made up, and no case is missing from it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
INDEX = (HERE / "INDEX.md").read_text(encoding="utf-8")


def names_of(path: Path) -> set[str]:
    """Names of all test functions and methods of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def listed() -> set[tuple[Path, str]]:
    return {((HERE / file).resolve(), name) for file, name in re.findall(r"`([\w./]+\.py)::(\w+)`", INDEX)}


def test_every_test_in_the_index_exists() -> None:
    """Each file is there, and has the test."""
    found = listed()
    assert len(found) > 200
    missing = [f"{path}::{name}" for path, name in sorted(found) if not path.is_file() or name not in names_of(path)]
    assert missing == []


def test_every_test_of_a_case_is_in_the_index() -> None:
    """Whatever is called test_case_NNN_..., in this folder, is listed under its number."""
    rows = dict(re.findall(r"^\| (\d+) \|[^|]*\| (.*) \|$", INDEX, re.MULTILINE))
    for path in sorted(HERE.glob("test_*.py")):
        for name in names_of(path):
            matched = re.match(r"test_case_(\d+)_(?:and_(\d+)_)?", name)
            if matched is not None:
                for number in matched.groups():
                    assert number is None or name in rows[str(int(number))], f"{path}::{name} is not listed under case {number}"
