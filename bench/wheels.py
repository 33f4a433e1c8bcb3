"""Packages of others, in an environment under build/: what they import is installed, their own wheels are only unpacked.

Rule: what cannot be had is an UnavailableError that says why, since it depends on an index that is not ours.
"""

from __future__ import annotations

import os
import subprocess
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path


class UnavailableError(Exception):
    """Something of others cannot be used here; the text says why."""


class Environment:
    """A virtual environment in `home`, made on the first installation, and the folder in which its commands run."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.python = home / "env" / "bin" / "python"

    def call(self, command: Sequence[str], what: str, variables: dict[str, str] | None = None) -> None:
        """Run a command. Its error becomes the reason of an UnavailableError."""
        try:
            done = subprocess.run(command, env={**os.environ, **(variables or {})}, cwd=self.home, capture_output=True, text=True)
        except OSError as error:
            raise UnavailableError(f"{what}: {error}") from error
        if done.returncode != 0:
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip() and not line.startswith("WARNING")]
            raise UnavailableError(f"{what}: {lines[-1] if lines else f'exit status {done.returncode}'}")

    def install(self, requirements: Sequence[str], what: str) -> None:
        """Install these, in pip's words."""
        self.home.mkdir(parents=True, exist_ok=True)
        if not self.python.exists():
            venv.create(self.home / "env", with_pip=True)
        self.call([*self._pip(), "install", *requirements], what)

    def unpack(self, wheel: str, sources: Path) -> None:
        """Download a wheel without what it requires, and unpack it."""
        folder = self.home / "dl"
        self.call([*self._pip(), "download", "--no-deps", "--dest", str(folder), wheel], f"the wheel {wheel} cannot be had")
        for found in folder.glob(f"{wheel.partition('==')[0]}-*.whl"):
            with zipfile.ZipFile(found) as archive:
                archive.extractall(sources)

    def _pip(self) -> list[str]:
        return [str(self.python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
