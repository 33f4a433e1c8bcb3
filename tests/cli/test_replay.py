"""`kvcm replay` through the real manager: its figures against the oracles, its options, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from kv_cache_manager_v2 import CacheTier
from kv_cache_manager_v2.build import COMPILED
from kv_cache_manager_v2.cli.capacity import TierBlocks, plan_capacity
from kv_cache_manager_v2.cli.contents import FINGERPRINT_BYTES, NumpyTokenSource
from kv_cache_manager_v2.cli.main import main
from kv_cache_manager_v2.cli.serving import Engine
from kv_cache_manager_v2.cli.trace_lines import TraceRecord
from tests.cli.helpers import Prompt, child_environment, infinite_cache_hits, lru_cache_hits, make_prompts, write_trace

if TYPE_CHECKING:
    from kv_cache_manager_v2.cli.contents import TokenBuffer

BLOCK = 32  # tokens a trace block


def replay(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> dict[str, Any]:
    """Run the command in JSON and return its report."""
    assert main(["replay", *map(str, arguments), "--trace-block-size", str(BLOCK), "--format", "json"]) == status
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def summary(hits: list[int], prompts: list[Prompt]) -> dict[str, Any]:
    total = sum(prompt.length for prompt in prompts)
    return {"hit_tokens": sum(hits), "total_tokens": total, "hit_ratio": sum(hits) / total}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tokens_per_block", [8, 32, 64])
def test_with_room_for_all_the_hits_are_those_of_an_infinite_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int, tokens_per_block: int
) -> None:
    prompts = make_prompts(seed, 60, BLOCK)
    report = replay(capsys, write_trace(tmp_path / "t", prompts), "--tokens-per-block", tokens_per_block, "--verify")
    hits = infinite_cache_hits(prompts, BLOCK)
    assert report["whole"] == summary(hits, prompts)
    assert report["last_half"] == summary(hits[30:], prompts[30:])
    assert report["hit_tokens_by_tier"] == {"gpu": sum(hits)}
    assert report["requests"] == 60
    assert report["pages_dropped"] == report["suspensions"] == report["page_mismatches"] == 0
    assert report["pages_checked"] > 0
    assert report["build"] == ("compiled" if COMPILED else "interpreted")


def test_the_last_half_of_an_odd_number_of_requests_has_the_middle_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = make_prompts(0, 7, BLOCK)
    report = replay(capsys, write_trace(tmp_path / "t", prompts))
    assert report["last_half"]["total_tokens"] == sum(prompt.length for prompt in prompts[3:])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_blocks", [14, 20, 33, 60])
def test_one_tier_finds_what_an_lru_list_of_blocks_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int, num_blocks: int
) -> None:
    """Exactly, where prompts end at block boundaries: no private copy of a tail takes a block for a while."""
    prompts = make_prompts(seed, 80, BLOCK, whole_blocks=True)
    trace = write_trace(tmp_path / "t", prompts)
    report = replay(capsys, trace, "--tokens-per-block", BLOCK, "--gpu-blocks", num_blocks, "--verify")
    hits = lru_cache_hits(prompts, BLOCK, BLOCK, num_blocks)
    assert report["blocks"] == {"gpu": num_blocks}
    assert report["whole"] == summary(hits, prompts)
    assert report["pages_dropped"] > 0
    assert report["page_mismatches"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_tiers_together_find_what_one_list_of_all_their_blocks_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """What leaves the GPU goes to the host, then to the disk, and only then is dropped; a hit brings it back."""
    prompts = make_prompts(seed, 80, BLOCK, whole_blocks=True)
    tiers = ("--gpu-blocks", 14, "--host-blocks", 10, "--disk-blocks", 14, "--disk-path", tmp_path)
    report = replay(capsys, write_trace(tmp_path / "t", prompts), "--tokens-per-block", BLOCK, *tiers, "--exclusive", "--verify")
    assert report["blocks"] == {"gpu": 14, "host": 10, "disk": 14}
    assert report["whole"] == summary(lru_cache_hits(prompts, BLOCK, BLOCK, 38), prompts)
    assert sum(report["hit_tokens_by_tier"].values()) == report["whole"]["hit_tokens"]
    assert report["hit_tokens_by_tier"]["host"] > 0
    assert report["hit_tokens_by_tier"]["disk"] > 0
    assert report["pages_moved"]["gpu"]["host"] > 0
    assert report["pages_moved"]["disk"]["gpu"] > 0
    assert report["pages_dropped"] == report["pages_dropped_by_tier"]["disk"] > 0
    assert report["page_mismatches"] == 0


@pytest.mark.parametrize("admission", ["all", "second_use", "adaptive"])
def test_inclusive_tiers_write_less_and_find_right_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], admission: str
) -> None:
    """Tiers are inclusive unless told otherwise. Pages that come back a second time are not written a second time."""
    trace = write_trace(tmp_path / "t", make_prompts(1, 80, BLOCK, whole_blocks=True))
    tiers = ("--gpu-blocks", 14, "--host-blocks", 30, "--disk-blocks", 28, "--disk-path", tmp_path, "--disk-admission", admission)
    options = (trace, "--tokens-per-block", BLOCK, *tiers, "--verify")
    default, inclusive, exclusive = [replay(capsys, *options, *option) for option in ((), ("--inclusive",), ("--exclusive",))]
    assert default["pages_moved"] == inclusive["pages_moved"]
    assert inclusive["pages_returned"]["host"] > 0
    assert sum(exclusive["pages_returned"].values()) == 0
    assert inclusive["pages_moved"]["gpu"]["host"] < exclusive["pages_moved"]["gpu"]["host"]
    assert inclusive["page_mismatches"] == exclusive["page_mismatches"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_partial_tails_cost_a_small_cache_little(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    prompts = make_prompts(seed, 80, BLOCK)
    report = replay(capsys, write_trace(tmp_path / "t", prompts), "--tokens-per-block", 8, "--gpu-blocks", 120, "--verify")
    found, expected = report["whole"]["hit_ratio"], summary(lru_cache_hits(prompts, BLOCK, 8, 120), prompts)["hit_ratio"]
    assert abs(found - expected) < 0.02
    assert report["pages_moved"]["gpu"]["gpu"] > 0  # the copies of partly matched tails
    assert report["page_mismatches"] == 0


class ForgetfulSource(NumpyTokenSource):
    """Says other fingerprints each time, as if the pages had changed between a request and the next."""

    asked = 0

    def fingerprints(self, tokens: TokenBuffer) -> bytes:
        self.asked += 1
        return bytes([self.asked]) * (FINGERPRINT_BYTES * len(tokens))


def test_verification_notices_a_page_that_holds_something_else() -> None:
    capacity = plan_capacity([TierBlocks(CacheTier.GPU_MEM, 10)], BLOCK, FINGERPRINT_BYTES * BLOCK, "/tmp")
    engine = Engine(capacity, ForgetfulSource(BLOCK, 0), concurrency=1, decode=False, verify=True)
    outcome = engine.run([TraceRecord(3 * BLOCK, 0, [1, 2, 3]), TraceRecord(3 * BLOCK, 0, [1, 2, 4])], lambda _done: None)
    engine.close()
    assert outcome.num_mismatches == 4  # blocks 0 and 1 of the second request, found and again at its end
    assert outcome.mismatches[0] == "request 1, block 0: token 0 of 32 is another's"


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("tiers", [("--host-blocks", 40), ("--host-blocks", 6, "--disk-blocks", 40), ()])
def test_requests_open_at_once_wait_for_each_other_and_all_are_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], decode: bool, tiers: tuple[object, ...]
) -> None:
    """With colder tiers the newest are suspended; without, their pages stay in the way and they start again later."""
    prompts = make_prompts(5, 60, BLOCK)
    options = [*tiers, "--disk-path", tmp_path, "--concurrency", 6, *(["--decode"] if decode else [])]
    report = replay(
        capsys, write_trace(tmp_path / "t", prompts), "--tokens-per-block", BLOCK, "--gpu-blocks", 20, *options, "--verify"
    )
    assert report["suspensions"] > 0
    assert report["skipped_requests"] == 0
    assert report["page_mismatches"] == 0
    assert 0 < report["whole"]["hit_tokens"] <= sum(infinite_cache_hits(prompts, BLOCK))
    assert report["generated_tokens"] >= (sum(prompt.output for prompt in prompts) if decode else 0)


def test_a_request_that_never_fits_is_skipped_and_counts_as_a_miss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = Prompt(4 * BLOCK, (0, 1, 2, 3), 0)
    large = Prompt(10 * BLOCK, (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), 0)
    trace = write_trace(tmp_path / "t", [small, large, small])
    for concurrency in (1, 3):
        report = replay(capsys, trace, "--tokens-per-block", BLOCK, "--gpu-blocks", 8, "--concurrency", concurrency)
        assert report["skipped_requests"] == 1
        assert report["requests"] == 3
        assert report["whole"] == {"hit_tokens": small.length, "total_tokens": 18 * BLOCK, "hit_ratio": 4 / 18}
        assert sum(report["hit_tokens_by_tier"].values()) == small.length


def test_the_seed_and_max_records_do_what_they_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = make_prompts(1, 40, BLOCK)
    trace = write_trace(tmp_path / "t", prompts)
    first, second = (replay(capsys, trace, "--seed", seed, "--max-records", 25) for seed in (0, 99))
    assert first["whole"] == second["whole"] == summary(infinite_cache_hits(prompts[:25], BLOCK), prompts[:25])
    assert (first["seed"], second["seed"]) == (0, 99)


def test_a_trace_without_ids_for_partial_blocks_hits_its_full_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt of two ids and a half, twice: the ids are found, the rest is computed again."""
    prompt = {"timestamp": 0, "input_length": 2 * BLOCK + 16, "output_length": 0, "hash_ids": [1, 2]}
    trace = tmp_path / "t"
    trace.write_text(f"{json.dumps(prompt)}\n" * 2)
    report = replay(capsys, trace, "--tokens-per-block", 8, "--verify")
    assert report["whole"]["hit_tokens"] == 2 * BLOCK
    assert report["trace_taken_for"] == "mooncake, ids of 32 tokens, partly filled last blocks have no id"
    assert report["pages_dropped"] == report["page_mismatches"] == 0


