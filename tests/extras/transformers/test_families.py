"""Each family of models over the pages: every logit is equal to the bit to that over transformers' own cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.extras.transformers.models import make_model, random_tokens
from tests.extras.transformers.rig import MIB, Pair, open_store, spoil_gpu

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("schedule", ["eager", "threads", "random"])
def test_every_logit_is_equal_with_reuse_and_suspension(family: str, schedule: str, tmp_path: Path) -> None:
    """Prefill in chunks, decode, a second turn on the whole first one, and steps with the pages on host and disk before each."""
    model = make_model(family)
    prompt = random_tokens(75)
    with open_store(model, schedule, (str(tmp_path), 64 * MIB)) as store:
        first = Pair(store, prompt)
        first.forward(prompt[:, :40])
        answer = first.decode(first.forward(prompt[:, 40:]), 6)
        first.paged.close()

        turn = torch.cat([prompt, answer, random_tokens(20, seed=1)], dim=1)
        second = Pair(store, turn, first.copy_of_own())
        assert second.paged.num_reused_tokens == [81]
        token = second.forward(turn[:, 81:])
        for _step in range(3):
            second.paged.suspend()
            spoil_gpu(store)
            token = second.forward(token)
        movement = store.manager.movement
        assert movement.pages_moved(0, 1) > 0 or movement.pages_moved(0, 2) > 0
