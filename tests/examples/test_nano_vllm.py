"""nano-vllm's block manager over ours, in an engine of that shape, or in nano-vllm itself if NANO_VLLM names a checkout."""

from __future__ import annotations

import os
import random

import pytest
from engines.nano_vllm import KvcmBlockManager
from engines.nano_vllm import Sequence as Managed

from tests.examples.nano_engine import Outcome, Scheduler, Sequence, Work, real_engine, serve

BLOCK = 16
MAX_SEQS = 64
BUDGET = 512


def workload(kind: str) -> Work:
    rng = random.Random(kind)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(50000) for _ in range(number)]

    if kind == "shared heads":
        heads = [tokens(100) for _ in range(4)]
        return [(rng.randrange(20), heads[i % 4] + tokens(rng.randrange(5, 60)), rng.randrange(2, 60)) for i in range(60)]
    if kind == "equal prompts":
        prompts = [tokens(rng.choice([48, 64, 65, 80])) for _ in range(15)]
        return [(rng.randrange(8), prompts[i % 15], 40) for i in range(45)]
    return [(i, tokens(rng.randrange(10, 700)), rng.randrange(2, 60)) for i in range(30)]


class CheckedManager(KvcmBlockManager):
    """Compares each match with all prefixes that were ever committed."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.known: set[tuple[int, ...]] = set()

    def can_allocate(self, seq: Managed) -> int:
        found = super().can_allocate(seq)
        known = 0
        while known + 1 < seq.num_blocks and tuple(seq.token_ids[: (known + 1) * BLOCK]) in self.known:
            known += 1
        assert found in (-1, known)
        return found

    def hash_blocks(self, seq: Managed) -> None:
        super().hash_blocks(seq)
        for end in range(BLOCK, seq.num_cached_tokens + seq.num_scheduled_tokens + 1, BLOCK):
            self.known.add(tuple(seq.token_ids[:end]))


def run(manager: KvcmBlockManager, work: Work) -> Outcome:
    outcome = serve(Scheduler(manager, MAX_SEQS, BUDGET), Sequence, BLOCK, work)
    assert not manager.caches
    assert not manager.matches
    manager.manager.check_invariants()
    manager.manager.shutdown()
    return outcome


@pytest.mark.parametrize("kind", ["shared heads", "equal prompts", "long prompts"])
def test_every_position_that_attention_reads_is_right(kind: str) -> None:
    """With room for everything each committed prefix is found. With little room sequences are preempted and come back."""
    work = workload(kind)
    ample = run(CheckedManager(4096, BLOCK), work)
    tight = run(KvcmBlockManager(70, BLOCK), work)
    assert ample.wrong == tight.wrong == []
    assert ample.preempted == 0
    assert tight.preempted > 0
    assert (ample.cached > 0) == (kind != "long prompts")
    scheduled = sum([sum([tokens for _, tokens in batch]) for batch in ample.trace])
    assert scheduled + ample.cached == sum([len(prompt) + new_tokens - 1 for _, prompt, new_tokens in work])


@pytest.mark.skipif("NANO_VLLM" not in os.environ, reason="NANO_VLLM names no checkout of nano-vllm")
@pytest.mark.parametrize("kind", ["shared heads", "equal prompts", "long prompts"])
def test_nano_vllm_makes_the_same_schedule_with_either_manager(kind: str) -> None:
    work = workload(kind)
    ours, theirs = (
        serve(*real_engine(manager, 4096, BLOCK, MAX_SEQS, BUDGET), BLOCK, work) for manager in (KvcmBlockManager, None)
    )
    assert ours == theirs
    tight = serve(*real_engine(KvcmBlockManager, 70, BLOCK, MAX_SEQS, BUDGET), BLOCK, work)
    assert tight.wrong == []
    assert tight.preempted > 0
