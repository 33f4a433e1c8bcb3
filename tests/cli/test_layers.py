"""`kvcm replay --layers`: hybrid models lose no hit that the rules of a match allow, and what is reused is what it should be.

With KVCM_TRACE=FILE, a Mooncake-format trace of 512-token blocks, its first 500 requests are compared too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kv_cache_manager_v2 import CacheTier, introspection
from kv_cache_manager_v2.cli.capacity import TierBlocks, plan_capacity
from kv_cache_manager_v2.cli.contents import FINGERPRINT_BYTES, NumpyTokenSource
from kv_cache_manager_v2.cli.layers import Layers, make_layers
from kv_cache_manager_v2.cli.main import main
from kv_cache_manager_v2.cli.serving import Engine, Outcome
from kv_cache_manager_v2.cli.trace_lines import TraceRecord
from kv_cache_manager_v2.cli.traces import read_trace
from tests.cli.helpers import Prompt, infinite_cache_hits, make_prompts, write_trace
from tests.cli.reference import Kind, Name, Reference

BLOCK = 32  # tokens a trace block of the synthetic trace
PRESETS: list[tuple[str, int | None, int | None, int | None]] = [  # preset, window, sinks, snapshots
    ("full", None, None, None),
    ("full+window", 20, None, None),
    ("full+window", 1, None, None),
    ("full+window", 100, None, None),
    ("window-sinks", 40, 5, None),
    ("window-sinks", 33, 0, None),
    ("full+ssm", None, None, None),
    ("full+ssm", None, None, 8),
    ("full+ssm", None, None, 50),
    ("full+ssm", None, None, 1000),
]


def kinds_of(preset: str, window: int | None, sinks: int | None) -> list[Kind]:
    """The preset as the reference knows it."""
    full, windowed = Kind("full"), Kind("window", window, sinks or 0)
    return {
        "full": [full],
        "full+window": [full, windowed],
        "window-sinks": [windowed],
        "full+ssm": [full, Kind("ssm", recurrent=True)],
    }[preset]


def arguments_of(preset: str, window: int | None, sinks: int | None, every: int | None) -> list[str]:
    options = [("--layers", preset), ("--window", window), ("--sinks", sinks), ("--snapshot-every", every)]
    return [text for name, value in options if value is not None for text in (name, str(value))]


def allowed_hits(prompts: Sequence[Prompt], reference: Reference, every: int | None) -> list[int]:
    """What an unlimited cache may reuse of each prompt, when each is committed from snapshot to snapshot."""
    hits = []
    for prompt in prompts:
        hit = reference.match(prompt)
        hits.append(hit)
        ends = range((hit // every + 1) * every, prompt.length, every) if every is not None else ()
        for end in (*ends, prompt.length):
            reference.commit(prompt, end)
    return hits


def replay(capsys: pytest.CaptureFixture[str], *arguments: object, block: int = BLOCK) -> dict[str, Any]:
    assert main(["replay", *map(str, arguments), "--trace-block-size", str(block), "--format", "json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def pages_of(hits: Sequence[int], reference: Reference) -> dict[str, int]:
    """Pages that these hits load, by kind."""
    loaded = [reference.loaded(hit) for hit in hits]
    return {kind.name: sum(pages[kind.name] for pages in loaded) for kind in reference.kinds}


def found_pages(report: dict[str, Any]) -> dict[str, int]:
    return {kind: sum(row.values()) for kind, row in report["hits_by_life_cycle"].items()}


@pytest.mark.parametrize(("preset", "window", "sinks", "every"), PRESETS)
@pytest.mark.parametrize("tokens_per_block", [8, 32, 64])
def test_with_room_for_all_every_hit_is_found_that_the_rules_allow(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    preset: str,
    window: int | None,
    sinks: int | None,
    every: int | None,
    tokens_per_block: int,
) -> None:
    """Pages of windows and states included; contents are checked at each reuse."""
    prompts = make_prompts(7, 60, BLOCK)
    options = arguments_of(preset, window, sinks, every)
    report = replay(capsys, write_trace(tmp_path / "t", prompts), "--tokens-per-block", tokens_per_block, "--verify", *options)
    reference = Reference(kinds_of(preset, window, sinks), tokens_per_block, BLOCK)
    hits = allowed_hits(prompts, reference, (every or BLOCK) if preset == "full+ssm" else None)
    assert report["whole"]["hit_tokens"] == sum(hits)
    assert found_pages(report) == pages_of(hits, reference)
    assert report["page_mismatches"] == report["pages_dropped"] == 0
    assert report["pages_checked"] > 0
    if preset != "full+ssm":
        assert hits == infinite_cache_hits(prompts, BLOCK), "no hit needs a block that has left the window"


class WatchfulSource(NumpyTokenSource):
    """Asks, before each look-up, what the pages that are cached at that moment allow."""

    def __init__(self, reference: Reference, prompts: Sequence[Prompt]) -> None:
        super().__init__(BLOCK, 0)
        self.reference = reference
        self.prompts = prompts
        self.engine: Engine | None = None
        self.allowed: list[int] = []

    def prompt(self, block_ids: Sequence[int], num_tokens: int) -> Any:
        self.reference.pages.clear()
        self.reference.children.clear()
        assert self.engine is not None
        for block in introspection.all_tree_blocks(self.engine.manager):
            pages = [(kind, introspection.page_of(block, index)) for index, kind in enumerate(self.reference.kinds)]
            self.reference.put(self.name_of(block), {kind.name: page.coverage for kind, page in pages if page is not None})
        self.allowed.append(self.reference.match(self.prompts[len(self.allowed)]))
        return super().prompt(block_ids, num_tokens)

    def name_of(self, block: Any) -> Name:
        """Ids are numbered as they appear, and so are the blocks of this source: a token says whose it is."""
        tokens: list[int] = []
        while block is not None:
            tokens = [*block.token_list(), *tokens]
            block = block.parent_block()
        return tuple(token // BLOCK for token in tokens[::BLOCK]), len(tokens)


@pytest.mark.parametrize(("preset", "window", "sinks", "every"), PRESETS)
@pytest.mark.parametrize("tiers", [(60,), (40, 20), (30, 10, 30)])
def test_under_pressure_every_hit_is_found_that_the_cached_pages_allow(
    tmp_path: Path, preset: str, window: int | None, sinks: int | None, every: int | None, tiers: tuple[int, ...]
) -> None:
    """Pages of every kind come and go between tiers and are dropped; the reference looks at those that are left."""
    prompts = make_prompts(3, 80, BLOCK)
    reference = Reference(kinds_of(preset, window, sinks), 16, BLOCK)
    source = WatchfulSource(reference, prompts)
    layers = make_layers(preset, BLOCK, window, sinks, every)
    outcome = serve(source, layers, prompts, tiers, str(tmp_path))
    assert outcome.hit_tokens == source.allowed
    assert outcome.num_mismatches == 0
    assert outcome.skipped == []
    assert sum(outcome.pages_dropped) > 0
    assert {kind.name: sum(row) for kind, row in zip(reference.kinds, outcome.hit_pages, strict=True)} == pages_of(
        source.allowed, reference
    )


def serve(source: WatchfulSource, layers: Layers, prompts: Sequence[Prompt], tiers: Sequence[int], disk: str) -> Outcome:
    """One request after the other, in tiers of so many blocks."""
    wanted = [TierBlocks(tier, count) for tier, count in zip(CacheTier, tiers, strict=False)]
    capacity = plan_capacity(wanted, 16, FINGERPRINT_BYTES * 16, disk, layers)
    assert capacity.num_blocks == list(tiers)
    engine = Engine(capacity, source, concurrency=1, decode=False, verify=True)
    source.engine = engine
    outcome = engine.run([TraceRecord(prompt.length, 0, list(prompt.ids)) for prompt in prompts], lambda _done: None)
    engine.close()
    return outcome


@pytest.mark.parametrize(("preset", "window", "sinks", "every"), PRESETS)
def test_many_requests_at_once_that_generate_read_what_they_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], preset: str, window: int | None, sinks: int | None, every: int | None
) -> None:
    """Suspended and resumed with windows half committed and with states between two snapshots."""
    tiers = ("--gpu-blocks", 27, "--host-blocks", 10, "--disk-blocks", 60, "--disk-path", tmp_path)
    options = [*tiers, "--tokens-per-block", 16, "--concurrency", 6, "--decode", "--verify"]
    prompts = make_prompts(5, 60, BLOCK)
    report = replay(capsys, write_trace(tmp_path / "t", prompts), *options, *arguments_of(preset, window, sinks, every))
    assert report["page_mismatches"] == 0
    assert report["suspensions"] > 0
    assert report["skipped_requests"] == 0
    assert report["generated_tokens"] >= sum(prompt.output for prompt in prompts)


def test_the_report_names_the_layers_and_their_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "t", make_prompts(1, 10, BLOCK))
    keys = ("layers", "window", "sinks", "snapshot_every")
    found = {}
    for preset in ("full", "full+window", "window-sinks", "full+ssm"):
        report = replay(capsys, trace, "--layers", preset, "--gpu-blocks", 100)
        found[preset] = tuple(report[key] for key in keys)
        assert report["blocks"] == {"gpu": 100}
        assert report["pages"] == {"gpu": 200 if "+" in preset else 100}
        assert list(report["hits_by_life_cycle"]) == preset.replace("window-sinks", "window").split("+")
    assert found == {
        "full": ("full", None, None, None),
        "full+window": ("full+window", 1024, 0, None),
        "window-sinks": ("window-sinks", 1024, 4, None),
        "full+ssm": ("full+ssm", None, None, BLOCK),
    }


def test_the_table_has_a_line_for_each_kind_of_layer_and_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "t", make_prompts(1, 10, BLOCK))
    options = ["--layers", "full+ssm", "--snapshot-every", "16", "--gpu-blocks", "100", "--host-blocks", "10"]
    assert main(["replay", trace, "--trace-block-size", str(BLOCK), *options]) == 0
    lines = [line.strip().split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.startswith("pages of")] == [
        f"pages of {kind} layers, on {tier}" for kind in ("full", "ssm") for tier in ("gpu", "host")
    ]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--layers", "half"], "'half'"),
        (["--window", "5"], "--window has no effect with --layers full"),
        (["--layers", "full+window", "--window", "0"], "0 is not at least 1"),
        (["--layers", "full+window", "--sinks", "4"], "--sinks has no effect with --layers full+window"),
        (["--layers", "window-sinks", "--sinks", "-1"], "-1 is negative"),
        (["--layers", "window-sinks", "--snapshot-every", "64"], "--snapshot-every has no effect with --layers window-sinks"),
        (["--layers", "full+ssm", "--window", "64"], "--window has no effect with --layers full+ssm"),
    ],
)
def test_an_option_that_the_layers_do_not_have_is_refused(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "x", *options]) == 2
    captured = capsys.readouterr()
    assert reason in captured.err
    assert captured.err.count("\n") == 1


TRACE = os.environ.get("KVCM_TRACE", "")


@pytest.mark.slow
@pytest.mark.skipif(not TRACE, reason="KVCM_TRACE names no trace")
@pytest.mark.parametrize(
    ("preset", "window", "sinks", "every"),
    [
        *PRESETS[:1],
        ("full+window", 1024, None, None),
        ("window-sinks", 1024, 4, None),
        *PRESETS[6:7],
        ("full+ssm", None, None, 300),
    ],
)
def test_no_hit_of_a_recorded_trace_is_lost_that_the_rules_allow(
    capsys: pytest.CaptureFixture[str], preset: str, window: int | None, sinks: int | None, every: int | None
) -> None:
    records = read_trace(TRACE, 512, max_records=500).records
    prompts = [Prompt(record.input_length, tuple(record.block_ids), 0) for record in records]
    options = ["--tokens-per-block", 128, "--max-records", 500, "--verify", *arguments_of(preset, window, sinks, every)]
    report = replay(capsys, TRACE, *options, block=512)
    reference = Reference(kinds_of(preset, window, sinks), 128, 512)
    hits = allowed_hits(prompts, reference, (every or 512) if preset == "full+ssm" else None)
    assert report["whole"]["hit_tokens"] == sum(hits)
    assert found_pages(report) == pages_of(hits, reference)
    assert report["page_mismatches"] == 0
