"""The example's model and its proof: what makes "equal to the bit" mean something."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from serve_tiny_llm import make_config
from tiny_llm.beams import BeamSearch
from tiny_llm.contiguous import ContiguousView
from tiny_llm.engine import ComputedChunk
from tiny_llm.model import HYBRID_SHAPE, Chunk, FloatArray, ModelShape, TinyLlama
from tiny_llm.proof import compare
from tiny_llm.workload import make_workload

from kv_cache_manager_v2.layout.pools import build_layout

SHAPE = ModelShape()
LENGTH = 150  # tokens; more than twice the window


@pytest.fixture(scope="module", params=[SHAPE, HYBRID_SHAPE], ids=["llama", "hybrid"])
def model(request: pytest.FixtureRequest) -> TinyLlama:
    shape: ModelShape = request.param
    return TinyLlama(shape, 7)


def tokens_of(seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, SHAPE.vocabulary, LENGTH)]


def logits_in_chunks(model: TinyLlama, tokens: list[int], cuts: list[int]) -> FloatArray:
    view = ContiguousView(model.shape, LENGTH)
    parts = [model.forward([Chunk(view, beg, tokens[beg:end])])[0] for beg, end in pairwise(cuts)]
    return np.concatenate(parts)


def bits(array: FloatArray) -> bytes:
    return array.tobytes()


def test_the_model_has_what_the_example_is_about() -> None:
    """Grouped queries, at least four layers, and a sliding window among full layers."""
    assert SHAPE.query_heads % SHAPE.kv_heads == 0
    assert SHAPE.query_heads > SHAPE.kv_heads
    assert SHAPE.num_layers >= 4
    assert SHAPE.windows[0] is None
    assert any(SHAPE.windows)


def test_the_hybrid_model_has_every_kind_of_layer_in_pages_of_one_size(tmp_path: Path) -> None:
    """So that keys and values, windows and states compete for the same slots."""
    layers = range(HYBRID_SHAPE.num_layers)
    kinds = ["recurrent" if layer in HYBRID_SHAPE.recurrent else HYBRID_SHAPE.windows[layer] for layer in layers]
    assert set(kinds) == {"recurrent", None, 64}
    layout = build_layout(make_config(HYBRID_SHAPE, str(tmp_path)))
    assert layout.num_pool_groups == 1
    assert len(layout.life_cycles) == 3


def test_how_a_prompt_is_cut_into_chunks_changes_no_bit(model: TinyLlama) -> None:
    whole = logits_in_chunks(model, tokens_of(1), [0, LENGTH])
    assert bits(whole) == bits(logits_in_chunks(model, tokens_of(1), list(range(LENGTH + 1))))
    assert bits(whole) == bits(logits_in_chunks(model, tokens_of(1), [0, 64, 65, 70, 100, LENGTH]))


def test_what_else_is_in_the_batch_changes_no_bit(model: TinyLlama) -> None:
    alone = logits_in_chunks(model, tokens_of(1), [0, LENGTH])
    views = [ContiguousView(model.shape, LENGTH) for _sequence in range(3)]
    together: list[FloatArray] = []
    for beg in range(0, LENGTH, 10):
        others = [Chunk(view, beg, tokens_of(seed)[beg : beg + 10]) for seed, view in ((2, views[1]), (3, views[2]))]
        together.append(model.forward([others[0], Chunk(views[0], beg, tokens_of(1)[beg : beg + 10]), others[1]])[1])
    assert bits(alone) == bits(np.concatenate(together))


def test_a_token_behind_the_windows_reaches_later_logits_through_the_full_layers(model: TinyLlama) -> None:
    """So a wrong page anywhere in the history is seen."""
    changed = tokens_of(1)
    changed[0] ^= 1
    before, after = (logits_in_chunks(model, tokens, [0, LENGTH])[-1] for tokens in (tokens_of(1), changed))
    assert bits(before) != bits(after)


def test_the_proof_accepts_the_same_bits_and_names_the_first_that_differ(model: TinyLlama) -> None:
    tokens = tokens_of(1)
    logits = logits_in_chunks(model, tokens, [0, LENGTH])
    # the first 40 tokens were "found in the cache": they are in no chunk
    chunks = [ComputedChunk(5, 40, tokens[40:100], logits[40:100]), ComputedChunk(5, 100, tokens[100:], logits[100:].copy())]
    result = compare(model, chunks, {5: tokens})
    assert (result.chunks, result.logits, result.different) == (2, 110 * SHAPE.vocabulary, 0)
    chunks[1].logits[3, 9] = np.nextafter(chunks[1].logits[3, 9], np.float32(100))
    result = compare(model, chunks, {5: tokens})
    assert result.different == 1
    assert result.first_difference.startswith("conversation 5, position 103, logit 9: ")


def test_the_proof_computes_each_hypothesis_from_those_that_it_goes_on_from(model: TinyLlama) -> None:
    tokens = tokens_of(1)
    prompt = tokens[:100]
    chunks = [ComputedChunk(5, 0, prompt, logits_in_chunks(model, prompt, [0, 100]))]
    steps: list[tuple[tuple[int, ...], int]] = [((), 5), ((), 6), ((6,), 7), ((5,), 9), ((6, 7), 1), ((6, 7), 2)]
    for branch, token in steps:
        path = [*prompt, *branch, token]
        chunks.append(ComputedChunk(5, len(path) - 1, [token], logits_in_chunks(model, path, [0, len(path)])[-1:], branch))
    chunks.append(ComputedChunk(5, 100, tokens[100:], logits_in_chunks(model, tokens, [0, LENGTH])[100:]))
    assert compare(model, chunks, {5: tokens}).different == 0
    chunks[3].logits[0, 0] += 1
    assert compare(model, chunks, {5: tokens}).different == 1


def test_a_beam_search_follows_the_likeliest_hypotheses() -> None:
    """Two beams over three tokens; probabilities by hand."""
    search = BeamSearch(np.log(np.array([0.6, 0.3, 0.1], dtype=np.float32)), 2, 3)
    assert [hypothesis.tokens for hypothesis in search.hypotheses] == [(0,), (1,)]
    assert search.take_order() == [0, 1]
    search.advance([np.log(np.array(row, dtype=np.float32)) for row in ([0.4, 0.35, 0.25], [0.9, 0.05, 0.05])])
    # 0.6 * 0.4 = 0.24, 0.6 * 0.35 = 0.21, 0.3 * 0.9 = 0.27
    assert [hypothesis.tokens for hypothesis in search.hypotheses] == [(1, 0), (0, 0)]
    assert search.take_order() == [1, 0]
    assert search.take_order() == [0, 1], "moved already"
    search.advance([np.log(np.array(row, dtype=np.float32)) for row in ([0.5, 0.25, 0.25], [0.1, 0.1, 0.8])])
    assert [hypothesis.tokens for hypothesis in search.hypotheses] == [(0, 0, 2), (1, 0, 0)]
    assert search.hypotheses[0].score == pytest.approx(np.log(0.24 * 0.8))
    assert search.done
    assert search.parents == [1, 0]


def test_a_workload_follows_from_its_seed_and_shares_system_prompts() -> None:
    first, again, other = make_workload(3, 6, 4), make_workload(3, 6, 4), make_workload(4, 6, 4)
    assert first == again
    assert first != other
    assert first[0].messages[0][:150] == first[3].messages[0][:150]
    assert first[0].messages[0][:150] != first[1].messages[0][:150]
