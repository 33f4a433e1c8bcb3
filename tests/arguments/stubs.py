"""The public face as the stubs describe it: every callable that a user can reach, with its parameters.

Rule: nothing is listed by hand. A name that joins `__all__`, or a public function of a module in MODULES, is walked from then on.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

STUBS = Path(__file__).resolve().parent.parent.parent / "stubs" / "kv_cache_manager_v2-stubs"

# Public modules whose functions and classes are reached by their module's name, beside what `__all__` exports.
MODULES = ("page_table", "page_matching")

SELF = "self"

# Old names of parameters: the last parameter of these calls. See test_renamed_parameters.py.
OLD = {
    "KVCache.commit": "tokens",
    "KVCache.prefetch": "level",
    "KVCache.get_base_page_indices": "beam_idx",
    "KVCache.get_aggregated_page_indices": "beam_idx",
    "KVCacheManager.probe_reuse": "tokens",
    "KVCacheManager.probe_first_new_block_key": "tokens",
    "KVCacheManager.get_and_reset_iteration_peak_block_stats": "level",
    "KVCacheManager.get_storage_statistics": "level",
    "KVCacheManager.get_life_cycle_pool_group_indices": "level",
    "KVCacheManager.mark_stats_dirty": "id",
    "KVCacheManager.clear_stats_dirty": "id",
    "KVCacheManager.mark_stats_excluded": "id",
    "KVCacheManager.clear_stats_excluded": "id",
    "KVCacheManager.is_stats_excluded": "id",
    "PageIndexConverter.__call__": "mode",
}


class Parameter(NamedTuple):
    """One parameter of a public call."""

    name: str
    annotation: str
    optional: bool  # has a default


class Operation(NamedTuple):
    """A way in: a function, a method, a constructor, or the assignment of a property."""

    module: str  # relative to the package
    owner: str  # class through which it is reached; empty: a function
    name: str  # "__init__": the constructor
    kind: str  # "function", "method", "static", "setter", "field" (of a record)
    parameters: tuple[Parameter, ...]
    defined_in: str  # class whose stub defines it

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}" if self.owner else self.name


class _Class(NamedTuple):
    module: str
    node: ast.ClassDef


def _trees() -> dict[str, ast.Module]:
    trees: dict[str, ast.Module] = {}
    for path in sorted(STUBS.rglob("*.pyi")):
        trees[path.relative_to(STUBS).with_suffix("").as_posix().replace("/", ".")] = ast.parse(path.read_text())
    return trees


TREES = _trees()
CLASSES: dict[str, _Class] = {
    node.name: _Class(module, node) for module, tree in TREES.items() for node in tree.body if isinstance(node, ast.ClassDef)
}


def exported() -> dict[str, str]:
    """Every name of `__all__` that the package imports from one of its modules, with that module."""
    found: dict[str, str] = {}
    for node in TREES["__init__"].body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                if not alias.name.startswith("_"):
                    found[alias.name] = node.module.partition(".")[2]
    return found


def operations() -> list[Operation]:
    """All public calls, in the order of the stubs."""
    found: list[Operation] = []
    wanted = exported()
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                if node.name.startswith("_") or not (module in MODULES or wanted.get(node.name) == module):
                    continue
                if isinstance(node, ast.FunctionDef):
                    found.append(Operation(module, "", node.name, "function", tuple(_parameters(node)), ""))
                else:
                    found.extend(_of_class(module, node))
    return found


def bases(name: str) -> list[str]:
    """A class and those that it inherits from, as far as they are ours, nearest first."""
    found = [name]
    for base in CLASSES[name].node.bases:
        inherited = ast.unparse(base)
        if inherited in CLASSES:
            found.extend(bases(inherited))
    return found


def is_record(name: str) -> bool:
    """A dataclass or a named tuple: its constructor takes its fields."""
    node = CLASSES[name].node
    if any("dataclass" in ast.unparse(each) for each in node.decorator_list):
        return True
    return any(ast.unparse(base) == "NamedTuple" for base in node.bases)


def is_enum(name: str) -> bool:
    return any(ast.unparse(base) in ("Enum", "IntEnum") for base in CLASSES[name].node.bases)


def is_abstract(name: str) -> bool:
    """Whether an operation is still abstract, so that the class has no instances."""
    defined: set[str] = set()
    for owner in bases(name):
        for node in CLASSES[owner].node.body:
            if isinstance(node, ast.FunctionDef) and node.name not in defined:
                if any("abstractmethod" in ast.unparse(each) for each in node.decorator_list):
                    return True
                defined.add(node.name)
    return False


def _of_class(module: str, node: ast.ClassDef) -> Iterator[Operation]:
    seen: set[tuple[str, str]] = set()
    fields: list[Parameter] = []
    for owner in bases(node.name):
        own = [
            Parameter(member.target.id, ast.unparse(member.annotation), member.value is not None)
            for member in CLASSES[owner].node.body
            if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name)
        ]
        fields = own + fields
        for member in CLASSES[owner].node.body:
            if not isinstance(member, ast.FunctionDef):
                continue
            decorators = [ast.unparse(each) for each in member.decorator_list]
            kind = "method"
            if any(each.endswith(".setter") for each in decorators):
                kind = "setter"
            elif "staticmethod" in decorators:
                kind = "static"
            elif "property" in decorators or any("abstractmethod" in each for each in decorators):
                continue
            if member.name.startswith("_") and member.name not in ("__init__", "__call__"):
                continue
            if (member.name, kind) not in seen:
                seen.add((member.name, kind))
                yield Operation(
                    module, node.name, member.name, kind, tuple(_parameters(member, OLD.get(f"{node.name}.{member.name}"))), owner
                )
    if is_record(node.name):
        yield Operation(module, node.name, "__init__", "field", tuple(fields), node.name)


def _parameters(node: ast.FunctionDef, old: str | None = None) -> Iterator[Parameter]:
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    required = len(plain) - len(arguments.defaults)
    for position, argument in enumerate(plain):
        if argument.arg not in (SELF, old):
            yield Parameter(argument.arg, _text(argument.annotation), position >= required)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield Parameter(argument.arg, _text(argument.annotation), default is not None)


def _text(annotation: ast.expr | None) -> str:
    assert annotation is not None
    return ast.unparse(annotation)


def atoms(annotation: str) -> list[str]:
    """The alternatives of a union."""
    node = ast.parse(annotation, mode="eval").body
    found: list[str] = []
    pending: list[ast.expr] = [node]
    while pending:
        each = pending.pop()
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.BitOr):
            pending.extend([each.right, each.left])
        else:
            found.append(ast.unparse(each))
    return found
