"""A fresh virtual environment that holds the wheel under test and its runtime dependencies, and nothing else."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RUNTIME_DEPENDENCIES = ("blake3", "librt", "mypy_extensions", "xxhash")


def built_wheel(build: str) -> Path:
    """The wheel that `make` left for one of the builds."""
    wheels = sorted((ROOT / "build" / "wheels" / build).glob("*.whl"))
    assert len(wheels) == 1, f"expected one {build} wheel, found {wheels}"
    return wheels[0]


class CleanEnvironment:
    """A virtual environment without pip, filled with the wheel as pip installs it. No network: the dependencies' files are
    copied from the environment that runs the tests."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.bin = folder / "bin"
        self.work = folder / "work"  # where its programs run: no sources of ours in sight
        self.work.mkdir()
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "--quiet", "--disable-pip-version-check"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # names the unpacked wheel
        subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True, env=environment)
        self.site_packages = Path(self.run("import sysconfig; print(sysconfig.get_paths()['platlib'])").strip())
        for name in RUNTIME_DEPENDENCIES:
            self._copy_distribution(name)

    def _copy_distribution(self, name: str) -> None:
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or []:
            target = self.site_packages / file
            if ".." not in file.parts and file.suffix != ".pyc":
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(Path(str(distribution.locate_file(file))), target)

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment; its exit status is the caller's to judge."""
        environment = {"PATH": str(self.bin), "HOME": str(self.work)}  # no PYTHONPATH: only what is installed
        program = [str(self.bin / command[0]), *command[1:]]
        return subprocess.run(program, cwd=self.work, env=environment, capture_output=True, text=True, timeout=120)

    def run(self, code: str) -> str:
        """Run a few lines of Python and return what they print."""
        done = self.call("python", "-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout
