"""A model on a GPU has its pages there."""

from __future__ import annotations

import copy

import pytest
import torch

from kv_cache_manager_v2.extras.transformers import PagedStore
from tests.extras.transformers.models import make_model, random_tokens
from tests.extras.transformers.rig import MIB, Pair

pytestmark = [pytest.mark.torch, pytest.mark.cuda]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_every_logit_is_equal_on_a_gpu(family: str) -> None:
    """On torch's current stream, with suspension before each step."""
    model = copy.deepcopy(make_model(family)).to("cuda")
    prompt = random_tokens(75).to("cuda")
    with PagedStore(model, gpu_bytes=16 * MIB, host_bytes=16 * MIB) as store:
        pair = Pair(store, prompt)
        token = pair.forward(prompt[:, :40])
        token = pair.forward(prompt[:, 40:])
        for _step in range(3):
            pair.paged.suspend()
            token = pair.forward(token)
