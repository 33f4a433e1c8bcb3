"""Times the public operations, one table: `make bench`, or `python bench [--quick] [--device cuda] [--json FILE]`.

Each figure is the median over repetitions, on the build that PYTHONPATH or the environment names. Nothing is compared with a
threshold: figures depend on the machine, and a run states its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

from operations import OPERATIONS, Setting
from timing import Timing

from kv_cache_manager_v2 import EmulatedDriver, build_info
from kv_cache_manager_v2.device.driver import Driver


def make_driver(device: str) -> Driver:
    """The emulated device copies pages on the calling thread, so its figures include the copies of a real GPU's own engines."""
    if device == "emulated":
        return EmulatedDriver()
    from kv_cache_manager_v2.device.default import default_driver

    return default_driver()


def report(rows: list[tuple[str, Timing]], stream: object = sys.stdout) -> None:
    width = max(len(title) for title, _timing in rows)
    print(f"{'operation':<{width}}  {'median':>11}  {'fastest':>11}  {'runs':>5}  per", file=sys.stdout)
    for title, timing in rows:
        print(f"{title:<{width}}  {timing.median_us:>8.2f} us  {timing.fastest_us:>8.2f} us  {timing.runs:>5}  {timing.unit}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description="Time the public operations.")
    parser.add_argument("--quick", action="store_true", help="few repetitions and small sizes: whether it runs, not how fast")
    parser.add_argument("--device", choices=("emulated", "cuda"), default="emulated")
    parser.add_argument("--only", metavar="TEXT", default="", help="operations whose title contains TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()

    info = build_info()
    where = f"Python {platform.python_version()}, {platform.machine()}, {options.device} device"
    print(f"kv_cache_manager_v2 {info.version}, {'compiled' if info.compiled else 'interpreted'}; {where}\n")
    setting = Setting(make_driver(options.device), quick=options.quick)
    rows = [(title, operation(setting)) for title, operation in OPERATIONS.items() if options.only in title]
    report(rows)
    if options.json is not None:
        figures = {title: timing.as_dict() for title, timing in rows}
        options.json.write_text(json.dumps({"build": info._asdict(), "where": where, "figures": figures}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