def test_sizes_in_gib_become_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "t", make_prompts(1, 10, BLOCK))
    sizes = ("--gpu-gib", 1, "--host-gib", 0.5, "--bytes-per-token", 1 << 20)
    assert replay(capsys, trace, "--tokens-per-block", 8, *sizes)["blocks"] == {"gpu": 128, "host": 64}


def test_the_table_has_the_same_figures_and_goes_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = make_prompts(2, 40, BLOCK)
    output = tmp_path / "report.txt"
    trace = write_trace(tmp_path / "t", prompts)
    assert main(["replay", trace, "--trace-block-size", str(BLOCK), "--output", str(output)]) == 0
    assert capsys.readouterr().out == ""
    hits = sum(infinite_cache_hits(prompts, BLOCK))
    total = sum(prompt.length for prompt in prompts)
    assert f"{hits:,} of {total:,} ({100 * hits / total:.2f} %)" in output.read_text()


def test_bad_lines_stop_the_replay_or_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Path(write_trace(tmp_path / "t", make_prompts(2, 10, BLOCK)))
    trace.write_text(trace.read_text() + '{"timestamp": 1}\n')
    assert main(["replay", str(trace), "--trace-block-size", str(BLOCK)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvcm: error: {trace}, line 11: field 'input_length' is missing")
    assert error.count("\n") == 1
    report = replay(capsys, trace, "--skip-bad-lines")
    assert (report["requests"], report["bad_lines"]) == (10, 1)
    assert report["bad_line_reasons"] == [{"line": 11, "reason": "field 'input_length' is missing"}]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "TOOL"),
        (["play"], "play"),
        (["replay"], "TRACE"),
        (["replay", "/no/such/file"], "/no/such/file: No such file or directory"),
        (["replay", "x", "--gpu-blocks", "0"], "0 is not at least 1"),
        (["replay", "x", "--gpu-blocks", "many"], "'many' is not an integer"),
        (["replay", "x", "--gpu-blocks", "5", "--gpu-gib", "1"], "not allowed with"),
        (["replay", "x", "--gpu-gib", "nan"], "nan is not finite"),
        (["replay", "x", "--gpu-gib", "1"], "--gpu-gib needs --bytes-per-token"),
        (["replay", "x", "--bytes-per-token", "1"], "--bytes-per-token has no effect without"),
        (["replay", "x", "--gpu-gib", "1e-9", "--bytes-per-token", "100"], "less than one block"),
        (["replay", "x", "--disk-blocks", "5", "--disk-path", "/no/such/folder"], "no such directory"),
        (["replay", "x", "--output", "/no/such/folder/report"], "--output /no/such/folder/report: No such file or directory"),
        (["replay", "x", "--output", "/"], "cannot be written"),
        (["replay", "x", "--output", "/proc/kvcm"], "--output /proc/kvcm: "),
        (["replay", "x", "--seed", "-1"], "-1 is negative"),
        (["replay", "x", "--gpu-gib", "1e300", "--bytes-per-token", "1"], "1e+300 is more than"),
        (["replay", "x", "--host-gib", "1e308", "--bytes-per-token", "1"], "1e+308 is more than"),
        (["replay", "x", "--disk-blocks", str(1 << 41)], "--disk-blocks: more than"),
        (["replay", "x", "--tokens-per-block", "9" * 400], "is too large"),
        (["replay", "x", "--window", "9" * 5000], "is not an integer"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvcm")
    assert reason in captured.err
    assert captured.err.count("\n") == 1


def test_running_out_of_memory_is_one_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace block of a million million tokens is legal, and more than there is room for."""

    def refuse(block_size: int, seed: int) -> NoReturn:
        raise MemoryError("Unable to allocate 7.28 TiB")

    monkeypatch.setattr("kv_cache_manager_v2.cli.replay.token_source", refuse)
    trace = write_trace(tmp_path / "t", make_prompts(2, 10, BLOCK))
    assert main(["replay", str(trace), "--trace-block-size", str(BLOCK)]) == 2
    assert capsys.readouterr().err == "kvcm: error: out of memory: Unable to allocate 7.28 TiB\n"


def test_the_module_runs_as_a_program_and_reads_standard_input(tmp_path: Path) -> None:
    text = Path(write_trace(tmp_path / "t", make_prompts(2, 10, BLOCK))).read_bytes()
    command = [sys.executable, "-m", "kv_cache_manager_v2", "replay", "-", "--trace-block-size", str(BLOCK), "--format", "json"]
    done = subprocess.run(command, input=text, capture_output=True, check=True, timeout=120, cwd=tmp_path, env=child_environment())
    report = json.loads(done.stdout)
    assert report["requests"] == 10
    assert report["build"] == ("compiled" if COMPILED else "interpreted")
    assert done.stderr == b""


def test_without_numpy_the_figures_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An interpreter in which numpy cannot be imported."""
    trace = write_trace(tmp_path / "t", make_prompts(4, 40, BLOCK))
    options = ["--tokens-per-block", "8", "--gpu-blocks", "120", "--concurrency", "2", "--decode", "--verify"]
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "from kv_cache_manager_v2.cli.main import main\n"
        f"sys.exit(main(['replay', {trace!r}, *{options!r}, '--trace-block-size', '{BLOCK}', '--format', 'json']))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120, cwd=tmp_path, env=child_environment())
    plain = json.loads(done.stdout)
    fast = replay(capsys, trace, *options)
    for report in (plain, fast):
        del report["wall_seconds"], report["requests_per_second"]
    assert plain == fast
