"""`make test-versions`: the suite on both builds, and a wheel, under every CPython from 3.10 on that this machine has.

Rule: each interpreter gets a copy of the tracked files in a directory of its own, and the ordinary make targets do the work there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
OLDEST: Final = (3, 10)
PROBE: Final = "import sys, venv, ensurepip; print(sys.implementation.name, *sys.version_info[:2])"


def candidates() -> list[Path]:
    """Files named python3.N on PATH, and those of pyenv, whose shims run only the versions that it has switched on."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    folders += sorted(pyenv.glob("*/bin"))
    return [path for folder in folders for path in sorted(folder.glob("python3.*")) if path.name[8:].isdigit()]


def interpreters() -> dict[tuple[int, int], Path]:
    """One working CPython for each version from `OLDEST` on, by version."""
    found: dict[tuple[int, int], Path] = {}
    for path in candidates():
        try:
            answer = subprocess.run([str(path), "-c", PROBE], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            continue
        words = answer.stdout.split()
        if answer.returncode == 0 and words[0] == "cpython":
            version = (int(words[1]), int(words[2]))
            if version >= OLDEST:
                found.setdefault(version, path)
    return dict(sorted(found.items()))


def copy_tracked(target: Path) -> None:
    """The tracked files as they are in the working tree."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_suite(python: Path, wheels: Path) -> str:
    """Run the suite on both builds under one interpreter and keep its wheel; the end of what failed, or an empty string."""
    with tempfile.TemporaryDirectory(prefix="kvcm-versions-") as directory:
        tree = Path(directory)
        copy_tracked(tree)
        command = ["make", "test-pure", "test-compiled", "compile", f"PYTHON={python}"]
        done = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            return done.stdout[-4000:]
        for line in done.stdout.splitlines():
            if " passed" in line:
                print(f"    {line.strip('= ')}", flush=True)
        wheels.mkdir(exist_ok=True)
        for wheel in (tree / "dist").glob("*.whl"):
            shutil.copy2(wheel, wheels / wheel.name)
    return ""


def main() -> int:
    found = interpreters()
    failed: list[str] = []
    print(f"CPython {', '.join(f'{major}.{minor}' for major, minor in found)}", flush=True)
    for (major, minor), path in found.items():
        print(f"{major}.{minor}: {path}", flush=True)
        problem = run_suite(path, ROOT / "dist")
        if problem:
            failed.append(f"{major}.{minor}")
            print(problem, flush=True)
    print(f"{len(found) - len(failed)} of {len(found)} versions passed" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
