"""KVCM_BACKEND: one installed wheel, and which build of it a process imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from kv_cache_manager_v2.backend import LIBRARY, VARIABLES
from kv_cache_manager_v2.build import COMPILED
from tests.conftest import package_directory

PACKAGE = "kv_cache_manager_v2"
OURS, REFERENCES = VARIABLES
BEST = "compiled" if COMPILED else "interpreted"  # what the package under test can do
SUFFIX = EXTENSION_SUFFIXES[0]
SHOW = (
    f"import sys, {PACKAGE} as kvcm\n"
    f"modules = [module for name, module in list(sys.modules.items()) if name.startswith('{PACKAGE}')]\n"
    "modules += [value for value in vars(kvcm).values() if type(value) is type(sys)]\n"
    "files = [str(module.__file__) for module in modules]\n"
    "print(kvcm.BACKEND, kvcm.build_info().compiled, any(file.endswith('.so') for file in files))\n"
)
needs_compiled = pytest.mark.skipif(not COMPILED, reason="the package under test has no compiled modules")


def run(code: str, variables: dict[str, str], *options: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a few lines in a new interpreter that has the package, or a copy of it."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"PYTHONPATH": str(folder or package_directory()), **variables}
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=120, check=False)


def printed(code: str, variables: dict[str, str], *options: str, folder: Path | None = None) -> str:
    done = run(code, variables, *options, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shown(build: str) -> str:
    """What SHOW prints: the name of the build, and whether any compiled module was imported."""
    return f"{build} {build == 'compiled'} {build == 'compiled'}\n"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the package that a test may damage."""
    for name in (PACKAGE, *(path.name for path in package_directory().glob(f"{LIBRARY}.*"))):
        source = package_directory() / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, tmp_path / name)
    return tmp_path


# --- what is asked for


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("value", ["", "auto", "interpreted", "python"])
def test_a_value_selects_the_build(variable: str, value: str) -> None:
    """Silently, with warnings as errors; not one module of the other build is imported."""
    expected = "interpreted" if value in ("interpreted", "python") else BEST
    assert printed(SHOW, {variable: value}, "-W", "error") == shown(expected)


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("value", ["compiled", "cpp"])
@pytest.mark.parametrize("options", [(), ("-O",)])
def test_compiled_is_compiled_or_an_error(variable: str, value: str, options: tuple[str, ...]) -> None:
    """The error names the setting, the file, the reason and the remedy, where assertions are off too."""
    done = run(SHOW, {variable: value}, *options)
    if COMPILED:
        assert done.stdout == shown("compiled")
        return
    assert done.returncode != 0
    text = done.stderr.splitlines()[-1]
    assert text.startswith(f"ImportError: {variable}={value}: the compiled build cannot be loaded.")
    assert str(package_directory() / (LIBRARY + SUFFIX)) in text
    assert "it is the interpreted package" in text
    assert f"or set {OURS}=interpreted" in text


def test_our_variable_is_read_first() -> None:
    """The reference's is read if ours is not set."""
    assert printed(SHOW, {OURS: "interpreted", REFERENCES: "cpp"}) == shown("interpreted")
    assert printed(SHOW, {OURS: "", REFERENCES: "python"}) == shown("interpreted")


@pytest.mark.parametrize("variable", VARIABLES)
def test_an_unknown_value_is_refused(variable: str) -> None:
    """With the values that there are."""
    done = run(SHOW, {variable: "fast"})
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].endswith(
        f"ConfigError: {variable}='fast': must be one of 'compiled', 'interpreted', 'auto', 'cpp', 'python', or unset"
    )


@needs_compiled
def test_a_debugger_sees_the_interpreted_build_of_a_compiled_wheel() -> None:
    """A trace function is called for the lines of the package, so breakpoints and coverage work."""
    code = (
        "import sys, kv_cache_manager_v2 as kvcm\n"
        "seen = set()\n"
        "sys.settrace(lambda frame, event, argument: seen.add(frame.f_code.co_name))\n"
        "kvcm.typed_range(3)\n"
        "print('typed_range' in seen)\n"
    )
    assert printed(code, {OURS: "interpreted"}) == "True\n"
    assert printed(code, {OURS: "compiled"}) == "False\n"


