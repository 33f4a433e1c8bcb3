"""Drafts the public stubs anew from the sources: `python stubs/draft.py [MODULE ...]`, or `make draft-stubs` for all that exist.

Rule: the sources decide names and signatures. What an attribute's type is, where `__init__` does not say it, is taken from the stub
as it stands, or marked TODO for a person to fill in. `make stubtest` judges the result.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGE: Final = ROOT / "kv_cache_manager_v2"
STUBS: Final = ROOT / "stubs" / f"{PACKAGE.name}-stubs"
ELLIPSIS: Final = ast.Constant(...)
# How a class makes itself presentable, checks itself or ends is no part of its interface.
UNTOLD: Final = frozenset({"__repr__", "__str__", "__post_init__", "__del__", "__slots__"})


def public(name: str) -> bool:
    return name not in UNTOLD and (not name.startswith("_") or (name.startswith("__") and name.endswith("__")))


def known_types(stub: Path) -> dict[tuple[str, str], ast.expr]:
    """(class or "", name) -> annotation, of the stub as it stands."""
    known: dict[tuple[str, str], ast.expr] = {}
    if not stub.exists():
        return known
    tree = ast.parse(stub.read_text())
    owners: list[ast.Module | ast.ClassDef] = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for owner in owners:
        for node in owner.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                known[owner.name if isinstance(owner, ast.ClassDef) else "", node.target.id] = node.annotation
    return known


def simple(value: ast.expr | None) -> ast.expr | None:
    """A default as a stub shows it: a literal, or an ellipsis."""
    inner = value.operand if isinstance(value, ast.UnaryOp) else value
    return value if inner is None or isinstance(inner, ast.Constant) else ELLIPSIS


def known_parameters(stub: Path) -> dict[tuple[str, str, str], ast.expr]:
    """(class or "", function or property, parameter) -> annotation, of the stub as it stands. The sources say `object` where
    they check for themselves what a user passes; the stubs say what should be passed."""
    known: dict[tuple[str, str, str], ast.expr] = {}
    if not stub.exists():
        return known
    tree = ast.parse(stub.read_text())
    owners: list[ast.Module | ast.ClassDef] = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for owner in owners:
        for node in owner.body:
            if isinstance(node, ast.FunctionDef):
                for each in [*node.args.args, *node.args.kwonlyargs]:
                    if each.annotation is not None:
                        known[owner.name if isinstance(owner, ast.ClassDef) else "", node.name, each.arg] = each.annotation
    return known


class Drafter:
    """One module's stub."""

    def __init__(self, module: str) -> None:
        self.stub = STUBS / f"{module}.pyi"
        self.source = ast.parse((PACKAGE / f"{module}.py").read_text())
        self.known = known_types(self.stub)
        self.promised = known_parameters(self.stub)

    def write(self) -> None:
        body = ast.Module(list(self.statements(self.source.body)), [])
        self.stub.parent.mkdir(parents=True, exist_ok=True)
        self.stub.write_text(ast.unparse(ast.fix_missing_locations(body)) + "\n")

    def statements(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                if not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
                    yield node
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                yield from self.statements(node.body)
            elif isinstance(node, ast.FunctionDef) and public(node.name):
                yield self.function(node, "")
            elif isinstance(node, ast.ClassDef) and public(node.name):
                yield self.klass(node)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                yield node  # a type alias, a NewType, __all__
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and public(node.target.id):
                yield self.constant(node, node.target.id)

    def constant(self, node: ast.AnnAssign, name: str) -> ast.stmt:
        known = self.known.get(("", name))
        if known is not None and ast.unparse(known) not in ("Final", "TypeAlias"):
            return ast.AnnAssign(node.target, known, None, 1)
        return node

    def function(self, node: ast.FunctionDef, owner: str) -> ast.FunctionDef:
        node.body = [ast.Expr(ELLIPSIS)]
        for each in [*node.args.args, *node.args.kwonlyargs]:
            if each.annotation is not None and ast.unparse(each.annotation) == "object":
                each.annotation = self.promised.get((owner, node.name, each.arg), each.annotation)
        node.args.defaults = [simple(value) or ELLIPSIS for value in node.args.defaults]
        node.args.kw_defaults = [simple(value) for value in node.args.kw_defaults]
        node.decorator_list = [each for each in node.decorator_list if "mypyc" not in ast.unparse(each)]
        return node

    def klass(self, node: ast.ClassDef) -> ast.ClassDef:
        node.decorator_list = [each for each in node.decorator_list if "mypyc" not in ast.unparse(each)]
        record = any("dataclass" in ast.unparse(each) for each in [*node.decorator_list, *node.bases])
        record = record or any(ast.unparse(base) == "NamedTuple" for base in node.bases)
        fields: list[ast.stmt] = []
        methods: list[ast.stmt] = []
        for member in node.body:
            if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name) and public(member.target.id):
                value = simple(member.value) if record else None
                fields.append(ast.AnnAssign(member.target, member.annotation, value, 1))
            elif isinstance(member, ast.Assign) and isinstance(member.targets[0], ast.Name) and public(member.targets[0].id):
                fields.append(member)
            elif isinstance(member, ast.FunctionDef):
                if member.name == "__init__":
                    fields.extend(self.attributes(node.name, member))
                if public(member.name):
                    methods.append(self.function(member, node.name))
        node.body = [*fields, *methods] or [ast.Expr(ELLIPSIS)]
        return node

    def attributes(self, owner: str, init: ast.FunctionDef) -> Iterator[ast.stmt]:
        """Public attributes that `__init__` sets, with their types as far as they can be read off it."""
        parameters = {each.arg: each.annotation for each in [*init.args.args, *init.args.kwonlyargs]}
        seen: set[str] = set()
        for node in ast.walk(init):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
            if not (isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"):
                continue
            name = target.attr
            if not public(name) or name in seen:
                continue
            seen.add(name)
            kind = node.annotation if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) != "Final" else None
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                kind = parameters.get(node.value.id)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                kind = ast.Name(type(node.value.value).__name__)
            yield ast.AnnAssign(ast.Name(name), kind or self.known.get((owner, name), ast.Name("TODO")), None, 1)


def draft_face() -> None:
    """The package's own stub: its re-exports, and `__all__` with its comments."""
    source = (PACKAGE / "__init__.py").read_text()
    lines: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) or (isinstance(node, ast.ImportFrom) and node.module != "__future__"):
            lines.append(ast.get_source_segment(source, node) or "")
    (STUBS / "__init__.pyi").write_text("\n".join(lines) + "\n")


def main() -> int:
    existing = sorted(path.relative_to(STUBS).with_suffix("").as_posix() for path in STUBS.rglob("*.pyi"))
    modules = sys.argv[1:] or existing
    for module in modules:
        if module == "__init__":
            draft_face()
        else:
            Drafter(module).write()
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "check", "--quiet", "--fix", "--select", "F401,I", str(STUBS)], check=True)
    subprocess.run([*ruff, "format", "--quiet", str(STUBS)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
