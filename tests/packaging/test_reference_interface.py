"""The reference's public interface, compared with ours. Differences are those that docs/tensorrt_llm.md lists, and no others."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import re
from array import array
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import pytest

import kv_cache_manager_v2
from kv_cache_manager_v2 import (
    BACKEND,
    AttentionLayerConfig,
    BufferConfig,
    ConfigError,
    EmulatedDriver,
    GpuCacheTierConfig,
    IKvCacheColdPageCodec,
    KVCacheManager,
    KVCacheManagerConfig,
    ReuseScope,
    SwaScratchReuseConfig,
    sequence_to_blockchain_keys,
)
from tests.arguments.scene import Scene
from tests.conftest import ROOT, package_directory
from tests.packaging.reference_interface import ATTRIBUTES, BY_POSITION, CALLS, CONSTANTS, NAMES

DOCUMENT: Final = ROOT / "docs" / "tensorrt_llm.md"
REQUIRED: Final = inspect.Parameter.empty

# --- our side


def resolve(name: str) -> Any:
    """The object of a dotted name of the data: of the package, a class of it, or a module of the reference's."""
    value: Any = kv_cache_manager_v2
    for part in name.split("."):
        value = getattr(value, part)
    return value


def parameters_of(name: str) -> list[inspect.Parameter]:
    """The parameters of one of our calls, without `self`. The compiled build hides those of some: then the source tells."""
    try:
        found = list(inspect.signature(resolve(name)).parameters.values())
    except ValueError:
        found = _in_source(name)
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in found) and "." in name:
        found = _in_source(name)
    return found[1:] if found and found[0].name == "self" else found


def _in_source(name: str) -> list[inspect.Parameter]:
    """The parameters of a method or function, as the source of its class, of a base class, or of its module has them."""
    owner, _dot, function = name.rpartition(".")
    bases = [(base.__module__, base.__name__) for base in getattr(resolve(owner), "__mro__", ())]
    for module, place in [*bases, ("kv_cache_manager_v2._introspection", ""), ("kv_cache_manager_v2.introspection", "")]:
        source = package_directory() / Path(*module.split(".")).with_suffix(".py")
        tree = ast.parse(source.read_text() if source.exists() else "")
        for node in [tree, *tree.body]:
            if getattr(node, "name", "") == place and isinstance(node, ast.Module | ast.ClassDef):
                for member in node.body:
                    if isinstance(member, ast.FunctionDef) and member.name == function:
                        return list(_signature(ast.unparse(member.args)).parameters.values())
    raise AssertionError(f"{name} is in no source")


# --- their side


def _signature(text: str) -> inspect.Signature:
    """The signature of a function that takes `text`; defaults that are no literals become `...`."""
    arguments = ast.parse(f"def f({text}): pass").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    given = arguments.args
    found: list[inspect.Parameter] = []
    defaults: list[ast.expr | None] = [None] * (len(given.args) - len(given.defaults)) + list(given.defaults)
    for group, values, kind in (
        (given.args, defaults, inspect.Parameter.POSITIONAL_OR_KEYWORD),
        (given.kwonlyargs, given.kw_defaults, inspect.Parameter.KEYWORD_ONLY),
    ):
        for argument, value in zip(group, values, strict=True):
            found.append(inspect.Parameter(argument.arg, kind, default=REQUIRED if value is None else _literal(value)))
    return inspect.Signature(found)


def _literal(node: ast.expr) -> object:
    try:
        value: object = ast.literal_eval(node)
    except ValueError:
        return ...
    return value


def split(names: str) -> list[str]:
    return names.replace("=", "").split()


# --- the comparison


def call_differences(name: str) -> Iterator[str]:
    """What a caller of the reference's call would meet here."""
    ours = parameters_of(name)
    theirs = list(_signature(CALLS[name]).parameters.values())
    for position, parameter in enumerate(theirs):
        same = ours[position] if position < len(ours) else None
        if same is None or same.name != parameter.name:
            yield f"{name}: parameter {position} is {parameter.name} there, {same.name if same else 'absent'} here"
        elif parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and same.kind is inspect.Parameter.KEYWORD_ONLY:
            yield f"{name}: {parameter.name} cannot be passed by position"
        elif parameter.default is ... and same.default is REQUIRED:
            yield f"{name}: {parameter.name} has a default there"
        elif parameter.default not in (REQUIRED, ...) and same.default not in (parameter.default, ...):
            yield f"{name}: {parameter.name} is {parameter.default!r} by default there, {same.default!r} here"
    for further in ours[len(theirs) :]:
        if further.default is REQUIRED:
            yield f"{name}: {further.name} must be passed here"


def name_differences() -> Iterator[str]:
    for path in NAMES:
        module = importlib.import_module(f"kv_cache_manager_v2.{path}".rstrip("."))
        for name in split(NAMES[path]):
            value = getattr(module, name, None)
            public = getattr(kv_cache_manager_v2, name, value)
            if value is None or (value is not public and value != public):
                yield f"{path}.{name}".lstrip(".")


