"""What is in a wheel, and what it does in an environment that has nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packaging.helpers import ROOT, CleanEnvironment, built_wheel

PACKAGE = "kv_cache_manager_v2"
INTERPRETED = (
    "__init__.py",
    "__main__.py",
    "cli/",
    "_introspection.py",
    "backend.py",
    "config.py",
    "errors.py",
    "external_pages.py",
    "layer_config.py",
    "extras/",
)  # stated again on purpose: moving a module out of the group is a decision


@pytest.fixture(scope="module")
def wheel(tested_build: str) -> Path:
    return built_wheel(tested_build)


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    return CleanEnvironment(tmp_path_factory.mktemp("clean"), wheel)


def package_sources() -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / PACKAGE).rglob("*.py"))


def test_wheel_carries_the_sources_the_marker_and_the_stubs(names: list[str]) -> None:
    """Tracebacks show the sources on both builds, and type checkers find the package typed, by the stubs of its public face."""
    stubs = ROOT / "stubs" / f"{PACKAGE}-stubs"
    expected = {f"{PACKAGE}/py.typed", *package_sources()}
    expected |= {f"{PACKAGE}/{path.relative_to(stubs).as_posix()}" for path in stubs.rglob("*.pyi")}
    in_package = {name for name in names if name.startswith(f"{PACKAGE}/") and not name.endswith(".so")}
    assert in_package == expected


def test_tag_says_what_the_wheel_holds(wheel: Path, tested_build: str) -> None:
    """The interpreted wheel installs anywhere; the compiled one only on the interpreter and platform it was compiled for."""
    assert wheel.name.endswith("-py3-none-any.whl") == (tested_build == "pure")


def test_every_module_is_compiled_or_listed_as_interpreted(names: list[str], tested_build: str) -> None:
    """No module falls out of the compiled group unnoticed, and the interpreted build has no compiled part at all."""
    compiled = {name.split(".")[0] for name in names if name.endswith(".so")}
    expected: set[str] = set()
    if tested_build == "compiled":
        modules = [name for name in package_sources() if not name.removeprefix(f"{PACKAGE}/").startswith(INTERPRETED)]
        expected = {name.removesuffix(".py") for name in modules} | {f"{PACKAGE}__mypyc"}
    assert compiled == expected


def test_imports_without_any_extra_and_names_its_build(environment: CleanEnvironment, tested_build: str) -> None:
    """Neither numpy nor torch nor a CUDA binding is needed, and build_info() tells which build was installed."""
    printed = environment.run(
        "import sys, kv_cache_manager_v2 as kvcm\n"
        "info = kvcm.build_info()\n"
        "print(info.version, info.compiled, info.drivers[0], 'numpy' in sys.modules, 'torch' in sys.modules)"
    )
    version = built_wheel(tested_build).name.split("-")[1]
    assert printed.split() == [version, str(tested_build == "compiled"), "emulated", "False", "False"]


def test_command_line_without_any_extra(environment: CleanEnvironment, tested_build: str) -> None:
    """The console script and the module are one program; it replays a trace with nothing but the runtime dependencies."""
    build = "compiled" if tested_build == "compiled" else "interpreted"
    assert environment.call("kvcm", "--version").stdout == environment.call("python", "-m", PACKAGE, "--version").stdout
    assert build in environment.call("kvcm", "--version").stdout
    trace = environment.work / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]},
        {"timestamp": 5, "input_length": 1536, "output_length": 1, "hash_ids": [1, 2, 3]},
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = environment.call("kvcm", "replay", str(trace), "--tokens-per-block", "512", "--gpu-blocks", "8", "--format", "json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["requests"], report["whole"]["hit_tokens"], report["whole"]["total_tokens"]) == (2, 1024, 2560)
    assert report["build"] == build


def test_the_manager_shows_its_own_signature(environment: CleanEnvironment) -> None:
    """`help` and `inspect` show what the constructor takes; compiled, a default that is no literal would hide that."""
    done = environment.run(
        "import inspect, kv_cache_manager_v2 as kvcm; print(list(inspect.signature(kvcm.KVCacheManager).parameters))"
    )
    assert done.strip() == "['config', 'event_manager', 'cold_page_codec', 'driver', 'clock']"


def test_type_checkers_see_the_stubs(environment: CleanEnvironment, tmp_path: Path) -> None:
    """A user's strictly checked program finds the package typed, and by its public stubs where a module has one."""
    program = tmp_path / "program.py"
    program.write_text(
        "import kv_cache_manager_v2 as kvcm\n"
        "from kv_cache_manager_v2.errors import CuError\n"
        "\n"
        "def cached(manager: kvcm.KVCacheManager) -> int:\n"
        "    with manager.create_kv_cache(None, [1, 2, 3]) as cache:\n"
        "        return cache.num_committed_tokens\n"
        "\n"
        "code: int = CuError('failed', 2, 'cuInit').error_code\n"
        "code = CuError('failed', '2')\n"
    )
    checker = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(tmp_path / "cache"), "--verbose"]
    command = [*checker, "--python-executable", str(environment.bin / "python"), str(program)]
    without_path = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(command, cwd=tmp_path, env=without_path, capture_output=True, text=True, timeout=120)
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(errors) == 2, done.stdout  # the argument and the assignment of the last line, and nothing else
    assert all(line.startswith("program.py:9: error:") for line in errors), done.stdout
    for stub in ("__init__.pyi", "errors.pyi", "manager.pyi", "kv_cache.pyi"):
        assert str(environment.site_packages / PACKAGE / stub) in done.stderr
