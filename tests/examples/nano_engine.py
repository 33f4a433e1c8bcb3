"""An engine of nano-vllm's shape around a block manager, and a worker that notes what lies at every position.

The scheduler makes the calls that nano-vllm's makes, in that order. NANO_VLLM=DIRECTORY names a checkout whose own scheduler and
sequences are used instead. The worker writes a fingerprint of the prefix for each token of a step, and checks what attention reads.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Protocol, cast

from engines.nano_vllm import Sequence as Managed

_numbers = count()
_MASK = (1 << 61) - 1


class BlockManager(Protocol):
    def can_allocate(self, seq: Managed) -> int: ...
    def allocate(self, seq: Managed, num_cached_blocks: int) -> None: ...
    def deallocate(self, seq: Managed) -> None: ...
    def can_append(self, seq: Managed) -> bool: ...
    def may_append(self, seq: Managed) -> None: ...
    def hash_blocks(self, seq: Managed) -> None: ...


class Sequence:
    block_size = 16

    def __init__(self, tokens: list[int], new_tokens: int) -> None:
        self.seq_id = next(_numbers)
        self.token_ids = list(tokens)
        self.block_table: list[int] = []
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0
        self.goal = len(tokens) + new_tokens

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        return -(-len(self.token_ids) // self.block_size)


class Scheduler:
    """Prompts come first. A step of single tokens preempts the youngest sequence when a page is short."""

    def __init__(self, manager: BlockManager, max_seqs: int, budget: int) -> None:
        self.block_manager = manager
        self.max_seqs = max_seqs
        self.budget = budget
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def schedule(self) -> tuple[list[Sequence], bool]:
        batch = self._prompts()
        return (batch, True) if batch else (self._single_tokens(), False)

    def _prompts(self) -> list[Sequence]:
        batch: list[Sequence] = []
        left = self.budget
        while self.waiting and left > 0 and len(batch) < self.max_seqs:
            seq = self.waiting[0]
            admitted = bool(seq.block_table)
            cached = 0 if admitted else self.block_manager.can_allocate(seq)
            if cached < 0:
                break
            todo = len(seq) - (seq.num_cached_tokens if admitted else cached * seq.block_size)
            if batch and todo > left:  # only the first of a batch is computed in parts
                break
            if not admitted:
                self.block_manager.allocate(seq, cached)
            seq.num_scheduled_tokens = min(todo, left)
            left -= seq.num_scheduled_tokens
            if seq.num_scheduled_tokens == todo:
                self.running.append(self.waiting.popleft())
            batch.append(seq)
        return batch

    def _single_tokens(self) -> list[Sequence]:
        batch: list[Sequence] = []
        while self.running and len(batch) < self.max_seqs:
            seq = self.running.popleft()
            while not self.block_manager.can_append(seq):
                victim = self.running.pop() if self.running else seq
                self.preempt(victim)
                if victim is seq:
                    break
            else:
                self.block_manager.may_append(seq)
                seq.num_scheduled_tokens = 1
                batch.append(seq)
        self.running.extendleft(reversed(batch))
        return batch

    def preempt(self, seq: Sequence) -> None:
        self.block_manager.deallocate(seq)
        self.waiting.appendleft(seq)

    def postprocess(self, seqs: list[Sequence], token_ids: list[int], is_prefill: bool) -> None:
        for seq, token in zip(seqs, token_ids, strict=True):
            self.block_manager.hash_blocks(seq)
            seq.num_cached_tokens += seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0
            if seq.num_cached_tokens == len(seq):
                seq.token_ids.append(token)
                if len(seq) == seq.goal:
                    self.block_manager.deallocate(seq)
                    self.running.remove(seq)


@dataclass
class Worker:
    """The bytes of the pages: a fingerprint of the prefix at each position that was computed."""

    block_size: int
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    marks: dict[int, list[int]] = field(default_factory=dict)  # by sequence: the fingerprint of each prefix
    wrong: list[tuple[int, int]] = field(default_factory=list)  # (sequence, position) of reads that found others

    def run(self, batch: list[Sequence], is_prefill: bool) -> None:
        """Write all positions of the step, as a kernel writes keys and values, then read all that attention reads."""
        ends: list[int] = []
        for seq in batch:
            begin = seq.num_cached_tokens if is_prefill else len(seq) - 1
            ends.append(begin + seq.num_scheduled_tokens)
            marks = self.marks.setdefault(seq.seq_id, [7])
            while len(marks) <= ends[-1]:
                marks.append((marks[-1] * 1000003 + seq.token_ids[len(marks) - 1] + 1) & _MASK)
            for position in range(begin, ends[-1]):
                self.memory[self._place(seq, position)] = marks[position + 1]
        for seq, end in zip(batch, ends, strict=True):
            marks = self.marks[seq.seq_id]
            for position in range(end):
                if self.memory.get(self._place(seq, position)) != marks[position + 1]:
                    self.wrong.append((seq.seq_id, position))

    def _place(self, seq: Sequence, position: int) -> tuple[int, int]:
        return seq.block_table[position // self.block_size], position % self.block_size


@dataclass
class Outcome:
    trace: list[list[tuple[int, int]]] = field(default_factory=list)  # by step: (number of the request, its tokens)
    cached: int = 0  # tokens that requests found when they began
    preempted: int = 0
    wrong: list[tuple[int, int]] = field(default_factory=list)


Work = list[tuple[int, list[int], int]]  # (step in which it comes, prompt, new tokens)


def serve(scheduler: Scheduler, make: type[Sequence], block_size: int, work: Work) -> Outcome:
    """Serve all requests. A token depends on the sequence that it follows, so equal sequences stay equal."""
    outcome = Outcome()
    worker = Worker(block_size, wrong=outcome.wrong)
    numbers: dict[int, int] = {}
    preempt = scheduler.preempt

    begun: set[int] = set()

    def counted(seq: Sequence) -> None:
        outcome.preempted += 1
        begun.discard(seq.seq_id)
        preempt(seq)

    vars(scheduler)["preempt"] = counted
    waiting = sorted(enumerate(work), key=lambda item: item[1][0], reverse=True)
    step = 0
    while waiting or not scheduler.is_finished():
        while waiting and waiting[-1][1][0] <= step:
            number, (_, prompt, new_tokens) = waiting.pop()
            seq = make(prompt, new_tokens)
            numbers[seq.seq_id] = number
            scheduler.add(seq)
        step += 1
        if scheduler.is_finished():
            continue
        batch, is_prefill = scheduler.schedule()
        outcome.trace.append([(numbers[seq.seq_id], seq.num_scheduled_tokens) for seq in batch])
        outcome.cached += sum([seq.num_cached_tokens for seq in batch if seq.seq_id not in begun])
        begun.update([seq.seq_id for seq in batch])
        worker.run(batch, is_prefill)
        tokens = [(sum(seq.token_ids[-3:]) * 31 + len(seq) * 7919) % 50000 for seq in batch]
        scheduler.postprocess(batch, tokens, is_prefill)
    return outcome


def real_engine(
    manager: type[BlockManager] | None, num_blocks: int, block_size: int, max_seqs: int, budget: int
) -> tuple[Scheduler, type[Sequence]]:
    """The scheduler and the sequences of the checkout that NANO_VLLM names, with this block manager; None: with its own."""
    package = ModuleType("nanovllm")  # its own __init__ needs a GPU
    package.__path__ = [str(Path(os.environ["NANO_VLLM"]) / "nanovllm")]
    sys.modules.setdefault("nanovllm", package)
    theirs = importlib.import_module("nanovllm.engine.block_manager")
    scheduling = importlib.import_module("nanovllm.engine.scheduler")
    sequences = importlib.import_module("nanovllm.engine.sequence")
    sampling = importlib.import_module("nanovllm.sampling_params")
    sequences.Sequence.block_size = block_size
    vars(scheduling)["BlockManager"] = manager or theirs.BlockManager
    config = SimpleNamespace(
        max_num_seqs=max_seqs,
        max_num_batched_tokens=budget,
        eos=-1,
        kvcache_block_size=block_size,
        num_kvcache_blocks=num_blocks,
    )

    def make(tokens: list[int], new_tokens: int) -> Sequence:
        return cast(Sequence, sequences.Sequence(tokens, sampling.SamplingParams(max_tokens=new_tokens, ignore_eos=True)))

    return scheduling.Scheduler(config), cast("type[Sequence]", make)
