"""The comparison: every logit of the served run against a run of the same chunks over private arrays.

Rule: the reference reuses nothing, moves nothing and shares nothing between conversations; equal means equal to the bit. A page
that was matched wrongly, moved wrongly, or read before it was written makes some logit differ. Each hypothesis of a beam search has
arrays of its own here, copied from those that it goes on from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tiny_llm.contiguous import ContiguousView
from tiny_llm.engine import ComputedChunk
from tiny_llm.model import Chunk, FloatArray, TinyLlama


@dataclass
class Comparison:
    """What was compared, and the first difference."""

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
        alone = _Alone(model, tokens)
        for chunk in chunks:
            if chunk.conversation != conversation:
                continue
            expected = alone.compute(chunk)
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


class _Alone:
    """One conversation computed by itself."""

    def __init__(self, model: TinyLlama, tokens: Sequence[int]) -> None:
        self._model = model
        self._tokens = tokens
        self._view = ContiguousView(model.shape, len(tokens))
        self._computed = 0  # tokens that the view has
        self._branches: dict[tuple[int, ...], ContiguousView] = {}  # of the present beam search: what follows the prompt
        self._branch_beg = -1  # where the prompt of the present beam search ends

    def compute(self, chunk: ComputedChunk) -> FloatArray:
        """The logits of a chunk."""
        if chunk.branch is None:
            return self._compute(chunk)
        beg = chunk.beg - len(chunk.branch)
        if self._branch_beg != beg:
            self._reach(beg)
            self._branch_beg = beg
            self._branches = {(): self._view}
        view = self._branches[chunk.branch].copy()
        self._branches[(*chunk.branch, *chunk.tokens)] = view
        (logits,) = self._model.forward([Chunk(view, chunk.beg, chunk.tokens)])
        return logits

    def _compute(self, chunk: ComputedChunk) -> FloatArray:
        end = chunk.beg + len(chunk.tokens)
        assert chunk.tokens == self._tokens[chunk.beg : end]
        self._reach(chunk.beg)
        (logits,) = self._model.forward([Chunk(self._view, chunk.beg, chunk.tokens)])
        self._computed = max(self._computed, end)
        return logits

    def _reach(self, position: int) -> None:
        """Compute tokens up to this position into the view; with recurrent states, exactly up to it."""
        if self._computed > position and self._model.shape.recurrent:
            self._view = ContiguousView(self._model.shape, len(self._tokens))
            self._computed = 0
        if self._computed < position:
            self._model.forward([Chunk(self._view, self._computed, self._tokens[self._computed : position])])
            self._computed = position
