"""`model.generate_batch` over the manager gives what `model.generate` gives, and reuses prefixes under pressure."""

from __future__ import annotations

import os
import re
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api

from kv_cache_manager_v2 import ConfigError
from kv_cache_manager_v2.extras.transformers import install_continuous_batching
from kv_cache_manager_v2.extras.transformers.continuous_batching import LayerKind
from tests.extras.transformers.models import make_model, random_tokens
from tests.extras.transformers.rig import MIB

pytestmark = pytest.mark.torch

NEW = 8


def greedy(**options: object) -> GenerationConfig:
    return GenerationConfig(**{"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0, **options})


def batch(model: PreTrainedModel, prompts: list[list[int]], config: GenerationConfig | None = None) -> list[list[int]]:
    """The tokens that continuous batching generates for each prompt."""
    limits = ContinuousBatchingConfig(max_batch_tokens=256, safety_margin=0.0, cpu_offload_space=0.0, use_cuda_graph=False)
    outputs = model.generate_batch(prompts, generation_config=config or greedy(), continuous_batching_config=limits, warmup=False)
    assert [output.error for output in outputs.values()] == [None] * len(outputs)
    return [outputs[key].generated_tokens for key in sorted(outputs, key=lambda key: int(re.findall(r"\d+", key)[0]))]


def plain(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """What `generate` makes of the prompts, padded on the left."""
    columns = max(map(len, prompts))
    ids = torch.tensor([[0] * (columns - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (columns - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    tokens = model.generate(ids, attention_mask=mask, generation_config=greedy())
    found: list[list[int]] = tokens[:, columns:].tolist()
    return found


def random_prompts(count: int) -> list[list[int]]:
    """Prompts of different lengths, of which half begin with the same 90 tokens, and half with 90 others."""
    common = [random_tokens(90, seed=seed)[0].tolist() for seed in (1, 2)]
    return [common[number % 2] + random_tokens(40 + number, seed=number)[0].tolist() for number in range(count)]


FAMILIES = ("gemma3", "llama") if os.environ.get("KVCM_FAMILIES") == "all" else ("gemma3",)


@pytest.mark.parametrize("attention", FAMILIES)
def test_two_turns_of_sixty_requests_are_equal_under_pressure(
    attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests starve and begin again. The second turn finds the first one, of which most has left the GPU."""
    starved: list[str] = []
    count_blocks = LayerKind.needs_new_blocks

    def note(kind: LayerKind, request_id: str, past_length: int, query_length: int) -> int:
        starved.append(request_id)
        return count_blocks(kind, request_id, past_length, query_length)

    monkeypatch.setattr(LayerKind, "needs_new_blocks", note)
    model, prompts = make_model(attention), random_prompts(60)
    with install_continuous_batching(model, gpu_bytes=4 * MIB, host_bytes=8 * MIB, disk=(str(tmp_path), 256 * MIB)) as batching:
        answers = batch(model, prompts)
        assert answers == plain(model, prompts)
        assert starved
        before = batching.num_reused_tokens
        turn = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(prompts, answers, strict=True)]
        assert batch(model, turn) == plain(model, turn)
        cached = sum(map(len, prompts)) + (NEW - 1) * len(prompts)
        assert batching.num_reused_tokens - before > 0.9 * cached
        movement = batching.manager.movement
        assert movement.pages_moved(0, 1) > 0
        assert movement.pages_moved(1, 0) + movement.pages_moved(2, 0) > 0
        batching.manager.check_invariants()


def test_samples_of_a_prompt_fork_its_request() -> None:
    """Samples of the most likely token are equal to each other and to `generate`."""
    model, prompts = make_model("gemma3"), random_prompts(3)
    with install_continuous_batching(model, gpu_bytes=8 * MIB) as batching:
        outputs = batch(model, prompts, greedy(num_return_sequences=2, do_sample=True, top_k=1))
        assert sorted(outputs) == sorted(answer for answer in plain(model, prompts) for _sample in range(2))
        batching.manager.check_invariants()


def test_requests_of_different_scopes_share_nothing() -> None:
    """`scope_of` is asked for each request."""
    model, prompts = make_model("gemma3"), random_prompts(1)
    scopes = iter("aab")
    with install_continuous_batching(model, gpu_bytes=8 * MIB, scope_of=lambda _request: (None, next(scopes))) as batching:
        reused = []
        for _call in range(3):
            before = batching.num_reused_tokens
            batch(model, prompts)
            reused.append(batching.num_reused_tokens - before)
    assert reused == [0, 129, 0]


def test_only_the_model_that_it_was_installed_for_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model gets transformers' own cache; after `close()` every model does."""
    own = MagicMock()
    monkeypatch.setattr(continuous_api, "PagedAttentionCache", own)
    arguments = (ContinuousBatchingConfig(), torch.device("cpu"), None, torch.float32)
    with install_continuous_batching(make_model("gemma3"), gpu_bytes=8 * MIB) as batching:
        assert continuous_api.PagedAttentionCache(make_model("llama").config, *arguments) is own.return_value
        assert continuous_api.PagedAttentionCache(make_model("gemma3").config, *arguments) is batching.caches[0]
    assert continuous_api.PagedAttentionCache is own
    with pytest.raises(ConfigError, match="recurrent"):
        install_continuous_batching(make_model("falcon_h1"), gpu_bytes=8 * MIB)
    assert continuous_api.PagedAttentionCache is own
