"""The two arms, and how a worker is started on one of them.

Rule: two workers of one measurement differ in KVCM_BACKEND, and in nothing else. Both import the unpacked compiled wheel.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
BUILDS: Final = ("compiled", "pure")
BUILD_VARIABLE: Final = "KVCM_BACKEND"
NAMES: Final = {"compiled": "compiled", "pure": "interpreted"}  # the values of the variable
PACKAGE_FOLDER: Final = ROOT / "build" / "compiled"


class WorkerFailedError(Exception):
    """A worker ended with an error; the text is the end of what it said."""


def environment(build: str) -> dict[str, str]:
    """The environment of a worker; hashes and allocation are as in any run."""
    paths = os.pathsep.join([str(PACKAGE_FOLDER), str(ROOT)])
    return {**os.environ, "PYTHONPATH": paths, BUILD_VARIABLE: NAMES[build], "PYTHONHASHSEED": "0"}


def is_built() -> bool:
    return (PACKAGE_FOLDER / "kv_cache_manager_v2").is_dir()


def run_worker(build: str, module: str, arguments: Sequence[str]) -> str:
    """Run a module on a build, from a directory in which no package lies; what it printed. Raises WorkerFailedError."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment(build), cwd=PACKAGE_FOLDER, capture_output=True, text=True)
    if done.returncode != 0:
        raise WorkerFailedError(f"{module} {' '.join(arguments)} on the {NAMES[build]} build:\n{done.stderr.strip()[-2000:]}")
    return done.stdout
