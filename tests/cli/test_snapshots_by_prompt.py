"""`kvcm replay --snapshots prompt`: states at the last block boundary of a prompt, and where it leaves those before it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kv_cache_manager_v2.cli.main import main
from tests.cli.helpers import Prompt, infinite_cache_hits, make_prompts, write_trace

BLOCK = 32


def allowed_hits(prompts: Sequence[Prompt]) -> list[int]:
    """What unlimited memory finds: the longest prefix of whole blocks that has a state."""
    states: set[tuple[int, ...]] = set()
    hits: list[int] = []
    for prompt, known in zip(prompts, infinite_cache_hits(prompts, BLOCK), strict=True):
        whole = prompt.length // BLOCK
        hit = max((count for count in range(1, whole + 1) if prompt.ids[:count] in states), default=0)
        hits.append(hit * BLOCK)
        last = (prompt.length - 1) // BLOCK
        branch = min(known // BLOCK, last)
        states |= {prompt.ids[:count] for count in (branch, last, whole if whole * BLOCK == prompt.length else 0) if count > hit}
    return hits


def replay(capsys: pytest.CaptureFixture[str], trace: str, *options: str) -> dict[str, Any]:
    arguments = ["replay", trace, "--trace-block-size", str(BLOCK), "--layers", "full+ssm", "--snapshots", "prompt", *options]
    assert main([*arguments, "--format", "json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.parametrize("seed", range(3))
def test_with_room_for_all_states_every_hit_is_found_that_they_allow(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With slots of their own or not; and fewer slots find less."""
    prompts = make_prompts(seed, 80, BLOCK)
    trace = write_trace(tmp_path / "trace", prompts)
    report = replay(capsys, trace, "--state-slots", "500", "--verify")
    assert report["states"] == 500
    assert report["page_mismatches"] == 0 < report["pages_checked"]
    assert report["whole"]["hit_tokens"] == sum(allowed_hits(prompts)) == replay(capsys, trace)["whole"]["hit_tokens"]
    few = replay(capsys, trace, "--state-slots", "4")
    assert 0 < few["whole"]["hit_tokens"] < report["whole"]["hit_tokens"]
    assert few["pages_dropped"] > 0


def test_generated_tokens_leave_a_state_where_they_fill_a_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "trace", make_prompts(3, 40, BLOCK))
    report = replay(capsys, trace, "--decode", "--verify", "--concurrency", "3", "--tokens-per-block", "4")
    assert report["page_mismatches"] == 0 < report["generated_tokens"]
    assert main(["replay", trace, "--trace-block-size", "32", "--layers", "full+ssm", "--snapshots", "prompt"]) == 0
    assert "full+ssm, snapshots by prompt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--snapshots", "prompt"], "--snapshots prompt has no effect with --layers full;"),
        (["--state-slots", "9"], "--state-slots has no effect with --layers full;"),
        (["--layers", "full+ssm", "--snapshots", "prompt", "--snapshot-every", "9"], "--snapshot-every has no effect"),
        (
            ["--layers", "full+ssm", "--state-slots", "9", "--host-blocks", "9"],
            "--host-blocks cannot be combined with --state-slots",
        ),
        (["--layers", "full+ssm", "--state-slots", "9", "--plot", "a.png"], "--plot cannot be combined with --state-slots"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "no-such-file", *options]) == 2
    assert message in capsys.readouterr().err