def attribute_differences() -> Iterator[str]:
    """Attributes that neither a class nor its instances have, and properties that engines assign and ours refuse."""
    for owner, names in ATTRIBUTES.items():
        kind = resolve(owner)
        fields = {parameter.name for parameter in parameters_of(owner)} if owner in CALLS else set()
        annotated = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
        annotated |= set(dir(converter_of(None))) if owner == "PageIndexConverter" else set()
        for name in names.split():
            member = inspect.getattr_static(kind, name.rstrip("="), None)
            assigned = (
                member is not None and getattr(member, "__set__", None) is not None and getattr(member, "fset", 1) is not None
            )
            if (member is None and name not in fields | annotated) or (name.endswith("=") and not assigned):
                yield f"{owner}.{name.rstrip('=')}"


def found_differences() -> dict[str, str]:
    """By the name under which the document lists them."""
    found = {name: f"{name} is absent" for name in [*name_differences(), *attribute_differences()]}
    for name in CALLS:
        for difference in call_differences(name):
            found[name] = difference
    return found


def converter_of(window: int | None) -> Any:
    """The converter of a layer with two of three buffers of a slot, with scratch reuse."""
    layers = [
        AttentionLayerConfig(0, [BufferConfig("key", 64), BufferConfig("value", 64)], window),
        AttentionLayerConfig(1, [BufferConfig("key", 64)], window),
    ]
    config = KVCacheManagerConfig(8, [GpuCacheTierConfig(1 << 21)], layers, swa_scratch_reuse=SwaScratchReuseConfig())
    with KVCacheManager(config, driver=EmulatedDriver()) as manager:
        return manager.get_page_index_converter(0, "key")


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except ConfigError:
        return True
    return False


UNHASHABLE: Final[Any] = []
FLOAT: Final[Any] = 64.0
CODEC: Final = type("Codec", (IKvCacheColdPageCodec,), {})

# Differences that no signature shows: whether ours is as the document says.
BEHAVIOUR: Final[dict[str, Callable[[Scene], bool]]] = {
    "BACKEND": lambda scene: BACKEND in ("compiled", "interpreted"),
    "sequence_to_blockchain_keys": lambda scene: (
        next(iter(sequence_to_blockchain_keys(4, ReuseScope(), [1])))[1] != hashlib.sha256(b"\0").digest()
        and next(iter(sequence_to_blockchain_keys(4, ReuseScope(), [1], "sha256")))[1] == hashlib.sha256(b"\0").digest()
    ),
    "KVCacheManager": lambda scene: refused(lambda: KVCacheManager(scene.manager.init_config, None, CODEC(), driver=scene.driver)),
    "KVCacheManager.create_kv_cache": lambda scene: refused(lambda: scene.manager.create_kv_cache(id=UNHASHABLE)),
    "KVCacheManager.clamp_max_seq_len_for_mem": lambda scene: refused(lambda: scene.manager.clamp_max_seq_len_for_mem(1, FLOAT)),
    "KVCacheManager.get_life_cycle_pool_group_indices": lambda scene: (
        scene.manager.get_life_cycle_pool_group_indices(0) == scene.manager.get_life_cycle_pool_group_indices(1)
    ),
    "PageIndexConverter.__call__": lambda scene: type(scene.manager.get_page_index_converter(0, "key")([1])) is array,
    "PageIndexConverter.scratch_pages_per_block": lambda scene: (
        refused(lambda: converter_of(8).scratch_pages_per_block) and converter_of(None).scratch_pages_per_block == 2
    ),
    "StorageStatistics.slot_sizes": lambda scene: type(scene.manager.get_storage_statistics()[0].slot_sizes) is tuple,
    "_KVCache._get_last_cached_token_level": lambda scene: scene.active._get_last_cached_token_level() is None,
}


def listed() -> dict[str, list[str]]:
    """The rows of the document's table, by name: reference, here, reason."""
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \| (.*) \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return {name: rest for name, *rest in rows}


def test_the_document_lists_the_differences_and_no_others() -> None:
    """Each with what holds there, what holds here, and a reason of at least a few words."""
    found = found_differences()
    assert sorted(found.keys() - listed().keys()) == [], found
    assert sorted(listed().keys() - found.keys() - BEHAVIOUR.keys()) == []
    assert sorted(BEHAVIOUR.keys() - listed().keys()) == []
    for name, row in listed().items():
        assert all(len(cell.split()) >= 2 for cell in row[2:]), name


@pytest.mark.parametrize("name", BEHAVIOUR)
def test_what_the_document_says_of_ours_holds(name: str) -> None:
    with Scene() as scene:
        assert BEHAVIOUR[name](scene)


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_and_enums(name: str) -> None:
    """Values, and members in their order; every enum is one of ints."""
    value, expected = resolve(name), CONSTANTS[name]
    if isinstance(expected, dict):
        assert issubclass(value, IntEnum)
        assert {member.name: int(member) for member in value} == expected
    else:
        assert value == expected


@pytest.mark.parametrize("name", BY_POSITION)
def test_calls_by_position(name: str) -> None:
    required, most = BY_POSITION[name]
    ours = parameters_of(name)
    assert sum(parameter.default is REQUIRED for parameter in ours) <= required
    assert len(ours) >= most


def test_the_data_finds_a_difference() -> None:
    """A parameter of another name, another default, and one that must be passed."""
    assert list(call_differences("exact_div")) == []
    for theirs, difference in (
        ("x, z", "exact_div: parameter 1 is z there, y here"),
        ("x, y=2", "exact_div: y is 2 by default there"),
        ("x", "exact_div: y must be passed here"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(CALLS, "exact_div", theirs)
            assert next(call_differences("exact_div")).startswith(difference)
