"""`python -m bench.peers`: compares other cache managers with ours on the same work, in one run on one machine.

The scripts that drive them are not ours: the folder that PEERS names holds `requirements.txt`, `bench_vllm.py` and
`bench_sglang.py`, which take `--reps` and write a JSON list of {name, median, unit, ...} to the file that OUT names. They run in an
environment of their own under build/peers, made once.

Rule: what cannot be had is one line that says why, and never an error: the others' figures depend on wheels that we do not ship.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from bench.builds import ROOT, WorkerFailedError, is_built
from bench.clock import Clock
from bench.machine import describe
from bench.micro import measure_row
from bench.results import Row, heading, readable, write
from bench.wheels import Environment, UnavailableError

HOME: Final = ROOT / "build" / "peers"
ENVIRONMENT: Final = Environment(HOME)
WHEELS: Final = {"vllm": "vllm==0.33.0", "sglang": "sglang==0.5.23"}
SCRIPTS: Final = {
    "vllm": ["bench_vllm.py", "--hash", "sha256", "--block", "32", "--hybrid"],
    "sglang": ["bench_sglang.py"],
}
WITH_DEPENDENCIES: Final = ("torch==", "torchvision==")  # the requirements whose own dependencies are installed, too
UNITS: Final = {"us": 1e-6, "us/page": 1e-6, "us/block": 1e-6, "ms": 1e-3, "ms/step": 1e-3}


class Counterpart(NamedTuple):
    """One of our operations, and the names of theirs that do the same work."""

    title: str
    vllm: str  # pattern of its name, and of its layer groups
    groups: str
    sglang: str


COUNTERPARTS: Final = (
    Counterpart("probe", "get_computed_blocks", "full", r"match_prefix 8k hit, 1 tree node"),
    Counterpart("create, resume, close", "TOTAL admission", "full", r"admission: match"),
    Counterpart("create, resume, close, list", "TOTAL admission", "full", r"admission: match"),
    Counterpart("resize and commit cold", "allocate\\+commit cold", "full", ""),
    Counterpart("commit cold", "", "full", r"insert cold"),
    Counterpart("close committed", "free 8k request", "full", ""),
    Counterpart("evict a page, 8,000 leaves", "evict\\+allocate per block", "full", r"evict 1 page with 8000 leaves"),
    Counterpart("decode step, calls", "allocate_slots only", "full", ""),
    Counterpart("decode step, batch", "allocate_slots only", "full", ""),
    Counterpart("decode step, calls, full + window", "allocate_slots only", "full+swa1024", ""),
)


class Figure(NamedTuple):
    """A figure of a peer."""

    name: str
    backend: str  # empty where it has one only
    groups: str
    seconds: float


def prepare(peer: str, scripts: Path) -> Path:
    """The peer's unpacked wheel, in an environment that has what it imports; made on the first call. Raises UnavailableError."""
    sources = HOME / f"{peer}_src"
    stamp = HOME / f"{peer}.stamp"
    if not stamp.exists():
        lines = [line for line in (scripts / "requirements.txt").read_text().splitlines() if "==" in line]
        whole = [line for line in lines if line.startswith(WITH_DEPENDENCIES)]
        ENVIRONMENT.install(whole, f"what {peer} needs cannot be had")
        ENVIRONMENT.install(["--no-deps", *[line for line in lines if line not in whole]], f"what {peer} needs cannot be had")
        ENVIRONMENT.unpack(WHEELS[peer], sources)
        stamp.touch()
    return sources


def measure_peer(peer: str, scripts: Path, repetitions: int) -> list[Figure]:
    """Run a peer's script and read what it wrote. Raises UnavailableError."""
    script, *arguments = SCRIPTS[peer]
    if not (scripts / script).exists():
        raise UnavailableError(f"{script} is not there")
    sources = prepare(peer, scripts)
    output = HOME / f"{peer}.json"
    output.unlink(missing_ok=True)
    command = [str(ENVIRONMENT.python), str(scripts / script), "--reps", str(repetitions), *arguments]
    ENVIRONMENT.call(command, f"{script} failed", {f"{peer.upper()}_SRC": str(sources), "OUT": str(output)})
    return read_figures(json.loads(output.read_text()))


