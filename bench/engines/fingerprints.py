"""A worker without a model: it keeps block tables as vLLM's workers do, and notes what lies at every position.

For each token of a step it writes a fingerprint of all tokens up to there, and then checks each position that attention would read:
a page that is handed out twice, exchanged, or read before it is computed shows as a wrong fingerprint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

_FACTOR: Final = 1000003
_MASK: Final = (1 << 62) - 1


class NewRequest(Protocol):
    req_id: str
    prompt_token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


class KnownRequests(Protocol):
    req_ids: list[str]
    resumed_req_ids: set[str]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]


class StepPlan(Protocol):
    """What is read of vLLM's `SchedulerOutput`."""

    scheduled_new_reqs: list[NewRequest]
    scheduled_cached_reqs: KnownRequests
    num_scheduled_tokens: dict[str, int]
    finished_req_ids: set[str]


class _Sequence:
    """A request as the worker knows it."""

    def __init__(self, tokens: list[int]) -> None:
        self.prompt = len(tokens)
        self.tokens = list(tokens)
        self.marks: list[int] = []  # the fingerprint of each prefix
        self.tables: list[list[int]] = []
        self.computed = 0

    def extend_marks(self, end: int) -> None:
        marks = self.marks
        mark = marks[-1] if marks else 7
        for token in self.tokens[len(marks) : end]:
            mark = (mark * _FACTOR + token + 1) & _MASK
            marks.append(mark)


class Worker:
    """One memory for all layer groups. `windows` has the window of each; None: full attention."""

    def __init__(self, num_blocks: int, block_size: int, windows: Sequence[int | None], checked: bool = True) -> None:
        self.block_size = block_size
        self.windows = windows
        self.checked = checked
        self.memory: npt.NDArray[np.int64] = np.zeros((num_blocks if checked else 1, block_size), np.int64)
        self.sequences: dict[str, _Sequence] = {}
        self.errors: list[str] = []
        self.steps = 0

    def run(self, plan: StepPlan) -> dict[str, list[int]]:
        """Execute a step. The token that each request samples; none for a prompt that is not complete."""
        self.steps += 1
        self._take_tables(plan)
        ends: dict[str, int] = {}
        written: set[tuple[int, int]] = set()
        for name, count in plan.num_scheduled_tokens.items():
            sequence = self.sequences[name]
            ends[name] = sequence.computed + count
            if ends[name] > len(sequence.tokens):
                self.errors.append(f"step {self.steps}: {name} computes {ends[name]} tokens of {len(sequence.tokens)}")
            if self.checked:
                self._write(name, sequence, ends[name], written)
        if self.checked:
            for name, end in ends.items():
                self._check(name, self.sequences[name], end)
        return {name: self._sample(self.sequences[name], end) for name, end in ends.items()}

    def _take_tables(self, plan: StepPlan) -> None:
        """Begin, resume, extend and end block tables. Nothing is ever replaced within a table."""
        for name in plan.finished_req_ids:
            self.sequences.pop(name, None)
        for new in plan.scheduled_new_reqs:  # one that was preempted comes as new, too
            sequence = self.sequences.setdefault(new.req_id, _Sequence(new.prompt_token_ids))
            sequence.tables = [list(ids) for ids in new.block_ids]
            sequence.computed = new.num_computed_tokens
        known = plan.scheduled_cached_reqs
        for name, blocks, computed in zip(known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True):
            sequence = self.sequences[name]
            sequence.computed = computed
            if blocks is not None and name in known.resumed_req_ids:
                sequence.tables = [list(ids) for ids in blocks]
            elif blocks is not None:
                for table, ids in zip(sequence.tables, blocks, strict=True):
                    table.extend(ids)

    def _write(self, name: str, sequence: _Sequence, end: int, written: set[tuple[int, int]]) -> None:
        """Write the positions that the step computes, in each layer group."""
        size = self.block_size
        sequence.extend_marks(end)
        for group, table in enumerate(sequence.tables):
            for position in range(sequence.computed, end):
                block, offset = table[position // size], position % size
                if block <= 0 or (block, offset) in written:
                    what = "no page" if block <= 0 else f"block {block}, which another request writes in this step"
                    self.errors.append(f"step {self.steps}: {name} writes position {position} of group {group} to {what}")
                written.add((block, offset))
                self.memory[block, offset] = sequence.marks[position]

    def _check(self, name: str, sequence: _Sequence, end: int) -> None:
        """Compare all positions that the step's queries read."""
        size = self.block_size
        for group, window in enumerate(self.windows):
            begin = 0 if window is None else max(0, sequence.computed + 1 - window)
            first = begin // size
            blocks = np.array(sequence.tables[group][first : -(-end // size)])
            found = self.memory[blocks].reshape(-1)[begin - first * size : end - first * size]
            wrong = np.flatnonzero(found != np.array(sequence.marks[begin:end]))
            if blocks.min() <= 0 or len(wrong):
                self.errors.append(
                    f"step {self.steps}: {name} reads {len(wrong)} wrong positions of group {group}, {begin} to {end}"
                )

    def _sample(self, sequence: _Sequence, end: int) -> list[int]:
        """A token that depends on those before, so equal sequences stay equal."""
        if end < len(sequence.tokens):
            return []
        tokens = sequence.tokens
        tokens.append((sum(tokens[-3:]) * 31 + len(tokens) * 7919) % 50000)
        return [tokens[-1]]