# --- what cannot be loaded


def break_library(folder: Path) -> str:
    file = next(folder.glob(f"{LIBRARY}.*"))
    file.write_bytes(b"no library")
    return file.name


def rename_library(folder: Path) -> str:
    next(folder.glob(f"{LIBRARY}.*")).rename(folder / f"{LIBRARY}.cpython-39-x86_64-linux-gnu.so")
    return LIBRARY + SUFFIX


def remove_module(folder: Path) -> str:
    file = next((folder / PACKAGE / "reuse").glob("tokens.*.so"))
    file.unlink()
    return f"tokens{SUFFIX}"


def break_module(folder: Path) -> str:
    file = next((folder / PACKAGE).glob("introspection.*.so"))  # most modules are imported before this one
    file.write_bytes(b"no library")
    return f"{PACKAGE}.introspection cannot be imported"


@needs_compiled
@pytest.mark.parametrize("damage", [break_library, rename_library, remove_module, break_module])
def test_damage_is_an_error_or_one_warning(copied: Path, damage: object) -> None:
    """`compiled` raises; `auto` warns once and runs on the sources alone; `interpreted` does not look."""
    assert callable(damage)
    name = damage(copied)
    done = run(SHOW, {OURS: "compiled"}, "-O", folder=copied)
    assert done.returncode != 0
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"ImportError: {OURS}=compiled: the compiled build cannot be loaded. {copied}")
    assert name in error
    assert "Remedy: reinstall" in error

    done = run(SHOW, {}, folder=copied)
    assert done.stdout == shown("interpreted"), done.stderr
    assert done.stderr.count("Warning") == 1
    assert f"RuntimeWarning: {PACKAGE} runs interpreted. {copied}" in done.stderr
    assert name in done.stderr

    assert printed(SHOW, {OURS: "interpreted"}, "-W", "error", folder=copied) == shown("interpreted")


@needs_compiled
def test_a_library_of_another_copy_is_no_part_of_this_one(copied: Path) -> None:
    """The compiled code of another installation, earlier on the path, may be of another version."""
    other = copied / "other"
    other.mkdir()
    shutil.copy2(next(copied.glob(f"{LIBRARY}.*")), other)
    done = run(f"import sys; sys.path.insert(0, {str(other)!r})\n{SHOW}", {}, folder=copied)
    assert done.stdout == shown("interpreted"), done.stderr
    assert f"{other / (LIBRARY + SUFFIX)} is loaded in its place" in done.stderr


@needs_compiled
def test_the_interpreted_build_takes_no_compiled_module_for_a_lost_source(copied: Path) -> None:
    (copied / PACKAGE / "ids.py").unlink()
    done = run(SHOW, {OURS: "interpreted"}, folder=copied)
    assert done.returncode != 0
    assert f"ids{SUFFIX} has no source beside it" in done.stderr.splitlines()[-1]


@needs_compiled
@pytest.mark.parametrize("first", ["compiled", "interpreted"])
def test_a_process_never_has_both(first: str) -> None:
    """A second import, after the modules were removed from `sys.modules`, gets the build of the first, or an error."""
    code = (
        f"import os, sys, {PACKAGE}\n"
        f"for name in [name for name in sys.modules if name.startswith('{PACKAGE}')]:\n"
        "    del sys.modules[name]\n"
        f"os.environ['{OURS}'] = SECOND\n"
    )
    second = "interpreted" if first == "compiled" else "compiled"
    done = run(code.replace("SECOND", repr(second)) + SHOW, {OURS: first})
    assert done.returncode != 0
    expected = f"ImportError: {OURS}={second}: this process has imported the {first} build; use another process"
    assert done.stderr.splitlines()[-1] == expected
    assert printed(code.replace("SECOND", "'auto'") + SHOW, {OURS: first}) == shown(first)