def read_figures(records: list[dict[str, object]]) -> list[Figure]:
    """The figures whose unit is a time."""
    figures: list[Figure] = []
    for record in records:
        scale = UNITS.get(str(record["unit"]))
        if scale is not None:
            median = record["median"]
            assert isinstance(median, int | float)
            figures.append(
                Figure(str(record["name"]), str(record.get("backend", "")), str(record.get("groups", "full")), scale * median)
            )
    return figures


def best(figures: Sequence[Figure], pattern: str, groups: str) -> Figure | None:
    """The fastest of the figures that a pattern names: of several back ends, the one to beat."""
    found = [figure for figure in figures if pattern and figure.groups == groups and re.search(pattern, figure.name)]
    return min(found, key=lambda figure: figure.seconds) if found else None


def comparison(ours: dict[str, Row], vllm: Sequence[Figure], sglang: Sequence[Figure]) -> str:
    """Our compiled figures and theirs, and how many times longer theirs are."""
    lines = [f"{'operation':<36}  {'ours':>11}  {'vLLM':>11}  {'times':>6}  {'SGLang':>11}  {'times':>6}"]
    for counterpart in COUNTERPARTS:
        row = ours.get(counterpart.title)
        if row is None:
            continue
        mine = row.median("compiled")
        line = f"{row.title:<36}  {readable(mine)}"
        theirs = (best(vllm, counterpart.vllm, counterpart.groups), best(sglang, counterpart.sglang, "full"))
        for figure in theirs:
            line += (
                f"  {readable(figure.seconds)}  {figure.seconds / mine:>6.1f}" if figure is not None else f"  {'-':>11}  {'-':>6}"
            )
        lines.append(line)
    return "\n".join(lines) if len(lines) > 1 else "no rows: nothing was measured"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.peers", description="Compares our figures with those of other cache managers.")
    parser.add_argument("--scripts", type=Path, required=True, help="the folder with the scripts that drive them")
    parser.add_argument("--reps", type=int, default=9)
    options = parser.parse_args()
    scripts = options.scripts.resolve()
    if not scripts.is_dir():
        print("bench-peers: SKIPPED, no folder with the peers' scripts; name it with PEERS=path")
        return 0
    if not is_built():
        parser.error("the package is not built: run `make bench-peers`")
    clock = Clock()
    machine = describe()
    theirs: dict[str, list[Figure]] = {"vllm": [], "sglang": []}
    reasons: list[str] = []
    ours: dict[str, Row] = {}
    for counterpart in COUNTERPARTS:
        try:
            ours[counterpart.title] = measure_row(counterpart.title, ["--values=9"], 2, ("compiled",))
        except WorkerFailedError as failure:
            reasons.append(f"ours failed: {failure}")
    for peer in theirs:
        try:
            theirs[peer] = measure_peer(peer, scripts, options.reps)
        except UnavailableError as reason:
            reasons.append(f"{peer}: not measured; {reason}")
        clock.say(peer)
    print(heading("Peers: prompt of 8,192 tokens, blocks of 32, one layer group unless the title says so", machine))
    print(comparison(ours, theirs["vllm"], theirs["sglang"]))
    print("\n".join(reasons))
    figures = {
        title: {
            "ours_s": row.median("compiled"),
            **{
                f"{peer}_s": found.seconds
                for peer, pattern, groups in (
                    ("vllm", counterpart.vllm, counterpart.groups),
                    ("sglang", counterpart.sglang, "full"),
                )
                if (found := best(theirs[peer], pattern, groups)) is not None
            },
        }
        for counterpart in COUNTERPARTS
        if (title := counterpart.title) in ours
        for row in [ours[title]]
    }
    write(ROOT / "bench" / "results" / "peers.json", {"machine": machine, "figures": figures, "versions": WHEELS})
    return 0


if __name__ == "__main__":
    sys.exit(main())
