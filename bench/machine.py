"""What a result must say of where and when it was measured; nothing that names the machine, a user or a path."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from bench.builds import ROOT


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def commit() -> str:
    """The commit of the working tree, with a "+" if it has changes; empty outside a git checkout."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def describe() -> dict[str, object]:
    """Machine and versions; `load` is that of the last minute before the run."""
    import mypy.version
    import pyperf

    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "system": platform.system(),
        "pyperf": pyperf.__version__,
        "mypyc": mypy.version.__version__,
        "commit": commit(),
    }


def summary(machine: dict[str, object]) -> str:
    """One line for people."""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']} at the start; "
        f"Python {machine['python']}, mypyc {machine['mypyc']}, commit {machine['commit']}"
    )
