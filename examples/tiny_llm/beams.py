"""Beam search: the likeliest continuations of a prompt, several at a time, all one token longer after each step.

Rule: this decides only which hypotheses go on, from their logits; where their keys, values and states lie is the engine's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tiny_llm.model import FloatArray


@dataclass(frozen=True)
class Hypothesis:
    """One continuation of the prompt. Its last token has been chosen but not computed."""

    tokens: tuple[int, ...]
    score: float  # log probability of all its tokens


class BeamSearch:
    """The best `width` hypotheses, the best one first; hypothesis b is computed by beam b."""

    def __init__(self, prompt_logits: FloatArray, width: int, num_tokens: int) -> None:
        """Start from the logits of the prompt's last token. `num_tokens` is how long the hypotheses get, at least 2."""
        assert num_tokens > 1
        self.width = width
        self.num_tokens = num_tokens
        self.hypotheses: list[Hypothesis] = []
        self.parents: list[int] = []  # by beam: the beam that has computed all of its hypothesis but the last token
        self._choose([Hypothesis((), 0.0)], [prompt_logits])
        self.parents = list(range(width))  # the beams begin as copies of the prompt's end

    @property
    def done(self) -> bool:
        return len(self.hypotheses[0].tokens) == self.num_tokens

    def advance(self, logits: Sequence[FloatArray]) -> None:
        """Go on from the logits of each hypothesis' last token."""
        self._choose(self.hypotheses, logits)

    def take_order(self) -> list[int]:
        """Return the parents and reset them. The caller must copy pages and states so that each beam has its own hypothesis."""
        order = self.parents
        self.parents = list(range(self.width))
        return order

    def _choose(self, hypotheses: Sequence[Hypothesis], logits: Sequence[FloatArray]) -> None:
        scores = np.array([hypothesis.score for hypothesis in hypotheses])[:, None] + _log_softmax(np.stack(logits))
        best = np.argsort(-scores, axis=None, kind="stable")[: self.width]
        chosen = [(int(index) // scores.shape[1], int(index) % scores.shape[1]) for index in best]
        self.parents = [parent for parent, _token in chosen]
        self.hypotheses = [
            Hypothesis((*hypotheses[parent].tokens, token), float(scores[parent, token])) for parent, token in chosen
        ]


def _log_softmax(logits: FloatArray) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Rows of log probabilities, in double precision."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), dtype=np.float64)
