"""Writes the public stubs from the sources: `make stubs`. `--check` compares instead, and fails for a stub that is stale.

Rule: nothing in `kv_cache_manager_v2-stubs` is written by hand. Signatures, types and docstrings are those of the sources; bodies,
private names and what a public name does not need are left out. A public attribute whose type the source does not say is an error.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGE: Final = ROOT / "kv_cache_manager_v2"
STUBS: Final = ROOT / "stubs" / f"{PACKAGE.name}-stubs"

# A module gets a stub if the package exports something of it, or if it is listed here. Rooms that export single records have none.
LISTED: Final = ("introspection", "extras.arrays", "extras.cuda", "extras.pages")
WITHOUT: Final = ("request.", "storage.")

ELLIPSIS: Final = ast.Constant(...)
# How a class shows itself, checks itself or ends is no part of its interface.
LEFT_OUT: Final = frozenset({"__repr__", "__str__", "__post_init__", "__del__", "__slots__"})


def public(name: str) -> bool:
    """Names without an underscore, special methods, and the reference's private getters, which engines call."""
    special = name.startswith("__") and name.endswith("__")
    return name not in LEFT_OUT and (not name.startswith("_") or special or name.startswith("_get_"))


def modules() -> list[str]:
    """Names relative to the package: what the package imports from, and where the bases of the classes there are."""
    pending = ["__init__", *LISTED]
    found: set[str] = set()
    while pending:
        module = pending.pop()
        if module in found or module.startswith(WITHOUT):
            continue
        found.add(module)
        body = _source(module).body
        wanted = {ast.unparse(base) for node in body if isinstance(node, ast.ClassDef) for base in node.bases}
        if module == "__init__":
            wanted = {name for node in body if isinstance(node, ast.Assign) for name in _names(node)}
        for node in body:
            if isinstance(node, ast.ImportFrom) and wanted.intersection(alias.name for alias in node.names):
                package, _, name = (node.module or "").partition(".")
                if package == PACKAGE.name:
                    pending.append(name)
    return sorted(found)


def _names(node: ast.Assign) -> list[str]:
    """What `__all__` lists."""
    return list(ast.literal_eval(node.value)) if ast.unparse(node.targets[0]) == "__all__" else []


def _source(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())


