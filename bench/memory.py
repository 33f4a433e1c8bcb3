"""Bytes of Python memory for each cached block and each open request, on both builds."""

from __future__ import annotations

import json
from collections.abc import Sequence

from bench.builds import NAMES, run_worker
from bench.memory_worker import WEIGHINGS


def measure_memory(quick: bool, builds: Sequence[str]) -> dict[str, dict[str, float]]:
    """Bytes, by what is weighed and build."""
    found: dict[str, dict[str, float]] = {}
    for title in WEIGHINGS:
        for build in builds:
            weight: float = json.loads(run_worker(build, "bench.memory_worker", [title, *(["--quick"] if quick else [])]))
            found.setdefault(title, {})[NAMES[build]] = weight
    return found


def memory_table(found: dict[str, dict[str, float]]) -> str:
    if not found:
        return "no rows: nothing was weighed"
    builds = list(next(iter(found.values())))
    lines = [f"{'bytes for each':<30}" + "".join(f"  {build:>12}" for build in builds)]
    lines += [f"{title:<30}" + "".join(f"  {weights[build]:>12,.0f}" for build in builds) for title, weights in found.items()]
    return "\n".join(lines)
