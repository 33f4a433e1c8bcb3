"""Pictures of plans and replays: what is recorded for them, that they can be drawn, and what is said where they cannot."""

from __future__ import annotations

import sys
import xml.etree.ElementTree
from itertools import pairwise
from pathlib import Path

import pytest

from kv_cache_manager_v2 import CacheTier
from kv_cache_manager_v2.cli.capacity import TierBlocks, plan_capacity
from kv_cache_manager_v2.cli.contents import token_source
from kv_cache_manager_v2.cli.main import main
from kv_cache_manager_v2.cli.recording import Recorder
from kv_cache_manager_v2.cli.serving import Engine
from kv_cache_manager_v2.cli.trace_lines import TraceRecord
from tests.cli.helpers import make_prompts, write_trace
from tests.cli.test_replay import BLOCK

TIERS = [TierBlocks(CacheTier.GPU_MEM, 14), TierBlocks(CacheTier.HOST_MEM, 10)]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return write_trace(tmp_path / "trace", make_prompts(3, 90, BLOCK))


def test_a_recorder_counts_what_the_manager_counts() -> None:
    """Every page that leaves a tier has an age; samples are in order, and the last one has all requests and hits."""
    records = [TraceRecord(prompt.length, 0, list(prompt.ids)) for prompt in make_prompts(3, 90, BLOCK, whole_blocks=True)]
    recorder = Recorder(len(records), ["gpu", "host"], BLOCK)
    capacity = plan_capacity(TIERS, BLOCK, 0, "/tmp", exclusive=True)
    engine = Engine(capacity, token_source(BLOCK, 0), concurrency=1, decode=False, verify=False, recorder=recorder)
    outcome = engine.run(records, lambda _done: None)
    engine.close()
    assert sum(recorder.ages["gpu to host"]) == outcome.pages_moved[0][1] > 0
    assert sum(recorder.ages["dropped"]) == sum(outcome.pages_dropped) > 0
    samples = recorder.samples
    admitted = [0, *(sample.admitted for sample in samples)]
    assert all(1 <= now - then <= 2 for then, now in pairwise(admitted))
    assert (samples[-1].admitted, samples[-1].hit_tokens) == (90, outcome.hit_tokens_by_level)
    assert samples[-1].occupied == [1.0, 1.0]
    assert samples[0].occupied[0] < 1


def test_the_age_of_a_page_is_the_number_of_requests_since_its_use() -> None:
    """Blocks 1 and 2 are used by requests 0 and 2, and leave the GPU for those of request 7."""
    recorder = Recorder(8, ["gpu", "host"], BLOCK)
    engine = Engine(
        plan_capacity(TIERS, BLOCK, 0, "/tmp"), token_source(BLOCK, 0), concurrency=1, decode=False, verify=False, recorder=recorder
    )
    rows = [[1, 2], [3], [1, 2], [4], [5], [6], [4], list(range(10, 21))]
    engine.run([TraceRecord(len(ids) * BLOCK, 0, ids) for ids in rows], lambda _done: None)
    engine.close()
    # 17 blocks in 14 slots: block 3 has the age 6, block 2 and block 1 have 5; all are from 4 to 7
    assert recorder.ages == {"gpu to host": [0, 0, 0, 3]}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.svg", ["plan", "--policies", "lru,best", "--gpu-blocks", "30"]),
        ("a.svg", ["plan", "--bytes-per-token", "1000000", "--layers", "full+ssm", "--points", "4"]),
        ("a.PNG", ["replay", "--gpu-blocks", "60", "--host-blocks", "40", "--bytes-per-token", "1000000"]),
        ("a.svg", ["replay"]),
    ],
)
def test_a_picture_is_drawn_where_matplotlib_is_installed(trace: str, tmp_path: Path, name: str, options: list[str]) -> None:
    """Also where nothing is evicted or moved, which leaves views empty."""
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    assert main([*options, trace, "--tokens-per-block", "8", "--plot", str(path)]) == 0
    if name.endswith(".svg"):
        assert xml.etree.ElementTree.parse(path).getroot().tag.endswith("svg")
    else:
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("package", "options", "remedy"),
    [
        ("matplotlib", ["plan", "--plot", "curve.png"], "--plot needs matplotlib: pip install 'kv-cache-manager-v2[plot]'"),
        ("matplotlib", ["replay", "--plot", "curve.png"], "--plot needs matplotlib: pip install 'kv-cache-manager-v2[plot]'"),
        ("rich", ["plan", "--format", "bars"], "--format bars needs rich: pip install 'kv-cache-manager-v2[cli]'"),
    ],
)
def test_a_missing_package_is_one_line_and_leaves_no_file(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    trace: str,
    tmp_path: Path,
    package: str,
    options: list[str],
    remedy: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    assert main([*options, trace]) == 2
    assert capsys.readouterr().err == f"kvcm: error: {remedy}\n"
    assert not Path("curve.png").exists()


@pytest.mark.parametrize("tool", ["plan", "replay"])
def test_a_picture_that_cannot_be_written_is_found_before_the_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    monkeypatch.setattr("kv_cache_manager_v2.cli.pictures.require_matplotlib", lambda: None)
    assert main([tool, "/no/such/trace", "--plot", "/no/such/folder/a.svg"]) == 2
    assert capsys.readouterr().err == "kvcm: error: --plot /no/such/folder/a.svg: No such file or directory\n"