class Generator:
    """One module's stub."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.tree = _source(module)

    def text(self) -> str:
        body = list(self.statements(self.tree.body))
        return ast.unparse(ast.fix_missing_locations(ast.Module(body, []))) + "\n"

    def statements(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        if ast.get_docstring(self.tree) is not None and body is self.tree.body:
            yield body[0]
        for node in body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                if not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
                    yield node
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                yield from self.statements(node.body)
            elif isinstance(node, ast.FunctionDef) and public(node.name):
                yield self.function(node)
            elif isinstance(node, ast.ClassDef) and public(node.name):
                yield self.klass(node)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                yield node  # an alias, a NewType, a TypeVar, __all__
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and public(node.target.id):
                yield self.constant(node)

    def constant(self, node: ast.AnnAssign) -> ast.stmt:
        """Aliases and literals stay as they are; of another value the type is told."""
        annotation = ast.unparse(node.annotation)
        if annotation.startswith("Final[") and not _is_literal(node.value):
            return ast.AnnAssign(node.target, node.annotation, None, 1)
        if annotation != "Final" or _is_literal(node.value):
            return node
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
            kind = node.value.func.id  # a NewType, or a class
        elif isinstance(node.value, ast.BinOp):
            kind = "int"
        else:
            raise SystemExit(f"{self.module}: say the type of {ast.unparse(node.target)}")
        return ast.AnnAssign(node.target, ast.parse(f"Final[{kind}]", mode="eval").body, None, 1)

    def function(self, node: ast.FunctionDef) -> ast.FunctionDef:
        text = ast.get_docstring(node, clean=False)
        node.body = [ast.Expr(ELLIPSIS if text is None else ast.Constant(text))]
        node.args.defaults = [_default(value) for value in node.args.defaults]
        node.args.kw_defaults = [None if value is None else _default(value) for value in node.args.kw_defaults]
        node.decorator_list = [each for each in node.decorator_list if "mypyc" not in ast.unparse(each)]
        return node

    def klass(self, node: ast.ClassDef) -> ast.ClassDef:
        node.decorator_list = [each for each in node.decorator_list if "mypyc" not in ast.unparse(each)]
        record = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
        record = record or any(ast.unparse(base) == "NamedTuple" for base in node.bases)
        text = ast.get_docstring(node, clean=False)
        fields: list[ast.stmt] = [] if text is None else [ast.Expr(ast.Constant(text))]
        methods: list[ast.stmt] = []
        for member in node.body:
            if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name) and public(member.target.id):
                value = None if not record or member.value is None else _of_field(member.value)
                fields.append(ast.AnnAssign(member.target, member.annotation, value, 1))
            elif isinstance(member, ast.Assign) and isinstance(member.targets[0], ast.Name) and public(member.targets[0].id):
                fields.append(member)
            elif isinstance(member, ast.FunctionDef):
                if member.name == "__init__":
                    fields.extend(self.attributes(node.name, member))
                if public(member.name):
                    methods.append(self.function(member))
        node.body = [*fields, *methods] or [ast.Expr(ELLIPSIS)]
        return node

    def attributes(self, owner: str, init: ast.FunctionDef) -> Iterator[ast.stmt]:
        """Public attributes that `__init__` sets: annotated there, or a parameter, or a constant."""
        parameters = {each.arg: each.annotation for each in [*init.args.args, *init.args.kwonlyargs]}
        seen: set[str] = set()
        for node in ast.walk(init):
            if not isinstance(node, ast.AnnAssign | ast.Assign):
                continue
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if not (isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"):
                continue
            if not public(target.attr) or target.attr in seen:
                continue
            seen.add(target.attr)
            kind = node.annotation if isinstance(node, ast.AnnAssign) else None
            if kind is None or ast.unparse(kind) == "Final":
                if isinstance(node.value, ast.Name):
                    kind = parameters.get(node.value.id)
                elif isinstance(node.value, ast.Constant) and node.value.value is not None:
                    kind = ast.Name(type(node.value.value).__name__)
                else:
                    kind = None
            if kind is None:
                raise SystemExit(f"{self.module}: say the type of self.{target.attr} in {owner}.__init__")
            yield ast.AnnAssign(ast.Name(target.attr), kind, None, 1)


def _is_literal(value: ast.expr | None) -> bool:
    try:
        ast.literal_eval(value or ELLIPSIS)
    except ValueError:
        return False
    return True


def _of_field(value: ast.expr) -> ast.expr:
    """The value of a dataclass's field: its default, or a `field(...)` that gives it none."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        names = [keyword.arg for keyword in value.keywords]
        if "default" not in names and "default_factory" not in names:
            return value
    return _default(value)


def _default(value: ast.expr) -> ast.expr:
    """A default as a stub shows it: a literal, a public constant, or an ellipsis."""
    shown = _is_literal(value) or (isinstance(value, ast.Name) and not value.id.startswith("_"))
    return value if shown else ELLIPSIS


def write(folder: Path) -> None:
    """All stubs, formatted, into an empty folder."""
    for module in modules():
        stub = folder / f"{module.replace('.', '/')}.pyi"
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(Generator(module).text())
    ruff = [sys.executable, "-m", "ruff"]
    config = ["--config", str(ROOT / "pyproject.toml")]
    unused = ["--select", "F401,I", "--ignore-noqa"]
    subprocess.run([*ruff, "check", "--quiet", "--fix", *config, *unused, str(folder)], check=True)
    subprocess.run([*ruff, "format", "--quiet", *config, str(folder)], check=True)


def main() -> int:
    with tempfile.TemporaryDirectory() as made:
        write(Path(made))
        new = {path.relative_to(made): path.read_text() for path in Path(made).rglob("*.pyi")}
    old = {path.relative_to(STUBS): path.read_text() for path in STUBS.rglob("*.pyi")}
    stale = sorted(str(path) for path in new.keys() | old.keys() if new.get(path) != old.get(path))
    if "--check" in sys.argv:
        for path in stale:
            print(f"stale: stubs/{STUBS.name}/{path}; run `make stubs`")
        return 1 if stale else 0
    for gone in old.keys() - new.keys():
        (STUBS / gone).unlink()
    for stub, text in new.items():
        (STUBS / stub).parent.mkdir(parents=True, exist_ok=True)
        (STUBS / stub).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
