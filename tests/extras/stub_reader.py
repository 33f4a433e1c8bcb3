"""Reads stubs/cuda/bindings/driver.pyi, so that modules can be held against it."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import ModuleType

STUB = Path(__file__).resolve().parents[2] / "stubs" / "cuda" / "bindings" / "driver.pyi"


class Stub:
    """What the stub declares."""

    def __init__(self) -> None:
        self.functions: dict[str, list[str]] = {}  # name -> names of the parameters
        self.enums: dict[str, dict[str, int]] = {}  # name -> members
        self.structures: dict[str, list[str]] = {}  # name -> attributes
        self.constants: list[str] = []
        for node in ast.parse(STUB.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = [argument.arg for argument in node.args.args]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self.constants.append(node.target.id)
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                self._read_class(node)

    def _read_class(self, node: ast.ClassDef) -> None:
        if any(isinstance(base, ast.Name) and base.id == "IntEnum" for base in node.bases):
            members: dict[str, int] = {}
            for line in node.body:
                assert isinstance(line, ast.Assign)
                assert isinstance(line.targets[0], ast.Name)
                assert isinstance(line.value, ast.Constant)
                assert isinstance(line.value.value, int)
                members[line.targets[0].id] = line.value.value
            self.enums[node.name] = members
            return
        fields = [line.target.id for line in node.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)]
        self.structures[node.name] = fields

    def differences(self, module: ModuleType) -> list[str]:
        """Where a module lacks what the stub declares, or has it otherwise."""
        wrong: list[str] = []
        for name, parameters in self.functions.items():
            function = getattr(module, name, None)
            found = list(inspect.signature(function).parameters) if function is not None else None
            if found != parameters:
                wrong.append(f"{name}{tuple(parameters)}: the module has {found}")
        for name, members in self.enums.items():
            enum = getattr(module, name, None)
            for member, value in members.items():
                found_value = getattr(enum, member, None)
                if found_value is None or int(found_value) != value:
                    wrong.append(f"{name}.{member} = {value}: the module has {found_value}")
        for name, fields in self.structures.items():
            structure = getattr(module, name, None)
            if structure is None:
                wrong.append(f"{name}: the module has no such class")
                continue
            made = structure()
            wrong += [f"{name}.{field}: the module's has no such attribute" for field in fields if not hasattr(made, field)]
        wrong += [
            f"{name}: the module has no such constant"
            for name in self.constants
            if not isinstance(getattr(module, name, None), int)
        ]
        return wrong
