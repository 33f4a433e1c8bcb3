"""The simulated engine: every request is served whole, the same on every run, and the arms are compared."""

from __future__ import annotations

import pytest

from bench.ab import Arm, report, totals
from bench.ab_worker import serve
from bench.conversations import OUTPUT_TOKENS, SYSTEM_TOKENS, Workload
from bench.engine import GPU_STEP_S


def test_turns_of_a_conversation_grow_by_the_answer_and_more() -> None:
    """Each prompt begins with the prompt and the answer of the turn before."""
    workload = Workload(3)
    turn = workload.follow(None)
    seen = 0
    for _i in range(50):
        following = workload.follow(turn)
        if following.conversation is turn.conversation:
            said = turn.prompt + turn.answer
            assert following.prompt[: len(said)] == said
            assert len(following.prompt) > len(said)
            seen += 1
        assert len(following.prompt) > SYSTEM_TOKENS
        assert OUTPUT_TOKENS[0] <= len(following.answer) <= OUTPUT_TOKENS[1]
        turn = following
    assert seen > 10


def test_equal_seeds_give_equal_requests() -> None:
    """Both arms serve the same requests."""
    first, second = Workload(5), Workload(5)
    one = two = None
    for _i in range(20):
        one, two = first.follow(one), second.follow(two)
        assert one.prompt == two.prompt
        assert one.answer == two.answer


def test_the_engine_serves_under_pressure_and_the_same_every_time() -> None:
    """Pages go to the host and come back, prefixes are reused, and a second run does exactly the same."""
    slot = 32 << 10  # bytes: few slots need large ones, since the GPU's memory comes in grains
    first = serve(150, 20, 1, slot)
    happened = first["happened"]
    assert isinstance(happened, dict)
    assert happened["requests"] >= 150
    assert happened["reused_tokens"] > 150 * SYSTEM_TOKENS // 2
    assert happened["pages_to_host"] > 0
    assert happened["pages_from_host"] > 0
    assert serve(150, 20, 1, slot)["happened"] == happened


def shift(scale: float) -> dict[str, object]:
    return {
        "happened": {"requests": 100, "steps": 3},
        "seconds": 3 * (GPU_STEP_S + scale),
        "schedule": [scale, 2 * scale, 3 * scale],
        "update": [scale / 2] * 3,
        "close": [scale / 4] * 3,
        "first_token": [0.02] * 10,
        "between_tokens": [GPU_STEP_S + scale] * 10,
    }


def test_the_table_compares_the_arms() -> None:
    """Times in ms, the change of the compiled arm against the interpreted one; shifts add up."""
    arms = {"pure": Arm(), "compiled": Arm()}
    for _i in range(2):
        arms["pure"].add(shift(0.010))
        arms["compiled"].add(shift(0.001))
    assert totals(arms["compiled"]) == {"requests": 200, "steps": 6}
    lines = {line[:28].strip(): line[28:].split() for line in report(arms).splitlines()[1:]}
    assert lines["schedule p90, ms"] == ["30.00", "3.00", "-90.0%"]
    assert lines["update p50, ms"] == ["5.00", "0.50", "-90.0%"]
    assert lines["inter-token latency p50, ms"] == ["21.50", "12.50", "-41.9%"]
    assert float(lines["requests per second"][0]) == pytest.approx(100 / 0.0645, rel=1e-3)
