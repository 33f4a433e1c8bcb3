"""The work that hits save, against sums over single tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kv_cache_manager_v2.cli.layers import make_layers
from kv_cache_manager_v2.cli.main import main
from kv_cache_manager_v2.cli.work import ModelShape, flops, keys_read, work_saved
from tests.cli.helpers import make_prompts, write_trace

PRESETS = {name: make_layers(name, 8) for name in ("full", "full+ssm")} | {
    "full+window": make_layers("full+window", 8, window=5),
    "window-sinks": make_layers("window-sinks", 8, window=5, sinks=3),
}
LAYERS = {"full": (7,), "full+ssm": (3, 4), "full+window": (3, 4), "window-sinks": (7,)}


@pytest.mark.parametrize("name", PRESETS)
def test_work_is_the_sum_over_the_tokens_and_what_they_read(name: str) -> None:
    """A query reads itself, the window before it, and the sinks before that."""
    layers = PRESETS[name]
    shape = ModelShape(1000.0, 10, LAYERS[name])
    for num_tokens in range(20):
        total = 2 * 1000.0 * num_tokens
        for kind, count in zip(layers.kinds, shape.layers, strict=True):
            read = 0
            for position in range(num_tokens):
                seen = [
                    key for key in range(position + 1) if kind.window is None or position - key < kind.window or key < kind.sinks
                ]
                read += 1 if kind.recurrent else len(seen)
            assert keys_read(kind, num_tokens) == read
            total += 0 if kind.recurrent else 4 * 10 * count * read
        assert flops(shape, layers, num_tokens) == total


def test_the_first_tokens_of_a_prompt_are_cheaper_than_the_last() -> None:
    work = work_saved(PRESETS["full"], ModelShape(1e-9, 1, (1,)), [50, 0], [100, 100])
    assert work["by_layers"]["full"]["ratio"] == 1275 / 10100
    assert work["flops"]["ratio"] == pytest.approx(1275 / 10100)
    assert work_saved(PRESETS["full"], None, [], [])["by_layers"]["full"]["ratio"] == 0


@pytest.mark.parametrize(("layers", "shape"), [("full", "8e9,4096,32"), ("full+ssm", "8e9,4096,8+24")])
def test_a_replay_reports_work(layers: str, shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "t.jsonl", make_prompts(1, 30, 32))
    options = ["replay", trace, "--trace-block-size", "32", "--layers", layers]
    assert main([*options, "--model-shape", shape, "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    whole = report["work_saved"]["whole"]
    assert 0 < whole["by_layers"]["full"]["ratio"] < whole["flops"]["ratio"] < report["whole"]["hit_ratio"]
    assert main(options) == 0
    table = capsys.readouterr().out
    assert "keys read in full layers" in table
    assert "FLOPs" not in table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8e9", "is not PARAMETERS,WIDTH,LAYERS"),
        ("8e9,4096,a", "is not PARAMETERS,WIDTH,LAYERS"),
        ("nan,4096,32", "out of range"),
        ("8e9,0,32", "out of range"),
        ("8e9,4096,-1", "out of range"),
        ("8e9,4096,8+24", "layers of 2 kinds; --layers full has full"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "no-such-file", "--model-shape", text]) == 2
    assert message in capsys.readouterr().err
