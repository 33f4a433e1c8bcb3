"""The comparison: every logit of the served run against a run of the same chunks over private arrays.

Rule: the reference reuses nothing, moves nothing and shares nothing between conversations; equal means equal to the bit. A page
that was matched wrongly, moved wrongly, or read before it was written makes some logit differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tiny_llm.contiguous import ContiguousView
from tiny_llm.engine import ComputedChunk
from tiny_llm.model import Chunk, TinyLlama


@dataclass
class Comparison:
    """What was compared, and the first place of all that differs."""

    chunks: int = 0
    logits: int = 0
    different: int = 0
    first_difference: str = ""


def compare(model: TinyLlama, chunks: Sequence[ComputedChunk], histories: dict[int, list[int]]) -> Comparison:
    """Compute all chunks again, conversation by conversation, and compare the logits' bits.

    `histories` are the conversations' tokens. What the served run found in the cache instead of computing it is computed here.
    """
    result = Comparison()
    for conversation, tokens in histories.items():
        view = ContiguousView(model.shape, len(tokens))
        computed = 0  # tokens whose keys and values the view has
        for chunk in chunks:
            if chunk.conversation != conversation:
                continue
            end = chunk.beg + len(chunk.tokens)
            assert chunk.tokens == tokens[chunk.beg : end]
            if computed < chunk.beg:
                model.forward([Chunk(view, computed, tokens[computed : chunk.beg])])
            (expected,) = model.forward([Chunk(view, chunk.beg, chunk.tokens)])
            computed = max(computed, end)
            result.chunks += 1
            result.logits += expected.size
            wrong = chunk.logits.view(np.int32) != expected.view(np.int32)
            if wrong.any():
                result.different += int(wrong.sum())
                if not result.first_difference:
                    token, word = (int(axis[0]) for axis in np.nonzero(wrong))
                    result.first_difference = (
                        f"conversation {conversation}, position {chunk.beg + token}, logit {word}: "
                        f"{chunk.logits[token, word]!s} served, {expected[token, word]!s} expected"
                    )
    return result
