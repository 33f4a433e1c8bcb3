"""The example's model and its proof: what makes "equal to the bit" mean something."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from tiny_llm.contiguous import ContiguousView
from tiny_llm.engine import ComputedChunk
from tiny_llm.model import Chunk, FloatArray, ModelShape, TinyLlama
from tiny_llm.proof import compare
from tiny_llm.workload import make_workload

SHAPE = ModelShape()
LENGTH = 150  # tokens; more than twice the window


@pytest.fixture(scope="module")
def model() -> TinyLlama:
    return TinyLlama(SHAPE, 7)


def tokens_of(seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, SHAPE.vocabulary, LENGTH)]


def logits_in_chunks(model: TinyLlama, tokens: list[int], cuts: list[int]) -> FloatArray:
    view = ContiguousView(SHAPE, LENGTH)
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


def test_how_a_prompt_is_cut_into_chunks_changes_no_bit(model: TinyLlama) -> None:
    whole = logits_in_chunks(model, tokens_of(1), [0, LENGTH])
    assert bits(whole) == bits(logits_in_chunks(model, tokens_of(1), list(range(LENGTH + 1))))
    assert bits(whole) == bits(logits_in_chunks(model, tokens_of(1), [0, 64, 65, 70, 100, LENGTH]))


def test_what_else_is_in_the_batch_changes_no_bit(model: TinyLlama) -> None:
    alone = logits_in_chunks(model, tokens_of(1), [0, LENGTH])
    views = [ContiguousView(SHAPE, LENGTH) for _sequence in range(3)]
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


def test_a_workload_follows_from_its_seed_and_shares_system_prompts() -> None:
    first, again, other = make_workload(3, 6, 4), make_workload(3, 6, 4), make_workload(4, 6, 4)
    assert first == again
    assert first != other
    assert first[0].messages[0][:150] == first[3].messages[0][:150]
    assert first[0].messages[0][:150] != first[1].messages[0][:150]
