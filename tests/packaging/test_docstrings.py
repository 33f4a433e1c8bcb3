"""`help()` says what the sources say, on both builds."""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kv_cache_manager_v2
from kv_cache_manager_v2 import KVCache, KVCacheManager, resize_batch
from kv_cache_manager_v2.build import COMPILED
from tests.conftest import package_directory

PUBLIC = [name for name in kv_cache_manager_v2.__all__ if inspect.isclass(getattr(kv_cache_manager_v2, name))]
PUBLIC += [name for name in kv_cache_manager_v2.__all__ if inspect.isroutine(getattr(kv_cache_manager_v2, name))]


def documented(name: str) -> Iterator[tuple[str, Any, str]]:
    """The public object of that name and the public members of its class: (name, object, docstring in the source)."""
    value = getattr(kv_cache_manager_v2, name)
    source = package_directory() / Path(*value.__module__.split(".")).with_suffix(".py")
    if not source.exists():
        return  # a builtin, such as the int that an id is
    for node in ast.parse(source.read_text()).body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name != value.__name__:
            continue
        text = ast.get_docstring(node)
        if text is not None:
            yield name, value, text
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                text = ast.get_docstring(member)
                if text is not None and not any(ast.unparse(each).endswith("setter") for each in member.decorator_list):
                    yield f"{name}.{member.name}", getattr(value, member.name), text


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_are_those_of_the_source(name: str) -> None:
    """Classes, methods, properties, functions."""
    for where, value, text in documented(name):
        shown = inspect.getdoc(value)
        assert shown is not None, where
        assert shown.endswith(text), where


def test_every_public_name_has_a_docstring() -> None:
    """And every public method and property of the two classes that an engine lives with."""
    for name in PUBLIC:
        assert inspect.getdoc(getattr(kv_cache_manager_v2, name)), name
    for kind in (KVCacheManager, KVCache):
        for member in dir(kind):
            if not member.startswith("_"):
                assert inspect.getdoc(getattr(kind, member)), f"{kind.__name__}.{member}"


def test_help_shows_the_signature() -> None:
    """With types: the compiled build shows them in the line after Python's own."""
    for value, signature in (
        (KVCache.resize, "capacity: SupportsIndex | None, history_length: SupportsIndex | None = None, make_room: MakeRoom"),
        (resize_batch, "resize_batch(caches: Sequence[KVCache], capacities: Integers, histories: Integers | None = None) -> int"),
    ):
        shown = " ".join(pydoc.plain(pydoc.render_doc(value)).replace("'", "").split())
        assert signature in shown
    assert kv_cache_manager_v2.__doc__ is not None
    assert "KVCacheManager" in kv_cache_manager_v2.__doc__


@pytest.mark.skipif(not COMPILED, reason="interpreted modules have the docstring that is in their file")
def test_compiled_modules_have_docstrings() -> None:
    """The text at the head of the file."""
    for name in ("manager", "kv_cache", "config", "layout.page_index"):
        assert importlib.import_module(f"kv_cache_manager_v2.{name}").__doc__
